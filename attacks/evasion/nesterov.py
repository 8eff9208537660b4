"""Gradients taken where the momentum leads (NI), and at darker copies of the image as well (SI-NI).

Lin et al.: "Nesterov accelerated gradient and scale invariance for adversarial attacks", ICLR 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.momentum import _even, climb
from mycelia.attacks.evasion.steps import step_length
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["NI", "SINI", "Gathered"]


class Gathered:
    """Momentum of all rows of a search, and the points where it leads.

    Args:
        search: whose rows.
        decay: what is left of it from step to step (μ).
        size: length of a step (α).
        ahead: whether to look where it leads.
    """

    def __init__(self, search: Search, decay: float, size: float, *, ahead: bool) -> None:
        self._sum = torch.zeros_like(search.x)
        self._search, self._decay = search, decay
        self._reach = decay * size if ahead else 0.0

    def ahead_of(self, points: Tensor, rows: Tensor) -> Tensor:
        """Where it leads: x + α · μ · g (eq. 6 of the paper), in the box."""
        if not self._reach:
            return points
        low, high = self._search.box
        moved = points + self._reach * self._sum[rows]
        return torch.minimum(torch.maximum(moved, low[rows]), high[rows])

    def add(self, grad: Tensor, rows: Tensor) -> Tensor:
        """Gather: g ← μ · g + ∇ / mean |∇|, which is returned."""
        self._sum[rows] = self._decay * self._sum[rows] + _even(grad)
        return self._sum[rows]


@dataclass(frozen=True)
class NI(Attack):
    """MIM with each gradient taken where the momentum leads.

    The points looked at are those where it leads, so far as they are in the ball, and the last one.

    Attributes:
        norm: of the ball.
        steps: at least 1.
        step_size: length of a step; None: see `evasion.steps.step_length`.
        decay: what is left of the momentum from step to step, at least 0 (μ in the paper).
        loss: what is raised.
        eot: passes over which a gradient is averaged, for models that are random.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2", "l1")

    steps: int = 10
    step_size: float | None = None
    decay: float = 1.0
    loss: Loss = "ce"
    eot: int = 1

    def check(self) -> None:
        """See `Attack.check`."""
        sound = self.steps >= 1 and self.eot >= 1 and self.decay >= 0
        if not sound or (self.step_size is not None and not self.step_size > 0):
            raise ConfigError(
                f"steps {self.steps}, step_size {self.step_size}, decay {self.decay}, eot {self.eot}",
                rule="at least 1 each, decay at least 0; a step has a length above 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        size = step_length(search.eps, self.steps, self.step_size)
        gathered = Gathered(search, self.decay, size, ahead=True)

        def move(points: Tensor, rows: Tensor, at: int, restart: int, step: int) -> Tensor:
            found = self.gradient_at(search, gathered.ahead_of(points, rows), rows, at)
            return gathered.add(found, rows)

        climb(search, move, steps=self.steps, size=size, loss=self.loss)

    def gradient_at(self, search: Search, points: Tensor, rows: Tensor, at: int) -> Tensor:
        """The gradient that goes into the momentum, [k, …].

        Args:
            search: of these rows.
            points: [k, …]
            rows: indices [k].
            at: number of the step.
        """
        return search.gradient(points, rows, at, self.loss)[0]


@dataclass(frozen=True)
class SINI(NI):
    """The same with the mean gradient over copies of which each is half as bright as the one before.

    Copies are x / 2^i in bounds from 0 on, and in general move towards the lower bound, or towards 0 where
    there is none.

    Attributes:
        copies: at least 1, the point itself being the first (m in the paper); with 1 it is NI.
    """

    copies: int = 5

    def check(self) -> None:
        """See `Attack.check`."""
        super().check()
        if self.copies < 1:
            raise ConfigError(f"copies {self.copies}", rule="at least 1", who="SINI")

    def gradient_at(self, search: Search, points: Tensor, rows: Tensor, at: int) -> Tensor:
        """See `NI.gradient_at`."""
        total = super().gradient_at(search, points, rows, at).clone()
        low, high = (bound[rows] for bound in search.box)
        dark = torch.where(torch.isfinite(low), low, torch.minimum(torch.zeros_like(high), high))
        for copy in range(1, self.copies):
            on = search.going_on(rows)
            if not bool(on.any()):
                break
            share = 0.5**copy
            faded = dark[on] + share * (points[on] - dark[on])
            total[on] += share * search.gradient(faded, rows[on], at, self.loss, candidates=False)[0]
        return total / self.copies
