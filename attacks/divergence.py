"""How far apart two distributions over classes are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["jensen_shannon"]


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """Jensen–Shannon divergence of two distributions in each row, natural logarithm.

    Args:
        first: logarithms of probabilities, [n, classes].
        second: the same.

    Returns:
        [n], from 0 to log 2 (Lin: "Divergence measures based on the Shannon entropy", IEEE TIT 1991).
    """
    middle = torch.logaddexp(first, second) - math.log(2)

    def towards(each: Tensor) -> Tensor:
        return torch.where(each == -torch.inf, 0.0, each.exp() * (each - middle)).sum(1)

    return ((towards(first) + towards(second)) / 2).clamp(min=0)
