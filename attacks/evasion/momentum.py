"""Gradient steps with momentum: MIM (Dong et al.: "Boosting adversarial attacks with momentum", 2018)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.steps import direction, random_start, step_length
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["MIM", "climb"]

Gradient = Callable[[Tensor, Tensor, int, int, int], Tensor]
"""Of points, rows, the number of the step over all restarts, restart and step in it: a gradient [k, …]."""


def climb(
    search: Search,
    gradient: Gradient,
    *,
    steps: int,
    size: float,
    loss: Loss,
    decay: float | None = None,
    restarts: int = 1,
    random: bool = False,
) -> None:
    """Step along a gradient, or along what has gathered of it, and look at the last point.

    Args:
        search: its active rows are moved.
        gradient: of the points.
        steps: of each restart.
        size: length of a step.
        loss: by which the last point is judged.
        decay: what is left of the momentum from step to step; None: the plain gradient.
        restarts: for rows that still hold.
        random: start from a random point of the ball.
    """
    for restart in range(restarts):
        rows = search.active
        if not len(rows):
            return
        first = restart * (steps + 1)
        points = random_start(search, rows, restart) if random else search.x[rows]
        gathered = torch.zeros_like(points)
        for step in range(steps):
            found = gradient(points, rows, first + step, restart, step)
            gathered = found if decay is None else decay * gathered + _even(found)
            points = search.inside(points + size * direction(gathered, search.norm), rows)
            on = search.going_on(rows)
            if not bool(on.all()):
                rows, points, gathered = rows[on], points[on], gathered[on]
                if not len(rows):
                    break
        if len(rows):
            search.look(points, rows, first + steps, loss)


@dataclass(frozen=True)
class MIM(Attack):
    """Steps along gathered gradients, each divided by its mean absolute value first.

    Attributes:
        norm: of the ball.
        steps: at least 1.
        step_size: length of a step; None: see `evasion.steps.step_length`.
        decay: what is left of the momentum from step to step, at least 0 (μ in the paper).
        restarts: runs from other starts, for rows that still hold; more than one needs random_start.
        random_start: begin at a point drawn uniformly from the ball, not at the input.
        loss: what is raised.
        eot: passes over which a gradient is averaged, for models that are random.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2", "l1")

    steps: int = 10
    step_size: float | None = None
    decay: float = 1.0
    restarts: int = 1
    random_start: bool = False
    loss: Loss = "ce"
    eot: int = 1

    def check(self) -> None:
        """See `Attack.check`."""
        sound = self.steps >= 1 and self.restarts >= 1 and self.eot >= 1 and self.decay >= 0
        if not sound or (self.step_size is not None and not self.step_size > 0):
            raise ConfigError(
                f"steps {self.steps}, step_size {self.step_size}, decay {self.decay}, "
                f"restarts {self.restarts}, eot {self.eot}",
                rule="at least 1 each, decay at least 0; a step has a length above 0",
                who=type(self).__name__,
            )
        if self.restarts > 1 and not self.random_start:
            raise ConfigError(
                f"{self.restarts} restarts from the same point",
                rule="they would all be the same",
                fix="random_start=True",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        climb(
            search,
            lambda points, rows, at, restart, step: search.gradient(points, rows, at, self.loss)[0],
            steps=self.steps,
            size=step_length(search.eps, self.steps, self.step_size),
            loss=self.loss,
            decay=self.decay,
            restarts=self.restarts,
            random=self.random_start,
        )


def _even(grad: Tensor) -> Tensor:
    """Over its mean absolute value, row by row; 0 stays 0."""
    mean = grad.flatten(1).abs().mean(1).view(-1, *[1] * (grad.dim() - 1))
    return grad / torch.where(mean > 0, mean, torch.ones_like(mean))
