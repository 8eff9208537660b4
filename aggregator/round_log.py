"""The write-ahead log of a run: what the server is about to do, durable before anybody sees it done.

Records are only ever added. Each has a hash over itself and the one before, and the run knows how many there
are and the hash of the last, so a record that was changed, removed or moved is found, and named, when the
log is opened. Bodies above `INLINE_BYTES`, such as the masked sum of a secure round, lie among the blobs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from mmap import mmap
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self

from sqlalchemy import ColumnElement, Connection, Insert, Row, func, select

from mycelia.aggregator import outcomes
from mycelia.aggregator.leases import Lease
from mycelia.aggregator.log_records import (
    Accepted,
    Charged,
    Entry,
    Failed,
    Issued,
    Machine,
    Merged,
    Open,
    Published,
    Snapshot,
    decode,
    encode,
    is_machine,
)
from mycelia.aggregator.notices import publish
from mycelia.aggregator.outcomes import DeviceOutcome
from mycelia.aggregator.recovery import Order, Recovery, recover
from mycelia.aggregator.store import Store
from mycelia.aggregator.store_problems import corrupt
from mycelia.aggregator.tables import releases, round_log, rounds, runs
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import Problem, Reason, clipped
from mycelia.engine.errors import ConfigError, DataError, MyceliaError, ProtocolError
from mycelia.privacy.secagg.canonical import digest

__all__ = [
    "INLINE_BYTES", "ROUNDS", "BlobStore", "Head", "RoundLog", "StoredBlob", "blobs_in_use", "config_of",
    "has_run",
]  # fmt: skip

INLINE_BYTES: Final = 2**16
"""The longest body of a secure sum's record that is kept in the table."""

ROUNDS: Final = "rounds"
"""The channel that says "round attempt status run" when a round has come further."""

_PHASES: Final = ("CONFIG", "U0", "U1", "U2", "CHARGED", "RESULT", "FAILED")  # of a secure sum
_KEPT: Final = ("CONFIG", "RESULT", "FAILED")  # what stays of a secure sum that is over
_PART: Final = 2**20
_NO_FENCE: Final = 2**63 - 1  # above all there are, and no leader's


class StoredBlob(Protocol):
    """Bytes in a file that nobody changes."""

    @property
    def sha256(self) -> bytes:
        """Their hash."""

    @property
    def path(self) -> Path:
        """The file."""

    def open(self) -> AbstractContextManager[mmap]:
        """The bytes, mapped."""


class BlobStore(Protocol):
    """What the log needs of `Blobs` or `BlobRows`."""

    def put(self, parts: Iterable[bytes | memoryview]) -> StoredBlob:
        """Store bytes durably."""

    def get(self, sha256: bytes) -> StoredBlob:
        """Bytes as they were stored."""


class Head(NamedTuple):
    """Where a log stands.

    Attributes:
        records: how many there are.
        hash: of the last, 32 bytes.
    """

    records: int
    hash: bytes


class _Written(NamedTuple):
    """What the last write was to add."""

    entries: tuple[Entry, ...]
    order: Order
    head: Head
    opened_at: int


class RoundLog:
    """The log of one run, for its leader; made by `create` or `open`. Several threads may use it.

    Attributes:
        run: its name.
        config: as it was given when the run began.
        lease: that it writes with.
        head: where it stands.
    """

    def __init__(self, lease: Lease, blobs: BlobStore, config: bytes) -> None:
        self.run, self.config = lease.run, config
        self.lease, self._blobs = lease, blobs
        self._order = Order()
        self.head = _start(self.run, config)
        self._opened = 0  # number of the last OPEN
        self._unsure: _Written | None = None
        self._found: list[Entry] = []  # written without an answer; whoever asks again has not been told
        self._turn = threading.Lock()

    @classmethod
    def create(cls, lease: Lease, blobs: BlobStore, config: bytes) -> Self:
        """The log of a new run.

        Args:
            lease: of the run.
            blobs: where large bodies go.
            config: of the run, as it was given; kept, and part of the chain.

        Raises:
            ConfigError: there is a run of that name.
            Problem: `NOT_LEADER`, `STORE`, `STORE_CORRUPT`.
        """
        log = cls(lease, blobs, config)
        with lease.write() as connection:
            if connection.scalar(select(func.count()).select_from(runs).where(runs.c.run == log.run)):
                raise ConfigError(
                    f"there is a run {log.run!r} in the store",
                    rule="a run is begun once",
                    fix="go on with it, or give this one another name",
                    who="run.name",
                )
            for table in (round_log, releases):
                if connection.scalar(select(func.count()).select_from(table).where(table.c.run == log.run)):
                    raise corrupt(
                        f"the run {log.run!r} is missing, and its records are there", f"table {table.name}"
                    )
            connection.execute(
                runs.insert().values(
                    run=log.run,
                    config=config,
                    log_records=0,
                    log_hash=log.head.hash,
                    release_records=0,
                    release_hash=log.head.hash,
                )
            )
        return log

    @classmethod
    def open(cls, lease: Lease, blobs: BlobStore) -> Self:
        """Go on with a log, after all of it was checked.

        Raises:
            ConfigError: there is no such run.
            Problem: `STORE_CORRUPT`: a record was changed or is missing; it is named. `NOT_LEADER`, `STORE`.
        """
        with lease.write() as connection:  # nobody writes while it is read
            row = _run_row(connection, lease.run)
            log = cls(lease, blobs, row.config)
            log._read(connection, Head(row.log_records, row.log_hash))
        for needed in log._large():
            blobs.get(needed)
        return log

    @property
    def order(self) -> Order:
        """Where the newest round stands; read it, and leave it as it is."""
        return self._order

    @property
    def published(self) -> Merged | None:
        """The run's newest model and state; None before the first."""
        return self._order.published

    def append(self, entry: Entry, *, settled: Sequence[DeviceOutcome] = ()) -> bool:
        """Add a record; when this returns, it outlives the process and a power cut.

        With ISSUED, and with the stragglers of OPEN, the devices get rows for their outcomes; with ACCEPTED
        the update becomes the one that counts; with PUBLISHED and FAILED outcomes that are still open are
        settled. All of that is durable together or not at all.

        Args:
            entry: the record.
            settled: outcomes to write down with it.

        Returns:
            False if the update of an ACCEPTED is in the log already.

        Raises:
            ProtocolError: the record cannot come next. Nothing was written.
            Problem: `EQUIVOCATION`: the first update stands. `NOT_LEADER`: another server leads; nothing was
                written. `STORE`: the database is away; append the same record again once it is back.
                `STORE_CORRUPT`.
        """
        return self.append_many([entry], settled=settled)[0]

    def append_many(
        self, entries: Iterable[Entry], *, settled: Sequence[DeviceOutcome] = ()
    ) -> tuple[bool, ...]:
        """Add records that share one sync, all or none; see `append`.

        Returns:
            for each record whether it is new.
        """
        given = tuple(entries)
        with self._turn:
            self._look()
            if given and all(entry in self._found for entry in given):
                self._found = [entry for entry in self._found if entry not in given]
                return (True,) * len(given)
            order = self._order.copy()
            taken = tuple(order.take(entry) for entry in given)
            new = [entry for entry, fresh in zip(given, taken, strict=True) if fresh]
            if not new and not settled:
                return taken
            rows = [self._row(entry) for entry in new]
            head, opened = self._chain(rows), self._opened
            for row in rows:
                opened = row["number"] if row["kind"] == Open.KIND else opened
            self._unsure = _Written(given, order, head, opened)
            try:
                with self.lease.write() as connection:
                    self._move_head(connection, head)
                    if rows:
                        connection.execute(round_log.insert(), rows)
                    self._write_beside(connection, new, settled)
            except MyceliaError as error:
                if not isinstance(error, Problem) or error.reason != Reason.STORE:
                    self._unsure = None  # it was refused, and nothing was written
                raise
            self._adopt(self._unsure)
            return taken

    def recovery(self, now: float, heartbeat_s: float) -> Recovery:
        """What to do after a restart.

        Args:
            now: Unix time.
            heartbeat_s: time between two heartbeats, in seconds.

        Raises:
            Problem: `STORE_CORRUPT`: a record was changed, or a blob that the round needs is not there.
        """
        found = recover(self.entries(), now, heartbeat_s)
        for needed in sorted(self.blobs_in_use()):
            self._blobs.get(needed)
        return found

    def entries(self) -> list[Entry]:
        """The records of the newest round, from its OPEN on.

        Snapshots of a secure sum that have a newer one are left out, and of one that is over all but its
        first and last record.
        """
        with self.lease.store.read() as connection:
            wanted = select(round_log).where(round_log.c.run == self.run, round_log.c.number >= self._opened)
            rows = connection.execute(wanted.order_by(round_log.c.number)).all()
        last = max((row.number for row in rows if _machine_kind(row.kind) == "SNAPSHOT"), default=0)
        closed = self._order.state == "closed"
        found: list[Entry] = []
        for row in rows:
            name = _machine_kind(row.kind)
            if (name == "SNAPSHOT" and row.number != last) or (closed and name and name not in _KEPT):
                continue
            body = row.body
            if body is None:
                body = b"" if closed else self._body_of(row)
            elif sha256(body).digest() != row.body_sha256:
                raise corrupt("its body was changed", f"round log of {self.run}, record {row.number}")
            found.append(_decoded(self.run, row.number, row.kind, body))
        return found

    def blobs_in_use(self) -> frozenset[bytes]:
        """Hashes of the blobs that this run still needs."""
        order = self._order
        merged = [found for found in (order.published, order.merged) if found is not None]
        used = {found.model_sha256 for found in merged} | {found.state_sha256 for found in merged}
        if order.opened is not None and order.state != "closed":
            used.add(order.opened.model_sha256)
            if order.snapshot is not None:
                used.add(order.snapshot.sha256)
        return frozenset(used | self._large())

    def _large(self) -> set[bytes]:
        """Hashes of the bodies among the blobs that the open round needs: of snapshots, the last."""
        if self._order.state == "closed":
            return set()
        mine = (
            (round_log.c.run == self.run) & (round_log.c.number >= self._opened) & round_log.c.body.is_(None)
        )
        wanted = select(round_log.c.kind, round_log.c.body_sha256).where(mine).order_by(round_log.c.number)
        with self.lease.store.read() as connection:
            rows = connection.execute(wanted).all()
        found = [row.body_sha256 for row in rows if _machine_kind(row.kind) == "SNAPSHOT"][-1:]
        return {row.body_sha256 for row in rows if _machine_kind(row.kind) != "SNAPSHOT"} | set(found)

    # --- writing ---

    def _row(self, entry: Entry) -> dict[str, Any]:
        kind, body = encode(entry)
        large = isinstance(entry, Machine) and len(body) > INLINE_BYTES
        if large:
            view = memoryview(body)
            self._blobs.put(view[start : start + _PART] for start in range(0, len(body), _PART))
        return {"kind": kind, "body": None if large else body, "body_sha256": sha256(body).digest()}

    def _chain(self, rows: Sequence[dict[str, Any]]) -> Head:
        """Number the rows and chain them to what is there; the head they lead to."""
        head = self.head
        for row in rows:
            row |= {"run": self.run, "number": head.records + 1, "fence": self.lease.fence}
            row["hash"] = _chained(head, row["kind"], row["fence"], row["body_sha256"])
            head = Head(row["number"], row["hash"])
        return head

    def _move_head(self, connection: Connection, head: Head) -> None:
        moved = connection.execute(
            runs.update()
            .where(
                runs.c.run == self.run,
                runs.c.log_records == self.head.records,
                runs.c.log_hash == self.head.hash,
            )
            .values(log_records=head.records, log_hash=head.hash)
        )
        if moved.rowcount != 1:
            raise corrupt(
                "the log is not where its leader left it",
                f"round log of {self.run}, record {self.head.records}",
            )

    def _write_beside(
        self, connection: Connection, new: Sequence[Entry], settled: Sequence[DeviceOutcome]
    ) -> None:
        """What goes into other tables with the records; outcomes come before the record that ends a round."""
        order = self._order.copy()
        claims: list[tuple[Position, int, bytes]] = []
        for number, entry in enumerate(new[:-1], self.head.records + 1):
            order.take(entry)
            if isinstance(entry, Accepted) and order.opened is not None:
                at = Position(self.run, order.opened.round, entry.attempt)
                claims.append((at, entry.client, entry.sha256))
                continue
            outcomes.claim_all(connection, claims)
            claims.clear()
            self._write_one(connection, entry, order, number)
        outcomes.claim_all(connection, claims)
        if new:
            order.take(new[-1])
        if settled and order.opened is not None:
            outcomes.settle(connection, self.run, order.opened.round, settled)
        if new:
            self._write_one(connection, new[-1], order, self.head.records + len(new))

    def _write_one(self, connection: Connection, entry: Entry, order: Order, number: int) -> None:
        opened = order.opened
        if opened is None:
            raise ProtocolError("no round is open", rule="OPEN comes first", who="round log")
        at = Position(self.run, opened.round, opened.attempt)
        match entry:
            case Open():
                connection.execute(_opened_row(at, entry))
                for client, attempt in entry.carried:
                    outcomes.ask(connection, at._replace(attempt=attempt), [client])
            case Issued():
                outcomes.ask(connection, at._replace(attempt=entry.attempt), entry.clients)
            case Accepted():
                here = at._replace(attempt=entry.attempt)
                outcomes.claim(connection, here, entry.client, entry.sha256)
            case Charged():
                self._check_charged(connection, at, releases.c.hash == entry.release)
            case Machine() if entry.kind == "CHARGED" and opened.private:
                self._check_charged(connection, at, releases.c.attempt == entry.attempt)
            case Published() | Failed():
                self._close_round(connection, at, entry, order, number)
        many = isinstance(entry, Accepted | Snapshot)
        if not many and not (isinstance(entry, Machine) and entry.kind not in _PHASES):
            self._set_status(connection, at, entry)

    def _check_charged(self, connection: Connection, at: Position, release: ColumnElement[bool]) -> None:
        """What the log says of a release is in the ledger."""
        mine = (releases.c.run == at.run) & (releases.c.round == at.round) & release
        if not connection.scalar(select(func.count()).select_from(releases).where(mine)):
            raise ProtocolError(
                f"CHARGED, and the ledger has no such release of round {at.round}",
                rule="a release is in the ledger before the log says so",
                fix="call `charge` first",
                who="round log",
            )

    def _set_status(self, connection: Connection, at: Position, entry: Entry) -> None:
        kind = f"SECURE_{entry.kind}" if isinstance(entry, Machine) else entry.KIND
        values: dict[str, object] = {"status": kind}
        if isinstance(entry, Merged):
            values["model_sha256"] = entry.model_sha256
        if isinstance(entry, Failed):
            values["reason"] = clipped(entry.reason.replace("\x00", "�"))
        connection.execute(rounds.update().where(_is_round(at)).values(values))
        publish(connection, ROUNDS, f"{at.round} {at.attempt} {kind} {at.run}")

    def _close_round(
        self, connection: Connection, at: Position, entry: Published | Failed, order: Order, number: int
    ) -> None:
        survivors = order.frozen.clients if order.frozen and isinstance(entry, Published) else ()
        outcomes.settle_rest(connection, self.run, at.round, survivors)
        if order.opened is not None and order.opened.secure:
            # Of a secure sum that is over nothing stays that is about a single client.
            mine = (round_log.c.run == self.run) & round_log.c.number.between(self._opened, number)
            machine = round_log.c.kind.like("SA1/%")
            kept = [round_log.c.kind.not_like(f"SA1/%/{kind}") for kind in _KEPT]
            connection.execute(round_log.update().where(mine, machine, *kept).values(body=None))

    def _adopt(self, written: _Written) -> None:
        if any(isinstance(entry, Open) for entry in written.entries):
            self._found.clear()
        self._order, self.head, self._opened = written.order, written.head, written.opened_at
        self._unsure = None

    def _look(self) -> None:
        """After a write without an answer: see whether it was done."""
        written = self._unsure
        if written is None:
            return
        with self.lease.write() as connection:
            row = _run_row(connection, self.run)
        there = Head(row.log_records, row.log_hash)
        if there == self.head:
            self._unsure = None
        elif there == written.head:
            self._adopt(written)
            self._found += written.entries
        else:
            where = f"round log of {self.run}, record {there.records}"
            raise corrupt("the log is not where its leader left it", where)

    # --- reading ---

    def _read(self, connection: Connection, expected: Head) -> None:
        """Check every record, and take the order from them."""
        name = f"round log of {self.run}"
        head, fence = self.head, 0
        if expected.records == 0 and expected.hash != head.hash:
            raise corrupt("the run's configuration was changed", f"table runs, {self.run}")
        wanted = select(round_log).where(round_log.c.run == self.run).order_by(round_log.c.number)
        with connection.execute(wanted, execution_options={"yield_per": 1000}) as found:
            for row in found:
                where = f"{name}, record {head.records + 1}"
                if not _is_sound(row):
                    raise corrupt("its columns hold something else than a record", where)
                if row.number != head.records + 1:
                    raise corrupt(f"it is missing: the next one is number {row.number}", where)
                if row.hash != _chained(head, row.kind, row.fence, row.body_sha256):
                    raise corrupt("it does not follow from the one before", where)
                if row.body is not None and sha256(row.body).digest() != row.body_sha256:
                    raise corrupt("its body was changed", where)
                if row.body is None and not is_machine(row.kind):
                    raise corrupt("its body is missing", where)
                if not fence <= row.fence <= self.lease.fence:
                    raise corrupt(f"it was written with the fence {row.fence} after {fence}", where)
                head, fence = Head(row.number, row.hash), row.fence
                if row.kind == Open.KIND:
                    self._opened = row.number
                self._replay(row, where)
        if head != expected:
            raise corrupt(f"it ends with record {head.records}, and there were {expected.records}", name)
        self.head = head

    def _replay(self, row: Row[Any], where: str) -> None:
        # The order looks at the kind of a machine's record alone.
        entry = _decoded(self.run, row.number, row.kind, b"" if is_machine(row.kind) else row.body)
        try:
            fine = self._order.take(entry)
        except ProtocolError as error:
            raise corrupt(f"it cannot stand here: {error.found}", where) from error
        if not fine:
            raise corrupt("its update was accepted before", where)

    def _body_of(self, row: Row[Any]) -> bytes:
        with self._blobs.get(row.body_sha256).open() as data:
            return bytes(data)


def blobs_in_use(store: Store, blobs: BlobStore) -> frozenset[bytes]:
    """Hashes of the blobs that the runs of a store still need: what `sweep` keeps.

    Raises:
        Problem: `STORE_CORRUPT`: a log was damaged, and nothing may be swept. `STORE`.
    """
    with store.read() as connection:
        names = connection.scalars(select(runs.c.run)).all()
    used: set[bytes] = set()
    for run in names:
        reader = Lease(store, run, "a reader", time.monotonic)
        reader.fence = _NO_FENCE
        with store.read() as connection:
            row = _run_row(connection, run)
            log = RoundLog(reader, blobs, row.config)
            log._read(connection, Head(row.log_records, row.log_hash))
        used |= log.blobs_in_use()
    return frozenset(used)


def has_run(store: Store, run: str) -> bool:
    """Whether there is a run of this name.

    Raises:
        Problem: `STORE` or `STORE_CORRUPT`.
    """
    with store.read() as connection:
        return bool(connection.scalar(select(func.count()).select_from(runs).where(runs.c.run == run)))


def config_of(store: Store, run: str) -> bytes | None:
    """The configuration that a run began with; None if there is no run of this name.

    Raises:
        Problem: `STORE` or `STORE_CORRUPT`.
    """
    with store.read() as connection:
        return connection.scalar(select(runs.c.config).where(runs.c.run == run))


def _run_row(connection: Connection, run: str) -> Row[Any]:
    row = connection.execute(select(runs).where(runs.c.run == run)).one_or_none()
    if row is not None:
        return row
    if connection.scalar(select(func.count()).select_from(round_log).where(round_log.c.run == run)):
        raise corrupt(f"the run {run!r} is missing, and its records are there", "table runs")
    raise ConfigError(
        f"no run {run!r} in the store", rule="only a run that was begun goes on", who="run.name"
    )


def _is_sound(row: Row[Any]) -> bool:
    """Whether the columns are of their kinds; SQLite would hold any."""
    numbers = all(type(number) is int and 0 <= number < 2**63 for number in (row.number, row.fence))
    hashes = all(type(value) is bytes for value in (row.body_sha256, row.hash))
    return numbers and hashes and type(row.kind) is str and isinstance(row.body, bytes | None)


def _start(run: str, config: bytes) -> Head:
    return Head(0, digest("RL1/start", run, sha256(config).digest()))


def _chained(before: Head, kind: str, fence: int, body_sha256: bytes) -> bytes:
    return digest("RL1/record", before.hash, before.records + 1, fence, kind, body_sha256)


def _decoded(run: str, number: int, kind: str, body: bytes) -> Entry:
    try:
        return decode(kind, body)
    except DataError as error:
        raise corrupt(error.found, f"round log of {run}, record {number}") from error


def _machine_kind(kind: str) -> str:
    return kind.rpartition("/")[2] if is_machine(kind) else ""


def _opened_row(at: Position, entry: Open) -> Insert:
    return rounds.insert().values(
        run=at.run,
        round=at.round,
        attempt=at.attempt,
        opened_at=entry.opened_at,
        status=entry.KIND,
        reason="",
    )


def _is_round(at: Position) -> ColumnElement[bool]:
    return (rounds.c.run == at.run) & (rounds.c.round == at.round) & (rounds.c.attempt == at.attempt)
