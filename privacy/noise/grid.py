"""Noise in integers: totals are rounded to a grid, noised there, and scaled back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError, DataError
from mycelia.privacy.noise.base import check_scale, check_total
from mycelia.privacy.noise.lattice import MAX_SPREAD
from mycelia.privacy.noise.source import NoiseSource, Stream

__all__ = ["MIN_SPREAD", "RELATIVE_STEP", "GridNoise", "add_on_grid", "check_spread", "grid_step", "to_model"]

RELATIVE_STEP = 1e-9
"""The default grid step, in clip bounds."""

MIN_SPREAD = 1000.0
"""The least scale of noise, in grid steps: privacy is then that of a continuous law to about 1e-6."""

_BLOCK = 1 << 15
_LARGEST = 2.0**52  # integers up to here, and their sums with noise, are exact in float64


def grid_step(step: float | None, bound: float, who: str) -> float:
    """The grid in use: the largest power of two that is at most `step`, by default 1e-9 of the clip bound.

    Scaling by a power of two is exact, so a total is rounded once.

    Raises:
        ConfigError: the step or the bound is not a positive number.
    """
    asked = bound * RELATIVE_STEP if step is None else step
    if not (asked > 0 and math.isfinite(asked)):
        found = f"the clip bound is {bound}" if step is None else f"the grid step is {step}"
        raise ConfigError(found, rule="finite and above 0", who=who)
    return math.ldexp(0.5, math.frexp(asked)[1])


def check_spread(spread: float, who: str, name: str = "std") -> None:
    """Refuse a scale of noise that the grid does not suit; 0 stands for no noise.

    Args:
        spread: in grid steps.
        who: for messages.
        name: what it is called.

    Raises:
        ConfigError: neither 0 nor in [1000, 2**44].
    """
    check_scale(spread, who, name)
    if spread and not MIN_SPREAD <= spread <= MAX_SPREAD:
        raise ConfigError(
            f"{name} is {spread:.3g} grid steps",
            rule=f"{MIN_SPREAD:.0f} <= {name} / grid <= 2**44",
            fix="choose another grid step",
            who=who,
        )


def to_model(noise: npt.NDArray[np.int64], grid: float) -> Tensor:
    """Noise of the grid in model units, float64 [size]."""
    return torch.from_numpy(noise).to(torch.float64).mul_(grid)


def add_on_grid(total: Tensor, grid: float, draw: Callable[[int], npt.NDArray[np.int64]], who: str) -> Tensor:
    """round(total / grid) + noise, in integers, times `grid`; in the dtype and on the device of the total.

    Args:
        total: float32 or float64, any shape.
        grid: a power of two.
        draw: gives so many integers of noise; called once.
        who: for messages.

    Raises:
        ConfigError: another dtype.
        DataError: an entry is not finite, or beyond 2**52 grid steps.
    """
    check_total(total, who)
    values = total.detach().reshape(-1).numpy(force=True)
    out = np.empty(values.shape, values.dtype)
    noise = draw(len(values))
    scratch = np.empty(min(_BLOCK, len(values)), np.float64)
    integers = np.empty(len(scratch), np.int64)
    for begin in range(0, len(values), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        scaled = scratch[: len(noise[part])]
        whole = integers[: len(scaled)]
        np.multiply(values[part], 1 / grid, out=scaled, dtype=np.float64)
        if not (scaled.max() <= _LARGEST and scaled.min() >= -_LARGEST):  # a NaN fails every comparison
            raise DataError(
                f"the total has an entry that is not finite or beyond {_LARGEST * grid:.3g}",
                rule="totals are finite and below 2**52 grid steps",
                fix="clip the contributions, or take a coarser grid",
                who=who,
            )
        np.rint(scaled, out=scaled)
        whole[:] = scaled
        whole += noise[part]
        np.multiply(whole, grid, out=scaled)
        out[part] = scaled
    return torch.from_numpy(out).view(total.shape).to(total.device)


@dataclass(frozen=True)
class GridNoise(ABC):
    """What mechanisms on a grid share; subclasses draw the integers.

    Attributes:
        step: the grid step asked for, in model units; None takes 1e-9 of the clip bound. The grid in use is
            the power of two at or below it.

    Raises:
        ConfigError: the step is not positive.
    """

    step: float | None = None
    name: ClassVar[str]
    scale_name: ClassVar[str] = "std"

    def __post_init__(self) -> None:
        grid_step(self.step, 1.0, self.name)

    def grid(self, bound: float) -> float:
        """The grid step in use, a power of two in model units, for this clip bound."""
        return grid_step(self.step, bound, self.name)

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
        """Noise alone, float64, multiples of the grid; `add` also rounds the total, which safety needs.

        See `Mechanism.sample`; `std` is 0, or from 1000 to 2**44 grid steps. Laplace noise takes its scale
        there.
        """
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        grid = self.grid(bound)
        noise = self._drawn(math.prod(size), std / grid, source, (purpose, step, tensor))
        return to_model(noise, grid).view(size)

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
        """The rounded total plus noise; see `Mechanism.add`. A total is refused beyond 2**52 grid steps."""
        grid = self.grid(bound)
        name = (purpose, step, tensor)
        return add_on_grid(total, grid, lambda size: self._drawn(size, std / grid, source, name), self.name)

    def _drawn(
        self, size: int, spread: float, source: NoiseSource, name: tuple[str, int, str]
    ) -> npt.NDArray[np.int64]:
        check_spread(spread, self.name, self.scale_name)
        return self._draw(size, spread, source.generator(*name)) if spread else np.zeros(size, np.int64)

    @abstractmethod
    def _draw(self, size: int, spread: float, stream: Stream) -> npt.NDArray[np.int64]:
        """Integers of the mechanism's law, int64 [size]; `spread` is the scale in grid steps, above 0."""
