"""Input transforms: fewer bits, medians, JPEG, thermometer codes, random sizes and places, noise.

Image axes are never guessed: `layout` says where they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mycelia.attacks.defences.stages import Stage
from mycelia.attacks.draws import Draws
from mycelia.attacks.evasion.diversity import placed
from mycelia.attacks.filters import jpeg, median_filter
from mycelia.attacks.windows import Layout, as_nchw, check_layout
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["JPEG", "BitDepth", "GaussianNoise", "MedianFilter", "ResizePad", "Thermometer"]


@dataclass(frozen=True)
class BitDepth(Stage):
    """Values rounded to 2^bits levels (Xu, Evans, Qi: "Feature squeezing", NDSS 2018).

    Attributes:
        bits: 1 to 16.
        bounds: smallest and largest value; levels are evenly spaced with both ends.
    """

    bits: int = 4
    bounds: tuple[float, float] = (0.0, 1.0)

    def check(self) -> None:
        """See `Stage.check`."""
        if not 1 <= self.bits <= 16:
            raise ConfigError(f"bits {self.bits}", rule="1 to 16", who="BitDepth")
        check_bounds(self.bounds, "BitDepth")

    @property
    def differentiable(self) -> bool:
        """A staircase is not."""
        return False

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        """See `Stage.__call__`."""
        del draws
        low, high = self.bounds
        top = 2**self.bits - 1
        level = ((x.clamp(low, high) - low) * (top / (high - low))).round()
        found: Tensor = low + level * ((high - low) / top)
        return found


@dataclass(frozen=True)
class MedianFilter(Stage):
    """Each pixel becomes the median of a square around it, each channel by itself (Xu et al., as above).

    Attributes:
        size: of the square, at least 1; see `mycelia.attacks.filters.median_filter`.
        layout: of the images.
    """

    size: int = 3
    layout: Layout | None = None

    def check(self) -> None:
        """See `Stage.check`."""
        if self.size < 1:
            raise ConfigError(f"size {self.size}", rule="at least 1", who="MedianFilter")
        check_layout(self.layout, "MedianFilter")

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        """See `Stage.__call__`."""
        del draws
        return median_filter(x, self.size, self.layout)


@dataclass(frozen=True)
class JPEG(Stage):
    """Images compressed and read again, by Pillow (Dziugaite, Ghahramani, Roy, arXiv:1608.00853).

    Attributes:
        quality: 1 to 100.
        bounds: smallest and largest value; between them lie 256 levels.
        layout: of the images, of one or three channels.
    """

    quality: int = 75
    bounds: tuple[float, float] = (0.0, 1.0)
    layout: Layout | None = None

    def check(self) -> None:
        """See `Stage.check`."""
        if not 1 <= self.quality <= 100:
            raise ConfigError(f"quality {self.quality}", rule="1 to 100", who="JPEG")
        check_bounds(self.bounds, "JPEG")
        check_layout(self.layout, "JPEG")

    @property
    def differentiable(self) -> bool:
        """Rounding is not."""
        return False

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        """See `Stage.__call__`.

        Raises:
            ConfigError: Pillow is not installed.
            DataError: other than one or three channels.
        """
        del draws
        channels = as_nchw(x, self.layout, "JPEG").shape[1]
        if channels not in (1, 3):
            raise DataError(f"{channels} channels", rule="one or three", who="JPEG")
        return jpeg(x, self.quality, self.layout, bounds=self.bounds)


@dataclass(frozen=True)
class Thermometer(Stage):
    """Each value becomes `levels` numbers, 1 as far up as the value reaches and 0 above.

    Number k of levels is 1 where x > low + k/levels · width, k = 0 … levels − 1 (Buckman, Roy, Raffel,
    Goodfellow: "Thermometer encoding", ICLR 2018). The surrogate is that of Athalye et al. (2018, section
    5.2.1): min(max(x − k/levels, 0), 1) in units of the width.

    Attributes:
        levels: at least 2.
        axis: of the inputs, not that of the rows; it becomes `levels` times as long, the levels of a value
            one after another.
        bounds: smallest and largest value.
    """

    levels: int = 16
    axis: int = 1
    bounds: tuple[float, float] = (0.0, 1.0)

    def check(self) -> None:
        """See `Stage.check`."""
        if self.levels < 2 or self.axis < 1:
            raise ConfigError(
                f"levels {self.levels}, axis {self.axis}",
                rule="at least 2 levels; axis 0 is that of the rows",
                who="Thermometer",
            )
        check_bounds(self.bounds, "Thermometer")

    @property
    def differentiable(self) -> bool:
        """A step is not."""
        return False

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        """See `Stage.__call__`."""
        del draws
        return (self._above(x) > 0).to(x.dtype).flatten(self.axis, self.axis + 1)

    def smooth(self, x: Tensor) -> Tensor:
        """See `Stage.smooth`."""
        return self._above(x).clamp(0, 1).flatten(self.axis, self.axis + 1)

    def _above(self, x: Tensor) -> Tensor:
        if self.axis >= x.dim():
            raise DataError(
                f"x of shape {list(x.shape)}", rule=f"it has an axis {self.axis}", who="Thermometer"
            )
        low, high = self.bounds
        level = torch.arange(self.levels, dtype=x.dtype, device=x.device) / self.levels
        level = level.view(-1, *[1] * (x.dim() - self.axis - 1))
        return ((x - low) / (high - low)).unsqueeze(self.axis + 1) - level


@dataclass(frozen=True)
class ResizePad(Stage):
    """Images made smaller by chance and put on black (Xie, Wang, Zhang, Ren, Yuille: ICLR 2018).

    The size of the canvas stays, as most models take one size only.

    Attributes:
        smallest: share of its height that an image has at least, in (0, 1).
        layout: of the images.
    """

    smallest: float = 0.9
    layout: Layout | None = None

    def check(self) -> None:
        """See `Stage.check`."""
        if not 0 < self.smallest < 1:
            raise ConfigError(f"smallest {self.smallest}", rule="a share in (0, 1)", who="ResizePad")
        check_layout(self.layout, "ResizePad")

    @property
    def random(self) -> bool:
        """Sizes and places are drawn."""
        return True

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        """See `Stage.__call__`."""
        as_nchw(x, self.layout, "ResizePad")  # to see that it is one
        return placed(draws, x, self.layout or "nchw", self.smallest)(x)


@dataclass(frozen=True)
class GaussianNoise(Stage):
    """Normal noise on every coordinate; it is not clipped.

    Attributes:
        sigma: standard deviation in units of the inputs, at least 0.
    """

    sigma: float = 0.1

    def check(self) -> None:
        """See `Stage.check`."""
        if not 0 <= self.sigma < math.inf:
            raise ConfigError(f"sigma {self.sigma}", rule="at least 0 and finite", who="GaussianNoise")

    @property
    def random(self) -> bool:
        """The noise is."""
        return True

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        """See `Stage.__call__`."""
        return x + self.sigma * draws.normal("noise", x.shape[1:], dtype=x.dtype)


def check_bounds(bounds: tuple[float, float], who: str) -> None:
    """Refuse bounds between which nothing lies.

    Raises:
        ConfigError: they are not finite, or the lower one is not below the upper one.
    """
    low, high = bounds
    if not -math.inf < low < high < math.inf:
        raise ConfigError(f"bounds {bounds}", rule="finite, the lower one below the upper one", who=who)
