"""One step: FGSM (Goodfellow, Shlens, Szegedy 2015) in every norm, with and without a random start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.steps import random_start
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm, linear_max
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["FGM", "FGSM", "RFGM", "RFGSM"]


@dataclass(frozen=True)
class FGM(Attack):
    """The best point of ball ∩ box for the loss taken as linear: optimal on affine models.

    Attributes:
        norm: of the ball.
        loss: what is raised.
        start: share of eps of a random move before the step, which then has the rest of the ball.
        eot: passes over which the gradient is averaged.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2", "l1")

    loss: Loss = "ce"
    start: float = 0.0
    eot: int = 1

    def check(self) -> None:
        """See `Attack.check`."""
        if not 0 <= self.start < 1 or self.eot < 1:
            raise ConfigError(
                f"start {self.start}, eot {self.eot}",
                rule="a share in [0, 1), and at least 1",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        rows = search.active
        x = search.x[rows]
        points = x
        if self.start:
            points = search.inside(x + self.start * (random_start(search, rows) - x), rows)
        raised = self.raised(search)
        grad, _, _ = search.gradient(points, rows, 0, raised(rows))
        rest = (1 - self.start) * search.eps
        low, high = search.low[rows] - points, search.high[rows] - points
        moved = points + linear_max(grad, search.norm, rest, low.clamp(max=0), high.clamp(min=0))
        moved = search.inside(moved, rows)
        on = search.going_on(rows)
        left = rows[on]
        if len(left):
            search.look(moved[on], left, 1, raised(left))

    def raised(self, search: Search) -> Callable[[Tensor], Loss]:
        """The loss of some rows, by their indices in the search."""
        return lambda _: self.loss


@dataclass(frozen=True)
class RFGM(FGM):
    """With a random move first.

    Attributes:
        start: share of eps.
    """

    start: float = 0.5


@dataclass(frozen=True)
class FGSM(FGM):
    """In linf only."""

    norms: ClassVar[tuple[Norm, ...]] = ("linf",)


@dataclass(frozen=True)
class RFGSM(RFGM):
    """In linf only, with a random move first."""

    norms: ClassVar[tuple[Norm, ...]] = ("linf",)
