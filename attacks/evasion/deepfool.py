"""Moosavi-Dezfooli, Fawzi, Frossard: "DeepFool" (CVPR 2016), in l2 and linf, inside a box."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.halfspace import smallest_step
from mycelia.attacks.evasion.rivals import Rivals, over_nearest
from mycelia.attacks.norms import Norm, norm, wide
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["DeepFool"]

_FIRST: Final = 0.6  # the first overshoot is this power of the precision: 4e-10 in float64, 7e-5 in float32
_NEARER: Final = 1e-4  # relative: a projection that is not nearer by so much ends the refinement
_LEFT_BEHIND: Final = 1e-3  # a success with a margin above this share of the input's is worth going back from


@dataclass(frozen=True)
class DeepFool(Attack):
    """Step after step to the nearest of the linearised boundaries to other classes, until it is crossed.

    A step goes beyond its boundary by a share of the margin that the input had: as good as nothing at first,
    so that an affine model is left with the exact smallest change after one step; then four times as much
    each time.

    Where that took more than one step its end is not the nearest point of the boundary: the steps were made
    for slopes that have changed. So the boundary is then taken as linear at the end, and the input is
    projected onto it inside the box (Croce, Hein: FAB (ICML 2020), §3.2), several times; the nearest success
    counts.

    Attributes:
        norm: "l2" or "linf".
        steps: at most, at least 1.
        candidates: classes considered, the true one among them: each row's best logits; at least 2.
        overshoot: largest share of the first margin by which a step goes too far, above 0.
        halvings: of the way back to the input, for rows that landed far beyond a curved boundary; 0: none.
        refinements: projections of the input onto the boundary that was found; 0: none, as in the paper.
    """

    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l2", "linf")
    targeted: ClassVar[bool] = False

    norm: Norm = "l2"
    steps: int = 50
    candidates: int = 10
    overshoot: float = 0.02
    halvings: int = 8
    refinements: int = 10

    def check(self) -> None:
        """See `Attack.check`."""
        counts = self.steps >= 1 and self.candidates >= 2 and min(self.halvings, self.refinements) >= 0
        if not (counts and self.overshoot > 0):
            raise ConfigError(
                f"steps {self.steps}, candidates {self.candidates}, overshoot {self.overshoot}, "
                f"halvings {self.halvings}, refinements {self.refinements}",
                rule="at least 1, at least 2, above 0, the others at least 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        rows = search.active
        rivals = Rivals(search, self.candidates)
        points = search.x[rows]
        for step in range(self.steps):
            slopes, outputs = search.slopes(points, rows, step, rivals.weights[rows])
            on = search.going_on(rows) & ~search.broken[rows]
            rows, points, slopes, outputs = rows[on], points[on], slopes[on], outputs[on]
            if not len(rows):
                break
            gaps = rivals.behind(outputs, rows).to(points.dtype)
            beyond = min(self.overshoot, float(torch.finfo(points.dtype).eps) ** _FIRST * 4.0**step)
            rises = gaps + beyond * rivals.margins[rows]
            points = over_nearest(search, rows, points, slopes, rises, self.norm)
        if len(rows):
            search.look(points, rows, self.steps)
        # A row that its first step took just over a boundary has met no slope but that at the input.
        margin = rivals.margins.amin(1)
        bent = (search.best_step > 1) | (search.best_loss > _LEFT_BEHIND * margin)
        self._back(search, margin)
        self._refine(search, bent)

    def _refine(self, search: Search, bent: Tensor) -> None:
        """From a success to the input's projection onto its boundary; from beside it, over it."""
        rows = search.active
        rows = rows[(search.broken & bent)[rows]]
        points, wide = search.best[rows], (-1, *[1] * (search.x.dim() - 1))
        for step in range(self.refinements):
            if not len(rows):
                return
            number = self.steps + 1 + self.halvings + step
            grad, value, _ = search.gradient(points, rows, number, "margin")
            on = search.going_on(rows)
            rows, points, grad, value = rows[on], points[on], grad[on], value[on].to(points.dtype)
            x, low, high = search.x[rows], search.low[rows], search.high[rows]
            there = value + (grad * (x - points)).flatten(1).sum(1)  # the linear function at the input
            beyond = float(torch.finfo(points.dtype).eps) ** _FIRST * there.abs()
            near, size = smallest_step(grad, beyond - there, search.norm, low - x, high - x)
            over, _ = smallest_step(grad, beyond - value, search.norm, low - points, high - points)
            found = value > 0
            moved = torch.where(found.view(wide), x + near, points + over)
            on = ~found | (size < (1 - _NEARER) * norm(points - x, search.norm))
            rows, points = rows[on], torch.minimum(torch.maximum(moved, low), high)[on]
        if len(rows):
            search.look(points, rows, self.steps + 1 + self.halvings + self.refinements)

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
            points = x + wide(middle, x) * (ends[rows] - x)
            points = torch.minimum(torch.maximum(points, search.low[rows]), search.high[rows])
            _, reached = search.look(points, rows, self.steps + 1 + halving)
            far[rows] = torch.where(reached, middle, far[rows])
            near[rows] = torch.where(reached, near[rows], middle)
            rows = rows[search.going_on(rows)]
