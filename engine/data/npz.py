"""NumPy `.npz` archives, by the array names in use for data sets."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from mycelia.engine.data.examples import Array
from mycelia.engine.data.raw import Raw, read_bytes
from mycelia.engine.errors import DataError

__all__ = ["load_npz"]

_TRAIN = {
    "inputs": ("x_train", "train_inputs", "train_images", "inputs", "x", "X"),
    "targets": ("y_train", "train_targets", "train_labels", "targets", "labels", "y"),
    "clients": ("train_clients", "clients"),
}
_TEST = {
    "inputs": ("x_test", "test_inputs", "test_images"),
    "targets": ("y_test", "test_targets", "test_labels"),
    "clients": ("test_clients",),
}


def load_npz(path: Path) -> tuple[Raw, Raw | None]:
    """Train and, where present, test arrays: `x_train, y_train, x_test, y_test` or `inputs, targets`.

    Raises:
        DataError: missing or damaged file, pickled objects in it, or none of the known names.
    """
    who = str(path)
    content = io.BytesIO(read_bytes(path))
    try:
        archive = np.load(content, allow_pickle=False)
        arrays = {name: archive[name] for name in archive.files} if hasattr(archive, "files") else None
    except Exception as error:  # bytes that are no archive raise whatever zipfile, zlib or NumPy stumbles on
        raise DataError(
            f"cannot be read: {error}", rule="an .npz archive without pickles", who=who
        ) from error
    if arrays is None:
        raise DataError("is a single array", rule="an .npz archive", who=who)
    train = _part(arrays, _TRAIN)
    if train is None:
        raise DataError(
            f"has arrays {', '.join(sorted(arrays)) or 'none'}",
            rule=f"inputs are called {', '.join(_TRAIN['inputs'])}; targets {', '.join(_TRAIN['targets'])}",
            who=who,
        )
    return train, _part(arrays, _TEST)


def _part(arrays: dict[str, Array], names: dict[str, tuple[str, ...]]) -> Raw | None:
    found = {what: next((arrays[key] for key in keys if key in arrays), None) for what, keys in names.items()}
    if found["inputs"] is None or found["targets"] is None:
        return None
    return Raw(found["inputs"], found["targets"], found["clients"])
