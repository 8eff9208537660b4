"""The sessions of a server on disk: none begins twice, and a damaged journal ends its session alone."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mycelia.aggregator.secagg import SecureSumServer, ServerResult
from mycelia.aggregator.sessions import Sessions, outcome_only
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.events import Effect, Finish, Persist, Record, Send, Tick
from mycelia.privacy.secagg.journal import Journal
from mycelia.privacy.secagg.messages import PHASES, Reason, SecureSumError
from mycelia.simulations.secure_sum_journals import FileJournals
from mycelia.simulations.secure_sums import SecureSumAborted, SecureSumResult
from tests.privacy.secagg.sums import DamagedJournals, run_sum

ONE, TWO = bytes([1]) * 32, bytes([2]) * 32
KINDS = ("CONFIG", "ADVERT", "U0", "SHARES", "U1", "RECEIPT", "SNAPSHOT", "U2", "AGREE", "CHARGED", "RESULT")
SMALL = SecureSumConfig(n_min=3, corrupt=0, dropout=0.25)
VECTORS = np.arange(8).reshape(4, 2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk where thousands of files are opened."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


# --- ids ---


def test_a_session_never_begins_twice(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "server")
    sessions.begin(ONE).close()
    with pytest.raises(SecureSumError, match="REPLAY"):
        sessions.begin(ONE)
    sessions.close()
    sessions = Sessions(tmp_path / "server")
    assert sessions.used == {ONE}
    sessions.forget(ONE)
    with pytest.raises(SecureSumError, match="REPLAY"):
        sessions.begin(ONE)
    sessions.begin(TWO).close()
    sessions.close()
    assert (tmp_path / "server").stat().st_mode & 0o777 == 0o700
    files = list((tmp_path / "server").iterdir())
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert len(files) == 2


def test_an_id_is_used_before_its_journal_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "create", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sessions.begin(ONE)
    sessions.close()
    sessions = Sessions(tmp_path)
    assert sessions.unfinished() == ()
    with pytest.raises(SecureSumError, match="REPLAY"):
        sessions.begin(ONE)
    with pytest.raises(SecureSumError, match="JOURNAL"):
        sessions.resume(ONE)
    with pytest.raises(SecureSumError, match="SESSION"):
        sessions.resume(TWO)
    sessions.close()


def test_without_the_list_of_ids_nothing_begins(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    sessions.begin(ONE).close()
    sessions.close()
    used = tmp_path / "used"
    data = used.read_bytes()
    for place in range(len(data)):
        used.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(SecureSumError, match="JOURNAL"):
            Sessions(tmp_path)
    used.unlink()
    with pytest.raises(SecureSumError, match="missing"):
        Sessions(tmp_path)


def test_a_server_with_a_used_id_has_no_round(tmp_path: Path) -> None:
    journals = FileJournals(tmp_path, range(1, 7))
    assert isinstance(run_sum(journals, seed=1), SecureSumResult)
    journals.close()
    for client in range(1, 7):
        journals.path(client).unlink()
    journals = FileJournals(tmp_path, range(1, 7))  # all are enrolled anew, and the server still knows
    again = run_sum(journals, seed=1)
    journals.close()
    assert isinstance(again, SecureSumAborted)
    assert (again.reason, again.released) == (Reason.REPLAY, {})


def test_unfinished_sessions_are_found(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    for session_id, kinds in ((ONE, ("CONFIG", "U0")), (TWO, ("CONFIG", "FAILED")), (bytes(32), ("CONFIG",))):
        journal = sessions.begin(session_id)
        for kind in kinds:
            journal.append(Record(kind, b""))
        journal.close()
    file = tmp_path / f"{bytes(32).hex()}.journal"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert sessions.unfinished() == (bytes(32), ONE)
    sessions.close()


# --- what is kept ---


def test_of_a_session_that_ended_configuration_and_outcome_are_kept(tmp_path: Path) -> None:
    journals = FileJournals(tmp_path, range(1, 7))
    found = run_sum(journals, seed=1, drops={6: "masked"})
    assert isinstance(found, SecureSumResult)
    (file,) = (tmp_path / "server").glob("*.journal")
    journal, records = Journal.open(file)
    journal.close()
    journals.close()
    assert [record.kind for record in records] == ["CONFIG", "RESULT"]


class Spy(SecureSumServer):
    """Keeps what went through it, and what it was made with."""

    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)  # type: ignore[arg-type]
        made.append((self, named))
        self.effects: list[Effect] = []

    def handle(self, event: object) -> list[Effect]:  # type: ignore[override]
        effects = super().handle(event)  # type: ignore[arg-type]
        self.effects += effects
        return effects


made: list[tuple[Spy, dict[str, object]]] = []


def records_of(**named: object) -> tuple[list[Record], list[Effect], dict[str, object]]:
    """The journal of a session, all that was done, and the server's arguments."""
    made.clear()
    run_sum(actors={"server": Spy}, vectors=VECTORS, config=SMALL, seed=1, **named)
    ((machine, arguments),) = made
    records = [effect.record for effect in machine.effects if isinstance(effect, Persist)]
    names = ("size", "identity", "roster", "unix_time", "random")
    return records, machine.effects, {name: arguments[name] for name in names}


def test_a_server_tells_an_outcome_again_from_what_is_kept() -> None:
    records, effects, arguments = records_of(drops={4: "masked"})
    told = [effect for effect in effects if isinstance(effect, Send)][-3:]
    last = effects[-1]
    for kept in (records, outcome_only(records)):
        again = SecureSumServer.restore(kept, **arguments).handle(Tick(0.0))  # type: ignore[arg-type]
        assert again[:-1] == told
        assert isinstance(last, Finish)
        assert isinstance(again[-1], Finish)
        one, two = last.result, again[-1].result
        assert isinstance(one, ServerResult)
        assert np.array_equal(one.decoded.total, two.decoded.total)
        assert (one.survivors, one.transcript) == (two.survivors, two.transcript)


def test_any_records_from_the_first_on_are_a_session() -> None:
    records, _, arguments = records_of(drops={4: "masked"})
    for count in range(1, len(records) + 1):
        machine = SecureSumServer.restore(records[:count], **arguments)  # type: ignore[arg-type]
        effects = machine.handle(Tick(0.0))
        assert effects
        frozen = any(record.kind == "U2" for record in records[:count])
        assert machine.phase in (("agree", "unmask", "done") if frozen else PHASES[:3])


# --- damage ---


def cut(bytes_: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        os.truncate(path, path.stat().st_size - bytes_)

    return damage


def flip(place: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 16
        path.write_bytes(data)

    return damage


def check_cut(folder: Path, record: str | int, bytes_: int) -> None:
    """A server stops after a record whose end never came to disk: it goes on, exactly, or says why not."""
    journals = DamagedJournals(folder, range(1, 5), cut(bytes_))
    found = run_sum(journals, VECTORS, SMALL, drops={4: "masked"}, crash={"server": record})
    journals.close()
    assert isinstance(found, SecureSumResult) or record == "CONFIG"
    if isinstance(found, SecureSumResult):
        assert found.exact
        assert all(not (b and s) for b, s in found.released.values())
    else:
        assert found.reason == Reason.JOURNAL


@pytest.mark.parametrize("record", KINDS)
@pytest.mark.parametrize("bytes_", [1, 33])
def test_a_record_that_was_cut_short_was_never_written(record: str, bytes_: int, tmp_path: Path) -> None:
    check_cut(tmp_path, record, bytes_)


@pytest.mark.slow
@pytest.mark.parametrize("record", KINDS)
def test_a_record_may_be_cut_short_at_any_byte(record: str, tmp_path: Path) -> None:
    records, _, _ = records_of(drops={4: "masked"})
    size = next(40 + len(one.encode()) for one in records if one.kind == record)
    for bytes_ in range(1, size + 1):
        folder = tmp_path / str(bytes_)
        folder.mkdir()
        check_cut(folder, record, bytes_)


@pytest.mark.parametrize("record", KINDS)
@pytest.mark.parametrize("place", [0, 18, 30, -1])
def test_damage_ends_the_session_and_no_share_is_asked_for_twice(
    record: str, place: int, tmp_path: Path
) -> None:
    journals = DamagedJournals(tmp_path, range(1, 7), flip(place))
    found = run_sum(journals, crash={"server": record}, attempts=3)
    journals.close()
    assert isinstance(found, SecureSumAborted)
    assert (found.reason, found.attempts) == (Reason.JOURNAL, 1)
    assert all(not (b and s) for b, s in found.released.values())


@pytest.mark.slow
def test_damage_at_any_byte_ends_the_session(tmp_path: Path) -> None:
    records, _, arguments = records_of(drops={4: "masked"})
    path = tmp_path / "whole"
    journal = Journal.create(path)
    for record in records:
        journal.append(record)
    journal.close()
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        with pytest.raises(SecureSumError, match="JOURNAL"):
            Journal.open(path)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        journal, left = Journal.open(path)
        journal.close()
        assert left == records[: len(left)]
        if left:
            SecureSumServer.restore(left, **arguments)  # type: ignore[arg-type]


def test_a_server_whose_disk_is_full_says_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Journal.append

    def full(journal: Journal, record: Record) -> None:
        if record.kind == "U2":
            raise SecureSumError(Reason.JOURNAL, "no space", who="journal")
        append(journal, record)

    monkeypatch.setattr(Journal, "append", full)
    journals = FileJournals(tmp_path, range(1, 7))
    found = run_sum(journals)
    journals.close()
    assert isinstance(found, SecureSumAborted)
    assert found.reason == Reason.JOURNAL
    assert {fault.reason for fault in found.faults} == {Reason.JOURNAL, Reason.LATE}
    assert not found.released


def test_a_client_whose_disk_is_full_releases_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Journal.append

    def full(journal: Journal, record: Record) -> None:
        if record.kind == "RELEASED" and "client-2" in journal.path.name:
            raise SecureSumError(Reason.JOURNAL, "no space", who="journal")
        append(journal, record)

    monkeypatch.setattr(Journal, "append", full)
    journals = FileJournals(tmp_path, range(1, 7))
    found = run_sum(journals)
    journals.close()
    assert isinstance(found, SecureSumResult)
    assert found.exact
    assert {shares for shares, _ in found.released.values()} == {4, 5}  # none of the shares 2 holds
    assert {fault.reason for fault in found.faults if fault.client == 2} == {Reason.JOURNAL}
