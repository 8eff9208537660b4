"""What the peers' scripts have in common: the command line, the clock and the JSON object that they print."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import workload
from torch import nn

_VERSIONS = ("torch", "numpy", "flwr", "ray", "pfl")


@dataclass(frozen=True)
class Settings:
    """One run as asked for on the command line; rounds, processes, clients and cohort are counts."""

    model: str
    rounds: int
    seed: int
    processes: int
    clients: int
    full_participation: bool
    save_weights: str | None

    @property
    def cohort(self) -> int:
        """Clients in a round: everyone under full participation."""
        return self.clients if self.full_participation else min(workload.COHORT, self.clients)

    def cohort_of(self, round_index: int) -> list[int]:
        """Ids of the clients that take part in a round."""
        return workload.draw_cohort(self.seed, round_index, self.clients, self.cohort)

    def epoch_of(self, data: workload.Data, round_index: int, client: int) -> workload.Data:
        """A client's images and labels in the order in which it trains on them in that round."""
        return workload.client_epoch(data, self.seed, round_index, client, self.full_participation)


@dataclass
class Clock:
    """Seconds before the first round, and of each round. Make one right after the imports."""

    started: float = field(default_factory=time.perf_counter)
    startup: float | None = None
    rounds: list[float] = field(default_factory=list)
    _round_started: float = 0.0

    def begin_round(self) -> None:
        """A round starts: its cohort is about to be drawn."""
        self._round_started = time.perf_counter()
        if self.startup is None:
            self.startup = self._round_started - self.started

    def end_round(self) -> None:
        """A round ends: the merged model is there."""
        self.rounds.append(time.perf_counter() - self._round_started)

    @property
    def seconds_per_round(self) -> float:
        """Mean without the first round (of the first alone where it is the only one)."""
        return statistics.fmean(self.rounds[1:] or self.rounds)

    @property
    def first_round_excess(self) -> float:
        """What the first round took beyond the mean of the others, at least 0."""
        return max(0.0, self.rounds[0] - self.seconds_per_round)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def command_line(description: str, processes: int | None = None) -> argparse.ArgumentParser:
    """The common command line; `processes` is the default count of workers, one per core where it is None."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=sorted(workload.MODELS), default="lenet")
    parser.add_argument("--rounds", type=int, default=10, help="rounds, the first of which is not timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=processes or usable_cores(), help="worker processes")
    parser.add_argument("--clients", type=int, default=workload.CLIENTS, help="population, at most 1200")
    parser.add_argument("--full-participation", action="store_true", help="all, batches in file order")
    parser.add_argument("--save-weights", metavar="PATH", help="write the final parameters as .npz")
    return parser


def settings_from(asked: argparse.Namespace) -> Settings:
    """The common settings of a parsed command line; exits with a message where a count is out of range."""
    settings = Settings(**{each.name: getattr(asked, each.name) for each in dataclasses.fields(Settings)})
    if min(settings.rounds, settings.processes) < 1 or not 1 <= settings.clients <= workload.MAX_CLIENTS:
        sys.exit(f"--rounds and --processes start at 1; --clients is within 1 and {workload.MAX_CLIENTS}")
    return settings


def machine() -> dict[str, Any]:
    """Processor, usable cores, and which wide vector units PyTorch uses."""
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Python and those of the peers' packages that are installed."""
    found = {"python": platform.python_version()}
    for package in _VERSIONS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def result(system: str, settings: Settings, clock: Clock, model: nn.Module, **more: Any) -> dict[str, Any]:
    """The figures of a finished run; tests the model and saves its weights where asked to, untimed."""
    figures: dict[str, Any] = {
        "system": system,
        "model": settings.model,
        "rounds": settings.rounds,
        "seconds_per_round": clock.seconds_per_round,
        "startup_seconds": clock.startup,
        "first_round_excess_seconds": clock.first_round_excess,
        "accuracy": workload.test_accuracy(model),
        "round_seconds": clock.rounds,
        "processes": settings.processes,
        "clients": settings.clients,
        "cohort": settings.cohort,
        "seed": settings.seed,
    }
    if settings.save_weights:
        figures["weights_file"] = workload.save_weights(settings.save_weights, model.state_dict())
    return figures | more | {"machine": machine(), "versions": versions()}


def emit(figures: dict[str, Any]) -> None:
    """Prints the one JSON object of a script."""
    json.dump(figures, sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()
