"""Seconds per round of workload S1: Mycelia beside Flower, pfl, a hand loop and the floor, in one call.

    python benchmarks/simulation.py [--rounds 10] [--models lenet,mlp,cnn] [--seeds 1] [--format json|text]

Prints one JSON object. `results.<model>` holds seconds per round by system (the first round and evaluation
left out), `ratio` (mycelia / floor, and each peer / mycelia; the peer's best setting), `accuracy` and
`startup` seconds by system. `flwr` is Flower with one node per client of the population; `flwr_slots` has
only as many nodes as a round needs, each acting for whichever client its message names, which is faster.
`floor` is eager autograd and an in-place update with nothing around them, on one thread, divided by the
cores. Peers live in an environment of their own, made on the first call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import environment  # noqa: E402

SYSTEMS = ("floor", "mycelia", "loop", "pfl_2", "pfl_1", "flwr", "flwr_slots")


def command(system: str, peers: Path, cores: int) -> list[str]:
    """The command line of one system, without model, rounds and seed."""
    scripts = HERE / "peers"
    return {
        "floor": [str(peers), str(scripts / "floor.py"), "--processes", str(cores)],
        "mycelia": [sys.executable, str(HERE / "ours.py"), "--processes", str(cores)],
        "loop": [str(peers), str(scripts / "loop.py"), "--processes", str(cores)],
        "pfl_1": [str(peers), str(scripts / "pfl_sim.py"), "--processes", "1"],
        "pfl_2": [str(peers), str(scripts / "pfl_sim.py"), "--processes", "2"],
        "flwr": [str(peers), str(scripts / "flower.py"), "--processes", str(cores)],
        "flwr_slots": [
            *(str(peers), str(scripts / "flower.py"), "--processes", str(cores)),
            *("--supernodes", "50"),
        ],
    }[system]


def run(system: str, peers: Path, cores: int, model: str, rounds: int, seed: int) -> dict[str, Any]:
    """One measurement; its JSON object."""
    line = [*command(system, peers, cores), "--model", model, "--rounds", str(rounds), "--seed", str(seed)]
    print(f"{model}, seed {seed}: {system} ...", file=sys.stderr, flush=True)
    done = subprocess.run(
        line, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    if done.returncode != 0:
        sys.stderr.write(done.stderr[-4000:])
        raise SystemExit(f"{system} failed with exit code {done.returncode}: {' '.join(line)}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"  {found['seconds_per_round']:.4f} s a round", file=sys.stderr, flush=True)
    return found


def measure(
    model: str, systems: list[str], peers: Path, cores: int, rounds: int, seeds: int
) -> dict[str, Any]:
    """All systems on one model, seed by seed, so that a drift of the machine meets them all."""
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for seed in range(seeds):
        for system in systems:
            runs[system].append(run(system, peers, cores, model, rounds, seed))
    result: dict[str, Any] = {
        system: statistics.median(found["seconds_per_round"] for found in runs[system]) for system in systems
    }
    ours = result["mycelia"]
    ratio = {"floor": ours / result["floor"]}
    for name, members in (
        ("flwr", ("flwr",)),
        ("flwr_slots", ("flwr_slots",)),
        ("pfl", ("pfl_1", "pfl_2")),
        ("loop", ("loop",)),
    ):
        known = [result[member] for member in members if member in result]
        if known:
            ratio[name] = min(known) / ours
    trained = [system for system in systems if system != "floor"]
    result["ratio"] = ratio
    result["accuracy"] = {
        system: statistics.fmean(found["accuracy"] for found in runs[system]) for system in trained
    }
    result["accuracy_by_seed"] = {system: [found["accuracy"] for found in runs[system]] for system in trained}
    result["startup"] = {
        system: statistics.median(found["startup_seconds"] for found in runs[system]) for system in trained
    }
    return result


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=10, help="rounds, the first of which is not timed")
    parser.add_argument("--models", default="lenet,mlp,cnn", help="of lenet, mlp and cnn, with commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which to run; mycelia and floor always")
    parser.add_argument("--seeds", type=int, default=1, help="runs each; the median is reported")
    parser.add_argument("--env", type=Path, help="folder of the peers' environment")
    parser.add_argument("--format", choices=("json", "text"), default="json")
    asked = parser.parse_args()
    if asked.rounds < 2 or asked.seeds < 1:
        parser.error("--rounds has to be at least 2 and --seeds at least 1")
    wanted = set(asked.systems.split(",")) | {"floor", "mycelia"}
    if unknown := wanted - set(SYSTEMS):
        parser.error(f"unknown systems {', '.join(sorted(unknown))}; known: {', '.join(SYSTEMS)}")
    systems = [system for system in SYSTEMS if system in wanted]
    peers = environment.ensure(asked.env)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    report = {
        "workload": "S1: 1,000 clients x 50 Fashion-MNIST images, cohort 50, 5 steps of batch 10, lr 0.1",
        "rounds": asked.rounds,
        "seeds": asked.seeds,
        "results": {
            model: measure(model, systems, peers, cores, asked.rounds, asked.seeds)
            for model in asked.models.split(",")
        },
        "machine": {
            "cpu": environment_cpu(),
            "cores": cores,
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version()} | environment.versions(peers),
    }
    if asked.format == "json":
        print(json.dumps(report, indent=1))
        return
    for model, found in report["results"].items():
        print(model)
        for system in systems:
            print(
                f"  {system:8} {found[system]:8.4f} s a round  accuracy {found['accuracy'].get(system, '')}"
            )
        print("  " + ", ".join(f"{name} {value:.2f}" for name, value in found["ratio"].items()))


def environment_cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
