"""Banded strategies: a gradient is correlated with the b - 1 that follow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.privacy.factorisation.base import Draw
from mycelia.privacy.factorisation.toeplitz import SqrtToeplitz, Toeplitz

__all__ = ["Banded"]


@dataclass(frozen=True)
class Banded(Toeplitz):
    """b coefficients, then zeros (Choquette-Choo et al., NeurIPS 2023; Toeplitz as in McKenna, ICLR 2025).

    Participations at least b steps apart do not overlap, so their squared sensitivities add; and within b
    steps sampling amplifies (`CyclicPoisson`). Choose b by the noise after calibration, never by `error`
    alone.

    Attributes:
        bands: b, at least 1.
        band: the coefficients, 1 first, falling, at least 0; by default those of the square root, cut off.
            `optimise` finds better ones.

    Raises:
        ConfigError: the number of coefficients is not b, or they rise or are negative.
    """

    bands: int
    band: tuple[float, ...] = ()
    name: ClassVar[str] = "banded"
    limits: ClassVar[tuple[float | None, float | None]] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.bands < 1:
            raise ConfigError(f"bands is {self.bands}", rule="bands >= 1", who=self.name)
        band = self.band or tuple(SqrtToeplitz().coefficients(self.bands).tolist())
        object.__setattr__(self, "band", band)
        falling = all(next_ <= last for last, next_ in pairwise(band))
        if len(band) != self.bands or band[0] != 1 or not falling or not band[-1] >= 0:
            raise ConfigError(
                f"{len(band)} coefficients, {band[0]} first and {band[-1]} last",
                rule=f"{self.bands} coefficients, 1 first, never rising, at least 0",
                who=self.name,
            )

    def coefficients(self, steps: int) -> Tensor:
        """The band, then zeros, float64 [steps]."""
        result = torch.zeros(steps, dtype=torch.float64)
        kept = min(steps, self.bands)
        result[:kept] = torch.tensor(self.band[:kept], dtype=torch.float64)
        return result

    def slots(self, steps: int) -> int:
        """The b - 1 last noises, or as many as there are steps."""
        return min(self.bands, steps) - 1

    def advance(self, step: int, slots: Tensor, draw: Draw) -> Tensor:
        """y[t] = z[t] - Σ c[i] y[t - i], the last b - 1 of them kept in turn."""
        noise = draw(step, "")
        size = len(slots)
        if size:
            weights = torch.zeros(size, dtype=slots.dtype)
            for back in range(1, min(step, size) + 1):
                weights[(step - back) % size] = self.band[back]
            noise = noise - torch.tensordot(weights, slots, 1)
            slots[step % size] = noise
        return noise

    def start(self, steps: int) -> Tensor:
        """Where `optimise` begins: the square root's coefficients after the first, float64 [b - 1]."""
        return SqrtToeplitz().coefficients(min(self.bands, steps))[1:]

    def unfold(self, parameters: Tensor, steps: int) -> Tensor:
        """Coefficients, float64 [steps], of the parameters that `optimise` moves; differentiable."""
        return torch.nn.functional.pad(parameters, (1, steps - 1 - len(parameters))).index_fill(
            0, torch.tensor([0]), 1.0
        )

    def fitted(self, parameters: Tensor) -> Banded:
        """The strategy of those parameters, each lowered to the one before where it rises."""
        band = torch.cat([torch.ones(1, dtype=torch.float64), parameters]).cummin(0).values
        return replace(self, bands=len(band), band=tuple(band.tolist()))
