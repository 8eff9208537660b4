"""A run under chaos: a server and devices that are killed, and a network between them that is no good."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.e2e.chaos import records
from tests.e2e.chaos.federation import Federation
from tests.e2e.chaos.network import BadNetwork
from tests.e2e.chaos.processes import Place, Processes, ended, ready


@dataclass
class Chaos:
    """One run.

    Attributes:
        federation: its files.
        processes: in which it is done.
        seed: of everything that is drawn.
        unruly: whether frames come twice and in another order.
        kills: how often the server, or a device, is killed.
        every_s: mean time between two kills.
        network: whether it is bad.
        slow_s: how long a device takes to build its model.
    """

    federation: Federation
    processes: Processes
    seed: int
    unruly: bool = True
    kills: int = 0
    every_s: float = 1.5
    network: bool = True
    slow_s: float = 0.0
    killed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        folder = self.federation.folder
        self.place = Place(self.federation.server_toml, folder / "server.log")
        self.devices: dict[int, BaseProcess] = {}
        self.networks = {
            client: BadNetwork(self.federation.port, random.Random(f"{self.seed} {client}"))
            for client in self.federation.clients
        }

    def log(self, client: int) -> Path:
        return self.federation.folder / f"client-{client}.log"

    def start_device(self, client: int) -> None:
        seed = self.dice.randrange(2**32) if self.unruly else None
        toml = self.federation.client_toml(client)
        self.devices[client] = self.processes.take_part(toml, self.log(client), seed, slow_s=self.slow_s)

    async def run(self, seconds: float) -> dict[str, Any]:
        """To its end; what the server says of it."""
        for client, network in self.networks.items():
            network.bad = self.network
            self.federation.point_at(await network.start(), [client])
        try:
            self.server = self.processes.serve(self.place)
            await ready(self.place, self.server)  # the first one takes as long as its imports
            async with asyncio.timeout(seconds):
                for client in self.federation.clients:
                    self.start_device(client)
                await self._until_over()
                await self._devices_end()
        except TimeoutError:
            raise AssertionError(f"{self}: it hangs\n{self.tail()}") from None
        finally:
            for network in self.networks.values():
                await network.close()
        found: dict[str, Any] = json.loads(self.place.result.read_text())
        return found

    async def _until_over(self) -> None:
        while True:
            wait = self.dice.uniform(0.2, 2 * self.every_s) if len(self.killed) < self.kills else 3600.0
            code = await self._server_or_device_ended(wait)
            if code is not None:
                assert code == 0, f"{self}: the server ended with {code}\n{self.tail()}"
                return
            if len(self.killed) < self.kills:
                await self._kill()

    async def _server_or_device_ended(self, wait: float) -> int | None:
        """Devices may end by themselves when the run is over, and not before."""
        code = await ended(self.server, wait)
        for client, process in self.devices.items():
            assert process.exitcode in (None, 0, -9), (
                f"{self}: device {client}\n{self.tail(self.log(client))}"
            )
        return code

    async def _kill(self) -> None:
        """Server or device, as it is drawn; and again."""
        down = self.dice.uniform(0.0, 1.0)
        if self.dice.random() < 0.5:
            self.killed.append("server")
            self.server.kill()
            if await ended(self.server, 10) == 0:
                return  # it was over just then
            await asyncio.sleep(down)
            self.server = self.processes.serve(self.place)
            return
        client = self.dice.choice(list(self.devices))
        self.killed.append(f"device {client}")
        self.devices[client].kill()
        await ended(self.devices[client], 10)
        await asyncio.sleep(down)
        self.start_device(client)

    async def _devices_end(self) -> None:
        """With the run, or when they are told to."""
        for network in self.networks.values():
            network.bad = False
        for client, process in self.devices.items():
            if await ended(process, 0.5) is None:
                process.terminate()
            code = await ended(process, 10)
            assert code == 0, f"{self}: device {client} ended with {code}\n{self.tail(self.log(client))}"

    def check(self, found: dict[str, Any]) -> records.Records:
        """The model is that of the devices that the records name, and nothing unexpected was said."""
        left = records.read(self.federation.folder)
        facts = f"{self}, killed {self.killed}, {left.failed}, survivors {left.survivors}"
        records.check(left)
        records.check_logs([self.place.log, *map(self.log, self.federation.clients)])
        expected = self.federation.expected(left.survivors)
        assert found["model_sha256"] == expected, facts
        assert found["accepted"] == sum(map(len, left.survivors)), (facts, found)
        assert found["accepted"] > 0, facts
        return left

    def tail(self, path: Path | None = None) -> str:
        """The end of a log, for people."""
        path = path or self.place.log
        return path.read_text(errors="replace")[-6000:] if path.exists() else ""

    def __str__(self) -> str:
        return f"chaos with seed {self.seed}"
