"""Smooth images, such as natural transforms are made for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["smooth"]


def smooth(n: int = 4, channels: int = 3, size: tuple[int, int] = (32, 32), seed: int = 0) -> Tensor:
    """Coarse random fields, interpolated, with a little fine structure; float64 in (0, 1)."""
    draw = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, channels, 5, 5, dtype=torch.float64, generator=draw)
    fine = torch.rand(n, channels, *size, dtype=torch.float64, generator=draw)
    field = functional.interpolate(coarse, size, mode="bicubic", align_corners=False).clamp(0.02, 0.98)
    return 0.9 * field + 0.1 * fine
