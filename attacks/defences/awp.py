"""Adversarial training whose gradient is taken where the weights, too, are at their worst nearby.

Wu, Xia, Wang: "Adversarial weight perturbation helps robust generalization", NeurIPS 2020, algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds
from mycelia.attacks.defences.adversarial_training import PGDAT, check_radius
from mycelia.attacks.defences.training import Batch, TrainingDefence
from mycelia.attacks.norms import Norm
from mycelia.engine.errors import ConfigError
from mycelia.engine.program import Call, Forward, Program
from mycelia.engine.step import Step
from mycelia.engine.training import Work, update_step
from mycelia.engine.transforms.value_and_grad import gradients_of
from mycelia.engine.types import Tensors

__all__ = ["AWP", "weight_change"]


@dataclass(frozen=True)
class AWP(TrainingDefence):
    """All rows are attacked by PGD; the step on them is by the gradient at weights moved against them.

    AT-AWP of the paper with one alternation and one step for the weights (A = K₂ = 1, its setting): for each
    weight tensor w of two dimensions or more, v = gamma · ‖w‖ · g / ‖g‖ with g the gradient of the batch's
    loss on the changed inputs (eq. 9 and 10, on its boundary), and the update is that of the gradient at
    w + v. Biases and scales do not move. Buffers are those of the pass at w + v.

    Attributes:
        gamma: largest ‖v‖ / ‖w‖ of a tensor, at least 0.
        eps: radius in units of the inputs, at least 0.
        norm: of the ball.
        steps: of PGD, at least 1.
        step_size: length of a step; None: see `evasion.steps.step_length`.
        bounds: smallest and largest value of an input.
    """

    gamma: float = 5e-3
    eps: float = 8 / 255
    norm: Norm = "linf"
    steps: int = 10
    step_size: float | None = None
    bounds: Bounds = (0.0, 1.0)

    def check(self) -> None:
        """See `TrainingDefence.check`."""
        if not 0 <= self.gamma < math.inf:
            raise ConfigError(f"gamma {self.gamma}", rule="at least 0 and finite", who="AWP")
        check_radius(self.eps, "AWP")
        self._inner()

    def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `TrainingDefence.craft`."""
        return self._inner().craft(batch)

    def step_of(self, trainer: Work, program: Program, *, in_place: bool) -> Step:
        """See `TrainingDefence.step_of`."""
        moved = program.with_calls(_Moved(program.training, self.gamma), program.evaluation, "awp")
        return update_step(moved, trainer.optimizer, clip_norm=trainer.clip_norm, in_place=in_place)

    def _inner(self) -> PGDAT:
        return PGDAT(self.eps, self.norm, self.steps, self.step_size, self.bounds)


def weight_change(params: Tensors, grads: Tensors, gamma: float) -> Tensors:
    """The change of each tensor of two dimensions or more: gamma times its norm, along its gradient.

    Args:
        params: by name.
        grads: of the same names and shapes.
        gamma: size of a change relative to its tensor.
    """
    changes = {}
    for name, tensor in params.items():
        if tensor.dim() > 1:
            norm = torch.linalg.vector_norm(grads[name]).clamp(min=torch.finfo(tensor.dtype).tiny)
            changes[name] = gamma * torch.linalg.vector_norm(tensor) * (grads[name] / norm)
    return changes


@dataclass(frozen=True)
class _Moved:
    """A forward pass at w + v; v is a constant to who differentiates it, so the gradient is that at w + v."""

    call: Call
    gamma: float

    def __call__(
        self,
        params: Tensors,
        buffers: Tensors,
        frozen: Tensors,
        inputs: Tensor,
        targets: Tensor,
        seed: Tensor,
        first: int | Tensor = 0,
        /,
    ) -> Forward:
        def total(leaves: Tensors) -> tuple[Tensor, Forward]:
            forward = self.call(leaves, buffers, frozen, inputs, targets, seed, first)
            return forward.losses.mean(), forward

        found = gradients_of(total, params)
        with torch.no_grad():
            changes = weight_change(params, found.grads, self.gamma)
        at = {name: tensor + changes[name] if name in changes else tensor for name, tensor in params.items()}
        return self.call(at, buffers, frozen, inputs, targets, seed, first)
