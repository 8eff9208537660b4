"""Variance tuning: a gradient is corrected by how the gradients around the last point differed from its own.

Wang, He: "Enhancing the transferability of adversarial attacks through variance tuning", CVPR 2021,
algorithm 1 (VMI), and with a look ahead along the momentum (VNI).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.momentum import climb
from mycelia.attacks.evasion.nesterov import Gathered
from mycelia.attacks.evasion.steps import step_length
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["VMI", "VNI"]


@dataclass(frozen=True)
class VMI(Attack):
    """MIM with corrected gradients: a variance is the mean gradient at neighbours minus that at a point.

    Points are in ball and box. Neighbours are no candidates; they leave the ball, and stay in the box.

    Attributes:
        norm: of the ball.
        steps: at least 1.
        step_size: length of a step; None: see `evasion.steps.step_length`.
        decay: what is left of the momentum from step to step, at least 0 (μ in the paper).
        neighbours: gradients that go into a variance, at least 1 (N); the last step needs none.
        radius: of the ball of neighbours, as a multiple of eps, at least 0 (β).
        loss: what is raised.
        eot: passes over which a gradient is averaged, for models that are random.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2", "l1")
    ahead: ClassVar[bool] = False

    steps: int = 10
    step_size: float | None = None
    decay: float = 1.0
    neighbours: int = 5
    radius: float = 1.5
    loss: Loss = "ce"
    eot: int = 1

    def check(self) -> None:
        """See `Attack.check`."""
        sound = min(self.steps, self.neighbours, self.eot) >= 1 and self.decay >= 0 and self.radius >= 0
        if not sound or (self.step_size is not None and not self.step_size > 0):
            raise ConfigError(
                f"steps {self.steps}, step_size {self.step_size}, decay {self.decay}, "
                f"neighbours {self.neighbours}, radius {self.radius}, eot {self.eot}",
                rule="at least 1 each, decay and radius at least 0; a step has a length above 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        size = step_length(search.eps, self.steps, self.step_size)
        gathered = Gathered(search, self.decay, size, ahead=self.ahead)
        variance = torch.zeros_like(search.x)

        def move(points: Tensor, rows: Tensor, at: int, restart: int, step: int) -> Tensor:
            found = search.gradient(gathered.ahead_of(points, rows), rows, at, self.loss)[0]
            along = gathered.add(found + variance[rows], rows)
            if step + 1 < self.steps:
                variance[rows] = self._around(search, points, rows, at, step) - found
            return along

        climb(search, move, steps=self.steps, size=size, loss=self.loss)

    def _around(self, search: Search, points: Tensor, rows: Tensor, at: int, step: int) -> Tensor:
        """The mean gradient at neighbours; rows that are done have none that is of any use."""
        total = torch.zeros_like(points)
        low, high = search.box
        for place in range(self.neighbours):
            on = search.going_on(rows)
            if not bool(on.any()):
                break
            here, who = points[on], rows[on]
            unit = search.draws.of(who).in_ball(f"neighbour/{place}", search.norm, here, step=step)
            near = torch.minimum(torch.maximum(here + self.radius * search.eps * unit, low[who]), high[who])
            total[on] += search.gradient(near, who, at, self.loss, candidates=False)[0]
        return total / self.neighbours


@dataclass(frozen=True)
class VNI(VMI):
    """The same with each gradient taken where the momentum leads, as NI does.

    Neighbours are still those of the point itself, and their mean gradient is compared with the one ahead, as
    in the authors' own programme.
    """

    ahead: ClassVar[bool] = True
