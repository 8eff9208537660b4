"""Workload S1 on Mycelia: the same command line and the same JSON object as the scripts in `peers/`.

Initial weights and cohorts are those of the peers, so that accuracies can be compared round for round; the
order of a client's batches is Mycelia's own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from mycelia.simulations import Scenario, SimulationResult, simulate

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import workload


def initial(model: str, initial_seed: int) -> nn.Module:
    """The peers' model with the peers' initial weights."""
    return workload.build_model(model, initial_seed)


def cohort(ids: Any, k: int, *, round: int, seed: int, weights: Any, available: Any) -> Any:
    """The peers' cohort of a round."""
    del weights, available
    return np.array(workload.draw_cohort(seed, round, len(ids), k))


def scenario(model: str, rounds: int, seed: int, workers: int, plan: str) -> Scenario:
    """1,000 clients of 50 images in file order, cohort 50, one epoch of batch 10, equal weights."""
    return Scenario.model_validate(
        {
            "model": {"name": "ours:initial", "model": model, "initial_seed": seed},
            "selector": "ours:cohort",
            "data": "fashion-mnist",
            "algorithm": {"name": "fedavg", "weighting": "uniform"},
            "rounds": rounds,
            "cohort": 50,
            "seed": seed,
            "plan": plan,
            "population": {"clients": 1000, "examples_per_client": 50},
            "partition": "contiguous",
            "local": {"epochs": 1, "batch_size": 10, "lr": 0.1},
            "backend": {"name": "workers", "workers": workers} if workers else "inline",
            "evaluation": {"every": 0, "clients": 0},
        }
    )


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("lenet", "mlp", "cnn"), default="lenet")
    parser.add_argument("--rounds", type=int, default=10, help="rounds, the first of which is not timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="worker processes; 0 trains in this one")
    parser.add_argument("--plan", default="inductor", help="how local steps run")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found: SimulationResult = simulate(
            scenario(asked.model, asked.rounds, asked.seed, asked.processes, asked.plan),
            out=Path(folder) / "run",
        )
    json.dump(
        {
            "system": "mycelia",
            "model": asked.model,
            "rounds": asked.rounds,
            "seconds_per_round": found.seconds_per_round,
            "startup_seconds": found.seconds_startup,
            "accuracy": found.test_accuracy,
            "plan": found.plan,
            "workers": found.workers,
            "model_sha256": found.model_sha256,
        },
        sys.stdout,
    )
    print()


if __name__ == "__main__":
    main()
