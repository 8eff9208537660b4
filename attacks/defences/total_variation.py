"""Images made as even as their pixels allow: total-variation minimisation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mycelia.attacks.defences.stages import Stage
from mycelia.attacks.draws import Draws
from mycelia.attacks.windows import Layout, as_nchw, check_layout, from_nchw
from mycelia.engine.errors import ConfigError

__all__ = ["TotalVariation"]


@dataclass(frozen=True)
class TotalVariation(Stage):
    """The image z that makes ½‖m ⊙ (z − x)‖² + weight · TV(z) smallest, each channel by itself.

    TV sums the lengths of the forward differences (Rudin, Osher, Fatemi 1992); m drops pixels by chance (Guo,
    Rana, Cissé, van der Maaten: "Countering adversarial images using input transformations", ICLR 2018). The
    minimum is found by the first-order primal-dual method (Chambolle, Pock 2011, algorithm 1; with all pixels
    kept the objective is strongly convex and algorithm 2 applies).

    Attributes:
        weight: of the variation, above 0, in units of the inputs.
        keep: share of pixels that are fitted, in (0, 1]; the same pixels in all channels.
        steps: of the method, at least 1.
        layout: of the images.
    """

    weight: float = 0.1
    keep: float = 1.0
    steps: int = 100
    layout: Layout | None = None

    def check(self) -> None:
        """See `Stage.check`."""
        if not 0 < self.weight < math.inf or not 0 < self.keep <= 1 or self.steps < 1:
            raise ConfigError(
                f"weight {self.weight}, keep {self.keep}, steps {self.steps}",
                rule="a weight above 0, a share in (0, 1], at least 1 step",
                who="TotalVariation",
            )
        check_layout(self.layout, "TotalVariation")

    @property
    def differentiable(self) -> bool:
        """Not in a useful way: the gradient of so many steps says little."""
        return False

    @property
    def random(self) -> bool:
        """Where pixels are dropped."""
        return self.keep < 1

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        """See `Stage.__call__`."""
        images = as_nchw(x, self.layout, "TotalVariation")
        fitted = torch.ones_like(images[:, :1])
        if self.random:
            fitted = (draws.uniform("keep", fitted.shape[1:]) < self.keep).to(x.dtype)
        found, ahead = images.clone(), images
        dual = torch.zeros(2, *images.shape, dtype=x.dtype, device=x.device)
        primal_step = dual_step = 1 / math.sqrt(8)  # 8 bounds the squared norm of the differences
        for _ in range(self.steps):
            dual = dual + dual_step * _differences(ahead)
            length = torch.linalg.vector_norm(dual, dim=0)
            dual = dual / (length / self.weight).clamp(min=1)
            moved = found + primal_step * (_divergence(dual) + fitted * images)
            moved = moved / (1 + primal_step * fitted)
            share = 1.0 if self.random else 1 / math.sqrt(1 + 2 * primal_step)
            primal_step, dual_step = primal_step * share, dual_step / share
            ahead, found = moved + share * (moved - found), moved
        return from_nchw(found, self.layout)


def _differences(z: Tensor) -> Tensor:
    """Down and across, [2, n, c, h, w]; 0 at the far edges."""
    found = torch.zeros(2, *z.shape, dtype=z.dtype, device=z.device)
    found[0, :, :, :-1] = z[:, :, 1:] - z[:, :, :-1]
    found[1, :, :, :, :-1] = z[:, :, :, 1:] - z[:, :, :, :-1]
    return found


def _divergence(dual: Tensor) -> Tensor:
    """The negative transpose of `_differences`."""
    down, across = dual[0, :, :, :-1], dual[1, :, :, :, :-1]
    found = torch.zeros_like(dual[0])
    found[:, :, :-1] += down
    found[:, :, 1:] -= down
    found[:, :, :, :-1] += across
    found[:, :, :, 1:] -= across
    return found
