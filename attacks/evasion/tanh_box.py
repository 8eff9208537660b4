"""Descent inside a box without a constraint: the box is the range of a tanh.

Carlini, Wagner: "Towards evaluating the robustness of neural networks" (S&P 2017), §V-B.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mycelia.attacks.search import Search

__all__ = ["TanhBox"]

_INSIDE: Final = (
    0.99  # how far towards the bounds an input lies in tanh's range: at 1 it could never leave them
)


class TanhBox:
    """A space without bounds for points of the box: in its middle the two have the same units.

    So a step has raw units, whatever the width of the box, and one without bounds is the limit of wide ones.
    Where a bound is infinite there is no tanh.

    Args:
        search: of all rows.
        rows: indices [k].
    """

    def __init__(self, search: Search, rows: Tensor) -> None:
        self.low, self.high = search.low[rows], search.high[rows]
        self._bounded = torch.isfinite(self.low) & torch.isfinite(self.high)
        self._all = bool(self._bounded.all())
        self._middle = torch.where(self._bounded, (self.low + self.high) / 2, 0.0)
        self._half = torch.where(self._bounded, (self.high - self.low) / (2 * _INSIDE), 1.0)

    def inner(self, x: Tensor) -> Tensor:
        """Where x lies in that space."""
        scaled = (x - self._middle) / self._half
        return torch.where(self._bounded, self._half * scaled.clamp(-_INSIDE, _INSIDE).atanh(), x)

    def outer(self, inner: Tensor) -> tuple[Tensor, Tensor]:
        """The points, and their derivatives with respect to the other space."""
        bent = (inner / self._half).tanh()
        slope = 1 - bent.square()
        points = torch.addcmul(self._middle, self._half, bent)
        if not self._all:
            points = torch.where(self._bounded, points, inner)
            slope = torch.where(self._bounded, slope, torch.ones_like(slope))
        return torch.minimum(torch.maximum(points, self.low), self.high), slope
