"""Buffered linear Toeplitz strategies: long memory in a few vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.privacy.factorisation.base import Draw
from mycelia.privacy.factorisation.toeplitz import Toeplitz

__all__ = ["BLT"]


@dataclass(frozen=True)
class BLT(Toeplitz):
    """Coefficients 1, then Σ α λ^(t-1) (Dvijotham et al., FOCS 2024; McMahan, Xu & Zhang, EMNLP 2024).

    The inverse is a BLT again, so the noise needs one vector for each buffer however long the run is.

    Attributes:
        buffers: how many terms the sum has, at least 1.
        scales: α, each above 0, together at most 1, so that the coefficients fall; empty before `optimise`.
        decays: λ, each in (0, 1].

    Raises:
        ConfigError: a value out of range.
    """

    buffers: int = 4
    scales: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    name: ClassVar[str] = "blt"
    limits: ClassVar[tuple[float | None, float | None]] = (None, None)

    def __post_init__(self) -> None:
        if self.buffers < 1:
            raise ConfigError(f"buffers is {self.buffers}", rule="buffers >= 1", who=self.name)
        if not self.scales and not self.decays:
            return
        fine = len(self.scales) == len(self.decays) == self.buffers
        fine &= all(scale > 0 for scale in self.scales) and math.fsum(self.scales) <= 1 + 1e-12
        if not fine or not all(0 < decay <= 1 for decay in self.decays):
            raise ConfigError(
                f"scales {self.scales} and decays {self.decays}",
                rule=f"{self.buffers} scales above 0 of sum at most 1, as many decays in (0, 1]",
                who=self.name,
            )

    def coefficients(self, steps: int) -> Tensor:
        """1, then Σ α λ^(t-1), float64 [steps].

        Raises:
            ConfigError: scales and decays are not known yet.
        """
        self._check_fitted()
        scales = torch.tensor(self.scales, dtype=torch.float64)
        return _coefficients(scales, torch.tensor(self.decays, dtype=torch.float64), steps)

    def slots(self, steps: int) -> int:
        """The buffers.

        Raises:
            ConfigError: scales and decays are not known yet.
        """
        self._check_fitted()
        return self.buffers

    def advance(self, step: int, slots: Tensor, draw: Draw) -> Tensor:
        """The draw less Σ α s, which is then added to λ s in every buffer s."""
        scales = torch.tensor(self.scales, dtype=slots.dtype)
        noise: Tensor = draw(step, "") - torch.tensordot(scales, slots, 1)
        for slot, decay in zip(slots, self.decays, strict=True):
            slot.mul_(decay).add_(noise)
        return noise

    def start(self, steps: int) -> Tensor:
        """Where `optimise` begins, float64 [2 * buffers]: memories from 1 to n steps, and their weights."""
        memories = torch.logspace(0.2, math.log10(max(steps, 4)), self.buffers, dtype=torch.float64)
        # A term of memory m stands for the slope of the square root there: weights fall as m^(-1/2).
        scales = memories**-0.5
        scales = 0.5 * scales / scales.sum()
        return torch.cat([torch.log(memories), torch.log(scales / 0.5)])

    def unfold(self, parameters: Tensor, steps: int) -> Tensor:
        """Coefficients, float64 [steps], of the parameters that `optimise` moves; differentiable."""
        return _coefficients(*_unpack(parameters), steps)

    def fitted(self, parameters: Tensor) -> BLT:
        """The strategy of those parameters."""
        scales, decays = _unpack(parameters)
        return replace(self, scales=tuple(scales.tolist()), decays=tuple(decays.tolist()))

    def _check_fitted(self) -> None:
        if not self.scales:
            raise ConfigError(
                "its scales and decays are not known",
                rule="a BLT is fitted to a plan",
                fix="optimise(BLT(buffers), plan)",
                who=self.name,
            )


def _unpack(parameters: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of sum below 1 and decays in (0, 1)."""
    memories, weights = parameters.chunk(2)
    scales = torch.softmax(torch.cat([weights, torch.zeros(1, dtype=torch.float64)]), 0)[:-1]
    return scales, torch.exp(-torch.exp(-memories))


def _coefficients(scales: Tensor, decays: Tensor, steps: int) -> Tensor:
    powers = torch.exp(torch.outer(torch.arange(steps - 1, dtype=torch.float64), torch.log(decays)))
    return torch.cat([torch.ones(1, dtype=torch.float64), torch.mv(powers, scales)])
