"""MART: misclassified examples weigh more in what keeps the outputs from moving.

Wang, Zou, Yi, Bailey, Ma, Gu: "Improving adversarial robustness requires revisiting misclassified examples",
ICLR 2020, algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds
from mycelia.attacks.defences.adversarial_training import PGDAT, check_radius
from mycelia.attacks.defences.training import Batch, TrainingDefence
from mycelia.attacks.losses import ce, kl
from mycelia.attacks.norms import Norm
from mycelia.engine.errors import ConfigError
from mycelia.engine.program import Call, Forward, Program
from mycelia.engine.step import Step
from mycelia.engine.training import Work, update_step
from mycelia.engine.types import Tensors

__all__ = ["MART", "boosted_ce"]


@dataclass(frozen=True)
class MART(TrainingDefence):
    """Minimises BCE(p(x'), y) + weight · KL(p(x) ‖ p(x')) · (1 − p_y(x)), x' by PGD on the cross-entropy.

    BCE is `boosted_ce` (eq. 8 and 11). The loss of the program is not used: its outputs are logits
    [b, classes]. Clean and changed rows go through one training pass together, as in `TRADES`.

    Attributes:
        weight: λ of the paper, at least 0.
        eps: radius in units of the inputs, at least 0.
        norm: of the ball.
        steps: of PGD, at least 1.
        step_size: length of a step; None: see `evasion.steps.step_length`.
        bounds: smallest and largest value of an input.
    """

    weight: float = 5.0
    eps: float = 8 / 255
    norm: Norm = "linf"
    steps: int = 10
    step_size: float | None = None
    bounds: Bounds = (0.0, 1.0)

    def check(self) -> None:
        """See `TrainingDefence.check`."""
        if not 0 <= self.weight < math.inf:
            raise ConfigError(f"weight {self.weight}", rule="at least 0 and finite", who="MART")
        check_radius(self.eps, "MART")
        self._inner()

    def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Clean rows, then what became of them; see `TrainingDefence.craft`."""
        return self.shape(batch.inputs, batch.targets, self._inner().craft(batch)[0])

    def step_of(self, trainer: Work, program: Program, *, in_place: bool) -> Step:
        """See `TrainingDefence.step_of`."""
        pairs = program.with_calls(
            _Pairs(program.training, self.weight), _Pairs(program.evaluation, self.weight), "mart"
        )
        return update_step(pairs, trainer.optimizer, clip_norm=trainer.clip_norm, in_place=in_place)

    def shape(self, inputs: Tensor, targets: Tensor, changed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Twice as many rows; see `TrainingDefence.shape`."""
        other = inputs if changed is None else changed
        return torch.cat([inputs, other]), torch.cat([targets, targets])

    def _inner(self) -> PGDAT:
        return PGDAT(self.eps, self.norm, self.steps, self.step_size, self.bounds)


def boosted_ce(z: Tensor, y: Tensor) -> Tensor:
    """−log p_y − log(1 − max_{k≠y} p_k), p = softmax(z): a larger margin than cross-entropy asks for; [n].

    Args:
        z: logits [n, classes].
        y: labels [n].
    """
    rival = z.detach().scatter(1, y[:, None], -torch.inf).argmax(1, keepdim=True)
    # log(1 − p_k) by the logits of the other classes: nothing is lost where p_k is near 1
    others = z.scatter(1, rival, -torch.inf)
    return ce(z, y) + z.logsumexp(1) - others.logsumexp(1)


@dataclass(frozen=True)
class _Pairs:
    """A forward pass of which row i, clean, and row b + i, changed, give one loss."""

    call: Call
    weight: float

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
        found = self.call(params, buffers, frozen, inputs, targets, seed, first)
        half = inputs.shape[0] // 2
        z, moved, y = found.outputs[:half], found.outputs[half:], targets[:half]
        unsure = 1 - z.softmax(1).gather(1, y[:, None])[:, 0]
        losses = boosted_ce(moved, y) + self.weight * kl(moved, z) * unsure
        return Forward(losses, found.outputs, found.buffers)
