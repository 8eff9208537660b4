"""Discrete Gaussian noise on an integer grid: the safe mode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.privacy.noise.gaussian import normal
from mycelia.privacy.noise.grid import GridNoise, add_on_grid
from mycelia.privacy.noise.lattice import lattice
from mycelia.privacy.noise.source import Stream

__all__ = ["DiscreteGaussian"]


@dataclass(frozen=True)
class DiscreteGaussian(GridNoise):
    """Gaussian noise in integers: the total is rounded to a grid, the noise is added there, then scaled.

    What is released is an integer times the grid step, so its last bits say nothing that the law of the noise
    does not say (Canonne, Kamath & Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020).

    It is accounted as Gaussian noise of the same std on a total whose sensitivity is larger by `slack`. For
    zero-concentrated privacy that is a theorem (their theorem 4). A privacy loss distribution of the discrete
    law differs from the Gaussian one by terms of the order (grid / std)²: the std has to be at least 1000
    grid steps, so below 1e-6 relative, and at the default grid it is about 1e-18.

    Attributes:
        step: the grid step asked for, in model units; None takes 1e-9 of the clip bound. The grid in use is
            the power of two at or below it.
        sampler: "exact" draws from the discrete Gaussian itself (see `noise.lattice`); "rounded" draws
            float64 Gaussians and rounds them to the grid. Since the total is on the grid already, the second
            is a rounding of the Gaussian mechanism after the fact; its law is that of float64 arithmetic.

    Raises:
        ConfigError: another sampler, or a step that is not positive.
    """

    sampler: Literal["exact", "rounded"] = "exact"
    name: ClassVar[str] = "discrete-gaussian"
    norm: ClassVar[Literal["l1", "l2"]] = "l2"

    def __post_init__(self) -> None:
        if self.sampler not in ("exact", "rounded"):
            raise ConfigError(f"the sampler is {self.sampler!r}", rule="exact or rounded", who=self.name)
        super().__post_init__()

    def add_drawn(self, total: Tensor, noise: Tensor, *, bound: float = 1.0) -> Tensor:
        """The total plus noise that was drawn before, both rounded to the grid and added in integers.

        Args:
            total: float32 or float64, any shape.
            noise: of the same shape; float64, so that its own grain is far below the grid.
            bound: the clip bound; sets the default grid.

        Raises:
            ConfigError: the total has another dtype.
            DataError: the total is not finite, or beyond 2**52 grid steps.
        """
        grid = self.grid(bound)
        drawn = noise.detach().reshape(-1).numpy(force=True)
        return add_on_grid(total, grid, lambda _: np.rint(drawn / grid).astype(np.int64), self.name)

    def slack(self, bound: float, size: int) -> float:
        """sqrt(size) * grid: rounding moves two neighbouring totals apart by no more, in L2."""
        return math.sqrt(size) * self.grid(bound)

    def _draw(self, size: int, spread: float, stream: Stream) -> npt.NDArray[np.int64]:
        if self.sampler == "exact":
            return lattice(spread, 2).draw(size, stream)
        drawn = normal(size, stream, torch.float64).mul_(spread).round_().to(torch.int64)
        return drawn.numpy()
