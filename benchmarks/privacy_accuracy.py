"""Private accuracy on one CPU core, each figure beside what it says about privacy.

    python benchmarks/privacy_accuracy.py [--seeds 1] [--only fashion-mnist,digits,...] [--format json|text]

Trains the recipes of `docs/recipes/` as `mycelia train --config` does, with noise of the system's source, so
that a figure is one of a model that could be released. Prints one JSON object. `results.<name>` holds the
median `accuracy` over the seeds, that of each (`accuracies`), the largest `epsilon` spent, with δ, the
`statements` of the ledgers, one a run, and wall and processor seconds of the slowest.

- `fashion-mnist`, `digits`: the recipes as they are;
- `digits/auto-s`, `digits/psac`: the recipe of the digits with that clip function, bound 1, nothing tuned;
- `digits/abadi`: the best of several bounds (`bounds`) by its median, chosen on the test part, which favours
  it. `behind` says by how many points the other two stay behind.

A seed names the initial weights. The choice of the recipes' settings is not in any ε.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mycelia.engine.config import load_config
from mycelia.privacy.central import train
from mycelia.privacy.central_config import PrivateTrainConfig
from mycelia.privacy.ledger import FILE, Ledger

RECIPES = Path(__file__).resolve().parents[1] / "docs" / "recipes"
BOUNDS = (0.1, 0.3, 1.0, 3.0)
UNTUNED = ("auto-s", "psac")
CASES = ("fashion-mnist", "digits", "digits/auto-s", "digits/psac", "digits/abadi")


def once(recipe: str, clip: str, bound: float, seed: int) -> dict[str, Any]:
    """One training; `clip` is empty for that of the recipe."""
    changes = [f"seed={seed}"]
    if clip:
        changes.append(f'privacy.clip={{ name = "{clip}", bound = {bound} }}')
    config = load_config(PrivateTrainConfig, RECIPES / f"{recipe}.toml", changes)
    wall, processor = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        result = train(config, out=Path(folder) / "run")
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        ledger = Ledger.load(Path(folder) / "run" / FILE)
    if result.delta is None or result.stopped_by:
        raise SystemExit(f"{recipe}: training ended early ({result.stopped_by or 'it was not private'})")
    statement = ledger.statement(result.delta)
    return {
        "accuracy": 100 * result.metrics["accuracy"],
        "epsilon": statement.epsilon,
        "delta": result.delta,
        "statement": str(statement),
        "seconds": wall,
        "processor_seconds": processor,
    }


def measure(recipe: str, seeds: int, clip: str = "", bound: float = 1.0) -> dict[str, Any]:
    """A recipe over the seeds."""
    runs = []
    for seed in range(seeds):
        print(f"{recipe} {clip} {bound if clip else ''} seed {seed} ...", file=sys.stderr, flush=True)
        runs.append(once(recipe, clip, bound, seed))
    accuracies = [run["accuracy"] for run in runs]
    return {
        "accuracy": statistics.median(accuracies),
        "accuracies": accuracies,
        "epsilon": max(run["epsilon"] for run in runs),
        "delta": runs[0]["delta"],
        "statements": [run["statement"] for run in runs],
        "seconds": max(run["seconds"] for run in runs),
        "processor_seconds": max(run["processor_seconds"] for run in runs),
    }


def tuned(seeds: int) -> dict[str, Any]:
    """The digits with Abadi's clip function at the best of its bounds."""
    found = {bound: measure("digits", seeds, "abadi", bound) for bound in BOUNDS}
    best = max(
        found, key=lambda bound: (found[bound]["accuracy"], statistics.fmean(found[bound]["accuracies"]))
    )
    return {
        **found[best],
        "bound": best,
        "bounds": {str(bound): each["accuracies"] for bound, each in found.items()},
    }


def case(name: str, seeds: int) -> dict[str, Any]:
    """One entry of the results."""
    recipe, _, clip = name.partition("/")
    return tuned(seeds) if clip == "abadi" else measure(recipe, seeds, clip)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Accuracy of the private recipes, beside their ε.")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each, with other initial weights")
    parser.add_argument("--only", default=",".join(CASES), help="which, with commas")
    parser.add_argument("--format", choices=("json", "text"), default="json")
    asked = parser.parse_args()
    names = asked.only.split(",")
    if unknown := set(names) - set(CASES):
        parser.error(f"unknown {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    if asked.seeds < 1:
        parser.error("--seeds has to be at least 1")
    torch.set_num_threads(1)
    results = {name: case(name, asked.seeds) for name in names}
    if best := results.get("digits/abadi"):
        best["behind"] = {
            clip: best["accuracy"] - results[f"digits/{clip}"]["accuracy"]
            for clip in UNTUNED
            if f"digits/{clip}" in results
        }
    if asked.format == "text":
        for name, found in results.items():
            print(
                f"{name:15} {found['accuracy']:6.2f} %  {found['seconds']:7.1f} s  {found['statements'][0]}"
            )
        return
    report = {
        "workload": "recipes of docs/recipes, end to end, one thread, noise of the system's source",
        "seeds": asked.seeds,
        "results": results,
        "machine": {"system": platform.platform(), "cpu": torch.backends.cpu.get_cpu_capability()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "dp-accounting": metadata.version("dp-accounting"),
            "mycelia": metadata.version("mycelia"),
        },
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
