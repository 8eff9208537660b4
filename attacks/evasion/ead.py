"""Chen et al.: "EAD: Elastic-net attacks to deep neural networks via adversarial examples" (AAAI 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, get_args

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.constants import Confident, Constants
from mycelia.attacks.norms import Norm, norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["EAD"]

Rule = Literal["EN", "L1"]
_GAIN: Final = 1e-4  # relative fall of the objective without which a row stops


@dataclass(frozen=True)
class EAD(Attack):
    """The smallest β‖δ‖₁ + ‖δ‖² + c · max(κ − margin, 0), by FISTA: gradient steps, each shrunk to the input.

    Each row has a constant c of its own, which rises where an attempt fails and falls where one succeeds.

    Attributes:
        norm: "l1".
        rule: which success is returned: that of smallest elastic net ("EN", β‖δ‖₁ + ‖δ‖²) or l1 norm ("L1").
        beta: weight of the l1 norm, and what a step shrinks by whatever its size (eq. 6), raw input units.
        steps: of each attempt, at least 1.
        searches: constants tried, at least 1.
        constant: the first one, above 0.
        step_size: at first; it falls with the square root of the steps that are left. Above 0.
        kappa: margin in logits that counts as success, at least 0.
        early_abort: end attempts that stand still.
    """

    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l1",)

    norm: Norm = "l1"
    rule: Rule = "EN"
    beta: float = 1e-2
    steps: int = 300
    searches: int = 9
    constant: float = 1e-3
    step_size: float = 0.01
    kappa: float = 0.0
    early_abort: bool = True

    def check(self) -> None:
        """See `Attack.check`."""
        counts = self.steps >= 1 and self.searches >= 1
        sizes = self.constant > 0 and self.step_size > 0 and self.beta >= 0 and self.kappa >= 0
        if not (counts and sizes) or self.rule not in get_args(Rule):
            raise ConfigError(
                f"rule {self.rule!r}, beta {self.beta}, steps {self.steps}, searches {self.searches}, "
                f"constant {self.constant}, step_size {self.step_size}, kappa {self.kappa}",
                rule='"EN" or "L1"; counts at least 1; constant and step above 0, beta and kappa at least 0',
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        search.goal = Confident(search.goal, self.kappa)
        constants, chosen = Constants(search, self.constant), _Chosen(search, self.beta)
        for attempt in range(self.searches):
            rows = search.active
            rows = rows[search.left(rows) > 2]
            if not len(rows):
                break
            success = self._attempt(search, rows, constants.value[rows], attempt, chosen)
            constants.judge(rows, success)
        rows = torch.arange(len(search.x), device=search.x.device)
        rows = rows[(search.left(rows) > 0) & ((self.rule == "EN") | (search.best_step[rows] < 0))]
        if len(rows):
            search.look(chosen.points[rows], rows, self.searches * self.steps, "margin")

    def _attempt(
        self, search: Search, rows: Tensor, constant: Tensor, attempt: int, chosen: _Chosen
    ) -> Tensor:
        """Descend from the input with one constant per row; bool [k]: who reached the goal with it."""
        everyone, first = rows, attempt * self.steps
        wide = (-1, *[1] * (search.x.dim() - 1))
        success = torch.zeros(len(search.x), dtype=torch.bool, device=rows.device)
        x, c = search.x[rows], constant.view(wide)
        points, ahead = x, x
        lowest = torch.full_like(constant, torch.inf)
        every = max(1, self.steps // 10)
        for step in range(self.steps):
            goal = search.goal.of(rows)
            grad, hinge, outputs = search.gradient(
                ahead, rows, first + step, "hinge", candidates=self.rule == "L1"
            )
            if self.rule == "EN":
                chosen.take(ahead, rows, hinge, goal.reached(outputs))
            rate = self.step_size * (1 - step / self.steps) ** 0.5
            moved = ahead - rate * (2 * (ahead - x) - c * grad)
            delta = moved - x
            shrunk = x + delta.sign() * (delta.abs() - self.beta).clamp(min=0)
            before, points = points, torch.minimum(torch.maximum(shrunk, search.low[rows]), search.high[rows])
            if self.rule == "L1":
                hinge, reached = search.look(points, rows, first + step, "hinge")
            else:
                outputs = search.outputs(points, rows)
                hinge, reached = goal.loss(outputs, "hinge"), goal.reached(outputs)
                chosen.take(points, rows, hinge, reached)
            success[rows] |= reached
            # The momentum may leave the box, and candidates may not.
            ahead = points + step / (step + 3) * (points - before)
            ahead = torch.minimum(torch.maximum(ahead, search.low[rows]), search.high[rows])
            on = search.going_on(rows) & (search.left(rows) > 2)  # and one for the last look
            if self.early_abort and (step + 1) % every == 0:
                value = _elastic(points - x, self.beta) + c.flatten() * (self.kappa - hinge)
                on &= value <= (1 - _GAIN) * lowest
                lowest = torch.minimum(lowest, value)
            if not bool(on.all()):
                rows, x, c, lowest = rows[on], x[on], c[on], lowest[on]
                points, ahead = points[on], ahead[on]
                if not len(rows):
                    break
        return success[everyone]


def _elastic(delta: Tensor, beta: float) -> Tensor:
    """β‖δ‖₁ + ‖δ‖², [k]."""
    return beta * norm(delta, "l1") + delta.square().flatten(1).sum(1)


class _Chosen:
    """Of each row the success of smallest elastic net, before any success the point of largest margin."""

    def __init__(self, search: Search, beta: float) -> None:
        self.points = search.x.clone()
        self._x, self._beta = search.x, beta
        self._value = torch.full((len(search.x),), torch.inf, dtype=search.x.dtype, device=search.x.device)
        self._margin = torch.full_like(self._value, -torch.inf)

    def take(self, points: Tensor, rows: Tensor, margin: Tensor, reached: Tensor) -> None:
        """Consider one point per row."""
        margin = margin.to(self._margin.dtype)
        value = torch.where(reached, _elastic(points - self._x[rows], self._beta), torch.inf)
        none = self._value[rows] == torch.inf
        better = (value < self._value[rows]) | (none & ~reached & (margin > self._margin[rows]))
        chosen = rows[better]
        self.points[chosen] = points[better]
        self._value[chosen] = value[better]
        self._margin[chosen] = margin[better]
