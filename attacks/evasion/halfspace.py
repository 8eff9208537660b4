"""The smallest step inside a box to where a linear function has risen enough: exactly, in l2 and linf."""

from __future__ import annotations

import torch
from torch import Tensor

from mycelia.attacks.norms import Norm, norm
from mycelia.engine.errors import ConfigError

__all__ = ["smallest_step"]


def smallest_step(
    slope: Tensor, rise: Tensor, p: Norm, lower: Tensor, upper: Tensor
) -> tuple[Tensor, Tensor]:
    """The δ of smallest norm with slope·δ = rise and lower ≤ δ ≤ upper.

    l2: clip(s · slope); linf: clip(s · sign(slope)); with the s at which the rise is reached. Without a box
    that is rise / ‖slope‖_q times the dual direction.

    Args:
        slope: [n, …]
        rise: [n]; nothing is done where it is not above 0.
        p: "l2" or "linf".
        lower: as slope, at most 0; may be −∞.
        upper: as slope, at least 0; may be ∞.

    Returns:
        δ, [n, …], as far as the box lets it where the rise is out of reach; and its norm, [n], ∞ there.

    >>> one = torch.ones(1, 2)
    >>> smallest_step(torch.tensor([[-3.0, 4.0]]), torch.tensor([3.0]), "l2", -one, one)
    (tensor([[-0.3600,  0.4800]]), tensor([0.6000]))
    """
    flat, low, high = slope.flatten(1), lower.flatten(1), upper.flatten(1)
    match p:
        case "l2":
            direction = flat
        case "linf":
            direction = flat.sign()
        case _:
            raise ConfigError(f"norm {p!r}", rule="l2 or linf", who="smallest_step")
    pull = flat * direction  # rise per unit of s, of each free coordinate
    bound = torch.where(direction > 0, high, low)
    scale = rise.clamp(min=0) / pull.sum(1)
    found = _clipped(scale, direction, low, high)
    cut = ((scale[:, None] * direction - found) != 0).any(1) & (rise > 0)
    if bool(cut.any()):
        rows = cut.nonzero()[:, 0]
        scale[rows] = _scale(flat[rows], direction[rows], pull[rows], bound[rows], rise[rows])
        found[rows] = _clipped(scale[rows], direction[rows], low[rows], high[rows])
    size = torch.where(torch.isfinite(scale), norm(found, p), torch.inf)
    return found.view_as(slope), torch.where(rise > 0, size, 0.0)


def _clipped(scale: Tensor, direction: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Clip scale · direction; an infinite scale gives the bounds, as far as they are finite."""
    end = torch.where(direction > 0, high, torch.where(direction < 0, low, 0.0))
    end = torch.where(torch.isfinite(end), end, torch.zeros_like(end))
    finite = torch.isfinite(scale)
    moved = torch.where(finite, scale, torch.zeros_like(scale))[:, None] * direction
    return torch.where(finite[:, None], torch.minimum(torch.maximum(moved, low), high), end)


def _scale(slope: Tensor, direction: Tensor, pull: Tensor, bound: Tensor, rise: Tensor) -> Tensor:
    """The s at which slope · clip(s · direction) is the rise: linear in s until the next coordinate stops."""
    moving = direction != 0
    ends = torch.where(moving, bound / torch.where(moving, direction, 1.0), torch.inf)
    ends, order = ends.sort(1)
    pull = pull.gather(1, order)
    stopped = torch.where(moving & torch.isfinite(bound), slope * bound, 0.0).gather(1, order)
    done = stopped.cumsum(1) - stopped  # by those before k
    free = pull.flip(1).cumsum(1).flip(1)  # from k on
    scale = torch.where(free > 0, (rise[:, None] - done) / free, torch.inf)
    fits = scale <= ends
    first = fits.to(torch.uint8).argmax(1, keepdim=True)
    return torch.where(fits.any(1), scale.gather(1, first)[:, 0], torch.inf)
