"""Defensive distillation: training at a temperature, on the probabilities of a model trained so.

Papernot, McDaniel, Wu, Jha, Swami: "Distillation as a defense to adversarial perturbations against deep
neural networks", IEEE S&P 2016.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from mycelia.attacks.defences.training import Batch, TrainingDefence
from mycelia.attacks.model import as_model
from mycelia.engine.errors import ConfigError
from mycelia.engine.program import Call, Forward, Program
from mycelia.engine.schema import model_sha256
from mycelia.engine.step import Step
from mycelia.engine.trained import of_run
from mycelia.engine.training import Work, update_step
from mycelia.engine.types import Tensors

__all__ = ["Distillation"]


@dataclass(frozen=True)
class Distillation(TrainingDefence):
    """Minimises the cross-entropy of softmax(z / temperature) with labels, or with what a teacher gives.

    A teacher is trained at a temperature on labels, and then a model on the softmax(z / temperature) of the
    teacher at the same one (section IV). The model is used as it is, at temperature 1, where its logits are
    so far apart that gradients of a cross-entropy vanish. That hides adversarial examples from attacks which
    need these, and removes none (Carlini, Wagner: "Towards evaluating the robustness of neural networks",
    IEEE S&P 2017, section IV): judge it by attacks on logits, as the suites here do. The loss of the program
    is not used: its outputs are logits [b, classes].

    Attributes:
        temperature: above 0 (paper: 20).
        teacher: a module that gives logits, or the folder of its run, which is read at once; None: train on
            labels.
        sha256: of the teacher's tensors; "" without one.
    """

    temperature: float = 20.0
    teacher: nn.Module | Path | str | None = field(default=None, repr=False, compare=False)
    sha256: str = field(init=False, default="")

    def check(self) -> None:
        """See `TrainingDefence.check`.

        Raises:
            DataError: a run without an intact checkpoint.
        """
        if not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"temperature {self.temperature}", rule="above 0 and finite", who="Distillation"
            )
        if isinstance(self.teacher, str | Path):
            object.__setattr__(self, "teacher", of_run(Path(self.teacher)).module)
        if isinstance(self.teacher, nn.Module):
            tensors = [*self.teacher.named_parameters(), *self.teacher.named_buffers()]
            digest = model_sha256({name: tensor.detach().cpu() for name, tensor in tensors})
            object.__setattr__(self, "sha256", digest)

    def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The batch, with probabilities [b, classes] for targets where there is a teacher.

        Raises:
            ConfigError: a teacher of other classes than the model.
        """
        found = self.shape(batch.inputs, batch.targets)
        if self.teacher is not None:
            own = batch.model(batch.inputs[:1]).shape[1]
            if found[1].shape[1] != own:
                raise ConfigError(
                    f"a teacher of {found[1].shape[1]} classes, a model of {own}",
                    rule="as many",
                    who="Distillation",
                )
        return found

    def shape(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `TrainingDefence.shape`."""
        if not isinstance(self.teacher, nn.Module):
            return inputs, targets
        teacher = as_model(self.teacher)
        home = next((each.device for each in self.teacher.parameters()), inputs.device)
        with teacher.quiet():
            z = teacher(inputs.to(home)).to(inputs.device)
        return inputs, (z / self.temperature).softmax(1)

    def step_of(self, trainer: Work, program: Program, *, in_place: bool) -> Step:
        """See `TrainingDefence.step_of`."""
        warm = program.with_calls(
            _Warm(program.training, self.temperature), _Warm(program.evaluation, self.temperature), "warm"
        )
        return update_step(warm, trainer.optimizer, clip_norm=trainer.clip_norm, in_place=in_place)


@dataclass(frozen=True)
class _Warm:
    """A forward pass with the loss at a temperature; targets are labels [b] or probabilities [b, classes]."""

    call: Call
    temperature: float

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
        labels = targets if targets.dim() == 1 else targets.argmax(1)
        found = self.call(params, buffers, frozen, inputs, labels, seed, first)
        logs = (found.outputs / self.temperature).log_softmax(1)
        soft = targets.dim() == 2
        losses = -(targets * logs).sum(1) if soft else -logs.gather(1, targets[:, None])[:, 0]
        return found._replace(losses=losses)
