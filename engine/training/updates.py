"""The seam between the training loop and what happens in a step of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mycelia.engine.data import Examples
from mycelia.engine.events import Event
from mycelia.engine.optimizers import Optimizer
from mycelia.engine.program import Program
from mycelia.engine.run import Run
from mycelia.engine.training.state import TrainState
from mycelia.engine.transforms.compile import Plan
from mycelia.engine.types import Tensors

__all__ = ["Done", "MakeUpdates", "Updates", "Work"]


class Work(Protocol):
    """What updates read of a trainer; its attributes are described there."""

    @property
    def program(self) -> Program:
        """What is trained."""

    @property
    def optimizer(self) -> Optimizer:
        """Makes new parameters of a gradient."""

    @property
    def batch_size(self) -> int:
        """Examples a step."""

    @property
    def clip_norm(self) -> float:
        """Largest norm of a step's gradient; 0 does not clip."""

    @property
    def seed(self) -> int:
        """Root of the random streams."""


class Done(NamedTuple):
    """A step that was made.

    Attributes:
        loss: mean loss over its examples; NaN where there were none.
        examples: how many there were.
        rows: their numbers; None where a loss that is not finite is no failure.
    """

    loss: float
    examples: int
    rows: Sequence[int] | None


class Updates(Protocol):
    """Makes the steps of one training, in order.

    Attributes:
        carry: what a step changes besides the parameters, by name; in every checkpoint.
        plan: how steps are run; known once `begin` was called.
    """

    carry: Tensors
    plan: Plan

    def begin(self, plan: str, params: Tensors, total: int) -> None:
        """Get ready: build and compile what a step needs.

        Args:
            plan: the plan asked for, or the one a run that goes on began with.
            params: tensors that the steps will change in place.
            total: planned steps.
        """

    def settings(self) -> Mapping[str, Any]:
        """What a resumed training has to share, as JSON can say it."""

    def step(self, state: TrainState) -> Done | None:
        """Make the step `state.step`, in place; None when there can be no further one."""

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint keeps beside the carry, as JSON can say it."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's `state`; called after `begin`."""

    def events(self, step: int) -> Sequence[Event]:
        """What a point of the loss curve is logged with."""

    def outcome(self) -> Mapping[str, Any]:
        """Fields of `FitResult` that these updates know."""

    def close(self) -> None:
        """Let go of files; closing twice is harmless."""


MakeUpdates = Callable[[Work, Examples, Tensors, Tensors, Run | None], Updates]
"""Makes the updates of a training from `(trainer, examples, params, buffers, run)`."""
