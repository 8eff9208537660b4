"""Rounds of masked updates over real streams."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mycelia.aggregator.deadlines import Deadlines
from mycelia.aggregator.outcomes import DeviceOutcome, outcomes_of
from mycelia.aggregator.runs.plans import RunPlan
from mycelia.aggregator.runs.run import RunResult
from mycelia.aggregator.wire.position import Position
from mycelia.engine.errors import RoundAborted
from mycelia.engine.events import SecureSum
from mycelia.engine.run import Run
from tests.aggregator.connections import Proxy
from tests.aggregator.runs.conftest import People
from tests.aggregator.runs.run_world import (
    PATIENT,
    deadlines,
    expected_secure,
    plan,
    run,
    running,
    serving,
)
from tests.aggregator.runs.secure_world import KINDS, SecureDummy

SUM = {"threat": "passive", "corrupt": 0.0, "dropout": 0.2}
# Long enough for honest devices on a busy machine: only those that say nothing are to run into them.
SHORT = deadlines(select=0.1, advertise=2.5, configure=5.0, train=7.5, agree=10.0, unmask=12.5, merge=60.0)
PHASES = tuple(KINDS)


def secure_plan(clients: int, quorum: float = 0.6, **more: Any) -> RunPlan:
    limits = {"budget_s": 60.0, "quorum": quorum} | more.pop("round", {})
    return plan(clients=clients, secure_sum=SUM, round=limits, update={"max_weight": 1.0}, **more)


class Done:
    """A run that is over."""

    def __init__(
        self, result: RunResult, outcomes: list[list[DeviceOutcome]], devices: list[SecureDummy]
    ) -> None:
        self.result, self.outcomes, self.devices = result, outcomes, devices
        events = Run.open(Path(result.run_dir)).events()
        self.sums = [event for event in events if isinstance(event, SecureSum)]

    def statuses(self, round: int) -> list[tuple[int, int, str, str]]:
        return [(one.attempt, one.client, one.status, one.phase) for one in self.outcomes[round]]


def secure_run(
    people: People, folder: Path, made: RunPlan, prepare: Any = None, times: Deadlines = PATIENT
) -> Done:
    async def go() -> Done:
        async with serving(people.world, folder, made, times=times) as (server, port):
            devices = [SecureDummy(port, each, made) for each in people.first(made.population.clients)]
            if prepare is not None:
                prepare(devices, server)
            async with running(devices):
                result = (await server.run())["study"]
            found = [outcomes_of(server._store, "study", round) for round in range(made.config.rounds)]
            return Done(result, found, devices)

    return run(go())


@pytest.mark.parametrize("clients", [3, 10])
def test_opened_sums_are_exact(people: People, tmp_path: Path, clients: int) -> None:
    made = secure_plan(clients, 0.8)
    everyone = range(1, clients + 1)
    done = secure_run(people, tmp_path, made)
    assert done.result.model_sha256 == expected_secure(made, [everyone, everyone])
    assert (done.result.rounds, done.result.accepted, done.result.dropped) == (2, 2 * clients, 0)
    assert done.result.secure_sum
    for device in done.devices:
        assert device.reasons() == ["", ""]
        assert len(device.sums) == 2
        assert not device.errors
    for round in (0, 1):
        assert [(status, client) for _, client, status, _ in done.statuses(round)] == [
            ("ACCEPTED", client) for client in everyone
        ]
    assert [(each.round, each.survivors, each.attempts, each.dropped) for each in done.sums] == [
        (1, clients, 1, {}), (2, clients, 1, {}),
    ]  # fmt: skip
    assert set(done.sums[0].phase_ms) == set(PHASES)
    assert {each.transcript_sha256 for each in done.sums} == {each.hex() for each in done.devices[0].sums}


@pytest.mark.parametrize("phase", PHASES)
def test_a_device_drops_out(people: People, tmp_path: Path, phase: str) -> None:
    made = secure_plan(5, rounds=1)

    def prepare(devices: list[SecureDummy], server: Any) -> None:
        devices[4].drops[0, 0] = phase

    done = secure_run(people, tmp_path, made, prepare, SHORT)
    stays = phase in ("agree", "unmask")
    survivors = range(1, 6) if stays else range(1, 5)
    assert done.result.model_sha256 == expected_secure(made, [survivors])
    last = (0, 5, "ACCEPTED", "train") if stays else (0, 5, "DROPPED", phase)
    assert done.statuses(0) == [*((0, client, "ACCEPTED", "train") for client in range(1, 5)), last]
    spare = phase == "unmask"  # the others have enough shares, and nobody waits for more
    assert done.sums[0].dropped == ({} if spare else {phase: 1})
    assert [device.reasons() for device in done.devices[:4]] == [[""]] * 4


def test_over_selection_closes_with_the_kth(people: People, tmp_path: Path) -> None:
    made = secure_plan(4, rounds=1, round={"over_select": 1.25})
    gate = asyncio.Event()

    async def go() -> Done:
        async with serving(people.world, tmp_path, made) as (server, port):
            devices = [SecureDummy(port, each, made) for each in people.first(5)]
            devices[2].habits.gate = gate
            async with running(devices):
                result = (await server.run())["study"]
            return Done(result, [outcomes_of(server._store, "study", 0)], devices)

    made = plan(
        clients=5, cohort=4, rounds=1, secure_sum=SUM, update={"max_weight": 1.0},
        round={"budget_s": 20.0, "quorum": 0.75, "over_select": 1.25},
    )  # fmt: skip
    done = run(go())
    assert done.result.model_sha256 == expected_secure(made, [(1, 2, 4, 5)])
    assert [status for _, _, status, _ in done.statuses(0)] == [
        "ACCEPTED", "ACCEPTED", "LATE", "ACCEPTED", "ACCEPTED",
    ]  # fmt: skip
    assert [device.reasons() for device in done.devices] == [[""], [""], ["LATE"], [""], [""]]


@pytest.mark.parametrize("phase", PHASES)
def test_a_device_comes_back_in_mid_session(people: People, tmp_path: Path, phase: str) -> None:
    """Its connection breaks before, or after, it says something; nobody is lost."""
    made = secure_plan(3, 0.8, rounds=2)

    broken: set[int] = set()

    async def go() -> Done:
        async with serving(people.world, tmp_path, made) as (server, port):
            proxy = Proxy(port)
            through = await proxy.start()
            ports = (through, port, port)
            devices = [SecureDummy(*pair, made) for pair in zip(ports, people.first(3), strict=True)]
            for device in devices[:2]:

                def break_off(at: Position, kind: str, device: SecureDummy = device) -> None:
                    if kind == KINDS[phase] and at.round == 0 and device.client not in broken:
                        broken.add(device.client)
                        if device.client == 1:
                            proxy.cut()  # at once: what is sent now is lost
                        else:
                            device.transport.reconnect()

                device.before = break_off
            async with running(devices):
                result = (await server.run())["study"]
            await proxy.close()
            return Done(result, [outcomes_of(server._store, "study", 0)], devices)

    done = run(go())
    assert broken == {1, 2}
    assert done.result.model_sha256 == expected_secure(made, [(1, 2, 3)] * 2)
    assert done.result.failed_rounds == 0
    assert {status for _, _, status, _ in done.statuses(0)} == {"ACCEPTED"}
    assert len(done.sums) == 2
    assert [each.attempts for each in done.sums] == [1, 1]


def test_a_failed_attempt_is_followed_by_one_with_fewer(people: People, tmp_path: Path) -> None:
    """Two of five are gone when the vectors come: 3 shares are needed of 2 neighbours that are left."""
    made = secure_plan(5, rounds=1)

    def prepare(devices: list[SecureDummy], server: Any) -> None:
        devices[3].drops[0, 0] = devices[4].drops[0, 0] = "masked"

    done = secure_run(people, tmp_path, made, prepare, SHORT)
    assert done.result.model_sha256 == expected_secure(made, [(1, 2, 3)])
    assert done.result.failed_rounds == 0
    assert done.sums[-1].attempts == 2
    statuses = done.statuses(0)
    assert [each for each in statuses if each[0] == 1] == [(1, n, "ACCEPTED", "train") for n in (1, 2, 3)]
    assert [(client, status, phase) for attempt, client, status, phase in statuses if attempt == 0] == [
        (1, "LATE", "masked"), (2, "LATE", "masked"), (3, "LATE", "masked"),
        (4, "DROPPED", "masked"), (5, "DROPPED", "masked"),
    ]  # fmt: skip
    assert (done.result.accepted, done.result.dropped) == (3, 2)


def test_who_declines_is_not_asked_again(people: People, tmp_path: Path) -> None:
    made = secure_plan(5, rounds=1)

    def prepare(devices: list[SecureDummy], server: Any) -> None:
        devices[1].habits.declines = "min_cohort"
        devices[4].drops[0, 0] = "masked"

    done = secure_run(people, tmp_path, made, prepare, SHORT)
    assert done.result.model_sha256 == expected_secure(made, [(1, 3, 4)])
    assert (0, 2, "DECLINED", "advertise") in done.statuses(0)
    assert not [each for each in done.statuses(0) if each[:2] == (1, 2)]
    row = next(one for one in done.outcomes[0] if one.client == 2)
    assert (row.cause, row.hint) == ("min_cohort", "asked this, allowed that")


def test_a_released_round_is_not_tried_again(people: People, tmp_path: Path) -> None:
    """Two of three say nothing once shares were asked for: the round is lost, the next one is another."""
    made = secure_plan(3, 0.8, rounds=2)

    def prepare(devices: list[SecureDummy], server: Any) -> None:
        devices[0].drops[0, 0] = devices[1].drops[0, 0] = "unmask"

    done = secure_run(people, tmp_path, made, prepare, SHORT)
    assert done.result.model_sha256 == expected_secure(made, [(1, 2, 3)])
    assert (done.result.rounds, done.result.failed_rounds, done.result.accepted) == (2, 1, 3)
    assert {at for at in done.devices[2].machines} == {Position("study", 0, 0), Position("study", 1, 0)}
    assert {status for _, _, status, _ in done.statuses(0)} == {"DROPPED", "LATE"}
    assert done.devices[2].reasons() == ["ROUND_ABORTED", ""]
    assert (done.sums[0].round, done.sums[0].failed) == (1, "UNMASK_SHORT")


def test_too_few_to_hide_among(people: People, tmp_path: Path) -> None:
    """Below the least number nothing is opened, and a run of such rounds is no success."""
    made = secure_plan(3, 0.8, rounds=1, round={"max_failed_rounds": 2})

    async def go() -> list[SecureDummy]:
        async with serving(people.world, tmp_path, made, times=SHORT) as (server, port):
            devices = [SecureDummy(port, each, made) for each in people.first(3)]
            for attempt in range(8):
                devices[0].drops[0, attempt] = "share"
            async with running(devices):
                with pytest.raises(RoundAborted, match=r"COHORT_TOO_SMALL: .*phase share"):
                    await server.run()
            return devices

    devices = run(go())
    assert not any(device.sums for device in devices)
    assert devices[1].reasons() == ["ROUND_ABORTED"] * 2
