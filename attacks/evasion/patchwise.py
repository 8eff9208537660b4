"""Long steps of which what goes beyond eps is handed to the pixels around: PI.

Gao et al.: "Patch-wise attack for fooling deep neural network", ECCV 2020, algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mycelia.attacks.base import Attack
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.attacks.windows import Layout, as_nchw, check_layout, from_nchw
from mycelia.engine.errors import ConfigError

__all__ = ["PI"]


@dataclass(frozen=True)
class PI(Attack):
    """Steps of β · eps / steps along the sign, and as long ones along the sign of the neighbours' excess.

    Attributes:
        layout: of the images, "nchw" or "nhwc"; to be given, as it cannot be known from a shape.
        steps: at least 1.
        amplification: β, above 0.
        project: length of the step along the excess, as a multiple of the other one, at least 0 (γ over
            β · eps / steps); with 0 it is BIM with steps of that length.
        size: pixels of the patch along one axis, odd.
        loss: what is raised.
        eot: passes over which a gradient is averaged, for models that are random.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf",)

    layout: Layout | None = None
    steps: int = 10
    amplification: float = 10.0
    project: float = 1.0
    size: int = 3
    loss: Loss = "ce"
    eot: int = 1

    def check(self) -> None:
        """See `Attack.check`."""
        check_layout(self.layout, "PI")
        odd = self.size >= 3 and self.size % 2 == 1
        if self.steps < 1 or self.eot < 1 or not self.amplification > 0 or not self.project >= 0 or not odd:
            raise ConfigError(
                f"steps {self.steps}, amplification {self.amplification}, project {self.project}, "
                f"size {self.size}, eot {self.eot}",
                rule="steps and eot at least 1, amplification above 0, project at least 0, size odd, "
                "3 or more",
                who="PI",
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        if search.x.dim() != 4:
            raise ConfigError(
                f"x of shape {list(search.x.shape)}", rule=f"images of four axes, {self.layout}", who="PI"
            )
        length = self.amplification * search.eps / self.steps
        rows = search.active
        points = search.x[rows]
        amplified = torch.zeros_like(points)
        for step in range(self.steps):
            along = length * search.gradient(points, rows, step, self.loss)[0].sign()
            amplified = amplified + along
            excess = (amplified.abs() - search.eps).clamp(min=0) * amplified.sign()
            around = self._around(excess)
            cancelled = around.abs() <= 1e-6 * search.eps  # but for rounding
            handed = self.project * length * torch.where(cancelled, 0.0, around.sign())
            amplified = amplified + handed
            points = search.inside(points + along + handed, rows)
            on = search.going_on(rows)
            if not bool(on.all()):
                rows, points, amplified = rows[on], points[on], amplified[on]
                if not len(rows):
                    return
        search.look(points, rows, self.steps, self.loss)

    def _around(self, values: Tensor) -> Tensor:
        """The sum over the patch of each pixel, without itself; 0 beyond the border."""
        first = as_nchw(values, self.layout, "PI")
        height, width = first.shape[2:]
        half = self.size // 2
        wide = functional.pad(first, (half, half, half, half))
        found = torch.zeros_like(first)
        for down in range(self.size):  # always in this order: the sign of a sum near 0 depends on it
            for right in range(self.size):
                if (down, right) != (half, half):
                    found += wide[:, :, down : down + height, right : right + width]
        return from_nchw(found, self.layout)
