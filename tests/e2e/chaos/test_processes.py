"""Real processes, real TLS, a bad network: the run ends, and its model is that of the devices it names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mycelia.client.backoff import Then
from mycelia.client.diagnosis import diagnose
from tests.aggregator.connections import World
from tests.e2e.chaos.federation import MASKS, Federation, free_port
from tests.e2e.chaos.processes import Processes, started
from tests.e2e.chaos.world import Chaos

WHOLE = {"round": "{ budget_s = 30, over_select = 1.0, quorum = 1.0, max_failed_rounds = 500 }"}
PART = {"round": "{ budget_s = 20, over_select = 1.0, quorum = 0.5, max_failed_rounds = 500 }"}
MASKED = {**MASKS, "round": "{ budget_s = 20, over_select = 1.0, quorum = 0.6, max_failed_rounds = 500 }"}
CASES = {"plain": (4, PART), "secure": (5, MASKED)}

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("captured_once")]


def small_and_long(small: int, long: int) -> list[object]:
    return [small, pytest.param(long, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]


@pytest.mark.parametrize("case", ["plain", "secure"])
def test_undisturbed_first(case: str, processes: Processes, tmp_path: Path) -> None:
    """The oracle itself: without any chaos it says what the server says."""
    federation = Federation(tmp_path, devices=4, rounds=2, settings={**CASES[case][1], **WHOLE})
    chaos = Chaos(federation, processes, 0, unruly=False, network=False)
    found = asyncio.run(chaos.run(60))
    left = chaos.check(found)
    assert left.survivors == [(1, 2, 3, 4)] * 2
    assert found["model_sha256"] == federation.undisturbed


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rounds", small_and_long(2, 30))
def test_everything_at_once(case: str, rounds: int, processes: Processes, tmp_path: Path) -> None:
    """Kills, a bad network, and frames that come twice and in another order."""
    devices, settings = CASES[case]
    federation = Federation(tmp_path, devices=devices, rounds=rounds, settings=settings)
    chaos = Chaos(federation, processes, 1000 + rounds, kills=max(2, rounds * 3 // 5))
    found = asyncio.run(chaos.run(30.0 + 40.0 * rounds))
    left = chaos.check(found)
    assert found["rounds"] == rounds
    assert sum(network.broken + network.changed for network in chaos.networks.values()) > 0
    assert len(left.survivors) == rounds


@pytest.mark.parametrize("rounds", small_and_long(2, 20))
def test_all_devices_answer_in_the_end(rounds: int, processes: Processes, tmp_path: Path) -> None:
    """A round is published with everybody or not at all, so that the model is that of an undisturbed run."""
    federation = Federation(tmp_path, devices=3, rounds=rounds, settings=WHOLE)
    chaos = Chaos(federation, processes, 2000 + rounds, kills=max(1, rounds // 2))
    found = asyncio.run(chaos.run(40.0 + 40.0 * rounds))
    chaos.check(found)
    assert found["model_sha256"] == federation.undisturbed


def test_devices_that_take_long_to_begin(processes: Processes, tmp_path: Path) -> None:
    """What a device has begun to build is there for the next round, if this one does not wait for it."""
    federation = Federation(tmp_path, devices=3, rounds=1, settings=PART)  # which waits 2.3 s for a Ready
    chaos = Chaos(federation, processes, 0, unruly=False, network=False, slow_s=4.0)
    found = asyncio.run(chaos.run(60))
    left = chaos.check(found)
    assert left.survivors == [(1, 2, 3)]
    assert left.failed


async def _goes_away(world: World) -> None:
    async def goes_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with await asyncio.start_server(goes_away, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        error = await diagnose("127.0.0.1", port, world.pinned, insecure=False, said="unavailable")
    assert error.then is Then.RETRY


def test_a_connection_that_ends_in_the_handshake_is_tried_again() -> None:
    """Such as over a relay whose server is being started: no matter for the operator."""
    asyncio.run(_goes_away(World()))


def test_nothing_stays_behind(tmp_path: Path) -> None:
    """The guard itself: what a test has started is gone when it is over, and so are its ports."""
    federation = Federation(tmp_path, devices=1, rounds=1)
    place = Chaos(federation, Processes(), 0).place
    with started() as processes:
        server = processes.serve(place)
        device = processes.take_part(federation.client_toml(1), tmp_path / "client.log")
        other = processes.command("--help", folder=tmp_path, log=tmp_path / "help.log")
    assert (server.exitcode, device.exitcode) == (-9, -9)
    assert other.poll() is not None
    assert free_port() > 0
