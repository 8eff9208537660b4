"""What went wrong in a database, by the reason that it has for the server and its devices."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, SQLAlchemyError, TimeoutError

from mycelia.aggregator.wire.problems import Problem, Reason

__all__ = ["away", "corrupt", "explained"]

_AWAY_SQLITE = frozenset({
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_IOERR, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_READONLY,
})  # fmt: skip
_CORRUPT_SQLITE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT})
# Classes of SQLSTATE, appendix A of PostgreSQL's manual: connection, resources, operator, rollback, I/O, and
# what a server says that has become a standby, or stopped a statement or a lock that took too long.
_AWAY_STATES = ("08", "25006", "25P03", "40", "53", "55P03", "57", "58")
_CORRUPT_STATES = ("XX001", "XX002")


def away(found: str, who: str) -> Problem:
    """The error about a store that cannot be used now."""
    return Problem(
        Reason.STORE,
        found,
        rule="what a round did is durable before anyone sees it",
        fix="free space, or bring the database back: what was written before is intact",
        who=who,
        hint="the server's store is away",
    )


def corrupt(found: str, who: str) -> Problem:
    """The error about a store that cannot be trusted."""
    return Problem(
        Reason.STORE_CORRUPT,
        found,
        rule="a run goes on only with all that it wrote",
        fix="restore the store and its blobs from a backup, or begin another run",
        who=who,
        hint="the server's store is damaged",
    )


@contextmanager
def explained(who: str) -> Iterator[None]:
    """Turns errors of a database into problems; an error that is a fault of Mycelia's stays what it is.

    Raises:
        Problem: `STORE` or `STORE_CORRUPT`.
    """
    try:
        yield
    except TimeoutError as error:  # no connection of the pool became free
        raise away("every connection to the database is busy", who) from error
    except DBAPIError as error:
        found = _by_sqlite(error, who) if isinstance(error.orig, sqlite3.Error) else _by_state(error, who)
        if found is None:
            raise
        raise found from error
    except UnicodeDecodeError as error:  # sqlite3 reads a damaged text
        raise corrupt("a text that is none", who) from error
    except SQLAlchemyError as error:
        if isinstance(error.__cause__, UnicodeDecodeError):
            raise corrupt("a text that is none", who) from error
        raise


def _by_sqlite(error: DBAPIError, who: str) -> Problem | None:
    said = str(error.orig)
    code = getattr(error.orig, "sqlite_errorcode", None)
    primary = code & 0xFF if code is not None else None
    if primary in _CORRUPT_SQLITE or "decode to UTF-8" in said:
        return corrupt(f"SQLite finds it damaged: {said}", who)
    if primary in _AWAY_SQLITE:
        return away(f"SQLite cannot use it: {said}", who)
    if primary == sqlite3.SQLITE_ERROR and "no such" in said:
        return corrupt(f"its tables are not those that were made: {said}", who)
    return None


def _by_state(error: DBAPIError, who: str) -> Problem | None:
    said = str(error.orig).strip().partition("\n")[0]
    state = getattr(error.orig, "sqlstate", None)
    if state is not None and state.startswith(_CORRUPT_STATES):
        return corrupt(f"PostgreSQL finds it damaged: {said}", who)
    if error.connection_invalidated or (state is not None and state.startswith(_AWAY_STATES)):
        return away(f"PostgreSQL is not there: {said}", who)
    if state is None and type(error.orig).__name__ in ("OperationalError", "InterfaceError"):
        return away(f"PostgreSQL is not there: {said}", who)  # it was not reached, so it has said nothing
    return None
