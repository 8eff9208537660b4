"""What a client's journal says: the rounds it joined, the survivors it signed, the rounds it released.

The journal outlives the process. With it, no restart makes a client answer a round a second time; a client
whose journal is missing or damaged cannot know what it released, and joins nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from mycelia.privacy.secagg.canonical import Reader
from mycelia.privacy.secagg.events import Record
from mycelia.privacy.secagg.messages import Reason, RoundConfig, SecureSumError, struct

__all__ = ["ClientHistory"]

_LIMIT: Final = 2**12  # bytes of a record


@dataclass(frozen=True)
class ClientHistory:
    """The facts in a journal.

    Attributes:
        epoch: the highest epoch of a roster it joined under.
        highest: of each job, the last (round, attempt) it joined.
        rounds: (job, round) of every release.
        signed: session id to the hash of the survivors that it signed there.
    """

    epoch: int = 0
    highest: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    rounds: frozenset[tuple[str, int]] = frozenset()
    signed: Mapping[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, records: Iterable[Record], past: ClientHistory | None = None) -> ClientHistory:
        """The facts in these records.

        Args:
            records: of a journal, in order.
            past: the facts in those before them.

        Raises:
            SecureSumError: `JOURNAL`: a record that is none, or a history that contradicts itself.
        """
        past = past or cls()
        epoch, highest, rounds, signed = past.epoch, dict(past.highest), set(past.rounds), dict(past.signed)
        for record in records:
            reader = Reader(record.body, _tag(record.kind), _LIMIT, Reason.JOURNAL)
            job, place, session_id = reader.text(), (reader.integer(), reader.integer()), reader.hash()
            if record.kind == "JOINED":
                if place <= highest.get(job, (-1, -1)):
                    raise reader.error("rounds out of order", rule="each attempt is joined once, in order")
                highest[job] = place
                epoch = max(epoch, reader.integer())
            elif record.kind == "AGREED":
                signed[session_id] = reader.hash()
            else:
                reader.hash()
                rounds.add((job, place[0]))
            reader.end()
        return cls(epoch, highest, frozenset(rounds), signed)

    def check(self, config: RoundConfig, epoch: int, client: int) -> None:
        """Refuse a round that was joined or released before, and a roster older than one seen.

        Raises:
            SecureSumError: `REPLAY`, `ALREADY_RELEASED`, `BAD_SIGNATURE`.
        """
        if epoch < self.epoch:
            raise SecureSumError(
                Reason.BAD_SIGNATURE,
                f"the roster has epoch {epoch}",
                rule="not older than one seen before",
                client=client,
                have=epoch,
                need=self.epoch,
            )
        place, last = (config.round, config.attempt), self.highest.get(config.job)
        if last is not None and place <= last:
            raise SecureSumError(
                Reason.REPLAY,
                f"round {place[0]}, attempt {place[1]}",
                rule=f"after round {last[0]}, attempt {last[1]}",
                client=client,
            )
        if (config.job, config.round) in self.rounds:
            raise SecureSumError(
                Reason.ALREADY_RELEASED,
                f"round {config.round} was released",
                rule="one release a round, or two sums of nearly the same clients could be subtracted",
                client=client,
            )


def joined(config: RoundConfig, epoch: int) -> Record:
    """Before the advert: this attempt is used up."""
    return Record("JOINED", struct(_tag("JOINED"), *_place(config), epoch))


def agreed(config: RoundConfig, u2_hash: bytes) -> Record:
    """Before the signature: these are the survivors."""
    return Record("AGREED", struct(_tag("AGREED"), *_place(config), u2_hash))


def released(config: RoundConfig, response: bytes) -> Record:
    """Before the shares leave: this round is released."""
    return Record("RELEASED", struct(_tag("RELEASED"), *_place(config), hashlib.sha256(response).digest()))


def _place(config: RoundConfig) -> tuple[str, int, int, bytes]:
    return config.job, config.round, config.attempt, config.session_id


def _tag(kind: str) -> str:
    if kind not in ("JOINED", "AGREED", "RELEASED"):
        raise SecureSumError(Reason.JOURNAL, f"a record {kind!r}", rule="a record of a client", who="journal")
    return f"SA1/{kind.lower()}"
