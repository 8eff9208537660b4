"""The lead of a server's runs, which it has of all of them or of none: waiting for it, and keeping it.

Where a store has one server, that one leads. Where several share it the others wait: for a word that the
lease was given back, or for its end. Whoever leads renews it in a thread of its own, and has lost it when its
time is over by its own clock, whether the database could be asked or not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeVar

from mycelia.aggregator.deadlines import SHUTDOWN_S
from mycelia.aggregator.leases import RENEW_S, Lease, Standing, standing, take
from mycelia.aggregator.logs import log
from mycelia.aggregator.runs.context import Stopped
from mycelia.aggregator.store import Store
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.engine.errors import ConfigError

__all__ = ["Leading", "not_leader"]

_FIRST_S: Final = 0.5
_MOST_S: Final = 5.0  # between two tries to reach the database
_AGAIN_S: Final = 1.0  # after a lease could not be renewed
_LATE_S: Final = 0.05  # beyond the end of another server's lease
_Result = TypeVar("_Result")


def not_leader(holder: str) -> Problem:
    """What a device is told that is welcome, at a server that leads nothing."""
    return Problem(
        Reason.NOT_LEADER,
        f"{holder or 'another server'} leads the runs of this one",
        rule="a device works with the server that leads",
        fix="try another server of the list",
        who="server",
        hint="another server leads",
    )


class Leading:
    """The leases of all runs of a server.

    Args:
        store: where they are kept.
        runs: names of the runs; leases are taken in the order of the names, so that two servers cannot wait
            for each other.
        holder: name of this server, which no other one has.
        waiting: told whenever another server turns out to lead: the run, and how its lease stands.

    Attributes:
        leases: by run, while this server leads.
        holder: the server that leads, as far as it is known; "" at first.
    """

    def __init__(
        self, store: Store, runs: Sequence[str], holder: str, waiting: Callable[[str, Standing], None]
    ) -> None:
        self._store, self._runs, self._name, self._waiting = store, sorted(runs), holder, waiting
        self.leases: dict[str, Lease] = {}
        self.holder = ""
        self._fences: dict[str, int] = {}
        self._waits_for = ""
        self._moved = asyncio.Event()
        self._ending = False
        self._thread = ThreadPoolExecutor(1, "lease")  # not behind others, or a busy server loses the lead

    @property
    def leads(self) -> bool:
        """Whether no other server can have the lead now."""
        if len(self.leases) < len(self._runs):
            return False
        return not self._store.shared or all(lease.left > 0 for lease in self.leases.values())

    def freed(self, run: str) -> None:
        """A lease may be free: that of a run, or any with ""."""
        if run in ("", self._waits_for):
            self._moved.set()

    def end(self) -> None:
        """Whoever waits for the lead gets `Stopped`."""
        self._ending = True
        self._moved.set()

    async def take(self) -> None:
        """Wait until this server leads.

        Raises:
            Stopped: the server is to end.
            ConfigError: another process leads by the name of this server.
            Problem: `STORE_CORRUPT`.
        """
        self.leases.clear()
        wait = _FIRST_S
        while not self._ending:
            self._moved.clear()
            try:
                found = await self._in_thread(self._try)
            except Problem as problem:
                if problem.reason is not Reason.STORE:
                    raise
                log("store_away", level="error", reason=problem.reason.value, hint=problem.hint)
                await self._wait(random.uniform(wait / 2, wait))
                wait = min(2 * wait, _MOST_S)
                continue
            if found is None:
                self.holder = self._name
                return
            run, stands = found
            wait, self.holder = _FIRST_S, stands.holder
            self._waiting(run, stands)
            await self._wait(stands.left + random.uniform(_LATE_S, 2 * _LATE_S))
        raise Stopped

    async def keep(self) -> None:
        """Renew what was taken; returns when the lead is lost."""
        pause = RENEW_S
        while self.leads and not self._ending:
            self._moved.clear()
            left = self._left
            await self._wait(pause if left is None else min(pause, left))
            pause = RENEW_S
            try:
                async with asyncio.timeout(self._left):
                    for lease in list(self.leases.values()):
                        await asyncio.shield(self._in_thread(lease.renew))
            except TimeoutError:
                continue
            except Problem as problem:
                hint = problem.hint or problem.found
                log("lease", level="error", reason=problem.reason.value, hint=hint)
                if problem.reason is Reason.NOT_LEADER:
                    return
                pause = _AGAIN_S

    async def give_back(self) -> None:
        """Let the next server lead at once; nothing may be written with the leases any more."""
        leases, self.leases = list(self.leases.values()), {}
        for lease in leases:
            with suppress(Problem):
                await self._in_thread(lease.release)

    async def close(self) -> None:
        """Let go of the thread, once it has done what it does; not if the database keeps it waiting."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S / 4):
                await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    @property
    def _left(self) -> float | None:
        """Seconds for which the lead is certain."""
        if not self._store.shared:
            return None
        return min((lease.left for lease in self.leases.values()), default=0.0)

    def _try(self) -> tuple[str, Standing] | None:
        """Take what is free; which run is not."""
        for run in self._runs:
            self._waits_for = run  # before it is looked at, so that no word of it is missed
            self._check_name(run)
            lease = take(self._store, run, self._name)
            if lease is None:
                for other in self.leases.values():
                    with suppress(Problem):
                        other.release()
                self.leases.clear()
                return run, standing(self._store, run) or Standing("", 0, 0.0)
            self.leases[run] = lease
            self._fences[run] = lease.fence
        return None

    def _check_name(self, run: str) -> None:
        """After a loss: whether another process took it by the name of this server."""
        known, found = self._fences.get(run), standing(self._store, run)
        if known is not None and found is not None and found.holder == self._name and found.fence != known:
            raise ConfigError(
                f"another process leads {run} by the name of this server, {self._name}",
                rule="each server of a store has a name and keys of its own",
                fix="end one of the two; mycelia enrol server makes keys for another server",
                who="server.keys",
            )

    async def _wait(self, seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._moved.wait()

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
