"""The aggregation server under load: devices that do not train, over TLS on this machine.

    python benchmarks/server.py [--cases grpc,overhead,updates,ingest,connected,memory,reconnect,resume]

Prints one JSON object. The server runs in this process, the devices in a second one, which also watches the
server's memory. Every device has keys of its own and sends one shared payload; what it costs is the protocol:
frames, hashes, signatures, the spool, the sum, the log with its syncs, the merge.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

NOW = int(time.time())
DAY = 86_400


class Member(NamedTuple):
    """Keys of a device, as bytes."""

    client: int
    tls_pem: bytes
    identity: bytes
    certificate: bytes


class Case(NamedTuple):
    """One load.

    Attributes:
        devices: that connect.
        cohort: of a round.
        rounds: one after the other.
        parameters: of the model, float32.
        budget_s: of a round.
    """

    devices: int
    cohort: int
    rounds: int
    parameters: int
    budget_s: float = 120.0


CASES = {
    "overhead": Case(100, 100, 20, 1_000),
    "updates": Case(500, 500, 4, 25_000),
    "ingest": Case(20, 20, 3, 10_000_000),
    "connected": Case(2_000, 50, 3, 25_000, 200.0),
    "memory": Case(10, 10, 1, 268_000_000, 1800.0),
    "memory-50": Case(50, 50, 1, 268_000_000, 3600.0),
    "reconnect": Case(2_000, 50, 1, 25_000, 60.0),
    "resume": Case(1, 1, 1, 268_000_000, 1200.0),
}


class World:
    """An operator, a server and devices, made in memory."""

    def __init__(self, devices: int) -> None:
        from mycelia.aggregator.identity import ServerKeys
        from mycelia.aggregator.identity_certificates import (
            client_certificate,
            operator_certificate,
            server_certificate,
        )
        from mycelia.privacy.secagg.certificates import Certificate, Operator, tls_sha256
        from mycelia.privacy.secagg.keys import Identity
        from mycelia.privacy.secagg.private_keys import certificate_pem, new_tls_key, tls_pem
        from mycelia.privacy.secagg.roster import ClientEntry, Issuer, Roster, ServerEntry

        operator, since, until = Identity.generate(), NOW - DAY, NOW + 30 * DAY
        self.operator = operator_certificate(operator, since, until + 300 * DAY)
        pinned = Operator.read(self.operator)
        tls, identity = new_tls_key(), Identity.generate()
        der = server_certificate(
            operator, "agg-1", tls.public_key(), ["localhost"], [ip_address("127.0.0.1")], since, until
        )
        server = ServerEntry("agg-1", identity.public, since, until, tls_sha256(tls.public_key()))
        certificate = Certificate.read(der, operator.public)
        self.keys = ServerKeys("agg-1", certificate, pinned, identity, tls_pem(tls), certificate_pem(der))
        entries, self.members = [], []
        for client in range(1, devices + 1):
            tls, secret = new_tls_key(), os.urandom(32)
            identity = Identity(secret)
            der = client_certificate(operator, client, tls.public_key(), since, until)
            entries.append(
                ClientEntry(
                    client, identity.public, Issuer.OFFLINE, since, until, "", tls_sha256(tls.public_key())
                )
            )
            self.members.append(Member(client, tls_pem(tls), secret, der))
        self.roster = Roster(1, until, tuple(entries), (server,), ()).sign(operator)


# --- devices --------------------------------------------------------------------------------------


class Keys:
    """What a connection needs of an identity folder, in memory."""

    def __init__(self, member: Member, operator: Any, roster: Any) -> None:
        from mycelia.client.identity import DeviceKeys
        from mycelia.privacy.secagg.certificates import Certificate
        from mycelia.privacy.secagg.keys import Identity
        from mycelia.privacy.secagg.private_keys import certificate_pem

        certificate = Certificate.read(member.certificate, operator.key)
        identity = Identity(member.identity)
        self.client, self.operator, self._roster = member.client, operator, roster
        pem = certificate_pem(member.certificate)
        self.keys = (DeviceKeys(1, certificate, identity, member.tls_pem, pem),)

    def check(self, now: int) -> Any:
        return self.keys[0]

    def see_roster(self, document: bytes, now: int) -> Any:
        return self._roster

    def settle(self, keys: Any) -> None:
        """There is one generation."""


class Devices:
    """All devices of a case, in one event loop.

    Where everybody is in every round, nobody sends before all have the model: then it is known how long the
    updates alone take.
    """

    def __init__(self, world: dict[str, Any], port: int) -> None:
        from mycelia.privacy.secagg.certificates import Operator
        from mycelia.privacy.secagg.roster import Roster

        self.operator = Operator.read(world["operator"])
        self.roster = Roster.load(world["roster"], self.operator.key, now=NOW, least_epoch=1)
        self.members, self.port = world["members"], port
        self.together = len(self.members) if world["together"] else 1
        self.ready: dict[Any, list[Callable[[], None]]] = {}
        self.payloads: dict[bytes, Any] = {}
        self.connected: set[int] = set()
        self.times: list[float] = []
        self.sending: list[float] = []
        self.lost = self.done = 0

    async def run(self, tell: Callable[[Any], None]) -> None:
        self.tell = tell
        tasks = [asyncio.create_task(self._device(member)) for member in self.members]
        await asyncio.gather(*tasks)

    async def _device(self, member: Member) -> None:
        from mycelia.aggregator.wire import federation_pb2 as pb
        from mycelia.aggregator.wire.position import Position
        from mycelia.client.transport import Came, Connected, Lost, Place, Received, Transport

        keys = Keys(member, self.operator, self.roster)

        def place(offer: Any, manifest: Any) -> Place:
            return Place(_Discard(offer))

        transport = Transport([f"127.0.0.1:{self.port}"], keys, place)  # type: ignore[arg-type]
        tasks: dict[Position, Any] = {}
        async with transport:
            async for event in transport:
                match event:
                    case Connected():
                        self.connected.add(member.client)
                        self.times.append(time.monotonic())
                        if len(self.connected) == len(self.members):
                            self.tell(("connected", self.times[-1]))
                    case Lost():
                        self.connected.discard(member.client)
                        self.lost += 1
                    case Came(frame) if frame.HasField("task"):
                        at = Position.of(frame.task.at)
                        tasks[at] = frame.task
                        if frame.task.work != pb.DELIVER:
                            transport.send(pb.ClientFrame(ready=pb.Ready(at=at.to_wire())))
                    case Came(frame) if frame.HasField("outcome"):
                        transport.forget(Position.of(frame.outcome.at))
                    case Received(offer, _) if offer.kind == pb.MODEL:
                        at = Position.of(offer.at)
                        if tasks[at].work == pb.DELIVER:
                            transport.send(pb.ClientFrame(ready=pb.Ready(at=at.to_wire())))
                            return
                        ready = self.ready.setdefault(at, [])
                        ready.append(partial(self._answer, transport, keys, at, offer))
                        if len(ready) == self.together:
                            self.sending.append(time.monotonic())
                            for answer in self.ready.pop(at):
                                answer()
                    case _:
                        pass

    def _answer(self, transport: Any, keys: Keys, at: Any, offer: Any) -> None:
        """The model as it came is the update: nothing moves."""
        from mycelia.aggregator.wire import federation_pb2 as pb
        from mycelia.aggregator.wire.offers import Payload
        from mycelia.aggregator.wire.update_header import UpdateHeader

        payload = self.payloads.get(offer.sha256)
        if payload is None:
            kept = _Discard.kept[offer.sha256]
            payload = self.payloads[offer.sha256] = Payload(kept, whole=offer.sha256)
        numbers = {"loss_sum": 1.0, "examples": 1.0, "steps": 1.0}
        header = UpdateHeader(keys.client, at, payload.sha256, offer.sha256, {"params": 1.0}, numbers, 1, 1)
        data, signature = header.sign(keys.keys[0].identity)
        transport.send_payload(
            payload,
            payload.offer(pb.UPDATE, at, schema_sha256=offer.schema_sha256, header=data, signature=signature),
        )


class _Discard:
    """Where a model goes that the first device keeps for all."""

    kept: ClassVar[dict[bytes, bytearray]] = {}

    def __init__(self, offer: Any) -> None:
        if offer.sha256 not in self.kept:
            self.kept[offer.sha256] = bytearray(offer.size)
        self.data = self.kept[offer.sha256]

    def write(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data

    def read(self, offset: int, size: int) -> Any:
        return memoryview(self.data)[offset : offset + size]


def load(world: dict[str, Any], port: int, server: int, pipe: Connection) -> None:
    """The second process: devices, and an eye on the server's memory."""
    os.environ["GRPC_VERBOSITY"] = "NONE"
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    peak, stop = [anonymous(server)] * 2, threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            try:
                peak[1] = max(peak[1], anonymous(server))
            except OSError:
                return

    threading.Thread(target=watch, daemon=True).start()
    devices = Devices(world, port)
    asyncio.run(devices.run(pipe.send))
    stop.set()
    said = {
        "idle": peak[0], "peak": peak[1], "lost": devices.lost,
        "times": devices.times, "sending": devices.sending,
    }  # fmt: skip
    pipe.send(("over", said))


def anonymous(process: int) -> int:
    """Bytes of a process that no file lies behind."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    raise OSError("no RssAnon")


# --- the server -----------------------------------------------------------------------------------


def plan(case: Case) -> Any:
    import torch

    from mycelia.aggregator.config import FederationConfig
    from mycelia.aggregator.runs.plans import Population, plan_run
    from mycelia.engine.config import load_config
    from mycelia.engine.recipe import Recipe

    example = (torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64))
    model = "server:flat"  # this file, by the name that every process imports it by
    recipe = Recipe(model, {"size": case.parameters}, "cross-entropy", (1,), 2, example)
    config = load_config(
        FederationConfig,
        {
            "model": "mlp", "data": "none", "algorithm": "fedavg",
            "rounds": case.rounds, "cohort": case.cohort,
            "round": {"budget_s": case.budget_s, "quorum": 0.5}, "update": {"max_weight": 4.0},
            "evaluation": {"clients": 0, "every": 0},
        },
    )  # fmt: skip
    return plan_run(config, recipe, name="load", purpose="load", population=Population(case.devices, 4))


def flat(input_shape: tuple[int, ...], classes: int, *, size: int) -> Any:
    """A model of one long vector."""
    from torch import nn

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, size, bias=False)

        def forward(self, x: Any) -> Any:
            return self.inner(x)[:, :2]

    return Flat()


async def serve(case: Case, made: Any, world: World, folder: Path) -> dict[str, Any]:
    from mycelia.aggregator.limits import Limits
    from mycelia.aggregator.runs.server import Places, Server, Work

    places = Places(f"sqlite:///{folder}/mycelia.db", folder / "blobs", folder / "own")
    limits = Limits(streams=5000, address_streams=5000, address_handshakes=200.0)
    server = Server(world.keys, world.roster, [Work(made, folder / "run")], places, limits=limits)
    late = [0.0]
    rounds: list[float] = []
    ends: list[float] = []
    port = await server.start("127.0.0.1:0")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    facts = {"operator": world.operator, "roster": world.roster, "members": world.members}
    facts["together"] = case.cohort == case.devices
    process = context.Process(target=load, args=(facts, port, os.getpid(), theirs), daemon=True)
    began = time.monotonic()
    process.start()
    beating = asyncio.create_task(beat(late))
    told = server.board.round_ended

    def ended(run: str, round: int, **more: Any) -> None:
        rounds.append(more["seconds"])
        ends.append(time.monotonic())
        told(run, round, **more)

    server.board.round_ended = ended  # type: ignore[method-assign]
    everybody = await server.floor.wait_until(lambda: len(server.floor.here) >= case.devices, 300.0)
    connected, cpu = anonymous(os.getpid()), time.process_time()
    results = await server.run()
    cpu = time.process_time() - cpu
    said: dict[str, Any] = {}
    while "over" not in said:
        kind, what = await asyncio.to_thread(ours.recv)
        said[kind] = what
    beating.cancel()
    await server.stop(0.1)
    process.join(10)
    over = said["over"]
    traffic = server.service.traffic
    times = sorted(over["times"])
    steady = rounds[1:] or rounds
    uploads = [end - began for began, end in zip(over["sending"], ends, strict=False)]
    alone = uploads[1:] or uploads
    return {
        "devices": case.devices,
        "all_connected": everybody,
        "cohort": case.cohort,
        "update_bytes": 4 * case.parameters,
        "rounds": results["load"].rounds,
        "accepted": results["load"].accepted,
        "connected_s": said["connected"] - began if "connected" in said else None,
        "handshakes_per_s": most_per_second(times),
        "round_ms": 1000 * sum(steady) / len(steady),
        "rounds_ms": [round(1000 * each, 1) for each in rounds],
        "updates_per_s": case.cohort * len(steady) / sum(steady),
        "model_and_updates_mb_per_s": 4e-6 * case.parameters * 2 * case.cohort * len(steady) / sum(steady),
        "updates_alone_per_s": case.cohort * len(alone) / sum(alone) if facts["together"] else None,
        "ingest_mb_per_s": 4e-6 * case.parameters * case.cohort * len(alone) / sum(alone)
        if facts["together"]
        else None,
        "loop_late_ms": 1000 * late[0],
        "idle_mb": over["idle"] / 1e6,
        "peak_over_idle_mb": (over["peak"] - over["idle"]) / 1e6,
        "connections_mb": (connected - over["idle"]) / 1e6,
        "peak_over_connected_mb": (over["peak"] - connected) / 1e6,
        "peak_over_model": (over["peak"] - over["idle"]) / (4 * case.parameters),
        "server_cpu_ms_per_round": 1000 * cpu / max(1, len(rounds)),
        "lost": over["lost"],
        "received_mb": traffic.received / 1e6,
    }


# --- gRPC alone -----------------------------------------------------------------------------------


async def exchanges(world: World, streams: int, size: int, rounds: int) -> dict[str, Any]:
    """What gRPC's Python takes on this machine to send so many bytes to every device and as many back."""
    import grpc
    from grpc import aio

    from mycelia.privacy.secagg.certificates import Operator
    from mycelia.privacy.secagg.private_keys import certificate_pem

    boxes: list[asyncio.Queue[bytes | None]] = []
    came: asyncio.Queue[int] = asyncio.Queue()
    everybody = asyncio.Event()

    async def connect(_: object, context: Any) -> None:
        box: asyncio.Queue[bytes | None] = asyncio.Queue()
        boxes.append(box)
        if len(boxes) == streams:
            everybody.set()
        while (data := await box.get()) is not None:
            await context.write(data)
            came.put_nowait(len(await context.read()))

    keys, member = world.keys, world.members[0]
    handler = grpc.stream_stream_rpc_method_handler(connect)
    server = aio.server(handlers=[grpc.method_handlers_generic_handler("floor", {"Connect": handler})])
    pem = Operator.read(world.operator).pem
    pair = (keys.tls_key_pem, keys.certificate_pem)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair], pem, True))
    await server.start()
    own = (pem, member.tls_pem, certificate_pem(member.certificate))
    process = multiprocessing.get_context("spawn").Process(
        target=answer, args=(port, own, streams, size), daemon=True
    )
    process.start()
    await everybody.wait()
    data, times = os.urandom(size), []
    for _ in range(rounds):
        began = time.monotonic()
        for box in boxes:
            box.put_nowait(data)
        for _ in boxes:
            await came.get()
        times.append(time.monotonic() - began)
    for box in boxes:
        box.put_nowait(None)
    await server.stop(1.0)
    process.join(10)
    steady = times[1:]
    return {"streams": streams, "bytes": size, "round_ms": 1000 * sum(steady) / len(steady)}


def answer(port: int, own: tuple[bytes, bytes, bytes], streams: int, size: int) -> None:
    """The second process: as many streams, each of which answers what comes with as many bytes."""
    import grpc
    from grpc import aio

    async def one() -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with aio.secure_channel(
            f"127.0.0.1:{port}", grpc.ssl_channel_credentials(*own), options
        ) as channel:
            call: Any = channel.stream_stream("/floor/Connect", None, None)(None)
            while await call.read() is not aio.EOF:
                await call.write(bytes(size))

    async def everything() -> None:
        await asyncio.gather(*(one() for _ in range(streams)))

    asyncio.run(everything())


async def beat(late: list[float]) -> None:
    """How long the loop is busy at a time; heartbeats wait for it."""
    while True:
        due = time.monotonic() + 0.05
        await asyncio.sleep(0.05)
        late[0] = max(late[0], time.monotonic() - due)


def most_per_second(times: list[float]) -> int:
    """The most connections in any second."""
    most = first = 0
    for last, moment in enumerate(times):
        while moment - times[first] > 1.0:
            first += 1
        most = max(most, last - first + 1)
    return most


def measured(name: str) -> dict[str, Any]:
    import logging

    import torch

    from mycelia.engine.heap import share_heap

    share_heap()  # as `mycelia serve` does
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if name == "grpc":
        world = World(1)
        small, large = exchanges(world, 100, 4_300, 20), exchanges(world, 100, 100_300, 20)
        return {"of_4_kb": asyncio.run(small), "of_100_kb": asyncio.run(large)}
    case = CASES[name]
    folder = Path(tempfile.mkdtemp(prefix="mycelia-load-"))
    try:
        return asyncio.run(serve(case, plan(case), World(case.devices), folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="grpc,overhead,updates,ingest,connected,memory")
    wanted = parser.parse_args().cases.split(",")
    if unknown := set(wanted) - {"grpc", *CASES}:
        raise SystemExit(f"unknown cases {', '.join(sorted(unknown))}; there are grpc, {', '.join(CASES)}")
    found: dict[str, Any] = {"machine": {"cores": os.cpu_count(), "python": sys.version.split()[0]}}
    for name in wanted:
        print(name, file=sys.stderr)
        found[name] = measured(name)
        print(json.dumps(found[name]), file=sys.stderr)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
