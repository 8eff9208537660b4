"""Tests of whether two samples come from one law: Kolmogorov–Smirnov for each feature, and MMD for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import generator

__all__ = ["TwoSample", "as_sample", "ks_test", "mmd_squared", "mmd_test"]

Matrix = Float[np.ndarray, "n d"]
_TOGETHER: Final = 2**22  # numbers of permuted memberships at a time


@dataclass(frozen=True)
class TwoSample:
    """What a test says.

    Attributes:
        name: "ks" or "mmd".
        statistic: largest distance of two distribution functions over features; or squared MMD.
        p: how likely so much or more is where the laws are the same; over all features.
        alpha: level.
        drift: p ≤ alpha.
        p_values: of each feature; () for MMD.
    """

    name: str
    statistic: float
    p: float
    alpha: float
    drift: bool
    p_values: tuple[float, ...] = ()


def as_sample(values: Any, who: str, least: int = 1) -> Matrix:
    """Rows of features as float64 [n, d]; what has more axes is flattened, and what has one is a column.

    Args:
        values: a tensor or an array.
        who: for messages.
        least: rows.

    Raises:
        DataError: too few rows, no features, or a value that is not finite.
    """
    found = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=np.float64)
    found = found[:, None] if found.ndim == 1 else found.reshape(len(found), -1) if found.ndim else found
    if found.ndim != 2 or len(found) < least or not found.shape[1] or not np.isfinite(found).all():
        raise DataError(
            f"a sample of shape {list(found.shape)}, {int((~np.isfinite(found)).sum())} values not finite",
            rule=f"[n, d], n at least {least}, all finite",
            who=who,
        )
    return found


def ks_test(reference: Any, current: Any, *, alpha: float = 0.05) -> TwoSample:
    """Kolmogorov–Smirnov for each feature, two-sided; Bonferroni over features.

    Drift where the smallest p-value is at most alpha / d: whatever the dependence of the features, at most
    alpha of pairs of samples of one law are called drift.

    Args:
        reference: [n, d], or [n].
        current: [m, d], or [m].
        alpha: level, in (0, 1).
    """
    one, two = _both(reference, current, alpha, "ks_test", 1)
    found = [stats.ks_2samp(a, b) for a, b in zip(one.T, two.T, strict=True)]
    p_values = tuple(float(each.pvalue) for each in found)
    p = min(1.0, len(p_values) * min(p_values))
    return TwoSample("ks", max(float(each.statistic) for each in found), p, alpha, p <= alpha, p_values)


def mmd_squared(reference: Any, current: Any, *, bandwidth: float) -> float:
    """Squared maximum mean discrepancy, the unbiased estimate, which may be below 0.

    Gretton et al.: "A kernel two-sample test", JMLR 2012, eq. 3, with the kernel exp(−‖a − b‖² / 2σ²).

    Args:
        reference: [n, d], n at least 2.
        current: [m, d], m at least 2.
        bandwidth: σ, above 0.
    """
    one, two = _both(reference, current, 0.5, "mmd_squared", 2)
    kernel = _kernel(np.concatenate([one, two]), bandwidth)
    first = np.arange(len(kernel)) < len(one)
    return float(_statistics(kernel, first[None])[0])


def mmd_test(
    reference: Any,
    current: Any,
    *,
    permutations: int = 500,
    bandwidth: float | None = None,
    alpha: float = 0.05,
    rng: int = 0,
) -> TwoSample:
    """Squared MMD beside what it is when rows are dealt to the two samples at random.

    p = (1 + permutations with at least as much) / (1 + permutations), which is exact at any sample size.
    Memory is (n + m)².

    Args:
        reference: [n, d], n at least 2.
        current: [m, d], m at least 2.
        permutations: at least 1/alpha − 1, or nothing could be called drift.
        bandwidth: of the kernel; None: the median distance of two rows of both samples together.
        alpha: level, in (0, 1).
        rng: seed of the permutations.
    """
    one, two = _both(reference, current, alpha, "mmd_test", 2)
    if permutations < 1 or 1 / (1 + permutations) > alpha:
        raise ConfigError(
            f"{permutations} permutations at level {alpha}",
            rule="the smallest p-value is 1 / (1 + permutations)",
            fix=f"permutations={int(np.ceil(1 / alpha)) - 1} or more",
            who="mmd_test",
        )
    both = np.concatenate([one, two])
    kernel = _kernel(both, _median_distance(both) if bandwidth is None else bandwidth)
    first = np.arange(len(both)) < len(one)
    observed = float(_statistics(kernel, first[None])[0])
    draw = generator(rng, "attacks/drift/mmd")
    as_much, left = 0, permutations
    while left:
        some = min(left, max(1, _TOGETHER // len(both)))
        dealt = draw.permuted(np.broadcast_to(first, (some, len(first))), axis=1)
        as_much += int((_statistics(kernel, dealt) >= observed - 1e-12).sum())  # rounding breaks no tie
        left -= some
    p = (1 + as_much) / (1 + permutations)
    return TwoSample("mmd", observed, p, alpha, p <= alpha)


def _both(reference: Any, current: Any, alpha: float, who: str, least: int) -> tuple[Matrix, Matrix]:
    if not 0 < alpha < 1:
        raise ConfigError(f"alpha {alpha}", rule="a level in (0, 1)", who=who)
    one, two = as_sample(reference, who, least), as_sample(current, who, least)
    if one.shape[1] != two.shape[1]:
        raise DataError(
            f"{one.shape[1]} and {two.shape[1]} features", rule="the same of both samples", who=who
        )
    return one, two


def _squared_distances(rows: Matrix) -> Matrix:
    """[n, n], 0 on the diagonal."""
    centred = rows - rows.mean(0)  # or squares of far-off rows would cancel
    squares = (centred**2).sum(1)
    found = np.maximum(squares[:, None] + squares - 2 * centred @ centred.T, 0.0)
    np.fill_diagonal(found, 0.0)
    return np.asarray(found)


def _median_distance(rows: Matrix) -> float:
    distances = np.sqrt(_squared_distances(rows)[np.triu_indices(len(rows), 1)])
    median = float(np.median(distances))
    if median > 0:
        return median
    return float(distances.mean()) or 1.0  # most rows are the same


def _kernel(rows: Matrix, bandwidth: float) -> Matrix:
    """[n, n], without its diagonal."""
    if not 0 < bandwidth < np.inf:
        raise ConfigError(f"bandwidth {bandwidth}", rule="above 0, in units of the features", who="mmd")
    kernel = np.exp(-_squared_distances(rows) / (2 * bandwidth**2))
    np.fill_diagonal(kernel, 0.0)
    return np.asarray(kernel)


def _statistics(kernel: Matrix, first: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Squared MMD for each way to deal the rows, [b]; `first` says who is in the first sample, [b, n]."""
    one = first.astype(np.float64)
    n = int(first[0].sum())
    m = len(kernel) - n
    of_one = one @ kernel
    inside = (of_one * one).sum(1)
    across = of_one.sum(1) - inside
    other = kernel.sum() - inside - 2 * across
    return np.asarray(inside / (n * (n - 1)) + other / (m * (m - 1)) - 2 * across / (n * m))
