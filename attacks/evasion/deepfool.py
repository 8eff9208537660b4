"""Moosavi-Dezfooli, Fawzi, Frossard: "DeepFool" (CVPR 2016), in l2 and linf, inside a box."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.nn import functional

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.halfspace import smallest_step
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["DeepFool"]

_FIRST: Final = 0.6  # the first overshoot is this power of the precision: 4e-10 in float64, 7e-5 in float32
_LEFT_BEHIND: Final = 1e-3  # a success with a margin above this share of the input's is worth going back from


@dataclass(frozen=True)
class DeepFool(Attack):
    """Step after step to the nearest of the linearised boundaries to other classes, until it is crossed.

    A step goes beyond its boundary by a share of the margin that the input had: as good as nothing at first,
    so that an affine model is left with the exact smallest change after one step; then four times as much
    each time.

    Attributes:
        norm: "l2" or "linf".
        steps: at most, at least 1.
        candidates: classes considered, the true one among them: each row's best logits; at least 2.
        overshoot: largest share of the first margin by which a step goes too far, above 0.
        halvings: of the way back to the input, for rows that landed far beyond a curved boundary; 0: none.
    """

    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l2", "linf")
    targeted: ClassVar[bool] = False

    norm: Norm = "l2"
    steps: int = 50
    candidates: int = 10
    overshoot: float = 0.02
    halvings: int = 8

    def check(self) -> None:
        """See `Attack.check`."""
        if self.steps < 1 or self.candidates < 2 or not self.overshoot > 0 or self.halvings < 0:
            raise ConfigError(
                f"steps {self.steps}, candidates {self.candidates}, overshoot {self.overshoot}, "
                f"halvings {self.halvings}",
                rule="at least 1, at least 2, above 0, at least 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        rows = search.active
        y = search.goal.labels.to(search.x.device)
        ranked = search.clean.scatter(1, y[:, None], -torch.inf)
        count = min(self.candidates, search.classes) - 1
        others = ranked.topk(count, 1).indices  # of each row, its own
        weights = functional.one_hot(others, search.classes) - functional.one_hot(y, search.classes)[:, None]
        weights = weights.to(search.clean.dtype)
        margins = -(search.clean[:, None] * weights).sum(2).to(search.x.dtype)
        points = search.x[rows]
        for step in range(self.steps):
            slopes, outputs = search.slopes(points, rows, step, weights[rows])
            on = search.going_on(rows) & ~search.broken[rows]
            rows, points, slopes, outputs = rows[on], points[on], slopes[on], outputs[on]
            if not len(rows):
                break
            gaps = -(outputs[:, None] * weights[rows]).sum(2).to(points.dtype)
            beyond = min(self.overshoot, float(torch.finfo(points.dtype).eps) ** _FIRST * 4.0**step)
            points = self._moved(search, rows, points, slopes, gaps + beyond * margins[rows])
        if len(rows):
            search.look(points, rows, self.steps)
        self._back(search, margins.amin(1))

    def _back(self, search: Search, margin: Tensor) -> None:
        """Where a curved boundary was left behind, halve the way to the input."""
        everyone = torch.arange(len(search.x), device=search.x.device)
        rows = everyone[
            search.broken & search.going_on(everyone) & (search.best_loss > _LEFT_BEHIND * margin)
        ]
        far, near = torch.ones_like(margin), torch.zeros_like(margin)
        ends = search.best.clone()
        for halving in range(self.halvings):
            if not len(rows):
                return
            middle = (far + near)[rows] / 2
            x = search.x[rows]
            points = x + middle.view(-1, *[1] * (x.dim() - 1)) * (ends[rows] - x)
            points = torch.minimum(torch.maximum(points, search.low[rows]), search.high[rows])
            _, reached = search.look(points, rows, self.steps + 1 + halving)
            far[rows] = torch.where(reached, middle, far[rows])
            near[rows] = torch.where(reached, near[rows], middle)
            rows = rows[search.going_on(rows)]

    def _moved(self, search: Search, rows: Tensor, points: Tensor, slopes: Tensor, rises: Tensor) -> Tensor:
        """Over the nearest boundary; if none is in reach, towards the one that the box lets come nearest."""
        lower, upper = search.low[rows] - points, search.high[rows] - points
        nearest, found = torch.full_like(rises[:, 0], torch.inf), torch.zeros_like(points)
        reach = torch.full_like(nearest, -torch.inf)
        for k in range(rises.shape[1]):
            delta, size = smallest_step(slopes[:, k], rises[:, k], search.norm, lower, upper)
            size = torch.where(rises[:, k] > 0, size, torch.inf)
            share = (slopes[:, k] * delta).flatten(1).sum(1) / rises[:, k].clamp(min=1e-30)
            better = (size < nearest) | ((nearest == torch.inf) & (size == torch.inf) & (share > reach))
            nearest = torch.where(better, size, nearest)
            reach = torch.where(better, share, reach)
            found = torch.where(better.view(-1, *[1] * (points.dim() - 1)), delta, found)
        moved = points + found
        return torch.minimum(torch.maximum(moved, search.low[rows]), search.high[rows])
