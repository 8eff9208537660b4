"""Exact sums: value × weight as 64-bit integers, so the order of addition cannot change the result.

Floating-point addition rounds at every step and therefore depends on the order. Here each product is rounded
once, to a multiple of 2**-exponent, and integers are added: any order, any number of workers, the same bits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch

from mycelia.engine.errors import ConfigError, DataError

__all__ = ["FixedPoint"]

Fused = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[float, float]]
"""Adds round((new - old) * scale) to the totals; gives the smallest and the largest difference."""

_Floats = npt.NDArray[np.floating]
_Integers = npt.NDArray[np.int64]

# The scratch of a block (20 bytes an entry) stays in the level-2 cache; smaller blocks pay more calls.
_BLOCK = 16384
# Up to here Python's own numbers are faster than five array calls.
_FEW = 8
# The largest contribution has at least 2**40 steps: one 65,536 times lighter keeps the 24 bits of float32.
_MIN_BITS = 40
# Adding 1.5 * 2**52 to |x| <= 2**51 leaves no fraction bits, so the hardware rounds x to an integer, half to
# even. Consecutive integers have consecutive bit patterns: subtracting the pattern of zero gives the integer.
_MAGIC = np.float64(1.5 * 2**52)
_MAGIC_BITS = _MAGIC.view(np.int64)
_MAGIC_LIMIT = 2.0**51


class _Scratch(threading.local):
    """The working memory of one thread; allocated once, so that adding never asks for memory."""

    def __init__(self) -> None:
        self.single = np.empty(_BLOCK, np.float32)
        self.double = np.empty(_BLOCK, np.float64)
        self.integer = np.empty(_BLOCK, np.int64)


@dataclass(frozen=True)
class FixedPoint:
    """A fixed-point format that provably holds the sum of `cohort` weighted contributions.

    Make one with `plan`. An accumulator is an int64 tensor [d], at first of zeros; those of one format add up
    with plain integer addition. At most `cohort` contributions may meet in one sum.

    >>> fixed = FixedPoint.plan(max_abs=1.0, max_weight=10.0, cohort=100, what="update")
    >>> total = torch.zeros(2, dtype=torch.int64)
    >>> fixed.add_(total, torch.tensor([0.5, -0.25]), weight=4.0)
    >>> fixed.decode(total).tolist()
    [2.0, -1.0]

    Attributes:
        max_abs: largest |value| accepted.
        max_weight: largest weight accepted.
        cohort: largest number of contributions in one sum.
        exponent: one unit of the accumulator stands for 2**-exponent.
        what: name of the quantity, for messages.
    """

    max_abs: float
    max_weight: float
    cohort: int
    exponent: int
    what: str
    _scratch: _Scratch = field(default_factory=_Scratch, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_bounds(self.max_abs, self.max_weight, self.cohort, self.what)
        if self.cohort * _largest(self.max_abs, self.max_weight, self.exponent) >= 2**63:
            raise ConfigError(
                f"{self.cohort} contributions of up to {self.max_weight} x {self.max_abs} overflow 64 bits "
                f"at exponent {self.exponent}",
                rule="cohort * max_weight * max_abs * 2**exponent < 2**63",
                fix="use FixedPoint.plan, which picks the largest exponent that fits",
                who=self.what,
            )

    def __reduce__(self) -> tuple[object, ...]:
        """Travel to another process without the scratch memory."""
        return (FixedPoint, (self.max_abs, self.max_weight, self.cohort, self.exponent, self.what))

    @classmethod
    def plan(cls, max_abs: float, max_weight: float, cohort: int, what: str) -> FixedPoint:
        """The finest format whose sum cannot overflow.

        Args:
            max_abs: bound on |value|, in [2**-128, 2**128).
            max_weight: bound on a weight, in [2**-128, 2**128).
            cohort: how many contributions one sum may hold, at least 1.
            what: name of the quantity, for messages.

        Raises:
            ConfigError: a bound is out of range, or fewer than 40 bits are left for one contribution, so that
                light clients would lose precision that float32 has (cohorts above about four million).
        """
        _check_bounds(max_abs, max_weight, cohort, what)
        exponent = 64 - math.floor(math.log2(cohort * Fraction(max_abs) * Fraction(max_weight)))
        while cohort * _largest(max_abs, max_weight, exponent) >= 2**63:
            exponent -= 1
        if _largest(max_abs, max_weight, exponent) < 2**_MIN_BITS:
            raise ConfigError(
                f"a sum of {cohort} contributions of up to {max_weight} x {max_abs} leaves "
                f"{63 - math.ceil(math.log2(cohort))} bits for each",
                rule=f"{_MIN_BITS} bits: max_weight * max_abs * 2**exponent >= 2**{_MIN_BITS} "
                f"and cohort * max_weight * max_abs * 2**exponent < 2**63",
                fix=f"sum at most {2 ** (62 - _MIN_BITS)} contributions at once",
                who=what,
            )
        return cls(max_abs, max_weight, cohort, exponent, what)

    def add_(self, accumulator: torch.Tensor, values: torch.Tensor, weight: float) -> None:
        """Add round(values * weight * 2**exponent), half to even, to the accumulator in place.

        The product `values * weight` is the float64 one. On an error the accumulator is as it was.

        Args:
            accumulator: int64 [d] on the CPU.
            values: floating point [d], any precision and device; finite, at most `max_abs` in size.
            weight: in (0, max_weight].

        Raises:
            DataError: a value or the weight is out of bounds or not finite, or shapes or dtypes do not fit.
        """
        self._add(self._integers(accumulator, values), self._floats(values), None, weight)

    def add_difference_(
        self,
        accumulator: torch.Tensor,
        new: torch.Tensor,
        old: torch.Tensor,
        weight: float,
        fused: Fused | None = None,
    ) -> None:
        """Like `add_` for `new - old`, without a tensor of that size.

        The difference is taken in the precision of the inputs, float32 at least.

        Args:
            accumulator: int64 [d] on the CPU.
            new: floating point [d].
            old: floating point [d], dtype of `new`.
            weight: in (0, max_weight].
            fused: a compiled form for float32 vectors of this size, which gives the same bits faster.

        Raises:
            DataError: as for `add_`, with the bounds on the difference.
        """
        if new.dtype != old.dtype or new.shape != old.shape:
            raise DataError(
                f"new is {new.dtype} {list(new.shape)}, old is {old.dtype} {list(old.shape)}",
                rule="both have the same dtype and shape",
                who=self.what,
            )
        if fused is not None and 0 < weight <= self.max_weight:
            scale = math.ldexp(weight, self.exponent)
            low, high = fused(accumulator, new, old, scale)
            if -self.max_abs <= low and high <= self.max_abs:  # a NaN fails every comparison
                return
            fused(accumulator, new, old, -scale)  # takes every bit back; what follows says what is wrong
        with np.errstate(invalid="ignore", over="ignore"):  # refused below, with a better message
            self._add(self._integers(accumulator, new), self._floats(new), self._floats(old), weight)

    def decode(self, accumulator: torch.Tensor) -> torch.Tensor:
        """The sum in float64 [d]: accumulator * 2**-exponent, rounded once."""
        return accumulator.to(torch.float64).mul_(2.0**-self.exponent)

    def _integers(self, accumulator: torch.Tensor, values: torch.Tensor) -> _Integers:
        if not (accumulator.dtype is torch.int64 and accumulator.is_cpu and accumulator.dim() == 1):
            raise DataError(
                f"the accumulator is {accumulator.dtype} {list(accumulator.shape)} on {accumulator.device}",
                rule="an accumulator is int64 [d] on the CPU",
                who=self.what,
            )
        if accumulator.shape != values.shape:
            raise DataError(
                f"values have shape {list(values.shape)}, the accumulator {list(accumulator.shape)}",
                rule="both have the same shape [d]",
                who=self.what,
            )
        array: _Integers = accumulator.numpy()
        return array

    def _floats(self, values: torch.Tensor) -> _Floats:
        dtype = values.dtype
        if not dtype.is_floating_point:
            raise DataError(
                f"values are {dtype}", rule="values are floating point", fix="call .double()", who=self.what
            )
        if dtype is not torch.float32 and dtype is not torch.float64:
            values = values.float()  # exact; NumPy has no bfloat16
        array: _Floats = values.numpy(force=True)
        return array

    def _add(self, total: _Integers, values: _Floats, old: _Floats | None, weight: float) -> None:
        if not 0.0 < weight <= self.max_weight:
            raise DataError(
                f"the weight is {weight}", rule=f"0 < weight <= max_weight = {self.max_weight}", who=self.what
            )
        scale = math.ldexp(weight, self.exponent)
        add = self._add_few if len(total) <= _FEW else self._add_blocks
        bad = add(total, values, old, scale)
        if bad is None:
            return
        # Rounding is symmetric and integers add exactly, so adding the negative restores every bit.
        self._add_blocks(total[:bad], values[:bad], None if old is None else old[:bad], -scale)
        block = values[bad : bad + _BLOCK] - (0 if old is None else old[bad : bad + _BLOCK])
        index = int(np.argmin(np.abs(block) <= self.max_abs))
        raise DataError(
            f"value {bad + index} is {block[index]}",
            rule=f"values are finite and |value| <= max_abs = {self.max_abs}",
            fix="clip the update, lower the learning rate, or raise max_abs",
            who=self.what,
        )

    def _add_few(self, total: _Integers, values: _Floats, old: _Floats | None, scale: float) -> int | None:
        """`_add_blocks` for a handful of values."""
        items = (values if old is None else values - old).tolist()
        if not all(-self.max_abs <= item <= self.max_abs for item in items):
            return 0
        for index, item in enumerate(items):
            total[index] += round(item * scale)
        return None

    def _add_blocks(self, total: _Integers, values: _Floats, old: _Floats | None, scale: float) -> int | None:
        """Add block by block; stop before a block with a value out of bounds and return where it starts."""
        scratch, limit = self._scratch, self.max_abs
        for start in range(0, len(total), _BLOCK):
            sums, block = total[start : start + _BLOCK], values[start : start + _BLOCK]
            size = len(sums)
            product = scratch.double[:size]
            if old is not None:
                out = product if values.dtype == np.float64 else scratch.single[:size]
                block = np.subtract(block, old[start : start + _BLOCK], out=out)
            # argmin and argmax have a fraction of the overhead of min and max, and point at a NaN first.
            low, high = float(block[block.argmin()]), float(block[block.argmax()])
            if not (-limit <= low and high <= limit):  # a NaN fails every comparison
                return start
            product[:] = block
            np.multiply(product, scale, out=product)
            if max(high, -low) * abs(scale) <= _MAGIC_LIMIT:
                np.add(product, _MAGIC, out=product)
                integers = product.view(np.int64)
                np.subtract(integers, _MAGIC_BITS, out=integers)
            else:
                integers = scratch.integer[:size]
                np.rint(product, out=product)
                integers[:] = product
            np.add(sums, integers, out=sums)
        return None


def _check_bounds(max_abs: float, max_weight: float, cohort: int, what: str) -> None:
    for name, value in (("max_abs", max_abs), ("max_weight", max_weight)):
        if not 2.0**-128 <= value < 2.0**128:
            raise ConfigError(f"{name} is {value}", rule=f"{name} is in [2**-128, 2**128)", who=what)
    if not isinstance(cohort, int) or not 1 <= cohort < 2**63:
        raise ConfigError(f"cohort is {cohort}", rule="cohort is a whole number in [1, 2**63)", who=what)


def _largest(max_abs: float, max_weight: float, exponent: int) -> int:
    """The largest integer one contribution can become: the float64 product, scaled, rounded half to even."""
    return round(Fraction(max_abs * max_weight) * Fraction(2) ** exponent)
