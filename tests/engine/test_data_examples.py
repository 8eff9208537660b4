"""Examples and Dataset: structure, hashes, files, and the checks that name part, row and value."""

import dataclasses
import math
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mycelia.engine.data import Dataset, Examples, holdout, standardise
from mycelia.engine.errors import DataError


def examples(n: int = 6, *, clients: bool = False) -> Examples:
    inputs = np.arange(n * 2, dtype=np.float32).reshape(n, 2)
    return Examples(
        inputs, np.arange(n) % 3, np.array([f"u{i % 2}" for i in range(n)], "U2") if clients else None
    )


def test_take_copies_in_the_order_asked_for() -> None:
    whole = examples(clients=True)
    part = whole.take([4, 0, 4])
    assert part.inputs.tolist() == [[8, 9], [0, 1], [8, 9]]
    assert part.targets.tolist() == [1, 0, 1]
    assert part.clients is not None
    assert part.clients.tolist() == ["u0", "u0", "u0"]
    assert not np.shares_memory(part.inputs, whole.inputs)
    assert len(whole.take([])) == 0
    assert whole.take([]).inputs.shape == (0, 2)


@pytest.mark.parametrize("indices", [[6], [-7], [0.5], [[0]], [True], "ab"])
def test_take_refuses_what_is_no_index(indices: Any) -> None:
    with pytest.raises(DataError, match=r"Examples\.take"):
        examples().take(indices)


def test_examples_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        examples().targets = np.zeros(6)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros((3, 2)), np.zeros(4)), "'inputs': 3, 'targets': 4"),
        ((np.zeros((3, 2)), np.zeros(3), np.array(["a", "b"])), "'clients': 2"),
        (([[0.0]], np.zeros(1)), "inputs are a list"),
        ((np.zeros(()), np.zeros(1)), r"inputs are float64 of shape \(\)"),
        ((np.array(["a"]), np.zeros(1)), "inputs are <U1"),
        ((np.zeros(1), np.array(["a"])), "targets are <U1"),
        ((np.zeros(1), np.array([None])), "targets are object"),
        ((np.zeros(1), np.zeros(1), np.zeros(1)), "integers or strings"),
        ((np.zeros(1), np.zeros(1), np.array([["a"]])), "clients have shape"),
    ],
)
def test_arrays_that_are_no_examples(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Examples(*arguments)


def test_the_hash_is_of_names_dtypes_shapes_and_bytes() -> None:
    whole = examples(2)
    text = b"inputs <f4 (2, 2)\n" + whole.inputs.tobytes() + b"targets <i8 (2,)\n" + whole.targets.tobytes()
    assert whole.sha256 == sha256(text).hexdigest()


def test_the_hash_sees_every_part_and_not_the_layout() -> None:
    base = examples(clients=True)
    assert base.clients is not None
    changed = [
        Examples(base.inputs + 1, base.targets, base.clients),
        Examples(base.inputs, base.targets[::-1], base.clients),
        Examples(base.inputs, base.targets, base.clients[::-1]),
        Examples(base.inputs, base.targets),
        Examples(base.inputs.astype(np.float64), base.targets, base.clients),
        Examples(base.inputs.reshape(6, 1, 2), base.targets, base.clients),
    ]
    assert len({base.sha256, *(other.sha256 for other in changed)}) == 7
    same = Examples(np.asfortranarray(base.inputs).astype(">f4"), base.targets[::-1][::-1], base.clients)
    assert same.sha256 == base.sha256
    assert examples(0).sha256 != examples(1).sha256


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("clients", [True, False])
@pytest.mark.parametrize("n", [0, 6])
def test_save_and_open(tmp_path: Path, mmap: bool, clients: bool, n: int) -> None:
    examples(3, clients=True).save(tmp_path / "set")
    saved = examples(n, clients=clients)
    saved.save(tmp_path / "set")
    opened = Examples.open(tmp_path / "set", mmap=mmap)
    assert opened.sha256 == saved.sha256
    assert (opened.clients is None) is (not clients)
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == [
        *(["clients.npy"] if clients else []),
        "inputs.npy",
        "targets.npy",
    ]


def test_a_mapped_array_is_a_tensor_without_copy_and_never_writes_to_the_file(tmp_path: Path) -> None:
    examples().save(tmp_path)
    opened = Examples.open(tmp_path)
    tensor = torch.from_numpy(opened.inputs)  # a read-only array would warn, and warnings are errors
    assert np.shares_memory(tensor.numpy(), opened.inputs)
    tensor.zero_()
    assert Examples.open(tmp_path).sha256 == examples().sha256


def test_a_process_that_has_the_old_files_mapped_keeps_them(tmp_path: Path) -> None:
    examples().save(tmp_path)
    opened = Examples.open(tmp_path)
    examples(1).save(tmp_path)
    assert opened.sha256 == examples().sha256


def test_another_process_reads_the_same(tmp_path: Path) -> None:
    examples(clients=True).save(tmp_path)
    code = "import sys; from mycelia.engine.data import Examples; print(Examples.open(sys.argv[1]).sha256)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == examples(clients=True).sha256


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"inputs\.npy: is missing"):
        Examples.open(tmp_path)
    examples().save(tmp_path)
    content = (tmp_path / "targets.npy").read_bytes()
    for damaged in (b"", content[:40], content[:-8], b"no array" * 30):
        (tmp_path / "targets.npy").write_bytes(damaged)
        for mmap in (True, False):
            with pytest.raises(DataError, match=r"targets\.npy: cannot be read"):
                Examples.open(tmp_path, mmap=mmap)
    np.save(tmp_path / "targets.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read"):
        Examples.open(tmp_path)


def dataset(
    inputs: Any = None, targets: Any = None, *, classes: int | None = 3, test: Examples | None = None
) -> Dataset:
    base = examples()
    train = Examples(
        base.inputs if inputs is None else np.array(inputs, np.float32),
        base.targets if targets is None else np.array(targets),
    )
    return Dataset("made", train, base if test is None else test, classes)


def test_a_dataset_that_is_right() -> None:
    whole = dataset()
    assert whole.input_shape == (2,)
    assert whole.sha256 == dataset().sha256 == dataclasses.replace(whole, name="other").sha256
    assert len({whole.sha256, dataset(classes=4).sha256, dataset(targets=[0] * 6).sha256}) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": [0, 1, 2, 3, 0, 1]}, r"made, train: row 3 has label 3\n.*0\.\.2"),
        ({"targets": [0, 1, -1, 0, 0, 0]}, "row 2 has label -1"),
        ({"targets": [0, 1, 2, 0, 0, 0.0]}, "targets are float64"),
        ({"inputs": np.zeros((0, 2)), "targets": np.zeros(0, int)}, "made, train: has no examples"),
        ({"inputs": [[0, 1]] * 4 + [[0, math.nan]] * 2}, "row 4 has input nan"),
        ({"inputs": [[0, 1]] * 5 + [[-math.inf, 0]]}, "row 5 has input -inf"),
        ({"inputs": np.zeros((6, 0))}, "sizes are at least 1"),
        ({"inputs": np.zeros((6, 3))}, "both parts have one shape"),
        ({"classes": None}, "regression takes floats"),
        ({"classes": 0}, "classes is 0"),
        ({"test": examples(0)}, "made, test: has no examples"),
    ],
)
def test_a_dataset_that_is_wrong(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        dataset(**arguments)


def test_regression_targets_are_checked() -> None:
    inputs = np.zeros((3, 1), np.float32)
    good = Examples(inputs, np.zeros(3, np.float32))
    with pytest.raises(DataError, match="made, test: row 1 has target nan"):
        Dataset("made", good, Examples(inputs, np.array([0, np.nan, 0], np.float32)), None)
    with pytest.raises(DataError, match="both parts have one shape and dtype"):
        Dataset("made", good, Examples(inputs, np.zeros(3)), None)


def test_names_go_with_classes() -> None:
    with pytest.raises(DataError, match="2 class names for 3 classes"):
        dataclasses.replace(dataset(), class_names=("a", "b"))


def test_standardise_uses_the_training_part() -> None:
    inputs = np.array([[1, 5], [3, 5], [5, 5], [7, 5]], np.float32)
    train = Examples(inputs, np.array([0, 2, 4, 6], np.float32))
    test = Examples(np.array([[4, 6]], np.float32), np.array([3], np.float32))
    scaled = standardise(Dataset("made", train, test, None))
    np.testing.assert_allclose(scaled.train.inputs[:, 0], np.array([-3, -1, 1, 3]) / math.sqrt(5), rtol=1e-6)
    np.testing.assert_array_equal(scaled.train.inputs[:, 1], 0)  # a constant column stays
    np.testing.assert_allclose(scaled.train.targets, np.array([-3, -1, 1, 3]) / math.sqrt(5), rtol=1e-6)
    assert (scaled.test.inputs.tolist(), scaled.test.targets.tolist()) == ([[0, 1]], [0])
    assert scaled.train.inputs.dtype == scaled.test.targets.dtype == np.float32
    labels = standardise(dataset())
    assert labels.train.targets.tolist() == dataset().train.targets.tolist()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(2, 6))
def test_a_holdout_is_stratified(labels: list[int], parts: int) -> None:
    targets = np.array(labels)
    train, test = holdout(targets, parts=parts)
    assert sorted([*train, *test]) == list(range(len(labels)))
    assert (train.tolist(), test.tolist()) == (sorted(train), sorted(test))
    for label in set(labels):
        share = int((targets[test] == label).sum())
        assert abs(share - labels.count(label) / parts) <= 1
        assert share < labels.count(label)
    assert len(test) <= round(len(labels) / parts)


def test_a_holdout_is_a_fifth_and_obeys_its_seed() -> None:
    targets = np.arange(1000) % 7
    train, test = holdout(targets)
    assert (len(train), len(test)) == (800, 200)
    np.testing.assert_array_equal(test, holdout(targets)[1])
    assert not np.array_equal(test, holdout(targets, seed=1)[1])
    real = holdout(np.linspace(0, 1, 1000))[1]
    assert (len(real), len(set(real))) == (200, 200)
