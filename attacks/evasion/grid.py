"""Inputs as images of pixels, whatever their axes are, and the frequencies of such images."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mycelia.attacks.windows import Layout

__all__ = ["Grid", "cosines", "kept_frequencies"]


class Grid:
    """Inputs as [n, channels, height, width], and back.

    A flat input [n, d] is an image of one row. Of more axes than two the one after n ("nchw") or the last
    ("nhwc") is the channels; what lies beyond two further axes is taken together with the second.

    Args:
        x: [n, …]
        layout: where the channels are.
    """

    def __init__(self, x: Tensor, layout: Layout) -> None:
        self._last = layout == "nhwc" and x.dim() > 2
        self._shape = list((x.movedim(-1, 1) if self._last else x).shape[1:])
        flat = len(self._shape) == 1
        self.channels, sides = (1, self._shape) if flat else (self._shape[0], self._shape[1:])
        self.height = sides[0] if len(sides) > 1 else 1
        self.width = math.prod(sides[1:]) if len(sides) > 1 else math.prod(sides)

    def of(self, x: Tensor) -> Tensor:
        """Inputs as [n, channels, height, width]."""
        moved = x.movedim(-1, 1) if self._last else x
        return moved.reshape(len(x), self.channels, self.height, self.width)

    def back(self, images: Tensor) -> Tensor:
        """[n, …], as the inputs are."""
        found = images.reshape(len(images), *self._shape)
        return found.movedim(1, -1).contiguous() if self._last else found


def cosines(size: int, like: Tensor) -> Tensor:
    """The orthonormal basis of the discrete cosine transform (type II), [size, size]: a vector in each row.

    >>> bool(torch.allclose(cosines(4, torch.ones(1)) @ cosines(4, torch.ones(1)).T, torch.eye(4), atol=1e-6))
    True

    Args:
        size: at least 1.
        like: gives dtype and device.
    """
    place = torch.arange(size, dtype=torch.float64, device=like.device)
    found = torch.cos(math.pi / size * (place + 0.5) * place[:, None]) * math.sqrt(2 / size)
    found[0] = math.sqrt(1 / size)
    return found.to(like.dtype)


def kept_frequencies(size: int, share: float) -> int:
    """How many of the lowest frequencies of an axis are this share of them: at least one.

    >>> kept_frequencies(28, 1 / 8), kept_frequencies(1, 1 / 8)
    (4, 1)
    """
    return min(size, max(1, math.ceil(size * share - 1e-9)))
