"""Folders of images that were corrupted beforehand, in the layout of CIFAR-10-C.

A folder has `labels.npy` and a file `<corruption>.npy` for each corruption: images uint8 [5 · n, height,
width, channels], the n images of severity 1 first. Either the labels are as many, or they are n, for all
severities (Hendrycks, Dietterich, ICLR 2019: https://zenodo.org/records/2535967).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mycelia.attacks.windows import Layout, check_layout
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["corruptions_in", "read_corrupted"]

_LABELS = "labels"
_LEVELS = 5


def corruptions_in(folder: str | Path) -> tuple[str, ...]:
    """Names of the corruptions that a folder has, in alphabetical order; none if there is no such folder."""
    return tuple(sorted(path.stem for path in Path(folder).glob("*.npy") if path.stem != _LABELS))


def read_corrupted(
    folder: str | Path, corruption: str, severity: int, layout: Layout = "nchw", limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """The images of one corruption at one severity; only these are read.

    Args:
        folder: as described above.
        corruption: its file's name without the ending.
        severity: 1 to 5.
        layout: of the result.
        limit: only so many, the first.

    Returns:
        images float32 in [0, 1], labels int64 [n].

    Raises:
        ConfigError: no such corruption, a severity out of range, or another layout.
        DataError: a file that is not as described.
    """
    check_layout(layout, "read_corrupted")
    found = corruptions_in(folder)
    if corruption not in found:
        raise ConfigError(
            f"no corruption {corruption!r} in {folder}",
            rule=f"there are: {', '.join(found) or 'none'}",
            who="read_corrupted",
        )
    if severity not in range(1, _LEVELS + 1) or (limit is not None and limit < 1):
        raise ConfigError(
            f"severity {severity}, limit {limit}",
            rule="severity 1 to 5, limit at least 1",
            who="read_corrupted",
        )
    path = Path(folder) / f"{corruption}.npy"
    images, labels = _array(path), _array(Path(folder) / f"{_LABELS}.npy")
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) % _LEVELS:
        raise DataError(
            f"{images.dtype} {list(images.shape)}",
            rule="uint8 [5 · n, height, width, channels]",
            who=str(path),
        )
    n = len(images) // _LEVELS
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or len(labels) not in (n, len(images)):
        raise DataError(
            f"labels {labels.dtype} {list(labels.shape)} for {len(images)} images",
            rule="one integer per image, or per image of a severity",
            who=str(Path(folder) / f"{_LABELS}.npy"),
        )
    first, count = (severity - 1) * n, n if limit is None else min(n, limit)
    x = torch.from_numpy(np.array(images[first : first + count])).float() / 255
    start = first if len(labels) == len(images) else 0
    y = torch.from_numpy(np.array(labels[start : start + count], dtype=np.int64))
    return x.movedim(-1, 1).contiguous() if layout == "nchw" else x, y


def _array(path: Path) -> Any:
    if not path.is_file():
        raise DataError("no such file", rule="a folder has images and labels", who=str(path))
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise DataError("not an array of NumPy", rule=str(error), who=str(path)) from error
