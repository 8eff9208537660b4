"""Any PyTorch dataset, or plain arrays, as Examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, TensorDataset

from mycelia.engine.data.examples import Array, Examples
from mycelia.engine.data.raw import Raw, normal_inputs, normal_targets
from mycelia.engine.errors import DataError

__all__ = ["from_torch", "to_raw"]


def from_torch(dataset: Any, *, limit: int | None = None) -> Examples:
    """Read a map-style or iterable dataset of (input, target) pairs into memory.

    uint8 images become float32 `[N, C, H, W]` in [0, 1], other inputs float32 or int64, targets int64 or
    float32. An item may also be (input, target, client).

    Args:
        dataset: has `__getitem__` and `__len__`, or `__iter__`.
        limit: read at most so many items; an endless iterable needs it.

    Raises:
        DataError: no items, an item of another form or shape, or one that raises; the message has the row.

    >>> from torch.utils.data import TensorDataset
    >>> from_torch(TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 0])))
    Examples(inputs float32[3, 2], targets int64[3])
    """
    who = type(dataset).__name__
    raw = _read(dataset, who, limit)
    return Examples(normal_inputs(raw.inputs, who), normal_targets(raw.targets, who), raw.clients)


def to_raw(value: Any, who: str) -> Raw:
    """The arrays of Examples, of a pair (inputs, targets), or of a PyTorch dataset."""
    if isinstance(value, Examples):
        return Raw(value.inputs, value.targets, value.clients)
    if is_pair_of_arrays(value):
        return Raw(_array(value[0]), _array(value[1]))
    if hasattr(value, "__getitem__") or hasattr(value, "__iter__"):
        return _read(value, who, None)
    raise DataError(
        f"a part is a {type(value).__name__}", rule="arrays, Examples or a PyTorch dataset", who=who
    )


def is_pair_of_arrays(value: Any) -> bool:
    """Whether it is (inputs, targets), not (train, test)."""
    kinds = (np.ndarray, torch.Tensor)
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(x, kinds) for x in value)


def _read(dataset: Any, who: str, limit: int | None) -> Raw:
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) in {2, 3}:
        return _raw([_array(tensor[:limit]) for tensor in dataset.tensors])
    columns: tuple[list[Array], ...] = ([], [], [])
    width = 0
    for row, item in enumerate(_items(dataset, who, limit)):
        if not isinstance(item, tuple | list) or len(item) not in {2, 3} or (row and len(item) != width):
            size = f" of {len(item)}" if hasattr(item, "__len__") else ""
            raise DataError(
                f"row {row} is a {type(item).__name__}{size}",
                rule="each item is (input, target), or each is (input, target, client)",
                who=who,
            )
        width = len(item)
        for column, what, value in zip(columns, ("input", "target", "client"), item, strict=False):
            array = _array(value)
            if array.dtype.kind not in "biufU" or (column and array.shape != column[0].shape):
                expected = f"shape {column[0].shape}, as row 0" if column else "a number or an array of them"
                raise DataError(
                    f"{what} of row {row} is {array.dtype} of shape {array.shape}", rule=expected, who=who
                )
            column.append(array)
    if width == 0:
        raise DataError("has no items", rule="at least one", who=who)
    return _raw([np.stack(column) for column in columns[:width]])


def _raw(columns: list[Array]) -> Raw:
    inputs, targets, *clients = columns
    return Raw(inputs, targets, clients[0] if clients else None)


def _items(dataset: Any, who: str, limit: int | None) -> Iterator[Any]:
    # An IterableDataset inherits a __getitem__ that only raises, and may have a __len__ of its own.
    indexed = not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__")
    rows: Iterable[Any] = range(len(dataset)) if indexed else dataset
    row = -1
    try:
        for row, item in enumerate(islice(rows, limit)):  # noqa: B007 - the error names the row
            yield dataset[item] if indexed else item
    except (DataError, GeneratorExit):
        raise
    except Exception as error:
        where = f"row {row}" if indexed else f"the row after {row}"
        raise DataError(f"{where} raised {type(error).__name__}: {error}", who=who) from error


def _array(value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype == torch.bfloat16 else value  # NumPy has no bfloat16
    try:
        return np.asarray(value)
    except ValueError:  # a ragged list
        return np.empty((), dtype=object)
