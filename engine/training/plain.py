"""Ordinary updates: batches in shuffled epochs, and an optimiser's step on each batch's mean loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mycelia.engine.data import Examples
from mycelia.engine.events import Event
from mycelia.engine.local import uses_seed
from mycelia.engine.program import Program
from mycelia.engine.rng import derive
from mycelia.engine.run import Run
from mycelia.engine.step import Step
from mycelia.engine.training.batches import batches
from mycelia.engine.training.planned import plan_update
from mycelia.engine.training.state import TrainState
from mycelia.engine.training.step import initial_carry, update_step
from mycelia.engine.training.updates import Done, Work
from mycelia.engine.transforms.compile import Plan, PlannedStep
from mycelia.engine.types import Tensors

__all__ = ["PlainUpdates"]


class PlainUpdates:
    """The updates of a training without privacy; see `Updates` for what is public."""

    plan: Plan
    _update: PlannedStep

    def __init__(
        self, trainer: Work, examples: Examples, params: Tensors, buffers: Tensors, run: Run | None
    ) -> None:
        del run
        self._trainer, self._examples = trainer, examples
        self._device = next((tensor.device for tensor in params.values()), torch.device("cpu"))
        self._random = uses_seed(trainer.program)
        self._seed = torch.zeros((), dtype=torch.int64, device=self._device)
        self._order: Iterator[tuple[int, Any]] | None = None
        self._total = 0
        self.carry = initial_carry(buffers, trainer.optimizer, params, clip_norm=trainer.clip_norm)

    def begin(self, plan: str, params: Tensors, total: int) -> None:
        """See `Updates`.

        Raises:
            ConfigError: an unknown plan, or `inductor` without a C++ compiler.
            CaptureError: a plan that needs a graph, and the program has none.
        """
        self._total = total
        inputs, targets = self._batch(range(min(self._trainer.batch_size, len(self._examples))))
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
        }

    def step(self, state: TrainState) -> Done | None:
        """See `Updates`."""
        trainer = self._trainer
        if self._order is None:
            self._order = batches(
                len(self._examples), trainer.batch_size, trainer.seed, start=state.step, stop=self._total
            )
        number, rows = next(self._order, (state.step, None))
        if rows is None:
            return None
        if self._random:
            self._seed.fill_(derive(trainer.seed, "training randomness", round=number))
        loss = self._update(state.params, state.carry, *self._batch(rows), self._seed, {}).item()
        return Done(loss, len(rows), rows)

    def state(self) -> Mapping[str, Any]:
        """Nothing: the order of the examples is a function of seed and step."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Updates`."""

    def events(self, step: int) -> Sequence[Event]:
        """None."""
        return ()

    def outcome(self) -> Mapping[str, Any]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing to let go of."""

    def _step_of(self, program: Program, *, in_place: bool) -> Step:
        trainer = self._trainer
        return update_step(program, trainer.optimizer, clip_norm=trainer.clip_norm, in_place=in_place)

    def _batch(self, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        arrays = (self._examples.inputs[rows], self._examples.targets[rows])
        inputs, targets = (torch.from_numpy(array).to(self._device) for array in arrays)
        return inputs, targets
