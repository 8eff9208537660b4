"""GeoDA: the boundary taken as a plane, whose normal labels tell.

Rahmati, Moosavi-Dezfooli, Frossard, Dai: "GeoDA: a geometric framework for black-box adversarial attacks",
CVPR 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Final

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.decisions import ask, bisections, in_box, nearest_start, portions
from mycelia.attacks.evasion.grid import Grid, cosines, kept_frequencies
from mycelia.attacks.norms import Norm, linear_max, norm, wide
from mycelia.attacks.search import Search
from mycelia.attacks.windows import Layout, check_layout
from mycelia.engine.errors import ConfigError

__all__ = ["GeoDA", "shares_of_queries"]

_FINER: Final = 4  # times finer than the probes is the boundary known
_DOUBLED: Final = 8  # times a distance that does not reach the goal is doubled
_HALVED: Final = 40
_SEARCH: Final = 24  # queries kept for the way to the boundary in each step


@dataclass(frozen=True)
class GeoDA(Attack):
    """The normal of the boundary near a point on it, then the nearest point of that plane; and again there.

    With η_i ~ N(0, σ²I) around the point, the normal is Σ ±η_i, + where the goal is reached. The next point
    is where the best change for that normal, of growing norm, reaches the goal: l2 along it, linf along its
    signs, l1 by its largest coordinates, all inside the box. Queries grow by λ^(−2/3) from step to step, the
    paper's optimal distribution, and there are as many steps as leave the first one `least`.

    Attributes:
        norm: what is made small.
        probes: decisions of a row for its normals, all steps together, at least 1; fewer where its budget is.
        least: decisions of the first step, at least 1.
        rate: λ, by which an exact normal would shorten the distance, in (0, 1).
        sigma: standard deviation of a probe's coordinates, in raw input units, above 0.
        share: of the frequencies of each axis that probes have; 1: of all, without a cosine transform.
        layout: where the channels are; see `Grid`.
        starts: points on the boundary of which the nearest is gone on from, at least 1.
        tries: draws of a start point per row; a row without one has FAILED.
        pool: inputs [p, …] to start from; see `HopSkipJump`. Not compared.
    """

    needs: ClassVar[str] = "label"
    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l2", "l1", "linf")

    norm: Norm = "l2"
    probes: int = 10_000
    least: int = 80
    rate: float = 0.6
    sigma: float = 2e-4
    share: float = 1.0
    layout: Layout = "nchw"
    starts: int = 4
    tries: int = 100
    pool: Tensor | None = field(default=None, compare=False, repr=False)

    def check(self) -> None:
        """See `Attack.check`."""
        counts = min(self.probes, self.least, self.starts) >= 1 and self.tries >= 0
        if not (counts and 0 < self.rate < 1 and self.sigma > 0 and 0 < self.share <= 1):
            raise ConfigError(
                f"probes {self.probes}, least {self.least}, starts {self.starts}, tries {self.tries}, "
                f"rate {self.rate}, sigma {self.sigma}, share {self.share}",
                rule="counts at least 1, tries at least 0, rate in (0, 1), sigma above 0, share in (0, 1]",
                who=type(self).__name__,
            )
        check_layout(self.layout, type(self).__name__)

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        halvings = bisections(1e-6, search.x.dtype)
        points, rows = nearest_start(search, self.tries, self.pool, self.starts, halvings, self.norm)
        grow = self.rate ** (-2 / 3)
        steps, total = shares_of_queries(search.left(rows), self.probes, self.least, grow)
        first = total * (grow - 1) / (grow**steps - 1)
        for step in range(int(steps.max()) if len(steps) else 0):
            on = search.going_on(rows) & (step < steps)
            points, rows, steps, first = points[on], rows[on], steps[on], first[on]
            if not len(rows):
                return
            counts = torch.minimum((first * grow**step).round().long().clamp(min=1), search.left(rows))
            normal, probes = self._normal(search, points, rows, counts, step)
            points = self._nearer(search, points, rows, normal, step + 1)
            x = search.x[rows]
            nearer = norm(probes - x, self.norm) < norm(points - x, self.norm)
            if bool(nearer.any()):  # by less than σ: asked once more, as a candidate
                nearer[nearer.clone()] = ask(search, probes[nearer], rows[nearer], step + 1)
                points = torch.where(wide(nearer, points), probes, points)

    def _normal(
        self, search: Search, points: Tensor, rows: Tensor, counts: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """A direction towards the goal, [k, …], 0 if nothing is known; and the nearest probe to reach it."""
        shape, size = points.shape[1:], points[0].numel()
        spread = wide(self._spread(points), points).flatten(1)[:, None]
        noise_of = self._noise(search.x)
        votes, plain = torch.zeros_like(points.flatten(1)), torch.zeros_like(points.flatten(1))
        total, kept = torch.zeros_like(votes[:, 0]), points.clone()
        least = norm(points - search.x[rows], self.norm)
        for part, start, many in portions(counts, size):
            mine, centre = rows[part], points[part].flatten(1)[:, None]
            noise = noise_of(search, mine, many, step, start)
            who = mine.repeat_interleave(many)
            trial = in_box(search, (centre + spread[part] * noise).view(-1, *shape), who)
            asked = start + torch.arange(many, device=rows.device) < counts[part][:, None]
            flat = asked.flatten()
            hit = search.goal.of(who[flat]).reached(search.outputs(trial[flat], who[flat]))
            vote = torch.zeros(len(flat), dtype=points.dtype, device=points.device)
            vote[flat] = torch.where(hit, 1.0, -1.0).to(points.dtype)
            far = torch.where(vote > 0, norm(trial - search.x[who], self.norm), torch.inf)
            close, at = far.view(len(mine), many).min(1)
            nearer = close < least[part]
            least[part] = torch.minimum(close, least[part])
            kept[part[nearer]] = trial.view(len(mine), many, *shape)[nearer, at[nearer]]
            vote = vote.view(len(mine), many)
            went = (trial.view(len(mine), many, size) - centre) / spread[part]  # where the box let it go
            votes[part] += torch.einsum("kb,kbd->kd", vote, went)
            plain[part] += torch.einsum("kb,kbd->kd", asked.to(points.dtype), went)
            total[part] += vote.sum(1)
        mean = (total / counts.clamp(min=1))[:, None]
        # A point beside the boundary has more votes of one kind; all of one kind say only where the goal is.
        found = torch.where(mean.abs() < 1, votes - mean * plain, mean * plain)
        length = torch.linalg.vector_norm(found, dim=1, keepdim=True)
        return (found / torch.where(length > 0, length, torch.ones_like(length))).view_as(points), kept

    def _noise(self, x: Tensor) -> Callable[[Search, Tensor, int, int, int], Tensor]:
        """Standard normal probes [k, many, d] of rows; or those of which only low frequencies are left."""
        size = x[:1].numel()
        if self.share == 1:
            return lambda search, mine, many, step, start: search.draws.of(mine).normal(
                "probe", (many, size), step=step, restart=start, dtype=x.dtype
            )
        grid = Grid(x, self.layout)
        down, across = (
            cosines(length, x)[: kept_frequencies(length, self.share)] for length in (grid.height, grid.width)
        )

        def low(search: Search, mine: Tensor, many: int, step: int, start: int) -> Tensor:
            shape = many, grid.channels, len(down), len(across)
            drawn = search.draws.of(mine).normal("probe", shape, step=step, restart=start, dtype=x.dtype)
            return grid.back((down.T @ drawn @ across).flatten(0, 1)).reshape(len(mine), many, size)

        return low

    def _nearer(self, search: Search, points: Tensor, rows: Tensor, normal: Tensor, step: int) -> Tensor:
        """The first point that reaches the goal on the path of best changes, where it is nearer: [k, …]."""
        x = search.x[rows]
        box = tuple(bound[rows] - x for bound in search.box)
        held = norm(points - x, self.norm)
        best, far, near = points.clone(), held.clone(), torch.zeros_like(held)
        reached = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)

        def at(some: Tensor, length: Tensor) -> Tensor:
            change = linear_max(normal[some], self.norm, length, box[0][some], box[1][some])
            return in_box(search, x[some] + change, rows[some])

        moves = (normal != 0).flatten(1).any(1)
        for _ in range(_DOUBLED):  # also beyond the point that is there: on a curved boundary that may help
            todo = (moves & ~reached & search.going_on(rows)).nonzero()[:, 0]
            if not len(todo):
                break
            trial = at(todo, far[todo])
            hit = ask(search, trial, rows[todo], step)
            best[todo[hit]] = trial[hit]
            reached[todo[hit]] = True
            near[todo[~hit]], far[todo[~hit]] = far[todo[~hit]], 2 * far[todo[~hit]]
        fine = self._spread(points) / (_FINER * _along(self.norm, points[0].numel()))
        for _ in range(_HALVED):
            todo = (reached & (far - near > fine) & search.going_on(rows)).nonzero()[:, 0]
            if not len(todo):
                break
            middle = (near[todo] + far[todo]) / 2
            trial = at(todo, middle)
            hit = ask(search, trial, rows[todo], step)
            best[todo[hit]] = trial[hit]
            far[todo] = torch.where(hit, middle, far[todo])
            near[todo] = torch.where(hit, near[todo], middle)
        nearer = reached & (norm(best - x, self.norm) < held)
        return torch.where(wide(nearer, points), best, points)

    def _spread(self, points: Tensor) -> Tensor:
        """σ of each row, [k]; not so small that a probe would be lost in the rounding of its coordinates."""
        least = 64 * torch.finfo(points.dtype).eps * points.flatten(1).abs().amax(1)
        return least.clamp(min=self.sigma)


def shares_of_queries(left: Tensor, most: int, least: int, grow: float) -> tuple[Tensor, Tensor]:
    """How many steps a budget is for, and how many probes they share, when each has `grow` times the last.

    Args:
        left: queries, [k].
        most: probes at most.
        least: probes of the first step, except that there is always one step.
        grow: above 1.

    Returns:
        steps, int64 [k]; probes of all of them together, float64 [k].
    """
    steps = torch.ones_like(left)
    while True:
        following = steps + 1
        total = (left - following * _SEARCH).clamp(max=most).double()
        fits = total * (grow - 1) / (grow**following - 1) >= least
        if not bool(fits.any()):
            break
        steps = torch.where(fits, following, steps)
    # Of a budget that is too small for that, half is for the way to the boundary.
    return steps, torch.maximum(left - steps * _SEARCH, (left + 1) // 2).clamp(max=most).double()


def _along(p: Norm, size: int) -> float:
    """How far, in l2 and at most, a change of the norm p moves a point for each unit of that norm."""
    return math.sqrt(size) if p == "linf" else 1.0
