"""A device's connection, against a real server over real TLS, with a network in between that breaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

from mycelia.aggregator.identity_certificates import client_certificate
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.offers import LEAST_CHUNK, Manifest, Payload
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.sinks import MemorySink
from mycelia.client.backoff import Then, TransportError
from mycelia.client.identity import DeviceIdentity
from mycelia.client.transport import (
    Came,
    Connected,
    Event,
    Lost,
    NewRoster,
    Place,
    Received,
    Sent,
    Transport,
)
from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.certificates import DAY
from mycelia.privacy.secagg.enrolment import Reply
from mycelia.privacy.secagg.roster import Roster
from tests.aggregator.connections import NOW, WAITS, Device, Proxy, Recorder, World, device, run, served

AT = Position("study", 3, 0)
_Event = TypeVar("_Event", Came, Connected, Lost, NewRoster, Received, Sent)


class Quick(random.Random):
    """Dice that make every wait the shortest."""

    def uniform(self, a: float, b: float) -> float:
        return a


def in_memory(offer: pb.Offer, manifest: Manifest) -> Place:
    return Place(MemorySink(manifest.size))


async def expect(transport: Transport, kind: type[_Event]) -> _Event:
    event = await anext(transport)
    assert isinstance(event, kind), event
    return event


@contextlib.contextmanager
def enrolled(world: World, folder: Path, client: int = 7, *, days: int = 30) -> Any:
    identity = world.enrol_folder(client, folder / f"device-{client}", days=days)
    try:
        yield identity
    finally:
        identity.close()


def transport(port: int, identity: DeviceIdentity, *, host: str = "127.0.0.1", **settings: Any) -> Transport:
    places = settings.pop("places", in_memory)
    return Transport([f"{host}:{port}"], identity, places, dice=Quick(), **settings)


@contextlib.asynccontextmanager
async def proxied(port: int) -> AsyncIterator[tuple[Proxy, int]]:
    proxy = Proxy(port)
    try:
        yield proxy, await proxy.start()
    finally:
        await proxy.close()


def outcome(phase: str = "") -> pb.ServerFrame:
    return pb.ServerFrame(outcome=pb.Outcome(at=AT.to_wire(), phase=phase))


# --- a connection ---------------------------------------------------------------------------------


@pytest.mark.parametrize("insecure", [False, True])
def test_frames_both_ways_and_bye(tmp_path: Path, insecure: bool) -> None:
    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity:
            async with served(world, tmp_path, insecure=insecure) as (service, told, port):
                async with transport(port, identity, insecure=insecure) as ward:
                    assert not ward.send(pb.ClientFrame(ready=pb.Ready(at=AT.to_wire())))
                    welcome = await expect(ward, Connected)
                    assert welcome.roster == service.roster == ward.roster
                    assert welcome.server == f"127.0.0.1:{port}"
                    await told.next("connected")
                    assert ward.connected
                    assert ward.send(pb.ClientFrame(ready=pb.Ready(at=AT.to_wire())))
                    assert (await told.next("frame"))[1].ready.at == AT.to_wire()
                    service.push(7, outcome("train"))
                    assert (await expect(ward, Came)).frame.outcome.phase == "train"
                assert await told.next("lost") == (7, None)
                assert identity.epoch == 1
                with pytest.raises(StopAsyncIteration):
                    await anext(ward)

    run(test())


def test_heartbeats_are_answered_while_nobody_reads_the_events(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        waits = WAITS._replace(heartbeat=0.1, lost=0.3)
        with enrolled(world, tmp_path) as identity:
            async with (
                served(world, tmp_path, waits=waits) as (service, told, port),
                transport(port, identity) as ward,
            ):
                await told.next("connected")
                with pytest.raises(TimeoutError):  # training takes its time
                    await asyncio.wait_for(told.next("lost"), 0.6)
                await expect(ward, Connected)
                service.push(7, outcome())
                await expect(ward, Came)

    run(test())


def test_a_large_roster_comes_first_and_once(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity:
            world.fill(4000)
            async with (
                served(world, tmp_path) as (service, told, port),
                proxied(port) as (proxy, near),
                transport(near, identity) as ward,
            ):
                told.on_connected = lambda client: service.push(client, outcome()) and None
                assert len((await expect(ward, Connected)).roster.clients) == 4001
                await expect(ward, Came)
                before = proxy.down
                proxy.cut()
                await expect(ward, Lost)
                await expect(ward, Connected)
                await expect(ward, Came)
                await ward.close()
                assert [(await told.events.get())[0] for _ in range(4)] == 2 * ["connected", "lost"]
                assert proxy.down - before < 2**17

    run(test())


def test_a_server_that_the_roster_does_not_list_any_more(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity:
            async with served(world, tmp_path) as (service, _, port):
                world.server = World("agg-2").server
                world.epoch = 2
                service.renew_roster(world.document())
                async with transport(port, identity) as ward:
                    lost = await expect(ward, Lost)
                    assert lost.error.then is Then.OPERATOR
                    assert "agg-1" in lost.error.found

    run(test())


def test_a_new_roster_comes_while_connected(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity:
            async with served(world, tmp_path) as (service, _, port), transport(port, identity) as ward:
                await expect(ward, Connected)
                service.renew_roster(world.revoke(9))
                assert (await expect(ward, NewRoster)).roster == service.roster == ward.roster
                assert identity.epoch == 2

    run(test())


def test_renewed_keys(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity:
            before = identity.keys[0]
            entry = world.clients[7]
            request = identity.renew()
            until = NOW + 30 * DAY
            der = client_certificate(world.operator, 7, request.tls_key, NOW - DAY, until)
            async with served(world, tmp_path) as (service, told, port), transport(port, identity) as ward:
                await expect(ward, Connected)
                await told.next("connected")
                identity.accept_reply(Reply(7, request.identity_key, der, 1).sign(world.operator), NOW)
                ward.reconnect()  # the server does not know the new keys yet: the old ones are used
                assert (await expect(ward, Lost)).wait_s == 0
                assert (await expect(ward, Lost)).error.reason is Reason.BAD_HELLO
                await expect(ward, Connected)
                await told.next("lost")
                assert (await told.next("connected"))[1] == entry
                assert len(identity.keys) == 2
                newer = replace(entry, identity_key=request.identity_key, tls_sha256=request.tls_sha256)
                world.epoch = 2
                both = Roster(2, until, (entry, newer), (world.server,))
                service.renew_roster(both.sign(world.operator))
                await expect(ward, NewRoster)
                ward.reconnect()
                await expect(ward, Lost)
                await expect(ward, Connected)
                await told.next("lost")
                assert (await told.next("connected"))[1] == newer
                assert len(identity.keys) == 1
                async with device(port, before, world.pinned) as old:  # its keys were replaced
                    challenge = await old.read_body("challenge")
                    await old.write(pb.ClientFrame(hello=before.say_hello(challenge, (1, 1))))
                    assert "replaced" in await old.refused("UNAUTHENTICATED", "BAD_HELLO")

    run(test())


def test_versions_that_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mycelia.aggregator.admission.VERSIONS", (5, 6))

    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity:
            async with served(world, tmp_path) as (_, _, port), transport(port, identity) as ward:
                error = (await expect(ward, Lost)).error
                assert (error.reason, error.then) == (Reason.VERSION, Then.OPERATOR)
                assert "5 to 6" in error.found
                assert "1 to 1" in error.found
                assert "install" in error.fix

    run(test())


def test_an_older_roster_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity:
            world.epoch = 4
            identity.see_roster(world.document(), NOW)
            world.epoch = 3
            async with served(world, tmp_path) as (_, _, port), transport(port, identity) as ward:
                lost = await expect(ward, Lost)
                assert lost.error.then is Then.OPERATOR
                assert "epoch 3" in lost.error.found

    run(test())


# --- breaking and coming back ---------------------------------------------------------------------


def test_a_cut_connection_is_made_again(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity:
            async with (
                served(world, tmp_path) as (service, told, port),
                proxied(port) as (proxy, near),
                transport(near, identity) as ward,
            ):
                for _ in range(3):
                    await expect(ward, Connected)
                    await told.next("connected")
                    proxy.cut()
                    lost = await expect(ward, Lost)
                    assert (lost.error.then, lost.wait_s) == (Then.RETRY, 0.05)
                    await told.next("lost")
                await expect(ward, Connected)
                service.push(7, outcome())
                await expect(ward, Came)

    run(test())


def test_a_payload_to_the_server_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        data = Random(3).randbytes(64 * LEAST_CHUNK)
        payload = Payload(data, chunk_size=LEAST_CHUNK)
        offer = payload.offer(pb.UPDATE, AT, schema_sha256=bytes(32))
        with enrolled(world, tmp_path) as identity:
            async with (
                served(world, tmp_path) as (_, told, port),
                proxied(port) as (proxy, near),
                transport(near, identity) as ward,
            ):
                await expect(ward, Connected)
                proxy.cut_up = 3 * len(data) // 4
                ward.send_payload(payload, offer)
                await expect(ward, Lost)
                await expect(ward, Connected)
                assert (await expect(ward, Sent)).offer == offer
                kinds = [(await told.events.get()) for _ in range(4)]
                assert [kind for kind, _, _ in kinds] == ["connected", "lost", "connected", "payload"]
                assert kinds[3][2] == data
                assert proxy.up < 1.3 * len(data)  # at most credit and buffers travel twice

    run(test())


def test_a_payload_from_the_server_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        data = Random(4).randbytes(64 * LEAST_CHUNK)
        payload = Payload(data, chunk_size=LEAST_CHUNK)
        offer = payload.offer(pb.MODEL, AT, schema_sha256=bytes(32))
        with enrolled(world, tmp_path) as identity:
            async with (
                served(world, tmp_path) as (service, told, port),
                proxied(port) as (proxy, near),
            ):
                told.on_connected = lambda client: service.send_payload(client, payload, offer) and None
                proxy.cut_down = 3 * len(data) // 4
                async with transport(near, identity) as ward:
                    await expect(ward, Connected)
                    await expect(ward, Lost)
                    await expect(ward, Connected)
                    received = await expect(ward, Received)
                    assert received.offer == offer
                    assert received.sink.read(0, len(data)) == data
                    assert proxy.down < 1.3 * len(data)
                    kinds = [(await told.events.get())[0] for _ in range(4)]
                    assert kinds == ["connected", "lost", "connected", "delivered"]
                    proxy.cut()  # offered once more, it is here already
                    await expect(ward, Lost)
                    await expect(ward, Connected)
                    kinds = [(await told.events.get())[0] for _ in range(3)]
                    assert kinds == ["lost", "connected", "delivered"]
                    assert proxy.down < 1.4 * len(data)

    run(test())


def test_both_ways_at_once_over_a_slow_line(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        up, down = (
            Payload(Random(seed).randbytes(10 * LEAST_CHUNK), chunk_size=LEAST_CHUNK) for seed in (5, 6)
        )
        with enrolled(world, tmp_path) as identity:
            async with (
                served(world, tmp_path) as (service, told, port),
                proxied(port) as (proxy, near),
                transport(near, identity) as ward,
            ):
                proxy.delay_s = 0.01
                told.on_connected = lambda client: (
                    service.send_payload(client, down, down.offer(pb.MODEL, AT, schema_sha256=bytes(32)))
                    and None
                )
                ward.send_payload(up, up.offer(pb.UPDATE, AT, schema_sha256=bytes(32)))
                await expect(ward, Connected)
                events = [await anext(ward), await anext(ward)]
                assert {type(event) for event in events} == {Received, Sent}
                kinds = {(await told.events.get())[0] for _ in range(3)}
                assert kinds == {"connected", "delivered", "payload"}

    run(test())


@pytest.mark.parametrize("cuts", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_payloads_both_ways_through_many_cuts(tmp_path: Path, cuts: int) -> None:
    async def test() -> None:
        world, dice = World(), Random(cuts)
        size = cuts * 2**20
        up, down = (Payload(Random(seed).randbytes(size), chunk_size=LEAST_CHUNK) for seed in (7, 8))
        down_offer = down.offer(pb.MODEL, AT, schema_sha256=bytes(32))
        with enrolled(world, tmp_path) as identity:
            async with (
                served(world, tmp_path) as (service, told, port),
                proxied(port) as (proxy, near),
                transport(near, identity) as ward,
            ):
                told.on_connected = lambda client: service.send_payload(client, down, down_offer) and None
                ward.send_payload(up, up.offer(pb.UPDATE, AT, schema_sha256=bytes(32)))
                received: list[Received] = []
                lost = sent = 0
                while not (received and sent):
                    event = await anext(ward)
                    lost += isinstance(event, Lost)
                    sent += isinstance(event, Sent)
                    received += [event] if isinstance(event, Received) else []
                    if isinstance(event, Connected) and lost < cuts:
                        proxy.cut_up = proxy.up + dice.randrange(2**19, 2**20)
                        proxy.cut_down = proxy.down + dice.randrange(2**19, 2**20)
                assert (len(received), sent) == (1, 1)
                assert lost >= cuts // 2
                assert bytes(received[0].sink.read(0, size)) == down.data
                payloads = [event for event in _all(told) if event[0] == "payload"]
                assert [data for _, _, data in payloads] == [up.data]

    def _all(told: Recorder) -> list[tuple[str, int, Any]]:
        return [told.events.get_nowait() for _ in range(told.events.qsize())]

    run(test())


def test_what_is_declined_and_what_is_over(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        payload = Payload(bytes(100))

        def decline(offer: pb.Offer, manifest: Manifest) -> Place:
            raise Problem(Reason.POLICY, "too much for today")

        with enrolled(world, tmp_path) as identity:
            async with (
                served(world, tmp_path) as (service, told, port),
                transport(port, identity, places=decline) as ward,
            ):
                await expect(ward, Connected)
                await told.next("connected")
                service.send_payload(7, payload, payload.offer(pb.MODEL, AT, schema_sha256=bytes(32)))
                _, frame = await told.next("frame")
                assert frame.decline.reason == "POLICY: too much for today"
                told.refuses = Problem(Reason.STALE_ROUND, "round 3 is over")
                ward.send_payload(payload, payload.offer(pb.UPDATE, AT, schema_sha256=bytes(32)))
                assert (await expect(ward, Came)).frame.outcome.reason == "STALE_ROUND"
                ward.forget(AT)
                told.refuses = None
                service.end(7, Problem(Reason.STORE, "the database is away"))
                assert (await expect(ward, Lost)).error.reason is Reason.STORE
                await told.next("lost")
                await expect(ward, Connected)
                await told.next("connected")
                service.push(7, outcome())  # and nothing was offered again
                await expect(ward, Came)
                assert told.events.empty()

    run(test())


def test_a_silent_server_is_left(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        slept = 0.0
        with enrolled(world, tmp_path) as identity:
            async with served(world, tmp_path, waits=WAITS._replace(heartbeat=0.2)) as (_, told, port):

                def clock() -> float:
                    return asyncio.get_running_loop().time() + slept

                async with transport(port, identity, clock=clock) as ward:
                    await expect(ward, Connected)
                    slept = 3600.0  # a laptop that was closed
                    lost = await expect(ward, Lost)
                    assert "nothing has come" in lost.error.found
                    await expect(ward, Connected)
                    await told.next("connected")

    run(test())


def test_a_goodbye_says_when_to_come_again(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity:
            async with served(world, tmp_path) as (service, told, port), transport(port, identity) as ward:
                await expect(ward, Connected)
                await told.next("connected")
                await service.drain(200.0)
                lost = await expect(ward, Lost)
                assert (lost.error.reason, lost.error.then) == (Reason.DRAINING, Then.RETRY)
                assert lost.wait_s == pytest.approx(180, abs=1)  # a tenth less, with these dice

    run(test())


def test_another_server_is_tried(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity, _closed_port() as nobody:
            async with served(world, tmp_path) as (_, _, port):
                for seed in range(6):  # whichever comes first
                    dice = Quick(seed)
                    servers = [f"127.0.0.1:{nobody}", f"127.0.0.1:{port}", f"nowhere.invalid:{port}"]
                    async with Transport(servers, identity, in_memory, dice=dice) as ward:
                        while isinstance(event := await anext(ward), Lost):
                            assert event.wait_s < 1
                        assert isinstance(event, Connected)

    run(test())


# --- what is said about it ------------------------------------------------------------------------


@contextlib.contextmanager
def _closed_port() -> Any:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        yield taken.getsockname()[1]


async def _first_loss(ward: Transport) -> TransportError:
    async with ward:
        lost = await expect(ward, Lost)
    assert lost.wait_s == (810 if lost.error.then is Then.OPERATOR else 0.05)
    return lost.error


def test_wrong_address_is_explained(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity, _closed_port() as nobody:
            error = await _first_loss(transport(8443, identity, host="nowhere.invalid"))
            assert "nowhere.invalid" in str(error)
            assert "spelling" in error.fix
            error = await _first_loss(transport(nobody, identity))
            assert error.then is Then.RETRY
            assert f"nothing listens on port {nobody}" in error.found
            assert "mycelia serve" in error.fix
            with pytest.raises(ConfigError, match="host:port"):
                transport(0, identity, host="http://x")

    run(test())


def test_wrong_port_is_explained(tmp_path: Path) -> None:
    async def speaks_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(64)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity:
            async with await asyncio.start_server(speaks_http, "127.0.0.1", 0) as other:
                error = await _first_loss(transport(other.sockets[0].getsockname()[1], identity))
            assert error.then is Then.OPERATOR
            assert "does not speak TLS" in error.found
            assert "8443" in error.fix

    run(test())


@pytest.mark.parametrize("server_insecure", [False, True])
def test_insecure_must_be_said(tmp_path: Path, server_insecure: bool) -> None:
    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity:
            async with served(world, tmp_path, insecure=server_insecure) as (_, told, port):
                error = await _first_loss(transport(port, identity, insecure=not server_insecure))
                assert error.then is Then.OPERATOR
                assert "--insecure" in str(error)
                assert told.events.empty()
            with pytest.raises(ConfigError, match="loopback"):
                transport(8443, identity, host="192.0.2.1", insecure=True)
            transport(8443, identity, host="192.0.2.1", insecure=True, secure_sum=False)

    run(test())


@pytest.mark.parametrize(
    ("make", "host", "says"),
    [
        (lambda world: world, "localhost", ""),
        (lambda _: World(), "127.0.0.1", "not signed by the operator"),
        (lambda world: world, "127.0.0.2", "not for the name 127.0.0.2"),
    ],
    ids=["right", "another operator", "another name"],
)
def test_whose_server_it_is(tmp_path: Path, make: Callable[[World], World], host: str, says: str) -> None:
    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity:
            async with served(make(world), tmp_path, listen="0.0.0.0:0") as (_, _, port):
                ward = transport(port, identity, host=host)
                if not says:
                    async with ward:
                        await expect(ward, Connected)
                    return
                error = await _first_loss(ward)
                assert error.then is Then.OPERATOR
                assert says in error.found

    run(test())


def test_expired_certificates_are_named_with_date_and_command(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(days=-2)
        with enrolled(world, tmp_path) as identity, enrolled(world, tmp_path, 8, days=-2) as old:
            async with served(world, tmp_path) as (_, _, port):
                for error in (
                    await _first_loss(transport(port, identity)),
                    await _first_loss(transport(port, old)),
                ):
                    assert error.then is Then.OPERATOR
                    assert "certificate expired on 20" in error.found
                    assert "UTC" in error.found
                    assert "mycelia enrol" in error.fix

    run(test())


def test_a_revoked_device_waits_for_the_operator(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity:
            async with served(world, tmp_path) as (service, _, port), transport(port, identity) as ward:
                await expect(ward, Connected)
                service.renew_roster(world.revoke(7))
                lost = await expect(ward, Lost)
                assert (lost.error.reason, lost.error.then) == (Reason.REVOKED, Then.OPERATOR)
                assert lost.wait_s == 810

    run(test())


def test_a_superseded_device_stops(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity:
            async with served(world, tmp_path) as (_, _, port), transport(port, identity) as ward:
                await expect(ward, Connected)
                other = Device(port, identity.keys[0], world.pinned)
                await other.hello()
                with pytest.raises(TransportError, match="SUPERSEDED") as caught:
                    await anext(ward)
                assert caught.value.then is Then.STOP
                assert "identity" in caught.value.fix
                with pytest.raises(StopAsyncIteration):
                    await anext(ward)
                await other.close()

    run(test())


def test_close_while_it_waits(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        with enrolled(world, tmp_path) as identity, _closed_port() as nobody:
            ward = Transport([f"127.0.0.1:{nobody}"], identity, in_memory)
            async with ward:
                await expect(ward, Lost)
            events: list[Event] = [event async for event in ward]
            assert all(isinstance(event, Lost) for event in events)

    run(test())
