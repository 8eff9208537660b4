"""Rounds of plain updates over real streams."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mycelia.aggregator.outcomes import outcomes_of
from mycelia.aggregator.runs.run import RunResult
from mycelia.engine.events import Round
from mycelia.engine.run import Run
from tests.aggregator.runs.conftest import People
from tests.aggregator.runs.run_world import Dummy, expected, plan, run, running, serving, shift


def test_every_update_is_in_the_model(people: People, tmp_path: Path) -> None:
    made = plan()

    async def go() -> RunResult:
        async with serving(people.world, tmp_path, made) as (server, port):
            devices = [Dummy(port, identity, made) for identity in people.first(3)]
            async with running(devices):
                result = (await server.run())["study"]
                stored = [outcomes_of(server._store, "study", round) for round in (0, 1)]
        for device in devices:
            assert device.reasons() == ["", ""]
            assert np.allclose(shift(made, result, device.delivered["study"]), 4.0, atol=1e-5)
        for each in stored:
            assert [(one.client, one.status) for one in each] == [(n, "ACCEPTED") for n in (1, 2, 3)]
            assert all(one.bytes_up and one.bytes_down and one.sha256 for one in each)
        return result

    result = run(go())
    assert (result.rounds, result.accepted, result.dropped, result.failed_rounds) == (2, 6, 0, 0)
    assert result.model_sha256 == expected(made, [(1, 2, 3)] * 2)
    logged = [event for event in Run.open(Path(result.run_dir)).events() if isinstance(event, Round)]
    assert [event.round for event in logged] == [1, 2]
