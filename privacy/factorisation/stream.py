"""The noise of a strategy, step by step, from the names of its draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mycelia.engine.errors import BudgetExceeded, ConfigError
from mycelia.engine.types import Tensors
from mycelia.privacy.factorisation.base import Strategy
from mycelia.privacy.noise.base import check_scale
from mycelia.privacy.noise.gaussian import Gaussian
from mycelia.privacy.noise.source import NoiseSource

__all__ = ["CorrelatedNoise", "NoiseState"]


@dataclass
class NoiseState:
    """What a stream of noise remembers. **A secret**: who holds it can subtract noise.

    Attributes:
        step: steps made.
        slots: the memory, float32 [slots, *shape] by tensor; `next` changes it in place.
    """

    step: int
    slots: Tensors


@dataclass(frozen=True)
class CorrelatedNoise:
    """Rows of C⁻¹ z, one for each step of a run.

    Attributes:
        strategy: C.
        steps: n; there is no noise after them, since the accounting ends there.
        std: of z, in model units: the noise multiplier times the clip bound, both fixed for the run. The
            multiplier to account is that divided by `sensitivity`.
        purpose: first part of the names of the draws.

    Raises:
        ConfigError: a value out of range, or the strategy is not fitted.
    """

    strategy: Strategy
    steps: int
    std: float
    purpose: str = "noise"

    def __post_init__(self) -> None:
        check_scale(self.std, "correlated noise")
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}", rule="steps >= 1", who="correlated noise")
        self.strategy.slots(self.steps)

    def init(self, like: Mapping[str, Tensor]) -> NoiseState:
        """The state before the first step, for tensors of these names and shapes."""
        count = self.strategy.slots(self.steps)
        return NoiseState(0, {name: torch.zeros(count, *tensor.shape) for name, tensor in like.items()})

    def next(self, state: NoiseState, source: NoiseSource) -> Tensors:
        """The noise of the next step, float32 by tensor; the state moves on.

        Raises:
            BudgetExceeded: the planned steps are over.
        """
        if state.step >= self.steps:
            raise BudgetExceeded(
                f"all {self.steps} planned steps have been made",
                rule="the noise is accounted for the planned steps alone",
                fix="plan more steps from the start, or begin a new run with a budget of its own",
                who="correlated noise",
            )
        noise = {name: self._tensor(name, state, source) for name in state.slots}
        state.step += 1
        return noise

    def resume(self, like: Mapping[str, Tensor], step: int, source: NoiseSource) -> NoiseState:
        """The state after `step` steps, made again from the names of the draws alone."""
        state = self.init(like)
        while state.step < step:
            self.next(state, source)
        return state

    def _tensor(self, name: str, state: NoiseState, source: NoiseSource) -> Tensor:
        slots = state.slots[name]
        shape = slots.shape[1:]

        def draw(step: int, label: str) -> Tensor:
            purpose = f"{self.purpose}/{label}" if label else self.purpose
            return Gaussian().sample(shape, self.std, source, purpose, step, name)

        return self.strategy.advance(state.step, slots, draw)
