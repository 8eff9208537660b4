"""kill -9 beside each record of a plain run, and the same command again."""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from mycelia.aggregator.store import Store
from mycelia.aggregator.tables import outcomes, releases, round_log
from tests.aggregator.runs.conftest import People
from tests.aggregator.runs.killed_server import Kill, Orders, ended, result_of, start, write_keys
from tests.aggregator.runs.run_world import Dummy, expected, plan, run, running

KINDS = ("OPEN", "ISSUED", "ACCEPTED", "SNAPSHOT", "FROZEN", "MERGED", "PUBLISHED")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def facts(folder: Path) -> dict[str, Any]:
    """What is in the store at the end."""
    store = Store.open(f"sqlite:///{folder}/mycelia.db")
    try:
        with store.read() as connection:
            kinds = Counter(connection.scalars(select(round_log.c.kind)).all())
            rows = connection.execute(select(outcomes)).all()
            charged = connection.execute(select(releases.c.round, releases.c.attempt)).all()
    finally:
        store.close()
    return {
        "kinds": kinds,
        "statuses": Counter(row.status for row in rows),
        "keys": [(row.round, row.attempt, row.client) for row in rows],
        "charged": [tuple(each) for each in charged],
    }


def killed(
    people: People,
    folder: Path,
    *kills: Kill,
    device: type[Dummy] = Dummy,
    new_roster: bool = False,
    **settings: Any,
) -> tuple[dict[str, Any], dict[str, Any], list[Dummy]]:
    """A run whose server is killed, once for each of these, and started again at last."""
    made, port = plan(**settings), free_port()
    write_keys(people.world, folder / "keys")

    async def go() -> list[Dummy]:
        devices = [device(port, identity, made) for identity in people.first(made.population.clients)]
        async with running(devices):
            for kill in kills:
                process = start(Orders(folder, port, settings, kill))
                assert await ended(process) == -9, kill
            if new_roster:
                people.world.epoch += 1
                (folder / "keys" / "roster.bin").write_bytes(people.world.document())
            process = start(Orders(folder, port, settings))
            assert await ended(process) == 0
        return devices

    devices = run(go(), 80.0)
    for each in devices:  # whatever else it was told, first of all that it is in the model
        first = {outcome.at.round: outcome.reason for outcome in reversed(each.outcomes)}
        assert set(first.values()) <= {""}, each.reasons()
    return result_of(folder), facts(folder), devices


def check_plain(result: dict[str, Any], found: dict[str, Any]) -> None:
    assert result["model_sha256"] == expected(plan(), [(1, 2, 3)] * 2)
    assert (result["rounds"], result["accepted"], result["failed_rounds"]) == (2, 6, 0)
    assert found["kinds"]["OPEN"] == found["kinds"]["PUBLISHED"] == 2
    assert found["kinds"]["ACCEPTED"] == 6
    assert found["statuses"] == {"ACCEPTED": 6}
    assert sorted(found["keys"]) == [(round, 0, client) for round in (0, 1) for client in (1, 2, 3)]


FAST = [Kill("ACCEPTED", 5), Kill("MERGED", 2, before=True), Kill("PUBLISHED")]
ALL = [Kill(kind, nth, before) for kind in KINDS for nth in (1, 2) for before in (False, True)]


def _id(kill: Kill) -> str:
    return f"{'before' if kill.before else 'after'}-{kill.kind.removeprefix('SA1/')}-{kill.nth}"


@pytest.mark.parametrize("kill", FAST, ids=_id)
def test_the_model_is_that_of_an_undisturbed_run(people: People, tmp_path: Path, kill: Kill) -> None:
    result, found, _ = killed(people, tmp_path, kill)
    check_plain(result, found)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill for kill in ALL if kill not in FAST], ids=_id)
def test_any_record(people: People, tmp_path: Path, kill: Kill) -> None:
    result, found, _ = killed(people, tmp_path, kill)
    check_plain(result, found)


def test_killed_again_and_again(people: People, tmp_path: Path) -> None:
    """Once at each kind of record of one run; of a round no more than its own work is repeated."""
    kills = [Kill("OPEN"), Kill("ISSUED"), Kill("ACCEPTED"), Kill("SNAPSHOT"), Kill("FROZEN"), Kill("MERGED")]
    result, found, devices = killed(people, tmp_path, *kills)
    check_plain(result, found)
    for device in devices:
        assert len([at for at in device.answers if at.round == 0]) == 1
