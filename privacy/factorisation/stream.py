"""The noise of a strategy, step by step, from the names of its draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mycelia.engine.errors import BudgetExceeded, ConfigError
from mycelia.engine.types import Tensors
from mycelia.privacy.factorisation.base import Strategy
from mycelia.privacy.noise.base import Mechanism, check_scale
from mycelia.privacy.noise.discrete_gaussian import DiscreteGaussian
from mycelia.privacy.noise.gaussian import Gaussian
from mycelia.privacy.noise.grid import check_spread
from mycelia.privacy.noise.source import NoiseSource

__all__ = ["CorrelatedNoise", "NoiseState"]


@dataclass
class NoiseState:
    """What a stream of noise remembers. **A secret**: who holds it can subtract noise.

    Attributes:
        step: steps made.
        slots: the memory, float32 or float64 as the noise is, [slots, *shape] by tensor; `next` changes it
            in place.
    """

    step: int
    slots: Tensors


@dataclass(frozen=True)
class CorrelatedNoise:
    """Rows of C⁻¹ z, one for each step of a run, with z Gaussian.

    With `Gaussian` rows are float32 and added in floating point, which is fast and open to attacks on the
    last bits. With `DiscreteGaussian(sampler="rounded")` they are made in float64, and totals and rows are
    rounded to the grid before they are added in integers. Rounding a total moves two neighbouring totals
    apart by at most the mechanism's `slack`, which belongs into `std`. On totals of the grid, rounding the
    rows is the same as rounding what the Gaussian mechanism releases, so the guarantee of real numbers holds
    afterwards as well; what is left of floating point is in rows that know nothing of the data. Integer noise
    before it is correlated would not do: C times a total of the grid is not on it, and noise on the grid then
    hides nothing.

    Attributes:
        strategy: C.
        steps: n; there is no noise after them, since the accounting ends there.
        std: of z, in model units: the noise multiplier times the clip bound and its slack, all fixed for the
            run. The multiplier to account is that divided by `sensitivity`.
        purpose: first part of the names of the draws.
        mechanism: how rows are added to totals.
        bound: the clip bound, which sets the grid.

    Raises:
        ConfigError: a value out of range, a strategy that is not fitted, or another mechanism.
    """

    strategy: Strategy
    steps: int
    std: float
    purpose: str = "noise"
    mechanism: Mechanism = field(default_factory=Gaussian)
    bound: float = 1.0

    def __post_init__(self) -> None:
        _check_mechanism(self.mechanism)
        check_scale(self.std, "correlated noise")
        if isinstance(self.mechanism, DiscreteGaussian):
            check_spread(self.std / self.mechanism.grid(self.bound), "correlated noise")
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}", rule="steps >= 1", who="correlated noise")
        self.strategy.slots(self.steps)

    def init(self, like: Mapping[str, Tensor]) -> NoiseState:
        """The state before the first step, for tensors of these names and shapes."""
        count, dtype = self.strategy.slots(self.steps), self._dtype
        slots = {name: torch.zeros(count, *tensor.shape, dtype=dtype) for name, tensor in like.items()}
        return NoiseState(0, slots)

    def next(self, state: NoiseState, source: NoiseSource) -> Tensors:
        """The noise of the next step, float32 or float64 by tensor; the state moves on.

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

    def add(self, total: Mapping[str, Tensor], state: NoiseState, source: NoiseSource) -> Tensors:
        """The total with the noise of the next step, in the total's dtype by tensor; the state moves on.

        Args:
            total: float32 or float64, of the names and shapes that the state was made for.
            state: what is remembered.
            source: the secret.

        Raises:
            BudgetExceeded: the planned steps are over.
            DataError: a total is not finite, or does not fit the grid.
        """
        mechanism = _check_mechanism(self.mechanism)
        rows = self.next(state, source)
        return {
            name: mechanism.add_drawn(tensor, rows[name], bound=self.bound) for name, tensor in total.items()
        }

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
            return Gaussian().sample(shape, self.std, source, purpose, step, name, dtype=self._dtype)

        return self.strategy.advance(state.step, slots, draw)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if isinstance(self.mechanism, DiscreteGaussian) else torch.float32


def _check_mechanism(mechanism: Mechanism) -> Gaussian | DiscreteGaussian:
    """Refuse noise that is not Gaussian before it is added."""
    if isinstance(mechanism, Gaussian) or (
        isinstance(mechanism, DiscreteGaussian) and mechanism.sampler == "rounded"
    ):
        return mechanism
    exact = isinstance(mechanism, DiscreteGaussian)
    raise ConfigError(
        "exact discrete noise" if exact else f"{mechanism.name} noise",
        rule="correlated noise is Gaussian, and at most rounded to a grid afterwards",
        fix='use Gaussian(), or DiscreteGaussian(sampler="rounded") for the safe mode',
        who="factorisation",
    )
