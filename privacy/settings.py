"""How an ordinary loop finds its gradients; what is released of them is in `ReleaseSettings`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mycelia.engine.types import Tensors

__all__ = ["Loss", "Settings"]

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Settings:
    """The arguments of `attach` that are the loop's own.

    Attributes:
        loss_fn: see `attach`, as are all of these.
        regulariser: a term on the parameters, or None.
        backend: see `clipped_grad`.
        strict: see `clipped_grad`.
    """

    loss_fn: Loss
    regulariser: Callable[[Tensors], Tensor] | None
    backend: str
    strict: bool
