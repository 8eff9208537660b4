"""Two servers on one PostgreSQL database: one leads, the other waits and goes on where it stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from mycelia.client.identity import DeviceIdentity
from tests.aggregator.runs.replicas import (
    Replica,
    Servers,
    Trigger,
    devices,
    ended,
    facts,
    free_ports,
    result_of,
    start,
    terms,
    until,
)
from tests.aggregator.runs.run_world import (
    Dummy,
    deadlines,
    expected,
    expected_secure,
    plan,
    run,
    running,
)
from tests.aggregator.runs.secure_world import SecureDummy

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet

    from tests.aggregator.databases import Server as Postgres

pytest_plugins = ["tests.aggregator.databases"]

SECURE: dict[str, Any] = {
    "secure_sum": {"threat": "passive", "corrupt": 0.0, "dropout": 0.3},
    "update": {"max_weight": 1.0},
}


class Pair(NamedTuple):
    """Two servers, one operator, and devices."""

    world: Servers
    devices: list[DeviceIdentity]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    world, folder = Servers(2), tmp_path_factory.mktemp("pair")
    return Pair(world, [world.enrol_folder(n, folder / f"id{n}") for n in range(1, 4)])


class Two:
    """The servers of a test.

    Attributes:
        first: leads at the beginning.
        second: waits.
    """

    def __init__(self, pair: Pair, folder: Path, url: str, blobs: str, **more: Any) -> None:
        self.pair, self.ports, self.url = pair, free_ports(2), url
        shared = folder / "blobs" if blobs == "folder" else None
        first = more.pop("trigger", None)
        self.replicas = []
        for number, name in enumerate(pair.world.named):
            own = folder / name
            own.mkdir()
            pair.world.write_keys(name, own / "keys")
            trigger = first if number == 0 else None
            self.replicas.append(Replica(own, self.ports[number], url, shared, trigger=trigger, **more))
        self.first, self.second = self.replicas

    async def begin(self) -> tuple[Any, Any]:
        """The first leads before the second is there, and that one waits before there are devices."""
        one = start(self.first)
        await until(lambda: bool(terms(self.first.folder)))
        two = start(self.second)
        await until((self.second.folder / "up").exists)
        return one, two


def check(two: Two, made: Any, want: str) -> dict[str, Any]:
    result, found = result_of(two.second.folder), facts(two.url)
    assert result["model_sha256"] == want
    assert (result["rounds"], result["accepted"], result["failed_rounds"]) == (2, 6, 0)
    assert found["kinds"]["OPEN"] == found["kinds"]["PUBLISHED"] == 2
    assert found["statuses"] == {"ACCEPTED": 6}
    assert found["fences"] == sorted(found["fences"])
    return found


def every_pair(kinds: Sequence[str], folder: str) -> list[ParameterSet]:
    """Blobs in rows at every record, and in a folder at one; the other pairs of the two are slow."""
    return [
        pytest.param(blobs, kind, marks=() if blobs == "rows" or kind == folder else pytest.mark.slow)
        for blobs in ("rows", "folder")
        for kind in kinds
    ]


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("blobs", "kind"), every_pair(["ISSUED", "ACCEPTED", "FROZEN", "MERGED"], folder="ACCEPTED")
)
def test_the_leader_of_a_plain_round_is_killed(
    pair: Pair, tmp_path: Path, postgres: Postgres, blobs: str, kind: str
) -> None:
    two = Two(pair, tmp_path, postgres.database(), blobs, trigger=Trigger(kind, 2))
    made = plan()

    async def go() -> list[Dummy]:
        one, other = await two.begin()
        known = devices(Dummy, two.ports, pair.devices, made)
        async with running(known):
            assert await ended(one) == -9
            assert await ended(other) == 0
        return known

    known = run(go(), 80.0)
    check(two, made, expected(made, [(1, 2, 3)] * 2))
    for device in known:
        assert device.delivered
        # of a round that is published before a device is back nobody tells it
        assert set(device.reasons()) == {""}


@pytest.mark.postgres
@pytest.mark.parametrize(("blobs", "kind"), every_pair(["CONFIG", "U0", "U1", "U2", "RESULT"], folder="U1"))
def test_the_leader_of_a_secure_round_is_killed(
    pair: Pair, tmp_path: Path, postgres: Postgres, blobs: str, kind: str
) -> None:
    """The other server goes on with the session, in its own name."""
    two = Two(pair, tmp_path, postgres.database(), blobs, trigger=Trigger(f"SA1/{kind}"), settings=SECURE)
    made = plan(**SECURE)

    async def go() -> list[Any]:
        one, other = await two.begin()
        known: list[Any] = devices(SecureDummy, two.ports, pair.devices, made)
        async with running(known):
            assert await ended(one) == -9
            assert await ended(other) == 0
        return known

    known = run(go(), 80.0)
    check(two, made, expected_secure(made, [(1, 2, 3)] * 2))
    for device in known:
        assert not device.errors
        # a device that is not back in time is not told that the sum of before is open
        assert len(device.sums) == 2 or (kind == "RESULT" and len(device.sums) == 1)


@pytest.mark.postgres
@pytest.mark.parametrize("blobs", ["folder", "rows"])
def test_a_leader_that_ends_gives_the_lead_back(
    pair: Pair, tmp_path: Path, postgres: Postgres, blobs: str
) -> None:
    """Its lease would last for longer than anybody waits here."""
    trigger = Trigger("ACCEPTED", 2, signal=signal.SIGTERM)
    two = Two(pair, tmp_path, postgres.database(), blobs, trigger=trigger, lease_s=600.0)
    made = plan()

    async def go() -> None:
        one, other = await two.begin()
        async with running(devices(Dummy, two.ports, pair.devices, made)):
            assert await ended(one) == 0
            assert await ended(other) == 0

    run(go(), 80.0)
    found = check(two, made, expected(made, [(1, 2, 3)] * 2))
    assert not (two.first.folder / "result.json").exists()
    assert found["kinds"]["ACCEPTED"] == 6  # what was in the snapshot is not asked for again


@pytest.mark.postgres
def test_stale_leader_cannot_write(pair: Pair, tmp_path: Path, postgres: Postgres) -> None:
    """It is paused in a round, and wakes up when another server goes on with that round."""
    times = deadlines(heartbeat=0.5, lost=1.5)
    two = Two(
        pair, tmp_path, postgres.database(), "folder", deadlines=times,
        trigger=Trigger("ACCEPTED", 2, signal=signal.SIGSTOP),
    )  # fmt: skip
    made, gate = plan(), asyncio.Event()

    async def go() -> None:
        one, other = await two.begin()
        known = devices(Dummy, two.ports, pair.devices, made)
        known[2].habits.gate = gate
        async with running(known):
            await until(lambda: bool(terms(two.second.folder)))
            await until(lambda: len(known[2].asked) > 1)  # the other server asks for the round again
            before = facts(two.url)["fences"].count(1)
            os.kill(one.pid, signal.SIGCONT)
            await until((two.first.folder / "lost").exists)
            assert facts(two.url)["fences"].count(1) == before
            assert not any(device.outcomes for device in known)
            gate.set()
            assert await ended(other) == 0
            assert facts(two.url)["fences"].count(1) == before
            assert await ended(one) == 0  # it leads once more, and finds the run at its end

    run(go(), 80.0)
    check(two, made, expected(made, [(1, 2, 3)] * 2))
    assert result_of(two.first.folder)["model_sha256"] == result_of(two.second.folder)["model_sha256"]


@pytest.mark.postgres
def test_a_server_of_the_same_name_ends_the_other(pair: Pair, tmp_path: Path, postgres: Postgres) -> None:
    two = Two(pair, tmp_path, postgres.database(), "rows", lease_s=600.0)
    again = tmp_path / "copy"
    again.mkdir()
    pair.world.write_keys("agg-1", again / "keys")
    copy = Replica(again, free_ports(1)[0], two.url, None, lease_s=1.0)

    async def go() -> None:
        one = start(replace(two.first, lease_s=1.0))
        await until(lambda: bool(terms(two.first.folder)))
        other = start(copy)
        assert await ended(one) == 3
        assert "by the name of this server, agg-1" in (two.first.folder / "error").read_text()
        assert other.is_alive()
        os.kill(other.pid, signal.SIGTERM)
        assert await ended(other) == 0

    run(go(), 60.0)


def test_two_servers_one_sqlite_refused(pair: Pair, tmp_path: Path) -> None:
    two = Two(pair, tmp_path, f"sqlite:///{tmp_path}/mycelia.db", "folder")

    async def go() -> None:
        one = start(two.first)
        await until((two.first.folder / "up").exists)
        other = start(two.second)
        assert await ended(other) == 3
        assert one.is_alive()
        os.kill(one.pid, signal.SIGTERM)
        assert await ended(one) == 0

    run(go(), 60.0)
    assert "a SQLite file belongs to one server" in (two.second.folder / "error").read_text()
