"""From the one time budget of a round to the end of each of its phases."""

from __future__ import annotations

from typing import NamedTuple

from mycelia.engine.errors import ConfigError

__all__ = ["MIN_BUDGET_S", "Deadlines", "derive"]

MIN_BUDGET_S = 20.0


class Deadlines(NamedTuple):
    """When each phase ends, in seconds after the round began; the last one is the budget."""

    select: float
    configure: float
    train: float
    merge: float
    evaluate: float


def derive(budget_s: float) -> Deadlines:
    """Divides the budget; training gets what the other phases leave.

    >>> derive(600)
    Deadlines(select=10.0, configure=40.0, train=540.0, merge=570.0, evaluate=600.0)
    """
    if not budget_s >= MIN_BUDGET_S:
        raise ConfigError(
            f"budget_s is {budget_s}", rule=f"a round has {MIN_BUDGET_S:g} s or more", who="round"
        )
    select = min(budget_s / 60, 10.0)
    configure = _clamp(budget_s / 20, 2.0, 30.0)
    merge = evaluate = _clamp(budget_s / 20, 2.0, 60.0)
    train_end = budget_s - evaluate - merge
    return Deadlines(select, select + configure, train_end, budget_s - evaluate, float(budget_s))


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
