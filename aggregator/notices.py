"""Words between the servers of one run, through PostgreSQL: that something has changed, and where to look.

A notice is a hint. What it is about is in the tables; whoever was away looks there when it is back.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, func, select

from mycelia.aggregator.store import CONNECT_S, STALL_S, Store
from mycelia.engine.errors import ConfigError

__all__ = ["MAX_NOTICE", "Notice", "listen", "publish"]

MAX_NOTICE: Final = 7999
"""Bytes of a notice; PostgreSQL takes no more."""

_CHANNEL: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")
_QUIET_S: Final = 15.0  # after so long without a notice the connection is tried
_FIRST_S, _MOST_S = 0.5, 15.0  # before connecting again


class Notice(NamedTuple):
    """A word from a server.

    Attributes:
        channel: it came on; "" for the one that says that the connection is new: what came before is lost,
            so look at all there is.
        payload: the word.
    """

    channel: str
    payload: str = ""


def publish(connection: Connection, channel: str, payload: str) -> None:
    """Tell the other servers, once the transaction is durable; a store with one server has nobody to tell.

    Args:
        connection: of `Store.write` or `Lease.write`.
        channel: lower-case letters, digits and underscores.
        payload: up to `MAX_NOTICE` bytes in UTF-8, without NUL.

    Raises:
        ConfigError: a channel or payload of another kind.
    """
    _check(channel)
    if len(payload.encode()) > MAX_NOTICE or "\x00" in payload:
        raise ConfigError(
            f"a notice of {len(payload.encode())} bytes",
            rule=f"up to {MAX_NOTICE} bytes without NUL",
            who=channel,
        )
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_notify(channel, payload)))


async def listen(store: Store, channels: Sequence[str]) -> AsyncGenerator[Notice, None]:
    """Notices as they come, for as long as they are asked for; a lost connection is made again.

    The first notice, and the first after each new connection, has no channel: see `Notice`. Close the
    iterator, or cancel its task, to end it.

    Args:
        store: a PostgreSQL store.
        channels: to listen on.

    Raises:
        ConfigError: a store with one server, or a channel's name.
    """
    if not store.shared:
        raise ConfigError(
            "listening on a SQLite file",
            rule="notices are between servers that share PostgreSQL",
            who=store.name,
        )
    for channel in channels:
        _check(channel)
    import psycopg

    wait = _FIRST_S
    while True:
        try:
            async with await _connect(store) as connection:
                for channel in channels:
                    await connection.execute(f"LISTEN {channel}")
                wait = _FIRST_S
                yield Notice("")
                while True:
                    async for heard in connection.notifies(timeout=_QUIET_S):
                        yield Notice(heard.channel, heard.payload)
                    await connection.execute("SELECT 1")
        except psycopg.OperationalError:
            # The pause has no word to wait for: the database itself is away. Servers spread their tries.
            pause: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            await asyncio.wait([pause], timeout=random.uniform(0, wait))
            wait = min(2 * wait, _MOST_S)


async def _connect(store: Store) -> Any:
    import psycopg

    arguments = store.engine.dialect.create_connect_args(store.engine.url)[1]
    return await psycopg.AsyncConnection.connect(
        **arguments,
        autocommit=True,
        connect_timeout=CONNECT_S,
        tcp_user_timeout=2000 * STALL_S,
        application_name="mycelia notices",
    )


def _check(channel: str) -> None:
    if not _CHANNEL.fullmatch(channel):
        raise ConfigError(
            f"channel {channel!r}", rule="lower-case letters, digits and underscores, up to 63", who="notices"
        )
