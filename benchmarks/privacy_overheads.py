"""What privacy costs beside the gradients: accounting, the ledger, and noise.

    python benchmarks/privacy_overheads.py [--format json|text]

Prints one JSON object: seconds to the ε of 100,000 recorded updates with 16 distinct settings, and with a
noise that decays at every one of them; milliseconds to ask a budget for an update and to write it down; the
noise of 1,660,000 parameters beside `torch.normal` (ratio), fast and safe. One thread, imports apart.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mycelia.privacy.accounting import epsilon, state
from mycelia.privacy.budget import Budget
from mycelia.privacy.events import Event
from mycelia.privacy.ledger import Ledger
from mycelia.privacy.noise.discrete_gaussian import DiscreteGaussian
from mycelia.privacy.noise.gaussian import Gaussian
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.sampling import Poisson

UPDATES = 100_000
PARAMETERS = 1_660_000


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def accounting() -> dict[str, float]:
    rng = np.random.default_rng(0)
    rates, noises = rng.choice([0.001, 0.002, 0.004, 0.005], UPDATES), rng.choice([0.9, 1, 1.1, 1.2], UPDATES)
    pairs = zip(rates.tolist(), noises.tolist(), strict=True)
    events = [Event("poisson", q, z, "add-remove") for q, z in pairs]
    epsilon(Poisson(0.3), 1.0, 3, 1e-5)  # imports
    return {
        "mixed_updates_s": seconds(lambda: state(events, 1e-5)),
        "decaying_updates_s": seconds(
            lambda: epsilon(Poisson(0.004), 2.0, UPDATES, 1e-5, schedule="exp:0.00001")
        ),
    }


def asking(folder: Path) -> dict[str, float]:
    ledger = Ledger.create(folder / "privacy.jsonl")
    budget = Budget(5.0, 1e-5, ledger=ledger)
    events = Poisson(0.001).events(1.0, 1)
    budget.release(events[0])

    def many() -> None:
        for step in range(1, 1001):
            budget.release(Poisson(0.001).events(1.0, 1, first_step=step)[0])

    return {"ask_and_write_ms": seconds(many)}


def noise(repeats: int = 9) -> dict[str, float]:
    source, total = NoiseSource.seeded(0), torch.zeros(PARAMETERS)
    times: dict[str, list[float]] = {"torch": [], "fast": [], "safe": []}
    for step in range(repeats):
        times["torch"].append(seconds(lambda: torch.normal(0.0, 1.0, (PARAMETERS,))))
        times["fast"].append(
            seconds(lambda step=step: Gaussian().sample(PARAMETERS, 1.0, source, "noise", step))  # type: ignore[misc]
        )
        times["safe"].append(
            seconds(lambda step=step: DiscreteGaussian().add(total, 1.0, source, "noise", step))  # type: ignore[misc]
        )
    middle = {name: statistics.median(found) for name, found in times.items()}
    return {
        "fast_over_torch": middle["fast"] / middle["torch"],
        "safe_over_torch": middle["safe"] / middle["torch"],
        "fast_ms": middle["fast"] * 1e3,
        "safe_ms": middle["safe"] * 1e3,
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=("json", "text"), default="json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {"accounting": accounting(), "budget": asking(Path(folder)), "noise": noise()}
    if asked.format == "json":
        print(
            json.dumps(
                {"results": found, "machine": platform.platform(), "torch": torch.__version__}, indent=1
            )
        )
        return
    for part, values in found.items():
        for name, value in values.items():
            print(f"{part:11} {name:20} {value:.4g}")


if __name__ == "__main__":
    main()
