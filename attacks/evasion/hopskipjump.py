"""HopSkipJump (Chen, Jordan, Wainwright: "HopSkipJumpAttack: a query-efficient decision-based attack").

IEEE Symposium on Security and Privacy, 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.decisions import ask, bisections, in_box, nearest_start, portions, to_boundary
from mycelia.attacks.norms import Norm, norm, wide
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["HopSkipJump"]

_COARSEST = 1e-3  # share of the distance to which the boundary is found, at most
_SHORTENED = 16  # times a step is halved before the row stays where it is


@dataclass(frozen=True)
class HopSkipJump(Attack):
    """Along the boundary by labels alone: its normal is estimated from decisions around a point on it.

    The paper's Algorithm 2, with distances in place of its [0, 1] box: δ = distance/d (eq. 15 with θ = d^−1.5
    for l2, d^−2 for linf), probes · √step of them, steps of distance/√step, halved until one succeeds.

    Attributes:
        norm: what is made small.
        steps: at least 1.
        probes: decisions for the first estimate.
        most_probes: for any estimate.
        starts: points on the boundary of which the nearest is gone on from, at least 1.
        tries: draws of a start point per row; a row without one has FAILED.
        pool: inputs [p, …] to start from, of any class, e.g. some of each; needed in practice where noise
            never gets the class that is wanted. Not compared.
    """

    needs: ClassVar[str] = "label"
    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l2", "linf")

    norm: Norm = "l2"
    steps: int = 64
    probes: int = 100
    most_probes: int = 10_000
    starts: int = 4
    tries: int = 100
    pool: Tensor | None = field(default=None, compare=False, repr=False)

    def check(self) -> None:
        """See `Attack.check`."""
        if min(self.steps, self.probes, self.most_probes, self.starts) < 1 or self.tries < 0:
            raise ConfigError(
                f"steps {self.steps}, probes {self.probes}, most_probes {self.most_probes}, "
                f"starts {self.starts}, tries {self.tries}",
                rule="at least 1 each; tries at least 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        size = search.x[:1].numel()
        finest = float(size) ** (-1.5 if self.norm == "l2" else -2.0)
        halvings = bisections(min(finest, _COARSEST), search.x.dtype)
        points, rows = nearest_start(search, self.tries, self.pool, self.starts, halvings, self.norm)
        for step in range(1, self.steps + 1):
            on = search.going_on(rows)
            points, rows = points[on], rows[on]
            if not len(rows):
                return
            x = search.x[rows]
            distance = norm(points - x, self.norm)
            normal = self._normal(search, points, rows, distance, step)
            moved, hit = self._step(search, points, rows, normal, distance / math.sqrt(step), step)
            if bool(hit.any()):
                points = points.clone()
                points[hit] = to_boundary(search, moved[hit], rows[hit], step, halvings, self.norm)

    def _normal(self, search: Search, points: Tensor, rows: Tensor, distance: Tensor, step: int) -> Tensor:
        """A direction of length 1 (linf: of signs) towards the goal (eq. 16); 0 if decisions say nothing."""
        size = points[0].numel()
        shape = points.shape[1:]
        # Below this a probe is lost in the rounding of its coordinates.
        least = 64 * torch.finfo(points.dtype).eps * math.sqrt(size) * points.flatten(1).abs().amax(1)
        radius = torch.maximum(distance / size, least).clamp(min=torch.finfo(points.dtype).tiny)
        planned = min(int(self.probes * math.sqrt(step)), self.most_probes)
        counts = search.left(rows).clamp(max=planned)
        votes, plain = torch.zeros_like(points.flatten(1)), torch.zeros_like(points.flatten(1))
        total = torch.zeros_like(distance)
        for part, first, many in portions(counts, size):
            mine, centre, reach = rows[part], points[part].flatten(1)[:, None], radius[part].view(-1, 1, 1)
            draws, names = search.draws.of(mine), {"step": step, "restart": first}
            if self.norm == "l2":
                noise = draws.normal("probe", (many, size), dtype=points.dtype, **names)
            else:
                noise = 2 * draws.uniform("probe", (many, size), dtype=points.dtype, **names) - 1
            length = torch.linalg.vector_norm(noise, dim=2, keepdim=True)
            trial = centre + reach * noise / length.clamp(min=torch.finfo(points.dtype).tiny)
            who = mine.repeat_interleave(many)
            trial = in_box(search, trial.view(-1, *shape), who).view(len(mine), many, size)
            asked = first + torch.arange(many, device=rows.device) < counts[part][:, None]
            flat = asked.flatten()
            goal = search.goal.of(who[flat])
            hit = goal.reached(search.outputs(trial.view(-1, *shape)[flat], who[flat]))
            vote = torch.zeros(len(flat), dtype=points.dtype, device=points.device)
            vote[flat] = torch.where(hit, 1.0, -1.0).to(points.dtype)
            vote = vote.view(len(mine), many)
            went = (trial - centre) / reach  # where the box let it go
            votes[part] += torch.einsum("kb,kbd->kd", vote, went)
            plain[part] += torch.einsum("kb,kbd->kd", asked.to(points.dtype), went)
            total[part] += vote.sum(1)
        mean = (total / counts.clamp(min=1))[:, None]
        # A mean vote of ±1 leaves no contrast: then the probes themselves say where success lies.
        found = torch.where(mean.abs() < 1, votes - mean * plain, mean * plain)
        if self.norm == "linf":
            return found.sign().view_as(points)
        length = torch.linalg.vector_norm(found, dim=1, keepdim=True)
        return (found / torch.where(length > 0, length, torch.ones_like(length))).view_as(points)

    def _step(
        self, search: Search, points: Tensor, rows: Tensor, normal: Tensor, length: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """The longest of ever shorter steps that succeeds, and for which rows there was one."""
        moved = points.clone()
        hit = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        moves = (normal != 0).flatten(1).any(1)
        for _ in range(_SHORTENED):
            todo = (moves & ~hit & search.going_on(rows)).nonzero()[:, 0]
            if not len(todo):
                break
            trial = points[todo] + wide(length[todo], points) * normal[todo]
            trial = in_box(search, trial, rows[todo])
            good = ask(search, trial, rows[todo], step)
            moved[todo[good]] = trial[good]
            hit[todo[good]] = True
            length = length / 2
        return moved, hit
