"""FedAvg, FedProx and SCAFFOLD on strongly skewed labels: LeNet on Fashion-MNIST, Dirichlet 0.1.

    python benchmarks/algorithms.py [--rounds 50] [--seeds 1] [--plot algorithms.svg]

Prints one JSON object: for each algorithm the test accuracy by round (mean over seeds), the final accuracy
and the worst tenth of the clients by seed, and seconds per round; with `--plot` also draws the curves.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from mycelia.engine.events import Evaluation, Event
from mycelia.simulations import Scenario, simulate

ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedprox": {"name": "fedprox", "mu": 0.01},
    "scaffold": {"name": "scaffold"},
}


def scenario(algorithm: dict[str, Any], rounds: int, seed: int, lr: float) -> Scenario:
    """100 clients, ten a round, one epoch of batch 10."""
    return Scenario.model_validate(
        {
            "model": "lenet",
            "data": "fashion-mnist",
            "algorithm": algorithm,
            "rounds": rounds,
            "cohort": 10,
            "seed": seed,
            "plan": "inductor",
            "population": {"clients": 100},
            "partition": {"name": "dirichlet", "alpha": 0.1, "min_size": 10},
            "local": {"epochs": 1, "batch_size": 10, "lr": lr},
        }
    )


def measure(name: str, rounds: int, seeds: int, lr: float) -> dict[str, Any]:
    """One algorithm over the seeds."""
    curves, finals, worst, seconds = [], [], [], []
    for seed in range(seeds):
        curve: list[float] = []

        def listen(event: Event, curve: list[float] = curve) -> None:
            if isinstance(event, Evaluation):
                curve.append(event.metrics["accuracy"])

        print(f"{name}, seed {seed} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = simulate(
                scenario(ALGORITHMS[name], rounds, seed, lr), out=Path(folder) / "run", listeners=[listen]
            )
        curves.append(curve)
        finals.append(found.test_accuracy)
        worst.append(found.worst_decile_accuracy)
        seconds.append(found.seconds_per_round)
    return {
        "settings": ALGORITHMS[name],
        "accuracy_by_round": [statistics.fmean(values) for values in zip(*curves, strict=True)],
        "final_accuracy": finals,
        "worst_decile_accuracy": worst,
        "seconds_per_round": statistics.median(seconds),
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """The curves as one picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, found in results.items():
        curve = found["accuracy_by_round"]
        axes.plot(range(1, len(curve) + 1), curve, label=name)
    axes.set(xlabel="round", ylabel="test accuracy", title="LeNet on Fashion-MNIST, Dirichlet 0.1, 10 of 100")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Federated algorithms on strongly skewed labels.")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.05, help="local learning rate, the same for all")
    parser.add_argument("--plot", type=Path, help="draw the curves into this file (.svg, .png or .pdf)")
    parser.add_argument("--format", choices=("json", "text"), default="json")
    asked = parser.parse_args()
    results = {name: measure(name, asked.rounds, asked.seeds, asked.lr) for name in ALGORITHMS}
    if asked.plot:
        draw(results, asked.plot)
    if asked.format == "text":
        for name, found in results.items():
            print(f"{name:10} final {found['final_accuracy']}, worst tenth {found['worst_decile_accuracy']}")
        return
    report = {
        "workload": "Fashion-MNIST, LeNet, 100 clients, Dirichlet 0.1, cohort 10, one epoch of batch 10",
        "rounds": asked.rounds,
        "seeds": asked.seeds,
        "lr": asked.lr,
        "results": results,
        "machine": {"system": platform.platform(), "python": platform.python_version()},
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
