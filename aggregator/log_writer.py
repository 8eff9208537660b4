"""A round log for an event loop: what is asked for while a sync is under way shares the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from mycelia.aggregator.log_records import Entry
from mycelia.aggregator.outcomes import DeviceOutcome
from mycelia.aggregator.round_log import RoundLog
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.engine.errors import ProtocolError

__all__ = ["LogWriter"]


class _Asked(NamedTuple):
    entry: Entry
    settled: Sequence[DeviceOutcome]
    answer: asyncio.Future[bool]


class LogWriter:
    """Appends to a log, in the order of the calls, from one event loop.

    Args:
        log: written by nobody else.
    """

    def __init__(self, log: RoundLog) -> None:
        self._log = log
        self._asked: list[_Asked] = []
        self._work: asyncio.Task[None] | None = None

    async def append(self, entry: Entry, *, settled: Sequence[DeviceOutcome] = ()) -> bool:
        """See `RoundLog.append`. The record is written even if whoever waits for it is cancelled."""
        asked = _Asked(entry, settled, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        if self._work is None:
            self._work = asyncio.create_task(self._write_all())
        return await asked.answer

    async def _write_all(self) -> None:
        try:
            while self._asked:
                batch, self._asked = self._asked, []
                answers = await asyncio.to_thread(self._write, batch)
                for asked, answer in zip(batch, answers, strict=True):
                    if asked.answer.done():
                        continue
                    if isinstance(answer, bool):
                        asked.answer.set_result(answer)
                    else:
                        asked.answer.set_exception(answer)
        finally:
            self._work = None

    def _write(self, batch: Sequence[_Asked]) -> Sequence[bool | Exception]:
        if not any(asked.settled for asked in batch):
            try:
                return self._log.append_many(asked.entry for asked in batch)
            except ProtocolError as error:  # of one of them; the others shall not suffer from it
                if isinstance(error, Problem) and error.reason != Reason.EQUIVOCATION:
                    return [error] * len(batch)
            except Exception as error:
                return [error] * len(batch)
        return [self._write_one(asked) for asked in batch]

    def _write_one(self, asked: _Asked) -> bool | Exception:
        try:
            return self._log.append(asked.entry, settled=asked.settled)
        except Exception as error:
            return error
