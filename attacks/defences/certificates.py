"""What counts of noisy predictions certify: bounds, radii, and looks on the way that spend alpha.

Cohen, Rosenfeld, Kolter: "Certified adversarial robustness via randomized smoothing", ICML 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from mycelia.engine.errors import ConfigError

__all__ = [
    "Counted", "Look", "certified_radius", "check_attainable", "count_until", "draws_needed", "looks",
    "lower_bound", "max_radius", "top_two_p",
]  # fmt: skip

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_FIRST: Final = 24  # draws before the first look, at least


class Look(NamedTuple):
    """A look at the counts.

    Attributes:
        n: draws so far.
        alpha: chance of a wrong bound in this look.
    """

    n: int
    alpha: float


class Counted(NamedTuple):
    """Where counting ended.

    Attributes:
        agreed: draws that gave the class, [rows].
        n: of so many, [rows].
        lower: bound of the class's probability, [rows].
    """

    agreed: Ints
    n: Ints
    lower: Floats


def lower_bound(count: npt.ArrayLike, n: npt.ArrayLike, alpha: float) -> Floats:
    """One-sided Clopper–Pearson bounds (Biometrika 1934): above the share in at most alpha of all cases.

    Args:
        count: successes.
        n: of so many; broadcasts with count.
        alpha: in (0, 1).
    """
    k, of = np.broadcast_arrays(np.asarray(count, np.float64), np.asarray(n, np.float64))
    found: Floats = np.where(k > 0, special.betaincinv(np.maximum(k, 1), of - k + 1, alpha), 0.0)
    return found


def certified_radius(count: int, n: int, sigma: float, alpha: float) -> float:
    """The l2 radius σ·Φ⁻¹(p) in which the smoothed class stays, with confidence 1 − alpha; 0: none.

    p is the one-sided Clopper–Pearson bound (theorem 1 and algorithm CERTIFY of the paper).

    >>> round(certified_radius(100, 100, 0.25, 0.001), 4)
    0.3751

    Args:
        count: draws that gave the class.
        n: of so many, none of which chose the class.
        sigma: standard deviation of the noise, above 0.
        alpha: in (0, 1).

    Raises:
        ConfigError: a number out of range.
    """
    _check(n, sigma, alpha)
    if not 0 <= count <= n:
        raise ConfigError(f"{count} of {n}", rule="a count from 0 to n", who="certified_radius")
    return max(0.0, sigma * float(special.ndtri(lower_bound(count, n, alpha))))


def max_radius(n: int, sigma: float, alpha: float) -> float:
    """The largest radius that n draws can certify, σ·Φ⁻¹(alpha^(1/n)): all of them agree; 0: none.

    >>> round(max_radius(100_000, 0.25, 0.001), 4)
    0.9529

    Args:
        n: draws, at least 1.
        sigma: standard deviation of the noise, above 0.
        alpha: in (0, 1).

    Raises:
        ConfigError: a number out of range.
    """
    _check(n, sigma, alpha)
    return max(0.0, sigma * float(special.ndtri(math.exp(math.log(alpha) / n))))


def draws_needed(radius: float, sigma: float, alpha: float) -> int:
    """The smallest n for which `max_radius` is at least the radius (and above 0).

    Args:
        radius: at least 0, in units of the inputs.
        sigma: standard deviation of the noise, above 0.
        alpha: in (0, 1).

    Raises:
        ConfigError: a number out of range, or a radius that no number of draws certifies in float64.
    """
    _check(1, sigma, alpha)
    if not 0 <= radius < math.inf:
        raise ConfigError(f"radius {radius}", rule="at least 0 and finite", who="certificate")
    slope = float(special.log_ndtr(radius / sigma))  # log of the share that is needed
    if not slope < 0 or not math.isfinite(wanted := math.log(alpha) / slope) or wanted > 2**62:
        raise ConfigError(
            f"radius {radius:g} with sigma {sigma:g}", rule="no number of draws certifies it",
            fix="a larger sigma", who="certificate",
        )  # fmt: skip
    n = max(1, math.floor(wanted) - 1)
    while (reach := max_radius(n, sigma, alpha)) < radius or reach == 0:
        n += 1
    return n


def check_attainable(radius: float, n: int, sigma: float, alpha: float) -> None:
    """Refuse a radius that n draws can never certify.

    Raises:
        ConfigError: naming the largest radius, and the n that would do.
    """
    if radius > (most := max_radius(n, sigma, alpha)):
        raise ConfigError(
            f"radius {radius:g} from {n} draws with sigma {sigma:g} and alpha {alpha:g}",
            rule=f"at most {most:.6g}, where all draws agree",
            fix=f"n={draws_needed(radius, sigma, alpha)}",
            who="certificate",
        )


def top_two_p(first: npt.ArrayLike, second: npt.ArrayLike) -> Floats:
    """p-values of the two-sided binomial test that two counts come from equal shares.

    Args:
        first: counts of one class.
        second: counts of the other.

    Returns:
        P(a split as uneven or more), 1 where there are no draws.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    most, least = np.maximum(a, b), np.minimum(a, b)
    # P(X ≥ k) of m draws of share ½ is the incomplete beta function I_½(k, m − k + 1); both tails are equal.
    tail = np.where(most > 0, special.betainc(np.maximum(most, 1), least + 1, 0.5), 1.0)
    found: Floats = np.minimum(1.0, 2 * tail)
    return found


def looks(n: int, alpha: float, *, adaptive: bool = False) -> tuple[Look, ...]:
    """When to look at the counts, and what each look may spend.

    With `adaptive`, the number of draws doubles from look to look and the last one has all n. The last look
    spends half of alpha, the others share the rest evenly: bounds of all looks hold together with confidence
    1 − alpha (Bonferroni), so a row may stop at any of them for any reason.

    Args:
        n: draws at most.
        alpha: in (0, 1), of all looks together.
        adaptive: False: one look, at the end.
    """
    sizes = [n]
    while adaptive and sizes[0] >= 2 * _FIRST:
        sizes.insert(0, sizes[0] // 2)
    if len(sizes) == 1:
        return (Look(n, alpha),)
    early = alpha / 2 / (len(sizes) - 1)
    return (*(Look(size, early) for size in sizes[:-1]), Look(n, alpha / 2))


def count_until(
    draw: Callable[[Ints, Look, int], Ints],
    rows: int,
    schedule: Sequence[Look],
    sigma: float,
    radii: Sequence[float] = (),
) -> Counted:
    """Draw from look to look, until for each radius it is known whether it will be certified.

    A radius is certified once the lower bound of the class's probability reaches Φ(radius/σ), and given up
    once the upper bound is below that; giving up can only shorten what is certified.

    Args:
        draw: of (row numbers, look, fresh draws to make): how many of these gave each row's class.
        rows: how many.
        schedule: see `looks`.
        sigma: of the noise.
        radii: asked for; without any, all draws are made.
    """
    count, used = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    lower = np.zeros(rows)
    shares = special.ndtr(np.asarray(radii, np.float64) / sigma)
    going, before = np.arange(rows), 0
    for look in schedule:
        if not len(going):
            break
        count[going] += draw(going, look, look.n - before)
        used[going], before = look.n, look.n
        lower[going] = np.maximum(lower[going], lower_bound(count[going], look.n, look.alpha))
        if len(shares):
            upper = 1 - lower_bound(look.n - count[going], look.n, look.alpha)
            open_ = (lower[going, None] < shares) | (lower[going, None] <= 0.5)
            going = going[(open_ & (upper[:, None] >= shares)).any(1)]
    return Counted(count, used, lower)


def _check(n: int, sigma: float, alpha: float) -> None:
    if n < 1 or not 0 < sigma < math.inf or not 0 < alpha < 1:
        raise ConfigError(
            f"n {n}, sigma {sigma}, alpha {alpha}",
            rule="n at least 1, sigma above 0, alpha in (0, 1)",
            who="certificate",
        )
