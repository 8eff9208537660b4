"""What goes wrong between server and device: reasons, their gRPC status, the error that carries one."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Self

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.position import Position
from mycelia.engine.errors import MyceliaError, ProtocolError

__all__ = ["ENDS_STREAM", "MAX_TEXT", "STATUS", "FrameError", "Problem", "Reason", "clipped"]

MAX_TEXT: Final = 256
"""Bytes of any text in a frame, in UTF-8."""


class Reason(StrEnum):
    """Why a frame, a payload, a task or a stream came to nothing."""

    BAD_HELLO = "BAD_HELLO"
    CERT_EXPIRED = "CERT_EXPIRED"
    NOT_ENROLLED = "NOT_ENROLLED"
    REVOKED = "REVOKED"
    BAD_TOKEN = "BAD_TOKEN"
    VERSION = "VERSION"
    STALE_ROUND = "STALE_ROUND"
    STALE_MODEL = "STALE_MODEL"
    WRONG_PHASE = "WRONG_PHASE"
    SCHEMA = "SCHEMA"
    POLICY = "POLICY"
    EQUIVOCATION = "EQUIVOCATION"
    FRAME = "FRAME"
    BAD_PAYLOAD = "BAD_PAYLOAD"
    NONFINITE = "NONFINITE"
    WEIGHT = "WEIGHT"
    RATE = "RATE"
    TOO_LARGE = "TOO_LARGE"
    SPOOL_FULL = "SPOOL_FULL"
    BUSY = "BUSY"
    LATE = "LATE"
    STALL = "STALL"
    HELLO = "HELLO"
    SUPERSEDED = "SUPERSEDED"
    QUORUM = "QUORUM"
    ROUND_ABORTED = "ROUND_ABORTED"
    DRAINING = "DRAINING"
    STORE = "STORE"
    NOT_LEADER = "NOT_LEADER"
    STORE_CORRUPT = "STORE_CORRUPT"
    BUG = "BUG"


_INVALID_ARGUMENT, _DEADLINE_EXCEEDED, _ALREADY_EXISTS, _PERMISSION_DENIED = 3, 4, 6, 7
_RESOURCE_EXHAUSTED, _FAILED_PRECONDITION, _ABORTED, _INTERNAL = 8, 9, 10, 13
_UNAVAILABLE, _DATA_LOSS, _UNAUTHENTICATED = 14, 15, 16

_REASONS: Final[Mapping[int, tuple[Reason, ...]]] = {
    _UNAUTHENTICATED: (Reason.BAD_HELLO, Reason.CERT_EXPIRED),
    _PERMISSION_DENIED: (Reason.NOT_ENROLLED, Reason.REVOKED, Reason.BAD_TOKEN),
    _FAILED_PRECONDITION: (
        Reason.VERSION,
        Reason.STALE_ROUND,
        Reason.STALE_MODEL,
        Reason.WRONG_PHASE,
        Reason.SCHEMA,
        Reason.POLICY,
    ),
    _ALREADY_EXISTS: (Reason.EQUIVOCATION,),
    _INVALID_ARGUMENT: (Reason.FRAME, Reason.BAD_PAYLOAD, Reason.NONFINITE, Reason.WEIGHT),
    _RESOURCE_EXHAUSTED: (Reason.RATE, Reason.TOO_LARGE, Reason.SPOOL_FULL, Reason.BUSY),
    _DEADLINE_EXCEEDED: (Reason.LATE, Reason.STALL, Reason.HELLO),
    _ABORTED: (Reason.SUPERSEDED, Reason.QUORUM, Reason.ROUND_ABORTED),
    _UNAVAILABLE: (Reason.DRAINING, Reason.STORE, Reason.NOT_LEADER),
    _DATA_LOSS: (Reason.STORE_CORRUPT,),
    _INTERNAL: (Reason.BUG,),
}

STATUS: Final[Mapping[Reason, int]] = MappingProxyType(
    {reason: code for code, reasons in _REASONS.items() for reason in reasons}
)
"""gRPC's number of the status that each reason travels with."""

ENDS_STREAM: Final = frozenset({
    Reason.BAD_HELLO, Reason.CERT_EXPIRED, Reason.NOT_ENROLLED, Reason.REVOKED, Reason.BAD_TOKEN,
    Reason.VERSION, Reason.FRAME, Reason.RATE, Reason.STALL, Reason.HELLO, Reason.SUPERSEDED, Reason.DRAINING,
    Reason.STORE, Reason.NOT_LEADER, Reason.STORE_CORRUPT, Reason.BUG,
})  # fmt: skip
"""The reasons that end a stream; the others are about one task and travel as an `Outcome`."""


class Problem(ProtocolError):
    """Something of `Reason` happened; it is told to the other side with its hint.

    Args:
        reason: the code that travels and that callers branch on.
        found: what was found, as a sentence.
        rule: the rule it breaks.
        fix: what the reader can do about it.
        who: whom or what it concerns.
        phase: of the round, or "".
        hint: for the other side; by default what was found, the rule and the fix. Cut to `MAX_TEXT` bytes.

    Attributes:
        reason: as given.
        phase: as given.
        hint: as it travels.
    """

    def __init__(
        self,
        reason: Reason,
        found: str,
        *,
        rule: str = "",
        fix: str = "",
        who: str = "",
        phase: str = "",
        hint: str = "",
    ) -> None:
        self.reason, self.phase, self._sentence = reason, phase, found
        self.hint = clipped(hint or "; ".join(filter(None, (found, rule, fix))))
        super().__init__(f"{reason}: {found}", rule=rule, fix=fix, who=who)

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild across process boundaries with the same parts."""
        parts = {"rule": self.rule, "fix": self.fix, "who": self.who, "phase": self.phase, "hint": self.hint}
        return (_rebuild, (type(self), self.reason, self._sentence, parts))

    @property
    def status(self) -> int:
        """Its number in gRPC."""
        return STATUS[self.reason]

    @property
    def ends_stream(self) -> bool:
        """Whether the stream ends with it."""
        return self.reason in ENDS_STREAM

    def outcome(self, at: Position) -> pb.Outcome:
        """As it is told about one piece of work."""
        return pb.Outcome(
            at=at.to_wire(),
            code=self.status,
            reason=self.reason.value,
            phase=clipped(self.phase),
            hint=self.hint,
        )

    def goodbye(self, delay_ms: int = 0) -> pb.Goodbye:
        """As it is told when the stream ends.

        Args:
            delay_ms: after which the other side may try again.
        """
        return pb.Goodbye(code=self.status, reason=self.reason.value, hint=self.hint, delay_ms=delay_ms)

    @classmethod
    def of(cls, message: pb.Outcome | pb.Goodbye) -> Self:
        """What the other side told; not for an outcome of code 0, which is no problem.

        Raises:
            FrameError: a reason that does not exist, or with another status than its own.
        """
        if message.reason not in Reason.__members__ or STATUS[Reason[message.reason]] != message.code:
            raise FrameError(
                Reason.FRAME,
                f"reason {message.reason!r} with status {message.code}",
                rule="a known reason with its own status",
            )
        phase = message.phase if isinstance(message, pb.Outcome) else ""
        hint = message.hint
        return cls(Reason[message.reason], hint or "no hint", who="the other side", phase=phase, hint=hint)


class FrameError(Problem):
    """Bytes that are no frame, or a frame that breaks the order of a stream: `FRAME` or `TOO_LARGE`."""


def _rebuild(cls: type[Problem], reason: Reason, found: str, parts: dict[str, str]) -> MyceliaError:
    return cls(reason, found, **parts)


def clipped(text: str, most: int = MAX_TEXT) -> str:
    """Text cut to so many bytes of UTF-8; that it was cut can be seen."""
    data = text.encode(errors="replace")
    if len(data) <= most:
        return data.decode()
    return data[: most - 3].decode(errors="ignore") + "…"
