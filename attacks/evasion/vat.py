"""VAT: the direction in which a model's answer changes fastest, whatever the label.

Miyato, Maeda, Koyama, Ishii: "Virtual adversarial training", ICLR 2016 and TPAMI 2018, algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.steps import direction
from mycelia.attacks.losses import Loss, kl
from mycelia.attacks.norms import Norm, linear_max, norm, wide
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["VAT"]


@dataclass(frozen=True)
class VAT(Attack):
    """A step of length eps along the first eigenvector of the second derivatives of KL(p(x) ‖ p(x + r)).

    It is found by power iterations: the gradient at r = ξd is ξ times the second derivatives times d. To this
    order the divergence is as large on either side, so both are looked at.

    Attributes:
        norm: l2.
        iterations: at least 1; the paper trains with 1.
        xi: length of ξd, above 0, in units of the input; None: the square root of the precision times the
            longer of x and eps. The paper's 1e-6 is rounded away in inputs of single precision.
    """

    targeted: ClassVar[bool] = False
    norms: ClassVar[tuple[Norm, ...]] = ("l2",)

    norm: Norm = "l2"
    iterations: int = 10
    xi: float | None = None

    def check(self) -> None:
        """See `Attack.check`."""
        if self.iterations < 1 or (self.xi is not None and not self.xi > 0):
            raise ConfigError(
                f"iterations {self.iterations}, xi {self.xi}",
                rule="at least 1, a length above 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        rows = search.active
        along = search.draws.of(rows).normal("start", search.x.shape[1:], dtype=search.x.dtype)
        along = direction(along, "l2")
        for step in range(self.iterations):
            x = search.x[rows]
            near = search.inside(x + wide(self._length(x, search.eps), x) * along, rows)
            grad, _, _ = search.gradient(near, rows, step, _from_clean(search.clean[rows]))
            flat = wide(norm(grad, "l2") == 0, grad)  # nothing to be learnt there
            along = torch.where(flat, along, direction(grad, "l2"))
            on = search.going_on(rows)
            if not bool(on.all()):
                rows, along = rows[on], along[on]
                if not len(rows):
                    return
        for side in (1, -1):
            lower, upper = search.lower[rows], search.upper[rows]
            delta = linear_max(side * along, "l2", search.eps, lower, upper)
            points = search.inside(search.x[rows] + delta, rows)
            search.look(points, rows, self.iterations, _from_clean(search.clean[rows]))
            on = search.going_on(rows)
            rows, along = rows[on], along[on]
            if not len(rows):
                return

    def _length(self, x: Tensor, eps: float) -> Tensor:
        """|ξd|, [n]: in the ball, and long enough not to be lost in rounding."""
        if self.xi is not None:
            return x.new_full((len(x),), self.xi)
        precision: float = torch.finfo(x.dtype).eps
        return math.sqrt(precision) * norm(x, "l2").clamp(min=eps)


def _from_clean(clean: Tensor) -> Loss:
    """The divergence from what the model says of the clean inputs; labels have no part in it."""
    return lambda outputs, _: kl(outputs, clean)
