"""One device's stream on the server: reading, writing, heartbeats, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from grpc import aio

from mycelia.aggregator.admission import Admitted
from mycelia.aggregator.deadlines import Waits
from mycelia.aggregator.limits import network
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason, Sequence, decode_client, encode_server
from mycelia.aggregator.wire.outbox import Outbox
from mycelia.aggregator.wire.transfer import LEAST_RATE

__all__ = ["Gone", "Link", "Stream", "Traffic", "Turns"]

Context = aio.ServicerContext[bytes, bytes]
Take = Callable[[pb.ClientFrame], Coroutine[Any, Any, None]]

_AT_ONCE: Final = 8  # chunks, up to 1 MiB each
_TURN_S: Final = 0.2
_GOODBYE_S: Final = 1.0  # a device that does not read cannot be told why
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class Gone(Exception):
    """The device has closed the connection, or it broke."""


@dataclass
class Traffic:
    """What has gone over all streams.

    Attributes:
        received: bytes of frames.
        sent: bytes of frames.
    """

    received: int = 0
    sent: int = 0


class Turns:
    """Who of all streams may hand a chunk to gRPC, which keeps it in memory twice until it is on its way."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_AT_ONCE)

    @contextlib.asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """A turn; a device that reads slowly does not keep it from the others."""
        await self._free.acquire()
        late = _loop().call_later(_TURN_S, self._free.release)
        try:
            yield
        finally:
            if _loop().time() < late.when():
                late.cancel()
                self._free.release()


class Link:
    """Frames over one gRPC stream, counted in both directions.

    Args:
        context: of the stream.
        waits: how long the device may take to read.
        traffic: is added to.

    Attributes:
        peer: address that it comes from, or its network.
        tls: version of TLS, "" without.
        certificate: as the device shows it, in PEM; "" without TLS.
        size: bytes of the frame that was read last; the first of a message stands for all of it.
    """

    def __init__(self, context: Context, waits: Waits, traffic: Traffic) -> None:
        self._context, self._waits, self._traffic = context, waits, traffic
        self._in, self._out = Sequence(), Sequence()
        self._came: deque[pb.ClientFrame] = deque()
        self._blocked_until = math.inf
        shown: Any = context.auth_context()
        self.peer = network(context.peer())
        self.tls = _first(shown.get("ssl_tls_version"))
        self.certificate = _first(shown.get("x509_pem_cert"))
        self.size = 0

    async def read(self) -> pb.ClientFrame:
        """The next frame.

        Raises:
            Gone: there is none.
            FrameError: it is none, or not the next.
        """
        self.size = 0
        if not self._came:
            try:
                data = await self._context.read()
            except aio.BaseError as error:
                raise Gone from error
            if not isinstance(data, bytes):  # aio.EOF
                raise Gone
            self._traffic.received += len(data)
            self.size = len(data)
            self._came.extend(decode_client(data).frames)
        frame = self._came.popleft()
        self._in.check(frame.seq)
        return frame

    async def write(self, *frames: pb.ServerFrame) -> None:
        """Send frames together; they get their numbers.

        Raises:
            Gone: there is nobody to read it.
        """
        for frame in frames:
            frame.seq = self._out.next()
        data = encode_server(*frames)
        del frames  # while this waits, there is one copy here
        self._blocked_until = _loop().time() + self._waits.stall + len(data) / LEAST_RATE
        try:
            await self._context.write(data)
        except (aio.BaseError, asyncio.InvalidStateError) as error:
            raise Gone from error
        self._blocked_until = math.inf
        self._traffic.sent += len(data)

    def check(self, now: float) -> None:
        """What was written last is read in time.

        Raises:
            Problem: `STALL`: it is not.
        """
        if now >= self._blocked_until:
            raise Problem(
                Reason.STALL,
                "the device does not read",
                rule=f"{LEAST_RATE} bytes a second after {self._waits.stall:g} s",
                fix="connect again; smaller chunks suit slow lines",
                who="stream",
            )

    async def finish(self, problem: Problem, delay_s: float) -> None:
        """End the stream: say why, and after how many seconds to come again."""
        try:
            async with asyncio.timeout(_GOODBYE_S):
                if self._blocked_until == math.inf:
                    await self.write(pb.ServerFrame(goodbye=problem.goodbye(round(1000 * delay_s))))
        except (TimeoutError, Gone, Problem):
            pass
        code = _CODES[problem.status]
        await self._context.abort(code, f"{problem.reason}: {problem.hint}")


@dataclass(eq=False)
class Stream:
    """A device that was welcomed.

    Attributes:
        admitted: who it is.
        link: to it.
        waits: as told in Welcome.
        outbox: what waits to be sent.
        wake: set when there is something to send.
        ending: done when the stream is to end: with why, or None if the device said Bye.
        left: set when everyone knows that it has ended.
        job: what is being done with the frame that came last.
        credit: chunks that were asked for and have not come.
        heard: when the last frame came.
        delay_s: after which the device may come again.
        turns: of all streams.
    """

    admitted: Admitted
    link: Link
    waits: Waits
    outbox: Outbox[pb.ServerFrame] = field(default_factory=lambda: Outbox(pb.ServerFrame))
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ending: asyncio.Future[Problem | None] = field(default_factory=lambda: _loop().create_future())
    left: asyncio.Event = field(default_factory=asyncio.Event)
    job: asyncio.Task[None] | None = None
    credit: int = 0
    heard: float = 0.0
    delay_s: float = 0.0
    turns: Turns = field(default_factory=Turns)
    _pings: int = 0
    _timer: asyncio.TimerHandle | None = None

    @property
    def client(self) -> int:
        """Its id."""
        return self.admitted.entry.client

    @property
    def who(self) -> str:
        """For messages."""
        return f"client {self.client}"

    def push(self, frame: pb.ServerFrame, *, first: bool = False) -> None:
        """Send a message; a device that does not read loses its stream."""
        try:
            self.outbox.put(frame, first=first)
        except Problem as problem:
            self.end(problem)
        if frame.HasField("want"):
            self.credit += sum(part.count for part in frame.want.missing)
        self.wake.set()

    def end(self, problem: Problem | None, delay_s: float = 0.0) -> None:
        """End the stream soon; the first reason stands."""
        if not self.ending.done():
            self.delay_s = delay_s
            self.ending.set_result(problem)

    async def run(self, take: Take) -> None:
        """Read and write until one side ends it.

        Args:
            take: looks at a frame at once, and returns what is to be done with it, which is not cancelled.

        Raises:
            Problem: why it ends.
            Gone: the device has closed it.
        """
        self.heard = _loop().time()
        self._timer = _loop().call_later(self.waits.heartbeat, self._beat)
        reader, writer = asyncio.create_task(self._read(take)), asyncio.create_task(self._write())
        waiting: set[asyncio.Future[Any]] = {reader, writer, self.ending}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            reader.cancel()
            writer.cancel()
            ended = await asyncio.gather(reader, writer, return_exceptions=True)
        if self.ending.done():
            problem = self.ending.result()
            if problem is not None:
                raise problem
            return
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _read(self, take: Take) -> None:
        while True:
            frame = await self.link.read()
            self.heard = _loop().time()
            self.job = asyncio.create_task(take(frame))
            del frame  # while this waits for the next one, there is none here
            await asyncio.shield(self.job)
            self.job = None

    async def _write(self) -> None:
        while True:
            frames = self.outbox.next()
            if not frames:
                self.wake.clear()
                await self.wake.wait()
            elif frames[0].HasField("chunk"):
                async with self.turns.taken():
                    await self.link.write(frames.pop())
            else:
                await self.link.write(*frames)

    def _beat(self) -> None:
        """A ping is due, or the device is lost."""
        now = _loop().time()
        try:
            self.link.check(now)
        except Problem as problem:
            self.end(problem)
            return
        if self.job is not None and not self.job.done():
            self.heard = now  # that nothing is read now is this side's doing
        if now - self.heard >= self.waits.lost:
            self.end(
                Problem(
                    Reason.STALL,
                    f"no sign of life for {now - self.heard:.0f} s",
                    rule=f"an answer to one of three heartbeats, every {self.waits.heartbeat:g} s",
                    fix="connect again: work goes on where it stopped",
                    who=self.who,
                )
            )
            return
        self._pings += 1
        self.push(pb.ServerFrame(ping=pb.Ping(nonce=self._pings)), first=True)
        self._timer = _loop().call_later(self.waits.heartbeat, self._beat)


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def _first(values: Any) -> str:
    return next(iter(values)).decode() if values else ""
