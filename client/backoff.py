"""How long a device waits before it connects again: no I/O, the clock and the dice are arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final

from mycelia.aggregator.wire.frames import STATUS, Reason
from mycelia.engine.errors import ProtocolError

__all__ = [
    "OPERATOR_S",
    "RECONNECT_CAP_S",
    "START_S",
    "Backoff",
    "Then",
    "TransportError",
    "reconnect_cap",
    "then",
]

START_S: Final = 1.0
"""The longest first wait, seconds."""
RECONNECT_CAP_S: Final = 60.0
"""The longest wait, as long as no server has said how its rounds are timed."""
OPERATOR_S: Final = 900.0
"""The wait for somebody to do something, 15 minutes."""

_LEAST_S: Final = 0.05
_SPREAD: Final = 0.1
_MOST_S: Final = 86_400.0  # what a server may ask for


class Then(Enum):
    """What a device does after a failure."""

    RETRY = "tries again"
    OPERATOR = "waits for the operator"
    STOP = "stops"


_OPERATOR: Final = {7, 12, 15, 16}  # PERMISSION_DENIED, UNIMPLEMENTED, DATA_LOSS, UNAUTHENTICATED
_REASONS: Final[Mapping[Reason, Then]] = {
    Reason.VERSION: Then.OPERATOR,
    Reason.SUPERSEDED: Then.STOP,
}


def then(code: int, reason: Reason | None = None) -> Then:
    """What follows a stream that ended.

    >>> then(14).value, then(16).value
    ('tries again', 'waits for the operator')

    Args:
        code: gRPC's number of its status.
        reason: if the server gave one.
    """
    if reason is not None:
        code = STATUS[reason]
        if reason in _REASONS:
            return _REASONS[reason]
    return Then.OPERATOR if code in _OPERATOR else Then.RETRY


class TransportError(ProtocolError):
    """There is no connection, or it ended.

    Args:
        then: what the device does now.
        found: what was found, as a sentence.
        rule: the rule it breaks.
        fix: what the reader can do about it.
        who: which server.
        reason: if the server gave one.
        delay_s: after which the server said to come again; 0: it did not say.

    Attributes:
        then: as given.
        reason: as given.
        delay_s: as given.
    """

    def __init__(
        self,
        then: Then,
        found: str,
        *,
        rule: str = "",
        fix: str = "",
        who: str = "",
        reason: Reason | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self.then, self.reason, self.delay_s = then, reason, delay_s
        super().__init__(found, rule=rule, fix=fix, who=who)

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild across process boundaries with the same parts."""
        parts = (self.then, self.found, self.rule, self.fix, self.who, self.reason, self.delay_s)
        return _rebuild, parts


def _rebuild(
    then: Then, found: str, rule: str, fix: str, who: str, reason: Reason | None, delay_s: float
) -> TransportError:
    return TransportError(then, found, rule=rule, fix=fix, who=who, reason=reason, delay_s=delay_s)


def reconnect_cap(heartbeat_s: float) -> float:
    """The longest wait with a server of this heartbeat: of both, the server has told the one.

    >>> reconnect_cap(15.0)
    60.0

    Args:
        heartbeat_s: as its Welcome says; a 40th of the budget, where the cap is a tenth.
    """
    return min(max(4 * heartbeat_s, 2.0), RECONNECT_CAP_S)


class Backoff:
    """Waits of one device: 1 s, doubled up to a cap, each drawn between nothing and that ("full jitter").

    Args:
        uniform: draws a number between two.
        clock: seconds, never backwards.
        cap_s: the longest wait.

    Attributes:
        cap_s: as given; may be set.
    """

    def __init__(
        self,
        uniform: Callable[[float, float], float],
        clock: Callable[[], float],
        *,
        cap_s: float = RECONNECT_CAP_S,
    ) -> None:
        self._uniform, self._clock, self.cap_s = uniform, clock, cap_s
        self._failures = 0
        self._not_before: float | None = None

    def reset(self) -> None:
        """A task was completed."""
        self._failures = 0

    def retry_at(self, delay_s: float) -> None:
        """The server says when to come again, which overrides everything; a tenth more or less is added."""
        spread = self._uniform(1 - _SPREAD, 1 + _SPREAD)
        self._not_before = self._clock() + min(max(delay_s, 0.0), _MOST_S) * spread

    def next(self, what: Then = Then.RETRY) -> float:
        """Seconds to wait now, after a failure.

        Args:
            what: follows it; not `STOP`.
        """
        left = 0.0 if self._not_before is None else self._not_before - self._clock()
        self._not_before = None
        if left > 0:
            return left
        if what is Then.OPERATOR:
            return OPERATOR_S * self._uniform(1 - _SPREAD, 1 + _SPREAD)
        most = min(START_S * 2.0 ** min(self._failures, 32), self.cap_s)
        self._failures += 1
        return max(self._uniform(0.0, most), _LEAST_S)
