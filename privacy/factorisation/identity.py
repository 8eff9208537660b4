"""Independent noise in every step: what DP-SGD adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.privacy.factorisation.base import Draw
from mycelia.privacy.factorisation.toeplitz import Toeplitz

__all__ = ["Identity"]


@dataclass(frozen=True)
class Identity(Toeplitz):
    """C = 1: nothing is correlated, and nothing is remembered."""

    name: ClassVar[str] = "identity"

    def coefficients(self, steps: int) -> Tensor:
        """1, 0, 0, …, float64 [steps]."""
        result = torch.zeros(steps, dtype=torch.float64)
        result[0] = 1
        return result

    def slots(self, steps: int) -> int:
        """0."""
        return 0

    def advance(self, step: int, slots: Tensor, draw: Draw) -> Tensor:
        """The step's own draw."""
        return draw(step, "")
