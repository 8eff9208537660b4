"""The boundary attack (Brendel, Rauber, Bethge: "Decision-based adversarial attacks", ICLR 2018)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.decisions import ask, bisections, in_box, nearest_start
from mycelia.attacks.norms import Norm, wide
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["Boundary"]

_CHECK = 5  # steps between two looks at the sphere alone
_CHECKS, _TRIES = 10, 30  # results after which a step size is adapted
_FACTOR = 1.5


@dataclass(frozen=True)
class Boundary(Attack):
    """A random walk along the boundary: a step on the sphere around the input, then one towards it.

    Both step sizes are adapted for each row: on the sphere about half of the steps are to succeed (§2.3 of
    the paper), towards the input a quarter.

    Attributes:
        norm: "l2".
        steps: of the walk, one query each and one more in five, at least 1.
        sphere_step: first length on the sphere, as a share of the distance.
        source_step: first length towards the input, as a share of the distance.
        converged: a row stops when its `source_step` is below this.
        starts: points on the boundary of which the nearest is gone on from, at least 1.
        tries: draws of a start point per row; a row without one has FAILED.
        pool: inputs [p, …] to start from; see `HopSkipJump`. Not compared.
    """

    needs: ClassVar[str] = "label"
    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l2",)

    norm: Norm = "l2"
    steps: int = 5000
    sphere_step: float = 0.01
    source_step: float = 0.01
    converged: float = 1e-7
    starts: int = 4
    tries: int = 100
    pool: Tensor | None = field(default=None, compare=False, repr=False)

    def check(self) -> None:
        """See `Attack.check`."""
        sound = 0 < self.sphere_step <= 1 and 0 < self.source_step < 1 and self.converged >= 0
        if min(self.steps, self.starts) < 1 or self.tries < 0 or not sound:
            raise ConfigError(
                f"steps {self.steps}, starts {self.starts}, tries {self.tries}, "
                f"sphere_step {self.sphere_step}, source_step {self.source_step}, converged {self.converged}",
                rule="steps and starts at least 1, tries and converged at least 0, the other two in (0, 1)",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        halvings = bisections(1e-3, search.x.dtype)
        points, rows = nearest_start(search, self.tries, self.pool, self.starts, halvings, self.norm)
        m, tiny = len(search.x), torch.finfo(points.dtype).tiny
        around = torch.full((m,), self.sphere_step, dtype=points.dtype, device=points.device)
        towards = torch.full_like(around, self.source_step)
        good_around, good = torch.zeros_like(around), torch.zeros_like(around)
        for step in range(1, self.steps + 1):
            on = search.going_on(rows) & (towards[rows] >= self.converged)
            points, rows = points[on], rows[on]
            if not len(rows):
                return
            x = search.x[rows]
            away = (points - x).flatten(1)
            distance = torch.linalg.vector_norm(away, dim=1, keepdim=True)
            noise = search.draws.of(rows).normal("walk", (away.shape[1],), step=step, dtype=points.dtype)
            size = around[rows, None]
            length = torch.linalg.vector_norm(noise, dim=1, keepdim=True).clamp(min=tiny)
            noise = noise * (size * distance / length)
            unit = away / distance.clamp(min=tiny)
            noise = noise - (noise * unit).sum(1, keepdim=True) * unit
            turned = (away + noise) / (1 + size.square()).sqrt()
            sphere = in_box(search, x + turned.view_as(x), rows)
            if step % _CHECK == 0:
                good_around[rows] += ask(search, sphere, rows, step)
            turned = (sphere - x).flatten(1)
            far = torch.linalg.vector_norm(turned, dim=1, keepdim=True).clamp(min=tiny)
            wanted = (distance * (1 - towards[rows, None])).clamp(min=0)
            trial = in_box(search, x + (turned * (wanted / far).clamp(max=1)).view_as(x), rows)
            hit = ask(search, trial, rows, step)
            good[rows] += hit
            nearer = torch.linalg.vector_norm((trial - x).flatten(1), dim=1) < distance[:, 0]
            points = torch.where(wide(hit & nearer, x), trial, points)
            if step % (_CHECK * _CHECKS) == 0:
                change = _factor(good_around / _CHECKS, 0.2, 0.5)
                around, towards = (around * change).clamp(max=1), (towards * change).clamp(max=0.5)
                good_around = torch.zeros_like(around)
            if step % _TRIES == 0:
                towards = (towards * _factor(good / _TRIES, 0.1, 0.25)).clamp(max=0.5)
                good = torch.zeros_like(good)


def _factor(rate: Tensor, low: float, high: float) -> Tensor:
    """Longer steps where many succeed, shorter ones where few do."""
    longer = torch.where(rate > high, _FACTOR, torch.ones_like(rate))
    return torch.where(rate < low, 1 / _FACTOR, longer)
