"""NewtonFool.

Jang, Wu, Jha: "Objective metrics and gradient descent algorithms for adversarial examples in machine
learning" (ACSAC 2017).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.decisions import to_boundary
from mycelia.attacks.norms import Norm, norm, wide
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["NewtonFool"]


@dataclass(frozen=True)
class NewtonFool(Attack):
    """Newton's steps that lower the probability of the true class, each no longer than a share of the input.

    A step is −d · ∇F / ‖∇F‖² with d = min(η ‖x‖ ‖∇F‖, F − 1/classes), F the softmax probability of the true
    class and x the input itself (Algorithm 1); an input of norm 0 counts as one of norm 1. A row ends with
    its first success, from which the way back to the input is then halved (not in the paper).

    Attributes:
        norm: "l2".
        steps: at most, at least 1.
        eta: share of the input's l2 norm that a step is long, at most; above 0.
        halvings: of the way back; 0: none.
    """

    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l2",)
    targeted: ClassVar[bool] = False

    norm: Norm = "l2"
    steps: int = 100
    eta: float = 0.01
    halvings: int = 8

    def check(self) -> None:
        """See `Attack.check`."""
        if self.steps < 1 or not self.eta > 0 or self.halvings < 0:
            raise ConfigError(
                f"steps {self.steps}, eta {self.eta}, halvings {self.halvings}",
                rule="at least 1, above 0, at least 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        rows = search.active
        size = norm(search.x, "l2")
        size = torch.where(size > 0, size, torch.ones_like(size))
        points = search.x[rows]
        for step in range(self.steps):
            grad, loss, _ = search.gradient(points, rows, step, _doubt)
            on = search.going_on(rows) & ~search.broken[rows]
            rows, points, grad, loss = rows[on], points[on], grad[on], loss[on]
            if not len(rows):
                break
            steep = norm(grad, "l2")
            fall = (-loss.to(steep.dtype) - 1 / search.classes).clamp(min=0)
            # d / ‖∇F‖, which is what ∇F / ‖∇F‖ is multiplied by; without a slope there is no step.
            length = torch.minimum(
                self.eta * size[rows], fall / steep.clamp(min=torch.finfo(steep.dtype).tiny)
            )
            unit = grad / wide(steep.clamp(min=torch.finfo(steep.dtype).tiny), grad)
            moved = points + wide(length, grad) * unit
            points = torch.minimum(torch.maximum(moved, search.low[rows]), search.high[rows])
        if len(rows):
            search.look(points, rows, self.steps, _doubt)
        rows = search.active[search.broken[search.active]]
        if len(rows):
            to_boundary(search, search.best[rows], rows, self.steps + 1, self.halvings)


def _doubt(z: Tensor, y: Tensor) -> Tensor:
    """−F: the probability of the true class, sign turned, as losses are raised."""
    return -z.softmax(1).gather(1, y[:, None])[:, 0]
