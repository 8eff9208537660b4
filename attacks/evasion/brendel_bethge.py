"""Brendel et al.: "Accurate, reliable and fast robustness evaluation" (NeurIPS 2019)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.decisions import in_box, start_points, to_boundary
from mycelia.attacks.evasion.trust_region import nearest_on_plane
from mycelia.attacks.norms import Norm, norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["BrendelBethge"]


@dataclass(frozen=True)
class BrendelBethge(Attack):
    """A walk along the boundary, from a far success to the point of it that is nearest to the input.

    Each step goes to the nearest point, in the norm, of the boundary taken as linear, inside the box and a
    trust region (eq. 2): a little beyond the boundary where the walk is on the near side, not quite back to
    it where it is on the far side. The boundary's slope is an average over the last steps. As the walk begins
    far away, it does not depend on gradients at the input, which a defence may have masked.

    Attributes:
        norm: of which the change is made small.
        steps: of each walk, at least 1.
        restarts: walks, each from a start of its own; at least 1.
        reach: radius of the trust region at first, as a share of the l2 distance that the walk has come to;
            above 0.
        decay: factor of that share, in (0, 1]; it is applied `decays` times, at even intervals of
            the second half.
        decays: at least 1.
        overshoot: share of the way to the boundary that a step goes, at least 1 and below 2.
        momentum: weight of the slope so far beside the new one, in [0, 1).
        halvings: of the way from a start to the input.
        tries: draws of a start per row; a row without one has FAILED.
        pool: inputs [p, …] to start from, the nearest success first; see `HopSkipJump`. Not compared.
    """

    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l2", "linf", "l1")

    norm: Norm = "l2"
    steps: int = 100
    restarts: int = 5
    reach: float = 0.5
    decay: float = 0.5
    decays: int = 10
    overshoot: float = 1.1
    momentum: float = 0.8
    halvings: int = 10
    tries: int = 100
    pool: Tensor | None = field(default=None, compare=False, repr=False)

    def check(self) -> None:
        """See `Attack.check`."""
        counts = min(self.steps, self.restarts, self.decays) >= 1 and min(self.halvings, self.tries) >= 0
        sizes = self.reach > 0 and 0 < self.decay <= 1
        if not (counts and sizes and 1 <= self.overshoot < 2 and 0 <= self.momentum < 1):
            raise ConfigError(
                f"steps {self.steps}, restarts {self.restarts}, reach {self.reach}, decay "
                f"{self.decay}, decays {self.decays}, overshoot {self.overshoot}, momentum {self.momentum}, "
                f"halvings {self.halvings}, tries {self.tries}",
                rule="steps, restarts and decays at least 1, halvings and tries at least 0; reach above "
                "0; decay in (0, 1]; overshoot in [1, 2); momentum in [0, 1)",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        for restart in range(self.restarts):
            rows = search.active
            pool = self.pool if restart == 0 else None
            points, rows = start_points(search, rows, self.tries, pool, restart=restart)
            if not len(rows):
                continue
            points = to_boundary(search, points, rows, 0, self.halvings)
            self._walk(search, points, rows, restart * (self.steps + 1))

    def _walk(self, search: Search, points: Tensor, rows: Tensor, first: int) -> None:
        """From successes on the boundary."""
        low, high = search.box
        boundary = torch.zeros_like(points)
        for step in range(self.steps):
            on = search.going_on(rows)
            rows, points, boundary = rows[on], points[on], boundary[on]
            if not len(rows):
                return
            grad, margin, _ = search.gradient(points, rows, first + step, "margin")
            boundary = torch.lerp(grad, boundary, self.momentum) if step else grad
            share = torch.where(margin < 0, self.overshoot, 2 - self.overshoot)
            x = search.x[rows]
            times = self.decays * max(0, 2 * step - self.steps) // self.steps
            radius = self.decay**times * self.reach * norm(points - x, "l2")
            change = nearest_on_plane(
                points - x, boundary, -(share * margin).to(x.dtype), self.norm, radius, low[rows] - x,
                high[rows] - x,
            )  # fmt: skip
            points = in_box(search, x + change, rows)
        on = search.going_on(rows)
        if bool(on.any()):
            search.look(points[on], rows[on], first + self.steps)
