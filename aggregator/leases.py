"""Who leads a run: one server at a time, for ten seconds more each time it says so.

A lease has a number, the fence, that grows each time the lead changes. All that a leader writes is written in
a transaction that looks at the fence first, so a leader that was away and does not know that it was replaced
changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from sqlalchemy import Connection, select

from mycelia.aggregator.notices import publish
from mycelia.aggregator.store import Store
from mycelia.aggregator.tables import leases
from mycelia.aggregator.wire.problems import Problem, Reason

__all__ = ["LEASES", "LEASE_S", "RENEW_S", "Lease", "Standing", "leader", "standing", "take"]

LEASE_S: Final = 10.0
"""Seconds that a lease lasts."""
RENEW_S: Final = 3.0
"""Seconds after which it is renewed."""
LEASES: Final = "leases"
"""The channel that says the name of a run whose lease was given back, or taken."""


def _awake_clock() -> float:
    """Seconds that go on while the machine sleeps, where the system counts them."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


class Lease:
    """The lead of a run; made by `take`.

    Attributes:
        store: where it is kept.
        run: the run's name.
        holder: the server that has it.
        fence: how often the lead has changed.
    """

    def __init__(self, store: Store, run: str, holder: str, clock: Callable[[], float]) -> None:
        self.store, self.run, self.holder, self.fence = store, run, holder, 0
        self._clock = clock
        self._until = 0.0

    @property
    def left(self) -> float:
        """Seconds in which no other server can have the lead; 0 if that may be over."""
        return max(0.0, self._until - self._clock())

    def renew(self, now: float | None = None) -> None:
        """Make it last another `LEASE_S`; call it every `RENEW_S`. What was over and not taken is had again.

        Args:
            now: Unix time; by default the store's.

        Raises:
            Problem: `NOT_LEADER`: another server has the lead. `STORE`: the database is away, and the lease
                goes on running out.
        """
        began = self._clock()
        with self.write() as connection:
            now = self.store.now(connection) if now is None else now
            connection.execute(leases.update().where(leases.c.run == self.run).values(expires=now + LEASE_S))
        self._until = began + LEASE_S

    def release(self) -> None:
        """Give it back, so that another server need not wait.

        Raises:
            Problem: `NOT_LEADER`, or `STORE`.
        """
        self._until = 0.0
        with self.write() as connection:
            connection.execute(leases.update().where(leases.c.run == self.run).values(expires=0.0))
            publish(connection, LEASES, self.run)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """`Store.write` for the leader alone: until the block has ended, nobody else can take the lead.

        Raises:
            Problem: `NOT_LEADER`: nothing was written. `STORE`, `STORE_CORRUPT`: see `Store.write`.
        """
        with self.store.write() as connection:
            found = select(leases.c.holder, leases.c.fence).where(leases.c.run == self.run)
            row = connection.execute(found.with_for_update()).one_or_none()
            if row is None or row.fence != self.fence:
                self._until = 0.0
                raise Problem(
                    Reason.NOT_LEADER,
                    f"{row.holder if row else 'nobody'} leads {self.run}, not {self.holder}",
                    rule="a run has one leader, and only it writes",
                    fix="take the lease again, and read the round log anew",
                    who=self.holder,
                    hint="another server leads the run",
                )
            yield connection


def take(
    store: Store,
    run: str,
    holder: str,
    *,
    now: float | None = None,
    clock: Callable[[], float] = _awake_clock,
) -> Lease | None:
    """Take the lead of a run, if it is free.

    It is free when nobody has it, when it is over, when the holder is a former self of this server, and
    always where the store has one server.

    Args:
        store: where leases are kept.
        run: the run's name.
        holder: name of this server, which no other one has.
        now: Unix time; by default the store's.
        clock: monotonic, in seconds.

    Returns:
        the lease, or None while another server leads.

    Raises:
        Problem: `STORE` or `STORE_CORRUPT`.
    """
    lease = Lease(store, run, holder, clock)
    began = clock()
    with store.write() as connection:
        found = select(leases).where(leases.c.run == run)
        row = connection.execute(found.with_for_update()).one_or_none()
        now = store.now(connection) if now is None else now
        # An end that lies too far ahead comes from a clock that was set back since.
        if row is not None and store.shared and row.holder != holder and now < row.expires <= now + LEASE_S:
            return None
        lease.fence = row.fence + 1 if row else 1
        values = {"holder": holder, "fence": lease.fence, "expires": now + LEASE_S}
        if row is not None:
            connection.execute(leases.update().where(leases.c.run == run).values(values))
        elif not _insert_first(connection, run, values):
            return None
        publish(connection, LEASES, run)
    lease._until = began + LEASE_S
    return lease


def _insert_first(connection: Connection, run: str, values: dict[str, object]) -> bool:
    """The first lease of a run; False if another server was faster."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert

        first = insert(leases).values(run=run, **values).on_conflict_do_nothing().returning(leases.c.run)
        return connection.scalar(first) is not None
    connection.execute(leases.insert().values(run=run, **values))
    return True


class Standing(NamedTuple):
    """A lease, as whoever does not have it sees it.

    Attributes:
        holder: the server that had it last.
        fence: its number.
        left: seconds until another server may take it; 0 if that is now.
    """

    holder: str
    fence: int
    left: float


def standing(store: Store, run: str) -> Standing | None:
    """How the lease of a run stands; None if nobody ever had it.

    Raises:
        Problem: `STORE` or `STORE_CORRUPT`.
    """
    with store.read() as connection:
        row = connection.execute(select(leases).where(leases.c.run == run)).one_or_none()
        if row is None:
            return None
        left = row.expires - store.now(connection)
    return Standing(row.holder, row.fence, left if store.shared and 0 < left <= LEASE_S else 0.0)


def leader(store: Store, run: str) -> str | None:
    """The server that had the lead last, if any did."""
    with store.read() as connection:
        return connection.scalar(select(leases.c.holder).where(leases.c.run == run))
