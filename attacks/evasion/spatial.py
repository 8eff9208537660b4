"""Rotations and shifts: every one of a grid.

Engstrom, Tran, Tsipras, Schmidt, Madry: "Exploring the landscape of spatial robustness", ICML 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from mycelia.attacks.base import Attack
from mycelia.attacks.norms import NORMS, Norm, norm
from mycelia.attacks.search import Search
from mycelia.attacks.windows import Layout, as_nchw, check_layout, from_nchw
from mycelia.engine.errors import ConfigError

__all__ = ["Spatial", "moved"]

Padding = Literal["zeros", "border", "reflection"]
_FLAT, _IMAGE = 2, 4  # axes of an input, rows included


@dataclass(frozen=True)
class Spatial(Attack):
    """All rotations and shifts of a grid: whether one of them is a success is known exactly.

    This is a kind of its own: the limits are `rotation` and `shift`, and no ball. So `eps` is left out of
    the call. `norm` is only that in which the nearest success is the one that is returned (`keep="loss"`
    gives the worst one); an eps, where there is one, confines the grid further, to what lies within it in
    that norm, which few moved images do. The unchanged input is part of every grid.

    Attributes:
        norm: by which successes are compared.
        layout: of images, "nchw" or "nhwc"; nothing is guessed. None is for flat inputs [n, d] only, which
            are images of one row and so are only shifted along it and turned round its middle.
        rotation: largest angle, in degrees, to both sides.
        rotations: how many angles, evenly spaced with both ends; 1: none but 0.
        shift: largest shift along each axis, in pixels, to both sides.
        shifts: how many along each axis, evenly spaced with both ends; 1: none but 0.
        padding: what comes in from outside: zeros (clipped to the bounds), the nearest pixel, or the
            mirrored image.
    """

    needs: ClassVar[str] = "score"
    kind: ClassVar[str] = "spatial"
    norms: ClassVar[tuple[Norm, ...]] = NORMS

    norm: Norm = "l2"
    layout: Layout | None = None
    rotation: float = 30.0
    rotations: int = 31
    shift: float = 3.0
    shifts: int = 5
    padding: Padding = "zeros"

    def check(self) -> None:
        """See `Attack.check`."""
        who = type(self).__name__
        if self.layout is not None:
            check_layout(self.layout, who)
        if self.padding not in get_args(Padding):
            raise ConfigError(
                f"padding {self.padding!r}", rule=f"one of {', '.join(get_args(Padding))}", who=who
            )
        if not 0 <= self.rotation <= 180 or not 0 <= self.shift < math.inf:
            raise ConfigError(
                f"rotation {self.rotation}, shift {self.shift}",
                rule="0 to 180 degrees; at least 0 pixels",
                who=who,
            )
        if self.rotations < 1 or self.shifts < 1:
            raise ConfigError(
                f"rotations {self.rotations}, shifts {self.shifts}", rule="at least 1 each", who=who
            )

    def grid(self, *, flat: bool = False) -> list[tuple[float, float, float]]:
        """All (degrees, pixels down, pixels to the right), the unchanged one first.

        Args:
            flat: an image of one row: no shifts down.
        """
        angles, sizes = _spaced(self.rotation, self.rotations), _spaced(self.shift, self.shifts)
        every = [(a, d, r) for a in angles for d in ([0.0] if flat else sizes) for r in sizes]
        still = (0.0, 0.0, 0.0)
        return [still, *(each for each in every if each != still)]

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        flat = search.x.dim() == _FLAT
        if not flat and (search.x.dim() != _IMAGE or self.layout is None):
            raise ConfigError(
                f"inputs of shape [n, {', '.join(map(str, search.x.shape[1:]))}], layout {self.layout!r}",
                rule="images [n, channels, height, width] or [n, height, width, channels], by layout",
                fix='Spatial(layout="nchw")',
                who=type(self).__name__,
            )
        for step, (degrees, down, right) in enumerate(self.grid(flat=flat)):
            rows = search.active
            if not len(rows):
                return
            x = search.x[rows]
            images = x[:, None, None] if flat else as_nchw(x, self.layout, "Spatial")
            found = images if not step else moved(images, degrees, down, right, self.padding)
            points = found[:, 0, 0] if flat else from_nchw(found, self.layout)
            points = torch.minimum(torch.maximum(points, search.low[rows]), search.high[rows]).contiguous()
            if search.eps < math.inf:
                near = norm((points - x).double(), search.norm) <= search.eps
                rows, points = rows[near], points[near]
            if len(rows):
                search.look(points, rows, step)


def moved(images: Tensor, degrees: float, down: float, right: float, padding: Padding = "zeros") -> Tensor:
    """Images turned anticlockwise about their middle and then shifted, with bilinear interpolation.

    Args:
        images: [n, channels, height, width], floating point.
        degrees: of the turn; pixels are square, whatever the image is.
        down: pixels.
        right: pixels.
        padding: see `Spatial`.

    Returns:
        of the same shape and dtype.
    """
    height, width = images.shape[2:]
    i = torch.arange(height, dtype=torch.float64) - (height - 1) / 2 - down
    j = torch.arange(width, dtype=torch.float64) - (width - 1) / 2 - right
    angle = math.radians(degrees)
    # Where each pixel of the result comes from: the turn undone, in pixels from the middle, rows downwards.
    from_j = math.cos(angle) * j[None, :] - math.sin(angle) * i[:, None]
    from_i = math.sin(angle) * j[None, :] + math.cos(angle) * i[:, None]
    # grid_sample counts from −1 to 1 over the outer edges of the pixels.
    grid = torch.stack([from_j * (2 / width), from_i * (2 / height)], 2).to(images)
    return functional.grid_sample(
        images,
        grid.expand(len(images), -1, -1, -1),
        mode="bilinear",
        padding_mode=padding,
        align_corners=False,
    )


def _spaced(most: float, count: int) -> list[float]:
    return [0.0] if count == 1 or most == 0 else [-most + 2 * most * k / (count - 1) for k in range(count)]
