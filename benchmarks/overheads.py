"""What a simulation costs beside training: an idle client, a million clients, a thousand rounds.

    python benchmarks/overheads.py [--rounds 1000] [--format json|text]

Prints one JSON object:

- `idle_client_us`: microseconds per client and round, in this process, for clients that do no work (a model
  of one parameter, cohort 1,000): selection, the round machine, the sum and the record of outcomes;
- `population`: seconds and resident megabytes to set up 10**6 clients of 50 examples each, and to draw a
  cohort of 50 from them;
- `memory`: growth of this process's resident memory in megabytes per 100 rounds, by least squares over the
  second half of `--rounds` rounds, with checkpoints, events and evaluation as usual.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from mycelia.engine.algorithms import FedAvg, Message
from mycelia.engine.data import load
from mycelia.engine.environment import memory
from mycelia.engine.events import Event, Round
from mycelia.engine.local import ClientData, LocalTrainer
from mycelia.engine.sums import Term, Update
from mycelia.engine.types import Tensors
from mycelia.simulations import Scenario, simulate

MEGABYTE = 2.0**20


@dataclass(frozen=True)
class Idle(FedAvg):
    """FedAvg whose clients send back what they got."""

    name: ClassVar[str] = "idle"

    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        """No work."""
        del trainer
        return Update({"params": Term(message.vector, float(len(data)), message.vector)}), state


def one_parameter(input_shape: tuple[int, ...], classes: int | None) -> torch.nn.Module:
    """A model of one parameter."""
    del input_shape, classes
    return torch.nn.Linear(1, 1, bias=False)


def ones(examples: int = 20_000) -> Any:
    """A regression set of one feature."""
    values = np.ones((examples, 1), np.float32)
    return (values, values), (values[:100], values[:100])


def idle_client(rounds: int = 12, cohort: int = 1000) -> float:
    """Microseconds per client and round, the first round left out."""
    scenario = Scenario.model_validate(
        {
            "model": "overheads:one_parameter",
            "data": "overheads:ones",
            "algorithm": "overheads:Idle",
            "rounds": rounds,
            "cohort": cohort,
            "population": {"clients": 10_000},
            "local": {"steps": 1, "batch_size": 1},
            "backend": "inline",
            "evaluation": {"every": 0, "clients": 0},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        found = simulate(scenario, out=Path(folder) / "run")
    return found.seconds_per_round / cohort * 1e6


def population(clients: int = 10**6) -> dict[str, float]:
    """Cost of setting up a population and of drawing one cohort."""
    from mycelia.aggregator import selectors

    examples = load("digits").train
    scenario = Scenario.model_validate(
        {
            "model": "mlp",
            "data": "digits",
            "cohort": 50,
            "population": {"clients": clients, "examples_per_client": 50, "overlap": True},
        }
    )
    before, started = memory().now, time.perf_counter()
    people = scenario.populate(examples)
    people.partition.sizes()
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    drawn = selectors.build("uniform").select(range(clients), 50, round=0, seed=0)
    rows = [people.partition.indices(int(client)) for client in drawn]
    return {
        "clients": clients,
        "seconds": seconds,
        "megabytes": (memory().now - before) / MEGABYTE,
        "cohort_seconds": time.perf_counter() - started,
        "cohort_examples": sum(len(row) for row in rows),
    }


def memory_slope(rounds: int) -> dict[str, float]:
    """Growth of resident memory over many rounds."""
    seen: list[tuple[int, int]] = []

    def listen(event: Event) -> None:
        if isinstance(event, Round):
            seen.append((event.round, memory().now))

    scenario = Scenario.model_validate(
        {
            "model": "mlp",
            "data": "digits",
            "rounds": rounds,
            "cohort": 10,
            "backend": "inline",
            "evaluation": {"every": 10},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        simulate(scenario, out=Path(folder) / "run", listeners=[listen])
    late = np.array(seen[len(seen) // 2 :], dtype=np.float64)
    slope = np.polyfit(late[:, 0], late[:, 1], 1)[0]
    return {"rounds": rounds, "megabytes_per_100_rounds": float(slope * 100 / MEGABYTE)}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="What a simulation costs beside training.")
    parser.add_argument("--rounds", type=int, default=1000, help="rounds of the memory measurement")
    parser.add_argument("--format", choices=("json", "text"), default="json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        "idle_client_us": idle_client(),
        "population": population(),
        "memory": memory_slope(asked.rounds),
        "machine": {"system": platform.platform(), "python": platform.python_version()},
        "versions": {"torch": torch.__version__},
    }
    if asked.format == "json":
        print(json.dumps(report, indent=1))
    else:
        for name, value in report.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
