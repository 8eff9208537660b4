"""A device's connection to its servers, which is made again whenever it breaks.

    async with Transport(["fl.example.org:8443"], identity, places) as transport:
        async for event in transport:
            ...

What comes is told as events. Payloads outlive a connection: after a reconnect only chunks that are missing
travel. Pings are answered here, however long the reader of the events takes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, NamedTuple, Self

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.channel import NO_CERTIFICATE, check_plaintext
from mycelia.aggregator.wire.frames import FrameError, Problem, Reason
from mycelia.aggregator.wire.offers import Manifest, Payload
from mycelia.aggregator.wire.outbox import Outbox
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import clipped
from mycelia.aggregator.wire.sinks import MemorySink
from mycelia.aggregator.wire.transfer import Incoming, Outgoing, Sink
from mycelia.aggregator.wire.versions import VERSIONS, common_version
from mycelia.client.backoff import Backoff, Then, TransportError, reconnect_cap, then
from mycelia.client.identity import DeviceIdentity, DeviceKeys
from mycelia.client.link import Link, Server, explained, opened
from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.canonical import SecureSumError
from mycelia.privacy.secagg.certificates import IdentityProblem
from mycelia.privacy.secagg.hello import Hello, new_nonce
from mycelia.privacy.secagg.roster import MAX_ROSTER_BYTES, Roster

__all__ = ["Came", "Connected", "Event", "Lost", "NewRoster", "Place", "Received", "Sent", "Transport"]

HELLO_S: Final = 10.0
"""In which a server says something, and then Welcome."""
_MISSED: Final = 3
_BYE_S: Final = 2.0
_EVENTS: Final = 1024
_ARRIVALS: Final = 64
_WRONG_KEYS: Final = {Reason.BAD_HELLO, Reason.NOT_ENROLLED}

_Key = tuple[bytes, bytes]


class Place(NamedTuple):
    """Where a payload is put together.

    Attributes:
        sink: the place.
        kept: whether chunks of it may be there already, from an earlier process.
    """

    sink: Sink
    kept: bool = False


@dataclass(frozen=True)
class Connected:
    """A server has welcomed this device.

    Attributes:
        server: its address.
        welcome: what it said.
        roster: verified.
    """

    server: str
    welcome: pb.Welcome
    roster: Roster


@dataclass(frozen=True)
class Came:
    """The server says something: a task, an outcome, a message of the secure sum, when to come again.

    Attributes:
        frame: as decoded.
    """

    frame: pb.ServerFrame


@dataclass(frozen=True)
class Received:
    """A payload is complete.

    Attributes:
        offer: of it.
        sink: where it is.
    """

    offer: pb.Offer
    sink: Sink


@dataclass(frozen=True)
class Sent:
    """The server holds all of a payload.

    Attributes:
        offer: of it.
    """

    offer: pb.Offer


@dataclass(frozen=True)
class NewRoster:
    """The operator has signed a newer roster, and this device is still in it.

    Attributes:
        roster: verified.
    """

    roster: Roster


@dataclass(frozen=True)
class Lost:
    """There is no connection.

    Attributes:
        error: why, for people.
        wait_s: seconds until the next try.
    """

    error: TransportError
    wait_s: float


Event = Connected | Came | Received | Sent | NewRoster | Lost


@dataclass
class _Arrival:
    """A payload on its way here, or here."""

    offer: pb.Offer
    sink: Sink
    incoming: Incoming


@dataclass
class _Session:
    """One connection, from its Welcome."""

    link: Link
    keys: DeviceKeys
    challenge: pb.Challenge
    welcome: pb.Welcome
    outbox: Outbox[pb.ClientFrame] = field(default_factory=lambda: Outbox(pb.ClientFrame))
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    heard: float = 0.0
    greeted: bool = False
    early: list[Event] = field(default_factory=list)

    @property
    def heartbeat_s(self) -> float:
        return self.welcome.heartbeat_ms / 1000

    @property
    def stall_s(self) -> float:
        return self.welcome.stall_ms / 1000

    def put(self, frame: pb.ClientFrame, *, first: bool = False) -> None:
        self.outbox.put(frame, first=first)
        self.wake.set()


class Transport:
    """The connection of one device.

    Args:
        servers: `host:port` each; tried in random order.
        identity: of this device, open.
        places: where a payload that is offered is put together; a `Problem` declines it.
        insecure: without TLS.
        secure_sum: whether this device may take part in one.
        dice: randomness of waits and of the order of servers; no secret.
        clock: seconds that go on while the machine sleeps, never backwards.
        wall: Unix time in seconds.

    Attributes:
        roster: the newest; None before the first Welcome.

    Raises:
        ConfigError: no server, an address that is none; or plain text over a network with a secure sum.
    """

    def __init__(
        self,
        servers: Sequence[str],
        identity: DeviceIdentity,
        places: Callable[[pb.Offer, Manifest], Place],
        *,
        insecure: bool = False,
        secure_sum: bool = True,
        dice: random.Random | None = None,
        clock: Callable[[], float] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if not servers:
            raise ConfigError("no server", rule="at least one", fix='server = ["host:8443"]', who="server")
        self._servers = [Server.of(address) for address in servers]
        if insecure:
            for server in self._servers:
                check_plaintext(server.host, secure_sum=secure_sum)
        self._identity, self._places, self._insecure = identity, places, insecure
        self._dice, self._clock, self._wall = dice or random.Random(), clock or _awake_clock, wall
        self.roster: Roster | None = None
        self._document_sha256 = b""
        self._backoff = Backoff(self._dice.uniform, self._clock)
        self._events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self._closing = asyncio.Event()
        self._moved = asyncio.Event()
        self._session: _Session | None = None
        self._outgoing: dict[_Key, tuple[Payload, pb.Offer]] = {}
        self._arrivals: dict[_Key, _Arrival] = {}
        self._not_before: dict[Server, float] = {}
        self._order: list[Server] = []
        self._older_keys = self._anew = False
        self._task: asyncio.Task[None] | None = None

    # --- for the runner ---------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """The next event.

        Raises:
            StopAsyncIteration: `close` was called.
            TransportError: one after which a device stops.
        """
        event = await self._events.get()
        if event is None:
            self._events.put_nowait(None)
            raise StopAsyncIteration
        if isinstance(event, Exception):
            self._events.put_nowait(None)
            raise event
        return event

    @property
    def connected(self) -> bool:
        """Whether a server has welcomed this device, and the connection is there."""
        return self._session is not None and self._session.greeted

    def send(self, frame: pb.ClientFrame) -> bool:
        """Send a message.

        Args:
            frame: without its number.

        Returns:
            whether there is a connection; without one the message is not kept.
        """
        if self._session is None or not self._session.greeted:
            return False
        try:
            self._session.put(frame)
        except Problem:
            return False
        return True

    def send_payload(self, payload: Payload, offer: pb.Offer) -> None:
        """Send a payload, over as many connections as it takes; `Sent` tells when it is there.

        Args:
            payload: the bytes.
            offer: of it.
        """
        self._outgoing[_key(offer)] = payload, offer
        if self._session is not None and self._session.greeted:
            self._offer(self._session, payload, offer)

    def forget(self, at: Position) -> None:
        """A piece of work is over: nothing more of it is sent or taken."""
        said = at.to_wire()
        self._outgoing = {key: both for key, both in self._outgoing.items() if both[1].at != said}
        self._arrivals = {key: arrival for key, arrival in self._arrivals.items() if arrival.offer.at != said}
        if self._session is not None:
            self._session.outbox.withdraw(at)

    def completed(self) -> None:
        """A task was completed: waits begin from the shortest again."""
        self._backoff.reset()

    def reconnect(self) -> None:
        """Close the connection and open another, with the newest keys of the identity folder."""
        if self._session is not None:
            self._anew, self._older_keys = True, False
            with suppress(Problem):
                self._session.put(pb.ClientFrame(bye=pb.Bye()))

    async def close(self) -> None:
        """Say Bye, and end; closing twice is harmless."""
        self._closing.set()
        if self._task is None:
            return
        if self._session is not None:
            with suppress(Problem):
                self._session.put(pb.ClientFrame(bye=pb.Bye()))
            await asyncio.wait({self._task}, timeout=_BYE_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    # --- one connection after the other -----------------------------------------------------------

    async def _run(self) -> None:
        try:
            while not self._closing.is_set():
                server = self._next_server()
                try:
                    await self._connect(server)
                    return
                except TransportError as error:
                    if self._closing.is_set() or error.then is Then.STOP:
                        raise
                    wait_s = 0.0 if self._anew else self._wait_after(error, server)
                    self._anew = False
                    if self._events.qsize() < _EVENTS:
                        self._events.put_nowait(Lost(error, wait_s))
                await _wait(self._closing, wait_s)
        except Exception as error:
            if not self._closing.is_set():
                self._events.put_nowait(error)
        finally:
            self._events.put_nowait(None)

    def _next_server(self) -> Server:
        """In random order; one that was said to wait for is left out while there are others."""
        now = self._clock()
        for _ in range(2):
            while self._order:
                server = self._order.pop()
                if self._not_before.get(server, now) <= now:
                    return server
            self._order = self._dice.sample(self._servers, len(self._servers))
        return min(self._servers, key=lambda server: self._not_before[server])

    def _wait_after(self, error: TransportError, server: Server) -> float:
        if error.reason in _WRONG_KEYS and len(self._identity.keys) > 1:
            self._older_keys = not self._older_keys
            if self._older_keys:  # the new ones are not everywhere yet
                return self._backoff.next()
        if error.delay_s:
            self._backoff.retry_at(error.delay_s)
        wait_s = self._backoff.next(error.then)
        now = self._clock()
        if error.then is Then.OPERATOR or error.delay_s:
            self._not_before[server] = now + wait_s
            others = [other for other in self._servers if self._not_before.get(other, now) <= now]
            if others:  # it is that server's matter
                return self._backoff.next()
        return wait_s

    async def _connect(self, server: Server) -> None:
        """One connection, to its end: returns after Bye, raises otherwise."""
        try:
            keys = self._identity.check(int(self._wall()))
            if self._older_keys and len(self._identity.keys) > 1:
                keys = self._identity.keys[1]
            async with opened(server, keys, self._identity.operator, insecure=self._insecure) as link:
                try:
                    await self._serve(await self._greet(link, keys))
                finally:
                    self._session = None
                    for arrival in self._arrivals.values():
                        arrival.incoming.pause()
        except IdentityProblem as error:
            reason = Reason(error.reason.value)
            raise TransportError(
                then(0, reason), error.found, rule=error.rule, fix=error.fix, who=error.who, reason=reason
            ) from error
        except SecureSumError as error:
            raise TransportError(
                Then.OPERATOR, error.found, rule=error.rule, fix=error.fix, who=f"server {server}"
            ) from error
        except Problem as error:
            raise explained(error, f"server {server}", 0.0) from error

    async def _greet(self, link: Link, keys: DeviceKeys) -> _Session:
        try:
            async with asyncio.timeout(HELLO_S):
                first = await link.read()
                if not first.HasField("challenge"):
                    raise FrameError(Reason.FRAME, "a stream without a challenge", rule="it comes first")
                challenge = first.challenge
                common_version((challenge.version_min, challenge.version_max))
                await link.write(pb.ClientFrame(hello=self._hello(keys, challenge)))
                second = await link.read()
        except TimeoutError as error:
            raise TransportError(
                Then.RETRY,
                "it does not say Welcome",
                rule=f"within {HELLO_S:g} s",
                fix="nothing: it is tried again",
                who=str(link),
            ) from error
        if not second.HasField("welcome"):
            raise FrameError(Reason.FRAME, "an answer to Hello that is no Welcome", rule="it comes second")
        session = _Session(link, keys, challenge, second.welcome, heard=self._clock())
        common_version((session.welcome.version, session.welcome.version))
        self._backoff.cap_s = reconnect_cap(session.heartbeat_s)
        return session

    def _hello(self, keys: DeviceKeys, challenge: pb.Challenge) -> pb.Hello:
        if not self._insecure:
            return keys.say_hello(challenge, VERSIONS)
        said = keys.say_hello(challenge, VERSIONS, new_nonce)
        versions = (challenge.version_min, challenge.version_max)
        hello = Hello(
            challenge.server, challenge.nonce, versions, said.client, said.nonce, VERSIONS, NO_CERTIFICATE
        )
        said.signature = hello.sign(keys.identity)
        return said

    async def _serve(self, session: _Session) -> None:
        self._session = session
        welcome = session.welcome
        if welcome.roster:
            self._welcomed(session, self._see(welcome.roster))
        elif self.roster is not None and self.roster.sha256 == welcome.roster_sha256:
            self._welcomed(session, self.roster)
        tasks: set[asyncio.Task[Any]] = {
            asyncio.create_task(self._read(session)),
            asyncio.create_task(self._write(session)),
            asyncio.create_task(self._watch(session)),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    def _welcomed(self, session: _Session, roster: Roster) -> None:
        """The roster is known: it has to list this server."""
        now = int(self._wall())
        listed = [entry for entry in roster.servers if entry.name == session.challenge.server]
        if not listed or not listed[0].not_before <= now <= listed[0].not_after:
            raise TransportError(
                Then.OPERATOR,
                f"the roster of epoch {roster.epoch} does not list server {session.challenge.server!r} now",
                rule="devices believe a server that the operator's roster lists",
                fix="ask the operator: mycelia enrol list",
                who=str(session.link),
            )
        self.roster = roster
        self._identity.settle(session.keys)
        session.greeted = True
        self._emit(session, Connected(str(session.link.server), session.welcome, roster))
        for event in session.early:
            self._emit(session, event)
        session.early.clear()
        for payload, offer in self._outgoing.values():
            self._offer(session, payload, offer)

    def _see(self, document: bytes) -> Roster:
        roster = self._identity.see_roster(document, int(self._wall()))
        self._document_sha256 = sha256(document).digest()
        return roster

    # --- what comes in and goes out ---------------------------------------------------------------

    async def _read(self, session: _Session) -> None:
        while True:
            try:
                frame = await session.link.read()
            except TransportError:
                if self._closing.is_set():
                    return  # after Bye
                raise
            session.heard = self._clock()
            self._take(session, frame)
            del frame  # while this waits for the next one, there is none here

    def _take(self, session: _Session, frame: pb.ServerFrame) -> None:
        match frame.WhichOneof("body"):
            case "ping":
                session.put(pb.ClientFrame(pong=pb.Pong(nonce=frame.ping.nonce)), first=True)
            case "offer":
                self._offered(session, frame.offer)
            case "chunk":
                arrival = self._arrivals.get(_key(frame.chunk))
                if arrival is not None:  # else it is of work that is over
                    self._ask(session, arrival.incoming.chunk(frame.chunk, self._clock()))
                    if arrival.incoming.complete:
                        self._arrived(session, arrival)
            case "want":
                outgoing = session.outbox.want(frame.want)
                session.wake.set()
                if outgoing is not None and self._outgoing.pop(_key(outgoing.offer), None) is not None:
                    self._emit(session, Sent(outgoing.offer))
            case "challenge" | "welcome":
                raise FrameError(Reason.FRAME, "a second greeting", rule="one for each stream")
            case body:
                if body == "retry_at" and not frame.retry_at.HasField("at"):  # else this connection stays
                    self._backoff.retry_at(frame.retry_at.delay_ms / 1000)
                self._emit(session, Came(frame))

    def _offered(self, session: _Session, offer: pb.Offer) -> None:
        key, data = _key(offer), offer.data
        offer.ClearField("data")
        arrival = self._arrivals.get(key)
        try:
            most = MAX_ROSTER_BYTES if offer.kind == pb.ROSTER else session.welcome.max_payload
            manifest = Manifest(offer, most)
            if offer.kind == pb.ROSTER and offer.sha256 == self._document_sha256:
                session.put(pb.ClientFrame(want=pb.Want(sha256=offer.sha256)))
                return
            if arrival is None or arrival.incoming.manifest != manifest:
                if len(self._arrivals) >= _ARRIVALS:
                    raise FrameError(
                        Reason.FRAME,
                        f"more than {_ARRIVALS} payloads",
                        rule="work that is over is forgotten before there is more",
                    )
                roster = offer.kind == pb.ROSTER
                sink, kept = Place(MemorySink(manifest.size)) if roster else self._places(offer, manifest)
                incoming = Incoming(manifest, sink, stall_s=session.stall_s, recover=kept)
                arrival = self._arrivals[key] = _Arrival(offer, sink, incoming)
        except Problem as problem:
            if problem.ends_stream or not offer.HasField("at"):
                raise
            declined = pb.Decline(at=offer.at, reason=clipped(f"{problem.reason}: {problem.hint}"))
            session.put(pb.ClientFrame(decline=declined))
            return
        known = arrival.incoming.complete
        arrival.incoming.pause()
        self._ask(session, arrival.incoming.ask(self._clock(), data))
        if arrival.incoming.complete and not known:
            self._arrived(session, arrival)

    def _arrived(self, session: _Session, arrival: _Arrival) -> None:
        if arrival.offer.kind != pb.ROSTER:
            self._emit(session, Received(arrival.offer, arrival.sink))
            return
        del self._arrivals[_key(arrival.offer)]
        roster = self._see(bytes(arrival.sink.read(0, arrival.offer.size)))
        if session.greeted:
            self.roster = roster
            self._emit(session, NewRoster(roster))
        else:
            self._welcomed(session, roster)

    def _ask(self, session: _Session, want: pb.Want | None) -> None:
        if want is not None:
            session.put(pb.ClientFrame(want=want))
        self._moved.set()

    def _offer(self, session: _Session, payload: Payload, offer: pb.Offer) -> None:
        with suppress(Problem):  # too much waits to be sent: the stream ends, and it is offered on the next
            session.outbox.offer(Outgoing(payload, offer))
        session.wake.set()

    def _emit(self, session: _Session, event: Event) -> None:
        if len(session.early) + self._events.qsize() >= _EVENTS:
            raise TransportError(
                Then.RETRY,
                f"{_EVENTS} events wait to be looked at",
                rule="what a server says is read",
                fix="let this device do less at a time",
                who=str(session.link),
            )
        if session.greeted:
            self._events.put_nowait(event)
        else:
            session.early.append(event)

    async def _write(self, session: _Session) -> None:
        while True:
            frames = session.outbox.next()
            if not frames:
                session.wake.clear()
                await session.wake.wait()
            elif not await session.link.write(*frames):
                await asyncio.Event().wait()  # `_read` says why, or `_watch`

    async def _watch(self, session: _Session) -> None:
        """The server falls silent, or what was asked for does not come. A machine that slept finds both."""
        lost_s = _MISSED * session.heartbeat_s
        while True:
            self._moved.clear()
            now = self._clock()
            if now - session.heard >= lost_s:
                raise TransportError(
                    Then.RETRY,
                    f"nothing has come for {now - session.heard:.0f} s",
                    rule=f"a heartbeat every {session.heartbeat_s:g} s",
                    fix="nothing: it is tried again",
                    who=str(session.link),
                )
            due = session.heard + lost_s
            for arrival in self._arrivals.values():
                arrival.incoming.tick(now)
                due = min(due, arrival.incoming.deadline)
            await _wait(self._moved, min(due - now, session.heartbeat_s))


def _key(message: pb.Offer | pb.Chunk) -> _Key:
    at = message.at.SerializeToString(deterministic=True) if message.HasField("at") else b""
    return message.sha256, at


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _awake_clock() -> float:
    """Seconds that go on while the machine sleeps, where the system counts them."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)
