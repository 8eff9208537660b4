"""What a device computes is what the simulation computes for that client, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mycelia.aggregator.tensor_sum import TensorSum
from mycelia.aggregator.wire.payload import check_tensors
from mycelia.aggregator.wire.updates_form import MODEL_ROLES, update_form
from mycelia.engine.algorithms import Message, ServerState
from mycelia.engine.sums import ExactSum
from tests.client.small_runs import Side, payloads, scenario, simulated

pytestmark = pytest.mark.usefixtures("captured_once")

PRIVATE = {"epsilon": 50.0, "delta": 1e-3, "clip": {"name": "abadi", "bound": 0.5}}
LOCAL = {"unit": "client", "model": "local", **PRIVATE}

RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg, uniform": {"algorithm": {"name": "fedavg", "weighting": "uniform"}, "local": {"steps": 3}},
    "batch norm": {"model": {"name": "resnet8", "norm": "batch"}, "local": {"steps": 1}},
    "scaffold": {"algorithm": "scaffold"},
    "fednova": {"algorithm": "fednova"},
    "fedprox": {"algorithm": {"name": "fedprox", "adaptive": True}},
    "fedadam": {"algorithm": "fedadam"},
    "fedbn": {"algorithm": "fedbn", "model": {"name": "resnet8", "norm": "batch"}, "local": {"steps": 1}},
    "local-only": {"algorithm": "local-only"},
    "examples": {
        "algorithm": {"name": "fedavg", "weighting": "uniform"},
        "privacy": {"unit": "example", **PRIVATE},
        "local": {"epochs": 1, "batch_size": 5, "lr": 0.1},
    },
    "central": {
        "algorithm": {"name": "fedavg", "weighting": "uniform"},
        "privacy": {"unit": "client", **PRIVATE},
    },
    "adaptive": {
        "algorithm": {"name": "fedavg", "weighting": "uniform"},
        "privacy": {"unit": "client", **PRIVATE, "clip": {"name": "quantile", "bound": 0.5}},
    },
    "scaled": {
        "algorithm": {"name": "fedavg", "weighting": "uniform"},
        "privacy": {"unit": "client", **PRIVATE, "clip": {"name": "auto-s", "bound": 0.5}},
    },
    "local noise": {"algorithm": {"name": "fedavg", "weighting": "uniform"}, "privacy": LOCAL},
}  # fmt: skip


def after(state: ServerState, round: int) -> ServerState:
    """Another model than the first, whatever the round."""
    torch.manual_seed(round)
    vector = state.vector + torch.randn(state.vector.shape) / 50
    extra = {
        name: tensor + (torch.randn(tensor.shape) / 50).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in state.extra.items()
    }
    return replace(state, vector=vector, extra=extra)


@pytest.mark.parametrize("run", RUNS)
def test_the_bits_are_those_of_the_simulation(run: str, tmp_path: Path) -> None:
    given = scenario(**RUNS[run])
    with simulated(given, tmp_path / "run") as simulation:
        prepared = simulation.prepared
        pipeline = prepared.pipeline(simulation.guard)
        state = prepared.algorithm.start(prepared.program)
        clients = [1, 4]
        sides = {client: Side.of(prepared, client, tmp_path / f"device-{client}") for client in clients}
        for round in range(2):
            state = after(state, round)
            extra = {**prepared.algorithm.message_extra(state), **pipeline.begin()}
            message = Message(state.vector, state.buffers, extra, round)
            for client in clients:
                expected, row, _ = simulation.train(message, client)
                job = sides[client].job
                model, more = payloads(message, job)
                result = job.train(job.message(model, more, round))
                data = b"".join(job.payload(result))
                deployed = ExactSum(prepared.form)
                layout = check_tensors(model, len(model), job.program.schema, MODEL_ROLES)
                schema, roles, beside = job.entries
                total = TensorSum(deployed, schema, roles, beside, base=model, layout=layout)
                for _ in total.fold(
                    data, check_tensors(data, len(data), schema, roles, beside), result.weights
                ):
                    pass
                job.remember(round, result)
                assert torch.equal(deployed.accumulator, expected)
                assert row[1] == next(iter(result.weights.values()))
                assert row[2:5].tolist() == [result.number(n) for n in ("loss_sum", "examples", "steps")]
                assert result.rows == len(prepared.partition.indices(client))


SECURE: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fednova": {"algorithm": "fednova"},
    "batch norm": {"model": {"name": "resnet8", "norm": "batch"}, "local": {"steps": 1}},
    "examples": RUNS["examples"],
    "distributed": {
        "algorithm": {"name": "fedavg", "weighting": "uniform"},
        "privacy": {"unit": "client", "model": "distributed", **PRIVATE},
    },
}


@pytest.mark.parametrize("run", SECURE)
def test_what_a_secure_sum_takes_is_that_of_the_simulation(run: str, tmp_path: Path) -> None:
    given = scenario(**{**SECURE[run], "secure_sum": {"corrupt": 0.0, "dropout": 0.0}})
    with simulated(given, tmp_path / "run") as simulation:
        prepared = simulation.prepared
        state = prepared.algorithm.start(prepared.program)
        extra = {**prepared.algorithm.message_extra(state), **prepared.pipeline(simulation.guard).begin()}
        message = Message(state.vector, state.buffers, extra, 0)
        _, _, packed = simulation.train(message, 2)
        job = Side.of(prepared, 2, tmp_path / "device").job
        vector, weight, slots = job.packed(job.train(job.message(*payloads(message, job), 0)))
        assert packed is not None
        assert np.array_equal(vector, packed.vectors[0])
        assert [weight, *slots.values()] == packed.whole[0].tolist()


def test_a_round_done_again_is_the_same(tmp_path: Path) -> None:
    """States are looked up as of the round, and draws have names."""
    given = scenario(**RUNS["scaffold"])
    with simulated(given, tmp_path / "run") as simulation:
        prepared = simulation.prepared
        state = after(prepared.algorithm.start(prepared.program), 0)
        message = Message(state.vector, state.buffers, prepared.algorithm.message_extra(state), 0)
        found = []
        for again in range(2):
            job = Side.of(prepared, 3, tmp_path / "device").job
            for round in (0, 1):
                received = job.message(*payloads(message, job), round)
                result = job.train(received)
                job.remember(round, result)
                found.append((again, round, b"".join(job.payload(result))))
        assert found[0][2] == found[2][2] != found[1][2] == found[3][2]


def test_the_form_follows_from_the_settings(tmp_path: Path) -> None:
    forms = {}
    for run in ("fedavg", "local-only", "examples", "central", "adaptive", "scaled", "local noise"):
        with simulated(scenario(**RUNS[run]), tmp_path / run) as simulation:
            side = Side.of(simulation.prepared, 0, tmp_path / f"device {run}")
            forms[run] = update_form(side.job.algorithm, side.settings)
    assert forms == {
        "fedavg": "model", "local-only": "terms", "examples": "model", "central": "model",
        "adaptive": "model", "scaled": "terms", "local noise": "terms",
    }  # fmt: skip
