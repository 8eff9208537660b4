"""Images read between their pixels, and blurred: what transforms and corruptions are made of.

Images are [n, channels, height, width]; outside a blurred image lies its nearest pixel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from mycelia.attacks.evasion.spatial import Padding

__all__ = ["disk", "filtered", "line", "middle", "sampled"]

_PER_PIXEL = 16  # points of a line, and of each side of a pixel of a disk


def middle(height: int, width: int) -> tuple[Tensor, Tensor]:
    """How far each line of pixels lies below, and right of, the middle: float64 [height, 1], [1, width]."""
    down = torch.arange(height, dtype=torch.float64) - (height - 1) / 2
    right = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    return down[:, None], right[None, :]


def sampled(images: Tensor, down: Tensor, right: Tensor, padding: Padding = "zeros") -> Tensor:
    """The images at other places, bilinear.

    Args:
        images: [n, channels, height, width].
        down: rows from the middle at which a pixel of the result is read; broadcasts to [n, height, width].
        right: the same for columns.
        padding: what lies outside: zeros, the nearest pixel, or the mirrored image.
    """
    height, width = images.shape[2:]
    shape = (len(images), height, width)
    # grid_sample counts from −1 to 1 over the outer edges of the pixels.
    grid = torch.stack([(right * (2 / width)).expand(shape), (down * (2 / height)).expand(shape)], 3)
    return functional.grid_sample(
        images, grid.to(images), mode="bilinear", padding_mode=padding, align_corners=False
    )


def filtered(images: Tensor, kernel: Tensor) -> Tensor:
    """Each channel by itself convolved with a kernel.

    Args:
        images: [n, channels, height, width].
        kernel: [a, b], or one for each image [n, a, b]; odd a, b.
    """
    n, channels, height, width = images.shape
    a, b = kernel.shape[-2:]
    wide = functional.pad(images, (b // 2, b // 2, a // 2, a // 2), mode="replicate")
    turned = kernel.to(images).flip(-1, -2).expand(n, a, b).repeat_interleave(channels, 0)[:, None]
    found = functional.conv2d(wide.reshape(1, n * channels, *wide.shape[2:]), turned, groups=n * channels)
    return found.reshape(n, channels, height, width)


def line(length: float, degrees: Tensor) -> Tensor:
    """Kernels of a line through the middle, each of its points shared among the four pixels around it.

    Args:
        length: in pixels, above 0.
        degrees: anticlockwise from the right, [n].

    Returns:
        float64 [n, k, k], each of sum 1.
    """
    radius, count = math.ceil(length / 2), max(1, math.ceil(_PER_PIXEL * length))
    along = ((torch.arange(count, dtype=torch.float64, device=degrees.device) + 0.5) / count - 0.5) * length
    angle = torch.deg2rad(degrees.double())[:, None]
    places = torch.arange(-radius, radius + 1, dtype=torch.float64, device=degrees.device)
    across = (1 - (places - (torch.cos(angle) * along)[..., None]).abs()).clamp(min=0)  # [n, count, k]
    down = (1 - (places + (torch.sin(angle) * along)[..., None]).abs()).clamp(min=0)
    return torch.einsum("nta,ntb->nab", down, across) / count


def disk(radius: float) -> Tensor:
    """The kernel of a disk: each pixel has the share of its area that lies inside; float64 [k, k], sum 1.

    Args:
        radius: in pixels, above 0.
    """
    reach = max(1, math.ceil(radius - 0.5))
    side = (torch.arange((2 * reach + 1) * _PER_PIXEL, dtype=torch.float64) + 0.5) / _PER_PIXEL - reach - 0.5
    inside = (side[:, None] ** 2 + side[None, :] ** 2 <= radius**2).double()
    found = functional.avg_pool2d(inside[None, None], _PER_PIXEL)[0, 0]
    return found / found.sum()
