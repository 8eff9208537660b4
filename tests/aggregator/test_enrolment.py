"""The enrolment port over real TLS: who is enrolled, who is not, and when the port is open."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.aggregator import enrolment, file_watch
from mycelia.aggregator.enrolment import ENROL, MAX_REQUEST, EnrolmentPort
from mycelia.aggregator.file_watch import FileWatch
from mycelia.aggregator.identity import ServerKeys
from mycelia.aggregator.identity_authority import Authority
from mycelia.aggregator.identity_online import OnlineAuthority
from mycelia.aggregator.identity_tokens import TokenTries
from mycelia.aggregator.limits import Limits
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import FrameError, decode_enrol_reply, decode_enrol_request, encode
from mycelia.client.identity import DeviceIdentity
from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.certificates import IdentityProblem, IdentityReason
from mycelia.privacy.secagg.enrolment import Request
from mycelia.privacy.secagg.roster import Issuer, Roster
from tests.aggregator.connections import run
from tests.aggregator.devices import Device, device, renewed

NOW = int(time.time())
DAY = 86_400
MANY = TokenTries(1_000)


class World:
    """An operator, one server, and what the server was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "operator"
        with Authority.create(self.folder, NOW) as ca:
            ca.add_server("agg-1", folder / "keys", NOW, dns=["localhost"])
            self.operator = ca.operator
        self.keys = ServerKeys.open(folder / "keys", NOW)
        self.rosters: list[bytes] = []
        self.fails = False

    async def take(self, document: bytes) -> None:
        if self.fails:
            raise OSError("the disk is full")
        self.rosters.append(document)

    def tokens(self, count: int = 1, life_s: int = DAY) -> list[str]:
        with Authority.open(self.folder) as ca:
            return ca.tokens.make(count, int(time.time()) + life_s, int(time.time()))

    @property
    def roster(self) -> Roster:
        return Roster.load(self.rosters[-1], self.operator.key, now=NOW)

    @contextlib.asynccontextmanager
    async def serve(
        self, *, tries: TokenTries | None = MANY, limits: Limits | None = None, patience_s: float = 10.0
    ) -> AsyncIterator[tuple[EnrolmentPort, int]]:
        authority = OnlineAuthority(self.folder, self.take)
        more = {} if limits is None else {"limits": limits}
        port = EnrolmentPort(self.keys, authority, tries=tries, patience_s=patience_s, **more)
        number = await port.start("localhost:0")
        try:
            yield port, number
        finally:
            await port.stop()
            await authority.close()

    @contextlib.asynccontextmanager
    async def channel(self, port: int) -> AsyncIterator[aio.Channel]:
        credentials = grpc.ssl_channel_credentials(self.operator.pem)
        async with aio.secure_channel(
            f"localhost:{port}", credentials, (("grpc.use_local_subchannel_pool", 1),)
        ) as channel:
            yield channel

    async def ask(self, port: int, data: bytes) -> pb.EnrolReply:
        async with self.channel(port) as channel:
            return decode_enrol_reply(await channel.unary_unary(ENROL)(data))

    async def refused(self, port: int, data: bytes) -> tuple[str, str]:
        with pytest.raises(aio.AioRpcError) as caught:
            await self.ask(port, data)
        return caught.value.code().name, (caught.value.details() or "").partition(":")[0]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def request_of(one: Device, token: str) -> bytes:
    asked = one.request
    return encode(
        pb.EnrolRequest(
            token=bytes.fromhex(token),
            request=asked.certificate_request,
            identity_key=asked.identity_key,
            proof=asked.signature,
            name=asked.name,
        )
    )


# --- who is enrolled ------------------------------------------------------------------------------


def test_a_device_enrols(world: World, tmp_path: Path) -> None:
    token, other = world.tokens(2)

    async def test() -> None:
        async with world.serve() as (port, number):
            with DeviceIdentity.create(tmp_path / "identity", world.operator.pem, "ward 7") as identity:
                asked = encode(identity.enrol_request(bytes.fromhex(token)))
                reply = await world.ask(number, asked)
                assert len(world.rosters) == 1  # the server knows it before the device does
                (entry,) = world.roster.clients
                assert (entry.client, entry.name, entry.issuer) == (1, "ward 7", Issuer.ONLINE)
                again = await world.ask(number, asked)  # the answer was lost
                assert (again.client, again.roster) == (reply.client, reply.roster)
                assert len(world.rosters) == 1
                keys = identity.accept_enrolled(reply, NOW)
                assert (identity.client, keys.identity.public) == (1, entry.identity_key)
            assert await world.refused(number, request_of(device(), token)) == (
                "PERMISSION_DENIED",
                "BAD_TOKEN",
            )
            assert (await world.ask(number, request_of(device(), other))).client == 2
            assert [entry.client for entry in world.roster.clients] == [1, 2]
            assert port.refused == {"BAD_TOKEN": 1}
            assert port.enrolled == 3

    run(test())


def test_what_is_refused(world: World) -> None:
    (token,) = world.tokens()
    one = device()

    async def test() -> None:
        async with world.serve() as (port, number):
            whole = request_of(one, token)
            forged = pb.EnrolRequest.FromString(whole)
            forged.name = "not signed"
            nobody = pb.EnrolRequest.FromString(whole)
            nobody.ClearField("token")
            for data, status in (
                (b"", ("INVALID_ARGUMENT", "FRAME")),
                (b"GET / HTTP/1.1", ("INVALID_ARGUMENT", "FRAME")),
                (whole[:-1], ("INVALID_ARGUMENT", "FRAME")),
                (request_of(one, "00" * 32), ("PERMISSION_DENIED", "BAD_TOKEN")),
                (encode(nobody), ("PERMISSION_DENIED", "BAD_TOKEN")),
                (encode(forged), ("UNAUTHENTICATED", "BAD_HELLO")),
            ):
                assert await world.refused(number, data) == status
            code, _ = await world.refused(number, bytes(MAX_REQUEST + 1))  # gRPC does not even read it
            assert code == "RESOURCE_EXHAUSTED"
            async with world.channel(number) as channel:
                for method in ("/mycelia.Federation/Connect", "/mycelia.Enrolment/Other"):
                    with pytest.raises(aio.AioRpcError) as caught:
                        await channel.unary_unary(method)(whole)
                    assert caught.value.code().name == "UNIMPLEMENTED"
            assert port.open  # nothing of this used the token up
            assert (await world.ask(number, whole)).client == 1
            assert port.refused == {"FRAME": 3, "BAD_TOKEN": 2, "BAD_HELLO": 1}

    run(test())


def test_five_tries_a_minute(world: World) -> None:
    world.tokens()

    async def test() -> None:
        async with world.serve(tries=None, limits=Limits()) as (_, number):
            found = [await world.refused(number, request_of(device(), "00" * 32)) for _ in range(5)]
            assert set(found) == {("PERMISSION_DENIED", "BAD_TOKEN")}
            for data in (request_of(device(), "00" * 32), b""):
                assert await world.refused(number, data) == ("RESOURCE_EXHAUSTED", "RATE")

    run(test())


def test_an_address_has_few_calls_open(world: World) -> None:
    token, _ = world.tokens(2)
    begun, held = asyncio.Event(), asyncio.Event()

    async def wait(document: bytes) -> None:
        begun.set()
        await asyncio.wait_for(held.wait(), 20)

    world.take = wait  # type: ignore[method-assign]

    async def test() -> None:
        async with world.serve(limits=Limits(address_streams=1)) as (_, number):
            asked = request_of(device(), token)
            waiting = asyncio.create_task(world.ask(number, asked))
            await begun.wait()
            assert await world.refused(number, asked) == ("RESOURCE_EXHAUSTED", "RATE")
            held.set()
            assert (await waiting).client == (await world.ask(number, asked)).client == 1

    run(test())


def test_the_folder_is_in_use(world: World) -> None:
    (token,) = world.tokens()
    asked = request_of(device(), token)

    async def test() -> None:
        async with world.serve() as (_, number):
            with Authority.open(world.folder):
                assert await world.refused(number, asked) == ("RESOURCE_EXHAUSTED", "BUSY")
            assert (await world.ask(number, asked)).client == 1

    run(test())


def test_a_roster_that_cannot_be_kept(world: World, caplog: pytest.LogCaptureFixture) -> None:
    token, _ = world.tokens(2)
    asked = request_of(device(), token)

    async def test() -> None:
        async with world.serve() as (_, number):
            world.fails = True
            assert await world.refused(number, asked) == ("INTERNAL", "BUG")
            world.fails = False
            assert (await world.ask(number, asked)).client == 1
            assert world.roster.listed(1)

    run(test())
    assert "incident" in caplog.text
    assert token not in caplog.text


def test_who_asked_has_gone(world: World) -> None:
    token, _ = world.tokens(2)
    begun, known = asyncio.Event(), asyncio.Event()

    async def take(document: bytes) -> None:
        begun.set()
        await asyncio.wait_for(left.wait(), 20)
        world.rosters.append(document)
        known.set()

    left = asyncio.Event()
    world.take = take  # type: ignore[method-assign]

    async def test() -> None:
        async with world.serve() as (_, number):
            call = asyncio.create_task(world.ask(number, request_of(device(), token)))
            await begun.wait()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            left.set()
            await known.wait()
            assert [entry.client for entry in world.roster.clients] == [1]

    run(test())


def test_keys_are_renewed_and_settled(world: World) -> None:
    one = device()
    with Authority.open(world.folder) as ca:
        ca.issue(one.request, NOW)
    new = renewed(1, one.identity).request
    asked = pb.Renew(
        request=new.certificate_request,
        identity_key=new.identity_key,
        signature=new.renewal_signature,
        proof=new.signature,
    )

    async def test() -> None:
        authority = OnlineAuthority(world.folder, world.take)
        with pytest.raises(IdentityProblem) as caught:
            await authority.renew(2, asked)
        assert (caught.value.reason, world.rosters) == (IdentityReason.BAD_HELLO, [])
        reply = await authority.renew(1, asked)
        assert reply.roster == world.rosters[-1]
        assert [entry.identity_key for entry in world.roster.listed(1)] == [
            one.request.identity_key,
            new.identity_key,
        ]
        for _ in range(2):
            await authority.settle(1, new.identity_key)
            assert [entry.identity_key for entry in world.roster.listed(1)] == [new.identity_key]
        assert len(world.rosters) == 2
        await authority.close()
        await authority.close()

    run(test())


# --- when it is open ------------------------------------------------------------------------------


def test_open_while_there_are_tokens(world: World) -> None:
    one = device()

    async def test() -> None:
        async with world.serve() as (port, number):
            assert not port.open
            code, _ = await world.refused(number, request_of(one, "00" * 32))
            assert code == "UNAVAILABLE"
            for client in (1, 2):  # it opens again and again, by itself
                (token,) = await asyncio.to_thread(world.tokens)
                await port.wait_for(True)
                assert (await world.ask(number, request_of(device(), token))).client == client
                await port.wait_for(False)

    run(test())


def test_it_closes_with_the_last_token(world: World) -> None:
    world.tokens(life_s=1)

    async def test() -> None:
        async with world.serve() as (port, _):
            await port.wait_for(False)
            assert int(time.time()) > NOW

    run(test())


def test_damaged_tokens_close_it(world: World, caplog: pytest.LogCaptureFixture) -> None:
    (token,) = world.tokens()
    tokens = world.folder / "tokens.json"
    whole = tokens.read_bytes()

    async def test() -> None:
        async with world.serve() as (port, number):
            assert port.open
            tokens.write_bytes(b"{")
            await port.wait_for(False)
            tokens.write_bytes(whole)
            await port.wait_for(True)
            assert (await world.ask(number, request_of(device(), token))).client == 1

    run(test())
    assert "damaged" in caplog.text


def test_an_address_that_cannot_be_bound(world: World) -> None:
    async def test() -> None:
        async with world.serve() as (_, number):
            other = EnrolmentPort(world.keys, OnlineAuthority(world.folder, world.take))
            with pytest.raises(ConfigError, match="cannot be bound"):
                await other.start("192.0.2.1:0")
            with pytest.raises(ConfigError, match="host:port"):
                await other.start("localhost")
            await other.stop()
            assert number

    run(test())


def test_who_says_nothing_is_put_out(world: World) -> None:
    world.tokens()

    async def closed(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(2**12):
                pass

    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def test() -> None:
        async with world.serve(patience_s=0.5) as (_, number):
            reader, writer = await asyncio.open_connection("localhost", number)  # no TLS
            await closed(reader)
            writer.close()
            async with world.channel(number) as channel:  # TLS, a call, and no request in it
                with pytest.raises(aio.AioRpcError):
                    await channel.stream_unary(ENROL)(never())

    run(test())


def test_connections_are_few(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (token,) = world.tokens()
    monkeypatch.setattr(enrolment, "_CONNECTIONS", 3)

    async def test() -> None:
        async with world.serve() as (_, number):
            silent = [await asyncio.open_connection("localhost", number) for _ in range(3)]
            reader, writer = await asyncio.open_connection("localhost", number)
            with contextlib.suppress(ConnectionError):
                assert await reader.read(1) == b""  # put out at once
            for _, other in [*silent, (reader, writer)]:
                other.close()
            while True:  # until their places are free
                with contextlib.suppress(aio.AioRpcError):
                    assert (await world.ask(number, request_of(device(), token))).client == 1
                    break

    run(test())


# --- watching files -------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [True, False])
def test_files_are_watched(tmp_path: Path, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watch, "LOOK_S", 0.01)

    async def test() -> None:
        changed = asyncio.Event()
        path, other = tmp_path / "a", tmp_path / "b"
        watch = FileWatch([path, tmp_path / "c"], changed.set, kernel=kernel)
        path.write_bytes(b"before the start")
        watch.start()

        async def told(change: Callable[[], object]) -> None:
            changed.clear()
            change()
            await changed.wait()

        await changed.wait()
        await told(lambda: path.write_bytes(b"written"))
        other.write_bytes(b"replaced")
        await told(lambda: other.replace(path))
        await told(path.unlink)
        await told((tmp_path / "c").touch)
        changed.clear()
        other.touch()  # nobody asked about this one
        await told(lambda: path.write_bytes(b"again"))
        watch.stop()
        watch.stop()

    run(test())


# --- anything at all ------------------------------------------------------------------------------


def read(data: bytes) -> None:
    """What the server does with a request before it looks at the token."""
    with contextlib.suppress(FrameError, IdentityProblem):
        asked = decode_enrol_request(data)
        Request(0, asked.request, asked.identity_key, asked.name, asked.proof, b"").check()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 12))
def test_any_request(data: bytes, place: int, cut: int) -> None:
    read(data)
    read(WHOLE[:place] + data + WHOLE[place + cut :])


@pytest.mark.parametrize("rounds", [3_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_many_damaged_requests(rounds: int) -> None:
    """Half of them signed by the device that damages them, so that the certificate request is read, too."""
    draw = random.Random(7)
    one = device("ward 7")
    for index in range(rounds):
        damaged = bytearray(WHOLE if index % 2 else one.request.certificate_request)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        if index % 2:
            read(bytes(damaged))
            continue
        asked = Request(0, bytes(damaged), one.identity.public, "", b"", b"")
        signed = Request(0, bytes(damaged), one.identity.public, "", one.identity.sign(asked.signed), b"")
        with contextlib.suppress(IdentityProblem):
            signed.check()


WHOLE = request_of(device("ward 7"), "11" * 32)
