"""A server's end of the post between servers: what is sent goes in order, what comes is told one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from mycelia.aggregator.logs import log
from mycelia.aggregator.relays import Letter, Post
from mycelia.aggregator.round_log import BlobStore
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.problems import Problem

__all__ = ["Letters"]

_AT_ONCE: Final = 64
_PAUSE_S: Final = 0.5  # before another try to reach the database


class _Out(NamedTuple):
    term: int
    letter: Letter
    payload: Payload | None  # that has to be among the blobs first


class Letters:
    """Post for an event loop.

    Args:
        post: the server's.
        blobs: where payloads are that letters name.
        take: told each letter that comes.

    Attributes:
        term: fence of the lead that letters are about; letters of other terms are not read. 0: none are.
    """

    def __init__(self, post: Post, blobs: BlobStore, take: Callable[[Letter], Awaitable[None]]) -> None:
        self._post, self._blobs, self._take = post, blobs, take
        self.term = 0
        self._out: asyncio.Queue[_Out] = asyncio.Queue()
        self._come = asyncio.Event()
        self._stored: set[bytes] = set()

    def send(
        self, server: str, client: int, kind: str, body: bytes = b"", payload: Payload | None = None
    ) -> None:
        """Write a letter soon; nothing overtakes it."""
        self._out.put_nowait(_Out(self.term, Letter(server, client, kind, body), payload))

    def heard(self) -> None:
        """There may be letters."""
        self._come.set()

    async def run(self) -> None:
        """Send and receive, until this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_all())
            tasks.create_task(self._read_all())

    async def _send_all(self) -> None:
        while True:
            batch = [await self._out.get()]
            while len(batch) < _AT_ONCE and not self._out.empty():
                batch.append(self._out.get_nowait())
            await self._until_done(lambda batch=batch: self._write(batch))  # type: ignore[misc]

    async def _read_all(self) -> None:
        while True:
            await self._come.wait()
            self._come.clear()
            term = self.term
            while term and term == self.term:
                letters = await self._until_done(lambda term=term: self._post.receive(term))  # type: ignore[misc]
                if not letters:
                    break
                for letter in letters:
                    if term != self.term:
                        break
                    try:
                        await self._take(letter)
                    except Exception as error:  # of one letter; the next is about something else
                        hint = f"{letter.kind} from {letter.server}: {error}"
                        log("letter_refused", level="error", client=letter.client, hint=hint)

    def _write(self, batch: Iterable[_Out]) -> None:
        due = [each for each in batch if each.term == self.term]
        for each in due:
            if each.payload is not None and each.payload.sha256 not in self._stored:
                self._blobs.put([memoryview(each.payload.data)])
                self._stored.add(each.payload.sha256)
        if due:
            self._post.send(self.term, [each.letter for each in due])

    async def _until_done(self, work: Callable[[], list[Letter] | None]) -> list[Letter]:
        never = asyncio.Event()
        while True:
            try:
                return await asyncio.to_thread(work) or []
            except Problem as problem:
                log("store_away", level="error", reason=problem.reason.value, hint=problem.hint)
            with suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_S):
                    await never.wait()
