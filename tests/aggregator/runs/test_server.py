"""Several runs on one server, evaluation on devices, and stores that go away and come back."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mycelia.aggregator.outcomes import outcomes_of
from mycelia.aggregator.runs.run import RunResult
from mycelia.engine.events import Evaluation
from mycelia.engine.run import Run
from tests.aggregator.runs.conftest import People
from tests.aggregator.runs.killed_server import do_elsewhere
from tests.aggregator.runs.run_world import Dummy, Habits, expected, plan, run, running, serving
from tests.aggregator.runs.test_round_ends import until
from tests.small_disk import fill, small_disk

if TYPE_CHECKING:
    from tests.aggregator.databases import Server as Postgres

pytest_plugins = ["tests.aggregator.databases"]


def test_runs_share_devices(people: People, tmp_path: Path) -> None:
    """Each device works for one run at a time, and every run comes to its own end."""
    plans = [plan(name, clients=4, cohort=2, rounds=3) for name in ("one", "two")]

    async def go() -> None:
        async with serving(people.world, tmp_path, *plans) as (server, port):
            devices = [Dummy(port, each, plans) for each in people.first(4)]
            async with running(devices):
                results = await server.run()
            for made in plans:
                result = results[made.name]
                stored = [outcomes_of(server._store, made.name, round) for round in range(3)]
                rounds = [[one.client for one in each if one.status == "ACCEPTED"] for each in stored]
                assert [len(each) for each in rounds] == [2, 2, 2]
                assert result.model_sha256 == expected(made, rounds)
                assert all(device.delivered.keys() == {"one", "two"} for device in devices)

    run(go())


def test_devices_measure_the_model(people: People, tmp_path: Path) -> None:
    """The mean over all of their examples: device n has n of them, and an accuracy of n tenths."""
    made = plan(evaluation={"every": 1, "clients": 3})

    async def go() -> RunResult:
        async with (
            serving(people.world, tmp_path, made) as (server, port),
            running([Dummy(port, each, made) for each in people.first(3)]),
        ):
            return (await server.run())["study"]

    result = run(go())
    found = [event for event in Run.open(Path(result.run_dir)).events() if isinstance(event, Evaluation)]
    assert [(each.round, each.split) for each in found] == [(1, "devices"), (2, "devices")]
    for each in found:
        assert each.metrics["accuracy"] == pytest.approx((1 + 4 + 9) / 10 / 6)
    assert result.model_sha256 == expected(made, [(1, 2, 3)] * 2)


@pytest.mark.postgres
@pytest.mark.parametrize(
    "when", ["before-an-update", pytest.param("before-the-merge", marks=pytest.mark.slow)]
)
def test_database_away_and_back(people: People, tmp_path: Path, postgres: Postgres, when: str) -> None:
    """Nobody is told of it, and nothing is lost or counted twice."""
    made, gate = plan(rounds=2), asyncio.Event()

    async def go() -> RunResult:
        async with serving(people.world, tmp_path, made, store=postgres.database()) as (server, port):
            devices = [Dummy(port, each, made) for each in people.first(3)]
            devices[2].habits.gate = gate
            async with running(devices):
                doing = asyncio.create_task(server.run())
                await until(lambda: devices[0].sent and devices[1].sent and devices[2].models)
                if when == "before-an-update":
                    await asyncio.to_thread(do_elsewhere, postgres.stop)
                    gate.set()
                else:
                    gate.set()
                    await until(lambda: devices[2].sent)
                    await asyncio.to_thread(do_elsewhere, postgres.stop)
                await asyncio.sleep(0.5)
                await asyncio.to_thread(do_elsewhere, postgres.start)
                result = (await doing)["study"]
            assert [device.reasons() for device in devices] == [["", ""]] * 3
            return result

    result = run(go(), 40.0)
    assert result.model_sha256 == expected(made, [(1, 2, 3)] * 2)
    assert (result.failed_rounds, result.accepted) == (0, 6)


def test_full_disk_and_room_again(people: People, tmp_path: Path) -> None:
    """No blob can be written: the round waits, and goes on when there is room."""
    made, gate = plan(rounds=1), asyncio.Event()

    async def go(disk: Path) -> RunResult:
        async with serving(people.world, tmp_path, made, blobs=disk / "blobs") as (server, port):
            devices = [Dummy(port, each, made) for each in people.first(3)]
            devices[2].habits.gate = gate
            async with running(devices):
                doing = asyncio.create_task(server.run())
                await until(lambda: devices[2].models)
                ballast = fill(disk)
                gate.set()
                await until(lambda: devices[2].sent)
                await asyncio.sleep(0.4)
                assert not doing.done()
                os.truncate(ballast, 0)
                return (await doing)["study"]

    with small_disk(tmp_path / "disk") as disk:
        result = run(go(disk))
    assert result.model_sha256 == expected(made, [(1, 2, 3)])
    assert result.failed_rounds == 0


def test_blobs_of_rounds_that_are_over_are_gone(people: People, tmp_path: Path) -> None:
    """On the disk there are the model and the state, and no sum of any round."""
    made = plan(rounds=3)

    async def go() -> set[str]:
        async with serving(people.world, tmp_path, made) as (server, port):
            devices = [Dummy(port, each, made, Habits()) for each in people.first(3)]
            async with running(devices):
                doing = asyncio.create_task(server.run())
                await until(lambda: server._router.runs)
                one = server._router.runs["study"]
                await doing
            return {each.hex() for each in one._log.blobs_in_use()}

    used = run(go())
    assert len(used) == 2
    assert {path.name for path in (tmp_path / "blobs").iterdir()} == used
