"""Transforms that blur: evenly, along a line, and away from a focus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from mycelia.attacks.filters import blurred
from mycelia.attacks.transforms.base import Images, Transform
from mycelia.attacks.transforms.sampling import filtered, line, middle

__all__ = ["GaussianBlur", "GradientBlur", "MotionBlur"]

_FAR: Final = 1000.0  # pixels; a kernel beyond that only fills the memory
_LEVELS: Final = 8


@dataclass(frozen=True)
class GaussianBlur(Transform):
    """Blurred evenly.

    Attributes:
        sigma: standard deviation, in pixels.
    """

    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"sigma": (0.0, _FAR)}
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"sigma": (0.3, 1.5)}
    amounts: ClassVar[tuple[str, ...]] = ("sigma",)

    sigma: float = 0.0

    def _changed(self, images: Images) -> Tensor:
        return blurred(images.x, self.sigma, "nchw", "nearest")


@dataclass(frozen=True)
class MotionBlur(Transform):
    """Blurred along a line, as by a camera that moves.

    Attributes:
        length: of the line, in pixels.
        angle: of the line, in degrees anticlockwise from the right.
    """

    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"length": (0.0, _FAR), "angle": (-360.0, 360.0)}
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"length": (1.0, 5.0), "angle": (-90.0, 90.0)}
    amounts: ClassVar[tuple[str, ...]] = ("length",)

    length: float = 0.0
    angle: float = 0.0

    def _changed(self, images: Images) -> Tensor:
        kernel = line(self.length, torch.tensor([self.angle], dtype=torch.float64))[0]
        return filtered(images.x, kernel)


@dataclass(frozen=True)
class GradientBlur(Transform):
    """Sharp at a focus and ever more blurred away from it.

    Between eight blurred images of evenly spaced standard deviations it is interpolated linearly.

    Attributes:
        sigma: standard deviation at the pixel farthest from the focus, in pixels.
        down: where the focus is, as a share of the height from the first row to the last.
        right: the same for columns.
    """

    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "sigma": (0.0, _FAR), "down": (0.0, 1.0), "right": (0.0, 1.0),
    }  # fmt: skip
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "sigma": (0.5, 2.5), "down": (0.0, 1.0), "right": (0.0, 1.0),
    }  # fmt: skip
    amounts: ClassVar[tuple[str, ...]] = ("sigma",)

    sigma: float = 0.0
    down: float = 0.5
    right: float = 0.5

    def _changed(self, images: Images) -> Tensor:
        height, width = images.size
        i, j = middle(height, width)
        far = torch.hypot(i - (self.down - 0.5) * (height - 1), j - (self.right - 0.5) * (width - 1))
        level = (far / far.max().clamp(min=1e-12) * _LEVELS).to(images.x)
        found = torch.zeros_like(images.x)
        for k in range(_LEVELS + 1):
            even = blurred(images.x, self.sigma * k / _LEVELS, "nchw", "nearest")
            found += even * (1 - (level - k).abs()).clamp(min=0)
        return found
