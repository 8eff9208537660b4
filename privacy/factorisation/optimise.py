"""Fitting a strategy to a plan."""

from __future__ import annotations

from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.privacy.factorisation.banded import Banded
from mycelia.privacy.factorisation.base import Plan, Strategy, Workload
from mycelia.privacy.factorisation.blt import BLT
from mycelia.privacy.factorisation.series import convolve, correlate, inverse
from mycelia.privacy.factorisation.toeplitz import squared_sensitivity, workload_series

__all__ = ["fitted", "optimise"]

_S = TypeVar("_S", Banded, BLT)


def fitted(strategy: Strategy, participation: Plan) -> Strategy:
    """The strategy as `optimise` makes it, where it has something to be fitted; else as it is."""
    if isinstance(strategy, Banded):
        return optimise(strategy, participation)
    return optimise(strategy, participation) if isinstance(strategy, BLT) else strategy


def optimise(
    strategy: _S,
    participation: Plan,
    objective: Literal["maximum", "mean"] = "maximum",
    workload: Workload | None = None,
) -> _S:
    """The strategy of the same kind and size with the least noise in the answers.

    Minimises sensitivity² times `error` by L-BFGS-B in float64. The start is fixed, so the result repeats.

    Args:
        strategy: says the kind and the number of bands or buffers; its coefficients are not used. No more
            bands are fitted than there are steps.
        participation: the plan.
        objective: which error counts, that of the worst step or the mean.
        workload: of as many steps and without learning rates; running sums by default.

    Raises:
        ConfigError: another objective, or a workload that cannot be optimised for.
    """
    steps = participation.steps
    workload = workload or Workload(steps)
    if objective not in ("maximum", "mean"):
        raise ConfigError(f"the objective is {objective!r}", rule="maximum or mean", who="optimise")
    if workload.steps != steps or workload.rates:
        raise ConfigError(
            f"a workload of {workload.steps} steps with {len(workload.rates)} learning rates",
            rule=f"{steps} steps and no rates: Toeplitz strategies are fitted to Toeplitz workloads",
            fix="fit to the momentum alone; `error` then says what the rates make of it",
            who="optimise",
        )
    answers = workload_series(workload)
    weights = torch.ones(steps, dtype=torch.float64)
    if objective == "mean":
        weights = torch.arange(steps, 0, -1, dtype=torch.float64) / steps

    def loss(values: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        parameters = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        coefficients = strategy.unfold(parameters, steps)
        log_error, slope = _log_error(coefficients.detach(), answers, weights)
        log_sensitivity = squared_sensitivity(coefficients, participation).log()
        (gradient,) = torch.autograd.grad(log_sensitivity + coefficients.dot(slope), parameters)
        return log_error + log_sensitivity.item(), gradient.numpy()

    start = strategy.start(steps)
    if not len(start):
        return strategy.fitted(start)
    options = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-13, "gtol": 1e-9}
    limits = [strategy.limits] * len(start)
    from scipy.optimize import minimize  # a tenth of a second that only strategies to be fitted need

    found = minimize(loss, start.numpy(), jac=True, method="L-BFGS-B", bounds=limits, options=options)
    return strategy.fitted(torch.from_numpy(found.x))


def _log_error(coefficients: Tensor, answers: Tensor, weights: Tensor) -> tuple[float, Tensor]:
    """The logarithm of Σ weights row², row = answers / coefficients, and its slope in the coefficients."""
    inverted = inverse(coefficients)
    row = convolve(inverted, answers)
    error = weights.dot(row.square())
    to_inverted = correlate(2 * weights * row, answers)
    return error.log().item(), -correlate(to_inverted, convolve(inverted, inverted)) / error
