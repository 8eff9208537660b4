"""What the parts of a run share: its plan, its log, the devices, the clock, and who is told what happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

from mycelia.aggregator.deadlines import Deadlines
from mycelia.aggregator.leases import Lease
from mycelia.aggregator.log_records import Entry
from mycelia.aggregator.log_writer import LogWriter
from mycelia.aggregator.outcomes import DeviceOutcome
from mycelia.aggregator.round_log import BlobStore
from mycelia.aggregator.runs.floor import Floor
from mycelia.aggregator.runs.plans import RunPlan
from mycelia.aggregator.service import Service
from mycelia.aggregator.status.board import Board
from mycelia.aggregator.wire.frames import Problem, Reason

__all__ = ["Context", "Stopped"]

_FIRST_S: Final = 0.25
_MOST_S: Final = 5.0  # between two tries to write
_Result = TypeVar("_Result")


class Stopped(Exception):
    """The run is to stop for now; what is not durable is asked for again."""


@dataclass
class Context:
    """Of one run.

    Attributes:
        plan: the run, checked.
        deadlines: of a round.
        lease: the lead, which its writes need.
        writer: of its log.
        blobs: models, sums and states.
        service: the streams.
        floor: who is here.
        board: what people see.
        discard: takes hashes of blobs that this run has no more use for.
        away: called each time the store is found away.
        stopping: set when the run is to stop for now.
        clock: seconds that do not run backwards.
        wall: Unix time.
    """

    plan: RunPlan
    deadlines: Deadlines
    lease: Lease
    writer: LogWriter
    blobs: BlobStore
    service: Service
    floor: Floor
    board: Board
    discard: Callable[[Sequence[bytes]], None] = lambda hashes: None
    away: Callable[[Problem], None] = lambda problem: None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time

    @property
    def name(self) -> str:
        """Of the run."""
        return self.plan.name

    async def append(self, *entries: Entry, settled: Sequence[DeviceOutcome] = ()) -> None:
        """Write records in this order; see `LogWriter`.

        Args:
            entries: the records; they share a sync.
            settled: outcomes to write down with the last of them.

        Raises:
            Stopped: the run is to stop, and the database is away.
        """
        last = len(entries) - 1
        answers = [
            self.writer.put(entry, settled=settled if place == last else ())
            for place, entry in enumerate(entries)
        ]
        await self.written(answers)

    async def written(self, answers: Sequence[asyncio.Future[bool]]) -> None:
        """Wait until records are durable that were `put` before; see `append`."""
        found = await asyncio.gather(*answers, return_exceptions=True)
        for each in found:
            if isinstance(each, Problem) and each.reason is Reason.STORE and self.stopping.is_set():
                raise Stopped from each
            if isinstance(each, BaseException):
                raise each

    async def durably(self, work: Callable[[], _Result]) -> _Result:
        """Do something that writes, in a thread; again and again while there is no room, or no database.

        Args:
            work: what is done; done twice it is done once.

        Raises:
            Stopped: the run is to stop, and it could not be written.
        """
        wait = _FIRST_S
        while True:
            try:
                return await asyncio.to_thread(work)
            except Problem as problem:
                if problem.reason is not Reason.STORE:
                    raise
                if self.stopping.is_set():
                    raise Stopped from problem
                self.away(problem)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self.stopping.wait()
            wait = min(2 * wait, _MOST_S)
