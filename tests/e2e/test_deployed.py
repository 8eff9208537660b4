"""The same federation, simulated and deployed, ends with the same model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mycelia.aggregator.config import FederationConfig
from mycelia.aggregator.runs.plans import Population, plan_run
from mycelia.aggregator.runs.run import RunResult
from mycelia.aggregator.runs.server import Places, Server, Work
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.position import Position
from mycelia.client.config import ClientConfig
from mycelia.client.notices import Report
from mycelia.client.runner import Device
from mycelia.engine.config import load_config
from mycelia.engine.data import Dataset
from mycelia.engine.recipe import Recipe
from mycelia.simulations import simulate
from mycelia.simulations.preparation import Prepared, prepare
from mycelia.simulations.scenario import Scenario
from tests.aggregator.connections import World

pytestmark = pytest.mark.e2e
CLIENTS = 4
BASE: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": [8]},
    "data": "digits",
    "algorithm": "fedavg",
    "rounds": 3,
    "cohort": CLIENTS,
    "population": {"clients": CLIENTS, "examples_per_client": 60},
    "partition": {"name": "dirichlet", "alpha": 0.5, "min_size": 12},
    "local": {"epochs": 2, "batch_size": 10, "lr": 0.1},
    "round": {"budget_s": 600.0, "over_select": 1.0},
    "update": {"max_weight": 2000.0},
    "evaluation": {"every": 1, "clients": 0},
    "backend": "inline",
    "seed": 11,
}
PRIVATE = {"epsilon": 8.0, "delta": 1e-3, "clip": {"name": "abadi", "bound": 1.0}}
UNIFORM = {"algorithm": {"name": "fedavg", "weighting": "uniform"}, "update": {}}
MASKS = {"secure_sum": {"corrupt": 0.0, "dropout": 0.0}}
CASES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "secure": MASKS,
    "scaffold": {"algorithm": "scaffold"},
    "fedadam": {"algorithm": {"name": "fedadam", "server_lr": 0.05}},
    "fednova-secure": {"algorithm": "fednova"} | MASKS,
    "fedprox-adaptive": {"algorithm": {"name": "fedprox", "mu": 0.1, "adaptive": True}},
    "example-level": UNIFORM | {"privacy": PRIVATE | {"unit": "example"}},
    "example-level-secure": UNIFORM | MASKS | {"privacy": PRIVATE | {"unit": "example"}},
    "central-noise": UNIFORM | {"privacy": PRIVATE | {"unit": "client", "epsilon": 50.0}},
    "local-noise": UNIFORM
    | {"update": {"max_abs": 1e6}}
    | {"privacy": PRIVATE | {"unit": "client", "model": "local", "epsilon": 50.0}},
    "quantile-clip": UNIFORM
    | {"privacy": {"epsilon": 80.0, "delta": 1e-3, "unit": "client", "clip": {"name": "quantile"}}},
    "shares": UNIFORM
    | MASKS
    | {"privacy": PRIVATE | {"unit": "client", "model": "distributed", "epsilon": 80.0}},
}  # fmt: skip


def own_data(prepared: Prepared, client: int) -> Dataset:
    data, partition = prepared.dataset, prepared.partition
    train = data.train.take(partition.indices(client))
    return Dataset(f"of client {client}", train, data.test, data.classes)


def device_config(folder: Path, port: int, scenario: Scenario) -> ClientConfig:
    model = scenario.model.model_dump(mode="json")
    return load_config(
        ClientConfig,
        {
            "client": {
                "server": [f"127.0.0.1:{port}"], "identity": str(folder), "model": model, "data": "digits",
            },
            "policy": {
                "purposes": ["test"], "algorithms": "any", "secure_sum": "any", "threat": "active",
                "issuer": "any",
            },
        },
    )  # fmt: skip


async def nothing(server: Server) -> None:
    """Nothing happens meanwhile."""


async def deployed(
    scenario: Scenario,
    folder: Path,
    spool_max: int = 0,
    meanwhile: Callable[[Server], Awaitable[None]] = nothing,
) -> tuple[RunResult, list[Report]]:
    prepared = prepare(scenario)
    settings = {
        name: value
        for name, value in scenario.model_dump(mode="json").items()
        if name in FederationConfig.model_fields and value is not None
    }
    config = load_config(FederationConfig, settings)
    dataset = prepared.dataset
    model, loss = scenario.model, scenario.loss_for(dataset.classes)
    recipe = Recipe.of(dataset, model.name, model.options, loss, scenario.seed)
    population = Population(CLIENTS, 2000, int(prepared.partition.sizes().sum()))
    plan = plan_run(config, recipe, name="test", purpose="test", population=population, test=dataset.test)
    world = World()
    for n in range(1, CLIENTS + 1):
        world.enrol_folder(n, folder / f"id{n}").close()
    places = Places(f"sqlite:///{folder}/mycelia.db", folder / "blobs", folder / "own", spool_max=spool_max)
    server = Server(world.keys, world.document(), [Work(plan, folder / "run")], places)
    port = await server.start("127.0.0.1:0")
    try:
        devices = [
            Device(
                device_config(folder / f"id{n}", port, scenario), data=own_data(prepared, n - 1), once=True
            )
            for n in range(1, CLIENTS + 1)
        ]
        tasks = [asyncio.create_task(device.arun()) for device in devices]
        async with asyncio.timeout(240):
            results, _ = await asyncio.gather(server.run(), meanwhile(server))
            reports = await asyncio.gather(*tasks)
    finally:
        await server.stop(0.1)
    return results["test"], reports


QUICK = ("fedavg", "secure", "scaffold", "example-level-secure", "central-noise")


@pytest.mark.parametrize(
    "name", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_deployed_is_simulated(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    scenario = load_config(Scenario, BASE | CASES[name])
    expected = simulate(scenario, out=tmp_path / "simulated")
    found, reports = asyncio.run(deployed(scenario, tmp_path))
    assert (found.rounds, found.failed_rounds, found.accepted) == (3, 0, 3 * CLIENTS)
    if name != "shares":  # the noise there belongs to a session, and each has its own
        assert found.model_sha256 == expected.model_sha256
        assert found.test_accuracy == expected.test_accuracy
    assert all(report.delivered["test"].model.is_file() for report in reports)


def test_updates_that_find_a_full_spool_are_kept(tmp_path: Path) -> None:
    """Everybody is told to wait, and then asked one after the other."""

    async def fill(server: Server) -> None:
        spool, other = server._spool, Payload(bytes(1_500_000))
        assert spool.offer(99, other.offer(pb.UPDATE, Position("another", 0, 0)), 0.0)
        while spool.waiting < CLIENTS:
            await asyncio.sleep(0.02)
        spool.forget("another", 1)
        await server.service._room_in_spool()

    large = {"model": {"name": "mlp", "hidden": [5000]}, "rounds": 1}  # updates of 1.5 MB go to files
    scenario = load_config(Scenario, BASE | large)
    found, reports = asyncio.run(deployed(scenario, tmp_path, spool_max=1_600_000, meanwhile=fill))
    assert (found.rounds, found.failed_rounds, found.accepted, found.dropped) == (1, 0, CLIENTS, 0)
    assert [(report.accepted, report.failed) for report in reports] == [(1, 0)] * CLIENTS
