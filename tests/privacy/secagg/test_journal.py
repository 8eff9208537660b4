"""Journals in files: what was appended comes back, a torn end is cut, a change is never overlooked."""

import errno
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.privacy.secagg.events import Record
from mycelia.privacy.secagg.journal import Journal, replace_file
from mycelia.privacy.secagg.messages import SecureSumError

RECORDS = [Record("U0", b"one"), Record("U1", b""), Record("SNAPSHOT", bytes(300)), Record("U2", b"\xff" * 9)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk where thousands of files are opened."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def written(path: Path, records: list[Record]) -> list[int]:
    """A journal with these records; where each of them ends."""
    journal, ends = Journal.create(path), [path.stat().st_size]
    for record in records:
        journal.append(record)
        ends.append(path.stat().st_size)
    journal.close()
    return ends


def reopened(path: Path) -> list[Record]:
    journal, records = Journal.open(path)
    journal.close()
    return records


@pytest.mark.usefixtures("quick")
@settings(max_examples=30, deadline=None)
@given(
    records=st.lists(st.builds(Record, st.sampled_from(["A", "ADVERT"]), st.binary(max_size=500)), max_size=8)
)
def test_what_was_appended_comes_back(
    records: list[Record], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("journal") / "file"
    half = len(records) // 2
    written(path, records[:half])
    journal, found = Journal.open(path)
    assert found == records[:half]
    for record in records[half:]:
        journal.append(record)
    assert journal.head.records == len(records)
    journal.close()
    assert reopened(path) == records


@pytest.mark.usefixtures("quick")
def test_cut_at_any_byte_the_records_before_are_there_and_it_goes_on(tmp_path: Path) -> None:
    ends = written(tmp_path / "whole", RECORDS)
    data = (tmp_path / "whole").read_bytes()
    for size in range(len(data) + 1):
        path = tmp_path / "cut"
        path.write_bytes(data[:size])
        path.chmod(0o600)
        journal, found = Journal.open(path)
        left = max(sum(end <= size for end in ends) - 1, 0)
        assert found == RECORDS[:left]
        assert path.stat().st_size == ends[left]
        for record in RECORDS[left:]:
            journal.append(record)
        journal.close()
        assert path.read_bytes() == data


@pytest.mark.usefixtures("quick")
def test_changed_at_any_byte_it_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "whole", RECORDS)
    data, path = (tmp_path / "whole").read_bytes(), tmp_path / "changed"
    for place in range(len(data)):
        for bit in (1, 128):
            path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            path.chmod(0o600)
            with pytest.raises(SecureSumError, match="JOURNAL"):
                Journal.open(path)
            assert path.stat().st_size == len(data)


@pytest.mark.usefixtures("quick")
def test_records_cannot_be_taken_out_swapped_or_brought_from_elsewhere(tmp_path: Path) -> None:
    ends = written(tmp_path / "one", RECORDS)
    written(tmp_path / "two", [Record("U0", b"two"), *RECORDS[1:]])
    one, two = ((tmp_path / name).read_bytes() for name in ("one", "two"))
    parts = [one[start:end] for start, end in itertools.pairwise(ends)]
    for data in (
        one[: ends[0]] + b"".join(parts[1:]),
        one[: ends[0]] + b"".join([*parts[:1], *parts[2:]]),
        one[: ends[0]] + b"".join([parts[1], parts[0], *parts[2:]]),
        one[: ends[1]] + two[ends[1] :],
    ):
        path = tmp_path / "made"
        path.write_bytes(data)
        path.chmod(0o600)
        with pytest.raises(SecureSumError, match="was changed"):
            Journal.open(path)


def test_it_is_on_the_disk_when_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "journal", list[int]()
    journal = Journal.create(path)
    wait = os.fsync

    def fsync(file: int) -> None:
        wait(file)
        synced.append(os.fstat(file).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    for record in RECORDS:
        journal.append(record)
        assert synced[-1] == path.stat().st_size
    assert len(synced) == len(RECORDS)
    journal.close()


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_after_a_full_disk_it_ends_with_the_record_before(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    journal = Journal.create(path)
    journal.append(RECORDS[0])
    write = os.write

    def full(file: int, data: bytes = b"") -> int:
        if fails == "write" and len(data) < 40:
            return write(file, data)  # some of it still fits
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, fails, full)
        with pytest.raises(SecureSumError, match="No space left"):
            journal.append(RECORDS[2])
    with pytest.raises(SecureSumError, match="JOURNAL"):
        journal.append(RECORDS[1])
    assert reopened(path) == RECORDS[:1]


def test_nobody_else_reads_or_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    before = os.umask(0)
    try:
        written(path, RECORDS)
        replace_file(tmp_path / "small", b"small")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == (tmp_path / "small").stat().st_mode & 0o777 == 0o600
    for mode in (0o640, 0o620, 0o604, 0o602):
        path.chmod(mode)
        with pytest.raises(SecureSumError, match="chmod 600"):
            Journal.open(path)
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(SecureSumError, match="JOURNAL"):
        Journal.open(tmp_path / "link")
    with pytest.raises(SecureSumError, match="JOURNAL"):
        Journal.open(tmp_path)


def test_it_is_one_process_that_has_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, RECORDS)
    journal, _ = Journal.open(path)
    with pytest.raises(SecureSumError, match="another process"):
        Journal.open(path)
    code = (
        "from pathlib import Path; from mycelia.privacy.secagg.journal import Journal; "
        f"Journal.open(Path({str(path)!r}))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "another process has it" in other.stderr
    journal.close()
    journal.close()
    assert reopened(path) == RECORDS


def test_there_is_no_second_beginning(tmp_path: Path) -> None:
    written(tmp_path / "journal", RECORDS)
    with pytest.raises(SecureSumError, match="JOURNAL"):
        Journal.create(tmp_path / "journal")
    with pytest.raises(SecureSumError, match="JOURNAL"):
        Journal.open(tmp_path / "missing")


def test_shortened_it_holds_what_was_kept_and_takes_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    written(path, RECORDS)
    journal, _ = Journal.open(path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(SecureSumError, match="broken"):
            journal.shorten(RECORDS[:1])
    journal.append(Record("A", b"still"))
    journal.shorten([RECORDS[0], RECORDS[3]])
    journal.append(Record("A", b"after"))
    with pytest.raises(SecureSumError, match="another process"):
        Journal.open(path)
    journal.close()
    assert reopened(path) == [RECORDS[0], RECORDS[3], Record("A", b"after")]
    assert path.stat().st_mode & 0o777 == 0o600
