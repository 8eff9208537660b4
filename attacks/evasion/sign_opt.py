"""Sign-OPT: distances along directions, and in which directions they fall, from labels alone.

Cheng, Singh, Chen, Chen, Liu, Hsieh: "Sign-OPT: a query-efficient hard-label adversarial attack", ICLR 2020.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.decisions import ask, bisections, in_box, nearest_start, portions, to_boundary
from mycelia.attacks.norms import Norm, norm, wide
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["SignOPT"]

_FINER: Final = 500  # times finer than the smoothing are distances known, or signs would be those of rounding
_TRIALS: Final = 15  # step sizes of a line search
_WIDEST: Final = 0.5  # smoothing of a row, which is doubled where all its signs are alike


@dataclass(frozen=True)
class SignOPT(Attack):
    """The smallest g(θ), the distance at which direction θ reaches the goal, by the signs of its changes.

    Algorithm 1 of the paper: θ ← θ − η · Σ_q sign(g(θ + ε u_q) − g(θ)) u_q / Q. A sign is one query: whether
    the goal is still reached at distance g(θ) along θ + ε u_q. A line search doubles η while the distance
    falls, and takes quarters of it where it does not. For linf steps go by the signs of the sum, and
    directions are clamped to the unit cube. The mean sign is taken off first: it says nothing of directions.

    Attributes:
        norm: what is made small.
        steps: at least 1.
        probes: Q, signs of each step, at least 1.
        smoothing: ε, as a share of the distance; u is of length 1.
        step_size: first η of each line search.
        directions: random ones from each input, of which the nearest boundary is gone on from, at least 0.
        starts: points on the boundary that come before them, at least 1.
        tries: draws of a start point per row; a row without one has FAILED.
        pool: inputs [p, …] to start from; see `HopSkipJump`. Not compared.
    """

    needs: ClassVar[str] = "label"
    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l2", "linf")

    norm: Norm = "l2"
    steps: int = 100
    probes: int = 200
    smoothing: float = 1e-3
    step_size: float = 0.2
    directions: int = 100
    starts: int = 1
    tries: int = 100
    pool: Tensor | None = field(default=None, compare=False, repr=False)

    def check(self) -> None:
        """See `Attack.check`."""
        counts = min(self.steps, self.probes, self.starts) >= 1 and min(self.tries, self.directions) >= 0
        if not (counts and 0 < self.smoothing < 1 and self.step_size > 0):
            raise ConfigError(
                f"steps {self.steps}, probes {self.probes}, directions {self.directions}, "
                f"starts {self.starts}, tries {self.tries}, smoothing {self.smoothing}, "
                f"step_size {self.step_size}",
                rule="counts at least 1, tries and directions at least 0; smoothing in (0, 1), "
                "step_size above 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        # What is nearer to the boundary than rounding is long may not be adversarial at another batch size.
        rounding = torch.finfo(search.x.dtype).eps ** 0.5 / 2
        halvings = bisections(max(self.smoothing / _FINER, rounding), search.x.dtype)
        points, rows = nearest_start(search, self.tries, self.pool, self.starts, halvings, self.norm)
        # That was as fine as the way from the noise is long.
        points = to_boundary(search, points, rows, 0, halvings, self.norm)
        points = self._best_direction(search, points, rows, halvings)
        width = torch.full((len(search.x),), self.smoothing, dtype=points.dtype, device=points.device)
        for step in range(1, self.steps + 1):
            on = search.going_on(rows)
            points, rows = points[on], rows[on]
            if not len(rows):
                return
            slope, alike = self._slope(search, points, rows, width[rows], step)
            width[rows] = torch.where(alike, (2 * width[rows]).clamp(max=_WIDEST), width[rows])
            points = self._line(search, points, rows, slope, halvings, step)

    def _best_direction(self, search: Search, points: Tensor, rows: Tensor, halvings: int) -> Tensor:
        """The nearest of boundary points along random directions; one that is no nearer costs one query."""
        shape = points.shape[1:]
        for number in range(self.directions):
            on = search.going_on(rows).nonzero()[:, 0]
            if not len(on):
                break
            x, mine = search.x[rows[on]], rows[on]
            draws = search.draws.of(mine)
            law = draws.signs if self.norm == "linf" else draws.normal
            away = self._on_sphere(law("direction", shape, step=number, dtype=x.dtype).flatten(1))
            far = norm(points[on] - x, self.norm)
            trial = in_box(search, x + (far[:, None] * away).view_as(x), mine)
            hit = ask(search, trial, mine, 0)
            if bool(hit.any()):
                found = to_boundary(search, trial[hit], mine[hit], 0, halvings, self.norm)
                nearer = norm(found - x[hit], self.norm) < far[hit]
                points = points.index_put((on[hit][nearer],), found[nearer])
        return points

    def _slope(
        self, search: Search, points: Tensor, rows: Tensor, width: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """The mean of signs times their directions (linf: its signs); where all were alike, 0 and True."""
        shape, size = points.shape[1:], points[0].numel()
        away, far = self._direction(search, points, rows)
        counts = search.left(rows).clamp(max=self.probes)
        sums, plain, total = torch.zeros_like(away), torch.zeros_like(away), torch.zeros_like(far)
        tiny = torch.finfo(points.dtype).tiny
        for part, first, many in portions(counts, size):
            mine = rows[part]
            noise = search.draws.of(mine).normal(
                "probe", (many, size), step=step, restart=first, dtype=points.dtype
            )
            noise = noise / torch.linalg.vector_norm(noise, dim=2, keepdim=True).clamp(min=tiny)
            turned = (away[part][:, None] + width[part].view(-1, 1, 1) * noise).flatten(0, 1)
            if self.norm == "l2":  # for linf the cube is a constraint, of which steps take account
                turned = self._on_sphere(turned)
            who = mine.repeat_interleave(many)
            length = far[part].repeat_interleave(many)[:, None]
            trial = in_box(search, search.x[who] + (length * turned).view(-1, *shape), who)
            asked = first + torch.arange(many, device=rows.device) < counts[part][:, None]
            flat = asked.flatten()
            hit = search.goal.of(who[flat]).reached(search.outputs(trial[flat], who[flat]))
            sign = torch.zeros(len(flat), dtype=points.dtype, device=points.device)
            sign[flat] = torch.where(hit, -1.0, 1.0).to(points.dtype)  # reached: the distance is shorter
            sign = sign.view(len(mine), many)
            sums[part] += torch.einsum("kb,kbd->kd", sign, noise)
            plain[part] += torch.einsum("kb,kbd->kd", asked.to(points.dtype), noise)
            total[part] += sign.sum(1)
        alike, counts = total.abs() == counts, counts.clamp(min=1)
        # A point beside the boundary has more signs of one kind, which say nothing of directions.
        found = (sums - (total / counts)[:, None] * plain) / counts[:, None]
        found = torch.where(alike[:, None], torch.zeros_like(found), found)
        return (found.sign() if self.norm == "linf" else found).view_as(points), alike

    def _line(
        self, search: Search, points: Tensor, rows: Tensor, slope: Tensor, halvings: int, step: int
    ) -> Tensor:
        """The nearest points on the boundary along θ − η · slope, over η; as they are if none is nearer."""
        away, far = self._direction(search, points, rows)
        slope, best, nearest = slope.flatten(1), points.clone(), far.clone()
        rate = torch.full_like(far, self.step_size)
        open_ = (slope != 0).any(1)
        for _ in range(_TRIALS):
            todo = (open_ & search.going_on(rows)).nonzero()[:, 0]
            if not len(todo):
                break
            mine, x = rows[todo], search.x[rows[todo]]
            turned = self._on_sphere(away[todo] - rate[todo, None] * slope[todo])
            trial = in_box(search, x + (nearest[todo, None] * turned).view_as(x), mine)
            hit = ask(search, trial, mine, step)  # no nearer if this one fails
            closer = torch.zeros_like(hit)
            if bool(hit.any()):
                found = to_boundary(search, trial[hit], mine[hit], step, halvings, self.norm)
                length = norm(found - x[hit], self.norm)
                closer[hit] = length < nearest[todo[hit]]
                at = todo[closer]
                best[at], nearest[at] = found[closer[hit]], length[closer[hit]]
            grown = rate[todo] > self.step_size
            shrunk = rate[todo] < self.step_size
            open_[todo] = torch.where(closer, ~shrunk, ~grown)
            rate[todo] = torch.where(closer, 2 * rate[todo], rate[todo] / 4)
        return best

    def _direction(self, search: Search, points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """θ of length 1, [k, d], and the distance, [k]."""
        change = (points - search.x[rows]).flatten(1)
        far = norm(change, self.norm)
        return change / wide(far, change).clamp(min=torch.finfo(far.dtype).tiny), far

    def _on_sphere(self, away: Tensor) -> Tensor:
        """Directions [k, d] at distance 1."""
        if self.norm == "linf":
            return away.clamp(-1, 1)
        length = torch.linalg.vector_norm(away, dim=1, keepdim=True)
        found: Tensor = away / length.clamp(min=torch.finfo(away.dtype).tiny)
        return found
