"""From what a source read to a checked Dataset: one form for inputs and targets, classes, the test part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mycelia.engine.data.examples import Array, Dataset, Examples
from mycelia.engine.data.split import holdout
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["Raw", "assemble", "normal_inputs", "normal_targets", "read_bytes", "standardise"]

_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Raw:
    """One part of a set as its source holds it; targets may be text.

    Args:
        inputs: `[N, …]`.
        targets: `[N, …]`.
        clients: `[N]` or None.
        class_names: names of integer labels, where the source says them.
    """

    inputs: Array
    targets: Array
    clients: Array | None = None
    class_names: tuple[str, ...] = ()


def assemble(name: str, train: Raw, test: Raw | None, *, classes: int | None = None) -> Dataset:
    """The checked set.

    Text labels are numbered in sorted order. Integer targets are classes, real ones regression.

    Args:
        name: the set's name.
        train: the training part, or the whole set when `test` is None.
        test: the test part; None: a stratified fifth of `train`, seed 0.
        classes: number of classes; 0: regression whatever the targets' type; None: found from the targets.

    Raises:
        DataError: as Dataset; and integer targets with a gap when `classes` is None, since those may be
            counts or identifiers.
    """
    if classes is not None and (not isinstance(classes, int) or isinstance(classes, bool) or classes < 0):
        raise ConfigError(f"classes is {classes!r}", rule="an integer; 0 for regression", who=name)
    parts = [train] if test is None else [train, test]
    for part in parts:
        if len(part.targets) != len(part.inputs):
            raise DataError(
                f"{len(part.inputs)} inputs and {len(part.targets)} targets", rule="one each", who=name
            )
        if len(part.inputs) == 0:
            raise DataError("has no examples", rule="at least one in train and in test", who=name)
    targets, names = _number_text([part.targets for part in parts], name)
    names = names or train.class_names
    if names and classes is not None and classes < len(names):
        raise DataError(
            f"has the {len(names)} labels {', '.join(names[:8])}", rule=f"{classes} classes", who=name
        )
    if classes is None and names:
        classes = len(names)
    targets = [normal_targets(array, name, classes=classes) for array in targets]
    if classes is None and targets[0].dtype.kind == "i":
        classes = _count_classes(targets, name)
    examples = [
        Examples(normal_inputs(part.inputs, name), array, part.clients)
        for part, array in zip(parts, targets, strict=True)
    ]
    if test is None:
        examples = [examples[0].take(rows) for rows in holdout(examples[0].targets)]
    names = names if len(names) == classes else ()
    return Dataset(name, examples[0], examples[1], classes or None, names)


def normal_inputs(array: Array, who: str) -> Array:
    """Inputs in the form models take.

    uint8 images (`[N, H, W]`, `[N, C, H, W]` or `[N, H, W, C]`) become float32 `[N, C, H, W]` in [0, 1];
    real numbers and booleans float32; other integers int64, which are token ids. Where both the second and
    the last axis could be channels (1, 3 or 4), it is the second.
    """
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise DataError(f"inputs are {array.dtype} of shape {array.shape}", rule="numbers", who=who)
    if array.dtype == np.uint8 and array.ndim in {3, 4}:
        if array.ndim == 3:
            array = array[:, None]
        elif array.shape[1] not in _CHANNELS and array.shape[3] in _CHANNELS:
            array = np.ascontiguousarray(np.moveaxis(array, 3, 1))
        return np.divide(array, np.float32(255), dtype=np.float32)
    if array.dtype.kind in "iu":
        return array.astype(np.int64, copy=False)
    return _to_float32(array)


def normal_targets(array: Array, who: str, *, classes: int | None = None) -> Array:
    """Targets as int64 (classes) or float32 (regression, or when `classes` is 0); `[N, 1]` becomes `[N]`."""
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise DataError(f"targets are {array.dtype} of shape {array.shape}", rule="numbers", who=who)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if classes == 0 or (classes is None and array.dtype.kind == "f"):
        return _to_float32(array)
    if array.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            whole = array.astype(np.int64)
        wrong = np.flatnonzero((whole != array).reshape(len(array), -1).any(axis=1))
        if len(wrong):
            raise DataError(
                f"row {wrong[0]} has label {array[wrong[0]]}", rule="class labels are integers", who=who
            )
        return whole
    return array.astype(np.int64, copy=False)


def standardise(dataset: Dataset) -> Dataset:
    """Float inputs, and regression targets, with mean 0 and deviation 1 over the training part."""

    def scale(train: Array, test: Array) -> tuple[Array, Array]:
        if train.dtype.kind != "f":
            return train, test
        mean = train.mean(axis=0, dtype=np.float64)
        deviation = train.std(axis=0, dtype=np.float64)
        deviation = np.where(deviation > 0, deviation, 1.0)
        return _to_float32((train - mean) / deviation), _to_float32((test - mean) / deviation)

    inputs = scale(dataset.train.inputs, dataset.test.inputs)
    targets = scale(dataset.train.targets, dataset.test.targets)
    train, test = (
        Examples(x, y, part.clients)
        for x, y, part in zip(inputs, targets, (dataset.train, dataset.test), strict=True)
    )
    return replace(dataset, train=train, test=test)


def read_bytes(path: Path) -> bytes:
    """The file's content.

    Raises:
        DataError: it is missing or unreadable; the message has the absolute path.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError("no such file", fix=f"looked for {path.absolute()}", who=str(path)) from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", who=str(path)) from error


def _to_float32(array: Array) -> Array:
    # What float32 cannot hold becomes infinite, which the set's own check reports with its row.
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def _number_text(targets: list[Array], who: str) -> tuple[list[Array], tuple[str, ...]]:
    text = [array.dtype.kind == "U" for array in targets]
    if not any(text):
        return targets, ()
    if not all(text):
        raise DataError("targets are text in one part and numbers in the other", rule="one kind", who=who)
    names, codes = np.unique(np.concatenate([array.ravel() for array in targets]), return_inverse=True)
    flat = np.split(codes, [targets[0].size])
    numbered = [part.reshape(array.shape) for part, array in zip(flat, targets, strict=False)]
    return numbered, tuple(names.tolist())


def _count_classes(targets: list[Array], who: str) -> int:
    if any(array.dtype.kind != "i" for array in targets):
        raise DataError("targets are integers in one part and real in the other", rule="one kind", who=who)
    low = min(int(array.min()) for array in targets)
    high = max(int(array.max()) for array in targets)
    if low < 0:
        part = next(array for array in targets if array.min() == low)
        row = int(np.flatnonzero((part == low).reshape(len(part), -1).any(axis=1))[0])
        raise DataError(f"row {row} has label {low}", rule="labels are 0, 1, 2, …", who=who)
    if targets[0].ndim == 1:
        present = np.unique(np.concatenate(targets))
        if len(present) != high + 1:
            missing = int(np.flatnonzero(present != np.arange(len(present)))[0])
            raise DataError(
                f"integer targets run from {low} to {high}, and none is {missing}",
                rule="labels found from the data have no gap",
                fix=f"say classes={high + 1} for labels, classes=0 for regression",
                who=who,
            )
    return high + 1
