"""Examples and Dataset: what every source gives and every trainer takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mycelia.engine.errors import DataError

__all__ = ["Array", "Dataset", "Examples"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs, targets and, where the data has them, the clients they belong to.

    Args:
        inputs: `[N, …]`, numbers.
        targets: `[N, …]`, integers for classes, floats for regression.
        clients: `[N]`, integers or strings; None: the data has no natural partition.

    Raises:
        DataError: lengths differ, or an array is not of numbers (client ids: integers or strings).

    The arrays are shared, not copied: do not write into them.

    >>> examples = Examples(np.zeros((3, 2), np.float32), np.array([0, 1, 0]))
    >>> len(examples), examples.take([2, 0]).targets.tolist()
    (3, [0, 0])
    """

    inputs: Array
    targets: Array
    clients: Array | None = None

    def __post_init__(self) -> None:
        for name, array in self._arrays():
            kinds = "iuU" if name == "clients" else "biuf"
            if not isinstance(array, np.ndarray) or array.ndim == 0 or array.dtype.kind not in kinds:
                raise DataError(
                    f"{name} are {_describe(array)}",
                    rule="client ids are an array of integers or strings"
                    if name == "clients"
                    else "an array of numbers with one row per example",
                    who="examples",
                )
            if not array.dtype.isnative:
                object.__setattr__(self, name, array.astype(array.dtype.newbyteorder("=")))
        lengths = {name: len(array) for name, array in self._arrays()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"lengths differ: {lengths}", rule="one row per example in each", who="examples")
        if self.clients is not None and self.clients.ndim != 1:
            raise DataError(f"clients have shape {self.clients.shape}", rule="shape (N,)", who="examples")

    def _arrays(self) -> Iterator[tuple[str, Array]]:
        yield "inputs", self.inputs
        yield "targets", self.targets
        if self.clients is not None:
            yield "clients", self.clients

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in self._arrays())
        return f"Examples({parts})"

    def take(self, indices: npt.ArrayLike) -> Examples:
        """The examples at `indices`, copied, in that order.

        Raises:
            DataError: an index is not an integer in [-N, N).
        """
        chosen = np.asarray(indices)
        if chosen.size == 0:
            chosen = chosen.astype(np.int64)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise DataError(
                f"indices are {_describe(chosen)}", rule="a list of integers", who="Examples.take"
            )
        try:
            return Examples(
                self.inputs[chosen],
                self.targets[chosen],
                None if self.clients is None else self.clients[chosen],
            )
        except IndexError as error:
            raise DataError(
                str(error), rule=f"indices of {len(self)} examples", who="Examples.take"
            ) from None

    @cached_property
    def sha256(self) -> str:
        """Hash of names, dtypes, shapes and contents; the same for the same data from any source."""
        digest = sha256()
        for name, array in self._arrays():
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            if array.size:
                digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write one `.npy` file per array into `folder`; files already there are replaced."""
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        for name, array in self._arrays():
            # Replaced, not overwritten: a process that has the old file mapped keeps it.
            partial = root / f".{name}.{os.getpid()}.npy"
            np.save(partial, array, allow_pickle=False)
            os.replace(partial, root / f"{name}.npy")
        if self.clients is None:
            (root / "clients.npy").unlink(missing_ok=True)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, mmap: bool = True) -> Examples:
        """Read what `save` wrote.

        Args:
            folder: the folder given to `save`.
            mmap: map the files, so that processes share one copy in memory. Pages are copy-on-write: torch
                takes the arrays without a warning, and no write reaches the files.

        Raises:
            DataError: a file is missing or damaged.
        """
        root = Path(folder)

        def read(name: str) -> Array:
            path = root / f"{name}.npy"
            try:
                # As a plain array over the same pages: np.memmap makes every slice slower.
                return np.asarray(np.load(path, mmap_mode="c" if mmap else None, allow_pickle=False))
            except FileNotFoundError:
                raise DataError(
                    "is missing", rule="a folder written by Examples.save", who=str(path)
                ) from None
            except (ValueError, OSError, EOFError, MemoryError) as error:
                raise DataError(f"cannot be read: {error}", rule="a .npy file", who=str(path)) from error

        clients = read("clients") if (root / "clients.npy").exists() else None
        return cls(read("inputs"), read("targets"), clients)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test set that belong together, checked.

    Args:
        name: what the set is called in events and reports.
        train: the training examples.
        test: the test examples.
        classes: number of classes, targets are in `0..classes-1`; None: regression.
        class_names: what the classes are called, where the source says so.

    Raises:
        DataError: an empty part, shapes that differ, a value that is not finite, or a label that is not an
            integer in range; the message names part, row and value.
    """

    name: str
    train: Examples
    test: Examples
    classes: int | None
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.classes is not None and self.classes < 1:
            raise DataError(f"classes is {self.classes}", rule="at least 1, or None", who=self.name)
        if self.class_names and len(self.class_names) != self.classes:
            raise DataError(
                f"{len(self.class_names)} class names for {self.classes} classes",
                rule="a name for each class, or none",
                who=self.name,
            )
        for part, examples in (("train", self.train), ("test", self.test)):
            _check(examples, self.classes, f"{self.name}, {part}")
        for what in ("inputs", "targets"):
            first, second = getattr(self.train, what), getattr(self.test, what)
            if (first.shape[1:], first.dtype) != (second.shape[1:], second.dtype):
                raise DataError(
                    f"{what} of train are {_describe(first)}, of test {_describe(second)}",
                    rule="both parts have one shape and dtype",
                    who=self.name,
                )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return self.train.inputs.shape[1:]

    @cached_property
    def sha256(self) -> str:
        """Hash of both parts and the number of classes, not of the name."""
        return sha256(f"{self.train.sha256} {self.test.sha256} {self.classes}".encode()).hexdigest()

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, train={self.train}, test={self.test}, classes={self.classes})"


def _describe(array: object) -> str:
    if isinstance(array, np.ndarray):
        return f"{array.dtype} of shape {array.shape}"
    return f"a {type(array).__name__}"


def _check(examples: Examples, classes: int | None, who: str) -> None:
    if len(examples) == 0:
        raise DataError("has no examples", rule="at least one in train and in test", who=who)
    if examples.inputs.size == 0:
        raise DataError(
            f"an example has shape {examples.inputs.shape[1:]}", rule="sizes are at least 1", who=who
        )
    _check_finite(examples.inputs, "input", who)
    targets = examples.targets
    if classes is None:
        if targets.dtype.kind != "f":
            raise DataError(f"targets are {targets.dtype}", rule="regression takes floats", who=who)
        _check_finite(targets, "target", who)
        return
    if targets.dtype.kind not in "iu":
        raise DataError(f"targets are {targets.dtype}", rule="class labels are integers", who=who)
    if targets.size and (targets.min() < 0 or targets.max() >= classes):
        row = _first_row((targets < 0) | (targets >= classes))
        raise DataError(
            f"row {row} has label {targets[row]}", rule=f"labels are in 0..{classes - 1}", who=who
        )


def _check_finite(array: Array, what: str, who: str) -> None:
    if array.dtype.kind != "f" or array.size == 0:
        return
    # NaN passes through min, infinity is min or max: two quick passes without a temporary.
    if np.isfinite(array.min()) and np.isfinite(array.max()):
        return
    row = _first_row(~np.isfinite(array))
    values = np.ravel(array[row])
    raise DataError(
        f"row {row} has {what} {values[~np.isfinite(values)][0]}", rule=f"every {what} is finite", who=who
    )


def _first_row(wrong: Array) -> int:
    return int(np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))[0])
