"""What training changes, and how it is a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mycelia.engine.checkpoint import Checkpoint
from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.engine.training.step import split_carry
from mycelia.engine.types import Tensors

__all__ = ["TrainState"]

_PARAMETER = "parameter/"


@dataclass
class TrainState:
    """The state of training after `step` steps; the tensors are updated in place.

    Attributes:
        params: the parameters.
        carry: buffers, optimiser state and gradient norm, see `step.initial_carry`.
        step: steps done.
        loss_sum: of the running epoch, each example's loss as its step saw it.
        loss_examples: examples in that sum.
        seconds: time spent so far, pauses before a resume left out.
        measured: metrics of the last evaluation.
        measured_at: the step of it; -1 before the first.
    """

    params: Tensors
    carry: Tensors
    step: int = 0
    loss_sum: float = 0.0
    loss_examples: int = 0
    seconds: float = 0.0
    measured: dict[str, float] = field(default_factory=dict)
    measured_at: int = -1

    @property
    def train_loss(self) -> float | None:
        """Mean loss over the running or just finished epoch."""
        return self.loss_sum / self.loss_examples if self.loss_examples else None

    @property
    def buffers(self) -> Tensors:
        """Float buffers and counters."""
        return split_carry(self.carry)[0]

    def check_finite(self) -> None:
        """Refuse a model that holds NaN or infinity; it is never saved or returned."""
        for tensors, fix in (
            (self.params, "lower the learning rate, or set clip_norm"),
            (self.buffers, "BatchNorm has no variance over a batch of one; choose another batch_size"),
        ):
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                    raise MyceliaError(
                        f"{name!r} holds NaN or infinity after step {self.step}",
                        rule="a model that is not finite is never saved",
                        fix=f"{fix}; the last checkpoint is intact",
                        who="training",
                    )

    def tensors(self) -> Tensors:
        """All tensors by the names they have in a checkpoint."""
        return {_PARAMETER + name: tensor for name, tensor in self.params.items()} | self.carry

    def meta(self, settings: Mapping[str, Any], updates: Mapping[str, Any]) -> dict[str, Any]:
        """The rest of the state, that of the updates, and the settings that a resume must share."""
        return {
            "settings": dict(settings),
            "updates": dict(updates),
            "loss_sum": self.loss_sum,
            "loss_examples": self.loss_examples,
            "seconds": self.seconds,
            "measured": self.measured,
            "measured_at": self.measured_at,
        }

    def restore(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        """Take over a checkpoint of the same training.

        Raises:
            ConfigError: it was made with other settings; the message names them.
            DataError: it holds other tensors, so it is of another model, optimiser or command.
        """
        own, found = self.tensors(), checkpoint.tensors
        for name in sorted(own.keys() | found.keys()):
            mine, theirs = own.get(name), found.get(name)
            if mine is None or theirs is None or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                raise DataError(
                    f"the checkpoint does not fit: tensor {name!r} differs or is missing",
                    rule="a run goes on with the model and optimiser it began with",
                    fix="undo the change to config.toml or to the code",
                    who=f"checkpoint of step {checkpoint.step}",
                )
        meta = checkpoint.meta
        began: Mapping[str, Any] = meta.get("settings", {})
        if differing := [key for key in settings if settings[key] != began.get(key)]:
            changes = ", ".join(f"{key} was {began.get(key)!r}, is {settings[key]!r}" for key in differing)
            raise ConfigError(
                changes, rule="a run goes on with the settings and data it began with", who="resume"
            )
        for name, tensor in own.items():
            tensor.copy_(found[name])
        self.step = checkpoint.step
        self.loss_sum, self.loss_examples = float(meta["loss_sum"]), int(meta["loss_examples"])
        self.seconds, self.measured_at = float(meta["seconds"]), int(meta["measured_at"])
        self.measured = dict(meta["measured"])
