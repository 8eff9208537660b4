"""Small models and inputs on which the laws of attacks are fast, and how an attack stands under them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mycelia.attacks import Attack
from mycelia.attacks.norms import Norm

EPS: dict[Norm, float] = {"linf": 0.08, "l2": 0.4, "l1": 1.2, "l0": 6.0}
"""Radii that break about half of the rows of `Small`."""


class Member(NamedTuple):
    """An attack under the laws.

    Attributes:
        attack: with settings small enough for a test.
        exact: on an affine model it finds every row that can be broken.
        images: it takes images of four axes only.
    """

    attack: Attack
    exact: bool = False
    images: bool = False

    @property
    def name(self) -> str:
        """For test ids."""
        return f"{type(self.attack).__name__}-{self.attack.norm}"


class Small(nn.Module):
    """Images of one channel and 6×6 pixels, four classes; batch norm and dropout make its mode matter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 4)
        )
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


class Affine(nn.Module):
    """z = W x + b."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], len(weight), dtype=weight.dtype)
        with torch.no_grad():
            self.linear.weight.copy_(weight)
            self.linear.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x.flatten(1))
        return found


def small(dtype: torch.dtype = torch.float64) -> Small:
    """In evaluation mode, in which it is deterministic."""
    return Small().to(dtype).eval()


def images(n: int = 12, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.rand(n, 1, 6, 6, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def affine(classes: int = 4, d: int = 10, seed: int = 2) -> Affine:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, d, dtype=torch.float64, generator=draw)
    return Affine(weight, torch.randn(classes, dtype=torch.float64, generator=draw) * 0.3)
