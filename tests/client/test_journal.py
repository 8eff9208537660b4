"""A client's journal on disk: whatever is missing from it or changed in it, the client joins nothing more."""

import os
from pathlib import Path

import pytest

from mycelia.client import history
from mycelia.client.history import ClientHistory
from mycelia.client.journal import ClientJournal
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.events import Record
from mycelia.privacy.secagg.messages import Reason, RoundConfig, SecureSumError
from mycelia.simulations.secure_sum_journals import FileJournals
from mycelia.simulations.secure_sums import SecureSumResult
from tests.privacy.secagg.sums import run_sum


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk where thousands of files are opened."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def round_config(round: int) -> RoundConfig:
    return SecureSumConfig(n_min=3, corrupt=0, dropout=0.25).round_config(
        job="job",
        round=round,
        nonce=bytes(32),
        model_sha256=bytes(32),
        schema_sha256=bytes(32),
        task_sha256=bytes(32),
        roster_sha256=bytes(32),
        size=4,
        clients=4,
    )


CONFIG = round_config(3)
RECORDS = [
    history.joined(CONFIG, 7),
    history.agreed(CONFIG, bytes(32)),
    history.released(CONFIG, b"answer"),
]
FACTS = ClientHistory(7, {"job": (3, 0)}, frozenset({("job", 3)}), {CONFIG.session_id: bytes(32)})


def written(path: Path) -> tuple[bytes, bytes]:
    """A journal with all records; the bytes of both files."""
    journal = ClientJournal.new(path)
    for record in RECORDS:
        journal.append(record)
    assert journal.history == FACTS
    journal.close()
    return path.read_bytes(), head(path).read_bytes()


def head(path: Path) -> Path:
    return path.with_name(f"{path.name}.head")


def opened(path: Path) -> ClientHistory:
    journal = ClientJournal.open(path)
    journal.close()
    return journal.history


def lost(path: Path) -> bool:
    try:
        opened(path)
    except SecureSumError as error:
        return error.reason == Reason.JOURNAL and "new journal" in str(error)
    return False


def test_it_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    assert opened(path) == FACTS
    journal = ClientJournal.open(path)
    journal.append(history.joined(round_config(4), 8))
    journal.close()
    assert opened(path).highest == {"job": (4, 0)}
    assert opened(path).epoch == 8
    for file in (path, head(path)):
        assert file.stat().st_mode & 0o777 == 0o600


def test_cut_at_any_byte_it_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data, _ = written(path)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert lost(path)
    path.write_bytes(data)
    assert not lost(path)


def test_changed_at_any_byte_it_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for file, data in zip((path, head(path)), written(path), strict=True):
        for place in range(len(data)):
            file.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            assert lost(path)
        file.write_bytes(data)
    assert not lost(path)


def test_the_number_of_its_records_cut_at_any_byte_it_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    _, count = written(path)
    for size in range(len(count)):
        head(path).write_bytes(count[:size])
        assert lost(path)


@pytest.mark.parametrize("missing", ["journal", "journal.head"])
def test_missing_it_is_lost_until_a_new_one_is_begun(missing: str, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    (tmp_path / missing).unlink()
    assert lost(path)
    ClientJournal.new(path).close()
    assert opened(path) == ClientHistory()


def test_an_older_state_of_one_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    old, _ = written(path)
    journal = ClientJournal.open(path)
    for round in (4, 5):
        journal.append(history.joined(round_config(round), 8))
    journal.close()
    path.write_bytes(old)
    assert lost(path)


def test_stopped_between_a_record_and_its_number_it_knows_the_record(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = ClientJournal.new(path)
    for record in RECORDS[:2]:
        journal.append(record)
    before = head(path).read_bytes()
    journal.append(RECORDS[2])
    journal.close()
    head(path).write_bytes(before)
    assert opened(path) == FACTS
    assert head(path).read_bytes() != before


def test_stopped_within_a_record_it_knows_those_before(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = ClientJournal.new(path)
    for record in RECORDS[:2]:
        journal.append(record)
    sizes = path.stat().st_size
    before = head(path).read_bytes()
    journal.append(RECORDS[2])
    journal.close()
    data = path.read_bytes()
    for size in range(sizes, len(data)):
        path.write_bytes(data[:size])
        head(path).write_bytes(before)
        assert opened(path).rounds == frozenset()
        assert path.stat().st_size == sizes


def test_it_takes_records_of_clients_alone_and_in_order(tmp_path: Path) -> None:
    journal = ClientJournal.new(tmp_path / "journal")
    journal.append(RECORDS[0])
    for record in (RECORDS[0], Record("U2", b"")):
        with pytest.raises(SecureSumError, match="JOURNAL"):
            journal.append(record)
    assert journal.records == 1
    journal.close()
    assert opened(tmp_path / "journal").highest == {"job": (3, 0)}


def test_a_client_without_its_journal_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    journals = FileJournals(tmp_path, range(1, 7))
    journals.path(3).write_bytes(journals.path(3).read_bytes()[:-1] + b"?")
    head(journals.path(5)).unlink()
    found = run_sum(journals)
    assert isinstance(found, SecureSumResult)
    assert found.exact
    assert found.survivors == (1, 2, 4, 6)
    assert {(fault.client, fault.reason) for fault in found.faults} == {
        (3, Reason.JOURNAL),
        (5, Reason.JOURNAL),
    }
    journals.close()


def test_joined_once_a_session_is_refused_after_a_restart_of_all(tmp_path: Path) -> None:
    journals = FileJournals(tmp_path, range(1, 7))
    assert isinstance(run_sum(journals, seed=1), SecureSumResult)
    journals.close()
    journals = FileJournals(tmp_path)
    again = run_sum(journals, seed=2)
    journals.close()
    assert {fault.reason for fault in again.faults if fault.client} == {Reason.REPLAY}
    assert not isinstance(again, SecureSumResult)
