"""PyTorch datasets of every kind become Examples."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from mycelia.engine.data import from_torch
from mycelia.engine.errors import DataError


class Mapped(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        item = self.items[index]
        if isinstance(item, Exception):
            raise item
        return item


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for i in count():
            yield torch.full((2,), float(i)), i % 3


def test_a_tensor_dataset_is_taken_whole() -> None:
    tensors = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0])
    examples = from_torch(TensorDataset(*tensors))
    assert examples.inputs.tolist() == tensors[0].tolist()
    assert examples.targets.tolist() == [0, 1, 0]
    assert len(from_torch(TensorDataset(*tensors), limit=2)) == 2


@pytest.mark.parametrize(
    ("item", "inputs", "targets"),
    [
        ((torch.zeros(2, dtype=torch.float64), 1), ("float32", (2,)), ("int64", ())),
        ((torch.zeros(2, dtype=torch.bfloat16), torch.tensor(1)), ("float32", (2,)), ("int64", ())),
        ((np.zeros(2, np.int32), np.float64(0.5)), ("int64", (2,)), ("float32", ())),
        (([1.0, 2.0], [1, 2]), ("float32", (2,)), ("int64", (2,))),
        ((0.5, True), ("float32", ()), ("int64", ())),
        ((Image.new("L", (6, 5)), 1), ("float32", (1, 5, 6)), ("int64", ())),
        ((Image.new("RGB", (6, 5)), 1), ("float32", (3, 5, 6)), ("int64", ())),
        (
            (torch.zeros(3, 5, 6, dtype=torch.uint8), torch.tensor([0.5])),
            ("float32", (3, 5, 6)),
            ("float32", ()),
        ),
    ],
)
def test_what_an_item_may_be(item: Any, inputs: Any, targets: Any) -> None:
    examples = from_torch(Mapped([item] * 4))
    assert (str(examples.inputs.dtype), examples.inputs.shape) == (inputs[0], (4, *inputs[1]))
    assert (str(examples.targets.dtype), examples.targets.shape) == (targets[0], (4, *targets[1]))


def test_clients_may_come_along() -> None:
    examples = from_torch(Mapped([(torch.zeros(2), 0, "ann"), (torch.zeros(2), 1, "bo")]))
    assert examples.clients is not None
    assert examples.clients.tolist() == ["ann", "bo"]


def test_iterables_and_wrappers() -> None:
    examples = from_torch(Endless(), limit=5)
    assert examples.inputs[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert examples.targets.tolist() == [0, 1, 2, 0, 1]
    parts = Mapped([(torch.tensor([float(i)]), i) for i in range(4)])
    joined = ConcatDataset([Subset(parts, [3, 1]), parts])
    assert from_torch(joined).targets.tolist() == [3, 1, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "has no items"),
        ([torch.zeros(2)], "row 0 is a Tensor"),
        ([(1, 2), (1, 2, 3)], "row 1 is a tuple of 3"),
        ([(1, 2, 3, 4)], "row 0 is a tuple of 4"),
        ([{"x": 1, "y": 2}], "row 0 is a dict"),
        ([(torch.zeros(2), 0), (torch.zeros(3), 0)], r"input of row 1 is float32 of shape \(3,\)\n.*\(2,\)"),
        ([(torch.zeros(2), 0), (torch.zeros(2), [0, 1])], "target of row 1"),
        ([([[1], [1, 2]], 0)], "input of row 0 is object"),
        ([(object(), 0)], "input of row 0 is object"),
        ([(0.0, "cat")], "targets are <U3"),
        ([(0.0, 1), RuntimeError("disk on fire")], "row 1 raised RuntimeError: disk on fire"),
    ],
)
def test_datasets_that_are_wrong(items: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_torch(Mapped(items))
