"""A federation on this machine: operator, server, devices that speak frame by frame, and a bad network."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import grpc
from grpc import aio

from mycelia.aggregator.deadlines import Waits
from mycelia.aggregator.identity import ServerKeys
from mycelia.aggregator.identity_certificates import (
    client_certificate,
    operator_certificate,
    server_certificate,
)
from mycelia.aggregator.limits import Limits
from mycelia.aggregator.service import Service
from mycelia.aggregator.spool import Spool, Spooled
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.channel import METHOD
from mycelia.aggregator.wire.frames import Problem, decode_server, encode_client
from mycelia.client.identity import DeviceIdentity, DeviceKeys
from mycelia.privacy.secagg.certificates import DAY, Certificate, Operator, tls_sha256
from mycelia.privacy.secagg.enrolment import Reply
from mycelia.privacy.secagg.keys import Identity
from mycelia.privacy.secagg.private_keys import certificate_pem, new_tls_key, tls_pem
from mycelia.privacy.secagg.roster import ClientEntry, Issuer, Roster, ServerEntry

NOW: Final = int(time.time())
WAITS: Final = Waits(heartbeat=5.0, lost=15.0, stall=5.0, hello=5.0, reconnect_cap=2.0)
"""Long enough for a busy machine; a test that waits for one of them makes that one short."""
PATIENCE_S: Final = 30.0


def run(work: Coroutine[Any, Any, None]) -> None:
    """A test in an event loop; one that hangs fails."""

    async def patiently() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await work

    asyncio.run(patiently())


class World:
    """An operator and those it has enrolled."""

    def __init__(self, server: str = "agg-1", *, days: int = 30) -> None:
        self.operator = Identity.generate()
        self.pinned = Operator.read(operator_certificate(self.operator, NOW - DAY, NOW + 900 * DAY))
        self.clients: dict[int, ClientEntry] = {}
        self.revoked: tuple[int, ...] = ()
        self.epoch = 1
        tls, identity = new_tls_key(), Identity.generate()
        since, until = min(NOW, NOW + days * DAY) - DAY, NOW + days * DAY
        der = server_certificate(
            self.operator, server, tls.public_key(), ["localhost"], [ip_address("127.0.0.1")], since, until
        )
        self.server = ServerEntry(
            server, identity.public, since, NOW + 90 * DAY, tls_sha256(tls.public_key())
        )
        certificate = Certificate.read(der, self.operator.public)
        self.keys = ServerKeys(server, certificate, self.pinned, identity, tls_pem(tls), certificate_pem(der))

    def enrol(self, client: int, *, days: int = 30, entry_days: int | None = None) -> DeviceKeys:
        """Keys of a device, in memory."""
        tls, identity = new_tls_key(), Identity.generate()
        public = tls.public_key()
        since, until = min(NOW, NOW + days * DAY) - DAY, NOW + days * DAY
        der = client_certificate(self.operator, client, public, since, until)
        ends = until if entry_days is None else NOW + entry_days * DAY
        self.clients[client] = ClientEntry(
            client, identity.public, Issuer.OFFLINE, min(since, ends), ends, "", tls_sha256(public)
        )
        certificate = Certificate.read(der, self.operator.public)
        return DeviceKeys(1, certificate, identity, tls_pem(tls), certificate_pem(der))

    def enrol_folder(self, client: int, folder: Path, *, days: int = 30) -> DeviceIdentity:
        """The same in a folder."""
        identity = DeviceIdentity.create(folder, self.pinned.pem)
        request = identity.request()
        since, until = min(NOW, NOW + days * DAY) - DAY, NOW + days * DAY
        der = client_certificate(self.operator, client, request.tls_key, since, until)
        self.clients[client] = ClientEntry(
            client, request.identity_key, Issuer.OFFLINE, since, until, "", request.tls_sha256
        )
        then = min(NOW, until)
        identity.accept_reply(Reply(client, request.identity_key, der, 1).sign(self.operator), then)
        return identity

    def document(self) -> bytes:
        clients = tuple(self.clients[client] for client in sorted(self.clients))
        return Roster(self.epoch, NOW + 90 * DAY, clients, (self.server,), self.revoked).sign(self.operator)

    def revoke(self, client: int) -> bytes:
        self.epoch += 1
        self.revoked = (*self.revoked, client)
        return self.document()

    def fill(self, count: int) -> None:
        """Make the roster large."""
        for client in range(1000, 1000 + count):
            key = client.to_bytes(32, "big")
            self.clients[client] = ClientEntry(client, key, Issuer.OFFLINE, NOW, NOW + DAY, "x" * 200, key)


class Recorder:
    """A handler that writes down what it is told."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, int, Any]] = asyncio.Queue()
        self.on_connected: Callable[[int], None] = lambda _: None
        self.on_frame: Callable[[int, pb.ClientFrame], None] = lambda _, __: None
        self.refuses: Problem | None = None
        self.holds: list[pb.Held] = []
        self.busy: asyncio.Event | None = None

    async def held(self, client: int) -> Iterable[pb.Held]:
        return self.holds

    async def connected(self, client: int, entry: ClientEntry) -> None:
        self.events.put_nowait(("connected", client, entry))
        self.on_connected(client)

    async def frame(self, client: int, frame: pb.ClientFrame) -> None:
        if self.busy is not None:
            await self.busy.wait()
        self.events.put_nowait(("frame", client, frame))
        self.on_frame(client, frame)

    async def offered(self, client: int, offer: pb.Offer) -> None:
        if self.refuses is not None:
            raise self.refuses

    async def payload(self, client: int, payload: Spooled) -> None:
        with payload.open() as data:
            self.events.put_nowait(("payload", client, bytes(data)))

    async def delivered(self, client: int, offer: pb.Offer) -> None:
        self.events.put_nowait(("delivered", client, offer))

    async def lost(self, client: int, problem: Problem | None) -> None:
        self.events.put_nowait(("lost", client, problem))

    async def next(self, kind: str) -> tuple[int, Any]:
        """The next event, which is of this kind."""
        found, client, what = await self.events.get()
        assert found == kind, (found, client, what)
        return client, what


@contextlib.asynccontextmanager
async def served(
    world: World,
    folder: Path,
    *,
    waits: Waits = WAITS,
    limits: Limits | None = None,
    insecure: bool = False,
    listen: str = "127.0.0.1:0",
) -> AsyncIterator[tuple[Service, Recorder, int]]:
    recorder = Recorder()
    spool = Spool(folder / "spool", quota=2**27, stall_s=waits.stall)
    service = Service(world.keys, world.document(), recorder, spool, waits, limits=limits, insecure=insecure)
    port = await service.start(listen)
    try:
        yield service, recorder, port
    finally:
        await service.drain(0.0)
        spool.close()


class Device:
    """Speaks frame by frame, rightly or not."""

    def __init__(self, port: int, keys: DeviceKeys | None, operator: Operator | None) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 2**21))
        if operator is None:
            self._channel = aio.insecure_channel(f"127.0.0.1:{port}", options)
        else:
            own = (keys.tls_key_pem, keys.certificate_pem) if keys else (None, None)
            credentials = grpc.ssl_channel_credentials(operator.pem, *own)
            self._channel = aio.secure_channel(f"127.0.0.1:{port}", credentials, options)
        self.keys = keys
        self.call = self._channel.stream_stream(METHOD, None, None)(None)
        self.sent = 0
        self._came: list[pb.ServerFrame] = []
        self.goodbye: pb.Goodbye | None = None

    async def read(self) -> pb.ServerFrame:
        if not self._came:
            data = await self.call.read()
            assert isinstance(data, bytes), "the stream has ended"
            self._came.extend(decode_server(data).frames)
        frame = self._came.pop(0)
        if frame.HasField("goodbye"):
            self.goodbye = frame.goodbye
        return frame

    async def read_body(self, body: str) -> Any:
        """The next frame that is no ping."""
        while (frame := await self.read()).HasField("ping"):
            pass
        assert frame.WhichOneof("body") == body, frame
        return getattr(frame, body)

    async def write(self, frame: pb.ClientFrame) -> None:
        self.sent += 1
        frame.seq = self.sent
        await self.call.write(encode_client(frame))

    async def hello(self) -> pb.Welcome:
        assert self.keys is not None
        challenge = await self.read_body("challenge")
        await self.write(pb.ClientFrame(hello=self.keys.say_hello(challenge, (1, 1))))
        welcome: pb.Welcome = await self.read_body("welcome")
        return welcome

    async def end(self) -> tuple[str, str]:
        """Status and its text, when the stream has ended."""
        try:
            while await self.call.read() is not aio.EOF:
                pass
        except aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        return (await self.call.code()).name, await self.call.details()

    async def refused(self, code: str, reason: str) -> str:
        """The stream ends with a Goodbye and a status that say the same; the hint."""
        try:
            while self.goodbye is None:
                await self.read()
        except aio.AioRpcError as error:
            raise AssertionError(f"no Goodbye: {error.details()}") from error
        found, text = await self.end()
        assert (found, text) == (code, f"{reason}: {self.goodbye.hint}")
        assert (self.goodbye.code, self.goodbye.reason) == (grpc.StatusCode[code].value[0], reason)
        return self.goodbye.hint

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close(None)


@contextlib.asynccontextmanager
async def device(port: int, keys: DeviceKeys | None, operator: Operator | None) -> AsyncIterator[Device]:
    made = Device(port, keys, operator)
    try:
        yield made
    finally:
        await made.close()


class Proxy:
    """Carries bytes between devices and a server, and cuts.

    Attributes:
        up: bytes carried to the server.
        down: bytes carried to devices.
        cut_up: cut everything once so many bytes went to the server; then never again.
        cut_down: the same, to devices.
        delay_s: how long each piece is held back.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self.up = self.down = self.connections = 0
        self.cut_up: int | None = None
        self.cut_down: int | None = None
        self.delay_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        """All connections break."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted connections are closed at the next turn of the loop

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        pair = {writer, far_writer}
        self._writers |= pair
        try:
            await asyncio.gather(self._pipe(reader, far_writer, True), self._pipe(far_reader, writer, False))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for each in pair:
                each.transport.abort()
            self._writers -= pair

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool) -> None:
        while data := await reader.read(2**16):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
            if up:
                self.up += len(data)
                if self.cut_up is not None and self.up >= self.cut_up:
                    self.cut_up = None
                    self.cut()
            else:
                self.down += len(data)
                if self.cut_down is not None and self.down >= self.cut_down:
                    self.cut_down = None
                    self.cut()
        writer.transport.abort()
