"""IDX files, the format of MNIST: a big-endian header, then one dense array.

Format: http://yann.lecun.com/exdb/mnist (magic 0, 0, type, number of dimensions; each size as uint32).
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np

from mycelia.engine.data.examples import Array
from mycelia.engine.data.raw import Raw, read_bytes
from mycelia.engine.errors import DataError

__all__ = ["load_idx", "parse_idx", "read_idx"]

_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP = b"\x1f\x8b"


def parse_idx(content: bytes, *, who: str = "idx") -> Array:
    r"""The array in an IDX file's bytes, gzip or plain.

    Raises:
        DataError: broken gzip, wrong magic number or type, or a length other than the header's.

    >>> parse_idx(b"\0\0\x08\1" + b"\0\0\0\2" + b"\7\x09").tolist()
    [7, 9]
    """
    if content[:2] == _GZIP:
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error, struct.error) as error:
            raise DataError(f"broken gzip: {error}", fix="download the file again", who=who) from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _DTYPES or content[3] == 0:
        raise DataError(
            f"starts with bytes {content[:4].hex(' ') or 'none'}",
            rule="0, 0, a type of 08 09 0b 0c 0d 0e, the number of dimensions",
            who=who,
        )
    dtype, ndim = np.dtype(_DTYPES[content[2]]), content[3]
    start = 4 + 4 * ndim
    if len(content) < start:
        raise DataError(f"ends inside its header of {ndim} dimensions", fix="download it again", who=who)
    shape = struct.unpack(f">{ndim}I", content[4:start])
    expected = start + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise DataError(
            f"has {len(content)} bytes", rule=f"its header says {expected} (shape {shape})", who=who
        )
    try:
        return np.frombuffer(content, dtype, offset=start).reshape(shape)
    except ValueError as error:  # more dimensions than NumPy has, or sizes whose product only a zero hides
        raise DataError(f"has shape {shape}: {error}", who=who) from None


def read_idx(path: str | os.PathLike[str]) -> Array:
    """The array in an IDX file, gzip or plain.

    Raises:
        DataError: the file is missing or malformed.
    """
    return parse_idx(read_bytes(Path(path)), who=str(path))


def load_idx(path: Path) -> tuple[Raw, Raw | None]:
    """Train and test arrays of a folder with MNIST's file names (`*train*images*`, `*t10k*labels*`, …)."""
    if not path.is_dir():
        raise DataError(
            "is not a folder", rule="a folder with train-images-idx3-ubyte and its companions", who=str(path)
        )
    files = sorted(entry for entry in path.iterdir() if "idx" in entry.name and entry.is_file())
    train = _pair(files, ("train",), path)
    if train is None:
        raise DataError(
            f"has no training images among {[file.name for file in files]}",
            rule="train-images-idx3-ubyte and train-labels-idx1-ubyte, plain or .gz",
            who=str(path),
        )
    return train, _pair(files, ("t10k", "test"), path)


def _pair(files: list[Path], parts: tuple[str, ...], folder: Path) -> Raw | None:
    arrays: list[Array] = []
    for what in ("images", "labels"):
        found = [file for file in files if what in file.name and any(part in file.name for part in parts)]
        # The plain file and its .gz beside each other, as torchvision leaves them, are one file.
        names = {file.name.removesuffix(".gz") for file in found}
        if len(names) > 1:
            raise DataError(f"has several {parts[0]} {what}: {sorted(names)}", rule="one", who=str(folder))
        if not found:
            if what == "images":
                return None
            raise DataError(f"has {parts[0]} images but no labels", rule="both", who=str(folder))
        arrays.append(read_idx(min(found, key=lambda file: len(file.name))))
    return Raw(arrays[0], arrays[1])
