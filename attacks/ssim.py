"""Structural similarity of two images."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from mycelia.attacks.windows import Layout, as_nchw
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["ssim"]

_K1, _K2 = 0.01, 0.03  # of the paper, section III.B


def ssim(x: Tensor, y: Tensor, data_range: float, layout: Layout, window: int = 7) -> Tensor:
    """Mean structural similarity (Wang, Bovik, Sheikh, Simoncelli: IEEE TIP 2004, equations 13 and 17).

    Uniform windows that lie wholly inside the image, with unbiased variances and covariance (equations 4
    and 6); the mean over windows and channels.

    Args:
        x: images.
        y: images, as x.
        data_range: largest minus smallest value that a pixel may have, above 0 and finite.
        layout: "nchw" or "nhwc".
        window: width of a window; the largest odd number that fits where the image is smaller.

    Returns:
        float64 [n], in [−1, 1]; 1 for equal images.

    Raises:
        ConfigError: a range that is not finite and above 0, or an even window.
        DataError: two shapes, or no images.
    """
    if not 0 < data_range < math.inf or window < 1 or window % 2 == 0:
        raise ConfigError(
            f"data range {data_range}, window {window}",
            rule="a range that is finite and above 0; an odd window",
            who="ssim",
        )
    if x.shape != y.shape:
        raise DataError(f"{list(x.shape)} and {list(y.shape)}", rule="two images of one shape", who="ssim")
    first, second = (as_nchw(each, layout, "ssim").double() for each in (x, y))
    smallest = min(first.shape[2:])
    if not smallest or not first.shape[1]:
        raise DataError(f"x has shape {list(x.shape)}", rule="at least one pixel", who="ssim")
    window = min(window, smallest - (smallest + 1) % 2)
    if not len(first):
        return torch.zeros(0, dtype=torch.float64, device=x.device)

    def mean(values: Tensor) -> Tensor:
        return functional.avg_pool2d(values, window, stride=1)

    unbiased = window**2 / max(1, window**2 - 1)
    # Moments about a value between the images: those about 0 cancel where pixels are bright and alike.
    middle = (first.mean((2, 3), keepdim=True) + second.mean((2, 3), keepdim=True)) / 2
    u, v = first - middle, second - middle
    mean_u, mean_v = mean(u), mean(v)
    var_x = unbiased * (mean(u * u) - mean_u * mean_u)
    var_y = unbiased * (mean(v * v) - mean_v * mean_v)
    cov = unbiased * (mean(u * v) - mean_u * mean_v)
    mean_x, mean_y = mean_u + middle, mean_v + middle
    c1, c2 = (_K1 * data_range) ** 2, (_K2 * data_range) ** 2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x.square() + mean_y.square() + c1)
    found: Tensor = (luminance * (2 * cov + c2) / (var_x + var_y + c2)).mean((1, 2, 3))
    return found
