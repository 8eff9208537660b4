"""Transforms of values: contrast, light, and noise of five kinds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from mycelia.attacks.transforms.base import Images, Transform, finite_width
from mycelia.attacks.transforms.sampling import middle

__all__ = ["Contrast", "GaussianNoise", "GradientLuminance", "NaturalNoise", "SaltAndPepper", "UniformNoise"]

_ANY = 1e9  # larger than any setting that means something


@dataclass(frozen=True)
class Contrast(Transform):
    """Values drawn towards, or away from, the mean of the image.

    >>> Contrast(0.5).apply(torch.tensor([[[[0.0, 1.0]]]]), layout="nchw")
    tensor([[[[0.2500, 0.7500]]]])

    Attributes:
        factor: of a value's distance to the mean over all pixels and channels; 1: as it is, 0: flat.
    """

    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"factor": (0.0, _ANY)}
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"factor": (0.5, 1.5)}
    amounts: ClassVar[tuple[str, ...]] = ("factor",)

    factor: float = 1.0

    def _changed(self, images: Images) -> Tensor:
        mean = images.x.mean((1, 2, 3), keepdim=True)
        return mean + self.factor * (images.x - mean)


@dataclass(frozen=True)
class GradientLuminance(Transform):
    """Light, or shade, that is strongest at one place and falls off linearly.

    Attributes:
        change: of a value where it is strongest, in units of the inputs; negative: darker.
        down: where that is, as a share of the height from the first row to the last.
        right: the same for columns.
        scope: how far from there nothing is left: a share of the diagonal for a circle, of the height for
            "rows" (each row is lit evenly), of the width for "columns".
        pattern: "circle", "rows" or "columns".
    """

    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "change": (-_ANY, _ANY), "down": (0.0, 1.0), "right": (0.0, 1.0), "scope": (1e-6, _ANY),
    }  # fmt: skip
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "change": (-0.4, 0.4), "down": (0.0, 1.0), "right": (0.0, 1.0), "scope": (0.3, 1.0),
    }  # fmt: skip
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"pattern": ("circle", "rows", "columns")}
    amounts: ClassVar[tuple[str, ...]] = ("change",)
    raw: ClassVar[tuple[str, ...]] = ("change",)

    change: float = 0.0
    down: float = 0.5
    right: float = 0.5
    scope: float = 0.5
    pattern: Literal["circle", "rows", "columns"] = "circle"

    def _changed(self, images: Images) -> Tensor:
        height, width = images.size
        i, j = middle(height, width)
        i, j = i - (self.down - 0.5) * (height - 1), j - (self.right - 0.5) * (width - 1)
        if self.pattern == "circle":
            far = torch.hypot(i, j) / math.hypot(height, width)
        else:
            far = (i.abs() / height if self.pattern == "rows" else j.abs() / width).expand(height, width)
        return images.x + self.change * (1 - far / self.scope).clamp(min=0).to(images.x)


@dataclass(frozen=True)
class UniformNoise(Transform):
    """Noise from −size to size on every value.

    Attributes:
        size: in units of the inputs.
    """

    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"size": (0.0, _ANY)}
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"size": (0.02, 0.2)}
    amounts: ClassVar[tuple[str, ...]] = ("size",)
    raw: ClassVar[tuple[str, ...]] = ("size",)

    size: float = 0.0

    def _changed(self, images: Images) -> Tensor:
        noise = 2 * images.draws.uniform("noise", images.x.shape[1:]) - 1
        return images.x + (self.size * noise).to(images.x)


@dataclass(frozen=True)
class GaussianNoise(Transform):
    """Normal noise on every value.

    Attributes:
        sigma: standard deviation, in units of the inputs.
    """

    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"sigma": (0.0, _ANY)}
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"sigma": (0.01, 0.1)}
    amounts: ClassVar[tuple[str, ...]] = ("sigma",)
    raw: ClassVar[tuple[str, ...]] = ("sigma",)

    sigma: float = 0.0

    def _changed(self, images: Images) -> Tensor:
        return images.x + (self.sigma * images.draws.normal("noise", images.x.shape[1:])).to(images.x)


@dataclass(frozen=True)
class SaltAndPepper(Transform):
    """Pixels at their smallest or largest value, all channels of one together.

    Attributes:
        share: how likely a pixel is; one half of them go either way.
    """

    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"share": (0.0, 1.0)}
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"share": (0.005, 0.1)}
    amounts: ClassVar[tuple[str, ...]] = ("share",)

    share: float = 0.0

    def _changed(self, images: Images) -> Tensor:
        finite_width(images, type(self).__name__)
        chance = images.draws.uniform("pixels", (1, *images.size))
        salt = images.draws.signs("salt", (1, *images.size)) > 0
        return torch.where(chance < self.share, torch.where(salt, images.high, images.low), images.x)


@dataclass(frozen=True)
class NaturalNoise(Transform):
    """Spots, such as dirt leaves them: rectangles of one colour at random places.

    Attributes:
        share: how likely a pixel is to be the middle of one.
        height: of each, in pixels, an integer.
        width: of each, in pixels, an integer.
    """

    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "share": (0.0, 1.0), "height": (1, 10**6), "width": (1, 10**6),
    }  # fmt: skip
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "share": (0.002, 0.02), "height": (1, 3), "width": (1, 3),
    }  # fmt: skip
    amounts: ClassVar[tuple[str, ...]] = ("share",)

    share: float = 0.0
    height: int = 3
    width: int = 3

    def _changed(self, images: Images) -> Tensor:
        span = finite_width(images, type(self).__name__)
        n, channels = images.x.shape[:2]
        a, b = self.height, self.width
        around = (b // 2, (b - 1) // 2, a // 2, (a - 1) // 2)
        chance = images.draws.uniform("spots", (1, *images.size))
        # Where spots overlap, the one with the highest rank lies on top.
        rank = functional.pad(torch.where(chance < self.share, 1 - chance, 0.0), around)
        top, which = functional.max_pool2d(rank, (a, b), stride=1, return_indices=True)
        colours = functional.pad(images.draws.uniform("colours", (channels, *images.size)), around)
        chosen = colours.flatten(2).gather(2, which.flatten(2).expand(n, channels, -1)).view_as(images.x)
        return torch.where(top > 0, images.low + span * chosen.to(span), images.x)
