"""Image files through pillow: folders with one subfolder per class, and images inside tables."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mycelia.engine.data.examples import Array
from mycelia.engine.data.raw import Raw
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.plugins import import_extra

__all__ = ["decode_images", "load_images"]

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_GREY = {"1", "L", "LA"}
_COLOUR = {"P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"}


def load_images(path: Path, *, size: int = 0, channels: int = 0) -> tuple[Raw, Raw | None]:
    """Images of `path/CLASS/…`, or of `path/train/CLASS/…` and `path/test/CLASS/…` (or `val`).

    Files are taken in sorted order; those without an image's suffix, and hidden ones, are left out.

    Args:
        path: the folder.
        size: side in pixels that every image is resized to; 0: they have one size already.
        channels: 1 (grey) or 3; 0: 1 when every image is grey, else 3.

    Raises:
        DataError: no folder or no class in it, an empty class, a damaged image, images of several sizes.
        ConfigError: pillow is not installed.
    """
    if not path.is_dir():
        raise DataError("no such folder", fix=f"looked for {path.absolute()}", who=str(path))
    if not (path / "train").is_dir():
        return _read_classes(path, _subfolders(path), size, channels), None
    names = _subfolders(path / "train")
    train = _read_classes(path / "train", names, size, channels)
    test = next((path / part for part in ("test", "val") if (path / part).is_dir()), None)
    if test is None:
        return train, None
    unknown = set(_subfolders(test)) - set(names)
    if unknown:
        raise DataError(f"has class {min(unknown)!r}", rule="classes are those of train", who=str(test))
    present = [name for name in names if (test / name).is_dir()]
    # One decision on grey or colour for both parts.
    raw = _read_classes(test, present, size, train.inputs.shape[1])
    codes = np.array([names.index(name) for name in present], dtype=np.int64)
    return train, Raw(raw.inputs, codes[raw.targets], class_names=tuple(names))


def decode_images(sources: Sequence[Path | bytes], *, who: str, size: int = 0, channels: int = 0) -> Array:
    """Decode files or their contents to uint8 `[N, C, H, W]`; arguments as `load_images`."""
    if channels not in {0, 1, 3} or size < 0:
        raise ConfigError(
            f"size is {size}, channels {channels}", rule="size ≥ 0; channels 0, 1 or 3", who=who
        )
    image = import_extra("PIL.Image", "image", who=who)
    names = [f"image {i}" if isinstance(source, bytes) else str(source) for i, source in enumerate(sources)]
    if channels == 0:
        modes = set()
        for source, name in zip(sources, names, strict=True):
            with _open(image, source, name) as opened:
                modes.add(opened.mode)
        channels = 1 if modes <= _GREY else 3
    arrays: list[Array] = []
    for source, name in zip(sources, names, strict=True):
        array = _decode(image, source, name, size, channels)
        if arrays and array.shape != arrays[0].shape:
            raise DataError(
                f"is {array.shape[0]}×{array.shape[1]} pixels",
                rule=f"one size; {names[0]} is {arrays[0].shape[0]}×{arrays[0].shape[1]}",
                fix="say size=N to resize",
                who=f"{who}, {name}",
            )
        arrays.append(array)
    stacked = np.stack(arrays)
    return stacked[:, None] if channels == 1 else np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))


def _open(image: Any, source: Path | bytes, name: str) -> Any:
    try:
        opened = image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except Exception as error:  # pillow's decoders raise whatever their format's parser does
        raise DataError(f"is not an image: {error}", who=name) from error
    if opened.mode not in _GREY | _COLOUR:
        opened.close()
        raise DataError(f"has pixels of mode {opened.mode}", rule="8 bits a channel", who=name)
    return opened


def _decode(image: Any, source: Path | bytes, name: str, size: int, channels: int) -> Array:
    with _open(image, source, name) as opened:
        try:
            picture = opened.convert("L" if channels == 1 else "RGB")
        except Exception as error:
            raise DataError(f"is a damaged image: {error}", who=name) from error
        if size:
            picture = picture.resize((size, size), image.Resampling.BILINEAR)
        return np.asarray(picture, dtype=np.uint8)


def _subfolders(path: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and entry.name[0] != ".")
    if not names:
        raise DataError("has no subfolders", rule="one subfolder per class", who=str(path))
    return names


def _read_classes(root: Path, names: Sequence[str], size: int, channels: int) -> Raw:
    files: list[Path | bytes] = []
    targets: list[int] = []
    for label, name in enumerate(names):
        found = sorted(
            file
            for file in (root / name).rglob("*")
            if file.suffix.lower() in _SUFFIXES and file.name[0] != "." and file.is_file()
        )
        if not found:
            raise DataError(f"class {name!r} has no images", rule="at least one per class", who=str(root))
        files += found
        targets += [label] * len(found)
    inputs = decode_images(files, who=str(root), size=size, channels=channels)
    return Raw(inputs, np.array(targets, dtype=np.int64), class_names=tuple(names))
