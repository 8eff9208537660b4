"""A server's memory does not grow with its rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.position import Position
from tests.aggregator.runs.conftest import People
from tests.aggregator.runs.killed_server import Orders, ended, start, write_keys
from tests.aggregator.runs.run_world import Dummy, plan, run, running
from tests.aggregator.runs.test_killed_plain import free_port

MB = 2**20


class Forgetful(Dummy):
    """A device that keeps nothing of rounds that are over."""

    async def task(self, at: Position, task: pb.Task) -> None:
        for kept in (self.tasks, self.answers, self.models):
            kept.clear()
        for listed in (self.outcomes, self.sent, self.asked):
            listed.clear()
        await super().task(at, task)


def memory(people: People, folder: Path, rounds: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Resident bytes of the server after each round. An update has 240 kB, so some that stay are seen."""
    settings: dict[str, Any] = {"rounds": rounds, "evaluation": {"every": 0, "clients": 0}, "hidden": 10_000}
    port = free_port()
    write_keys(people.world, folder / "keys")
    made = plan(**settings)

    async def go() -> None:
        async with running([Forgetful(port, each, made) for each in people.first(3)]):
            process = start(Orders(folder, port, settings, watch=True))
            assert await ended(process) == 0

    run(go(), 640.0)
    return np.array([float(line) for line in (folder / "memory").read_text().split()])


def test_leaked_update_memory(people: People, tmp_path: Path) -> None:
    """A round leaves less than one update of its three behind."""
    found = memory(people, tmp_path, 60)
    assert len(found) == 60
    slope = np.polyfit(np.arange(30), found[30:], 1)[0]
    assert slope < 0.2 * MB, f"{slope / MB:.3f} MB a round"


@pytest.mark.slow
def test_leaked_update_memory_over_a_thousand_rounds(people: People, tmp_path: Path) -> None:
    found = memory(people, tmp_path, 1000)
    slope = 100 * np.polyfit(np.arange(900), found[100:], 1)[0]
    assert slope < MB, f"{slope / MB:.3f} MB in 100 rounds"
