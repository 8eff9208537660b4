"""What a device has done, on disk: rounds it joined, what it trained and spent, how often it took part.

The file is `journal.sqlite`. Beside the identity lies a small second file, the head, which says which journal
belongs to it and how often it was written. A journal that is missing, damaged, another one or an older copy
is not gone on with: a device that does not know what it has told would tell it again.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self

from mycelia.aggregator.wire.position import Position
from mycelia.engine.durable import hold, write_whole
from mycelia.engine.errors import DataError

__all__ = ["HEAD", "JOURNAL", "DeviceJournal", "Done", "JournalError", "Spent", "Trained"]

JOURNAL: Final = "journal.sqlite"
HEAD: Final = "journal.head"
"""The head's name, in the identity folder."""

_VERSION: Final = 1
_FIX: Final = "enrol anew, then begin a new journal: mycelia client --new-journal"
_TABLES: Final = {
    "meta": "name TEXT PRIMARY KEY, value TEXT NOT NULL",
    "joined": "run TEXT PRIMARY KEY, round INTEGER NOT NULL, attempt INTEGER NOT NULL",
    "work": "run TEXT PRIMARY KEY, round INTEGER NOT NULL, attempt INTEGER NOT NULL, task BLOB NOT NULL",
    "trained": "run TEXT PRIMARY KEY, round INTEGER NOT NULL, task_sha256 BLOB NOT NULL,"
    " sha256 BLOB NOT NULL, numbers TEXT NOT NULL",
    "spent": "data TEXT, run TEXT, epsilon REAL NOT NULL, delta REAL NOT NULL, PRIMARY KEY (data, run)",
    "done": "day TEXT, run TEXT, rounds INTEGER NOT NULL, bytes INTEGER NOT NULL, PRIMARY KEY (day, run)",
    "counted": "run TEXT, round INTEGER, PRIMARY KEY (run, round)",
    "finished": "run TEXT PRIMARY KEY",
}


class JournalError(DataError):
    """The journal cannot be relied on, and a device ends."""


@dataclass(frozen=True)
class Trained:
    """An update that waits until its round is over.

    Attributes:
        round: whose model it was trained from.
        task_sha256: of all that decided what was trained.
        sha256: of the payload.
        weights: of each term, in order.
        metrics: sums for the report.
        examples: trained on, repetitions included.
        steps: local steps.
    """

    round: int
    task_sha256: bytes
    sha256: bytes
    weights: dict[str, float]
    metrics: dict[str, float]
    examples: int
    steps: int


@dataclass(frozen=True)
class Spent:
    """What was spent of the privacy of one data set in one run, as upper bounds."""

    data: str
    run: str
    epsilon: float
    delta: float


@dataclass(frozen=True)
class Done:
    """How often this device took part.

    Attributes:
        day_rounds: rounds of the day in question.
        day_bytes: bytes sent on it.
        rounds: of all days together.
    """

    day_rounds: int
    day_bytes: int
    rounds: int


class DeviceJournal:
    """A device's journal, open for writing; made by `open` or `new`, let go by `close`.

    Attributes:
        path: its file.
    """

    def __init__(self, path: Path, head: Path, database: sqlite3.Connection, lock: int) -> None:
        self.path, self._head, self._database, self._lock = path, head, database, lock
        self._turn = threading.RLock()  # training spends in a thread of its own

    # --- opening ----------------------------------------------------------------------------------

    @classmethod
    def open(cls, folder: Path, identity: Path) -> Self:
        """The journal as it was left; a new one for an identity that never took part.

        Args:
            folder: where the journal lies; made if it is not there.
            identity: the identity's folder.

        Raises:
            JournalError: it is missing, damaged, older than it was or another one's, or in use.
        """
        path, head = folder / JOURNAL, identity / HEAD
        if not head.exists() and not path.exists():
            return cls.new(folder, identity)
        expected = _read_head(head)
        if not path.exists():
            raise _refused(path, "it is missing, and this identity has taken part")
        journal = cls._connect(path, head)
        try:
            journal._check(*expected)
        except BaseException:
            journal.close()
            raise
        return journal

    @classmethod
    def new(cls, folder: Path, identity: Path) -> Self:
        """An empty journal in the place of any there was: only for a device that was enrolled anew.

        Raises:
            JournalError: it cannot be written, or is in use.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _refused(folder, f"it cannot be made: {error.strerror}") from error
        path, head = folder / JOURNAL, identity / HEAD
        lock = _locked(path)
        for old in (path, path.with_name(f"{JOURNAL}-journal"), head):
            old.unlink(missing_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        journal = cls._connect(path, head, lock)
        try:
            with journal._writing():
                for name, columns in _TABLES.items():
                    journal._database.execute(f"CREATE TABLE {name} ({columns})")
                rows = [("version", str(_VERSION)), ("id", secrets.token_hex(16)), ("writes", "0")]
                journal._database.executemany("INSERT INTO meta VALUES (?, ?)", rows)
        except BaseException:
            journal.close()
            raise
        return journal

    @classmethod
    def _connect(cls, path: Path, head: Path, lock: int | None = None) -> Self:
        lock = _locked(path) if lock is None else lock
        try:
            database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            database.execute("PRAGMA journal_mode=DELETE")
            database.execute("PRAGMA synchronous=FULL")
        except sqlite3.Error as error:
            os.close(lock)
            raise _refused(path, f"it cannot be read: {error}") from error
        return cls(path, head, database, lock)

    def close(self) -> None:
        """Let go of the file; closing twice is harmless."""
        self._database.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _check(self, own: str, writes: int) -> None:
        try:
            found = dict(self._database.execute("SELECT name, value FROM meta"))
            digest = self._digest()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise _refused(self.path, f"it was damaged: {error}") from error
        if found.get("version") != str(_VERSION):
            raise _refused(
                self.path, f"it is of version {found.get('version')}", "go on with a newer Mycelia"
            )
        if found.get("digest") != digest:
            raise _refused(self.path, "it was changed by something else than Mycelia")
        if found["id"] != own:
            raise _refused(self.path, "it is of another identity")
        if int(found["writes"]) not in (writes, writes + 1):  # the head comes behind the journal
            raise _refused(self.path, f"it was written {found['writes']} times, and there were {writes}")
        if int(found["writes"]) != writes:
            self._save_head()

    # --- what it says -----------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The highest epoch of a roster that it worked under."""
        return int(self._one("SELECT value FROM meta WHERE name = 'epoch'") or 0)

    @property
    def used(self) -> bool:
        """Whether it ever joined anything."""
        return bool(self._rows("SELECT 1 FROM joined LIMIT 1"))

    def highest(self, run: str) -> tuple[int, int] | None:
        """The last (round, attempt) of a run that it joined."""
        rows = self._rows("SELECT round, attempt FROM joined WHERE run = ?", run)
        return (rows[0][0], rows[0][1]) if rows else None

    def task(self, run: str) -> bytes | None:
        """The task of a run that is in progress, as it came."""
        found = self._one("SELECT task FROM work WHERE run = ?", run)
        return found if isinstance(found, bytes) else None

    def trained(self, run: str) -> Trained | None:
        """The update of a run that waits for the end of its round."""
        columns = "round, task_sha256, sha256, numbers"
        rows = self._rows(f"SELECT {columns} FROM trained WHERE run = ?", run)
        if not rows:
            return None
        round, task, payload, numbers = rows[0]
        return Trained(round, task, payload, **json.loads(numbers))

    def counted(self, at: Position) -> bool:
        """Whether a round, whichever the attempt, counts already."""
        return bool(self._rows("SELECT 1 FROM counted WHERE run = ? AND round = ?", at.run, at.round))

    def finished(self, run: str) -> bool:
        """Whether the model of a run was delivered."""
        return bool(self._rows("SELECT 1 FROM finished WHERE run = ?", run))

    def spent(self, data: str) -> tuple[Spent, ...]:
        """What was spent of a data set, by run."""
        rows = self._rows("SELECT data, run, epsilon, delta FROM spent WHERE data = ? ORDER BY run", data)
        return tuple(Spent(*row) for row in rows)

    def done(self, day: date) -> Done:
        """How often it took part, on a day and in all."""
        on_day = self._rows("SELECT sum(rounds), sum(bytes) FROM done WHERE day = ?", day.isoformat())
        total = self._one("SELECT sum(rounds) FROM done")
        return Done(int(on_day[0][0] or 0), int(on_day[0][1] or 0), int(total or 0))

    # --- what is written --------------------------------------------------------------------------

    def join(self, at: Position, task: bytes, epoch: int, day: date) -> None:
        """Before the first answer to a task: it is in progress, and its round counts from now on.

        Args:
            at: where it belongs.
            task: as it came.
            epoch: of the roster it came under.
            day: today.

        Raises:
            JournalError: it cannot be written.
        """
        with self._writing():
            self._put("joined", *at)
            self._put("work", *at, task)
            self._put("meta", "epoch", str(max(epoch, self.epoch)))
            if not self.counted(at):
                self._put("counted", at.run, at.round)
                self._add(at.run, day, 1, 0)

    def keep(self, at: Position, trained: Trained) -> None:
        """An update is there, and waits until its round is over.

        Raises:
            JournalError: it cannot be written.
        """
        numbers = {name: getattr(trained, name) for name in ("weights", "metrics", "examples", "steps")}
        row = (at.run, trained.round, trained.task_sha256, trained.sha256, json.dumps(numbers))
        with self._writing():
            self._put("trained", *row)

    def sent(self, at: Position, size: int, day: date) -> None:
        """So many bytes are about to be sent.

        Raises:
            JournalError: it cannot be written.
        """
        with self._writing():
            self._add(at.run, day, 0, size)

    def spend(self, spent: Spent) -> None:
        """Before a release: so much of a data set is spent in a run, what was before included.

        Raises:
            JournalError: it cannot be written.
        """
        with self._writing():
            self._put("spent", spent.data, spent.run, spent.epsilon, spent.delta)

    def settle(self, at: Position) -> None:
        """A round is over; the run may be in the next one already.

        Raises:
            JournalError: it cannot be written.
        """
        with self._writing():
            self._database.execute(
                "DELETE FROM work WHERE run = ? AND (round < ? OR round = ? AND attempt <= ?)",
                (at.run, at.round, at.round, at.attempt),
            )
            self._database.execute("DELETE FROM trained WHERE run = ? AND round <= ?", (at.run, at.round))

    def finish(self, run: str) -> None:
        """The model of a run was delivered.

        Raises:
            JournalError: it cannot be written.
        """
        with self._writing():
            self._put("finished", run)
            self._database.execute("DELETE FROM work WHERE run = ?", (run,))
            self._database.execute("DELETE FROM trained WHERE run = ?", (run,))

    # --- inside -----------------------------------------------------------------------------------

    def _add(self, run: str, day: date, rounds: int, size: int) -> None:
        self._database.execute(
            "INSERT INTO done VALUES (?, ?, ?, ?) ON CONFLICT (day, run)"
            " DO UPDATE SET rounds = rounds + excluded.rounds, bytes = bytes + excluded.bytes",
            (day.isoformat(), run, rounds, size),
        )

    def _put(self, table: str, *row: object) -> None:
        marks = ", ".join("?" * len(row))
        self._database.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", row)

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            with self._turn:
                return list(self._database.execute(query, values))
        except sqlite3.Error as error:
            raise _refused(self.path, f"it cannot be read: {error}") from error

    def _one(self, query: str, *values: object) -> Any:
        rows = self._rows(query, *values)
        return rows[0][0] if rows else None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One change, whole or not at all, and durable."""
        with self._turn:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                yield
                self._database.execute(
                    "UPDATE meta SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT) WHERE name = 'writes'"
                )
                self._put("meta", "digest", self._digest())
                self._database.execute("COMMIT")
            except BaseException as error:
                with suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise _refused(self.path, f"it cannot be written: {error}") from error
                raise
            self._save_head()

    def _digest(self) -> str:
        """Hash of all that it says."""
        digest = sha256()
        for table in _TABLES:
            query = (
                f"SELECT * FROM {table} ORDER BY 1, 2" if table != "finished" else "SELECT * FROM finished"
            )
            for row in self._database.execute(query):
                if row[:1] != ("digest",):
                    digest.update(repr((table, row)).encode())
        return digest.hexdigest()

    def _save_head(self) -> None:
        meta = dict(self._rows("SELECT name, value FROM meta"))
        content = json.dumps({"journal": meta["id"], "writes": int(meta["writes"])})
        try:
            write_whole(self._head, content.encode())
        except OSError as error:
            raise _refused(self._head, f"it cannot be written: {error.strerror}") from error


def _read_head(head: Path) -> tuple[str, int]:
    try:
        found = json.loads(head.read_bytes())
        return str(found["journal"]), int(found["writes"])
    except OSError as error:
        raise _refused(head, f"it cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise _refused(head, "it was damaged") from error


def _locked(path: Path) -> int:
    try:
        lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _refused(path, f"it cannot be opened: {error.strerror}") from error
    if hold(lock):
        return lock
    os.close(lock)
    raise _refused(path, "another process has it", "stop that process, or use another state folder")


def _refused(path: Path, found: str, fix: str = _FIX) -> JournalError:
    return JournalError(
        found,
        rule="a device goes on only with the journal that it wrote: without it nothing says what it has told",
        fix=fix,
        who=str(path),
    )
