"""Drives the machine of one session of a secure sum: clock, journal and connection belong to whoever drives.

The machine works in a thread of its own kind, one event after the other, since masking takes time; what it
wants done is done here in order, and a record is durable before the next effect begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from mycelia.client.journal import ClientJournal
from mycelia.client.secagg import SecureSumClient
from mycelia.client.worker import Worker
from mycelia.engine.errors import BudgetExceeded
from mycelia.privacy.secagg.canonical import SecureSumError
from mycelia.privacy.secagg.events import (
    Abort,
    Charge,
    ChargeRefused,
    Effect,
    Event,
    Finish,
    LocalUpdate,
    Persist,
    Received,
    Refuse,
    Release,
    Send,
    SendStream,
    Tick,
)
from mycelia.privacy.secagg.messages import SERVER

__all__ = ["Session"]


class Session:
    """One session of this device.

    Args:
        machine: of the session.
        journal: of all sessions.
        worker: the machine's thread.
        clock: seconds, never backwards.
        send: sends the bytes of an envelope.
        upload: sends a masked vector.
        charge: charges the owner's budget for what is about to be opened; may raise `BudgetExceeded`.
        refused: told of a message of the server that changed nothing.
    """

    def __init__(
        self,
        machine: SecureSumClient,
        journal: ClientJournal,
        worker: Worker,
        *,
        clock: Callable[[], float],
        send: Callable[[bytes], None],
        upload: Callable[[bytes], None],
        charge: Callable[[Release], None],
        refused: Callable[[SecureSumError], None],
    ) -> None:
        self._machine, self._journal, self._worker, self._clock = machine, journal, worker, clock
        self._send, self._upload, self._charge, self._refused = send, upload, charge, refused
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def received(self, data: bytes) -> None:
        """An envelope came from the server."""
        self._events.put_nowait(Received(SERVER, data))

    def contribute(self, update: LocalUpdate) -> None:
        """The own update is there."""
        self._events.put_nowait(update)

    async def run(self, config: bytes) -> bytes:
        """From the server's configuration to the end.

        Args:
            config: the signed envelope.

        Returns:
            The hash of the transcript.

        Raises:
            SecureSumError: the session ended without a sum, as far as this device is concerned; or `JOURNAL`.
            Stopped: the device is told to end.
        """
        await self._take(Tick(self._clock()))
        event: Event = Received(SERVER, config)
        while True:
            found = await self._take(event)
            if found is not None:
                return found
            event = await self._next()

    async def _next(self) -> Event:
        """The next event, or a tick when the session's time is over."""
        deadline = self._machine.deadline
        left = None if deadline is None else max(0.0, deadline - self._clock())
        try:
            async with asyncio.timeout(left):
                return await self._events.get()
        except TimeoutError:
            return Tick(self._clock())

    async def _take(self, event: Event) -> bytes | None:
        effects: Sequence[Effect] = await self._worker.run(partial(self._machine.handle, event))
        found: bytes | None = None
        for effect in effects:
            match effect:
                case Persist(record):
                    await self._worker.run(partial(self._journal.append, record))
                case Send(_, data):
                    self._send(data)
                case SendStream(_, header, chunks):
                    self._send(header)
                    self._upload(b"".join(chunks))
                case Charge(release):
                    try:
                        await self._worker.run(partial(self._charge, release))
                    except BudgetExceeded as error:
                        return await self._take(ChargeRefused(error.found))
                case Refuse(_, error):
                    self._refused(error)
                case Finish(transcript):
                    found = bytes(transcript)
                case Abort(error):
                    raise error
        return found
