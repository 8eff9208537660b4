"""Laplace noise on an integer grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mycelia.privacy.noise.base import check_scale
from mycelia.privacy.noise.grid import add_on_grid, check_spread, grid_step, to_model
from mycelia.privacy.noise.lattice import lattice
from mycelia.privacy.noise.source import NoiseSource

__all__ = ["Laplace"]


@dataclass(frozen=True)
class Laplace:
    """Exact discrete Laplace noise, P(x) ~ exp(-|x| / scale) on the multiples of a grid step.

    Gives epsilon = sensitivity / scale with delta = 0, where the sensitivity is in **L1** and includes
    `slack`: two shifts of the law by integers differ by exactly that factor (Ghosh, Roughgarden &
    Sundararajan, STOC 2009), so nothing is lost to the grid. The law of Laplace noise, accounted for total
    variation or Rényi divergences, is that of the continuous one up to terms of the order (grid / scale)².

    Attributes:
        step: the grid step asked for, in model units; None takes 1e-9 of the clip bound. The grid in use is
            the power of two at or below it.

    Raises:
        ConfigError: the step is not positive.
    """

    step: float | None = None
    name: ClassVar[str] = "laplace"
    norm: ClassVar[Literal["l1", "l2"]] = "l1"

    def __post_init__(self) -> None:
        grid_step(self.step, 1.0, self.name)

    def grid(self, bound: float) -> float:
        """The grid step in use, a power of two in model units, for this clip bound."""
        return grid_step(self.step, bound, self.name)

    def slack(self, bound: float, size: int) -> float:
        """The grid step times `size`: rounding moves two neighbouring totals apart by no more, in L1."""
        return size * self.grid(bound)

    @staticmethod
    def epsilon(scale: float, sensitivity: float) -> float:
        """The sensitivity over the scale: pure differential privacy; infinite without noise.

        Args:
            scale: of the noise, in model units, at least 0.
            sensitivity: in L1 and model units, slack included; at least 0.

        Raises:
            ConfigError: a value out of range.
        """
        check_scale(scale, Laplace.name, "scale")
        check_scale(sensitivity, Laplace.name, "sensitivity")
        if sensitivity == 0:
            return 0.0
        return sensitivity / scale if scale > 0 else math.inf

    def sample(
        self,
        shape: int | Sequence[int],
        std: float,
        source: NoiseSource,
        purpose: str,
        step: int,
        tensor: str = "",
        *,
        bound: float = 1.0,
    ) -> Tensor:
        """Noise alone, float64, multiples of the grid.

        Args:
            shape: of the noise.
            std: the **scale** b of the law, in model units (its standard deviation is sqrt(2) b): 0, or
                from 1000 to 2**44 grid steps.
            source: the secret.
            purpose: name of the stream, as are `step` and `tensor`.
            step: the step.
            tensor: the tensor.
            bound: the clip bound; sets the default grid.

        Raises:
            ConfigError: the scale is out of range.
        """
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        grid = self.grid(bound)
        return to_model(_draw(math.prod(size), std / grid, source, (purpose, step, tensor)), grid).view(size)

    def add(
        self,
        total: Tensor,
        std: float,
        source: NoiseSource,
        purpose: str,
        step: int,
        tensor: str = "",
        *,
        bound: float = 1.0,
    ) -> Tensor:
        """The rounded total plus noise of scale `std`, in the total's dtype and on its device.

        Raises:
            ConfigError: the scale is out of range, or the total has another dtype.
            DataError: the total is not finite, or beyond 2**52 grid steps.
        """
        grid = self.grid(bound)
        name = (purpose, step, tensor)
        return add_on_grid(total, grid, lambda size: _draw(size, std / grid, source, name), self.name)


def _draw(size: int, spread: float, source: NoiseSource, name: tuple[str, int, str]) -> npt.NDArray[np.int64]:
    check_spread(spread, Laplace.name, "scale")
    if spread == 0:
        return np.zeros(size, np.int64)
    return lattice(spread, 1).draw(size, source.generator(*name))
