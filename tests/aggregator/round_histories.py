"""What rounds leave in a log, made by their rules, and a store with a run to write it to."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from mycelia.aggregator.blobs import Blobs
from mycelia.aggregator.charges import charge
from mycelia.aggregator.leases import Lease, take
from mycelia.aggregator.log_records import (
    Accepted,
    Charged,
    Entry,
    Failed,
    Frozen,
    Issued,
    Machine,
    Merged,
    Open,
    Published,
    Snapshot,
)
from mycelia.aggregator.round_log import RoundLog
from mycelia.aggregator.store import Store
from mycelia.privacy.events import Event
from mycelia.privacy.secagg.events import Record

BLOBS = [f"blob {number}".encode() for number in range(3)]
MODEL, STATE, SUM = (sha256(data).digest() for data in BLOBS)
CONFIG = b"rounds = 3"
EVENT = Event("fixed", 0.1, 1.0, "replace-one", unit="client")


def charged(place: Place, entries: Sequence[Entry]) -> list[Entry]:
    """The entries, after their releases were charged; CHARGED says the hash."""
    found, round, secure = list[Entry](), 0, False
    for entry in entries:
        match entry:
            case Open():
                round, attempt, secure = entry.round, entry.attempt, entry.secure
            case Machine() if entry.kind == "CHARGED":
                charge(place.log.lease, round, entry.attempt, EVENT)
            case Charged() if not secure:
                found.append(Charged(charge(place.log.lease, round, attempt, EVENT).hash))
                continue
        found.append(entry)
    return found


def opened(round: int = 0, clients: Sequence[int] = (1, 2, 3), **settings: Any) -> Open:
    attempt = settings.pop("attempt", 0)
    return Open(round, attempt, tuple(clients), MODEL, sha256(CONFIG).digest(), 1000.0, 600.0, **settings)


def update(client: int, attempt: int = 0) -> Accepted:
    return Accepted(attempt, client, sha256(f"{client} {attempt}".encode()).digest())


def machine(kind: str, body: bytes = b"body", attempt: int = 0) -> Machine:
    return Machine(attempt, Record(kind, body))


PLAIN = (
    opened(),
    Issued(0, (1, 2, 3)),
    update(2),
    update(1),
    Snapshot((1, 2), SUM),
    Frozen((1, 2), SUM),
    Merged(MODEL, STATE),
    Published(),
)
SECURE_KINDS = (
    *("CONFIG", "ADVERT", "ADVERT", "U0", "SHARES", "SHARES", "U1", "RECEIPT", "SNAPSHOT", "RECEIPT"),
    *("SNAPSHOT", "U2", "AGREE", "AGREE", "CHARGED", "RESULT"),
)
SECURE = (
    opened(secure=True, private=True),
    Issued(0, (1, 2, 3)),
    *(machine(kind, f"{kind} {number}".encode()) for number, kind in enumerate(SECURE_KINDS)),
    Merged(MODEL, STATE),
    Published(),
)

AFTER: dict[type[Entry], str] = {  # what a restart does after a record
    Open: "ask",
    Issued: "ask",
    Accepted: "collect",
    Snapshot: "collect",
    Frozen: "finish",
    Charged: "finish",
    Merged: "publish",
    Published: "next",
    Failed: "next",
    Machine: "session",
}


@st.composite
def plain_rounds(draw: st.DrawFn, round: int, attempt: int) -> list[Entry]:
    clients = draw(st.lists(st.integers(0, 99), max_size=5, unique=True))
    private = draw(st.booleans())
    entries: list[Entry] = [opened(round, clients, attempt=attempt, private=private)]
    if clients:
        entries.append(Issued(attempt, tuple(clients)))
    asked = dict.fromkeys(clients, attempt)
    folded: list[int] = []
    there: list[int] = []
    for client in draw(st.permutations(clients)):
        match draw(st.sampled_from(["answers", "answers", "fails", "again"])):
            case "again":
                asked[client] += 1
                entries += [Issued(asked[client], (client,)), update(client, asked[client])]
                there.append(client)
            case "answers":
                entries.append(update(client, asked[client]))
                there.append(client)
        if there and draw(st.booleans()):
            folded = sorted(there)
            entries.append(Snapshot(tuple(folded), sha256(bytes(folded)).digest()))
    if there and not folded:
        folded = sorted(there)
        entries.append(Snapshot(tuple(folded), sha256(bytes(folded)).digest()))
    entries.append(Frozen(tuple(folded), sha256(bytes(folded)).digest() if folded else None))
    if private:
        entries.append(Charged(sha256(b"release").digest()))
    if draw(st.booleans()):
        return [
            *entries[: draw(st.integers(1, len(entries)))],
            Failed("below_quorum", "1 of 2 came\n\0é\ud800"),
        ]
    return [*entries, Merged(MODEL, STATE), Published()]


@st.composite
def secure_rounds(draw: st.DrawFn, round: int, attempt: int) -> list[Entry]:
    entries: list[Entry] = [opened(round, (1, 2, 3), attempt=attempt, secure=True, private=True)]
    for number in range(attempt, attempt + 3):
        entries.append(Issued(number, (1, 2, 3)))
        if draw(st.booleans()):
            entries += [machine(kind, bytes([number]), number) for kind in SECURE_KINDS]
            return [*entries, Merged(MODEL, STATE), Published()]
        kept = draw(st.integers(1, len(SECURE_KINDS) - 1))
        entries += [machine(kind, bytes([number]), number) for kind in (*SECURE_KINDS[:kept], "FAILED")]
    return [*entries, Failed("secure_sum")]


@st.composite
def histories(draw: st.DrawFn) -> list[Entry]:
    entries: list[Entry] = []
    round = attempt = 0
    for _ in range(draw(st.integers(1, 3))):
        entries += draw(draw(st.sampled_from([plain_rounds, secure_rounds]))(round, attempt))
        again = isinstance(entries[-1], Failed) and draw(st.booleans())
        round, attempt = (round, attempt + 7) if again else (round + 1, 0)
    return entries


def newest(entries: Sequence[Entry]) -> list[Entry]:
    """The records of the last round."""
    start = max(number for number, entry in enumerate(entries) if isinstance(entry, Open))
    return list(entries[start:])


class Place:
    """A store with a run, and what opens it again."""

    def __init__(self, store: Store, folder: Path, run: str = "study") -> None:
        self.store, self.run = store, run
        self.blobs = Blobs(folder / "blobs")
        for data in BLOBS:
            self.blobs.put([data])
        self.log = RoundLog.create(self.lease(), self.blobs, CONFIG)

    def lease(self) -> Lease:
        return lease_of(self.store, self.run)

    def again(self) -> RoundLog:
        return RoundLog.open(self.lease(), self.blobs)


def lease_of(store: Store, run: str) -> Lease:
    lease = take(store, run, "a")
    assert lease is not None
    return lease


@contextmanager
def sqlite_place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(f"sqlite:///{folder}/a.db")
        yield Place(store, Path(folder))
        store.close()


def flipped(value: Any, bit: int) -> Any:
    match value:
        case int():
            return value ^ (1 << 10 + bit % 40)  # no number that is there
        case str():
            place = bit % len(value)
            return value[:place] + chr(ord(value[place]) ^ 1) + value[place + 1 :]
        case _:
            data = bytearray(value)
            data[bit // 8 % len(data)] ^= 1 << bit % 8
            return bytes(data)
