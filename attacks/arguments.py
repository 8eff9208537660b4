"""What a call is given, checked: inputs and their bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mycelia.attacks.norms import wide
from mycelia.attacks.search import SLACK
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["Bounds", "bounds_of", "clipped", "inputs_of", "outside"]

Bounds = tuple[float | Tensor, float | Tensor]


def inputs_of(x: Any) -> Tensor:
    """Floating point rows [n, …], without a gradient.

    Raises:
        DataError: they are something else.
    """
    found = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    if not isinstance(found, Tensor):
        raise DataError(f"x is a {type(x).__name__}", rule="a tensor or an array [n, …]", who="x")
    if not found.is_floating_point():
        raise DataError(
            f"x is {found.dtype}",
            rule="floating point: a gradient step on integers would be rounded away",
            fix="x.float() / 255, with eps in the same units; or bounds=(0, 255) with x.float()",
            who="x",
        )
    if found.dim() < 2:
        raise DataError(
            f"x has shape {list(found.shape)}", rule="[n, …]: rows first", fix="x[:, None]", who="x"
        )
    return found.detach()


def bounds_of(bounds: Bounds, x: Tensor) -> tuple[Tensor, Tensor]:
    """The two as tensors that broadcast to x.

    Raises:
        ConfigError: they do not, or the lower one is not below the upper one.
    """
    low, high = (torch.as_tensor(bound, dtype=x.dtype, device=x.device) for bound in bounds)
    try:
        low, high = (
            bound if bound.dim() == x.dim() else bound.expand(1, *x.shape[1:]) for bound in (low, high)
        )
        torch.broadcast_shapes(low.shape, high.shape, x.shape if len(x) else (1, *x.shape[1:]))
    except RuntimeError as error:
        raise ConfigError(
            f"bounds of {list(low.shape)} and {list(high.shape)}",
            rule=f"they broadcast to x, {list(x.shape)}",
            who="bounds",
        ) from error
    if bool((low >= high).any()) or bool(low.isnan().any() | high.isnan().any()):
        raise ConfigError(f"bounds {bounds}", rule="the lower one is below the upper one", who="bounds")
    return low, high


def outside(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Which values lie beyond their bounds by more than rounding, bool [n, …]; none that is no number."""
    width = torch.where(torch.isfinite(high - low), high - low, torch.ones_like(low))
    return (x < low - SLACK * width) | (x > high + SLACK * width)


def clipped(x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs inside their bounds, and which rows are finite."""
    sound = torch.isfinite(x.flatten(1)).all(1)
    if not len(x):
        return x, sound
    beyond = outside(x, low, high) & wide(sound, x)
    if bool(beyond.any()):
        rows = beyond.flatten(1).any(1).nonzero()[:, 0].tolist()
        seen = x[sound]
        raise DataError(
            f"x lies between {float(seen.min()):g} and {float(seen.max()):g}, beyond bounds "
            f"{float(low.min()):g} to {float(high.max()):g} in {len(rows)} rows (first: {rows[0]})",
            rule="inputs lie inside their bounds",
            fix="bounds=(low, high) as the data has them; normalise in the model (with_normalisation)",
            who="x",
        )
    clipped = torch.minimum(torch.maximum(x, low), high)
    return torch.where(wide(sound, x), clipped, x), sound
