"""The database of a server: SQLite for one server, PostgreSQL for several.

What `write` did is on the disk when its block ends, all of it or nothing. Whoever leads a run writes through
`Lease.write`, which a stale leader cannot. Every call waits for the disk or the network: an event loop makes
it in a thread.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, Self

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError

from mycelia.aggregator.sqlite_wal import lost_transactions
from mycelia.aggregator.store_problems import away, corrupt, explained
from mycelia.aggregator.tables import MIGRATIONS, Migration, migrate
from mycelia.engine.errors import ConfigError

__all__ = ["CONNECT_S", "STALL_S", "Store"]

CONNECT_S: Final = 5
"""Seconds in which a connection is made."""
STALL_S: Final = 5
"""Seconds after which PostgreSQL ends the transaction of a server that has stopped in the middle of it.

Shorter than a lease, or a stopped leader would keep its successor out.
"""
_STATEMENT_S: Final = 60
_WRITES: Final = "mycelia_writes"
_MIGRATING: Final = 0x4D796365  # any number, the same for all servers


class Store:
    """An open database; made by `open`.

    Attributes:
        name: its address without a password, for messages.
        shared: whether several servers can use it.
        engine: SQLAlchemy's.
    """

    def __init__(self, engine: Engine, lock: sqlite3.Connection | None) -> None:
        self.engine, self._lock = engine, lock
        self.name = engine.url.render_as_string(hide_password=True)
        self.shared = lock is None
        # SQLite has one writer at a time; a lock is a fairer queue than its own.
        self._turn: AbstractContextManager[Any] = nullcontext() if self.shared else threading.Lock()
        self._closed = False
        event.listen(engine, "checkin", self._given_back)

    @classmethod
    def open(cls, url: str, *, migrations: Sequence[Migration] = MIGRATIONS) -> Self:
        """Open a database, and bring its tables to the newest version.

        Args:
            url: `sqlite:///relative.db`, `sqlite:////absolute.db` or `postgresql://user@host/name`.
            migrations: all steps there are.

        Raises:
            ConfigError: an address of something else, a database that is not durable, of a newer version or
                with other tables, or a SQLite file that another server has.
            Problem: `STORE`: it cannot be reached or written; `STORE_CORRUPT`: it is damaged.
        """
        try:
            address = make_url(url)
            backend = address.get_backend_name()
        except (ArgumentError, ValueError) as error:
            raise _unusable("it is no address of a database", "store.url") from error
        if backend == "sqlite":
            store = cls(*_open_sqlite(address))
        elif backend == "postgresql":
            store = cls(_open_postgresql(address), None)
        else:
            raise _unusable(f"a database of the kind {backend!r}", "store.url")
        try:
            store._begin(migrations)
        except BaseException:
            store.close()
            raise
        return store

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection that sees one state of the database and writes nothing.

        Raises:
            Problem: `STORE` or `STORE_CORRUPT`.
        """
        with explained(self.name), self.engine.connect() as connection:
            if self.shared:
                connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A connection whose changes are durable at the end of the block, or undone by an error.

        Raises:
            Problem: `STORE` or `STORE_CORRUPT`. If that comes from the end of the block, the changes may
                be there all the same: PostgreSQL can go away between doing it and saying so.
        """
        with explained(self.name), self._turn, self.engine.connect() as connection:
            connection.execution_options(**{_WRITES: True})
            with connection.begin():
                yield connection

    def now(self, connection: Connection) -> float:
        """Unix time on a clock that all servers of this database share."""
        if self.shared:
            return float(
                connection.scalar(text("SELECT extract(epoch FROM clock_timestamp())::float8")) or 0.0
            )
        return time.time()

    def close(self) -> None:
        """Let go of it; closing twice is harmless. Who is using it goes on to the end of the block."""
        self._closed = True
        self.engine.dispose()
        if self._lock is not None:
            self._lock.close()

    def _given_back(self, connection: Any, _record: object) -> None:
        """A connection was used to the end; nobody else would close one that comes after `close`."""
        if self._closed and connection is not None:
            connection.close()

    def _begin(self, migrations: Sequence[Migration]) -> None:
        with self.write() as connection:
            if self.shared:
                _check_durable(connection, self.name)
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATING})"))
            migrate(connection, self.name, migrations)


def _open_sqlite(address: URL) -> tuple[Engine, sqlite3.Connection]:
    if address.drivername not in ("sqlite", "sqlite+pysqlite") or address.query:
        raise _unusable(f"the driver or the options of {address.drivername!r}", "store.url")
    if address.database in (None, "", ":memory:"):
        raise ConfigError(
            "a database in memory",
            rule="a round has to outlive the process",
            fix="name a file: sqlite:///mycelia.db",
            who="store.url",
        )
    path = Path(os.path.realpath(str(address.database)))  # one file has one lock, whatever its names
    address = address.set(database=str(path))
    lock = _hold(path)
    try:
        _check_log(path)
    except BaseException:
        lock.close()
        raise
    engine = create_engine(address, connect_args={"timeout": 30.0, "isolation_level": None})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine, lock


def _hold(path: Path) -> sqlite3.Connection:
    """Keep other servers out, by a lock on a file beside the database; it ends with the process."""
    beside = path.with_name(path.name + ".lock")
    try:
        for file in (path, beside):
            # SQLite would let others read it. One that is there is not touched: to close it would let go of
            # every lock that this process has on it.
            with suppress(FileExistsError):
                os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        lock = sqlite3.connect(beside, timeout=0.0, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"the file cannot be used: {said}",
            rule="the store is a file that the server can write, in a folder that exists",
            who=str(path),
        ) from error
    try:
        lock.execute("PRAGMA journal_mode=OFF")  # nothing is ever written there
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        lock.close()
        raise ConfigError(
            f"another server has it, or its folder knows no locks ({error})",
            rule="a SQLite file belongs to one server",
            fix="stop the other server; several servers share a PostgreSQL database",
            who=str(path),
        ) from error
    return lock


def _check_log(path: Path) -> None:
    log = path.with_name(path.name + "-wal")
    try:
        damaged = lost_transactions(log)
    except OSError as error:
        raise away(f"its write-ahead log cannot be read: {error.strerror}", str(log)) from error
    if damaged:
        raise corrupt("SQLite's write-ahead log was changed, and SQLite would forget what follows", str(log))


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
        raise ConfigError(
            f"the file's journal mode stays {mode!r}",
            rule="the store needs SQLite's write-ahead log, which network file systems do not carry",
            fix="put the file on a local disk",
            who="store.url",
        )
    for pragma in ("synchronous=FULL", "fullfsync=ON", "checkpoint_fullfsync=ON", "trusted_schema=OFF"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    """A transaction that is to write says so at once; sqlite3 by itself would wait for the first change."""
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _open_postgresql(address: URL) -> Engine:
    if address.drivername not in ("postgresql", "postgresql+psycopg"):
        raise _unusable(f"the driver of {address.drivername!r}", "store.url")
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "psycopg is not installed",
            rule="a PostgreSQL store needs it",
            fix="pip install 'mycelia[postgres]'",
            who="store.url",
        ) from error
    settings = {
        "statement_timeout": _STATEMENT_S,
        "lock_timeout": 2 * STALL_S,
        "idle_in_transaction_session_timeout": STALL_S,
    }
    options = " ".join(f"-c {name}={seconds}s" for name, seconds in settings.items())
    return create_engine(
        address.set(drivername="postgresql+psycopg"),
        pool_pre_ping=True,
        pool_timeout=2 * CONNECT_S,
        connect_args={
            "connect_timeout": CONNECT_S,
            "options": options,
            "tcp_user_timeout": 1000 * 2 * STALL_S,
            "application_name": "mycelia serve",
        },
    )


def _check_durable(connection: Connection, name: str) -> None:
    for setting in ("fsync", "synchronous_commit"):
        if connection.scalar(text(f"SHOW {setting}")) == "off":
            raise ConfigError(
                f"PostgreSQL runs with {setting} = off",
                rule="what was written outlives a power cut",
                fix=f"set {setting} = on, for the server or this role",
                who=name,
            )


def _unusable(found: str, who: str) -> ConfigError:
    return ConfigError(
        found,
        rule="the store is a SQLite file or a PostgreSQL database",
        fix="sqlite:///mycelia.db, or postgresql://user@host/name",
        who=who,
    )
