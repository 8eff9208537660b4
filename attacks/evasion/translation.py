"""Translation-invariant gradients: the mean over shifted images is, nearly, a blurred gradient of one.

Dong, Pang, Su, Zhu: "Evading defenses to transferable adversarial examples by translation-invariant attacks",
CVPR 2019, eq. 8: the gradient is convolved with a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.momentum import climb
from mycelia.attacks.evasion.steps import step_length
from mycelia.attacks.filters import convolved
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.attacks.windows import Layout, check_layout
from mycelia.engine.errors import ConfigError

__all__ = ["TI"]


@dataclass(frozen=True)
class TI(Attack):
    """BIM, or with a decay MIM, on gradients that a Gaussian has blurred.

    Attributes:
        norm: of the ball.
        layout: of the images, "nchw" or "nhwc"; to be given, as it cannot be known from a shape.
        steps: at least 1.
        step_size: length of a step; None: see `evasion.steps.step_length`.
        size: pixels of the kernel along one axis, odd; with 1 it is BIM or MIM.
        spread: standard deviations of the Gaussian from the centre of the kernel to its end, above 0.
        decay: what is left of the momentum from step to step; 0: plain steps.
        loss: what is raised.
        eot: passes over which a gradient is averaged, for models that are random.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2")

    layout: Layout | None = None
    steps: int = 10
    step_size: float | None = None
    size: int = 15
    spread: float = 3.0
    decay: float = 0.0
    loss: Loss = "ce"
    eot: int = 1

    def check(self) -> None:
        """See `Attack.check`."""
        check_layout(self.layout, "TI")
        odd = self.size >= 1 and self.size % 2 == 1
        sound = self.steps >= 1 and self.eot >= 1 and odd and self.spread > 0 and self.decay >= 0
        if not sound or (self.step_size is not None and not self.step_size > 0):
            raise ConfigError(
                f"steps {self.steps}, step_size {self.step_size}, size {self.size}, spread {self.spread}, "
                f"decay {self.decay}, eot {self.eot}",
                rule="steps and eot at least 1, size odd, step and spread above 0, decay at least 0",
                who="TI",
            )

    def kernel(self, like: Tensor) -> Tensor:
        """Along one axis, [size], of sum 1.

        Args:
            like: for dtype and device.
        """
        half = self.size // 2
        place = torch.arange(-half, half + 1, dtype=torch.float64, device=like.device)
        weight = torch.exp(-0.5 * (place * self.spread / max(1, half)).square())
        return (weight / weight.sum()).to(like.dtype)

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        layout = self.layout
        if search.x.dim() != 4 or layout is None:
            raise ConfigError(
                f"x of shape {list(search.x.shape)}", rule=f"images of four axes, {layout}", who="TI"
            )
        kernel = self.kernel(search.x)

        def move(points: Tensor, rows: Tensor, at: int, restart: int, step: int) -> Tensor:
            return convolved(search.gradient(points, rows, at, self.loss)[0], kernel, layout)

        climb(
            search,
            move,
            steps=self.steps,
            size=step_length(search.eps, self.steps, self.step_size),
            loss=self.loss,
            decay=self.decay or None,
        )
