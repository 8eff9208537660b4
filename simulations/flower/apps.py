"""A scenario as a Flower app: `flower_apps`, and `run_in_flower` for Flower's simulation."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from mycelia.aggregator.effects import Abort
from mycelia.aggregator.private_plans import ServerPlan
from mycelia.engine.checkpoint import Checkpoint
from mycelia.engine.config import load_config, to_toml
from mycelia.engine.errors import ConfigError, MyceliaError
from mycelia.engine.events import Listener
from mycelia.engine.plugins import import_extra
from mycelia.engine.run import Run
from mycelia.simulations.flower import device
from mycelia.simulations.flower.backend import FlowerNodes
from mycelia.simulations.guard import open_guard
from mycelia.simulations.result import SimulationResult
from mycelia.simulations.scenario import BackendConfig, Scenario, load_scenario
from mycelia.simulations.simulator import _Simulation

__all__ = ["flower_apps", "run_in_flower"]

_RESULT = "mycelia-result"


def flower_apps(
    scenario: Scenario | Mapping[str, Any] | str,
    *,
    out: Path | None = None,
    listeners: Sequence[Listener] = (),
) -> tuple[ServerApp, ClientApp]:
    """A scenario as the two apps of a Flower project.

    Node i of the federation is client i of the scenario's population: there are as many nodes as clients, and
    a node knows its number by `partition-id`, as in Flower's simulation. The run ends with the model that
    `simulate` ends with, and leaves the same run folder; its result is also in the ServerApp's context, as
    JSON in `context.state["mycelia-result"]["json"]`.

    Args:
        scenario: what to run: a `Scenario`, its settings as a table, or a built-in name or TOML file. Its
            backend is not used.
        out: the run folder; None: a new one below `runs/`.
        listeners: called with every event, in the ServerApp's process.

    Raises:
        ConfigError: settings that are out of range, contradict each other, or have no place in Flower.
    """
    server, client, _ = _apps(_scenario(scenario), out, listeners)
    return server, client


def run_in_flower(
    scenario: Scenario | Mapping[str, Any] | str,
    *,
    out: Path | None = None,
    listeners: Sequence[Listener] = (),
    processes: int = 0,
    backend_config: Mapping[str, Any] | None = None,
) -> SimulationResult:
    """Run a scenario in Flower's own simulation, on Ray.

    Args:
        scenario: as for `flower_apps`.
        out: the run folder; None: a new one below `runs/`.
        listeners: called with every event.
        processes: Ray actors that train, each on one core; 0: one per core.
        backend_config: what Flower's `run_simulation` takes under this name, in the place of `processes`.

    Raises:
        ConfigError: as for `flower_apps`; or Flower or Ray is not installed.
        DataError: data that is missing or malformed.
        RoundAborted: too many rounds failed in a row.
    """
    import_extra("ray", "flower", who="run_in_flower")
    from flwr.simulation import run_simulation

    scenario = _scenario(scenario)
    server, client, found = _apps(scenario, out, listeners)
    clients = device.prepared_for(scenario.model_dump_json()).partition.clients
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    config: dict[str, Any] = {
        "init_args": {"num_cpus": processes or cores},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    if backend_config is not None:
        config = dict(backend_config)
    run_simulation(server_app=server, client_app=client, num_supernodes=clients, backend_config=config)
    if not found:
        raise MyceliaError("the ServerApp ended without a result", fix="look at Flower's log", who="Flower")
    return found[0]


def _scenario(scenario: Scenario | Mapping[str, Any] | str) -> Scenario:
    """The scenario, with the backend that its record will name."""
    if isinstance(scenario, str):
        scenario = load_scenario(scenario)
    elif not isinstance(scenario, Scenario):
        scenario = load_config(Scenario, dict(scenario), [])
    _check(scenario)
    return scenario


def _check(scenario: Scenario) -> None:
    """Refuse what Flower's clients cannot do."""
    if scenario.secure_sum is not None:
        raise ConfigError(
            "the scenario has a [secure_sum] block",
            rule="a ClientApp sends its update in the clear to the ServerApp",
            fix="leave it out, or run it with `mycelia simulate` or `mycelia serve`",
            who="secure_sum",
        )
    privacy = scenario.privacy
    if privacy is not None and (privacy.unit != "client" or privacy.model != "central"):
        raise ConfigError(
            f"privacy of unit {privacy.unit!r} and model {privacy.model!r}",
            rule="through Flower the server adds the noise: the clients' own ledgers have no place there",
            fix='use unit = "client" and model = "central", or run it with `mycelia simulate`',
            who="privacy",
        )


def _apps(
    scenario: Scenario, out: Path | None, listeners: Sequence[Listener]
) -> tuple[ServerApp, ClientApp, list[SimulationResult]]:
    """The apps, and where the server leaves its result."""
    text = scenario.model_dump_json()
    server, client = ServerApp(), ClientApp()
    found: list[SimulationResult] = []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        result = _serve(text, grid, out, listeners)
        found.append(result)
        context.state[_RESULT] = ConfigRecord({"json": json.dumps(result.to_json())})

    # what Ray ships is these three functions and the text; the modules are imported once a process
    @client.query()
    def query(message: FlowerMessage, context: Context) -> FlowerMessage:
        return device.query(text, message, context)

    @client.train()
    def train(message: FlowerMessage, context: Context) -> FlowerMessage:
        return device.train(text, message, context)

    @client.evaluate()
    def evaluate(message: FlowerMessage, context: Context) -> FlowerMessage:
        return device.evaluate(text, message, context)

    return server, client, found


def _serve(text: str, grid: Grid, out: Path | None, listeners: Sequence[Listener]) -> SimulationResult:
    """The whole run, inside the ServerApp."""
    scenario = Scenario.model_validate_json(text)
    # the record says where clients trained; their states are gone with Flower's run, which cannot be resumed
    recorded = scenario.model_copy(
        update={"backend": BackendConfig.model_construct(name="flower", workers=0)}
    )
    existed = out is not None and out.exists()
    with Run.create(out, "simulate", to_toml(recorded), listeners=listeners) as run:
        sitting = _Sitting(recorded, run, grid, text)
        try:
            return sitting.go(None)
        except MyceliaError:
            if not sitting.started:  # nothing ran: a folder would only be in the way of the next try
                run.close()
                shutil.rmtree(run.path)
                if existed:
                    run.path.mkdir()
            raise


class _Sitting(_Simulation):
    """The simulator's run over the nodes of a Flower Grid."""

    def __init__(self, scenario: Scenario, run: Run, grid: Grid, text: str) -> None:
        super().__init__(scenario, run)
        self._grid, self._text = grid, text
        self._nodes: FlowerNodes | None = None

    def _go(self, checkpoint: Checkpoint | None) -> SimulationResult:
        scenario, prepared = self.scenario, device.prepared_for(self._text)
        self.plan_name = prepared.plan.name
        guard = None
        if isinstance(prepared.privacy, ServerPlan):
            guard = open_guard(prepared.privacy, prepared.form, self.run.path, scenario.seed, checkpoint)
            self.guard = guard
        self._nodes = FlowerNodes(prepared, self._grid, device.digest(self._text), scenario.round.budget_s)
        with self._nodes as backend:
            return self._all_rounds(prepared, backend, guard, checkpoint)

    def _failed(self, aborted: Abort) -> None:
        if self._nodes is not None:
            self._nodes.forget(self.number - 1)
        super()._failed(aborted)
