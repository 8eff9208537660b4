"""Carlini, Wagner: "Towards evaluating the robustness of neural networks" (S&P 2017), in l2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, get_args

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.constants import Confident, Constants
from mycelia.attacks.evasion.rivals import Rivals, over_nearest
from mycelia.attacks.evasion.tanh_box import TanhBox
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["CarliniWagner"]

Start = Literal["input", "boundary"]
_CANDIDATES: Final = 10  # classes, the true one among them
_WAY: Final = 0.9  # of the way to a boundary: there its class is the runner-up, and no success yet
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
        start: of an attempt: the "input"; or most of the way to the "boundary" that is nearest when the model
            is taken as linear there, for which an untargeted attack takes one gradient for each of the ten
            likeliest classes. From the input descent makes for the runner-up, which need not be the nearest.
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
    start: Start = "boundary"

    def check(self) -> None:
        """See `Attack.check`."""
        counts = self.steps >= 1 and self.searches >= 1
        sizes = self.constant > 0 and self.learning_rate > 0 and self.kappa >= 0
        if not (counts and sizes) or self.start not in get_args(Start):
            raise ConfigError(
                f"steps {self.steps}, searches {self.searches}, constant {self.constant}, "
                f"learning_rate {self.learning_rate}, kappa {self.kappa}, start {self.start!r}",
                rule='counts at least 1; constant and rate above 0, kappa at least 0; "input" or "boundary"',
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        search.goal = Confident(search.goal, self.kappa)
        constants = Constants(search, self.constant)
        starts = search.x if self.start == "input" or search.goal.targeted else _towards_boundary(search)
        for attempt in range(self.searches):
            rows = search.active
            if not len(rows):
                return
            success = self._attempt(search, rows, constants.value[rows], attempt * self.steps, starts)
            constants.judge(rows, success)

    def _attempt(self, search: Search, rows: Tensor, constant: Tensor, first: int, starts: Tensor) -> Tensor:
        """Descend from a start with one constant per row; bool [k]: who reached the goal with it."""
        everyone = rows
        success = torch.zeros(len(search.x), dtype=torch.bool, device=rows.device)
        wide = (-1, *[1] * (search.x.dim() - 1))
        box = TanhBox(search, rows)
        x, c = search.x[rows], constant.view(wide)
        inner = box.inner(starts[rows])
        mean, square = torch.zeros_like(inner), torch.zeros_like(inner)
        lowest = torch.full_like(constant, torch.inf)
        every = max(1, self.steps // 10)
        for step in range(self.steps):
            points, slope = box.outer(inner)
            grad, hinge, outputs = search.gradient(points, rows, first + step, "hinge")
            if step or starts is search.x:  # a success at another start says nothing of the constant
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
                box = TanhBox(search, rows)
        return success[everyone]


def _towards_boundary(search: Search) -> Tensor:
    """Points on the way from all inputs to their nearest linearised boundaries, as x."""
    rows = search.active
    rivals = Rivals(search, _CANDIDATES)
    x = search.x[rows]
    slopes, _ = search.slopes(x, rows, 0, rivals.weights[rows])
    ends = over_nearest(search, rows, x, slopes, rivals.margins[rows], "l2")
    return search.x.index_put((rows,), x + _WAY * (ends - x))
