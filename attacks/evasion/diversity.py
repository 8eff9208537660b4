"""Input diversity: gradients are taken at images that were, by chance, made smaller and put on black.

Xie et al.: "Improving transferability of adversarial examples with input diversity", CVPR 2019.

Making smaller and padding are linear in each of the two image axes, so they are a product with a matrix on
either side, and the gradient with respect to the image is a product with the transposed ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.draws import Draws
from mycelia.attacks.evasion.momentum import climb
from mycelia.attacks.evasion.steps import step_length
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.attacks.windows import Layout, check_layout
from mycelia.engine.errors import ConfigError

__all__ = ["DI", "MDI", "Placed", "placed"]


@dataclass(frozen=True, eq=False)
class Placed:
    """Images made smaller and put somewhere on a canvas of the old size.

    Attributes:
        down: weights of the old rows in each new one, [n, height, height].
        across: the same for columns, [n, width, width].
        layout: of the images.
    """

    down: Tensor
    across: Tensor
    layout: Layout

    def __call__(self, x: Tensor) -> Tensor:
        """The images [n, …] as placed."""
        return self._between(self.down, x, self.across)

    def back(self, grad: Tensor) -> Tensor:
        """The gradient with respect to the images, from that with respect to the placed ones."""
        return self._between(self.down.transpose(1, 2), grad, self.across.transpose(1, 2))

    def _between(self, down: Tensor, x: Tensor, across: Tensor) -> Tensor:
        axes = "nchw,nvw->nchv" if self.layout == "nchw" else "nhwc,nvw->nhvc"
        turned = torch.einsum(axes, x, across)
        axes = "nuh,nchv->ncuv" if self.layout == "nchw" else "nuh,nhvc->nuvc"
        return torch.einsum(axes, down, turned)


def placed(
    draws: Draws, x: Tensor, layout: Layout, smallest: float, *, step: int = 0, restart: int = 0
) -> Placed:
    """A random size and place for each image; the aspect ratio stays as far as whole pixels allow.

    The height is uniform over the whole numbers from ⌊smallest · height⌋ (at least 1) to one less than the
    height; the place is uniform over those where the image fits; pixels are bilinear, and 0 around.

    Args:
        draws: of these rows.
        x: images [n, …].
        layout: of these.
        smallest: share of the old height.
        step: of the draw's name.
        restart: of the draw's name.
    """
    height, width = x.shape[2:] if layout == "nchw" else x.shape[1:3]
    least = max(1, int(smallest * height))
    choice = draws.uniform("resize", (3,), step=step, restart=restart)
    tall = least + (choice[:, 0] * max(1, height - least)).floor()
    wide = (tall * width / height).round().clamp(1, width)
    top = (choice[:, 1] * (height - tall + 1)).floor()
    left = (choice[:, 2] * (width - wide + 1)).floor()
    return Placed(_weights(height, tall, top).to(x.dtype), _weights(width, wide, left).to(x.dtype), layout)


def _weights(old: int, new: Tensor, offset: Tensor) -> Tensor:
    """What each old line gives to each line of the canvas, float64 [n, old, old]; pixel centres match."""
    line = torch.arange(old, dtype=torch.float64, device=new.device)
    place = line - offset[:, None]  # in the smaller image
    inside = (place >= 0) & (place < new[:, None])
    source = ((place + 0.5) * (old / new)[:, None] - 0.5).clamp(0, old - 1)
    return (1 - (source[:, :, None] - line).abs()).clamp(min=0) * inside[:, :, None]


@dataclass(frozen=True)
class DI(Attack):
    """BIM on images that change their size and place; with p = 0 it is BIM.

    Where an image was changed, the point itself is looked at as well, which is a forward pass more.

    Attributes:
        norm: of the ball.
        layout: of the images, "nchw" or "nhwc"; to be given, as it cannot be known from a shape.
        steps: at least 1.
        step_size: length of a step; None: see `evasion.steps.step_length`.
        p: how likely an image is changed before a gradient, in [0, 1].
        smallest: share of its height that an image has at least, in (0, 1).
        loss: what is raised.
        eot: passes over which a gradient is averaged, for models that are random.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2")

    layout: Layout | None = None
    steps: int = 10
    step_size: float | None = None
    p: float = 0.5
    smallest: float = 0.9
    loss: Loss = "ce"
    eot: int = 1

    def check(self) -> None:
        """See `Attack.check`."""
        check_layout(self.layout, type(self).__name__)
        sound = self.steps >= 1 and self.eot >= 1 and 0 <= self.p <= 1 and 0 < self.smallest < 1
        if not sound or (self.step_size is not None and not self.step_size > 0):
            raise ConfigError(
                f"steps {self.steps}, step_size {self.step_size}, p {self.p}, smallest {self.smallest}, "
                f"eot {self.eot}",
                rule="steps and eot at least 1, a step above 0, p in [0, 1], smallest in (0, 1)",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        _climb(search, self, None)


@dataclass(frozen=True)
class MDI(DI):
    """The same with momentum; with p = 0 it is MIM.

    Attributes:
        decay: what is left of the momentum from step to step, at least 0.
    """

    decay: float = 1.0

    def check(self) -> None:
        """See `Attack.check`."""
        super().check()
        if not self.decay >= 0:
            raise ConfigError(f"decay {self.decay}", rule="at least 0", who="MDI")

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        _climb(search, self, self.decay)


def _climb(search: Search, attack: DI, decay: float | None) -> None:
    layout = attack.layout
    if search.x.dim() != 4 or layout is None:
        raise ConfigError(
            f"x of shape {list(search.x.shape)}",
            rule=f"images of four axes, {attack.layout}",
            who=type(attack).__name__,
        )

    def gradient(points: Tensor, rows: Tensor, at: int, restart: int, step: int) -> Tensor:
        draws = search.draws.of(rows)
        fires = draws.uniform("fires", step=step, restart=restart) < attack.p
        if not bool(fires.any()):
            return search.gradient(points, rows, at, attack.loss)[0]
        found = torch.zeros_like(points)
        if not bool(fires.all()):
            found[~fires] = search.gradient(points[~fires], rows[~fires], at, attack.loss)[0]
        search.look(points[fires], rows[fires], at, attack.loss)
        fires &= search.going_on(rows)
        if bool(fires.any()):
            move = placed(draws.of(fires), points[fires], layout, attack.smallest, step=step, restart=restart)
            moved = search.gradient(move(points[fires]), rows[fires], at, attack.loss, candidates=False)[0]
            found[fires] = move.back(moved)
        return found

    climb(
        search,
        gradient,
        steps=attack.steps,
        size=step_length(search.eps, attack.steps, attack.step_size),
        loss=attack.loss,
        decay=decay,
    )
