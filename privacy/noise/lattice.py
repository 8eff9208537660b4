"""Exact draws from the integers with weight exp(-rate |x|**power), many at a time.

Rejection under a table. The area under the curve h(x) = height * exp(-rate |x|**power) is covered with cells
of one unit of height over 2**shift integers; a uniform cell, a uniform integer of the cell and a uniform
height in it are a uniform point, and a point below the curve gives its integer. Cells under the curve are
most of them, so few points are rejected.

Exact means that no rounding enters the law. The comparison is made in float64 with a margin wider than all
its errors; a point in the margin (one in a million or fewer) is decided with as many digits, and as many more
random bits of its height, as it takes (as in Karney, ACM TOMS 42, 2016, and Canonne, Kamath and Steinke,
NeurIPS 2020, where no float is used at all). The two cells behind the table stand for the infinite tails.

Points are made in blocks of a size that depends on the number of draws alone, and every point costs the
same. The number of rejections is independent of the integers given out, so time does not tell the draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from mycelia.privacy.noise.source import Stream

__all__ = ["MAX_SPREAD", "Lattice", "lattice"]

MAX_SPREAD = 2.0**44
"""The largest standard deviation or scale of a lattice law: beyond, float64 no longer holds every integer."""

_CELLS = 1 << 16  # a cell is chosen by 16 bits
_BLOCK = 1 << 14  # points made at a time: their scratch stays in the level-2 cache
_BINS = 32  # at least so many columns of cells to one spread
# The table ends where the weight is below 2**-49, in spreads; the tail's envelope needs height * weight <
# 2**-31.
_REACH = {1: 36, 2: 9}
# Errors of float64: 45 in the exponent with three roundings, the exponential, the sum; see `Lattice.points`.
_RELATIVE_ERROR = 2.0**-44


@dataclass(frozen=True, eq=False)
class Lattice:
    """The tables of one law; made by `lattice`.

    Attributes:
        rate: of the exponent, exactly.
        power: 1 (discrete Laplace) or 2 (discrete Gaussian).
        shift: a cell spans 2**shift integers.
        height: cells at x = 0, as a real number.
        start: first integer of each cell, int64 [65536].
        level: lower edge of each cell, float64 [65536]; infinite where there is none, NaN for the tails.
        margin: bound on the error of a comparison.
    """

    rate: Fraction
    power: Literal[1, 2]
    shift: int
    height: float
    start: npt.NDArray[np.int64]
    level: npt.NDArray[np.float64]
    margin: float

    def draw(self, size: int, stream: Stream) -> npt.NDArray[np.int64]:
        """Independent exact draws, int64 [size]."""
        out = np.empty(size, np.int64)
        block = min(_BLOCK, max(64, 1 << (size + size // 4).bit_length()))
        filled = 0
        while filled < size:
            points, kept = self.points(block, stream)
            points = points[kept][: size - filled]
            out[filled : filled + len(points)] = points
            filled += len(points)
        return out

    def points(self, count: int, stream: Stream) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Uniform points over the cells: their integers and whether each is below the curve, both [count]."""
        raw = np.empty(10 * count, np.uint8)
        stream.fill(raw)
        words = raw[: 8 * count].view("<u8").astype(np.uint64, copy=False)
        cells = raw[8 * count :].view("<u2").astype(np.intp)
        # The first `shift` bits of a word are the place in the cell, the rest are the height in it.
        place = (words >> np.uint64(64 - self.shift)).view(np.int64)
        place += self.start.take(cells)
        words <<= np.uint64(self.shift)
        words >>= np.uint64(11)
        height = words.view(np.int64).astype(np.float64)
        height *= 2.0**-53
        height += self.level.take(cells)
        curve = place.astype(np.float64)
        if self.power == 1:
            np.abs(curve, out=curve)
        else:
            curve *= curve
        curve *= -float(self.rate)
        np.exp(curve, out=curve)
        curve *= self.height
        height -= curve
        kept = height < -self.margin - self.resolution
        undecided = ~(kept | (height > self.margin))
        if undecided.any():
            for index in np.flatnonzero(undecided):
                low = int(words[index])
                place[index], kept[index] = self._decide(int(cells[index]), int(place[index]), low, stream)
        return place, kept

    @property
    def resolution(self) -> float:
        """How far the height of a point may lie above the bits drawn so far."""
        return 2.0 ** -min(53, 64 - self.shift)

    def _decide(self, cell: int, place: int, bits: int, stream: Stream) -> tuple[int, bool]:
        """A point's integer and whether it lies below the curve, in exact arithmetic."""
        level = float(self.level[cell])
        if not math.isnan(level):
            low = Fraction(level) + Fraction(bits, 2**53)
            return place, self._below(place, low, Fraction(self.resolution), Fraction(self.height), stream)
        # A tail: segment i of 2**i cells' width with probability 2**-(i+1), so that each of its integers has
        # 2**-(2i+1) of what an integer of a cell has; the curve is far below that.
        segment = 0
        while _bits(1, stream):
            segment += 1
        offset = ((2**segment - 1) << self.shift) + _bits(self.shift + segment, stream)
        first = int(self.start[cell])
        place = first + offset if first >= 0 else first - offset
        factor = Fraction(self.height) * 2 ** (2 * segment + 1)
        kept = self._below(place, Fraction(0), Fraction(1), factor, stream)
        return (place, True) if kept else (0, False)  # what is rejected may be too large for int64

    def _below(self, place: int, low: Fraction, width: Fraction, factor: Fraction, stream: Stream) -> bool:
        """Whether a uniform number of [low, low + width) is below factor * exp(-rate |place|**power)."""
        exponent = -self.rate * abs(place) ** self.power
        digits, floor = 30, Fraction(-1000)
        while True:  # below `floor` only a bound is known: the number itself could have a billion digits
            shown = max(exponent, floor)
            # Twenty digits more than claimed cover the rounding of an exponent below 10**15.
            context = Context(prec=digits + 20, Emin=-(10**15), Emax=10**15)
            power = context.divide(Decimal(shown.numerator), Decimal(shown.denominator))
            value = factor * Fraction(context.exp(power))
            error = value / 10**digits
            if exponent >= floor and low + width <= value - error:
                return True
            if low >= value + error:
                return False
            floor *= 2
            width /= 2**32
            low += width * _bits(32, stream)
            digits += 10


def _bits(count: int, stream: Stream) -> int:
    """A uniform integer of `count` bits."""
    size = (count + 7) // 8
    return int.from_bytes(stream.bytes(size), "little") >> (8 * size - count)


@lru_cache(maxsize=32)
def lattice(spread: float, power: Literal[1, 2]) -> Lattice:
    """The law with weight exp(-x²/(2 spread²)) for power 2, exp(-|x|/spread) for power 1.

    Args:
        spread: in (0, `MAX_SPREAD`].
        power: 1 or 2.
    """
    exact = Fraction(spread)
    rate = 1 / exact if power == 1 else 1 / (2 * exact * exact)
    shift = max(1, math.floor(math.log2(spread / _BINS)) if spread > _BINS else 1)
    width = 2**shift
    bins = math.ceil(_REACH[power] * spread / width) + 1
    # Bin k >= 0 holds the integers from k * width, bin k < 0 those from k * width to (k + 1) * width - 1. The
    # weight is largest at the integer nearest to 0.
    numbers = np.arange(-bins, bins)
    nearest = np.where(numbers >= 0, numbers * width, (-numbers - 1) * width + 1).astype(np.float64)
    weights = np.exp(-float(rate) * nearest**power)
    height = float((_CELLS - 2 - 2 * bins) / weights.sum())
    counts = np.maximum(1, np.ceil(height * weights * (1 + 2 * _RELATIVE_ERROR)).astype(np.int64))
    used = int(counts.sum())
    start = np.zeros(_CELLS, np.int64)
    level = np.full(_CELLS, np.inf)
    start[:used] = np.repeat(numbers * width, counts)
    level[:used] = np.arange(used) - np.repeat(np.cumsum(counts) - counts, counts)
    start[used : used + 2] = bins * width, -bins * width - 1
    level[used : used + 2] = np.nan
    return Lattice(rate, power, shift, height, start, level, _RELATIVE_ERROR * float(counts.max() + 1))
