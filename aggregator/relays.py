"""Letters between the servers of a store: what devices of one say to the leader, and what it says to them.

A letter is durable before anybody is told that there is one, is read once, and belongs to one term of one
leader: one of an earlier term is thrown away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from sqlalchemy import delete, select

from mycelia.aggregator.notices import publish
from mycelia.aggregator.store import Store
from mycelia.aggregator.tables import relays

__all__ = ["RELAYS", "Letter", "Post"]

RELAYS: Final = "relays"
"""The channel that says the name of a server for which there are letters."""

_AT_ONCE: Final = 64  # a letter has up to about 1 MiB


class Letter(NamedTuple):
    """A word about one device.

    Attributes:
        server: it goes to, or comes from.
        client: the device; 0 where it is about several.
        kind: what it says; see those who write them.
        body: the rest.
    """

    server: str
    client: int
    kind: str
    body: bytes = b""


class Post:
    """What one server sends and gets. Its methods wait for the database: call them in a thread.

    Args:
        store: the store.
        name: of this server.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._number = time.time_ns()  # above those of a former self of this server
        self._turn = threading.Lock()

    def send(self, term: int, letters: Sequence[Letter]) -> None:
        """Write letters, durably and in their order; those they are for are told.

        Args:
            term: fence of the lead.
            letters: to any servers.

        Raises:
            Problem: `STORE` or `STORE_CORRUPT`; nothing was written.
        """
        if not letters:
            return
        with self._turn:  # numbers become visible in their order
            rows = []
            for letter in letters:
                self._number += 1
                row = letter._asdict() | {"sender": self._name, "number": self._number, "term": term}
                rows.append(row | {"target": row.pop("server")})
            with self._store.write() as connection:
                connection.execute(relays.insert(), rows)
                for target in sorted({letter.server for letter in letters}):
                    publish(connection, RELAYS, target)

    def receive(self, term: int) -> list[Letter]:
        """Letters for this server in the order in which each sender wrote them; none: there are no more.

        Args:
            term: fence of the lead; letters of other terms are thrown away.

        Raises:
            Problem: `STORE` or `STORE_CORRUPT`; nothing was taken.
        """
        mine = relays.c.target == self._name
        with self._store.write() as connection:
            connection.execute(delete(relays).where(mine, relays.c.term < term))
            wanted = select(relays).where(mine, relays.c.term == term)
            rows = connection.execute(
                wanted.order_by(relays.c.sender, relays.c.number).limit(_AT_ONCE).with_for_update()
            ).all()
            for row in rows:
                one = (relays.c.sender == row.sender) & (relays.c.number == row.number)
                connection.execute(delete(relays).where(mine, one))
        return [Letter(row.sender, row.client, row.kind, row.body) for row in rows]
