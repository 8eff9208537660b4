"""The journal of a device: what it says, and that nothing is gone on with when it says nothing."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from mycelia.aggregator.wire.position import Position
from mycelia.client.device_journal import HEAD, JOURNAL, DeviceJournal, Done, JournalError, Spent, Trained

AT = Position("study", 3, 1)
TODAY = date(2026, 3, 1)
TRAINED = Trained(3, b"t" * 32, b"p" * 32, {"steps": 2.0, "params": 0.1}, {"loss_sum": 0.1}, 40, 4)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    identity = tmp_path / "identity"
    identity.mkdir()
    return tmp_path / "state", identity


def used(folders: tuple[Path, Path]) -> None:
    journal = DeviceJournal.open(*folders)
    journal.join(AT, b"task", 2, TODAY)
    journal.keep(AT, TRAINED)
    journal.sent(AT, 1000, TODAY)
    journal.spend(Spent("ward", "study", 0.5, 1e-6))
    journal.close()


def test_it_says_what_was_written(folders: tuple[Path, Path]) -> None:
    used(folders)
    journal = DeviceJournal.open(*folders)
    assert journal.epoch == 2
    assert journal.highest("study") == (3, 1)
    assert journal.task("study") == b"task"
    assert journal.trained("study") == TRAINED
    assert list(journal.trained("study").weights) == ["steps", "params"]  # type: ignore[union-attr]
    assert journal.spent("ward") == (Spent("ward", "study", 0.5, 1e-6),)
    assert journal.done(TODAY) == Done(1, 1000, 1)
    assert journal.done(date(2026, 3, 2)) == Done(0, 0, 1)
    assert journal.counted(AT)
    assert not journal.counted(AT._replace(round=4))
    journal.join(AT._replace(attempt=2), b"again", 1, TODAY)
    assert (journal.epoch, journal.done(TODAY).rounds) == (2, 1)
    journal.settle(AT._replace(attempt=2))
    assert journal.task("study") is None
    assert journal.trained("study") is None
    assert journal.highest("study") == (3, 2)
    journal.finish("study")
    assert journal.finished("study")
    assert not journal.finished("another")
    journal.close()


def test_the_end_of_a_round_leaves_the_next_one_alone(folders: tuple[Path, Path]) -> None:
    journal = DeviceJournal.open(*folders)
    journal.join(AT, b"task", 1, TODAY)
    journal.settle(AT._replace(round=2, attempt=9))
    assert journal.task("study") == b"task"
    journal.close()


def test_one_process_has_it(folders: tuple[Path, Path]) -> None:
    journal = DeviceJournal.open(*folders)
    with pytest.raises(JournalError, match="another process"):
        DeviceJournal.open(*folders)
    journal.close()
    DeviceJournal.open(*folders).close()


def damage(change: Callable[[bytearray], object]) -> Callable[[Path, Path], None]:
    def apply(state: Path, identity: Path) -> None:
        data = bytearray((state / JOURNAL).read_bytes())
        change(data)
        (state / JOURNAL).write_bytes(data)

    return apply


def edited(state: Path, identity: Path) -> None:
    """As somebody would who wants more rounds than the owner allows."""
    with sqlite3.connect(state / JOURNAL) as database:
        database.execute("UPDATE done SET rounds = 0")
    database.close()


def older(state: Path, identity: Path) -> None:
    (state / JOURNAL).write_bytes((state / "old").read_bytes())


def of_another(state: Path, identity: Path) -> None:
    (identity / HEAD).unlink()
    shutil.rmtree(state / "x", ignore_errors=True)
    DeviceJournal.new(state / "x", identity).close()


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda state, identity: (state / JOURNAL).unlink(), "it is missing"),
        (lambda state, identity: shutil.rmtree(state), "it is missing"),
        (lambda state, identity: (identity / HEAD).unlink(), "cannot be read"),
        (lambda state, identity: (identity / HEAD).write_text("{}"), "damaged"),
        (damage(lambda data: data.clear()), "damaged"),
        (damage(lambda data: data.__setitem__(slice(0, 8), b"x" * 8)), "it"),
        (damage(lambda data: data.__delitem__(slice(4096, None))), "it"),
        (edited, "changed by something else"),
        (older, "times"),
        (of_another, "another identity"),
    ],
)
def test_a_journal_that_is_not_to_be_relied_on(
    harm: Callable[[Path, Path], None], found: str, folders: tuple[Path, Path]
) -> None:
    DeviceJournal.open(*folders).close()
    state = folders[0]
    (state / "old").write_bytes((state / JOURNAL).read_bytes())
    used(folders)
    harm(*folders)
    with pytest.raises(JournalError, match=found) as caught:
        DeviceJournal.open(*folders)
    assert "--new-journal" in caught.value.fix
    journal = DeviceJournal.new(*folders)
    assert journal.done(TODAY) == Done(0, 0, 0)
    journal.close()
    DeviceJournal.open(*folders).close()


def test_a_kill_between_the_journal_and_its_head(folders: tuple[Path, Path]) -> None:
    used(folders)
    before = (folders[1] / HEAD).read_bytes()
    journal = DeviceJournal.open(*folders)
    journal.settle(AT)
    journal.close()
    (folders[1] / HEAD).write_bytes(before)
    DeviceJournal.open(*folders).close()
    assert (folders[1] / HEAD).read_bytes() != before


def test_a_change_is_whole_or_not_at_all(folders: tuple[Path, Path]) -> None:
    used(folders)
    journal = DeviceJournal.open(*folders)

    def half() -> None:
        with journal._writing():
            journal._put("finished", "study")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert not journal.finished("study")
    journal.close()
    DeviceJournal.open(*folders).close()
