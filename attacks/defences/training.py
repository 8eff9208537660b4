"""Training on changed inputs, as the updates of a `Trainer`.

A defence is a value that says what a batch becomes; `Trainer(..., updates=defence)` trains with it. The
attack sees the model in evaluation mode and as it is now, so running statistics move in the training pass
only. What is drawn is named by the trainer's seed and the step, so a resumed run ends where an unbroken one
does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds, bounds_of, clipped, inputs_of
from mycelia.attacks.goals import Untargeted
from mycelia.attacks.model import Model, as_model
from mycelia.engine.data import Examples
from mycelia.engine.events import Event
from mycelia.engine.local import uses_seed
from mycelia.engine.program import Program
from mycelia.engine.rng import derive
from mycelia.engine.run import Run
from mycelia.engine.step import Step
from mycelia.engine.training import Done, TrainState, Updates, Work, batches, update_step
from mycelia.engine.training.planned import plan_update
from mycelia.engine.training.step import initial_carry
from mycelia.engine.transforms.compile import Plan, PlannedStep
from mycelia.engine.types import Tensors

__all__ = ["Batch", "Guard", "Raised", "Rows", "TrainingDefence", "in_bounds"]

Rows = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """What a defence makes adversarial examples of.

    Attributes:
        model: in evaluation mode, with the parameters of this step.
        inputs: [b, …], a copy of the examples.
        targets: [b].
        rows: numbers of the examples, [b].
        seed: names the draws of this step.
    """

    model: Model
    inputs: Tensor
    targets: Tensor
    rows: Rows
    seed: int


class Guard(Protocol):
    """Watches a training and may end it.

    Attributes:
        stopped: why training ended, or "".
    """

    stopped: str

    def look(self, model: Model, step: int, device: torch.device) -> None:
        """Told after each step; `model` is in evaluation mode, on the device."""

    def events(self) -> Sequence[Event]:
        """What was measured since the last call."""

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint keeps."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from that."""


@dataclass(frozen=True)
class TrainingDefence(ABC):
    """How a model is trained against attacks: settings and nothing else.

    It is what a `Trainer` takes as `updates`.
    """

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:  # noqa: B027 - some have nothing to refuse
        """Refuse settings that make no sense.

        Raises:
            ConfigError: naming the setting.
        """

    def __call__(
        self, trainer: Work, examples: Examples, params: Tensors, buffers: Tensors, run: Run | None
    ) -> Updates:
        """The updates of one training; see `MakeUpdates`."""
        del run
        return _AdversarialUpdates(self, trainer, examples, params, buffers)

    @property
    def replays(self) -> int:
        """Steps that are made on a batch before the next one."""
        return 1

    @abstractmethod
    def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Inputs and targets to train on, once; no row is lost."""

    def step_of(self, trainer: Work, program: Program, *, in_place: bool) -> Step:
        """The step on what was crafted."""
        return update_step(program, trainer.optimizer, clip_norm=trainer.clip_norm, in_place=in_place)

    def shape(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What `craft` gives for a full batch, whatever the values: plans are made for it."""
        return inputs, targets

    def carried(self, inputs: Tensor) -> Tensors:
        """Tensors that steps change beside those of the model and the optimiser, for a full batch."""
        del inputs
        return {}

    def check_examples(self, examples: Examples) -> None:  # noqa: B027 - as above
        """Refuse training examples that do not fit.

        Raises:
            DataError: saying what does not fit.
        """

    def check_program(self, program: Program) -> None:  # noqa: B027 - as above
        """Refuse a model that cannot be trained so.

        Raises:
            ConfigError: saying why.
        """

    def start(self, examples: Examples, seed: int) -> tuple[TrainingDefence, Rows]:
        """What trains on these examples, and the numbers of those that it trains on: all but held-out ones.

        Args:
            examples: of the training.
            seed: of the trainer.
        """
        del seed
        return self, np.arange(len(examples))

    def guard(self, seed: int) -> Guard | None:
        """What watches a training."""
        del seed
        return None

    def describe(self) -> str:
        """The settings, which a resumed run must share."""
        return repr(self)


class Raised(Untargeted):
    """The loss is raised in every row, also in those that are misclassified already; it is never reached."""

    def of(self, rows: Tensor) -> Raised:
        """See `Goal.of`."""
        return Raised(self.y[rows])

    def reached(self, outputs: Tensor) -> Tensor:
        """Nowhere: there is more to gain."""
        return torch.zeros(len(outputs), dtype=torch.bool, device=outputs.device)


def in_bounds(inputs: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, and their smallest and largest values as tensors that broadcast to them.

    Raises:
        DataError: inputs that are not floating point, or beyond their bounds.
    """
    x = inputs_of(inputs)
    low, high = bounds_of(bounds, x)
    return clipped(x, low, high)[0], low, high


class _AdversarialUpdates:
    """See `Updates` for what is public."""

    plan: Plan
    _update: PlannedStep

    def __init__(
        self, defence: TrainingDefence, trainer: Work, examples: Examples, params: Tensors, buffers: Tensors
    ) -> None:
        defence.check_examples(examples)
        self._defence, self._own = defence.start(examples, trainer.seed)
        self._trainer, self._examples = trainer, examples
        self._device = next((tensor.device for tensor in params.values()), torch.device("cpu"))
        self._random = uses_seed(trainer.program)
        self._seed = torch.zeros((), dtype=torch.int64, device=self._device)
        self._order: Iterator[tuple[int, Rows]] | None = None
        self._now: tuple[int, Rows] = (-1, np.zeros(0, np.int64))
        self._total = 0
        self._guard = self._defence.guard(trainer.seed)
        self.carry = initial_carry(buffers, trainer.optimizer, params, clip_norm=trainer.clip_norm)
        self.carry |= self._defence.carried(self._full()[0])

    def begin(self, plan: str, params: Tensors, total: int) -> None:
        """See `Updates`.

        Raises:
            ConfigError: an unknown plan, or `inductor` without a C++ compiler.
            CaptureError: a plan that needs a graph, and the program has none.
        """
        self._total = total
        inputs, targets = self._defence.shape(*self._full())
        self.plan, self._update = plan_update(
            plan, self._trainer.program, self._step_of, (params, self.carry, inputs, targets), total
        )

    def settings(self) -> Mapping[str, Any]:
        """See `Updates`."""
        trainer = self._trainer
        return {
            "optimizer": trainer.optimizer.name,
            "batch_size": trainer.batch_size,
            "clip_norm": trainer.clip_norm,
            "defence": self._defence.describe(),
        }

    def step(self, state: TrainState) -> Done | None:
        """See `Updates`; None as well when the guard ends training."""
        seed = self._trainer.seed
        if self._guard is not None and self._guard.stopped:
            return None
        rows = self._rows(state.step)
        if rows is None:
            return None
        model = as_model(self._trainer.program, params=state.params, buffers=state.buffers)
        if self._random:
            self._seed.fill_(derive(seed, "training randomness", round=state.step))
        draws = derive(seed, "adversarial training", round=state.step)
        given = self._defence.craft(Batch(model, *self._batch(rows), rows, draws))
        loss = self._update(state.params, state.carry, *given, self._seed, {}).item()
        if self._guard is not None and math.isfinite(loss):
            self._guard.look(model, state.step + 1, self._device)
        return Done(loss, len(rows), rows.tolist())

    def state(self) -> Mapping[str, Any]:
        """What the guard knows: all else is a function of seed and step."""
        return {} if self._guard is None else self._guard.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Updates`."""
        if self._guard is not None:
            self._guard.restore(state)

    def events(self, step: int) -> Sequence[Event]:
        """What the guard measured."""
        del step
        return () if self._guard is None else self._guard.events()

    def outcome(self) -> Mapping[str, Any]:
        """What ended training."""
        return {} if self._guard is None else {"stopped_by": self._guard.stopped}

    def close(self) -> None:
        """Nothing to let go of."""

    def _rows(self, step: int) -> Rows | None:
        number, replays = step // self._defence.replays, self._defence.replays
        if self._order is None:
            self._order = batches(
                len(self._own), self._trainer.batch_size, self._trainer.seed,
                start=number, stop=-(-self._total // replays),
            )  # fmt: skip
        while self._now[0] < number:
            found = next(self._order, None)
            if found is None:
                return None
            self._now = found[0], self._own[found[1]]
        return self._now[1]

    def _step_of(self, program: Program, *, in_place: bool) -> Step:
        return self._defence.step_of(self._trainer, program, in_place=in_place)

    def _full(self) -> tuple[Tensor, Tensor]:
        return self._batch(self._own[: self._trainer.batch_size])

    def _batch(self, rows: Rows) -> tuple[Tensor, Tensor]:
        arrays = (self._examples.inputs[rows], self._examples.targets[rows])  # an index array copies
        inputs, targets = (torch.from_numpy(array).to(self._device) for array in arrays)
        return inputs, targets
