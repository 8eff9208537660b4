"""The server's end of all streams: who may open one, what comes in and goes out, and when it is over.

It knows nothing of rounds. What devices say goes to a `Handler`, which answers with `Service.push` and
`Service.send_payload`. Everything runs in one event loop; payloads are put together in a thread of their own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, Protocol, TypeVar

import grpc
from grpc import aio

from mycelia.aggregator.admission import Admission, told
from mycelia.aggregator.deadlines import SHUTDOWN_S, Waits
from mycelia.aggregator.identity import ServerKeys
from mycelia.aggregator.limits import Gate, Limits, Rates
from mycelia.aggregator.spool import POOLED, Reply, Spool, Spooled
from mycelia.aggregator.streams import Context, Gone, Link, Stream, Traffic, Turns
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.channel import OPTIONS, SERVICE, check_plaintext, split_address
from mycelia.aggregator.wire.frames import MAX_CHUNK, MAX_INLINE, FrameError, Problem, Reason
from mycelia.aggregator.wire.offers import MAX_PAYLOAD, Payload
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import clipped
from mycelia.aggregator.wire.transfer import LEAST_RATE, Outgoing
from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.certificates import IdentityProblem
from mycelia.privacy.secagg.roster import ClientEntry, Roster

__all__ = ["Beyond", "Handler", "Service"]

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class Handler(Protocol):
    """What a service tells what comes in. Nothing of one device is told before the last was done with.

    A `Problem` that a method raises ends the stream, or travels as the outcome of the work that the frame is
    about. Any other exception ends the stream with an incident number.
    """

    async def held(self, client: int) -> Iterable[pb.Held]:
        """What is there of this device's current work, for its Welcome."""

    async def connected(self, client: int, entry: ClientEntry) -> None:
        """The device is welcome; what it was sent on an earlier stream is sent again as far as it counts.

        Args:
            client: its id.
            entry: of the roster, by which it was let in.
        """

    async def frame(self, client: int, frame: pb.ClientFrame) -> None:
        """It says Ready, Decline, Renew, or something of the secure sum."""

    async def offered(self, client: int, offer: pb.Offer) -> None:
        """It offers a payload, which is asked for unless this raises a `Problem`."""

    async def payload(self, client: int, payload: Spooled) -> None:
        """A payload that was `offered` is complete; `Service.release` gives it back."""

    async def delivered(self, client: int, offer: pb.Offer) -> None:
        """The device holds all of a payload that it was sent."""

    async def lost(self, client: int, problem: Problem | None) -> None:
        """Its stream has ended; `connected` comes before anything else is told of it.

        Args:
            client: its id.
            problem: why; None if the device closed it, or the connection broke.
        """


class Beyond(Protocol):
    """Devices that are connected to another server; its methods are those of `Service`."""

    def push(self, client: int, frame: pb.ServerFrame) -> bool:
        """Send a message."""

    def send_payload(self, client: int, payload: Payload, offer: pb.Offer) -> bool:
        """Send a payload."""

    def withdraw(self, client: int, at: Position) -> None:
        """What the device was to be sent is of no use any more."""

    def again(self, client: int, at: Position) -> None:
        """What it has sent is to come once more."""


class Service:
    """A server for devices.

    Args:
        keys: of this server.
        roster: the document of the newest epoch.
        handler: is told what comes in.
        spool: where payloads of devices are put together; from now on touched through this object only.
        waits: of the connections, from `derive`.
        limits: of devices and addresses.
        max_payload: bytes that a payload may have.
        insecure: without TLS.
        secure_sum: whether a secure sum may be asked for.
        wall: Unix time in seconds.
        random: spreads the times at which devices come again.

    Attributes:
        keys: as given.
        traffic: bytes over all streams.
        refused: how many streams ended for each reason.
        beyond: where devices are that are not here; None: nowhere.

    Raises:
        SecureSumError: the roster is not the operator's, or expired.
        IdentityProblem: the roster does not list this server.
    """

    def __init__(
        self,
        keys: ServerKeys,
        roster: bytes,
        handler: Handler,
        spool: Spool,
        waits: Waits,
        *,
        limits: Limits | None = None,
        max_payload: int = MAX_PAYLOAD,
        insecure: bool = False,
        secure_sum: bool = True,
        wall: Callable[[], float] = time.time,
        random: Random | None = None,
    ) -> None:
        limits = limits or Limits()
        self.keys, self._handler, self._spool, self._waits = keys, handler, spool, waits
        self._max_payload, self._insecure, self._secure_sum = max_payload, insecure, secure_sum
        self._wall, self._random = wall, random or Random()
        self._limits, self._gate, self._rates = limits, Gate(limits), Rates(limits)
        self.traffic, self.refused = Traffic(), Counter[Reason]()
        self._admission = Admission(keys, roster, insecure=insecure, wall=wall)
        self._streams: dict[int, Stream] = {}
        self._turns = Turns()
        self.beyond: Beyond | None = None
        self._draining: Problem | None = None
        self._server: aio.Server | None = None
        self._thread, self._spool_lock = ThreadPoolExecutor(1, "spool"), threading.Lock()
        self._spool_moved = asyncio.Event()
        self._spool_due = math.inf
        self._jobs: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None

    # --- its life ---------------------------------------------------------------------------------

    async def start(self, listen: str) -> int:
        """Listen for devices.

        Args:
            listen: `host:port`; port 0 takes a free one.

        Returns:
            The port.

        Raises:
            ConfigError: the address cannot be bound; or there is no TLS, the address is not a loopback one,
                and a secure sum may be asked for.
        """
        host, _ = split_address(listen)
        if self._insecure:
            check_plaintext(host, secure_sum=self._secure_sum)
        milliseconds = round(1000 * self._waits.hello)
        connect = grpc.stream_stream_rpc_method_handler(self._connect)  # bytes: frames are read in there
        server = aio.server(
            handlers=[grpc.method_handlers_generic_handler(SERVICE, {"Connect": connect})],
            options=[
                *OPTIONS,
                ("grpc.so_reuseport", 0),  # another process on this port is an error
                ("grpc.max_metadata_size", 2**13),
                ("grpc.max_concurrent_streams", 4),
                ("grpc.server_handshake_timeout_ms", milliseconds),
                ("grpc.max_connection_idle_ms", milliseconds),
                ("grpc.keepalive_time_ms", round(1000 * self._waits.lost)),
                ("grpc.keepalive_timeout_ms", round(1000 * self._waits.heartbeat)),
            ],
        )
        try:
            if self._insecure:
                _log.warning("no TLS: whoever is on the network reads and changes what is sent")
                port = server.add_insecure_port(listen)
            else:
                pair = (self.keys.tls_key_pem, self.keys.certificate_pem)
                credentials = grpc.ssl_server_credentials([pair], self.keys.operator.pem, True)
                port = server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"{listen} cannot be bound",
                rule="an address of this machine, and a port that nobody uses",
                fix="end the other process, or listen on another port",
                who="server.listen",
            ) from error
        await server.start()
        self._server = server
        self._ticker = asyncio.create_task(self._tick_spool())
        return port

    async def drain(self, delay_s: float) -> None:
        """End: nobody is let in, everybody is told when to come again, and all streams end.

        Args:
            delay_s: seconds after which the first device may come again; the others follow, spread out.
        """
        problem = Problem(
            Reason.DRAINING,
            "the server is ending",
            rule="no new work",
            fix="try again later, or another server",
            who="server",
        )
        self._draining = problem
        for index, stream in enumerate(list(self._streams.values())):
            stream.end(problem, delay_s + index / self._limits.handshakes)
        if self._server is not None:
            await self._server.stop(SHUTDOWN_S / 2)
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=SHUTDOWN_S / 4)
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S / 4):
                await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    # --- what the handler says --------------------------------------------------------------------

    @property
    def roster(self) -> Roster:
        """The newest, verified."""
        return self._admission.roster

    @property
    def connected(self) -> frozenset[int]:
        """The ids of devices that are here."""
        return frozenset(self._streams)

    def push(self, client: int, frame: pb.ServerFrame) -> bool:
        """Send a message.

        Args:
            client: to whom.
            frame: without its number; the same object may go to many.

        Returns:
            whether the device is here. Before a task its keys are looked at again.
        """
        stream = self._streams.get(client)
        if stream is None or stream.ending.done():
            return self.beyond is not None and self.beyond.push(client, frame)
        if frame.HasField("task"):
            problem = self._admission.refusal(stream.admitted)
            if problem is not None:
                stream.end(problem)
                return False
        stream.push(frame)
        return True

    def send_payload(self, client: int, payload: Payload, offer: pb.Offer) -> bool:
        """Send a payload, chunk by chunk as the device asks for it.

        Args:
            client: to whom.
            payload: may go to many.
            offer: of it.

        Returns:
            whether the device is here.
        """
        stream = self._streams.get(client)
        if stream is None or stream.ending.done():
            return self.beyond is not None and self.beyond.send_payload(client, payload, offer)
        try:
            stream.outbox.offer(Outgoing(payload, offer))
        except Problem as problem:
            stream.end(problem)
            return False
        stream.wake.set()
        return True

    def withdraw(self, client: int, at: Position) -> None:
        """What the device was to be sent for a piece of work is of no use any more."""
        if client in self._streams:
            self._streams[client].outbox.withdraw(at)
        elif self.beyond is not None:
            self.beyond.withdraw(client, at)

    def again(self, client: int, at: Position) -> None:
        """What a device has sent for a piece of work is to come once more."""
        with self._spool_lock:
            self._spool.again(client, at)
        if client not in self._streams and self.beyond is not None:
            self.beyond.again(client, at)

    def retry_at(self, client: int, delay_s: float, reason: str, at: Position | None = None) -> bool:
        """Tell a device to come again after so many seconds, up to a tenth more; whether it is here."""
        delay_ms = round(1000 * delay_s * self._random.uniform(1.0, 1.1))
        said = None if at is None else at.to_wire()
        return self.push(
            client, pb.ServerFrame(retry_at=pb.RetryAt(delay_ms=delay_ms, reason=clipped(reason), at=said))
        )

    def end(self, client: int, problem: Problem, delay_s: float = 0.0) -> None:
        """End the stream of a device.

        Args:
            client: whose.
            problem: why.
            delay_s: after which it may come again; 0 leaves that to the device.
        """
        if client in self._streams:
            self._streams[client].end(problem, delay_s)

    def renew_roster(self, document: bytes) -> None:
        """Take a new roster: the streams of those that it no longer lets in end at once, the others get it.

        Args:
            document: as the operator signed it.

        Raises:
            SecureSumError: not the operator's, expired, or older than the one here; that one stays.
        """
        self._admission.renew(document)
        payload = Payload(document)
        offer = payload.offer(pb.ROSTER, None)
        for client, stream in list(self._streams.items()):
            problem = self._admission.refusal(stream.admitted)
            if problem is not None:
                stream.end(problem)
            else:
                self.send_payload(client, payload, offer)

    async def release(self, payload: Spooled) -> None:
        """A payload has gone into the sum, or was refused."""
        small = payload.manifest.size <= POOLED  # nothing on disk
        await self._in_spool(lambda: self._spool.release(payload), small=small)
        await self._room_in_spool()

    async def forget(self, run: str, before: int, attempt: int = 0) -> None:
        """Rounds of a run below `before` are over, and the attempts below `attempt` of that one."""
        await self._in_spool(lambda: self._spool.forget(run, before, attempt))
        await self._room_in_spool()

    async def restart(self, run: str) -> None:
        """This server begins with a run anew, from its log: all that came for it is offered again."""
        await self._in_spool(lambda: self._spool.restart(run))
        await self._room_in_spool()

    # --- a stream ---------------------------------------------------------------------------------

    async def _connect(self, _: object, context: Context) -> None:
        stream: Stream | None = None
        problem: Problem | None = None
        delay_s = 0.0
        entered = ""
        link = Link(context, self._waits, self.traffic)
        try:
            if self._draining is not None:
                raise self._draining
            self._gate.enter(link.peer, _clock())
            entered = link.peer
            stream = await self._greet(link)
            await stream.run(partial(self._take, stream))
        except Gone:
            pass
        except Problem as error:
            problem = error
        except Exception as error:  # of this stream only
            problem = _incident(error, stream)
        finally:
            if entered:
                self._gate.leave(entered)
            if stream is not None:
                delay_s = stream.delay_s
                await asyncio.shield(self._job(self._leave(stream, problem)))
        if problem is not None:
            self.refused[problem.reason] += 1
            if problem.reason in (Reason.RATE, Reason.DRAINING) and not delay_s:
                delay_s = self._random.uniform(1.0, self._waits.reconnect_cap)
            await link.finish(problem, delay_s)

    async def _greet(self, link: Link) -> Stream:
        """Challenge, Hello, Welcome."""
        try:
            async with asyncio.timeout(self._waits.hello):
                challenge = self._admission.challenge()
                await link.write(pb.ServerFrame(challenge=challenge))
                frame = await link.read()
        except TimeoutError as error:
            self._gate.failed(link.peer, _clock())
            raise Problem(
                Reason.HELLO,
                "no Hello in time",
                rule=f"within {self._waits.hello:g} s",
                fix="connect again",
                who=link.peer,
            ) from error
        try:
            if not frame.HasField("hello"):
                raise FrameError(Reason.FRAME, "a stream without Hello", rule="Hello is the first frame")
            admitted = self._admission.admit(challenge, frame.hello, link.certificate, link.tls)
        except Problem:
            self._gate.failed(link.peer, _clock())
            raise
        stream = Stream(admitted, link, self._waits, turns=self._turns)
        await self._register(stream)
        try:
            await self._welcome(stream, await self._handler.held(stream.client))
            await self._handler.connected(stream.client, stream.admitted.entry)
        except BaseException as error:
            problem = error if isinstance(error, Problem) else None
            await asyncio.shield(self._job(self._leave(stream, problem)))
            raise
        return stream

    async def _register(self, stream: Stream) -> None:
        """The newest stream of an id is the one."""
        while (older := self._streams.get(stream.client)) is not None:
            older.end(
                Problem(
                    Reason.SUPERSEDED,
                    "a newer stream of the same identity",
                    rule="one stream for each identity",
                    fix="run one process with an identity folder, and do not copy it",
                    who=stream.who,
                )
            )
            await older.left.wait()
        if self._draining is not None:
            raise self._draining
        self._streams[stream.client] = stream

    async def _welcome(self, stream: Stream, held: Iterable[pb.Held]) -> None:
        document = self._admission.document
        large = len(document) > MAX_CHUNK
        welcome = pb.Welcome(
            version=stream.admitted.version,
            roster_epoch=self.roster.epoch,
            roster_sha256=self.roster.sha256,
            roster=b"" if large else document,
            heartbeat_ms=round(1000 * self._waits.heartbeat),
            stall_ms=round(1000 * self._waits.stall),
            time_ms=round(1000 * self._wall()),
            max_payload=self._max_payload,
            held=held,
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(self._waits.stall + len(welcome.roster) / LEAST_RATE):
                await stream.link.write(pb.ServerFrame(welcome=welcome))
        stream.link.check(_clock())
        if large:
            payload = Payload(document)
            stream.outbox.offer(Outgoing(payload, payload.offer(pb.ROSTER, None)))

    async def _leave(self, stream: Stream, problem: Problem | None) -> None:
        """The stream has ended: what it was doing is done, then everyone is told."""
        if stream.job is not None:
            await asyncio.gather(stream.job, return_exceptions=True)
        try:
            await self._in_spool(lambda: self._spool.disconnect(stream.client))
            await self._room_in_spool()
            await self._handler.lost(stream.client, problem)
        except Exception as error:
            _incident(error, stream)
        finally:
            if self._streams.get(stream.client) is stream:
                del self._streams[stream.client]
            stream.left.set()

    # --- what comes in ----------------------------------------------------------------------------

    def _take(self, stream: Stream, frame: pb.ClientFrame) -> Coroutine[Any, Any, None]:
        if frame.HasField("chunk") and stream.credit > 0:
            stream.credit -= 1
        else:
            self._rates.frame(stream.client, stream.link.size, _clock())
        return self._answer(stream, frame)

    async def _answer(self, stream: Stream, frame: pb.ClientFrame) -> None:
        try:
            await self._dispatch(stream, frame)
        except (Problem, IdentityProblem) as error:
            problem = error if isinstance(error, Problem) else told(error)
            at = _position(frame)
            if problem.ends_stream or at is None:
                raise problem from error
            if problem.reason is Reason.SPOOL_FULL:  # nothing is refused: it is asked for when there is room
                self.retry_at(stream.client, self._waits.stall, str(problem), at)
                return
            stream.push(pb.ServerFrame(outcome=problem.outcome(at)))

    async def _dispatch(self, stream: Stream, frame: pb.ClientFrame) -> None:
        client, now = stream.client, _clock()
        match frame.WhichOneof("body"):
            case "pong":
                pass
            case "want":
                done = stream.outbox.want(frame.want)
                stream.wake.set()
                if done is not None and done.offer.kind != pb.ROSTER:
                    await self._handler.delivered(client, done.offer)
            case "offer":
                offer, data = frame.offer, frame.offer.data
                offer.ClearField("data")
                await self._handler.offered(client, offer)
                reply = await self._in_spool(
                    lambda: self._spool.offer(client, offer, now, data), small=offer.size <= POOLED
                )
                if reply is None:
                    raise Problem(
                        Reason.SPOOL_FULL,
                        "there is no room for it now",
                        rule="it is asked for when there is",
                        fix="wait",
                        who=stream.who,
                    )
                await self._told_by_spool(reply)
            case "chunk":
                small = stream.link.size <= MAX_INLINE
                await self._told_by_spool(
                    await self._in_spool(lambda: self._spool.chunk(client, frame.chunk, now), small=small)
                )
            case "bye":
                stream.end(None)
            case "hello":
                raise FrameError(Reason.FRAME, "a second Hello", rule="one for each stream")
            case _:
                await self._handler.frame(client, frame)

    async def _told_by_spool(self, reply: Reply) -> None:
        """Ask the device for more, and hand over what is complete."""
        stream = self._streams.get(reply.client)
        if stream is not None:
            if reply.problem is not None:
                stream.end(reply.problem)
            if reply.want is not None:
                stream.push(pb.ServerFrame(want=reply.want))
                if reply.want.missing and self._spool_due == math.inf:  # nothing had a deadline so far
                    self._spool_moved.set()
        if reply.payload is not None:
            await self._handler.payload(reply.client, reply.payload)
            await self._room_in_spool()

    async def _tick_spool(self) -> None:
        """Payloads that have stalled, and those that find room."""
        while True:
            self._spool_moved.clear()
            self._spool_due = math.inf  # what is asked for from now on may not be in the deadline that comes
            now = _clock()
            try:
                replies, deadline = await self._in_spool(partial(_ticked, self._spool, now))
                for reply in replies:
                    await self._told_by_spool(reply)
            except Exception as error:
                _incident(error, None)
                deadline = now + self._waits.stall
            self._spool_due, left = deadline, deadline - _clock()
            if left > 0:
                await _wait(self._spool_moved, min(left, self._waits.stall) if left < math.inf else None)

    async def _room_in_spool(self) -> None:
        """Payloads have come or gone; those that wait may have their turn."""
        if not self._spool.waiting:
            return
        now = _clock()
        for reply in await self._in_spool(lambda: self._spool.room(now), small=True):
            try:
                await self._told_by_spool(reply)
            except Exception as error:  # whoever made room is not to blame
                _incident(error, None)

    async def _in_spool(self, call: Callable[[], _Result], *, small: bool = False) -> _Result:
        """Something with the spool: in its thread, or here at once if it is small and the thread is idle."""
        if small and self._spool_lock.acquire(blocking=False):
            try:
                return call()
            finally:
                self._spool_lock.release()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._with_lock, call)

    def _with_lock(self, call: Callable[[], _Result]) -> _Result:
        with self._spool_lock:
            return call()

    # --- inside -----------------------------------------------------------------------------------

    def _job(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Something that goes on when its stream is cancelled."""
        task = asyncio.create_task(work)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        return task


def _ticked(spool: Spool, now: float) -> tuple[list[Reply], float]:
    return spool.tick(now), spool.deadline


def _clock() -> float:
    return asyncio.get_running_loop().time()


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _position(frame: pb.ClientFrame) -> Position | None:
    body = frame.WhichOneof("body")
    at = getattr(getattr(frame, body), "at", None) if body else None
    return Position.of(at) if isinstance(at, pb.Position) and at.run else None


def _incident(error: Exception, stream: Stream | None) -> Problem:
    """An error that nobody foresaw, with a number that is in the log."""
    number = secrets.token_hex(4)
    _log.error("incident %s (%s)", number, stream.who if stream else "no client", exc_info=error)
    return Problem(
        Reason.BUG,
        f"incident {number}",
        rule="this should not happen",
        fix="the server's log has more under this number",
        who=stream.who if stream else "server",
    )
