"""The Flower server of workload S1: FedAvg on Ray actors with the workload's cohorts, each round timed."""

from __future__ import annotations

import time
from collections.abc import Iterable

import flower_client
import torch
import workload
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from flwr.superlink.grid import InMemoryGrid
from measure import Clock, Settings
from torch import nn

_NODES_WITHIN_S = 60.0


class TimedFedAvg(FedAvg):
    """FedAvg on the workload's cohorts. Client i is the i-th node; fewer nodes are slots of a cohort."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        super().__init__(fraction_evaluate=0.0)
        self._settings = settings
        self._clock = clock

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message for each member of the cohort; all share one record of weights. A round starts here."""
        self._clock.begin_round()
        asked, round_index = self._settings, server_round - 1
        nodes = sorted(grid.get_node_ids())
        messages = []
        for position, client in enumerate(asked.cohort_of(round_index)):
            task = flower_client.describe(asked, round_index, client)
            content = RecordDict({"arrays": arrays, "config": task})
            node = nodes[client if len(nodes) == asked.clients else position]
            messages.append(Message(content, dst_node_id=node, message_type=MessageType.TRAIN))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Averages by examples, which are equal here. A round ends here; a failed client is an error."""
        answers = list(replies)
        failed = [answer.error.reason for answer in answers if answer.has_error()]
        if failed or len(answers) != self._settings.cohort:
            msg = f"round {server_round}: {len(answers)} answers, {len(failed)} failed: {failed[:1]}"
            raise RuntimeError(msg)
        merged = super().aggregate_train(server_round, answers)
        self._clock.end_round()
        return merged


def await_nodes(grid: Grid, count: int) -> None:
    """Waits until the engine, which starts beside the server, has registered its nodes."""
    deadline = time.monotonic() + _NODES_WITHIN_S
    while len(list(grid.get_node_ids())) < count:
        if time.monotonic() > deadline:
            msg = f"Flower has not registered {count} nodes within {_NODES_WITHIN_S} s"
            raise TimeoutError(msg)
        time.sleep(0.01)


def simulate(settings: Settings, clock: Clock, supernodes: int, pull_interval: float) -> nn.Module:
    """Runs the federation with one Ray actor per process asked for; returns the merged model.

    `pull_interval` is the server's pause in seconds between two looks for answers.
    """
    model = workload.build_model(settings.model, settings.seed)
    finals: list[ArrayRecord] = []
    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)
        await_nodes(grid, supernodes)
        if isinstance(grid, InMemoryGrid):
            grid.pull_interval = pull_interval
        strategy = TimedFedAvg(settings, clock)
        outcome = strategy.start(
            grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=settings.rounds
        )
        finals.append(outcome.arrays)

    run_simulation(
        server_app=server,
        client_app=flower_client.app,
        num_supernodes=supernodes,
        backend_config={
            "init_args": {"num_cpus": settings.processes},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    model.load_state_dict(finals[0].to_torch_state_dict())
    return model
