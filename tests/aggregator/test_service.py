"""The server's end of a stream: who is let in, what ends it, and what goes through, over real TLS."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from random import Random

import grpc
import pytest
from grpc import aio

from mycelia.aggregator.admission import Admission
from mycelia.aggregator.limits import Limits
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.channel import METHOD
from mycelia.aggregator.wire.frames import MAX_FRAME, Problem, Reason
from mycelia.aggregator.wire.offers import LEAST_CHUNK, Payload
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.transfer import CREDIT, Outgoing
from mycelia.engine.errors import ConfigError
from tests.aggregator.connections import NOW, WAITS, Device, World, device, run, served

AT = Position("study", 3, 0)
READY = pb.ClientFrame(ready=pb.Ready(at=AT.to_wire()))


def outcome(client: int = 0) -> pb.ServerFrame:
    return pb.ServerFrame(outcome=pb.Outcome(at=AT.to_wire(), phase=f"{client}"))


# --- the beginning --------------------------------------------------------------------------------


def test_challenge_hello_welcome_and_a_frame_each_way(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        async with served(world, tmp_path) as (service, told, port), device(port, keys, world.pinned) as ward:
            told.holds = [pb.Held(at=AT.to_wire(), phase="train")]
            welcome = await ward.hello()
            assert (welcome.version, welcome.roster_epoch) == (1, 1)
            assert welcome.roster == world.document()
            assert welcome.roster_sha256 == service.roster.sha256
            assert (welcome.heartbeat_ms, welcome.stall_ms) == (5000, 5000)
            assert abs(welcome.time_ms / 1000 - NOW) < 600
            assert list(welcome.held) == told.holds
            client, entry = await told.next("connected")
            assert (client, entry) == (7, world.clients[7])
            assert service.connected == {7}
            await ward.write(READY)
            client, frame = await told.next("frame")
            assert (client, frame.ready.at, frame.seq) == (7, AT.to_wire(), 2)
            assert service.push(7, outcome(1))
            assert (await ward.read_body("outcome")).phase == "1"
            assert service.retry_at(7, 20.0, "not selected", AT)
            said = await ward.read_body("retry_at")
            assert (said.reason, said.at) == ("not selected", AT.to_wire())
            assert 20_000 <= said.delay_ms <= 22_000
            assert not service.push(8, outcome())
            await ward.write(pb.ClientFrame(bye=pb.Bye()))
            assert await ward.end() == ("OK", "")
            assert await told.next("lost") == (7, None)
            assert service.connected == frozenset()
            assert not service.push(7, outcome())

    run(test())


def test_a_roster_above_a_frame_comes_as_a_payload(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        world.fill(4000)
        async with served(world, tmp_path) as (_, _, port), device(port, keys, world.pinned) as ward:
            assert not (await ward.hello()).roster
            offer = await ward.read_body("offer")
            assert (offer.kind, offer.HasField("at")) == (pb.ROSTER, False)
            missing = [pb.Range(first=0, count=len(offer.chunk_sha256))]
            await ward.write(pb.ClientFrame(want=pb.Want(sha256=offer.sha256, missing=missing)))
            chunks = [await ward.read_body("chunk") for _ in offer.chunk_sha256]
            assert b"".join(chunk.data for chunk in chunks) == world.document()

    run(test())


def test_versions_that_do_not_meet(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        async with served(world, tmp_path) as (_, told, port), device(port, keys, world.pinned) as ward:
            challenge = await ward.read_body("challenge")
            await ward.write(pb.ClientFrame(hello=keys.say_hello(challenge, (3, 5))))
            hint = await ward.refused("FAILED_PRECONDITION", "VERSION")
            assert "3 to 5" in hint
            assert "1 to 1" in hint
            assert told.events.empty()

    run(test())


def test_a_certificate_of_nobody_of_another_operator_and_expired(tmp_path: Path) -> None:
    async def test() -> None:
        world, other = World(), World()
        expired = world.enrol(8, days=-1)
        async with served(world, tmp_path) as (_, told, port):
            for keys in (None, other.enrol(7), expired):
                async with device(port, keys, world.pinned) as ward:
                    assert (await ward.end())[0] == "UNAVAILABLE"  # TLS itself refuses
            async with device(port, None, None) as ward:  # plain text
                assert (await ward.end())[0] == "UNAVAILABLE"
            assert told.events.empty()

    run(test())


@pytest.mark.parametrize("tls", ["TLSv1.2", ""])
def test_tls_1_2_is_refused(tls: str) -> None:
    world = World()
    keys = world.enrol(7)
    admission = Admission(world.keys, world.document(), insecure=False, wall=lambda: NOW)
    challenge = admission.challenge()
    hello = keys.say_hello(challenge, (1, 1))
    pem = keys.certificate_pem.decode()
    assert admission.admit(challenge, hello, pem, "TLSv1.3").entry == world.clients[7]
    with pytest.raises(Problem, match=r"TLS 1\.3") as caught:
        admission.admit(challenge, hello, pem, tls)
    assert caught.value.reason is Reason.BAD_HELLO
    with pytest.raises(Problem):
        admission.admit(challenge, hello, "", "TLSv1.3")


@pytest.mark.parametrize(
    ("make", "code", "reason", "says"),
    [
        (lambda world: world.revoke(7), "PERMISSION_DENIED", "REVOKED", "epoch 2"),
        (lambda world: world.clients.pop(7), "PERMISSION_DENIED", "NOT_ENROLLED", "does not list it"),
        (lambda world: world.enrol(7), "UNAUTHENTICATED", "BAD_HELLO", "another TLS key"),
    ],
    ids=["revoked", "unknown", "enrolled anew"],
)
def test_whom_the_roster_does_not_let_in(
    tmp_path: Path, make: Callable[[World], object], code: str, reason: str, says: str
) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        make(world)
        async with served(world, tmp_path) as (service, told, port), device(port, keys, world.pinned) as ward:
            await ward.write(pb.ClientFrame(hello=keys.say_hello(await ward.read_body("challenge"), (1, 1))))
            assert says in await ward.refused(code, reason)
            assert told.events.empty()
            assert service.refused == {Reason(reason): 1}

    run(test())


def test_expired_certificate_message(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7, entry_days=-3)
        async with served(world, tmp_path) as (_, _, port), device(port, keys, world.pinned) as ward:
            await ward.write(pb.ClientFrame(hello=keys.say_hello(await ward.read_body("challenge"), (1, 1))))
            hint = await ward.refused("UNAUTHENTICATED", "CERT_EXPIRED")
            assert "UTC" in hint
            assert "mycelia enrol" in hint

    run(test())


def test_a_recorded_hello_is_worth_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        async with served(world, tmp_path) as (_, told, port):
            async with device(port, keys, world.pinned) as ward:
                recorded = keys.say_hello(await ward.read_body("challenge"), (1, 1))
                await ward.write(pb.ClientFrame(hello=recorded))
                await ward.read_body("welcome")
                await told.next("connected")
            await told.next("lost")
            async with device(port, keys, world.pinned) as ward:
                await ward.read_body("challenge")
                await ward.write(pb.ClientFrame(hello=recorded))
                assert "signature" in await ward.refused("UNAUTHENTICATED", "BAD_HELLO")
            assert told.events.empty()

    run(test())


def test_a_hello_of_one_device_over_the_certificate_of_another(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        one, other = world.enrol(7), world.enrol(8)
        async with served(world, tmp_path) as (_, _, port), device(port, one, world.pinned) as ward:
            await ward.write(pb.ClientFrame(hello=other.say_hello(await ward.read_body("challenge"), (1, 1))))
            assert "client 8" in await ward.refused("UNAUTHENTICATED", "BAD_HELLO")

    run(test())


def test_a_slow_hello(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        waits = WAITS._replace(hello=0.3)
        async with (
            served(world, tmp_path, waits=waits) as (_, _, port),
            device(port, keys, world.pinned) as ward,
        ):
            await ward.read_body("challenge")
            assert "0.3 s" in await ward.refused("DEADLINE_EXCEEDED", "HELLO")

    run(test())


def test_a_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        pair = tmp_path / "pair.pem"
        pair.write_bytes(keys.tls_key_pem + keys.certificate_pem)
        context = ssl.create_default_context(cadata=world.pinned.pem.decode())
        context.load_cert_chain(pair)
        context.set_alpn_protocols(["h2"])
        async with served(world, tmp_path, waits=WAITS._replace(hello=0.3)) as (_, _, port):
            for tls, name in ((None, None), (context, "localhost")):  # no handshake, and no stream
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", port, ssl=tls, server_hostname=name
                )
                while await reader.read(2**12):
                    pass
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()

    run(test())


# --- what ends a stream ---------------------------------------------------------------------------


async def _garbage(ward: Device) -> None:
    await ward.call.write(b"\xff" * 40)


async def _gap(ward: Device) -> None:
    ward.sent += 1
    await ward.write(READY)


async def _repeat(ward: Device) -> None:
    ward.sent -= 1
    await ward.write(READY)


async def _second_hello(ward: Device) -> None:
    assert ward.keys is not None
    challenge = pb.Challenge(nonce=bytes(32), server="agg-1", version_min=1, version_max=1)
    await ward.write(pb.ClientFrame(hello=ward.keys.say_hello(challenge, (1, 1))))


async def _want_of_nothing(ward: Device) -> None:
    await ward.write(pb.ClientFrame(want=pb.Want(sha256=bytes(32))))


async def _chunk_without_offer(ward: Device) -> None:
    await ward.write(pb.ClientFrame(chunk=pb.Chunk(sha256=bytes(32), data=b"x", at=AT.to_wire())))


@pytest.mark.parametrize(
    "say", [_garbage, _gap, _repeat, _second_hello, _want_of_nothing, _chunk_without_offer]
)
def test_what_breaks_the_protocol_ends_its_own_stream(
    tmp_path: Path, say: Callable[[Device], Coroutine[None, None, None]]
) -> None:
    async def test() -> None:
        world = World()
        keys, others = world.enrol(7), world.enrol(8)
        async with (
            served(world, tmp_path) as (service, told, port),
            device(port, others, world.pinned) as good,
            device(port, keys, world.pinned) as ward,
        ):
            await good.hello()
            await told.next("connected")
            await ward.hello()
            await told.next("connected")
            await say(ward)
            await ward.refused("INVALID_ARGUMENT", "FRAME")
            client, problem = await told.next("lost")
            assert (client, problem.reason) == (7, Reason.FRAME)
            assert service.push(8, outcome())
            await good.read_body("outcome")

    run(test())


def test_a_frame_that_is_too_large_is_never_read(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        async with served(world, tmp_path) as (service, told, port), device(port, keys, world.pinned) as ward:
            await ward.hello()
            await told.next("connected")
            before = service.traffic.received
            await ward.call.write(bytes(MAX_FRAME + 1))
            code, _ = await ward.end()
            assert code == "RESOURCE_EXHAUSTED"
            await told.next("lost")
            assert service.traffic.received == before

    run(test())


def test_an_error_that_nobody_foresaw_has_a_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        async with served(world, tmp_path) as (_, told, port), device(port, keys, world.pinned) as ward:

            def fail(client: int, frame: pb.ClientFrame) -> None:
                raise RuntimeError("a bug")

            told.on_frame = fail
            await ward.hello()
            await ward.write(READY)
            hint = await ward.refused("INTERNAL", "BUG")
            number = hint.split(";")[0].removeprefix("incident ")
            (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
            assert number in record.getMessage()
            assert "client 7" in record.getMessage()
            assert "a bug" not in hint

    run(test())


@pytest.mark.parametrize("reason", [Reason.NOT_LEADER, Reason.BUG])
def test_a_handler_that_does_not_want_the_device(tmp_path: Path, reason: Reason) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        async with served(world, tmp_path) as (service, told, port), device(port, keys, world.pinned) as ward:

            def refuse(client: int) -> None:
                raise Problem(reason, "no") if reason is Reason.NOT_LEADER else KeyError(client)

            told.on_connected = refuse
            await ward.hello()
            await ward.refused("UNAVAILABLE" if reason is Reason.NOT_LEADER else "INTERNAL", reason)
            await told.next("connected")
            await told.next("lost")
            assert service.connected == frozenset()

    run(test())


def test_a_problem_with_work_is_its_outcome_and_leaves_the_stream_open(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        async with served(world, tmp_path) as (_, told, port), device(port, keys, world.pinned) as ward:

            def stale(client: int, frame: pb.ClientFrame) -> None:
                raise Problem(Reason.STALE_ROUND, "round 3 is over", phase="train")

            told.on_frame = stale
            await ward.hello()
            await ward.write(READY)
            said = await ward.read_body("outcome")
            assert (said.at, said.code, said.reason, said.phase) == (AT.to_wire(), 9, "STALE_ROUND", "train")
            told.on_frame = lambda _, __: None
            await ward.write(READY)
            await told.next("connected")
            await told.next("frame")
            await told.next("frame")

    run(test())


def test_a_newer_stream_supersedes(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        async with (
            served(world, tmp_path) as (service, told, port),
            device(port, keys, world.pinned) as first,
            device(port, keys, world.pinned) as second,
        ):
            await first.hello()
            await told.next("connected")
            await second.hello()
            await first.refused("ABORTED", "SUPERSEDED")
            client, problem = await told.next("lost")  # before the new one is connected
            assert (client, problem.reason) == (7, Reason.SUPERSEDED)
            await told.next("connected")
            assert service.push(7, outcome())
            await second.read_body("outcome")

    run(test())


def test_ten_streams_of_one_identity_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        async with served(world, tmp_path) as (service, told, port):
            wards = [Device(port, keys, world.pinned) for _ in range(10)]
            ends = [asyncio.create_task(_hello_and_end(ward)) for ward in wards]
            for _ in range(9):  # never two at a time
                await told.next("connected")
                assert (await told.next("lost"))[1].reason is Reason.SUPERSEDED
            await told.next("connected")
            assert service.connected == {7}
            await service.drain(0.0)
            reasons = sorted([await end for end in ends])
            assert reasons == ["DRAINING"] + 9 * ["SUPERSEDED"]
            for ward in wards:
                await ward.close()

    async def _hello_and_end(ward: Device) -> str:
        await ward.hello()
        while (frame := await ward.read()).WhichOneof("body") != "goodbye":
            pass
        return frame.goodbye.reason

    run(test())


def test_a_handler_that_takes_its_time_costs_no_stream(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        waits = WAITS._replace(heartbeat=0.1, lost=0.3)
        async with (
            served(world, tmp_path, waits=waits) as (service, told, port),
            device(port, keys, world.pinned) as ward,
        ):
            await ward.hello()
            busy = told.busy = asyncio.Event()
            await ward.write(READY)
            for _ in range(6):  # twice as long as a silent device is waited for
                nonce = (await ward.read()).ping.nonce
                await ward.write(pb.ClientFrame(pong=pb.Pong(nonce=nonce)))
            busy.set()
            assert [(await told.events.get())[0] for _ in range(2)] == ["connected", "frame"]
            service.push(7, outcome())
            await ward.read_body("outcome")

    run(test())


def test_revoked_stream_ends(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys, others = world.enrol(7), world.enrol(8)
        async with (
            served(world, tmp_path) as (service, told, port),
            device(port, keys, world.pinned) as ward,
            device(port, others, world.pinned) as good,
        ):
            await ward.hello()
            await good.hello()
            service.renew_roster(world.revoke(7))
            async with asyncio.timeout(5):
                await ward.refused("PERMISSION_DENIED", "REVOKED")
            assert (await good.read_body("offer")).kind == pb.ROSTER
            assert service.push(8, outcome())
            await good.read_body("outcome")
            assert service.roster.epoch == 2
            world.epoch = 1
            with pytest.raises(Exception, match="epoch 1"):
                service.renew_roster(world.document())
            assert service.roster.epoch == 2
            assert [(await told.events.get())[0] for _ in range(3)] == ["connected", "connected", "lost"]

    run(test())


def test_a_certificate_that_ends_meanwhile_gets_no_task(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        task = pb.Task(
            at=AT.to_wire(), work=pb.TRAIN, purpose="x", algorithm="fedavg", settings=b"{}",
            schema_sha256=bytes(32), model_sha256=bytes(32),
        )  # fmt: skip
        async with served(world, tmp_path) as (service, _, port), device(port, keys, world.pinned) as ward:
            await ward.hello()
            assert service.push(7, pb.ServerFrame(task=task))
            await ward.read_body("task")
            service._admission._wall = lambda: NOW + 40 * 86_400  # the clock goes on
            assert not service.push(7, pb.ServerFrame(task=task))
            assert "mycelia enrol" in await ward.refused("UNAUTHENTICATED", "CERT_EXPIRED")

    run(test())


def test_three_missed_heartbeats(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        waits = WAITS._replace(heartbeat=0.2, lost=0.6)
        async with (
            served(world, tmp_path, waits=waits) as (_, told, port),
            device(port, keys, world.pinned) as ward,
        ):
            await ward.hello()
            for _ in range(6):  # twice as long as it takes to be lost
                ping = (await ward.read()).ping
                await ward.write(pb.ClientFrame(pong=pb.Pong(nonce=ping.nonce)))
            assert ping.nonce == 6
            hint = await ward.refused("DEADLINE_EXCEEDED", "STALL")
            assert "heartbeats" in hint
            await told.next("connected")
            client, problem = await told.next("lost")
            assert (client, problem.reason) == (7, Reason.STALL)

    run(test())


# --- payloads -------------------------------------------------------------------------------------


def test_a_payload_to_a_device_goes_by_credit_and_pings_between_chunks(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        data = Random(1).randbytes(20 * LEAST_CHUNK)
        payload = Payload(data, chunk_size=LEAST_CHUNK)
        offer = payload.offer(pb.MODEL, AT, schema_sha256=bytes(32))
        async with served(world, tmp_path) as (service, told, port), device(port, keys, world.pinned) as ward:
            await ward.hello()
            await told.next("connected")
            assert service.send_payload(7, payload, offer)
            assert await ward.read_body("offer") == offer
            got = bytearray()
            for first in range(0, 20, CREDIT):
                count = min(CREDIT, 20 - first)
                missing = [pb.Range(first=first, count=count)]
                await ward.write(
                    pb.ClientFrame(want=pb.Want(sha256=offer.sha256, at=offer.at, missing=missing))
                )
                for _ in range(count):
                    got += (await ward.read_body("chunk")).data
            assert got == data
            await ward.write(pb.ClientFrame(want=pb.Want(sha256=offer.sha256, at=offer.at)))
            assert await told.next("delivered") == (7, offer)
            await ward.write(pb.ClientFrame(want=pb.Want(sha256=offer.sha256, at=offer.at)))  # once more
            await ward.write(READY)
            await told.next("frame")  # or it would end the transfer that follows
            service.push(7, outcome())
            await ward.read_body("outcome")
            missing = [pb.Range(first=0, count=CREDIT + 1)]
            service.send_payload(7, payload, offer)
            await ward.read_body("offer")
            await ward.write(pb.ClientFrame(want=pb.Want(sha256=offer.sha256, at=offer.at, missing=missing)))
            await ward.refused("INVALID_ARGUMENT", "FRAME")

    run(test())


def test_a_payload_from_a_device(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        data = Random(2).randbytes(20 * LEAST_CHUNK)
        payload = Payload(data, chunk_size=LEAST_CHUNK)
        outgoing = Outgoing(payload, payload.offer(pb.UPDATE, AT, schema_sha256=bytes(32)))
        async with served(world, tmp_path) as (_, told, port), device(port, keys, world.pinned) as ward:
            await ward.hello()
            await told.next("connected")
            told.refuses = Problem(Reason.STALE_MODEL, "another model", phase="train")
            await ward.write(pb.ClientFrame(offer=outgoing.offer))
            assert (await ward.read_body("outcome")).reason == "STALE_MODEL"
            told.refuses = None
            await ward.write(pb.ClientFrame(offer=outgoing.offer))
            while not outgoing.done:
                outgoing.want(await ward.read_body("want"))
                while (chunk := outgoing.next()) is not None:
                    await ward.write(pb.ClientFrame(chunk=chunk))
            assert await told.next("payload") == (7, data)

    run(test())


def test_a_device_that_stalls(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        payload = Payload(bytes(4 * LEAST_CHUNK), chunk_size=LEAST_CHUNK)
        waits = WAITS._replace(stall=0.4)
        async with (
            served(world, tmp_path, waits=waits) as (_, _, port),
            device(port, keys, world.pinned) as ward,
        ):
            await ward.hello()
            await ward.write(pb.ClientFrame(offer=payload.offer(pb.UPDATE, AT, schema_sha256=bytes(32))))
            await ward.read_body("want")
            assert "0 bytes" in await ward.refused("DEADLINE_EXCEEDED", "STALL")

    run(test())


def test_a_device_that_does_not_read(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        async with served(world, tmp_path) as (service, told, port), device(port, keys, world.pinned) as ward:
            await ward.hello()
            await told.next("connected")
            big = pb.ServerFrame(secagg=pb.SecAgg(at=AT.to_wire(), data=bytes(2**20)))
            for _ in range(64):
                service.push(7, big)
            client, problem = await told.next("lost")
            assert (client, problem.reason) == (7, Reason.STALL)

    run(test())


def test_a_device_that_reads_nothing_loses_its_stream_in_time(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        frame = pb.ServerFrame(secagg=pb.SecAgg(at=AT.to_wire(), data=bytes(30_000)))
        async with (
            served(world, tmp_path, waits=WAITS._replace(stall=0.2)) as (service, told, port),
            device(port, keys, world.pinned) as ward,
        ):
            await ward.hello()
            await told.next("connected")
            for _ in range(1000):
                service.push(7, frame)
            client, problem = await told.next("lost")
            assert (client, problem.reason) == (7, Reason.STALL)
            assert "does not read" in problem.found
            assert service.connected == frozenset()
            async with device(port, keys, world.pinned) as again:
                await again.hello()

    run(test())


# --- limits ---------------------------------------------------------------------------------------


def test_too_many_frames(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        limits = Limits(frames=2)
        async with served(world, tmp_path, limits=limits) as (_, told, port):
            async with device(port, keys, world.pinned) as ward:
                await ward.hello()
                await told.next("connected")
                for _ in range(25):
                    await ward.write(READY)
                await ward.refused("RESOURCE_EXHAUSTED", "RATE")
                assert ward.goodbye is not None
                assert ward.goodbye.delay_ms >= 1000
                for _ in range(20):
                    await told.next("frame")
            async with device(port, keys, world.pinned) as ward:  # a new stream is no new beginning
                await ward.hello()
                for _ in range(5):
                    await ward.write(READY)
                await ward.refused("RESOURCE_EXHAUSTED", "RATE")

    run(test())


def test_too_many_hellos_that_fail_close_an_address(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys, stranger = world.enrol(7), world.enrol(9)
        del world.clients[9]
        async with served(world, tmp_path, limits=Limits(address_failures=2)) as (_, _, port):
            for _ in range(2):
                async with device(port, stranger, world.pinned) as ward:
                    hello = stranger.say_hello(await ward.read_body("challenge"), (1, 1))
                    await ward.write(pb.ClientFrame(hello=hello))
                    await ward.refused("PERMISSION_DENIED", "NOT_ENROLLED")
            async with device(port, keys, world.pinned) as ward:
                assert "address_failures" in await ward.refused("RESOURCE_EXHAUSTED", "RATE")

    run(test())


def test_too_many_streams_of_an_address(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        one, other = world.enrol(7), world.enrol(8)
        async with (
            served(world, tmp_path, limits=Limits(address_streams=1)) as (_, told, port),
            device(port, one, world.pinned) as first,
        ):
            await first.hello()
            async with device(port, other, world.pinned) as second:
                await second.refused("RESOURCE_EXHAUSTED", "RATE")
            await told.next("connected")
            await first.close()
            await told.next("lost")
            async with device(port, other, world.pinned) as second:
                await second.hello()

    run(test())


# --- many, and the end ----------------------------------------------------------------------------


def test_a_hundred_devices_are_pushed_a_frame_each(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = [world.enrol(client) for client in range(1, 101)]
        async with served(world, tmp_path) as (service, told, port):
            wards = [Device(port, each, world.pinned) for each in keys]
            try:
                await asyncio.gather(*(ward.hello() for ward in wards))
                for _ in wards:
                    await told.next("connected")
                assert service.connected == frozenset(range(1, 101))
                for client in range(1, 101):
                    assert service.push(client, outcome(client))
                said = await asyncio.gather(*(ward.read_body("outcome") for ward in wards))
                assert [each.phase for each in said] == [str(client) for client in range(1, 101)]
            finally:
                await asyncio.gather(*(ward.close() for ward in wards))

    run(test())


def test_drain_says_when_to_come_again(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = [world.enrol(client) for client in (1, 2, 3)]
        async with served(world, tmp_path) as (service, told, port):
            wards = [Device(port, each, world.pinned) for each in keys]
            for ward in wards:
                await ward.hello()
                await told.next("connected")
            ends = [asyncio.create_task(ward.refused("UNAVAILABLE", "DRAINING")) for ward in wards]
            async with asyncio.timeout(10):
                await service.drain(20.0)
            await asyncio.gather(*ends)
            delays = [ward.goodbye.delay_ms for ward in wards if ward.goodbye]
            assert delays == [20_000, 20_005, 20_010]  # 200 a second
            assert service.connected == frozenset()
            for _ in wards:
                assert (await told.next("lost"))[1].reason == Reason.DRAINING
            async with device(port, keys[0], world.pinned) as late:
                assert (await late.end())[0] == "UNAVAILABLE"
            for ward in wards:
                await ward.close()

    run(test())


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        async with served(world, tmp_path / "one") as (_, _, port):
            with pytest.raises(ConfigError, match="cannot be bound"):
                async with served(world, tmp_path / "other", listen=f"127.0.0.1:{port}"):
                    pass

    run(test())


# --- without TLS ----------------------------------------------------------------------------------


def test_plaintext_port_refuses_secure_sum(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match="loopback"):
            async with served(World(), tmp_path, insecure=True, listen="0.0.0.0:0"):
                pass

    run(test())


def test_plain_text_still_wants_the_identity_key(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        async with served(world, tmp_path, insecure=True) as (_, told, port):
            async with device(port, keys, None) as ward:  # signs its certificate, which nobody shows here
                await ward.write(
                    pb.ClientFrame(hello=keys.say_hello(await ward.read_body("challenge"), (1, 1)))
                )
                await ward.refused("UNAUTHENTICATED", "BAD_HELLO")
            assert told.events.empty()

    run(test())


def test_another_method_is_unknown(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        async with served(world, tmp_path) as (_, _, port):
            pair = keys.tls_key_pem, keys.certificate_pem
            credentials = grpc.ssl_channel_credentials(world.pinned.pem, *pair)
            async with aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
                call = channel.stream_stream(METHOD.replace("Connect", "Other"), None, None)(None)
                with pytest.raises(aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED

    run(test())


def test_a_compressed_frame_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        keys = world.enrol(7)
        async with served(world, tmp_path) as (_, told, port):
            pair = keys.tls_key_pem, keys.certificate_pem
            credentials = grpc.ssl_channel_credentials(world.pinned.pem, *pair)
            channel = aio.secure_channel(f"127.0.0.1:{port}", credentials, compression=grpc.Compression.Gzip)
            async with channel:
                call = channel.stream_stream(METHOD, None, None)(None)
                with pytest.raises(aio.AioRpcError) as caught:
                    await call.read()
                assert "gzip" in (caught.value.details() or "")
            assert told.events.empty()

    run(test())
