"""Several servers on one PostgreSQL database: each has devices of its own, and all are in one sum."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mycelia.aggregator.runs.partials import Partial
from mycelia.aggregator.runs.plain import PlainRound
from mycelia.client.identity import DeviceIdentity
from tests.aggregator.runs.replicas import (
    Replica,
    Servers,
    devices,
    ended,
    facts,
    free_ports,
    know_all,
    result_of,
    start,
    until,
)
from tests.aggregator.runs.run_world import Dummy, expected, plan, run, running
from tests.aggregator.runs.test_standby_devices import made, served

if TYPE_CHECKING:
    from tests.aggregator.databases import Server as Postgres

pytest_plugins = ["tests.aggregator.databases"]
pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def world() -> Servers:
    return Servers(3)


@pytest.fixture(scope="module")
def identities(world: Servers, tmp_path_factory: pytest.TempPathFactory) -> list[DeviceIdentity]:
    folder = tmp_path_factory.mktemp("replicas")
    return [world.enrol_folder(n, folder / f"id{n}") for n in range(1, 7)]


@pytest.fixture
def partials(monkeypatch: pytest.MonkeyPatch) -> list[Partial]:
    """Those that leaders of this process were given."""
    found: list[Partial] = []
    merge = PlainRound._merge_partial

    async def noted(self: PlainRound, partial: Partial) -> Any:
        found.append(partial)
        return await merge(self, partial)

    monkeypatch.setattr(PlainRound, "_merge_partial", noted)
    return found


def test_devices_of_all_servers_are_in_one_sum(
    world: Servers,
    identities: list[DeviceIdentity],
    tmp_path: Path,
    postgres: Postgres,
    partials: list[Partial],
) -> None:
    """Two devices at each of three servers; they measure the model and are given it as well."""
    url, study = postgres.database(), plan(clients=6, evaluation={"every": 1, "clients": 6})

    async def go() -> None:
        first, second, third = (made(world, name, tmp_path, url, study) for name in world.named)
        async with served(first) as (one, results):
            await until(lambda: first._leading.leads)
            async with served(second) as (two, _), served(third) as (three, _):
                await until(lambda: second._leading.holder == third._leading.holder == "agg-1")
                ports = [one, one, two, two, three, three]
                known = [Dummy(port, each, study) for port, each in zip(ports, identities, strict=True)]
                async with running(known):
                    found = (await results)["study"]
                    assert found.model_sha256 == expected(study, [range(1, 7)] * 2)
                    assert (found.accepted, found.dropped) == (12, 0)
                    await until(lambda: all(each.delivered for each in known))
                for each in known:
                    assert each.reasons().count("") >= 2
                    assert set(each.reasons()) == {""}
        assert {item.client for partial in partials for item in partial.items} == {3, 4, 5, 6}
        assert facts(url)["statuses"] == {"ACCEPTED": 12}

    run(go(), 50.0)


def test_an_update_that_is_in_two_partial_sums_counts_once(
    world: Servers,
    identities: list[DeviceIdentity],
    tmp_path: Path,
    postgres: Postgres,
    partials: list[Partial],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device moves from one server to another before the leader hears of its first hand-over."""
    url, study = postgres.database(), plan(clients=3)
    held, gate = asyncio.Event(), asyncio.Event()

    async def go() -> None:
        first, second, third = (made(world, name, tmp_path, url, study) for name in world.named)
        async with served(first) as (one, results):
            await until(lambda: first._leading.leads)
            async with served(second) as (two, _), served(third) as (three, _):
                await until(lambda: second._leading.holder == third._leading.holder == "agg-1")
                reach = first._router.reach
                assert reach is not None
                take = reach._take

                letters: list[Any] = []

                async def aside(letter: Any) -> None:
                    """What the second server hands over waits, and the others' letters go on."""
                    if letter.kind == "partial" and letter.server == "agg-2" and not gate.is_set():
                        letters.append(letter)
                        held.set()
                    else:
                        await take(letter)

                reach.letters._take = aside
                slow = asyncio.Event()
                known = [
                    Dummy(port, each, study) for port, each in zip((one, two, two), identities, strict=False)
                ]
                known[0].habits.gate = slow
                async with running(known[:1]), running(known[2:]):
                    async with running(known[1:2]):
                        await held.wait()
                        await until(lambda: sum(len(_clients(letter)) for letter in letters) == 2)
                    moved = know_all(Dummy(three, identities[1], study), [three])
                    async with running([moved]):
                        await until(lambda: any(_of(partial) == {2} for partial in partials))
                        gate.set()
                        for letter in letters:
                            await take(letter)
                        slow.set()
                        found = (await results)["study"]
                assert found.model_sha256 == expected(study, [(1, 2, 3)] * 2)
                assert facts(url)["kinds"]["ACCEPTED"] == 6

    run(go(), 50.0)


def _of(partial: Partial) -> set[int]:
    return {item.client for item in partial.items}


def _clients(letter: Any) -> set[int]:
    return {item[0] for item in json.loads(letter.body)["items"]}


@pytest.mark.parametrize("blobs", ["folder", "rows"])
def test_each_server_is_killed_once(
    world: Servers, identities: list[DeviceIdentity], tmp_path: Path, postgres: Postgres, blobs: str
) -> None:
    """Three servers, three devices that know them all; one server after the other is killed in mid-round."""
    url, ports = postgres.database(), free_ports(3)
    settings: dict[str, Any] = {"rounds": 4}
    study, gate = plan(**settings), asyncio.Event()
    shared = tmp_path / "blobs" if blobs == "folder" else None

    def replica(number: int, name: str) -> Replica:
        own = tmp_path / name
        if not own.exists():
            own.mkdir()
            world.write_keys(name, own / "keys")
        return Replica(own, ports[number], url, shared, settings)

    async def go() -> list[Dummy]:
        replicas = [replica(number, name) for number, name in enumerate(world.named)]
        processes = [start(each) for each in replicas]
        known = devices(Dummy, ports, identities[:3], study)
        known[2].habits.gate = gate
        async with running(known):
            for number, each in enumerate(replicas):
                gate.clear()
                await until(lambda number=number: len({at.round for at in known[0].sent}) > number)
                os.kill(processes[number].pid, signal.SIGKILL)
                assert await ended(processes[number]) == -9
                processes[number] = start(each)
                gate.set()
                if number < 2:
                    await until(lambda number=number: len({at.round for at in known[2].sent}) > number)
            codes = [await ended(process) for process in processes]
            assert set(codes) == {0}, codes
        return known

    run(go(), 150.0)
    (result,) = {
        result_of(tmp_path / name)["model_sha256"] for name in world.named if _has_result(tmp_path / name)
    }
    assert result == expected(study, [(1, 2, 3)] * 4)
    found = facts(url)
    assert found["statuses"] == {"ACCEPTED": 12}
    assert found["fences"] == sorted(found["fences"])


def _has_result(folder: Path) -> bool:
    return (folder / "result.json").exists()
