"""How an ordinary loop finds its gradients; what is released of them is in `ReleaseSettings`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mycelia.engine.tracing import Loss
from mycelia.engine.types import Tensors
from mycelia.privacy.groups import Group

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """The arguments of `attach` that are the loop's own.

    Attributes:
        loss_fn: see `attach`, as are all of these.
        regulariser: a term on the parameters, or None.
        backend: see `clipped_grad`.
        strict: see `clipped_grad`.
        group: what is clipped, where that is the mean of a group.
    """

    loss_fn: Loss
    regulariser: Callable[[Tensors], Tensor] | None
    backend: str
    strict: bool
    group: Group | None = None
