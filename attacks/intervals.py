"""Intervals for a share of which k of n were seen."""

from __future__ import annotations

import math
from typing import Literal

from scipy import special

from mycelia.engine.errors import ConfigError

__all__ = ["Side", "clopper_pearson", "wilson"]

Side = Literal["two", "lower", "upper"]


def wilson(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval (Wilson: "Probable inference", JASA 1927): what reports give with every share.

    >>> low, high = wilson(8, 10)
    >>> round(low, 4), round(high, 4)
    (0.4902, 0.9433)

    Args:
        k: successes.
        n: of so many, at least 1.
        confidence: in (0, 1).

    Returns:
        low, high.

    Raises:
        ConfigError: k is not in 0 … n, no trials, or a confidence outside (0, 1).
    """
    _check(k, n, confidence)
    z = float(special.ndtri(0.5 + confidence / 2))
    share, square = k / n, z * z / n
    middle = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / n + square / (4 * n)) / (1 + square)
    return (0.0 if k == 0 else max(0.0, middle - half), 1.0 if k == n else min(1.0, middle + half))


def clopper_pearson(k: int, n: int, confidence: float = 0.95, side: Side = "two") -> tuple[float, float]:
    """The exact interval (Clopper, Pearson: Biometrika 1934), from beta quantiles: for certificates.

    Args:
        k: successes.
        n: of so many, at least 1.
        confidence: in (0, 1).
        side: "two"; "lower": a lower bound, the upper one is 1; "upper": an upper bound, the lower one is 0.

    Returns:
        low, high.

    Raises:
        ConfigError: k is not in 0 … n, no trials, a confidence outside (0, 1), or another side.
    """
    _check(k, n, confidence)
    if side not in ("two", "lower", "upper"):
        raise ConfigError(f"side {side!r}", rule='"two", "lower" or "upper"', who="clopper_pearson")
    tail = (1 - confidence) / (2 if side == "two" else 1)
    low = 0.0 if side == "upper" or k == 0 else float(special.betaincinv(k, n - k + 1, tail))
    high = 1.0 if side == "lower" or k == n else float(special.betaincinv(k + 1, n - k, 1 - tail))
    return low, high


def _check(k: int, n: int, confidence: float) -> None:
    if n < 1 or not 0 <= k <= n or not 0 < confidence < 1:
        raise ConfigError(
            f"{k} of {n} at confidence {confidence}",
            rule="n at least 1, k from 0 to n, a confidence in (0, 1)",
            who="interval",
        )
