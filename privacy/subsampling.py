"""What a secret draw of the cohort takes from a release that is known by Rényi divergences alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from mycelia.engine.errors import ConfigError

__all__ = ["without_replacement"]

Array = NDArray[np.float64]


def without_replacement(divergences: Mapping[int, float], rate: float) -> dict[int, float]:
    """Rényi divergences of a release over a part of the data, drawn uniformly and of a fixed size: a bound.

    Wang, Balle & Kasiviswanathan, "Subsampled Rényi differential privacy and analytical moments accountant",
    AISTATS 2019, theorem 9, for any mechanism whose divergences grow without end: with ε(j) at order j,

        (α - 1) ε'(α) = log(1 + q² C(α, 2) min{4 (exp ε(2) - 1), 2 exp ε(2)}
                              + Σ_{j=3..α} 2 q^j C(α, j) exp((j - 1) ε(j)))

    and never more than ε(α) itself. Neighbours are replaced, which the divergences have to be for.

    Args:
        divergences: at every whole order from 2 to the largest.
        rate: q, the drawn part over the whole, in (0, 1].

    Raises:
        ConfigError: an order is missing, or a value is out of range.
    """
    largest = max(divergences, default=1)
    if set(divergences) != set(range(2, largest + 1)) or largest < 2:
        raise ConfigError(
            f"orders {sorted(divergences)[:3]} … {largest}", rule="2, 3, … without a gap", who="subsampling"
        )
    if not 0 < rate <= 1 or not all(value >= 0 for value in divergences.values()):
        raise ConfigError(
            f"a rate of {rate}", rule="in (0, 1], and divergences at least 0", who="subsampling"
        )
    if rate == 1:
        return dict(divergences)
    orders = np.arange(2, largest + 1, dtype=np.float64)
    values = np.array([divergences[int(order)] for order in orders])
    grown: Array = math.log(2) + (orders - 1) * values
    second = values[0]
    grown[0] = min(math.log(4) + _log_expm1(second), math.log(2) + second)
    found = {}
    for alpha in range(2, largest + 1):
        j = orders[: alpha - 1]
        chosen = gammaln(alpha + 1) - gammaln(j + 1) - gammaln(alpha - j + 1) + j * math.log(rate)
        total = float(logsumexp(np.concatenate([[0.0], chosen + grown[: alpha - 1]])))
        # rounding of the sum is far below a billionth of it
        found[alpha] = min(divergences[alpha], total * (1 + 1e-9) / (alpha - 1))
    return found


def _log_expm1(value: float) -> float:
    """log(exp(value) - 1), for values from 0."""
    if value > 40:
        return value
    return math.log(math.expm1(value)) if value > 0 else -math.inf
