"""Runs with noise: every release is paid for once, before it happens, and a run ends when it cannot pay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mycelia.aggregator.charges import releases_of
from mycelia.aggregator.runs.run import RunResult
from mycelia.aggregator.wire.position import Position
from tests.aggregator.runs.conftest import People
from tests.aggregator.runs.killed_server import Kill
from tests.aggregator.runs.run_world import Dummy, deadlines, expected, plan, run, running, serving
from tests.aggregator.runs.secure_world import SecureDummy
from tests.aggregator.runs.test_killed_plain import _id, killed

PRIVATE: dict[str, Any] = {
    "privacy": {
        "unit": "client", "epsilon": 20.0, "delta": 1e-2, "clip": {"name": "abadi", "bound": 5.0},
        "noise_source": "seeded",
    },
    "algorithm": {"name": "fedavg", "weighting": "uniform"}, "rounds": 2, "clients": 10, "cohort": 3,
}  # fmt: skip
SHARES: dict[str, Any] = {
    "privacy": {
        "unit": "client", "model": "distributed", "epsilon": 50.0, "delta": 1e-3,
        "clip": {"name": "abadi", "bound": 0.5}, "mechanism": "skellam",
    },
    "secure_sum": {"threat": "passive", "corrupt": 0.0, "dropout": 0.2},
    "algorithm": {"name": "fedavg", "weighting": "uniform"}, "rounds": 2, "clients": 10, "cohort": 3,
}  # fmt: skip


def a_run(
    people: People, folder: Path, device: type[Dummy] = Dummy, **settings: Any
) -> tuple[RunResult, list[Any]]:
    made = plan(**settings)

    async def go() -> tuple[RunResult, list[Any]]:
        async with serving(people.world, folder, made) as (server, port):
            async with running([device(port, each, made) for each in people.first(made.population.clients)]):
                result = (await server.run())["study"]
            return result, releases_of(server._store, "study")

    return run(go())


def test_each_round_is_charged_once(people: People, tmp_path: Path) -> None:
    result, released = a_run(people, tmp_path, **PRIVATE)
    assert [(each.round, each.attempt) for each in released] == [(0, 0), (1, 0)]
    assert result.privacy is not None
    assert (result.rounds, result.stopped_by) == (2, "")
    assert result.model_sha256 != expected(plan(**PRIVATE), [(1, 2, 3)] * 2)  # there is noise in it


@pytest.mark.parametrize(
    "kill",
    [
        Kill("CHARGED", 1, before=True),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                Kill("FROZEN", 2), Kill("CHARGED", 2), Kill("MERGED", 1, before=True), Kill("MERGED", 2),
            )
        ),
    ],
    ids=_id,
)  # fmt: skip
def test_killed_beside_a_release(people: People, tmp_path: Path, kill: Kill) -> None:
    """The same noise is added to the same sum, and paid for once."""
    undisturbed, _ = a_run(people, tmp_path / "undisturbed", **PRIVATE)
    (tmp_path / "killed").mkdir()
    result, found, _ = killed(people, tmp_path / "killed", kill, **PRIVATE)
    assert result["model_sha256"] == undisturbed.model_sha256
    assert found["charged"] == [(0, 0), (1, 0)]
    assert found["kinds"]["CHARGED"] == 2
    assert result["failed_rounds"] == 0


@pytest.mark.slow
def test_secret_noise_survives_a_kill(people: People, tmp_path: Path) -> None:
    """The key of the noise is on the disk before the first release: one sum never has two noises."""
    settings = PRIVATE | {"privacy": PRIVATE["privacy"] | {"noise_source": "os"}}
    result, found, _ = killed(
        people, tmp_path, Kill("CHARGED", 1), Kill("MERGED", 1, before=True), **settings
    )
    assert result["failed_rounds"] == 0
    assert found["charged"] == [(0, 0), (1, 0)]


def test_budget_stops_the_run(people: People, tmp_path: Path) -> None:
    """A noise multiplier that pays for some of the rounds."""
    privacy = PRIVATE["privacy"] | {"noise_multiplier": 1.0}
    settings = PRIVATE | {"privacy": privacy, "rounds": 60}
    result, released = a_run(people, tmp_path, **settings)
    assert result.stopped_by == "budget"
    assert 0 < result.rounds < 60
    assert [each.round for each in released] == list(range(result.rounds))


def test_noise_in_shares_is_charged_once(people: People, tmp_path: Path) -> None:
    result, released = a_run(people, tmp_path, SecureDummy, **SHARES)
    assert [(each.round, each.attempt) for each in released] == [(0, 0), (1, 0)]
    assert (result.rounds, result.failed_rounds, result.accepted) == (2, 0, 6)


@pytest.mark.slow
def test_noise_in_shares_killed_at_the_release(people: People, tmp_path: Path) -> None:
    result, found, devices = killed(people, tmp_path, Kill("SA1/CHARGED"), device=SecureDummy, **SHARES)
    assert found["charged"] == [(0, 0), (1, 0)]
    assert (result["rounds"], result["failed_rounds"]) == (2, 0)
    assert sum(len(device.released) for device in devices) == 6


def test_released_noise_is_not_tried_again(people: People, tmp_path: Path) -> None:
    """Two of three are gone when shares are asked for: it was paid for, and the next round is another."""
    made = plan(**SHARES)
    short = deadlines(select=0.1, advertise=1.0, configure=2.0, train=3.0, agree=4.0, unmask=5.0, merge=60.0)

    async def go() -> tuple[RunResult, list[Any]]:
        async with serving(people.world, tmp_path, made, times=short) as (server, port):
            devices = [SecureDummy(port, each, made) for each in people.first(10)]
            gone: set[int] = set()
            for device in devices:

                def drop_two(at: Position, kind: str, device: SecureDummy = device) -> None:
                    if kind == "unmask" and at.round == 0 and len(gone) < 2:
                        gone.add(device.client)
                        device.drops[0, 0] = "unmask"

                device.before = drop_two
            async with running(devices):
                result = (await server.run())["study"]
            return result, releases_of(server._store, "study")

    result, released = run(go())
    assert [(each.round, each.attempt) for each in released] == [(0, 0), (1, 0)]
    assert (result.rounds, result.failed_rounds, result.accepted) == (2, 1, 3)
