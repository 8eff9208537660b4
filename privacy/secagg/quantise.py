"""From floating-point numbers to whole steps of 2**-f: clipping, and rounding that is right on average.

All of it goes block by block, with scratch that stays in the level-2 cache; nothing of a vector's size is
made. Sums run in an order of NumPy's own, not of a linear algebra library: machines agree on the bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK", "LARGEST", "Quantiser", "squared_norm"]

BLOCK: Final = 1 << 14
"""Numbers worked on at a time."""

LARGEST: Final = 2**52
"""Codes up to here, and their fractions, are exact in float64."""

_Floats = npt.NDArray[np.float64]
_Integers = npt.NDArray[np.int64]

_DRAWN = 32  # random bits that round one number, where 62 bits hold them behind its code
_LIMB = 18  # products of two limbs of so many bits: a block of them adds up below 2**53
_SHRINK = 1 - 2.0**-36  # more than the rounding of a norm, a factor and a rotation in float64


@dataclass(frozen=True)
class Quantiser:
    """Rounds to codes from -bound to bound, both included.

    Attributes:
        frac_bits: f, a step is 2**-f; 0 to 62.
        bound: Q, the largest code, 1 to `LARGEST`.
    """

    frac_bits: int
    bound: int

    @property
    def limit(self) -> float:
        """The largest number that is not cut off, exactly `bound` steps."""
        return math.ldexp(self.bound, -self.frac_bits)

    def factor(self, vector: npt.NDArray[Any], largest: float, steps: int) -> float:
        """What a vector is multiplied by so that its L2 norm is at most so many steps; at most 1.

        It is less than exact by 2**-36, so that no rounding in float64 lifts the norm above the bound.

        Args:
            vector: finite numbers.
            largest: the size of the largest of them.
            steps: the bound, at least 1.
        """
        exponent = max(math.frexp(largest)[1], -1000)
        squares = []
        for start in range(0, len(vector), BLOCK):
            # Scaled by a power of two, so that squares neither overflow nor vanish.
            block = vector[start : start + BLOCK].astype(np.float64) * 2.0**-exponent
            squares.append(float(np.add.reduce(block * block)))
        norm = math.sqrt(math.fsum(squares))
        if norm == 0:
            return 1.0
        bound, place = math.frexp(steps)
        return min(1.0, math.ldexp(bound / norm, min(place - self.frac_bits - exponent, 900)) * _SHRINK)

    def cut_off(self, vector: npt.NDArray[Any], factor: float) -> int:
        """How many numbers, times the factor, are beyond the limit."""
        blocks = (vector[start : start + BLOCK] for start in range(0, len(vector), BLOCK))
        return sum(int(np.count_nonzero(np.abs(block * factor) > self.limit)) for block in blocks)

    def round(
        self, vector: npt.NDArray[Any], factor: float, rounding: np.random.Generator | None
    ) -> Iterator[tuple[int, _Integers]]:
        """Codes of a vector times a factor, block by block: where each begins, and its codes.

        A number between two codes becomes one or the other, with chances that make it right on average, but
        for 2**-33 of a step (bound / 2**62 of a step if that is more). The next block overwrites the last.

        Args:
            vector: finite numbers, float32 or float64.
            factor: 1, or what clips the norm.
            rounding: gives the random bits; without it numbers are rounded towards zero.
        """
        real, whole = np.empty(BLOCK), np.empty(BLOCK, np.int64)
        drawn = min(_DRAWN, 62 - self.bound.bit_length())
        for start in range(0, len(vector), BLOCK):
            block = vector[start : start + BLOCK]
            scaled, codes = real[: len(block)], whole[: len(block)]
            scaled[:] = block
            if factor != 1:
                scaled *= factor
            np.maximum(scaled, -self.limit, out=scaled)
            np.minimum(scaled, self.limit, out=scaled)
            if rounding is None:
                scaled *= 2.0**self.frac_bits
                np.trunc(scaled, out=scaled)
                codes[:] = scaled
            else:
                # With `drawn` bits of fraction a number is whole; uniform bits carry into its code, or not.
                scaled *= 2.0 ** (self.frac_bits + drawn)
                np.rint(scaled, out=scaled)
                codes[:] = scaled
                _add_bits(codes, drawn, rounding)
                codes >>= drawn
            yield start, codes


def squared_norm(codes: _Integers, bound: int) -> int:
    """The square of the L2 norm of at most a block of codes, exactly; none is larger than `bound`."""
    rest = np.abs(codes)
    limbs = []
    for _ in range(0, bound.bit_length(), _LIMB):
        limbs.append((rest & (1 << _LIMB) - 1).astype(np.float64))
        rest >>= _LIMB
    return sum(
        int(np.add.reduce(one * two)) << _LIMB * (low + high)
        for low, one in enumerate(limbs)
        for high, two in enumerate(limbs)
    )


def _add_bits(codes: _Integers, count: int, rounding: np.random.Generator) -> None:
    """Add `count` uniform bits, at most 32, to each number: two numbers share a word of the stream."""
    half = (len(codes) + 1) // 2
    words: npt.NDArray[np.uint64] = rounding.bit_generator.random_raw(half)
    high = words >> np.uint64(64 - count)
    words <<= np.uint64(32)
    words >>= np.uint64(64 - count)
    codes[:half] += words.view(np.int64)
    codes[half:] += high.view(np.int64)[: len(codes) - half]
