"""kill -9 of the server at random points, and of devices: the model is that of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.chaos import records
from tests.e2e.chaos.federation import Federation
from tests.e2e.chaos.processes import Place, Processes, ended, ready

WHOLE = {"round": "{ budget_s = 60, over_select = 1.0, quorum = 1.0, max_failed_rounds = 500 }"}
DEVICES = 3
_MOST_RECORDS = 11  # of a round there are nine

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("captured_once")]


def report(name: str, seconds: list[float]) -> None:
    middle, most = statistics.median(seconds), max(seconds)
    print(f"{name}: serving again after {middle:.2f} s in the middle, {most:.2f} s at most")


@pytest.mark.parametrize(
    ("kills", "rounds"), [(4, 5), pytest.param(50, 45, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_the_server_at_random_records(kills: int, rounds: int, processes: Processes, tmp_path: Path) -> None:
    """Before or after a record that is drawn; devices are killed between, each of them at least once."""
    federation = Federation(tmp_path, devices=DEVICES, rounds=rounds, settings=WHOLE)
    place, dice = Place(federation.server_toml, tmp_path / "server.log"), random.Random(kills)
    logs = {client: tmp_path / f"client-{client}.log" for client in federation.clients}
    again: list[float] = []

    async def go() -> None:
        def take_part(client: int) -> None:
            devices[client] = processes.take_part(federation.client_toml(client), logs[client])

        devices = {}
        for client in federation.clients:
            take_part(client)
        for kill in range(kills):
            after, before = dice.randint(1, _MOST_RECORDS), dice.random() < 0.5
            began = time.monotonic()
            server = processes.serve(replace(place, kill_after=after, kill_before=before))
            if kill:
                await ready(place, server)
                again.append(time.monotonic() - began)
            code = await ended(server, 120)
            if code == 0:
                return  # the run was over before the record came
            assert code == -9, f"kill {kill}: {code}\n{place.log.read_text()[-4000:]}"
            if kill < DEVICES or dice.random() < 0.2:
                client = kill % DEVICES + 1
                devices[client].kill()
                await ended(devices[client], 10)
                take_part(client)
        assert await ended(processes.serve(place), 240) == 0, place.log.read_text()[-4000:]
        for client, device in devices.items():
            if await ended(device, 5) is None:
                device.terminate()
            assert await ended(device, 10) == 0, logs[client].read_text()[-4000:]

    asyncio.run(go())
    found = json.loads(place.result.read_text())
    left = records.read(tmp_path)
    records.check(left)
    records.check_logs([place.log, *logs.values()])
    assert found["model_sha256"] == federation.undisturbed, left
    assert left.survivors == [tuple(federation.clients)] * rounds
    # A round is begun again only where it had failed, never because of the kill of a server.
    assert sum(left.opened.values()) == rounds + len(left.failed), left
    report("server", again)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_installed_commands(processes: Processes, tmp_path: Path) -> None:
    """`mycelia serve` and `mycelia client`, killed at random times; how long a start takes is told."""
    kills, rounds = 10, 6
    federation = Federation(tmp_path, devices=DEVICES, rounds=rounds, settings=WHOLE)
    dice, log = random.Random(1), tmp_path / "server.log"
    logs = {client: tmp_path / f"client-{client}.log" for client in federation.clients}
    again: list[float] = []

    async def go() -> None:
        for client in federation.clients:
            words = ("client", "--config", str(federation.client_toml(client)), "--once")
            processes.command(*words, folder=tmp_path, log=logs[client])
        for kill in range(kills + 1):
            began = time.monotonic()
            words = ("serve", "--config", str(federation.server_toml), "--format", "json")
            server = processes.command(*words, folder=tmp_path, log=log)
            async with asyncio.timeout(120):
                while not _answers(federation.port):
                    assert server.poll() in (None, 0), log.read_text()[-4000:]
                    if server.poll() == 0:
                        return
                    await asyncio.sleep(0.02)
            again.append(time.monotonic() - began)
            code = await ended(server, dice.uniform(0.0, 3.0) if kill < kills else 240)
            if code is None:
                server.kill()
                await ended(server, 10)
            else:
                assert code == 0, log.read_text()[-4000:]
                return

    asyncio.run(go())
    left = records.read(tmp_path)
    records.check(left)
    assert left.survivors == [tuple(federation.clients)] * rounds, left
    assert federation.undisturbed in log.read_text()
    report("mycelia serve", again)
    assert statistics.median(again) < 60  # aimed at are 5 on a machine that does nothing else


def _answers(port: int) -> bool:
    with socket.socket() as one:
        one.settimeout(1.0)
        return one.connect_ex(("127.0.0.1", port)) == 0
