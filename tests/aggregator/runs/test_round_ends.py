"""How rounds and runs end: quorum, deadlines, failing devices, those who leave and come back, and stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mycelia.aggregator.deadlines import Deadlines
from mycelia.aggregator.log_records import Entry, Failed, Snapshot
from mycelia.aggregator.outcomes import DeviceOutcome, outcomes_of
from mycelia.aggregator.runs.context import Stopped
from mycelia.aggregator.runs.plans import RunPlan
from mycelia.aggregator.runs.run import RunResult
from mycelia.aggregator.runs.server import Places, Server, Work
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.position import Position
from mycelia.engine.errors import ConfigError, MyceliaError, RoundAborted
from tests.aggregator.connections import Proxy, World
from tests.aggregator.runs.conftest import People
from tests.aggregator.runs.run_world import (
    PATIENT,
    Dummy,
    Habits,
    deadlines,
    expected,
    plan,
    run,
    running,
    serving,
)

# Long enough for honest devices on a busy machine: only those that say nothing are to run into them.
SHORT = deadlines(select=0.1, advertise=2.5, configure=2.5, train=5.0, agree=5.0, unmask=5.0, merge=60.0)


class Ended:
    """A run that ended well or badly."""

    def __init__(self) -> None:
        self.result: RunResult
        self.error: MyceliaError | None = None
        self.outcomes: list[DeviceOutcome] = []
        self.records: list[Entry] = []
        self.devices: list[Dummy] = []
        self.model = ""

    def told(self, attempt: int = 0) -> list[tuple[int, str, str]]:
        return [(one.client, one.status, one.phase) for one in self.outcomes if one.attempt == attempt]


def a_run(
    people: People,
    folder: Path,
    made: RunPlan,
    habits: dict[int, Habits],
    *,
    times: Deadlines = PATIENT,
    meanwhile: Callable[[Server, list[Dummy]], Any] | None = None,
) -> Ended:
    """The run, and what the store has of its first round."""

    async def go() -> Ended:
        ended = Ended()
        async with serving(people.world, folder, made, times=times) as (server, port):
            ended.devices = [
                Dummy(port, each, made, habits.get(each.client))
                for each in people.first(made.population.clients)
            ]
            async with running(ended.devices):
                doing = asyncio.create_task(server.run())
                while not server._router.runs:
                    await asyncio.sleep(0.005)
                one = server._router.runs["study"]
                if meanwhile is not None:
                    await meanwhile(server, ended.devices)
                try:
                    ended.result = (await doing)["study"]
                except MyceliaError as error:
                    ended.error = error
                if ended.error is not None:
                    await until(
                        lambda: all(each.outcomes or habits.get(each.client) for each in ended.devices)
                    )
            ended.outcomes = outcomes_of(server._store, "study", 0)
            ended.records, ended.model = one._log.entries(), one.current.values_sha256(made.program)
        return ended

    return run(go())


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def test_deadline_without_quorum_fails_the_round(people: People, tmp_path: Path) -> None:
    """The model stays, the one that came is told, and the same round is tried again."""
    made = plan(rounds=1)
    silent = Habits(silent=lambda at: at.attempt == 0)
    ended = a_run(people, tmp_path, made, {2: silent, 3: silent}, times=SHORT)
    assert ended.devices[0].reasons() == ["QUORUM", ""]
    assert "1" in ended.devices[0].outcomes[0].hint
    assert "3" in ended.devices[0].outcomes[0].hint
    assert ended.told(0) == [
        (1, "ACCEPTED", "train"),
        (2, "DROPPED", "configure"),
        (3, "DROPPED", "configure"),
    ]
    assert ended.told(1) == [(n, "ACCEPTED", "train") for n in (1, 2, 3)]
    assert ended.result.model_sha256 == expected(made, [(1, 2, 3)])
    assert (ended.result.failed_rounds, ended.result.accepted) == (1, 3)


def test_no_reply_is_not_success(people: People, tmp_path: Path) -> None:
    made = plan(rounds=1, round={"budget_s": 20.0, "max_failed_rounds": 2})
    ended = a_run(people, tmp_path, made, {n: Habits(silent=lambda at: True) for n in (1, 2, 3)}, times=SHORT)
    assert isinstance(ended.error, RoundAborted)
    assert "no_survivors" in str(ended.error)
    assert ended.told(0) == ended.told(1) == [(n, "DROPPED", "configure") for n in (1, 2, 3)]
    assert ended.model == expected(made, [])


def test_ready_and_then_nothing_is_not_success(people: People, tmp_path: Path) -> None:
    made = plan(rounds=1, round={"budget_s": 20.0, "max_failed_rounds": 1})
    never = {n: Habits(gate=asyncio.Event()) for n in (1, 2, 3)}
    ended = a_run(people, tmp_path, made, never, times=SHORT)
    assert isinstance(ended.error, RoundAborted)
    assert ended.told(0) == [(n, "LATE", "train") for n in (1, 2, 3)]


def test_all_clients_failing_is_not_success(people: People, tmp_path: Path) -> None:
    made = plan(rounds=1, round={"budget_s": 20.0, "max_failed_rounds": 2})
    ended = a_run(people, tmp_path, made, {n: Habits(fails=f"boom {n}") for n in (1, 2, 3)})
    assert isinstance(ended.error, RoundAborted)
    assert "2 rounds failed in a row, the last for all_failed" in str(ended.error)
    assert [(one.client, one.status, one.cause) for one in ended.outcomes if one.attempt == 1] == [
        (n, "DROPPED", f"failed: boom {n}") for n in (1, 2, 3)
    ]
    assert [each.reason for each in ended.records if isinstance(each, Failed)] == ["all_failed"]
    assert ended.model == expected(made, [])


def test_error_names_the_real_client(people: People, tmp_path: Path) -> None:
    """The others are in the model, and whoever failed is not told a second time."""
    made = plan(rounds=1, round={"budget_s": 20.0, "quorum": 0.3})
    ended = a_run(
        people, tmp_path, made, {2: Habits(fails="ValueError: no images"), 3: Habits(declines="local_epochs")}
    )
    assert [(one.client, one.status, one.cause, one.hint) for one in ended.outcomes] == [
        (1, "ACCEPTED", "", ""), (2, "DROPPED", "failed: ValueError: no images", ""),
        (3, "DECLINED", "policy: local_epochs", "asked this, allowed that"),
    ]  # fmt: skip
    assert [device.reasons() for device in ended.devices] == [[""], [], []]
    assert ended.result.model_sha256 == expected(made, [(1,)])


def test_training_longer_than_heartbeats_stays_alive(people: People, tmp_path: Path) -> None:
    """Five times as long as after which a silent device is lost."""
    made, gate = plan(rounds=1), asyncio.Event()
    times = deadlines(heartbeat=0.1, lost=0.3)

    async def wait(server: Server, devices: list[Dummy]) -> None:
        await until(lambda: devices[0].models)
        await asyncio.sleep(1.5)
        assert not devices[0].lost
        gate.set()

    ended = a_run(people, tmp_path, made, {1: Habits(gate=gate)}, times=times, meanwhile=wait)
    assert ended.told() == [(n, "ACCEPTED", "train") for n in (1, 2, 3)]


def test_fast_clients_cannot_overtake_a_round(people: People, tmp_path: Path) -> None:
    made, gate = plan(rounds=3), asyncio.Event()
    seen: list[set[int]] = []

    async def wait(server: Server, devices: list[Dummy]) -> None:
        await until(lambda: devices[0].sent and devices[1].sent)
        await asyncio.sleep(0.2)
        seen.append({at.round for device in devices for at in device.tasks})
        gate.set()

    ended = a_run(people, tmp_path, made, {3: Habits(gate=gate)}, meanwhile=wait)
    assert seen == [{0}]
    assert ended.result.model_sha256 == expected(made, [(1, 2, 3)] * 3)
    for device in ended.devices:
        assert [at.round for at in device.asked if device.tasks[at].work == pb.TRAIN] == [0, 1, 2]


def test_over_selection_closes_with_the_kth(people: People, tmp_path: Path) -> None:
    made = plan(clients=3, cohort=2, rounds=1, round={"budget_s": 20.0, "over_select": 1.5})
    gate = asyncio.Event()
    ended = a_run(people, tmp_path, made, {2: Habits(gate=gate)})
    assert ended.told() == [(1, "ACCEPTED", "train"), (2, "LATE", "train"), (3, "ACCEPTED", "train")]
    assert ended.devices[1].reasons() == ["LATE"]
    assert ended.result.model_sha256 == expected(made, [(1, 3)])


@pytest.mark.parametrize("policy", ["retry", "replace", "abort"])
def test_failure_policies(people: People, tmp_path: Path, policy: str) -> None:
    cohort = 2 if policy == "replace" else 3
    made = plan(
        clients=3, cohort=cohort, rounds=1,
        round={"budget_s": 20.0, "on_failure": policy, "max_failed_rounds": 1, "quorum": 1.0},
    )  # fmt: skip
    asked: list[int] = []

    def fail_once(task: pb.Task) -> None:
        asked.append(task.at.attempt)
        failing.fails = "boom" if len(asked) == 1 else ""

    failing = Habits(task=fail_once)
    from numpy import arange

    drawn = [int(n) + 1 for n in made.selector.select(arange(3), 3, round=0, seed=made.config.seed)]
    ended = a_run(people, tmp_path, made, {drawn[0]: failing})
    rows = {(one.client, one.attempt): one.status for one in ended.outcomes}
    match policy:
        case "retry":
            assert rows == {(n, 0): "ACCEPTED" for n in drawn[1:]} | {
                (drawn[0], 0): "DROPPED",
                (drawn[0], 1): "ACCEPTED",
            }
            assert ended.result.model_sha256 == expected(made, [(1, 2, 3)])
            assert [device.reasons() for device in ended.devices] == [[""]] * 3
        case "replace":
            assert rows == {(drawn[0], 0): "DROPPED", (drawn[1], 0): "ACCEPTED", (drawn[2], 0): "ACCEPTED"}
            assert ended.result.model_sha256 == expected(made, [sorted(drawn[1:])])
        case _:
            assert isinstance(ended.error, RoundAborted)
            assert "client_failed" in str(ended.error)
            assert all(rows.values())


def test_restart_rejoins_without_new_identity(people: People, tmp_path: Path) -> None:
    """A device that ends before it has answered gets the same task again, as the same device."""
    made = plan(rounds=1)
    never = asyncio.Event()

    async def go() -> tuple[RunResult, Dummy, Dummy]:
        async with serving(people.world, tmp_path, made) as (server, port):
            others = [Dummy(port, each, made) for each in people.first(2)]
            first = Dummy(port, people.devices[3], made, Habits(gate=never))
            async with running(others):
                async with running([first]):
                    doing = asyncio.create_task(server.run())
                    await until(lambda: first.models)
                second = Dummy(port, people.devices[3], made)
                async with running([second]):
                    result = (await doing)["study"]
            return result, first, second

    result, first, second = run(go())
    at = Position("study", 0, 0)
    assert at in first.tasks
    assert second.reasons() == [""]
    assert [(task.model_sha256, task.settings) for task in (first.tasks[at], second.tasks[at])] == [
        (first.tasks[at].model_sha256, first.tasks[at].settings)
    ] * 2
    assert result.model_sha256 == expected(made, [(1, 2, 3)])
    assert result.dropped == 0


@pytest.mark.parametrize("after", [1, 3000], ids=["in-the-greeting", "in-the-upload"])
def test_connection_that_breaks_loses_nothing(people: People, tmp_path: Path, after: int) -> None:
    made = plan(rounds=2)

    async def go() -> tuple[RunResult, Proxy]:
        async with serving(people.world, tmp_path, made) as (server, port):
            proxy = Proxy(port)
            through = await proxy.start()
            proxy.cut_up = after
            devices = [Dummy(through, each, made) for each in people.first(3)]
            async with running(devices):
                result = (await server.run())["study"]
            await proxy.close()
            return result, proxy

    result, proxy = run(go())
    assert proxy.cut_up is None
    assert result.model_sha256 == expected(made, [(1, 2, 3)] * 2)


def test_revoked_stream_ends(tmp_path: Path) -> None:
    """In a running round: its stream ends, it counts as dropped, and the round goes on without it."""
    world, made = World(), plan(rounds=2, round={"budget_s": 20.0, "quorum": 0.6})
    people = People(world, {n: world.enrol_folder(n, tmp_path / f"id{n}") for n in (1, 2, 3)})
    gate = asyncio.Event()

    async def revoke(server: Server, devices: list[Dummy]) -> None:
        await until(lambda: devices[2].models)
        server.take_roster(world.revoke(3))
        await until(lambda: devices[2].lost)
        gate.set()

    ended = a_run(people, tmp_path, made, {2: Habits(gate=gate), 3: Habits(gate=gate)}, meanwhile=revoke)
    assert ended.told() == [(1, "ACCEPTED", "train"), (2, "ACCEPTED", "train"), (3, "DROPPED", "train")]
    assert next(one.cause for one in ended.outcomes if one.client == 3) == "REVOKED"
    assert ended.result.model_sha256 == expected(made, [(1, 2)] * 2)
    assert ended.devices[2].lost[0].error.reason is Reason.REVOKED


def test_stopped_in_mid_round_goes_on_from_its_snapshot(people: People, tmp_path: Path) -> None:
    """Whoever is in the snapshot is not asked again."""
    made, gate = plan(rounds=1), asyncio.Event()

    async def go() -> tuple[RunResult, list[Dummy], list[Entry]]:
        async with serving(people.world, tmp_path, made) as (server, port):
            devices = [Dummy(port, each, made) for each in people.first(3)]
            devices[2].habits.gate = gate
            async with running(devices):
                doing = asyncio.create_task(server.run())
                await until(lambda: devices[0].sent and devices[1].sent and devices[2].models)
                one = server._router.runs["study"]
                await until(lambda: len(one._gathering._folded) == 2)  # type: ignore[union-attr]
                await server.stop(0.0)
                with pytest.raises(Stopped):
                    await doing
                records = one._log.order
                gate.set()
                async with serving(people.world, tmp_path, made, listen=f"127.0.0.1:{port}") as (again, _):
                    result = (await again.run())["study"]
        assert records.snapshot == Snapshot((1, 2), records.snapshot.sha256 if records.snapshot else b"")
        return result, devices, []

    result, devices, _ = run(go())
    assert result.model_sha256 == expected(made, [(1, 2, 3)])
    at = Position("study", 0, 0)
    assert [device.asked.count(at) for device in devices] == [1, 1, 2]
    assert devices[2].reasons() == [""]


def test_halt_ends_a_run_that_waits_for_devices(people: People, tmp_path: Path) -> None:
    made = plan()

    async def go() -> None:
        async with serving(people.world, tmp_path, made) as (server, _):
            doing = asyncio.create_task(server.run())
            await until(lambda: server._router.runs)
            server.halt()
            with pytest.raises(Stopped):
                await doing

    run(go())


def test_two_servers_one_sqlite_refused(people: People, tmp_path: Path) -> None:
    made = plan()

    async def go() -> None:
        async with serving(people.world, tmp_path, made):
            places = Places(f"sqlite:///{tmp_path}/mycelia.db", tmp_path / "blobs", tmp_path / "other")
            second = Server(people.world.keys, people.world.document(), [Work(made, tmp_path / "x")], places)
            with pytest.raises(ConfigError, match="another"):
                await second.start("127.0.0.1:0")
            await second.stop(0.0)

    run(go())


def test_other_settings_than_a_run_began_with_are_refused(people: People, tmp_path: Path) -> None:
    made = plan(rounds=1)

    async def go() -> None:
        async with (
            serving(people.world, tmp_path, made) as (server, port),
            running([Dummy(port, each, made) for each in people.first(3)]),
        ):
            await server.run()
        async with serving(people.world, tmp_path, plan(rounds=2)) as (server, _):
            with pytest.raises(ConfigError, match="settings of the run 'study'"):
                await server.run()

    run(go())


@pytest.mark.parametrize("which", ["model", "state", "missing"])
def test_torn_checkpoint_not_loaded(people: People, tmp_path: Path, which: str) -> None:
    """A damaged blob is named; the run does not begin again from where it began."""
    made = plan(rounds=1)

    async def go() -> Path:
        async with (
            serving(people.world, tmp_path, made) as (server, port),
            running([Dummy(port, each, made) for each in people.first(3)]),
        ):
            doing = asyncio.create_task(server.run())
            await until(lambda: server._router.runs)
            one = server._router.runs["study"]
            await doing
            merged = one._log.published
        assert merged is not None
        path = tmp_path / "blobs" / (merged.state_sha256 if which == "state" else merged.model_sha256).hex()
        if which == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-3])
        async with serving(people.world, tmp_path, made) as (server, _):
            with pytest.raises(Problem) as caught:
                await server.run()
        assert caught.value.reason is Reason.STORE_CORRUPT
        assert path.name in str(caught.value)
        return path

    run(go())


def test_a_run_that_is_over_only_delivers(people: People, tmp_path: Path) -> None:
    made = plan(rounds=1)

    async def go() -> list[tuple[str, list[str], bool]]:
        found = []
        for _ in range(2):
            async with serving(people.world, tmp_path, made) as (server, port):
                devices = [Dummy(port, each, made) for each in people.first(3)]
                async with running(devices):
                    result = (await server.run())["study"]
                    found.append((result.model_sha256, devices[0].reasons(), bool(devices[0].delivered)))
        return found

    model = expected(made, [(1, 2, 3)])
    assert run(go()) == [(model, [""], True), (model, [""], True)]  # it is said again
