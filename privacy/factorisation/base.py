"""What a strategy is, how it may be used, and how good it is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError

__all__ = ["Draw", "Error", "Plan", "Strategy", "Workload", "error", "sensitivity"]

Draw = Callable[[int, str], Tensor]
"""`draw(step, label)`: the independent noise of that name, always the same."""


@dataclass(frozen=True)
class Plan:
    """How many steps there will be, and how often one example or client may take part.

    Attributes:
        steps: n, at least 1; after them no more noise is given.
        uses: most steps that one takes part in, at least 1.
        separation: least distance of two of its steps, at least 1: with separation b, after step t the next
            is t + b or later. Fixed epochs of b steps (always the same place in the epoch) are among these.

    Raises:
        ConfigError: a value out of range.
    """

    steps: int
    uses: int = 1
    separation: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "uses", "separation"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", rule=f"{name} >= 1", who="plan")

    @property
    def possible(self) -> int:
        """The uses that fit into the steps."""
        return min(self.uses, -(-self.steps // self.separation))


@dataclass(frozen=True)
class Workload:
    """What is computed from the noised gradients; by default their running sum.

    With momentum m and rates r the queries are θ_t = Σ_{s<=t} r_s v_s, v_s = m v_{s-1} + g_s.

    Attributes:
        steps: n, at least 1.
        momentum: in [0, 1).
        rates: a learning rate for each step, or nothing for 1 throughout.

    Raises:
        ConfigError: a value out of range.
    """

    steps: int
    momentum: float = 0.0
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}", rule="steps >= 1", who="workload")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum is {self.momentum}", rule="momentum is in [0, 1)", who="workload")
        if self.rates and len(self.rates) != self.steps:
            raise ConfigError(
                f"{len(self.rates)} rates for {self.steps} steps", rule="one rate a step", who="workload"
            )
        if not all(math.isfinite(rate) for rate in self.rates):
            raise ConfigError("a rate is not finite", rule="rates are finite", who="workload")


class Error(NamedTuple):
    """Variance of the answers for independent noise of variance 1, before it is scaled to the sensitivity.

    Attributes:
        maximum: of the worst query.
        mean: over the queries.
    """

    maximum: float
    mean: float


class Strategy(ABC):
    """A lower triangular C, as what it is needed for: its sensitivity, its error, and the noise C⁻¹ z."""

    name: ClassVar[str]

    @abstractmethod
    def sensitivity(self, participation: Plan) -> float:
        """The most that one participant, of norm 1 at each of its steps, moves C g in L2."""

    @abstractmethod
    def error(self, workload: Workload) -> Error:
        """Variance of the workload's answers under the strategy's noise."""

    @abstractmethod
    def slots(self, steps: int) -> int:
        """How many vectors the stream of noise remembers."""

    @abstractmethod
    def advance(self, step: int, slots: Tensor, draw: Draw) -> Tensor:
        """The noise of a step, and the memory brought up to date in place.

        Args:
            step: from 0, in order.
            slots: [slots, *shape] of zeros before step 0.
            draw: gives independent noise [*shape] by name.
        """


def sensitivity(strategy: Strategy, participation: Plan) -> float:
    """The most that one participant can move C g, in L2 and in units of the clip bound.

    The noise multiplier of the whole run is that of z divided by this.

    >>> from mycelia.privacy.factorisation import SqrtToeplitz
    >>> round(sensitivity(SqrtToeplitz(), Plan(10)) ** 2, 6)
    1.791344
    """
    return strategy.sensitivity(participation)


def error(strategy: Strategy, workload: Workload) -> Error:
    """Largest and mean variance of the workload's answers, for noise z of variance 1.

    Noise is scaled to the sensitivity, so strategies are compared by sensitivity² times this.
    """
    return strategy.error(workload)


def answer_variances(rows: Tensor, workload: Workload) -> Tensor:
    """Variance of each answer when step t adds row t of `rows` times independent noise.

    Args:
        rows: float64 [steps, m].
        workload: of as many steps.

    Returns:
        float64 [steps].
    """
    velocity = torch.zeros_like(rows[0])
    answer = torch.zeros_like(velocity)
    variances = torch.empty(workload.steps, dtype=torch.float64)
    for step in range(workload.steps):
        velocity.mul_(workload.momentum).add_(rows[step])
        answer.add_(velocity, alpha=workload.rates[step] if workload.rates else 1.0)
        variances[step] = answer.dot(answer)
    return variances
