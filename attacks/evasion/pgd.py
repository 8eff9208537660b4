"""Projected gradient steps: BIM (Kurakin, Goodfellow, Bengio 2016) and PGD (Madry et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.steps import direction, random_start, step_length
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["BIM", "PGD"]


@dataclass(frozen=True)
class PGD(Attack):
    """Steps along the gradient, each brought back into ball and box, from a random start.

    Attributes:
        norm: of the ball.
        steps: at least 1.
        step_size: length of a step; None: see `evasion.steps.step_length`.
        restarts: runs from other starts, for rows that still hold.
        random_start: begin at a point drawn uniformly from the ball, not at the input.
        loss: what is raised.
        eot: passes over which a gradient is averaged, for models that are random.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2", "l1")

    steps: int = 40
    step_size: float | None = None
    restarts: int = 1
    random_start: bool = True
    loss: Loss = "ce"
    eot: int = 1

    def check(self) -> None:
        """See `Attack.check`."""
        sound = self.steps >= 1 and self.restarts >= 1 and self.eot >= 1
        if not sound or (self.step_size is not None and not self.step_size > 0):
            raise ConfigError(
                f"steps {self.steps}, step_size {self.step_size}, restarts {self.restarts}, eot {self.eot}",
                rule="at least 1 each; a step has a length above 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        size = step_length(search.eps, self.steps, self.step_size)
        for restart in range(self.restarts):
            rows = search.active
            if not len(rows):
                return
            points = random_start(search, rows, restart) if self.random_start else search.x[rows]
            for step in range(self.steps):
                grad, _, _ = search.gradient(points, rows, restart * (self.steps + 1) + step, self.loss)
                points = search.inside(points + size * direction(grad, search.norm), rows)
                on = search.going_on(rows)
                if not bool(on.all()):
                    rows, points = rows[on], points[on]
                    if not len(rows):
                        break
            if len(rows):
                search.look(points, rows, restart * (self.steps + 1) + self.steps, self.loss)


@dataclass(frozen=True)
class BIM(PGD):
    """The same from the input itself.

    Attributes:
        random_start: False.
    """

    steps: int = 10
    random_start: bool = False
