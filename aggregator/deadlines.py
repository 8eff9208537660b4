"""From the one time budget of a round to every timeout of the server."""

from __future__ import annotations

from typing import Final, NamedTuple

from mycelia.engine.errors import ConfigError

__all__ = ["MIN_BUDGET_S", "REVOKED_S", "SHUTDOWN_S", "Deadlines", "Waits", "derive"]

MIN_BUDGET_S: Final = 20.0
SHUTDOWN_S: Final = 10.0
"""In which a server that is told to end has ended."""
REVOKED_S: Final = 5.0
"""In which the streams of a revoked id have ended, once the server has the roster that says so."""

_MISSED: Final = 3


class Waits(NamedTuple):
    """How long either side of a connection waits, in seconds.

    Attributes:
        heartbeat: between two pings.
        lost: without a sign of life, after which a device is lost.
        stall: in which something has to come, and to be taken, of what was asked for.
        hello: from the opening of a stream to its Hello.
        reconnect_cap: the longest that a device waits before it tries again.
    """

    heartbeat: float
    lost: float
    stall: float
    hello: float
    reconnect_cap: float


class Deadlines(NamedTuple):
    """When each phase ends, in seconds after the round began; the last one is the budget.

    Attributes:
        select: who takes part is known.
        advertise: the keys of a secure sum are there; without one, as `configure`.
        configure: everyone selected has said that it is ready, and with a secure sum holds its shares.
        train: updates are there.
        agree: the survivors of a secure sum are agreed on; without one, as `train`.
        unmask: its sum is open; without one, as `train`.
        merge: the new model is published.
        evaluate: the round is over.
        waits: of the connections meanwhile.
    """

    select: float
    advertise: float
    configure: float
    train: float
    agree: float
    unmask: float
    merge: float
    evaluate: float
    waits: Waits


def derive(budget_s: float, *, secure_sum: bool = False) -> Deadlines:
    """Divides the budget; training gets what the other phases leave.

    >>> derive(600)[:4]
    (10.0, 40.0, 40.0, 540.0)
    >>> derive(600, secure_sum=True)[:8]
    (10.0, 40.0, 70.0, 500.0, 520.0, 540.0, 570.0, 600.0)
    >>> derive(600).waits
    Waits(heartbeat=15.0, lost=45.0, stall=30.0, hello=10.0, reconnect_cap=60.0)

    Args:
        budget_s: seconds for the whole round, at least `MIN_BUDGET_S`.
        secure_sum: whether updates are masked.

    Raises:
        ConfigError: a budget that is too small.
    """
    if not MIN_BUDGET_S <= budget_s < float("inf"):
        raise ConfigError(
            f"budget_s is {budget_s}", rule=f"a round has {MIN_BUDGET_S:g} s or more", who="round"
        )
    select = min(budget_s / 60, 10.0)
    advertise = select + _clamp(budget_s / 20, 2.0, 30.0)
    configure = advertise + (_clamp(budget_s / 20, 2.0, 30.0) if secure_sum else 0.0)
    merge = evaluate = _clamp(budget_s / 20, 2.0, 60.0)
    agree = unmask = _clamp(budget_s / 30, 2.0, 20.0) if secure_sum else 0.0
    merge_end = budget_s - evaluate
    unmask_end = merge_end - merge
    agree_end = unmask_end - unmask
    heartbeat = _clamp(budget_s / 40, 1.0, 15.0)
    waits = Waits(
        heartbeat,
        _MISSED * heartbeat,
        _clamp(budget_s / 20, 2.0, 30.0),
        _clamp(budget_s / 30, 2.0, 10.0),
        _clamp(budget_s / 10, 2.0, 60.0),
    )
    return Deadlines(
        select,
        advertise,
        configure,
        agree_end - agree,
        agree_end,
        unmask_end,
        merge_end,
        float(budget_s),
        waits,
    )


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
