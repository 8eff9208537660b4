"""Training on clean rows and on what became of them, in one pass."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from mycelia.attacks.defences.training import TrainingDefence
from mycelia.engine.program import Call, Forward, Program
from mycelia.engine.step import Step
from mycelia.engine.training import Work, update_step
from mycelia.engine.types import Tensors

__all__ = ["Paired"]


class Paired(TrainingDefence):
    """Rows i, clean, and b + i, changed, give one loss; batch statistics are those of both."""

    @abstractmethod
    def losses(self, found: Forward, targets: Tensor) -> Tensor:
        """The loss of each pair, [b].

        Args:
            found: of all 2b rows, clean ones first.
            targets: of the clean rows, [b].
        """

    def step_of(self, trainer: Work, program: Program, *, in_place: bool) -> Step:
        """See `TrainingDefence.step_of`."""
        pairs = program.with_calls(
            _Pairs(program.training, self), _Pairs(program.evaluation, self), type(self).__name__.lower()
        )
        return update_step(pairs, trainer.optimizer, clip_norm=trainer.clip_norm, in_place=in_place)

    def shape(self, inputs: Tensor, targets: Tensor, changed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Twice as many rows; see `TrainingDefence.shape`."""
        other = inputs if changed is None else changed
        return torch.cat([inputs, other]), torch.cat([targets, targets])


@dataclass(frozen=True)
class _Pairs:
    """A forward pass with the losses of pairs."""

    call: Call
    defence: Paired

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
        return found._replace(losses=self.defence.losses(found, targets[: inputs.shape[0] // 2]))
