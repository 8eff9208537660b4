from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.aggregator.blobs import Blobs
from mycelia.aggregator.leases import Lease
from mycelia.aggregator.log_records import (
    Accepted,
    Entry,
    Failed,
    Issued,
    Machine,
    Merged,
    Published,
    encode,
)
from mycelia.aggregator.log_writer import LogWriter
from mycelia.aggregator.notices import Notice, listen
from mycelia.aggregator.recovery import Recovery
from mycelia.aggregator.round_log import INLINE_BYTES, ROUNDS, RoundLog, blobs_in_use, has_run
from mycelia.aggregator.store import Store
from mycelia.aggregator.tables import round_log, rounds, runs
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.engine.errors import ConfigError, ProtocolError
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.events import Record
from mycelia.simulations.secure_sum_journals import MemoryJournals
from mycelia.simulations.secure_sum_setup import Inputs, Setup
from mycelia.simulations.secure_sums import run_attempts
from tests.aggregator.round_histories import (
    AFTER,
    CONFIG,
    MODEL,
    PLAIN,
    SECURE,
    SECURE_KINDS,
    STATE,
    SUM,
    Place,
    charged,
    flipped,
    histories,
    lease_of,
    machine,
    newest,
    opened,
    sqlite_place,
    update,
)
from tests.small_disk import fill, small_disk

if TYPE_CHECKING:
    from tests.aggregator.databases import Server

pytest_plugins = ["tests.aggregator.databases"]


@pytest.fixture
def place(store: Store, tmp_path: Path) -> Place:
    return Place(store, tmp_path)


def corrupted(place: Place, match: str) -> None:
    with pytest.raises(Problem, match=match) as found:
        place.again()
    assert found.value.reason == Reason.STORE_CORRUPT


@settings(max_examples=8, deadline=None)
@given(histories(), st.randoms(use_true_random=False))
def test_a_log_reads_as_it_was_written(history: list[Entry], random: random.Random) -> None:
    with sqlite_place() as place:
        history = charged(place, history)
        length, log = 0, place.log
        while length < len(history):
            more = random.choice([1, 1, 2, 5])
            part = history[length : length + more]
            assert log.append_many(part) == (True,) * len(part)
            length += len(part)
            if random.random() < 0.3:
                log = place.again()
        read = place.again()
        assert read.head == log.head
        assert read.head.records == len(history)
        assert vars(read.order) == vars(log.order)
        there = newest(history)
        if not any(isinstance(entry, Machine) for entry in there):
            assert read.entries() == there


@pytest.mark.parametrize("history", [PLAIN, SECURE], ids=["plain", "secure"])
def test_every_prefix_goes_on_after_a_restart(place: Place, history: Sequence[Entry]) -> None:
    for number, entry in enumerate(charged(place, history), 1):
        assert place.again().append(entry)
        found = place.again().recovery(1100.0, 15.0)
        assert found.action == AFTER[type(entry)]
        if found.action == "session":
            mine = [entry for entry in history[:number] if isinstance(entry, Machine)]
            last = max((at for at, entry in enumerate(mine) if entry.kind == "SNAPSHOT"), default=-1)
            kept = [entry.record for at, entry in enumerate(mine) if entry.kind != "SNAPSHOT" or at == last]
            assert list(found.session) == kept
    with place.store.read() as connection:
        row = connection.execute(sa.select(rounds)).one()
    assert (row.status, row.model_sha256, row.opened_at) == ("PUBLISHED", MODEL, 1000.0)
    assert place.again().published == Merged(MODEL, STATE)


def test_a_record_out_of_place_is_not_written(place: Place) -> None:
    place.log.append_many(PLAIN[:3])
    for wrong in ([Published()], [update(1), update(3), Published()]):
        with pytest.raises(ProtocolError):
            place.log.append_many(wrong)
        assert place.again().head.records == 3
    log = place.again()
    log.append_many(PLAIN[3:])
    assert place.again().head == log.head


def test_a_run_begins_once(place: Place) -> None:
    assert has_run(place.store, "study")
    assert not has_run(place.store, "other")
    with pytest.raises(ConfigError, match="there is a run"):
        RoundLog.create(place.lease(), place.blobs, CONFIG)
    other = lease_of(place.store, "other")
    with pytest.raises(ConfigError, match="no run"):
        RoundLog.open(other, place.blobs)
    assert RoundLog.create(other, place.blobs, b"").head != place.log.head
    assert place.again().config == CONFIG


def test_stale_leader_cannot_append(place: Place) -> None:
    place.log.append_many(PLAIN[:3])
    log = place.again()
    with pytest.raises(Problem) as refused:
        place.log.append(update(1))
    assert refused.value.reason == Reason.NOT_LEADER
    log.append_many(PLAIN[3:])
    with place.store.read() as connection:
        fences = connection.scalars(sa.select(round_log.c.fence).order_by(round_log.c.number)).all()
    assert fences == [1] * 3 + [2] * 5


def test_two_leaders_make_one_chain(place: Place) -> None:
    """Two servers steal the lead from each other while they write; what they leave is one sound log."""
    place.log.append_many([opened(clients=range(16)), Issued(0, tuple(range(16)))])
    failed: list[BaseException] = []
    turn = threading.Lock()  # else each would lose the lead before it has written anything

    def lead(first: int) -> None:
        client = first
        try:
            while client < 16:
                try:
                    with turn:
                        log = place.again()
                        log.append(update(client))
                    client += 2
                    for _ in range(3):
                        if client < 16:
                            log.append(update(client))
                            client += 2
                except Problem as problem:
                    if problem.reason != Reason.NOT_LEADER:
                        raise
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=lead, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert place.again().order.accepted == {client: update(client).sha256 for client in range(16)}


def test_threads_share_a_log(place: Place) -> None:
    place.log.append_many([opened(clients=range(40)), Issued(0, tuple(range(40)))])

    def work(first: int) -> None:
        for client in range(first, 40, 4):
            place.log.append(update(client))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(place.again().order.accepted) == 40


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", [PLAIN[:6], SECURE[:-4]], ids=["plain", "secure"])
def test_any_flipped_byte_is_found(place: Place, history: Sequence[Entry]) -> None:
    place.log.append_many(charged(place, history))
    draw = random.Random(5)
    with place.store.read() as connection:
        rows = connection.execute(sa.select(round_log).order_by(round_log.c.number)).mappings().all()
    for row in rows:
        for column in ("number", "kind", "fence", "body", "body_sha256", "hash"):
            wrong = flipped(row[column], draw.randrange(2**16))
            here = (round_log.c.run == "study") & (round_log.c.number == row["number"])
            with place.store.write() as connection:
                connection.execute(round_log.update().where(here).values({column: wrong}))
            corrupted(place, r"record \d+|ends with record")
            back = (round_log.c.run == "study") & (round_log.c.hash == row["hash"])
            back = here if column != "number" else back
            with place.store.write() as connection:
                connection.execute(round_log.update().where(back).values({column: row[column]}))
    assert place.again().head.records == len(history)


@pytest.mark.parametrize("number", [1, 4, 6])
def test_a_record_that_is_missing_is_found(place: Place, number: int) -> None:
    place.log.append_many(PLAIN[:6])
    with place.store.write() as connection:
        connection.execute(round_log.delete().where(round_log.c.number == number))
    corrupted(place, f"record {number}: .*missing" if number < 6 else "ends with record 5, and there were 6")


@pytest.mark.parametrize("column", ["log_records", "log_hash", "config", "run"])
def test_a_run_that_was_changed_is_found(place: Place, column: str) -> None:
    place.log.append_many(PLAIN[:6])
    with place.store.write() as connection:
        row = connection.execute(sa.select(runs)).mappings().one()
        connection.execute(runs.update().values({column: flipped(row[column], 9)}))
    corrupted(place, "is missing, and its records are there" if column == "run" else "record")
    if column == "run":
        with pytest.raises(Problem, match="its records are there"):
            RoundLog.create(place.lease(), place.blobs, CONFIG)


def test_an_empty_run_that_was_changed_is_found(place: Place) -> None:
    with place.store.write() as connection:
        connection.execute(runs.update().values(config=b"rounds = 4"))
    corrupted(place, "configuration was changed")


def test_any_flipped_byte_of_the_file_is_found_or_harmless(tmp_path: Path) -> None:
    """In pages of the log, of other tables or of nothing: the log is what it was, or STORE_CORRUPT."""
    file = tmp_path / "a.db"
    first = Store.open(f"sqlite:///{file}")
    place = Place(first, tmp_path)
    place.log.append_many([*PLAIN, opened(1), Issued(0, (1, 2, 3)), update(3)])
    expected, head = place.log.entries(), place.log.head
    first.close()
    data, draw, found = file.read_bytes(), random.Random(7), 0
    body = encode(PLAIN[0])[1]
    offsets = [data.index(body) + 20, *(draw.randrange(len(data)) for _ in range(40))]
    for offset in offsets:
        for left in tmp_path.glob("a.db*"):
            left.unlink()
        file.write_bytes(
            data[:offset] + bytes([data[offset] ^ (1 << draw.randrange(8))]) + data[offset + 1 :]
        )
        again = None
        try:
            again = Store.open(f"sqlite:///{file}")
            place.store = again
            log = place.again()
            assert (log.head, log.entries()) == (head, expected)
        except Problem as problem:
            if problem.reason != Reason.STORE_CORRUPT:
                raise
            found += 1
        except ConfigError as refused:
            if "version" not in str(refused):  # of the schema
                raise
        finally:
            if again is not None:
                again.close()
    assert found


# --- crashes --------------------------------------------------------------------------------------


WRITER = """
import sys
from pathlib import Path
from mycelia.aggregator.blobs import Blobs
from mycelia.aggregator.leases import take
from mycelia.aggregator.log_records import Accepted
from mycelia.aggregator.round_log import RoundLog
from mycelia.aggregator.store import Store

lease = take(Store.open(sys.argv[1]), "study", "a")
log = RoundLog.open(lease, Blobs(Path(sys.argv[2])))
for client in range(len(log.order.accepted), 100_000, 2):
    log.append_many([Accepted(0, at, at.to_bytes(32, "big")) for at in (client, client + 1)])
    print(client + 2, flush=True)
"""


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_a_killed_writer_has_written_what_it_said(
    url: str, tmp_path: Path, open_store: Callable[[str], Store], kills: int
) -> None:
    store, clients, draw = Store.open(url), tuple(range(5000)), random.Random(3)
    Place(store, tmp_path).log.append_many([opened(clients=clients), Issued(0, clients)])
    before = said = 0
    for _ in range(kills):
        store.close()
        command = [sys.executable, "-c", WRITER, url, str(tmp_path / "blobs")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(draw.randrange(1, 40)):
                said = int(process.stdout.readline())
            os.kill(process.pid, signal.SIGKILL)
            said = int(([str(said).encode(), *process.stdout.read().split()])[-1])
            process.wait()
        store = open_store(url)
        log = RoundLog.open(lease_of(store, "study"), Blobs(tmp_path / "blobs"))
        there = len(log.order.accepted)
        assert before < said <= there <= said + 2
        assert there % 2 == 0  # both of a pair, or none
        assert log.order.accepted == {at: at.to_bytes(32, "big") for at in range(there)}
        before = there


class Broken:
    """A store that goes away at a write: before it is done, or before it is said that it was done."""

    def __init__(self, lease: Lease, monkeypatch: pytest.MonkeyPatch, done: bool) -> None:
        write, self.away = lease.write, True

        @contextmanager
        def writing() -> Iterator[sa.Connection]:
            if self.away and not done:
                raise Problem(Reason.STORE, "away")
            with write() as connection:
                yield connection
            if self.away:
                raise Problem(Reason.STORE, "away")

        monkeypatch.setattr(lease, "write", writing)


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_store_that_was_away_loses_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    lease = place.lease()
    log = RoundLog.open(lease, place.blobs)
    log.append_many(PLAIN[:2])
    broken = Broken(lease, monkeypatch, done)
    for _ in range(2):
        with pytest.raises(Problem, match="away"):
            log.append_many(PLAIN[2:4])
    broken.away = False
    assert log.append_many(PLAIN[2:4]) == (True, True)
    assert log.append_many(PLAIN[2:4]) == (False, False)
    log.append_many(PLAIN[4:])
    read = place.again()
    assert read.entries() == list(PLAIN)
    assert read.head == log.head


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_after_a_store_was_away_another_record_may_come(
    place: Place, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    lease = place.lease()
    log = RoundLog.open(lease, place.blobs)
    log.append_many(PLAIN[:2])
    broken = Broken(lease, monkeypatch, done)
    with pytest.raises(Problem, match="away"):
        log.append(update(1))
    broken.away = False
    assert log.append(Failed("cancelled"))
    assert place.again().head.records == (4 if done else 3)


def test_records_that_were_written_together_may_be_asked_for_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = place.lease()
    log = RoundLog.open(lease, place.blobs)
    log.append_many(PLAIN[:4])
    broken = Broken(lease, monkeypatch, done=True)
    with pytest.raises(Problem, match="away"):
        log.append_many(PLAIN[4:])
    broken.away = False
    for entry in PLAIN[4:]:
        assert log.append(entry)
    with pytest.raises(ProtocolError):  # once
        log.append(Published())
    log.append_many([opened(1), Issued(0, (1, 2, 3)), *PLAIN[2:]])
    assert place.again().head == log.head
    assert log.head.records == 2 * len(PLAIN)


@pytest.mark.postgres
def test_a_log_goes_on_when_the_database_is_back(
    postgres: Server, open_store: Callable[[str], Store], tmp_path: Path
) -> None:
    place = Place(open_store(postgres.database()), tmp_path)
    place.log.append_many(PLAIN[:3])
    postgres.stop()
    try:
        with pytest.raises(Problem) as away:
            place.log.append(PLAIN[3])
        assert away.value.reason == Reason.STORE
    finally:
        postgres.start()
    place.log.append_many(PLAIN[3:])
    assert place.again().entries() == list(PLAIN)


@pytest.mark.postgres
def test_other_servers_hear_how_far_a_round_is(
    postgres: Server, open_store: Callable[[str], Store], tmp_path: Path
) -> None:
    url = postgres.database()
    place, other = Place(open_store(url), tmp_path), open_store(url)

    async def follow() -> list[Notice]:
        heard = listen(other, [ROUNDS])
        assert await anext(heard) == Notice("")
        place.log.append_many(PLAIN[:4])
        place.log.append(Failed("cancelled"))
        found = [await asyncio.wait_for(anext(heard), timeout=30) for _ in range(3)]
        await heard.aclose()
        return found

    words = ["0 0 OPEN study", "0 0 ISSUED study", "0 0 FAILED study"]
    assert asyncio.run(follow()) == [Notice(ROUNDS, word) for word in words]


# --- in an event loop -----------------------------------------------------------------------------


def test_appends_of_an_event_loop_share_syncs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    clients, syncs, write = range(60), list[int](), place.log.append_many
    place.log.append_many([opened(clients=clients), Issued(0, tuple(clients))])

    def counted(entries: Iterable[Entry], **named: Any) -> tuple[bool, ...]:
        given = list(entries)
        syncs.append(len(given))
        return write(given, **named)

    monkeypatch.setattr(place.log, "append_many", counted)

    async def work() -> list[object]:
        writer = LogWriter(place.log)
        first = asyncio.ensure_future(writer.append(update(0)))
        forgotten = asyncio.ensure_future(writer.append(update(1)))
        await asyncio.wait([first])
        forgotten.cancel()
        entries = [*map(update, clients[1:]), update(5), Accepted(0, 6, MODEL), Published()]
        return [await first, *await asyncio.gather(*map(writer.append, entries), return_exceptions=True)]

    found = asyncio.run(work())
    assert found[:2] == [True, False]
    assert found[2:60] == [True] * 58
    assert found[60] is False
    assert isinstance(found[61], Problem)
    assert found[61].reason == Reason.EQUIVOCATION
    assert isinstance(found[62], ProtocolError)
    assert place.again().order.accepted == {client: update(client).sha256 for client in clients}
    assert syncs[:3] == [2, 62, 1]


def test_a_store_that_is_away_is_told_to_all_who_wait(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = place.lease()
    log = RoundLog.open(lease, place.blobs)
    log.append_many(PLAIN[:2])
    broken = Broken(lease, monkeypatch, done=True)

    async def work() -> None:
        writer = LogWriter(log)
        found = await asyncio.gather(*map(writer.append, PLAIN[2:6]), return_exceptions=True)
        assert [type(error) for error in found] == [Problem] * 4
        broken.away = False
        for entry in PLAIN[2:]:
            assert await writer.append(entry)

    asyncio.run(work())
    assert place.again().entries() == list(PLAIN)


def test_a_full_disk_loses_no_record(tmp_path: Path) -> None:
    first = Store.open(f"sqlite:///{tmp_path / 'a.db'}")
    place = Place(first, tmp_path)
    place.log.append_many(PLAIN[:2])
    first.close()
    with small_disk(tmp_path / "small") as disk:
        shutil.copy(tmp_path / "a.db", disk)
        place.store = Store.open(f"sqlite:///{disk / 'a.db'}")
        log = place.again()
        ballast = fill(disk, leave=8192)
        for _ in range(2):
            with pytest.raises(Problem, match="full") as full:
                log.append(PLAIN[2])
            assert full.value.reason == Reason.STORE
        ballast.unlink()
        assert log.append(PLAIN[2])
        assert place.again().entries() == list(PLAIN[:3])
        place.store.close()


# --- bodies among the blobs -----------------------------------------------------------------------


def test_large_bodies_are_blobs_while_they_are_needed(place: Place) -> None:
    sums = [os.urandom(INLINE_BYTES + 1 + size) for size in range(2)]
    place.log.append_many([*SECURE[:9], machine("RECEIPT"), machine("SNAPSHOT", sums[0])])
    assert sha256(sums[0]).digest() in place.log.blobs_in_use()
    place.log.append_many([machine("RECEIPT"), machine("SNAPSHOT", sums[1])])
    found = place.again().recovery(1100.0, 15.0)
    assert [record.body for record in found.session if record.kind == "SNAPSHOT"] == [sums[1]]
    assert place.log.blobs_in_use() == {MODEL, sha256(sums[1]).digest()}
    swept = place.blobs.sweep(place.log.blobs_in_use())
    assert sha256(sums[0]).hexdigest() in swept
    log = place.again()
    assert log.recovery(1100.0, 15.0) == found
    log._blobs.get(sha256(sums[1]).digest()).path.write_bytes(b"changed")
    corrupted(place, sha256(sums[1]).hexdigest())


def test_of_a_secure_sum_that_is_over_no_client_s_message_stays(place: Place) -> None:
    place.log.append_many(charged(place, SECURE))
    with place.store.read() as connection:
        rows = connection.execute(sa.select(round_log).where(round_log.c.kind.like("SA1/%"))).all()
    kept = {row.kind.rpartition("/")[2] for row in rows if row.body is not None}
    assert kept == {"CONFIG", "RESULT"}
    assert len(rows) == len(SECURE_KINDS)
    log = place.again()
    other = RoundLog.create(lease_of(place.store, "other"), place.blobs, b"")
    other.append_many(PLAIN[:5])
    assert blobs_in_use(place.store, place.blobs) == {MODEL, STATE, SUM}
    other.append(Failed("cancelled"))
    assert place.blobs.sweep(blobs_in_use(place.store, place.blobs)) == [SUM.hex()]
    assert log.recovery(0.0, 15.0).action == "next"


def test_a_model_that_is_missing_is_said(place: Place) -> None:
    place.log.append_many(PLAIN)
    shutil.rmtree(place.blobs.folder)
    place.blobs = Blobs(place.blobs.folder)
    with pytest.raises(Problem, match="missing") as found:
        place.again().recovery(1100.0, 15.0)
    assert found.value.reason == Reason.STORE_CORRUPT


# --- a real secure sum ----------------------------------------------------------------------------


class LogJournals(MemoryJournals):
    """The server of a simulated secure sum keeps its journal in a round log."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place, self.log, self.resumed = place, place.log, list[Recovery]()
        self.log.append_many([opened(clients=range(1, 7), secure=True), Issued(0, tuple(range(1, 7)))])

    def begin(self, session_id: bytes) -> LogJournals:
        return self

    def append(self, record: Record) -> None:
        self.log.append(Machine(0, record))

    def resume(self, session_id: bytes) -> tuple[LogJournals, list[Record]]:
        self.log = self._place.again()
        self.resumed.append(self.log.recovery(1100.0, 15.0))
        return self, list(self.resumed[-1].session)

    def end(self, sink: object) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_secure_sum_goes_on_from_the_log_after_any_record() -> None:
    vectors = np.arange(24).reshape(6, 4)

    def run(place: Place, stop: Mapping[str, int]) -> LogJournals:
        setup = Setup.of(
            Inputs.of(vectors, None, None, None),
            SecureSumConfig(n_min=4, corrupt=0.2, dropout=0.2),
            policies={},
            drops={},
            corrupt=(),
            wire=None,
            actors={},
            crash=stop,
            order="sorted",
            seed=3,
            clock=None,
        )
        journals = LogJournals(place)
        result = run_attempts(setup, journals)
        assert result.total.tolist() == vectors.sum(axis=0).tolist()
        assert [found.action for found in journals.resumed] == ["session"] * len(stop)
        journals.log.append_many([Merged(MODEL, STATE), Published()])
        return journals

    with sqlite_place() as place:
        records = run(place, {}).log.head.records - 4
    assert records > 20
    for number in range(1, records + 1, 5):
        with sqlite_place() as place:
            run(place, {"server": number})
