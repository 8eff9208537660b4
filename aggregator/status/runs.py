"""Runs as the board remembers them."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from mycelia.aggregator.wire.problems import clipped

__all__ = ["MOST_ROUNDS", "PHASES", "Run", "numbers", "phase_name"]

PHASES: Final = (
    "waiting", "select", "configure", "advertise", "share", "train", "masked", "agree", "unmask", "merge",
    "evaluate", "deliver", "done",
)  # fmt: skip
"""What a round does, in order; the secure sum's own steps lie between."""
MOST_ROUNDS: Final = 200
_MOST_METRICS: Final = 16
_MOST_NAME: Final = 64


@dataclass(slots=True)
class Run:
    """One run and its last rounds. Rows of `history` and `evaluations` are never changed once they are there.

    Attributes:
        name: of the run.
        started: Unix time.
        about: purpose, algorithm, model, rounds, cohort, secure, privacy_unit.
        state: what has become of it.
        round: in progress, from 1; 0 before the first.
        attempt: of the round.
        phase: one of `PHASES`.
        ends_at: Unix time at which the phase ends; None for no end.
        progress: of the devices asked in this round, what became of each; "" while it is under way.
        results: rounds by result.
        dropped: devices by the phase in which they dropped out, over all rounds.
        history: one row for each of the last rounds.
        evaluations: of the last rounds that were evaluated.
        privacy: what was spent, see `Board.privacy`.
        bytes_up: of its rounds, from devices.
        bytes_down: of its rounds, to devices.
        model_sha256: of the final model, in hexadecimal.
        run_dir: the folder with its record.
        error: why it stopped.
    """

    name: str
    started: float
    about: dict[str, Any] = field(default_factory=dict)
    state: Literal["running", "finished", "stopped"] = "running"
    round: int = 0
    attempt: int = 0
    phase: str = "waiting"
    ends_at: float | None = None
    progress: dict[int, str] = field(default_factory=dict)
    results: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_ROUNDS))
    evaluations: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_ROUNDS))
    privacy: dict[str, Any] | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    model_sha256: str = ""
    run_dir: str = ""
    error: str = ""

    @property
    def secure(self) -> bool:
        """Whether its updates are masked."""
        return bool(self.about.get("secure"))

    def snapshot(self) -> dict[str, Any]:
        """As plain JSON."""
        settled = Counter(self.progress.values())
        under_way = settled.pop("", 0)
        return {
            "name": self.name,
            "started": self.started,
            **self.about,
            "state": self.state,
            "round": self.round,
            "attempt": self.attempt,
            "phase": self.phase,
            "ends_at": self.ends_at,
            "asked": len(self.progress),
            "under_way": under_way,
            "settled": dict(settled),
            "published": self.results["published"],
            "failed": self.results["failed"],
            "dropped": dict(self.dropped),
            "history": list(self.history),
            "evaluations": list(self.evaluations),
            "privacy": self.privacy,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "model_sha256": self.model_sha256,
            "run_dir": self.run_dir,
            "error": self.error,
        }


def numbers(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Metrics as JSON has them: what is not finite as "NaN", "Infinity" or "-Infinity"."""
    some = list(metrics.items())[:_MOST_METRICS]
    return {clipped(str(name), _MOST_NAME): _number(float(value)) for name, value in some}


def phase_name(phase: str) -> str:
    """A phase that is known; anything else is "other", so that there are few."""
    return phase if phase in PHASES else "other"


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
