"""Carlini, Wagner: "Towards evaluating the robustness of neural networks" (S&P 2017), in l2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.constants import Confident, Constants
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["CarliniWagner"]

_INSIDE: Final = (
    0.99  # how far towards the bounds an input lies in tanh's range: at 1 it could never leave them
)
_GAIN: Final = 1e-4  # relative fall of the objective without which a row stops


@dataclass(frozen=True)
class CarliniWagner(Attack):
    """The smallest ‖δ‖² + c · max(κ − margin, 0), by Adam, with the box as the range of a tanh.

    Each row has a constant c of its own, which rises where an attempt fails and falls where one succeeds. An
    attempt of a row ends when its objective falls no more. Where a bound is infinite there is no tanh.

    Attributes:
        norm: "l2".
        steps: of each attempt, at least 1.
        searches: constants tried, at least 1.
        constant: the first one, above 0.
        learning_rate: of Adam, in raw input units in the middle of the box.
        kappa: margin in logits that counts as success, at least 0.
        early_abort: end attempts that stand still.
    """

    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l2",)

    norm: Norm = "l2"
    steps: int = 300
    searches: int = 9
    constant: float = 1e-3
    learning_rate: float = 0.005
    kappa: float = 0.0
    early_abort: bool = True

    def check(self) -> None:
        """See `Attack.check`."""
        counts = self.steps >= 1 and self.searches >= 1
        if not (counts and self.constant > 0 and self.learning_rate > 0 and self.kappa >= 0):
            raise ConfigError(
                f"steps {self.steps}, searches {self.searches}, constant {self.constant}, "
                f"learning_rate {self.learning_rate}, kappa {self.kappa}",
                rule="counts at least 1; constant and rate above 0, kappa at least 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        search.goal = Confident(search.goal, self.kappa)
        constants = Constants(search, self.constant)
        for attempt in range(self.searches):
            rows = search.active
            if not len(rows):
                return
            success = self._attempt(search, rows, constants.value[rows], attempt * self.steps)
            constants.judge(rows, success)

    def _attempt(self, search: Search, rows: Tensor, constant: Tensor, first: int) -> Tensor:
        """Descend from the input with one constant per row; bool [k]: who reached the goal with it."""
        everyone = rows
        success = torch.zeros(len(search.x), dtype=torch.bool, device=rows.device)
        wide = (-1, *[1] * (search.x.dim() - 1))
        box = _Box(search, rows)
        x, c = search.x[rows], constant.view(wide)
        inner = box.inner(x)
        mean, square = torch.zeros_like(inner), torch.zeros_like(inner)
        lowest = torch.full_like(constant, torch.inf)
        every = max(1, self.steps // 10)
        for step in range(self.steps):
            points, slope = box.outer(inner)
            grad, hinge, outputs = search.gradient(points, rows, first + step, "hinge")
            success[rows] |= search.goal.of(rows).reached(outputs)
            delta = points - x
            descent = (2 * delta - c * grad) * slope
            mean = torch.lerp(descent, mean, 0.9)
            square = torch.lerp(descent.square(), square, 0.999)
            rate = self.learning_rate * (1 - 0.999 ** (step + 1)) ** 0.5 / (1 - 0.9 ** (step + 1))
            inner = inner - rate * mean / (square.sqrt() + 1e-8)
            on = search.going_on(rows)
            if self.early_abort and (step + 1) % every == 0:
                value = delta.square().flatten(1).sum(1) + c.flatten() * (self.kappa - hinge)
                on &= value <= (1 - _GAIN) * lowest
                lowest = torch.minimum(lowest, value)
            if not bool(on.all()):
                rows, x, c, lowest = rows[on], x[on], c[on], lowest[on]
                inner, mean, square = inner[on], mean[on], square[on]
                if not len(rows):
                    break
                box = _Box(search, rows)
        return success[everyone]


class _Box:
    """A space without bounds for points of the box: in its middle the two have the same units.

    So a step has raw units, whatever the width of the box, and one without bounds is the limit of wide ones.
    """

    def __init__(self, search: Search, rows: Tensor) -> None:
        self.low, self.high = search.low[rows], search.high[rows]
        self._bounded = torch.isfinite(self.low) & torch.isfinite(self.high)
        self._all = bool(self._bounded.all())
        self._middle = torch.where(self._bounded, (self.low + self.high) / 2, 0.0)
        self._half = torch.where(self._bounded, (self.high - self.low) / (2 * _INSIDE), 1.0)

    def inner(self, x: Tensor) -> Tensor:
        """Where x lies in that space."""
        scaled = (x - self._middle) / self._half
        return torch.where(self._bounded, self._half * scaled.clamp(-_INSIDE, _INSIDE).atanh(), x)

    def outer(self, inner: Tensor) -> tuple[Tensor, Tensor]:
        """The points, and their derivatives with respect to the other space."""
        bent = (inner / self._half).tanh()
        slope = 1 - bent.square()
        points = torch.addcmul(self._middle, self._half, bent)
        if not self._all:
            points = torch.where(self._bounded, points, inner)
            slope = torch.where(self._bounded, slope, torch.ones_like(slope))
        return torch.minimum(torch.maximum(points, self.low), self.high), slope
