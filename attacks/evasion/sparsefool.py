"""Modas, Moosavi-Dezfooli, Frossard: "SparseFool: a few pixels make a big difference" (CVPR 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.decisions import in_box, to_boundary
from mycelia.attacks.evasion.fab import onto_boundary
from mycelia.attacks.evasion.rivals import Rivals, over_nearest
from mycelia.attacks.norms import Norm, wide
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["SparseFool"]


@dataclass(frozen=True)
class SparseFool(Attack):
    """Few coordinates, step after step, to the plane that stands for the boundary where DeepFool crosses it.

    DeepFool goes from the iterate over the boundary in l2; there the boundary is taken as a plane, moved away
    by the factor `reach`; and the iterate goes to it in l1 inside the box, the steepest coordinates first,
    each as far as the box lets it (Algorithms 1 and 2). Until the goal is reached.

    Attributes:
        norm: "l1" or "l0", of which the nearest success counts.
        steps: planes at most, at least 1.
        inner: steps of each DeepFool, at least 1.
        candidates: classes that it considers, the true one among them, at least 2.
        overshoot: share of the iterate's margins by which it goes too far, above 0.
        reach: λ of the paper: how far away the plane is, in units of DeepFool's change; at least
            1. With more, fewer planes are needed and the change is larger.
        halvings: of the way back from the success, for l1; 0: none, as in the paper.
    """

    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l1", "l0")
    targeted: ClassVar[bool] = False

    norm: Norm = "l1"
    steps: int = 20
    inner: int = 50
    candidates: int = 10
    overshoot: float = 0.02
    reach: float = 1.0
    halvings: int = 8

    def check(self) -> None:
        """See `Attack.check`."""
        counts = min(self.steps, self.inner) >= 1 and self.candidates > 1 and self.halvings >= 0
        if not (counts and self.overshoot > 0 and self.reach >= 1):
            raise ConfigError(
                f"steps {self.steps}, inner {self.inner}, candidates {self.candidates}, overshoot "
                f"{self.overshoot}, reach {self.reach}, halvings {self.halvings}",
                rule="steps, inner and reach at least 1, candidates at least 2, overshoot above 0, "
                "halvings at least 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        rivals = Rivals(search, self.candidates)
        rows = search.active
        points = search.x[rows]
        each = self.inner + 2
        sparse, done = search.x.clone(), torch.zeros(len(search.x), dtype=torch.bool, device=rows.device)
        for step in range(self.steps):
            ends = self._across(search, points, rows, rivals, step * each)
            on = search.going_on(rows)
            rows, points, ends = rows[on], points[on], ends[on]
            if not len(rows):
                break
            grad, _, _ = search.gradient(ends, rows, step * each + self.inner, "margin")
            gain = self.reach * (grad * (ends - points)).flatten(1).sum(1).clamp(min=0)
            low, high = (bound[rows] for bound in search.box)
            change = onto_boundary(grad, "l1", gain, low - points, high - points)
            points = in_box(search, points + change, rows)
            on = search.going_on(rows)
            rows, points = rows[on], points[on]
            if not len(rows):
                break
            _, reached = search.look(points, rows, step * each + self.inner + 1)
            done[rows[reached]] = True
            sparse[rows[reached]] = points[reached]
            rows, points = rows[~reached], points[~reached]
        rows = search.active[done[search.active]]
        if self.norm == "l1" and len(rows):
            to_boundary(search, sparse[rows], rows, self.steps * each, self.halvings)

    def _across(self, search: Search, points: Tensor, rows: Tensor, rivals: Rivals, first: int) -> Tensor:
        """DeepFool's ends, as points; where it does not get across, its last iterates."""
        found, place = points.clone(), torch.arange(len(rows), device=rows.device)
        beyond: Tensor | None = None
        for step in range(self.inner):
            mine = rows[place]
            on = search.going_on(mine)
            place, mine = place[on], mine[on]
            if not len(place):
                break
            now = found[place]
            slopes, outputs = search.slopes(now, mine, first + step, rivals.weights[mine])
            gaps = rivals.behind(outputs, mine).to(now.dtype)
            if beyond is None:  # of all rows at the same step: the first
                beyond = gaps.new_zeros(len(rows), gaps.shape[1])
                beyond[place] = self.overshoot * gaps.clamp(min=0)
            moved = over_nearest(search, mine, now, slopes, gaps + beyond[place], "l2")
            short = ~search.goal.of(mine).reached(outputs)
            found[place] = torch.where(wide(short, now), moved, now)
            place = place[short]
        return found
