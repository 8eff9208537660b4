"""What travels between the machines of a simulated secure sum, and who may sign a lie about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg import keys
from mycelia.privacy.secagg.keys import Identity
from mycelia.privacy.secagg.messages import PHASES, SERVER, Config, Message

__all__ = ["SERVER_NAME", "InFlight", "Keys", "Wire", "half"]

SERVER_NAME: Final = "server"


@dataclass(frozen=True)
class InFlight:
    """A message on its way. A changed `message` under an unchanged `raw` is sent with the old signature.

    Attributes:
        phase: of the message, or of the server for one that belongs to none.
        sender: a client's id, 0 for the server.
        receiver: the same.
        message: what it says.
        raw: the signed bytes that travel.
        chunks: of an upload, behind its header.
        held: the phase it is held until, "" if it is not.
    """

    phase: str
    sender: int
    receiver: int
    message: Message
    raw: bytes = field(repr=False)
    chunks: tuple[bytes | memoryview, ...] = field(default=(), repr=False)
    held: str = ""

    def until(self, phase: str) -> InFlight:
        """The same, delivered when the server has entered a phase, or "done"."""
        if phase not in (*PHASES, "done"):
            raise ConfigError(f"held until {phase!r}", rule=f"one of {', '.join(PHASES)}, done", who="wire")
        return replace(self, held=phase)


class Keys:
    """Signs what liars send: for the server, and for the clients named as corrupt."""

    def __init__(self, identities: Mapping[int, Identity], corrupt: Iterable[int], session_id: bytes) -> None:
        self._identities, self._corrupt, self._session_id = identities, frozenset(corrupt), session_id

    def sign(self, message: Message, as_: int | str, *, session_id: bytes | None = None) -> bytes:
        """A message in a signed envelope, as bytes.

        Args:
            message: what to say.
            as_: "server", or the id of a corrupt client.
            session_id: another session than the present one; a `Config` brings its own.

        Raises:
            ConfigError: for an honest client.
        """
        sender = SERVER if as_ == SERVER_NAME else as_
        if sender != SERVER and sender not in self._corrupt:
            raise ConfigError(f"a signature of {as_!r}", rule="'server' or a corrupt client", who="wire")
        own = message.round.session_id if isinstance(message, Config) else self._session_id
        identity = self._identities[int(sender)]
        return keys.sign(message, session_id or own, int(sender), identity).encode()


Wire = Callable[[InFlight, Keys], InFlight | Iterable[InFlight] | None]
"""Sees every message, and returns what is delivered in its place."""


def half(chunks: Sequence[memoryview]) -> tuple[memoryview, ...]:
    """The first half of an upload."""
    left, half = sum(map(len, chunks)) // 2, []
    for chunk in chunks:
        half.append(chunk[: min(left, len(chunk))])
        left -= len(half[-1])
    return tuple(chunk for chunk in half if len(chunk))
