"""Rony et al.: "Decoupling direction and norm for efficient gradient-based L2 adversarial attacks" (2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.steps import direction
from mycelia.attacks.norms import Norm, norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["DDN"]


@dataclass(frozen=True)
class DDN(Attack):
    """Steps along the gradient on a sphere that shrinks after success and grows after failure.

    Attributes:
        norm: "l2".
        steps: at least 1.
        radius: of the first sphere, raw input units, above 0.
        step_size: length of the first step, raw input units, above 0; it falls to a hundredth of that.
        gamma: share by which radii change, in (0, 1).
    """

    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l2",)

    norm: Norm = "l2"
    steps: int = 100
    radius: float = 1.0
    step_size: float = 1.0
    gamma: float = 0.05

    def check(self) -> None:
        """See `Attack.check`."""
        sound = self.steps >= 1 and self.radius > 0 and self.step_size > 0 and 0 < self.gamma < 1
        if not sound:
            raise ConfigError(
                f"steps {self.steps}, radius {self.radius}, step_size {self.step_size}, gamma {self.gamma}",
                rule="at least 1, above 0, above 0, in (0, 1)",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        rows = search.active
        points = search.x[rows]
        radius = torch.full((len(rows),), self.radius, dtype=points.dtype, device=points.device)
        wide = (-1, *[1] * (points.dim() - 1))
        for step in range(self.steps):
            grad, _, outputs = search.gradient(points, rows, step, "ce")
            reached = search.goal.of(rows).reached(outputs)
            radius = radius * torch.where(reached, 1 - self.gamma, 1 + self.gamma)
            size = self.step_size * (0.01 + 0.99 * (1 + math.cos(math.pi * step / self.steps)) / 2)
            delta = points - search.x[rows] + size * direction(grad, "l2")
            length = norm(delta, "l2")
            scale = radius / torch.where(length > 0, length, torch.ones_like(length))
            points = search.x[rows] + scale.view(wide) * delta
            points = torch.minimum(torch.maximum(points, search.low[rows]), search.high[rows])
            on = search.going_on(rows)
            if not bool(on.all()):
                rows, points, radius = rows[on], points[on], radius[on]
                if not len(rows):
                    return
        search.look(points, rows, self.steps, "ce")
