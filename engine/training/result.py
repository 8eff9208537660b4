"""What training gives at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mycelia.engine.schema import model_sha256
from mycelia.engine.types import Tensors

__all__ = ["FitResult"]


@dataclass(frozen=True)
class FitResult:
    """Where training ended.

    Attributes:
        params: the parameters.
        buffers: float buffers and counters.
        steps: steps done.
        epochs: the same in passes over the data; a whole number of them is an int.
        seconds: wall time, pauses before a resume left out.
        train_loss: mean loss over the last epoch, each example's as its step saw it; None without a step.
        metrics: of the last evaluation; empty without one.
        plan: the plan that ran.
        run_dir: the run folder; empty without one.
        interrupted: training was asked to stop, and goes on when the run is resumed.
        epsilon: spent, an upper bound for what the updates revealed; None: training was not private.
        delta: δ of that bound.
        stopped_by: "budget" where the next update could not be paid for, else "".
    """

    params: Tensors = field(repr=False)
    buffers: Tensors = field(repr=False)
    steps: int
    epochs: float
    seconds: float
    train_loss: float | None
    metrics: dict[str, float]
    plan: str
    run_dir: str = ""
    interrupted: bool = False
    epsilon: float | None = None
    delta: float | None = None
    stopped_by: str = ""

    def summary(self) -> dict[str, Any]:
        """The result as `mycelia train` prints it; without privacy, `epsilon` and `delta` are null."""
        measured = {"loss": None, "accuracy": None, **self.metrics}
        return {
            "epochs": self.epochs,
            "steps": self.steps,
            "seconds_total": self.seconds,
            "train_loss": self.train_loss,
            **{f"test_{name}": value for name, value in measured.items()},
            "epsilon": self.epsilon,
            "delta": self.delta,
            "stopped_by": self.stopped_by,
            "plan": self.plan,
            "model_sha256": model_sha256({**self.params, **self.buffers}),
            "run_dir": self.run_dir,
        }
