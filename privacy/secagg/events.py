"""What goes into the two machines of a secure sum, and what comes out: events, effects, journal records.

The driver (a service, the simulation or a test) carries out the effects of one event in their order before
the next event; a `Persist` is durable before the effect behind it is begun. Whoever drives a machine owns the
clock, the files and the connections. Printed, none of them shows what it carries: an answer may hold shares,
and what is printed ends up in logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy.typing as npt

from mycelia.privacy.secagg.canonical import Reason, SecureSumError, struct

__all__ = [
    "CHUNK_BYTES",
    "Abort",
    "Charge",
    "ChargeRefused",
    "ChunkReceived",
    "Close",
    "Effect",
    "Event",
    "Finish",
    "Left",
    "LocalUpdate",
    "Persist",
    "Received",
    "Record",
    "Refuse",
    "Release",
    "Send",
    "SendStream",
    "Tick",
]

CHUNK_BYTES: Final = 2**20
"""The most bytes of one chunk of an upload."""


class Received(NamedTuple):
    """The bytes of an envelope have come; `sender` is who the connection belongs to, 0 for the server."""

    sender: int
    data: bytes

    def __repr__(self) -> str:
        return f"Received(sender={self.sender}, {len(self.data)} bytes)"


class ChunkReceived(NamedTuple):
    """The next part of an upload whose header came before; chunks count from 0."""

    sender: int
    number: int
    data: bytes | memoryview

    def __repr__(self) -> str:
        return f"ChunkReceived(sender={self.sender}, number={self.number}, {len(self.data)} bytes)"


class Tick(NamedTuple):
    """It is `now`, in seconds on a clock that does not run backwards. The first one starts a machine."""

    now: float


class LocalUpdate(NamedTuple):
    """To a client: its own contribution is ready."""

    vector: npt.NDArray[Any]
    """Floats to be encoded, or whole numbers that are codes already, [d]."""
    weight: int = 1
    slots: Mapping[str, int] = {}

    def __repr__(self) -> str:
        return "LocalUpdate(…)"


class Close(NamedTuple):
    """To a server: enough have answered in this phase. Of another phase it does nothing."""

    phase: str


class ChargeRefused(NamedTuple):
    """The budget did not allow the last `Charge`; none of the effects behind it was carried out."""

    found: str


class Left(NamedTuple):
    """To a server: a client says, outside of the session, that it takes no part or no more."""

    sender: int
    found: str


Event = Received | ChunkReceived | Tick | LocalUpdate | Close | ChargeRefused | Left


@dataclass(frozen=True)
class Record:
    """One entry of a journal.

    Attributes:
        kind: server: CONFIG, ADVERT, U0, SHARES, U1, RECEIPT, SNAPSHOT, U2, AGREE, CHARGED, RESULT, FAILED;
            client: JOINED, AGREED, RELEASED.
        body: canonical bytes, without any secret.
    """

    kind: str
    body: bytes = field(repr=False)

    def encode(self) -> bytes:
        """Canonical bytes."""
        return struct("SA1/record", self.kind, self.body)


class Persist(NamedTuple):
    """Append to the journal, durably."""

    record: Record


class Send(NamedTuple):
    """Send the bytes of an envelope; 0 is the server."""

    to: int
    data: bytes

    def __repr__(self) -> str:
        return f"Send(to={self.to}, {len(self.data)} bytes)"


class SendStream(NamedTuple):
    """Send the bytes of an envelope, then chunks of at most `CHUNK_BYTES`."""

    to: int
    header: bytes
    chunks: Iterable[memoryview]

    def __repr__(self) -> str:
        return f"SendStream(to={self.to}, {len(self.header)} bytes and chunks)"


class Release(NamedTuple):
    """What a budget is charged with; a charge with the session id of an earlier one is that one."""

    session_id: bytes
    job: str
    round: int
    attempt: int
    survivors: int


class Charge(NamedTuple):
    """Charge the ledger, durably; if it refuses, drop the effects behind this and send `ChargeRefused`."""

    release: Release


class Refuse(NamedTuple):
    """A message changed nothing: tell its sender why."""

    to: int
    error: SecureSumError


class Finish(NamedTuple):
    """The session is over: the sum on the server, the transcript's hash on a client."""

    result: Any


class Abort(NamedTuple):
    """The machine has stopped without a result, and has erased its secrets."""

    error: SecureSumError

    @property
    def reason(self) -> Reason:
        """The code."""
        return self.error.reason


Effect = Persist | Send | SendStream | Charge | Refuse | Finish | Abort
