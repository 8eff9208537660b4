"""Images without their finest detail: convolved, blurred, as medians, and after JPEG."""

from __future__ import annotations

import io
import math
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mycelia.attacks.windows import Layout, around, as_nchw, bordered, from_nchw
from mycelia.engine.errors import ConfigError
from mycelia.engine.plugins import import_extra

__all__ = ["Border", "blurred", "convolved", "jpeg", "median_filter"]

Border = Literal["zeros", "nearest", "mirrored"]
"""What lies outside an image: 0, its nearest pixel, or itself in a mirror, with the outermost pixel."""

_CUT: Final = 4.0  # standard deviations at which a Gaussian ends
_COLOURS: Final = 3
_LEVELS: Final = 255


def convolved(x: Tensor, weights: Tensor, layout: Layout, border: Border = "zeros") -> Tensor:
    """Each channel convolved with weights in both axes of the image.

    Args:
        x: images.
        weights: symmetric, [size], size odd; their product with themselves is the kernel of both axes.
        layout: "nchw" or "nhwc".
        border: see `Border`.

    Returns:
        as x.
    """
    images = as_nchw(x, layout, "convolved")
    reach = len(weights) // 2
    if border == "mirrored":
        images = bordered(images, reach, reach, twice=True)
    n, c, h, w = images.shape
    flat = images.reshape(n * c, 1, h, w)
    if border == "nearest":
        flat = functional.pad(flat, [reach] * 4, mode="replicate")
    pad = reach if border == "zeros" else 0
    kernel = weights.to(x)
    flat = functional.conv2d(flat, kernel.view(1, 1, -1, 1), padding=(pad, 0))
    flat = functional.conv2d(flat, kernel.view(1, 1, 1, -1), padding=(0, pad))
    return from_nchw(flat.view(n, c, *flat.shape[2:]), layout)


def blurred(x: Tensor, sigma: float, layout: Layout, border: Border = "mirrored") -> Tensor:
    """Images after a Gaussian filter, which ends at four standard deviations.

    Args:
        x: images.
        sigma: standard deviation in pixels, at least 0; below 1/8 nothing changes.
        layout: "nchw" or "nhwc".
        border: see `Border`.

    Returns:
        as x.
    """
    if not 0 <= sigma < math.inf:
        raise ConfigError(f"sigma {sigma}", rule="at least 0 pixels, and finite", who="blurred")
    reach = int(_CUT * sigma + 0.5)
    if not reach:
        return x
    places = torch.arange(-reach, reach + 1, dtype=torch.float64, device=x.device)
    weights = (-0.5 * (places / sigma).square()).exp()
    return convolved(x, weights / weights.sum(), layout, border)


def median_filter(x: Tensor, k: int, layout: Layout | None) -> Tensor:
    """The median of k × k pixels, in each channel of each image by itself; borders are mirrored.

    Args:
        x: images.
        k: width, at least 1; an even one reaches one pixel further up and left, and of an even number of
            pixels the upper one of the two in the middle is taken, as in `scipy.ndimage.median_filter`.
        layout: "nchw" or "nhwc".

    Returns:
        as x.
    """
    windows = around(as_nchw(x, layout, "median_filter"), k, twice=True)
    return from_nchw(windows.kthvalue(k * k // 2 + 1, dim=-1).values, layout)


def jpeg(
    x: Tensor, quality: int, layout: Layout | None, *, bounds: tuple[float, float] = (0.0, 1.0)
) -> Tensor:
    """Images after JPEG, by Pillow; three channels are colours, others are grey pictures of their own.

    Args:
        x: images; what lies outside the bounds is clipped.
        quality: 1 to 100.
        layout: "nchw" or "nhwc".
        bounds: values of black and white, finite; between them lie 256 levels.

    Returns:
        as x.

    Raises:
        ConfigError: another quality, or Pillow is not installed.
    """
    if not 1 <= quality <= 100:
        raise ConfigError(f"quality {quality}", rule="1 to 100", who="jpeg")
    pillow = import_extra("PIL.Image", "image", who="jpeg")
    low, high = bounds
    images = as_nchw(x, layout, "jpeg")
    levels = ((images.double() - low) / (high - low) * _LEVELS).round().clamp(0, _LEVELS).to(torch.uint8)
    pixels = levels.permute(0, 2, 3, 1).cpu().numpy()

    def packed(picture: Any) -> Any:
        with io.BytesIO() as file:
            pillow.fromarray(np.ascontiguousarray(picture)).save(file, format="JPEG", quality=quality)
            file.seek(0)
            with pillow.open(file) as again:
                return np.asarray(again).copy()

    found = np.empty_like(pixels)
    for row, picture in enumerate(pixels):
        if pixels.shape[3] == _COLOURS:
            found[row] = packed(picture)
        else:
            for channel in range(pixels.shape[3]):
                found[row, :, :, channel] = packed(picture[:, :, channel])
    values = torch.from_numpy(found).to(x.device).permute(0, 3, 1, 2).double() / _LEVELS * (high - low) + low
    return from_nchw(values.to(x.dtype), layout)
