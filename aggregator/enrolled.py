"""What servers of one database share about devices: the roster, one-time tokens, and who has whose stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sqlalchemy import func, select, text
from sqlalchemy.dialects import postgresql, sqlite

from mycelia.aggregator.notices import publish
from mycelia.aggregator.store import Store
from mycelia.aggregator.store_problems import corrupt
from mycelia.aggregator.tables import clients, roster, tokens
from mycelia.engine.errors import DataError
from mycelia.privacy.secagg.certificates import IdentityProblem, IdentityReason, date

__all__ = [
    "ROSTERS", "STREAMS", "add_tokens", "begin_stream", "keep_roster", "newest_roster", "streams_of",
    "unused_tokens", "use_token",
]  # fmt: skip

ROSTERS: Final = "rosters"
"""The channel that says the epoch of a new roster."""
STREAMS: Final = "streams"
"""The channel that says whose stream is new, and its number."""


def keep_roster(store: Store, epoch: int, document: bytes) -> bool:
    """Keep a roster that was verified, and tell the other servers.

    Returns:
        False if it was there.

    Raises:
        DataError: there is a newer one, or another of the same epoch.
        Problem: `STORE` or `STORE_CORRUPT`.
    """
    with store.write() as connection:
        if store.shared:  # SQLite has one writer anyway
            connection.execute(text("LOCK TABLE roster IN SHARE ROW EXCLUSIVE MODE"))
        newest = connection.execute(select(roster).order_by(roster.c.epoch.desc()).limit(1)).one_or_none()
        if newest is not None and (newest.epoch, newest.document) == (epoch, document):
            return False
        if newest is not None and newest.epoch >= epoch:
            raise DataError(
                f"epoch {epoch} after epoch {newest.epoch}",
                rule="the epoch of a roster only grows, and each has one document",
                fix="take the operator's newest roster",
                who="roster",
            )
        connection.execute(roster.insert().values(epoch=epoch, document=document))
        publish(connection, ROSTERS, str(epoch))
    return True


def newest_roster(store: Store) -> tuple[int, bytes] | None:
    """The epoch and the document of the newest roster; who reads it verifies the signature.

    Raises:
        Problem: `STORE` or `STORE_CORRUPT`.
    """
    with store.read() as connection:
        row = connection.execute(select(roster).order_by(roster.c.epoch.desc()).limit(1)).one_or_none()
    if row is None:
        return None
    if type(row.epoch) is not int or type(row.document) is not bytes:
        raise corrupt("its columns hold something else than a roster", "table roster")
    return row.epoch, row.document


def add_tokens(store: Store, hashes: Iterable[bytes], expires: int) -> None:
    """Make one-time tokens known.

    Args:
        store: where.
        hashes: SHA-256 of each token, 32 bytes.
        expires: last second that they are good, Unix time.
    """
    rows = [{"sha256": digest, "expires": expires} for digest in hashes]
    if rows:
        with store.write() as connection:
            connection.execute(tokens.insert(), rows)


def unused_tokens(store: Store, now: int) -> int:
    """How many could still be used; with none, nobody needs the enrolment port."""
    wanted = (
        select(func.count()).select_from(tokens).where(tokens.c.used_by.is_(None), tokens.c.expires >= now)
    )
    with store.read() as connection:
        return connection.scalar(wanted) or 0


def use_token(store: Store, sha256: bytes, request: bytes, now: int) -> None:
    """Use a token up for a request; the same request may come again, if its answer was lost.

    Args:
        store: where tokens are kept.
        sha256: of the token; it is looked up by this hash, so the time it takes tells nothing of a token.
        request: SHA-256 of the request that it allows.
        now: Unix time in seconds.

    Raises:
        IdentityProblem: `BAD_TOKEN`: unknown, expired, or used by another request.
        Problem: `STORE` or `STORE_CORRUPT`.
    """
    mine = tokens.c.sha256 == sha256
    with store.write() as connection:
        free = tokens.update().where(mine, tokens.c.used_by.is_(None), tokens.c.expires >= now)
        if connection.execute(free.values(used_by=request)).rowcount:
            return
        row = connection.execute(select(tokens).where(mine)).one_or_none()
    if row is None:
        found = "the token is not known"
    elif row.used_by == request:
        return
    elif row.used_by is not None:
        found = "the token was used already"
    else:
        found = f"the token expired on {date(row.expires)}"
    raise IdentityProblem(
        IdentityReason.BAD_TOKEN,
        found,
        rule="a token enrols one device, once",
        fix="mycelia enrol token makes new ones",
        who="enrolment",
    )


def begin_stream(store: Store, client: int, server: str, now: float) -> int:
    """Note a device's new stream, and tell the server that has an older one to end it.

    Where there is one server it knows by itself.

    Args:
        store: where.
        client: the device.
        server: that has the new stream.
        now: Unix time.

    Returns:
        the stream's number; a higher one supersedes it. The notice on `STREAMS` says "client number".
    """
    values = {"client": client, "server": server, "stream": 1, "seen_at": now}
    changed = {"server": server, "stream": clients.c.stream + 1, "seen_at": now}
    insert = postgresql.insert if store.shared else sqlite.insert
    begun = insert(clients).values(values).on_conflict_do_update(index_elements=["client"], set_=changed)
    with store.write() as connection:
        number = int(connection.scalar(begun.returning(clients.c.stream)) or 0)
        publish(connection, STREAMS, f"{client} {number}")
    return number


def streams_of(store: Store, server: str) -> dict[int, int]:
    """The devices whose newest stream a server has, and its number; for a server that missed notices."""
    wanted = select(clients.c.client, clients.c.stream).where(clients.c.server == server)
    with store.read() as connection:
        return {row.client: row.stream for row in connection.execute(wanted)}
