"""What all noise mechanisms have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.privacy.noise.source import NoiseSource

__all__ = ["Mechanism", "check_scale", "check_total"]


class Mechanism(Protocol):
    """Adds noise to a total; frozen.

    Attributes:
        name: for ledgers and reports.
        norm: the norm in which the total's sensitivity is bounded.
    """

    @property
    def name(self) -> str:
        """For ledgers and reports."""
        ...

    @property
    def norm(self) -> Literal["l1", "l2"]:
        """The norm in which the total's sensitivity is bounded."""
        ...

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
        """Noise alone; the same names give the same noise.

        Args:
            shape: of the noise.
            std: its standard deviation in model units, or what the mechanism takes in its place; at least 0.
            source: the secret.
            purpose: name of the stream, as are `step` and `tensor`.
            step: the step.
            tensor: the tensor.
            bound: the clip bound, from which a mechanism may take its grid.

        Raises:
            ConfigError: `std` is out of range.
        """
        ...

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
        """The total with the noise of `sample`, in the total's dtype and on its device.

        Args:
            total: any shape; float32 or float64 unless the mechanism says otherwise.
            std: as for `sample`; so are the others.
            source: the secret.
            purpose: name of the stream.
            step: the step.
            tensor: the tensor.
            bound: the clip bound.

        Raises:
            ConfigError: `std` is out of range, or the total has another dtype.
            DataError: the total does not fit a grid: it is not finite, or too large.
        """
        ...

    def slack(self, bound: float, size: int) -> float:
        """What the mechanism's own rounding adds to the sensitivity `bound` of `size` entries."""
        ...


def check_scale(value: float, who: str, name: str = "std") -> None:
    """Refuse a noise scale outside [0, inf); 0 stands for no noise and no privacy.

    Raises:
        ConfigError: negative, infinite or NaN.
    """
    if not (value >= 0 and math.isfinite(value)):
        raise ConfigError(f"{name} is {value}", rule=f"{name} is finite and at least 0", who=who)


def check_total(total: Tensor, who: str) -> None:
    """Refuse a total that noise cannot be added to.

    Raises:
        ConfigError: neither float32 nor float64.
    """
    if total.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"the total is {total.dtype}",
            rule="totals are summed and noised in float32 or float64",
            fix="call .float()",
            who=who,
        )
