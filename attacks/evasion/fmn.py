"""Pintor et al.: "Fast minimum-norm adversarial attacks through adaptive norm constraints" (2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.steps import direction
from mycelia.attacks.norms import Norm, norm, project
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["FMN"]

_DUAL: Final[dict[Norm, Norm]] = {"l0": "linf", "l1": "linf", "l2": "l2", "linf": "l1"}


@dataclass(frozen=True)
class FMN(Attack):
    """Steps along the gradient in a ball whose radius shrinks after success and grows after failure.

    Until a row has been broken its radius is where the linearised boundary lies. Steps and changes of the
    radius become smaller along half a cosine; every row has a radius of its own.

    Attributes:
        norm: "l0", "l1", "l2" or "linf".
        steps: at least 1.
        step_size: l2 length of the first step, raw input units, above 0.
        last_step_size: of the last one; None: a hundredth of the first.
        gamma: share by which the radius changes at first, in (0, 1).
    """

    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l2", "linf", "l1", "l0")

    norm: Norm = "l2"
    steps: int = 200
    step_size: float = 1.0
    last_step_size: float | None = None
    gamma: float = 0.05

    def check(self) -> None:
        """See `Attack.check`."""
        last = self.step_size if self.last_step_size is None else self.last_step_size
        if self.steps < 1 or not 0 < last <= self.step_size or not 0 < self.gamma < 1:
            raise ConfigError(
                f"steps {self.steps}, step_size {self.step_size}, last_step_size {self.last_step_size}, "
                f"gamma {self.gamma}",
                rule="at least 1; above 0 and not growing; gamma in (0, 1)",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        last = self.step_size / 100 if self.last_step_size is None else self.last_step_size
        rows = search.active
        delta = torch.zeros_like(search.x)
        radius = torch.full((len(delta),), torch.inf, dtype=delta.dtype, device=delta.device)
        least = radius.clone()  # norm of the nearest success
        for step in range(self.steps):
            if not len(rows):
                return
            x, mine = search.x[rows], delta[rows]
            points = _boxed(x + mine, search, rows)
            grad, margin, outputs = search.gradient(points, rows, step, "margin")
            reached = search.goal.of(rows).reached(outputs)
            share = (1 + math.cos(math.pi * step / self.steps)) / 2
            now = norm(points - x, self.norm)
            least[rows] = torch.where(reached, torch.minimum(least[rows], now), least[rows])
            slope = norm(grad, _DUAL[self.norm])
            rise = (-margin).to(slope.dtype).clamp(min=0) / slope.clamp(min=torch.finfo(slope.dtype).tiny)
            radius[rows] = self._next(
                radius[rows], least[rows], now + rise.clamp(max=1e30), reached, self.gamma * share
            )
            size = last + (self.step_size - last) * share
            moved = mine + size * direction(grad, "l2")
            lower, upper = search.lower[rows], search.upper[rows]
            delta[rows] = project(moved, self.norm, radius[rows], lower, upper)
            on = search.going_on(rows)
            rows = rows if bool(on.all()) else rows[on]
        search.look(_boxed(search.x[rows] + delta[rows], search, rows), rows, self.steps, "margin")

    def _next(self, radius: Tensor, least: Tensor, linear: Tensor, reached: Tensor, gamma: float) -> Tensor:
        """Radii of the next step, given the norm of the nearest success and of the linearised boundary."""
        if self.norm == "l0":  # whole coordinates: by one at least
            smaller = torch.minimum(radius - 1, (radius * (1 - gamma)).floor())
            larger = torch.maximum(radius + 1, (radius * (1 + gamma)).floor())
            smaller, linear = smaller.clamp(min=1), linear.ceil().clamp(min=1)
            smaller = torch.minimum(smaller, least)
        else:
            smaller = torch.minimum(radius * (1 - gamma), least)
            larger = radius * (1 + gamma)
        never = least == torch.inf
        return torch.where(reached, smaller, torch.where(never, linear, larger))


def _boxed(points: Tensor, search: Search, rows: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(points, search.low[rows]), search.high[rows])
