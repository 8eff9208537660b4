"""Adversarial training at the price of ordinary training: one backward pass for parameters and inputs.

Shafahi, Najibi, Ghiasi, Xu, Dickerson, Studer, Davis, Taylor, Goldstein: "Adversarial training for free!",
NeurIPS 2019, algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mycelia.attacks.defences.adversarial_training import check_radius
from mycelia.attacks.defences.inputs import check_bounds
from mycelia.attacks.defences.training import Batch, TrainingDefence, in_bounds
from mycelia.engine.errors import ConfigError
from mycelia.engine.optimizers import flatten_state, unflatten_state
from mycelia.engine.program import Forward, Program
from mycelia.engine.step import Step, StepResult
from mycelia.engine.training import Work, clip_by_global_norm
from mycelia.engine.training.step import GRADIENT_NORM, split_carry
from mycelia.engine.transforms.value_and_grad import gradients_of
from mycelia.engine.types import Tensors

__all__ = ["FreeAT"]

_CHANGE: Final = "adversary/change"


@dataclass(frozen=True)
class FreeAT(TrainingDefence):
    """Each batch is trained on several times in a row, and its change is moved by the gradient of each time.

    A step of the trainer is one of these replays, so a training of some epochs costs what an ordinary one
    does, and sees the data as often, divided by the replays. The change lives on from batch to batch. There
    is no attack of its own: the gradient is that of the training pass, in training mode; the norm is linf.

    Attributes:
        times: replays of a batch, at least 1.
        eps: radius and step in units of the inputs, at least 0.
        bounds: smallest and largest value of an input.
    """

    times: int = 8
    eps: float = 8 / 255
    bounds: tuple[float, float] = (0.0, 1.0)

    @property
    def replays(self) -> int:
        """See `TrainingDefence`."""
        return self.times

    def check(self) -> None:
        """See `TrainingDefence.check`."""
        if self.times < 1:
            raise ConfigError(f"times {self.times}", rule="at least 1", who="FreeAT")
        check_radius(self.eps, "FreeAT")
        check_bounds(self.bounds, "FreeAT")

    def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The batch as it is: the step adds the change."""
        return in_bounds(batch.inputs, self.bounds)[0], batch.targets

    def carried(self, inputs: Tensor) -> Tensors:
        """The change of a full batch, 0 at first."""
        return {_CHANGE: torch.zeros_like(inputs)}

    def step_of(self, trainer: Work, program: Program, *, in_place: bool) -> Step:
        """See `TrainingDefence.step_of`."""
        update = trainer.optimizer.update_ if in_place else trainer.optimizer.update
        low, high = self.bounds
        eps, clip_norm = self.eps, trainer.clip_norm

        def step(
            params: Tensors, carry: Tensors, inputs: Tensor, targets: Tensor, seed: Tensor, extra: Tensors
        ) -> StepResult:
            buffers, state = split_carry(carry)
            change, b = carry[_CHANGE], inputs.shape[0]

            def total(leaves: Tensors) -> tuple[Tensor, Forward]:
                weights = {name: tensor for name, tensor in leaves.items() if name != _CHANGE}
                points = (inputs + leaves[_CHANGE]).clamp(low, high)
                forward = program.forward(weights, buffers, points, targets, seed=seed)
                return forward.losses.mean(), forward

            found = gradients_of(total, {**params, _CHANGE: change[:b]})
            with torch.no_grad():
                grads = {name: found.grads[name] for name in params}
                moved = (change[:b] + eps * found.grads[_CHANGE].sign()).clamp(-eps, eps)
                own = {_CHANGE: torch.cat([moved, change[b:]])}
                if clip_norm:
                    grads, own[GRADIENT_NORM] = clip_by_global_norm(grads, clip_norm)
                after, state_after = update(grads, unflatten_state(state), params)
                new = _renewed(carry, found.buffers, flatten_state(state_after)) | own
                return StepResult(after, new, found.loss)

        return step


def _renewed(carry: Tensors, buffers: Tensors, state: Tensors) -> Tensors:
    """New values of buffers and optimiser state by the names that they have in a carry."""
    new = {}
    for name, tensor in carry.items():
        of_buffers, of_state = split_carry({name: tensor})
        known = [buffers[short] for short in of_buffers] + [state[short] for short in of_state]
        new[name] = known[0] if known else tensor
    return new
