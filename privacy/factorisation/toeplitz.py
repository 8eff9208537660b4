"""Strategies whose matrix has one coefficient a diagonal, and the square root of the prefix sums."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.privacy.factorisation.base import Draw, Error, Plan, Strategy, Workload
from mycelia.privacy.factorisation.series import convolve, inverse

__all__ = ["SqrtToeplitz", "Toeplitz", "squared_sensitivity", "workload_series"]


class Toeplitz(Strategy):
    """C[i, j] = c[i - j], with c[0] = 1 and coefficients that never rise or become negative."""

    @abstractmethod
    def coefficients(self, steps: int) -> Tensor:
        """c, float64 [steps]."""

    def sensitivity(self, participation: Plan) -> float:
        """Of the steps 0, b, 2b, …, as often as allowed (Kalinin & Lampert, NeurIPS 2024, theorem 2)."""
        coefficients = self.coefficients(participation.steps)
        return math.sqrt(squared_sensitivity(coefficients, participation))

    def error(self, workload: Workload) -> Error:
        """Variance of the answers; in the order of n log n steps, n² with learning rates."""
        inverted = inverse(self.coefficients(workload.steps))
        if workload.rates:
            variances = _with_rates(inverted, workload)
        else:
            variances = convolve(inverted, workload_series(workload)).square().cumsum(0)
        return Error(float(variances.max()), float(variances.mean()))


@dataclass(frozen=True)
class SqrtToeplitz(Toeplitz):
    """The square root of the prefix sums: coefficients 1, 1/2, 3/8, 5/16, … of (1 - x)^(-1/2).

    Of all Toeplitz strategies it has the least worst-case error for one participation (Fichtenberger,
    Henzinger & Upadhyay, ICML 2023; Dvijotham et al., FOCS 2024). Its noise needs no memory, but step t
    makes t + 1 draws.
    """

    name: ClassVar[str] = "sqrt-toeplitz"

    def coefficients(self, steps: int) -> Tensor:
        """c[i] = c[i-1] (2i - 1) / 2i, float64 [steps]."""
        return _binomial(steps, 0.5)

    def slots(self, steps: int) -> int:
        """0: earlier noise is drawn again."""
        return 0

    def advance(self, step: int, slots: Tensor, draw: Draw) -> Tensor:
        """Σ d[t - i] z[i], d the coefficients of (1 - x)^(1/2)."""
        weights = _binomial(step + 1, 1.5).tolist()
        noise = draw(step, "").clone()
        for back in range(1, step + 1):
            noise.add_(draw(step - back, ""), alpha=weights[back])
        return noise


def _binomial(steps: int, offset: float) -> Tensor:
    """1, then the last times (i - offset) / i: the series of (1 - x)^(offset - 1), float64 [steps]."""
    index = torch.arange(1, steps, dtype=torch.float64)
    return torch.cat([torch.ones(1, dtype=torch.float64), torch.cumprod((index - offset) / index, 0)])


def squared_sensitivity(coefficients: Tensor, participation: Plan) -> Tensor:
    """Squared length of the sum of the columns 0, b, 2b, …; differentiable.

    Args:
        coefficients: float64 [n], falling and at least 0.
        participation: of n steps.
    """
    steps = participation.steps
    total = coefficients
    for use in range(1, participation.possible):
        start = use * participation.separation
        total = torch.cat([total[:start], total[start:] + coefficients[: steps - start]])
    return total.dot(total)


def workload_series(workload: Workload) -> Tensor:
    """Σ_{j<=i} momentum^j: what a gradient has become after i steps with rates of 1, float64 [n]."""
    return _powers(workload.momentum, workload.steps).cumsum(0)


def _powers(momentum: float, steps: int) -> Tensor:
    return momentum ** torch.arange(steps, dtype=torch.float64)


def _with_rates(inverted: Tensor, workload: Workload) -> Tensor:
    steps = workload.steps
    velocity = convolve(inverted, _powers(workload.momentum, steps)).flip(0)
    answer = torch.zeros(steps, dtype=torch.float64)
    variances = torch.empty_like(answer)
    for step, rate in enumerate(workload.rates):
        known = answer[: step + 1]
        known.add_(velocity[steps - 1 - step :], alpha=rate)
        variances[step] = known.dot(known)
    return variances
