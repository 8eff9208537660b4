"""Small private federations, as tests of each kind of privacy change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mycelia.engine.events import Event, Outcomes, Privacy, Round
from mycelia.engine.run import Run
from mycelia.simulations import SimulationResult, resume, simulate

PRIVACY = {"unit": "client", "epsilon": 50.0, "delta": 1e-3, "clip": {"name": "abadi", "bound": 0.5}}

WORKERS = {"name": "workers", "workers": 2}

TROUBLE: dict[str, Any] = {
    "behaviour": {"dropout": 0.2, "availability": 0.8, "speed": {"steps_per_s": 5.0, "sigma": 0.5}},
    "round": {"quorum": 0.1},
}
"""Devices that are out of reach, drop out, and are slow."""


def settings(privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Five rounds of ten of fifty clients on digits, in this process."""
    block = PRIVACY | (privacy or {})
    return {
        "model": {"name": "mlp", "hidden": [8]},
        "data": "digits",
        "algorithm": {"name": "fedavg", "weighting": "uniform"},
        "selector": "poisson",
        "rounds": 5,
        "cohort": 10,
        "population": {"clients": 50},
        "partition": "iid",
        "local": {"epochs": 1, "batch_size": 10, "lr": 0.1},
        "backend": "inline",
        "evaluation": {"every": 0, "clients": 0},
        # a trace of the step takes longer than these runs; with private examples there is none to choose
        "plan": "eager" if block["unit"] == "client" else "default",
        "privacy": block,
    } | changes


def run(path: Path, seen: list[Event] | None = None, **given: Any) -> SimulationResult:
    """Run it into a folder; its events go to `seen`."""
    return simulate(settings(**given), out=path, listeners=[] if seen is None else [seen.append])


class Stop:
    """A listener that interrupts behind a round, before its checkpoint."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, event: Event) -> None:
        if isinstance(event, Round) and event.round == self.after:
            raise KeyboardInterrupt


def stopped(path: Path, after: int, **given: Any) -> None:
    """Run it up to a round."""
    with pytest.raises(KeyboardInterrupt):
        simulate(settings(**given), out=path, listeners=[Stop(after)])


def check_repeats(tmp_path: Path, *, workers: bool = True, **given: Any) -> SimulationResult:
    """The same model and ε in one process, in two workers, and after a stop; the run in one process."""
    whole = run(tmp_path / "whole", **given)
    stopped(tmp_path / "stopped", 3, **given)
    found = [resume(tmp_path / "stopped")]
    if workers:
        found.append(run(tmp_path / "spread", **given, backend=WORKERS))
    for other in found:
        assert other.model_sha256 == whole.model_sha256
        assert other.privacy == whole.privacy
    return whole


def readings(seen: list[Event]) -> list[Privacy]:
    """What was said of privacy."""
    return [event for event in seen if isinstance(event, Privacy)]


def accepted(path: Path) -> dict[int, list[int]]:
    """The rounds, from 1, in which each client's update was taken."""
    rounds: dict[int, list[int]] = {}
    for event in Run.open(path).events({"outcomes"}):
        assert isinstance(event, Outcomes)
        for outcome in event.clients:
            if outcome.status == "accepted":
                rounds.setdefault(int(outcome.client), []).append(event.round)
    return rounds
