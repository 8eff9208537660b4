"""Large payloads whose connection is cut near their end, and many devices that come back at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mycelia.aggregator.service import Service
from mycelia.aggregator.spool import Spool
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import MAX_CHUNK
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.position import Position
from mycelia.client.identity import DeviceIdentity
from mycelia.client.places import Places
from mycelia.client.transport import Connected, Lost, Received, Sent, Transport
from tests.aggregator.connections import WAITS, Proxy, Recorder, World
from tests.e2e.chaos.federation import Federation
from tests.e2e.chaos.processes import Place, Processes, ended, ready

AT = Position("study", 3, 0)
SENT_AGAIN = 0.06
SIZES = [
    pytest.param(2**26, 2**18, id="64-MiB"),
    pytest.param(2**30, MAX_CHUNK, id="1-GiB", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
]

pytestmark = pytest.mark.e2e


def payload_of(path: Path, size: int, chunk_size: int) -> Payload:
    with path.open("wb") as file:
        for part in range(size // 2**24):
            file.write(np.random.default_rng(part).bytes(2**24))
    return Payload.open(path, chunk_size=chunk_size)


@asynccontextmanager
async def line(folder: Path, size: int) -> AsyncIterator[tuple[Service, Recorder, Proxy, Transport]]:
    """A server, a device, and a proxy between them that can cut."""
    world, told = World(), _Silent()
    with world.enrol_folder(7, folder / "device") as identity:
        spool = Spool(folder / "spool", quota=2 * size, stall_s=WAITS.stall)
        service = Service(world.keys, world.document(), told, spool, WAITS)
        proxy = Proxy(await service.start("127.0.0.1:0"))
        places = Places(folder / "incoming")
        try:
            near = await proxy.start()
            async with Transport([f"127.0.0.1:{near}"], identity, places) as transport:
                yield service, told, proxy, transport
        finally:
            await proxy.close()
            await service.drain(0.0)
            spool.close()
            places.close()


class _Silent(Recorder):
    """Tells of a payload by its hash alone; a gigabyte is not kept."""

    async def payload(self, client: int, payload: Any) -> None:
        self.events.put_nowait(("payload", client, payload.manifest.sha256))


@pytest.mark.parametrize(("size", "chunk_size"), SIZES)
def test_to_the_server(size: int, chunk_size: int, tmp_path: Path) -> None:
    payload = payload_of(tmp_path / "payload", size, chunk_size)
    offer = payload.offer(pb.UPDATE, AT, schema_sha256=bytes(32))

    async def test() -> None:
        async with line(tmp_path, size) as (_, told, proxy, transport), asyncio.timeout(600):
            proxy.cut_up = 95 * size // 100
            transport.send_payload(payload, offer)
            lost = 0
            async for event in transport:
                lost += isinstance(event, Lost)
                if isinstance(event, Sent):
                    break
            assert lost == 1
            seen = [told.events.get_nowait() for _ in range(told.events.qsize())]
            assert [what for kind, _, what in seen if kind == "payload"] == [payload.sha256]
            assert proxy.up - size <= SENT_AGAIN * size, (proxy.up - size) / size
            print(f"sent again, up: {100 * (proxy.up - size) / size:.2f} %")

    asyncio.run(test())


@pytest.mark.parametrize(("size", "chunk_size"), SIZES)
def test_to_the_device(size: int, chunk_size: int, tmp_path: Path) -> None:
    payload = payload_of(tmp_path / "payload", size, chunk_size)
    offer = payload.offer(pb.MODEL, AT, schema_sha256=bytes(32))

    async def test() -> None:
        async with line(tmp_path, size) as (service, told, proxy, transport), asyncio.timeout(600):
            told.on_connected = lambda client: service.send_payload(client, payload, offer) and None
            proxy.cut_down = 95 * size // 100
            lost = 0
            async for event in transport:
                lost += isinstance(event, Lost)
                if isinstance(event, Received):
                    break
            assert lost == 1
            assert bytes(event.sink.read(size - 2**20, 2**20)) == bytes(payload.data[-(2**20) :])
            assert proxy.down - size <= SENT_AGAIN * size, (proxy.down - size) / size
            print(f"sent again, down: {100 * (proxy.down - size) / size:.2f} %")

    asyncio.run(test())


def test_a_hundred_devices_come_back(processes: Processes, tmp_path: Path) -> None:
    """The server is killed and started again, and nobody is left behind."""
    devices = 100
    settings = {"round": "{ budget_s = 30, over_select = 1.0, quorum = 1.0 }"}
    federation = Federation(tmp_path, devices=devices + 1, rounds=1, settings=settings)  # one never comes
    place = Place(federation.server_toml, tmp_path / "server.log")

    async def test() -> None:
        here: set[int] = set()

        async def follow(transport: Transport, client: int) -> None:
            async for event in transport:
                if isinstance(event, Connected):
                    here.add(client)
                elif isinstance(event, Lost):
                    here.discard(client)

        async def everybody(count: int) -> None:
            async with asyncio.timeout(120):
                while len(here) != count:
                    await asyncio.sleep(0.05)

        server = processes.serve(place)
        await ready(place, server)
        async with AsyncExitStack() as stack:
            tasks = []
            for client in range(1, devices + 1):
                identity = stack.enter_context(DeviceIdentity.open(tmp_path / f"identity-{client}"))
                places = Places(tmp_path / f"incoming-{client}")
                stack.callback(places.close)
                made = Transport([f"127.0.0.1:{federation.port}"], identity, places)
                transport = await stack.enter_async_context(made)
                tasks.append(asyncio.create_task(follow(transport, client)))
            await everybody(devices)
            server.kill()
            await ended(server, 10)
            await everybody(0)
            await ready(place, processes.serve(place))
            await everybody(devices)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(test())
