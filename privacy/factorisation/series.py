"""Power series to n terms: products and inverses in n log n steps."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["convolve", "correlate", "inverse"]


def convolve(first: Tensor, second: Tensor) -> Tensor:
    """The first n coefficients of a product of series, float64 [n] each."""
    size = len(first)
    padded = 1 << (2 * size - 1).bit_length()
    product = torch.fft.rfft(first, padded) * torch.fft.rfft(second, padded)
    result: Tensor = torch.fft.irfft(product, padded)[:size]
    return result


def correlate(first: Tensor, second: Tensor) -> Tensor:
    """Σ_i first[i] second[i - k] for each k, float64 [n]: the transpose of `convolve`."""
    return convolve(first.flip(0), second).flip(0)


def inverse(series: Tensor) -> Tensor:
    """The first n coefficients of 1 / series, float64 [n], by Newton's iteration g <- g (2 - f g).

    Args:
        series: float64 [n] with the first coefficient 1.
    """
    size, done = len(series), 1
    result = torch.ones(1, dtype=torch.float64)
    while done < size:
        done = min(2 * done, size)
        grown = torch.nn.functional.pad(result, (0, done - len(result)))
        error = -convolve(series[:done], grown)
        error = torch.cat([error[:1] + 2, error[1:]])
        result = convolve(grown, error)
    return result
