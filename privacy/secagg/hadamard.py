"""The randomised Hadamard rotation: it spreads what a vector holds evenly over its coordinates.

y = H D x / sqrt(n) with the Walsh–Hadamard matrix H of order n, a power of two, and random signs D. It is
orthogonal, so norms and sums stay, and a coordinate of y is hardly larger than |x| sqrt(2 ln n / n): clipping
each coordinate then costs little (Suresh et al., "Distributed Mean Estimation with Limited Communication",
ICML 2017). Additions alone, in a fixed order: every machine gets the same bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mycelia.privacy.secagg.masks import Stream

__all__ = ["padded", "rotate", "unrotate"]

_Floats = npt.NDArray[np.float64]

_ROW = 1 << 13  # numbers that stay in the level-2 cache, with a copy
_STRIP = 1 << 15
_TALL = 64
_SIGNS = 1 << 14  # a multiple of the 32 signs in a word


def padded(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def rotate(values: _Floats, key: bytes) -> None:
    """Rotate in place.

    Args:
        values: float64 [n], contiguous, n a power of two.
        key: 32 bytes; the signs are the bits of its mask stream, lowest first, a 1 for minus.
    """
    _flip(values, key)
    _transform(values)
    values *= len(values) ** -0.5


def unrotate(values: _Floats, key: bytes) -> None:
    """The inverse of `rotate`, in place."""
    _transform(values)
    values *= len(values) ** -0.5
    _flip(values, key)


def _flip(values: _Floats, key: bytes) -> None:
    stream = Stream(key, 32)
    for start in range(0, len(values), _SIGNS):
        part = values[start : start + _SIGNS]
        words = stream.words(start // 32, -(-len(part) // 32)).astype("<u4", copy=False)
        minus = np.unpackbits(words.view(np.uint8), count=len(part), bitorder="little")
        part *= 1.0 - 2.0 * minus


def _transform(values: _Floats) -> None:
    """H times the vector, in a few passes over memory: rows by themselves, then 64 of them at a time."""
    size = min(len(values), _ROW)
    tall = 1 << (size.bit_length() - 1) // 2
    one, two = np.empty((2, tall, size // tall)), np.empty((2, size // tall, tall))
    for row in values.reshape(-1, size):
        square = row.reshape(tall, -1)
        one[0] = square
        two[0] = _down(one[0], one[1]).T
        square[:] = _down(two[0], two[1]).T
    while size < len(values):
        tall = min(_TALL, len(values) // size)
        width = min(size, _STRIP // tall)
        pair = np.empty((2, tall, width))
        for table in values.reshape(-1, tall, size):
            for start in range(0, size, width):
                strip = table[:, start : start + width]
                pair[0] = strip
                strip[:] = _down(pair[0], pair[1])
        size *= tall


def _down(table: _Floats, other: _Floats) -> _Floats:
    """H times each column of a contiguous table [2**k, c]; in one of the two, both are overwritten."""
    half = 1
    while half < len(table):
        old = table.reshape(-1, 2, half * table.shape[1])
        new = other.reshape(old.shape)
        np.add(old[:, 0], old[:, 1], out=new[:, 0])
        np.subtract(old[:, 0], old[:, 1], out=new[:, 1])
        table, other, half = other, table, 2 * half
    return table
