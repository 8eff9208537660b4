"""A model of half a gigabyte goes to devices and back with the settings that everybody has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import nn

from mycelia.aggregator.config import FederationConfig
from mycelia.aggregator.runs.plans import Population, plan_run
from mycelia.aggregator.runs.server import Places, Server, Work
from mycelia.engine.config import load_config
from mycelia.engine.recipe import Recipe
from tests.aggregator.connections import World
from tests.aggregator.runs.run_world import Dummy

PARAMETERS = 136_000_000  # 544 MB of float32


def wide(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    del input_shape, classes

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, PARAMETERS, bias=False)
            nn.init.zeros_(self.inner.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)[:, :2]

    return Wide()


@pytest.mark.slow
def test_544_mb_model_needs_no_setting(tmp_path: Path) -> None:
    example = (torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64))
    recipe = Recipe(f"{__name__}:wide", {}, "cross-entropy", (1,), 2, example)
    table = {
        "model": "mlp", "data": "none", "algorithm": "fedavg", "rounds": 1, "cohort": 2,
        "round": {"budget_s": 3600.0, "over_select": 1.0}, "update": {"max_weight": 10.0},
        "evaluation": {"clients": 0},
    }  # fmt: skip
    config = load_config(FederationConfig, table)
    plan = plan_run(config, recipe, name="large", purpose="large", population=Population(2, 10))

    async def go() -> None:
        world = World()
        identities = [world.enrol_folder(n, tmp_path / f"id{n}") for n in (1, 2)]
        places = Places(f"sqlite:///{tmp_path}/mycelia.db", tmp_path / "blobs", tmp_path / "own")
        server = Server(world.keys, world.document(), [Work(plan, tmp_path / "run")], places)
        port = await server.start("127.0.0.1:0")
        try:
            devices = [Dummy(port, identity, plan) for identity in identities]
            tasks = [asyncio.create_task(device.run()) for device in devices]
            results = await server.run()
            await asyncio.gather(*tasks)
        finally:
            await server.stop(0.1)
        result = results["large"]
        assert (result.rounds, result.accepted) == (1, 2)
        assert result.bytes_up > 2 * 4 * PARAMETERS

    asyncio.run(go())
