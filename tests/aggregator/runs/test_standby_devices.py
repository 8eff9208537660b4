"""What devices see of two servers, one of which leads, and of a leader that cannot reach the database."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mycelia.aggregator import leases
from mycelia.aggregator.runs import leading
from mycelia.aggregator.runs.plans import RunPlan
from mycelia.aggregator.runs.server import Places, Server, Work
from mycelia.aggregator.wire.problems import Reason
from mycelia.client.identity import DeviceIdentity
from mycelia.engine.errors import ConfigError
from tests.aggregator.connections import device
from tests.aggregator.runs.replicas import SHORT_LEASE_S, Servers, Wire, devices, facts, until
from tests.aggregator.runs.run_world import (
    PATIENT,
    Dummy,
    expected,
    expected_secure,
    plan,
    run,
    running,
)
from tests.aggregator.runs.secure_world import SecureDummy

if TYPE_CHECKING:
    from tests.aggregator.databases import Server as Postgres

pytest_plugins = ["tests.aggregator.databases"]
pytestmark = pytest.mark.postgres

SECURE: dict[str, Any] = {
    "secure_sum": {"threat": "passive", "corrupt": 0.0, "dropout": 0.3},
    "update": {"max_weight": 1.0},
}


@pytest.fixture(scope="module")
def world() -> Servers:
    return Servers(2)


@pytest.fixture(scope="module")
def identities(world: Servers, tmp_path_factory: pytest.TempPathFactory) -> list[DeviceIdentity]:
    folder = tmp_path_factory.mktemp("standby")
    return [world.enrol_folder(n, folder / f"id{n}") for n in range(1, 4)]


def made(world: Servers, name: str, folder: Path, url: str, *plans: RunPlan) -> Server:
    own = folder / name
    own.mkdir()
    places = Places(url, folder / "blobs", own / "own")
    works = [Work(each, own / each.name) for each in plans]
    return Server(world.named[name], world.document(), works, places, deadlines=lambda plan: PATIENT)


@contextlib.asynccontextmanager
async def served(server: Server) -> AsyncIterator[tuple[int, asyncio.Task[Any]]]:
    """The server from its start to its end, and what its runs come to."""
    port = await server.start("127.0.0.1:0")
    task = asyncio.create_task(server.run())
    try:
        yield port, task
    finally:
        await server.stop(0.0)
        await asyncio.gather(task, return_exceptions=True)


def test_whoever_waits_lets_no_device_stay(
    world: Servers, identities: list[DeviceIdentity], tmp_path: Path, postgres: Postgres
) -> None:
    """Devices of a secure sum work with the server that leads."""
    url, study = postgres.database(), plan(**SECURE)

    async def go() -> None:
        first, second = (made(world, name, tmp_path, url, study) for name in world.named)
        async with served(first) as (port, results):
            await until(lambda: first._leading.leads)
            async with served(second) as (other, _):
                await until(lambda: second._leading.holder == "agg-1")
                async with device(other, identities[0].keys[0], world.pinned) as one:
                    with contextlib.suppress(AssertionError):
                        await one.hello()
                    assert one.goodbye is not None
                    assert (one.goodbye.reason, one.goodbye.hint) == ("NOT_LEADER", "another server leads")
                (shown,) = second.board.snapshot()["runs"]
                assert (shown["name"], shown["phase"], shown["state"]) == ("study", "waiting", "running")
                known = devices(SecureDummy, [port, other], identities, study)
                async with running(known):
                    found = (await results)["study"]
                assert found.model_sha256 == expected_secure(study, [(1, 2, 3)] * 2)
                assert second.service.refused[Reason.NOT_LEADER] >= 1

    run(go(), 40.0)


def test_a_server_leads_all_of_its_runs_or_none(
    world: Servers, identities: list[DeviceIdentity], tmp_path: Path, postgres: Postgres
) -> None:
    url, both = postgres.database(), [plan("one"), plan("two")]

    async def go() -> None:
        first, second = (made(world, name, tmp_path, url, *both) for name in world.named)
        async with served(first) as (port, results), served(second) as (other, _):
            known = devices(Dummy, [port, other], identities, both)
            async with running(known):
                await until(lambda: first._leading.leads or second._leading.leads)
                leader = first if first._leading.leads else second
                assert not (second if leader is first else first)._leading.leases
                await until(lambda: leader.results.keys() == {"one", "two"})
            for name, result in leader.results.items():
                assert result.model_sha256 == expected(plan(name), [(1, 2, 3)] * 2)
        del results

    run(go(), 40.0)


def test_other_settings_are_refused_before_it_is_too_late(
    world: Servers, tmp_path: Path, postgres: Postgres
) -> None:
    url = postgres.database()

    async def go() -> None:
        first = made(world, "agg-1", tmp_path, url, plan())
        second = made(world, "agg-2", tmp_path, url, plan(rounds=3))
        async with served(first):
            await until(lambda: "study" in first._router.runs)
            with pytest.raises(ConfigError, match="all its servers have the same"):
                await second.start("127.0.0.1:0")
        await second.stop(0.0)

    run(go())


def test_a_leader_without_its_database_stops(
    world: Servers,
    identities: list[DeviceIdentity],
    tmp_path: Path,
    postgres: Postgres,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its line to the database is dead, that of the other server is not."""
    monkeypatch.setattr(leases, "LEASE_S", SHORT_LEASE_S)
    monkeypatch.setattr(leading, "RENEW_S", 0.3 * SHORT_LEASE_S)
    url, study, gate = postgres.database(), plan(), asyncio.Event()

    async def go() -> None:
        async with Wire(tmp_path / "wire", url) as wire:
            first = made(world, "agg-1", tmp_path, wire.url, study)
            second = made(world, "agg-2", tmp_path, url, study)
            async with served(first) as (port, _):
                await until(lambda: first._leading.leads)
                async with served(second) as (other, results):
                    known = devices(Dummy, [port, other], identities, study)
                    known[2].habits.gate = gate
                    async with running(known):
                        await until(lambda: len(known[0].sent) == 1)
                        wire.open.clear()
                        await until(lambda: second._leading.leads)
                        assert not first._leading.leads
                        await until(lambda: not first.service.connected)
                        await until(lambda: second.floor.here == {1, 2, 3})
                        wire.open.set()  # what it was about to write comes late
                        await until(lambda: first._leading.holder == "agg-2")
                        gate.set()
                        found = (await results)["study"]
                assert found.model_sha256 == expected(study, [(1, 2, 3)] * 2)
                fences = facts(url)["fences"]
                assert fences == sorted(fences)

    run(go(), 60.0)
