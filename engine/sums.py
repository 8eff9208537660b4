"""Updates that add, and their exact sums.

An update is a set of named terms, each a vector with a weight; every federated statistic here is
`sum_k weight_k * values_k` and `sum_k weight_k`. Both are summed in fixed point, so parallel workers, secure
sums and any order of arrival give the same total.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.fixedpoint import FixedPoint, Fused

__all__ = ["ExactSum", "SumFormat", "Term", "TermSpec", "Total", "Update"]


@dataclass(frozen=True)
class Term:
    """One weighted vector of an update: `weight * (values - minus)`.

    Attributes:
        values: floating point [d].
        weight: positive and finite.
        minus: subtracted from `values` when given, so that a difference needs no copy.
    """

    values: Tensor
    weight: float
    minus: Tensor | None = None


@dataclass(frozen=True)
class TermSpec:
    """What a term may hold.

    Attributes:
        size: number of entries.
        max_abs: bound on an entry's size; a client beyond it is rejected.
        grain: a secure sum carries the term as whole numbers of this, each beside the vector: for counts and
            other few numbers of a wide range. None: its entries are part of the vector.
        own_weight: whether its weight may differ from that of the client, the first term's.
    """

    size: int
    max_abs: float
    grain: float | None = None
    own_weight: bool = False


@dataclass(frozen=True)
class Update:
    """What one client contributes.

    Attributes:
        terms: vectors that add, by name; the names and sizes are the algorithm's.
        metrics: numbers for the report (loss sums, steps); they do not enter the model.
    """

    terms: Mapping[str, Term]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Total:
    """The sum of a round's updates.

    Attributes:
        sums: weighted sums, float64 [d] by term.
        weights: sums of the weights by term.
        count: number of updates.
    """

    sums: Mapping[str, Tensor]
    weights: Mapping[str, float]
    count: int

    def mean(self, name: str) -> Tensor:
        """The weighted mean of a term, float64 [d]; zeros when nobody sent it."""
        weight = self.weights[name]
        return self.sums[name] / weight if weight > 0 else torch.zeros_like(self.sums[name])


@dataclass(frozen=True)
class SumFormat:
    """Names, sizes and fixed-point formats of the terms, and how they lie in one int64 vector.

    Behind the entries of each term stands one more: the sum of its weights.
    """

    specs: Mapping[str, TermSpec]
    formats: Mapping[str, FixedPoint]
    weights: FixedPoint

    @classmethod
    def plan(cls, specs: Mapping[str, TermSpec], max_weight: float, cohort: int) -> SumFormat:
        """Formats that provably hold `cohort` updates.

        Args:
            specs: the algorithm's terms.
            max_weight: largest weight a client may have.
            cohort: most updates in one sum.

        Raises:
            ConfigError: the sum could overflow at any useful resolution.
        """
        formats = {
            name: FixedPoint.plan(spec.max_abs, max_weight, cohort, name) for name, spec in specs.items()
        }
        return cls(dict(specs), formats, FixedPoint.plan(1.0, max_weight, cohort, "weight"))

    @property
    def size(self) -> int:
        """Length of the int64 vector."""
        return sum(spec.size + 1 for spec in self.specs.values())

    def slices(self) -> dict[str, slice]:
        """Where each term's entries lie; its weight is the entry behind them."""
        result, offset = {}, 0
        for name, spec in self.specs.items():
            result[name] = slice(offset, offset + spec.size)
            offset += spec.size + 1
        return result


_ONE = torch.ones(1, dtype=torch.float64)
_MINUS_ONE = -_ONE


class ExactSum:
    """A running sum in an int64 vector, which may lie in shared memory.

    Args:
        form: the terms and their formats.
        accumulator: int64 [form.size] of zeros; made here when not given.
        fused: a compiled form for the differences of the term `params`, see `FixedPoint.add_difference_`.

    Raises:
        ConfigError: the accumulator has another dtype or shape.
    """

    def __init__(
        self, form: SumFormat, accumulator: Tensor | None = None, fused: Fused | None = None
    ) -> None:
        self.form = form
        if accumulator is None:  # from NumPy: the system zeroes a page when it is first used
            accumulator = torch.from_numpy(np.zeros(form.size, np.int64))
        self.accumulator = accumulator
        if self.accumulator.dtype is not torch.int64 or self.accumulator.shape != (form.size,):
            raise ConfigError(
                f"an accumulator of {self.accumulator.dtype} {list(self.accumulator.shape)}",
                rule=f"int64 [{form.size}]",
                who="exact sum",
            )
        self.count = 0
        self._fused = fused
        self._parts = {
            name: (self.accumulator[part], self.accumulator[part.stop : part.stop + 1])
            for name, part in form.slices().items()
        }

    def reset(self) -> None:
        """Back to zero."""
        self.accumulator.zero_()
        self.count = 0

    def add(self, update: Update) -> None:
        """Add an update whole, or not at all.

        Raises:
            DataError: a term is unknown, missing, of the wrong size, not finite or out of bounds.
        """
        if update.terms.keys() != self.form.specs.keys():
            raise DataError(
                f"terms {sorted(update.terms)}", rule=f"exactly {sorted(self.form.specs)}", who="update"
            )
        done: list[str] = []
        try:
            for name, term in update.terms.items():
                self._add(name, term.values, term.minus, term.weight, _ONE)
                done.append(name)
        except Exception:
            for name in done:  # rounding half to even is symmetric, so the negative takes it back exactly
                term = update.terms[name]
                if term.minus is None:
                    self._add(name, -term.values, None, term.weight, _MINUS_ONE)
                else:
                    self._add(name, term.minus, term.values, term.weight, _MINUS_ONE)
            raise
        self.count += 1

    def _add(self, name: str, values: Tensor, minus: Tensor | None, weight: float, sign: Tensor) -> None:
        entries, total = self._parts[name]
        fixed = self.form.formats[name]
        if minus is None:
            fixed.add_(entries, values, weight)
        else:
            fixed.add_difference_(entries, values, minus, weight, self._fused if name == "params" else None)
        self.form.weights.add_(total, sign, weight)

    @staticmethod
    def total(form: SumFormat, accumulators: Sequence[Tensor], count: int) -> Total:
        """The total of several running sums of one format."""
        whole = accumulators[0].clone()
        for other in accumulators[1:]:
            whole += other
        sums, weights = {}, {}
        for name, part in form.slices().items():
            sums[name] = form.formats[name].decode(whole[part])
            weights[name] = float(form.weights.decode(whole[part.stop : part.stop + 1]))
        return Total(sums, weights, count)
