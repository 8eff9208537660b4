"""A round log for an event loop: what is asked for while a sync is under way shares the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from mycelia.aggregator.log_records import Entry
from mycelia.aggregator.outcomes import DeviceOutcome
from mycelia.aggregator.round_log import RoundLog
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.engine.errors import ProtocolError

__all__ = ["LogWriter"]

_FIRST_S: Final = 0.25
_MOST_S: Final = 5.0  # between two tries to reach a database


class _Asked(NamedTuple):
    entry: Entry
    settled: Sequence[DeviceOutcome]
    answer: asyncio.Future[bool]


class LogWriter:
    """Appends to a log, in the order of the calls, from one event loop.

    While the database is away it tries again, with growing pauses, until `stopping` is set: nobody who waits
    is told of it, and no record overtakes another.

    Args:
        log: written by nobody else.
        stopping: set when the server ends; None: never.
        away: called each time the database is found away.
    """

    def __init__(
        self,
        log: RoundLog,
        stopping: asyncio.Event | None = None,
        away: Callable[[Problem], None] = lambda problem: None,
    ) -> None:
        self._log, self._stopping, self._away = log, stopping, away
        self._asked: list[_Asked] = []
        self._work: asyncio.Task[None] | None = None

    @property
    def log(self) -> RoundLog:
        """Where it writes; read only."""
        return self._log

    async def append(self, entry: Entry, *, settled: Sequence[DeviceOutcome] = ()) -> bool:
        """See `RoundLog.append`. The record is written even if whoever waits for it is cancelled."""
        return await self.put(entry, settled=settled)

    def put(self, entry: Entry, *, settled: Sequence[DeviceOutcome] = ()) -> asyncio.Future[bool]:
        """As `append`; the record has its place before this returns."""
        asked = _Asked(entry, settled, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        if self._work is None:
            self._work = asyncio.create_task(self._write_all())
        return asked.answer

    async def _write_all(self) -> None:
        wait = _FIRST_S
        try:
            while self._asked:
                batch, self._asked = self._asked, []
                answers = await asyncio.to_thread(self._write, batch)
                lost = next((answer for answer in answers if _is_away(answer)), None)
                if isinstance(lost, Problem) and self._stopping is not None and not self._stopping.is_set():
                    answers = answers[: answers.index(lost)]
                    self._asked = [*batch[len(answers) :], *self._asked]
                    self._away(lost)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(wait):
                            await self._stopping.wait()
                    wait = min(2 * wait, _MOST_S)
                else:
                    wait = _FIRST_S
                for asked, answer in zip(batch, answers, strict=False):
                    if asked.answer.done():
                        continue
                    if isinstance(answer, bool):
                        asked.answer.set_result(answer)
                    else:
                        asked.answer.set_exception(answer)
        finally:
            self._work = None

    def _write(self, batch: Sequence[_Asked]) -> list[bool | Exception]:
        if not any(asked.settled for asked in batch):
            try:
                return list(self._log.append_many(asked.entry for asked in batch))
            except ProtocolError as error:  # of one of them; the others shall not suffer from it
                if isinstance(error, Problem) and error.reason != Reason.EQUIVOCATION:
                    return [error] * len(batch)
            except Exception as error:
                return [error] * len(batch)
        answers: list[bool | Exception] = []
        for asked in batch:
            # once the database is away, nothing that comes later is written either
            before = answers[-1] if answers else None
            answers.append(
                before if isinstance(before, Problem) and _is_away(before) else self._write_one(asked)
            )
        return answers

    def _write_one(self, asked: _Asked) -> bool | Exception:
        try:
            return self._log.append(asked.entry, settled=asked.settled)
        except Exception as error:
            return error


def _is_away(answer: object) -> bool:
    return isinstance(answer, Problem) and answer.reason is Reason.STORE
