"""Gaussian noise in floating point: fast, and open to attacks on its last bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from mycelia.privacy.noise.base import check_scale, check_total
from mycelia.privacy.noise.source import NoiseSource, Stream

__all__ = ["Gaussian", "normal"]

# The scratch of a block stays in the level-2 cache, and no operation on half of one is split over threads.
_BLOCK = 1 << 16
_INTEGERS: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype("<i4"), torch.float64: np.dtype("<i8")}


@dataclass(frozen=True)
class Gaussian:
    """Gaussian noise by the transform of Box and Muller (Ann. Math. Stat. 29, 1958) in float32 or float64.

    **Not for adversaries who see the output exactly.** Floating-point noise leaves holes between the values
    it can take, and which holes depends on the total (Mironov, CCS 2012); the accounting is that of real
    numbers. The release of a deployment is noised by `DiscreteGaussian`. In float32 no draw is beyond 6.67
    standard deviations (probability 3e-11 each), in float64 none beyond 8.66 (5e-18).
    """

    name: ClassVar[str] = "gaussian"
    norm: ClassVar[Literal["l1", "l2"]] = "l2"

    def sample(
        self,
        shape: int | Sequence[int],
        std: float,
        source: NoiseSource,
        purpose: str,
        step: int,
        tensor: str = "",
        *,
        bound: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Noise N(0, std²) on the CPU, in float32 or float64; see `Mechanism.sample`. `bound` is not used."""
        check_scale(std, self.name)
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        if std == 0:
            return torch.zeros(size, dtype=dtype)
        out = normal(math.prod(size), source.generator(purpose, step, tensor), dtype)
        return out.mul_(std).view(size)

    def add(
        self,
        total: Tensor,
        std: float,
        source: NoiseSource,
        purpose: str,
        step: int,
        tensor: str = "",
        *,
        bound: float = 1.0,
    ) -> Tensor:
        """See `Mechanism.add`."""
        check_total(total, self.name)
        noise = self.sample(total.shape, std, source, purpose, step, tensor, dtype=total.dtype)
        return noise.to(total.device).add_(total)

    def add_drawn(self, total: Tensor, noise: Tensor, *, bound: float = 1.0) -> Tensor:
        """The total plus noise that was drawn before, in the total's dtype and on its device.

        Args:
            total: float32 or float64, any shape.
            noise: of the same shape.
            bound: not used.

        Raises:
            ConfigError: the total has another dtype.
        """
        check_total(total, self.name)
        return total + noise.to(total)

    def slack(self, bound: float, size: int) -> float:
        """0: nothing is rounded to a grid."""
        return 0.0


def normal(size: int, stream: Stream, dtype: torch.dtype) -> Tensor:
    """Standard normal draws, float32 or float64 [size], from 32 or 64 bits each."""
    out = torch.empty(size, dtype=dtype)
    bits = 8 * _INTEGERS[dtype].itemsize
    most = min(_BLOCK, size + size % 2)
    raw = np.empty(most, _INTEGERS[dtype])
    scratch = torch.empty(2, (most + 1) // 2, dtype=dtype)
    for start in range(0, size, _BLOCK):
        block = out[start : start + _BLOCK]
        half = (len(block) + 1) // 2
        stream.fill(raw[: 2 * half])
        drawn = torch.from_numpy(raw[: 2 * half].astype(raw.dtype.newbyteorder("="), copy=False))
        radius, angle = scratch[:, :half]
        # The sign bit goes, so small numbers keep all their digits: they are the tail of the radius.
        radius.copy_(drawn[:half].bitwise_and_(2 ** (bits - 1) - 1)).add_(0.5).mul_(2.0 ** (1 - bits))
        radius.log_().mul_(-2).sqrt_()
        angle.copy_(drawn[half:]).mul_(math.pi * 2.0 ** (1 - bits))
        torch.cos(angle, out=block[:half]).mul_(radius)
        block[half:] = angle.sin_().mul_(radius)[: len(block) - half]
    return out
