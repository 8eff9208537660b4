"""Training on bounds instead of attacks: the loss of the worst logits that intervals allow.

Gowal, Dvijotham, Stanforth, Bunel, Qin, Uesato, Arandjelovic, Mann, Kohli: "On the effectiveness of interval
bound propagation for training verifiably robust models", 2018 (ICCV 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mycelia.attacks.defences.adversarial_training import check_radius
from mycelia.attacks.defences.inputs import check_bounds
from mycelia.attacks.defences.training import Batch, TrainingDefence, in_bounds
from mycelia.attacks.defences.verification.intervals import bounds_through, margins_below
from mycelia.attacks.defences.verification.layers import Chain
from mycelia.attacks.defences.verification.reading import read_program
from mycelia.attacks.losses import ce
from mycelia.engine.errors import ConfigError
from mycelia.engine.program import Call, Forward, Program
from mycelia.engine.step import Step, StepResult
from mycelia.engine.training import Work, update_step
from mycelia.engine.types import Tensors

__all__ = ["IBP", "worst_logits"]

_STEP: Final = "bounds/step"


@dataclass(frozen=True)
class IBP(TrainingDefence):
    """Minimises k · loss(f(x), y) + (1 − k) · CE(worst logits within e, y); k and e change step by step.

    Eq. 10 and section 4: k falls from 1 to `kappa` and e rises from 0 to `eps` in a straight line of `ramp`
    steps, after `warmup` steps of plain training. The norm is linf. The model must be a chain that
    `verification.reading.read` knows; bounds are those of its evaluation mode. `verify` then says which rows
    are certified.

    Attributes:
        eps: radius in units of the inputs, at least 0.
        kappa: share of the clean loss in the end, in [0, 1].
        warmup: steps of plain training, at least 0 (paper, MNIST: 2,000).
        ramp: steps until k and e have their last values, at least 1 (paper, MNIST: 10,000).
        bounds: smallest and largest value of an input.
    """

    eps: float = 8 / 255
    kappa: float = 0.5
    warmup: int = 0
    ramp: int = 1000
    bounds: tuple[float, float] = (0.0, 1.0)

    def check(self) -> None:
        """See `TrainingDefence.check`."""
        check_radius(self.eps, "IBP")
        check_bounds(self.bounds, "IBP")
        if not 0 <= self.kappa <= 1 or self.warmup < 0 or self.ramp < 1 or math.isnan(self.kappa):
            raise ConfigError(
                f"kappa {self.kappa}, warmup {self.warmup}, ramp {self.ramp}",
                rule="kappa in [0, 1], warmup at least 0, ramp at least 1",
                who="IBP",
            )

    def check_program(self, program: Program) -> None:
        """See `TrainingDefence.check_program`."""
        read_program(program)

    def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The batch as it is: the step bounds what is near it."""
        return in_bounds(batch.inputs, self.bounds)[0], batch.targets

    def carried(self, inputs: Tensor) -> Tensors:
        """The number of the step."""
        return {_STEP: torch.zeros((), dtype=torch.int64, device=inputs.device)}

    def step_of(self, trainer: Work, program: Program, *, in_place: bool) -> Step:
        """See `TrainingDefence.step_of`."""
        chain = read_program(program)

        def step(
            params: Tensors, carry: Tensors, inputs: Tensor, targets: Tensor, seed: Tensor, extra: Tensors
        ) -> StepResult:
            number = carry[_STEP]
            call = _Bounded(program.training, chain, self, number)
            bounded = program.with_calls(call, program.evaluation, "bounds")
            plain = update_step(bounded, trainer.optimizer, clip_norm=trainer.clip_norm, in_place=in_place)
            found = plain(params, carry, inputs, targets, seed, extra)
            return found._replace(buffers=found.buffers | {_STEP: number + 1})

        return step


def worst_logits(
    chain: Chain, x: Tensor, y: Tensor, eps: float | Tensor, bounds: tuple[float, float], tensors: Tensors
) -> Tensor:
    """Logits less that of y, each as large as intervals allow within eps and bounds, [n, classes].

    Args:
        chain: of a classifier.
        x: inputs [n, …].
        y: labels [n].
        eps: radius in linf.
        bounds: smallest and largest value of an input.
        tensors: of the chain.
    """
    low, high = bounds
    known = bounds_through(chain, (x - eps).clamp(low, high), (x + eps).clamp(low, high), tensors)
    return -margins_below(chain, known, y, tensors)


@dataclass(frozen=True, eq=False)
class _Bounded:
    """A forward pass with a loss of which one part is that of the worst logits."""

    call: Call
    chain: Chain
    settings: IBP
    number: Tensor

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
        settings = self.settings
        share = ((self.number - settings.warmup) / settings.ramp).clamp(0, 1).to(inputs.dtype)
        tensors = {**frozen, **buffers, **params}
        worst = worst_logits(self.chain, inputs, targets, settings.eps * share, settings.bounds, tensors)
        mixed = share * (1 - settings.kappa)
        return found._replace(losses=(1 - mixed) * found.losses + mixed * ce(worst, targets))
