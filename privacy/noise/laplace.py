"""Laplace noise on an integer grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from mycelia.privacy.noise.base import check_scale
from mycelia.privacy.noise.grid import GridNoise
from mycelia.privacy.noise.lattice import lattice
from mycelia.privacy.noise.source import Stream

__all__ = ["Laplace"]


@dataclass(frozen=True)
class Laplace(GridNoise):
    """Exact discrete Laplace noise, P(x) ~ exp(-|x| / scale) on the multiples of a grid step.

    Gives epsilon = sensitivity / scale with delta = 0, where the sensitivity is in **L1** and includes
    `slack`: two shifts of the law by integers differ by exactly that factor (Ghosh, Roughgarden &
    Sundararajan, STOC 2009), so nothing is lost to the grid. The law of Laplace noise, accounted for total
    variation or Rényi divergences, is that of the continuous one up to terms of the order (grid / scale)².

    What `sample` and `add` call `std` is the **scale** b of the law; its standard deviation is sqrt(2) b.

    Attributes:
        step: the grid step asked for, in model units; None takes 1e-9 of the clip bound. The grid in use is
            the power of two at or below it.

    Raises:
        ConfigError: the step is not positive.
    """

    name: ClassVar[str] = "laplace"
    norm: ClassVar[Literal["l1", "l2"]] = "l1"
    scale_name: ClassVar[str] = "scale"

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

    def _draw(self, size: int, spread: float, stream: Stream) -> npt.NDArray[np.int64]:
        return lattice(spread, 1).draw(size, stream)
