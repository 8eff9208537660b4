"""Norms, and the ball of a norm cut by a box: nearest points and best points, exactly.

`delta` is a change of an input, [n, …]; `lower` and `upper` are what it may be (low − x ≤ 0 ≤ high − x),
and may be infinite. A radius is one number, or one for each row.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError

__all__ = ["NORMS", "Norm", "Radius", "filled", "linear_max", "norm", "project", "wide"]

Norm = Literal["l0", "l1", "l2", "linf"]
NORMS: Final[tuple[Norm, ...]] = get_args(Norm)
Radius = float | Tensor


def norm(delta: Tensor, p: Norm) -> Tensor:
    """The norm of each row.

    >>> norm(torch.tensor([[3.0, -4.0, 0.0]]), "l2"), norm(torch.tensor([[3.0, -4.0, 0.0]]), "l0")
    (tensor([5.]), tensor([2.]))

    Args:
        delta: [n, …]
        p: which norm; "l0" counts the coordinates that are not 0.

    Returns:
        [n], of delta's dtype.
    """
    flat = delta.flatten(1)
    match p:
        case "linf":
            return flat.abs().amax(1) if flat.shape[1] else flat.new_zeros(len(flat))
        case "l2":
            found: Tensor = torch.linalg.vector_norm(flat, dim=1)
            return found
        case "l1":
            return flat.abs().sum(1)
        case "l0":
            return (flat != 0).sum(1).to(delta.dtype)
        case _:
            raise _unknown(p)


def wide(values: Tensor, like: Tensor) -> Tensor:
    """A number for each row, [n], as [n, 1, …] with as many axes as `like`."""
    return values.view(-1, *[1] * (like.dim() - 1))


def project(delta: Tensor, p: Norm, eps: Radius, lower: Tensor, upper: Tensor) -> Tensor:
    """The nearest point (in the Euclidean sense) of ball ∩ box.

    linf: each coordinate clamped. l2: clip(δ/(1+λ)). l1: clip(soft(δ, λ)); λ is exact for both. l0: the
    ⌊eps⌋ coordinates whose keeping gains most.

    Args:
        delta: [n, …]
        p: norm of the ball.
        eps: its radius, at least 0; a number, or [n].
        lower: broadcasts to delta, at most 0.
        upper: broadcasts to delta, at least 0.

    Returns:
        [n, …]
    """
    flat, low, high, radius = _flat(delta, eps, lower, upper)
    inside = torch.minimum(torch.maximum(flat, low), high)
    match p:
        case "linf":
            found = torch.minimum(torch.maximum(inside, -radius[:, None]), radius[:, None])
        case "l2":
            found = inside.clone()
            rows = (norm(inside, "l2") > radius).nonzero()[:, 0]
            if len(rows):
                found[rows] = _shrunk(
                    _scaled(flat[rows], low[rows], high[rows], radius[rows], 1.0), "l2", radius[rows]
                )
        case "l1":
            found = inside.clone()
            rows = (norm(inside, "l1") > radius).nonzero()[:, 0]
            if len(rows):
                found[rows] = _shrunk(
                    _soft(flat[rows], low[rows], high[rows], radius[rows]), "l1", radius[rows]
                )
        case "l0":
            gain = flat.square() - (flat - inside).square()
            found = inside * _largest(gain, radius)
        case _:
            raise _unknown(p)
    return found.view_as(delta)


def linear_max(grad: Tensor, p: Norm, eps: Radius, lower: Tensor, upper: Tensor) -> Tensor:
    """The change in ball ∩ box of which the scalar product with `grad` is largest.

    linf: per coordinate as far as ball and box go. l2: clip(s·g) with the largest s. l1: the largest
    gradients filled up to their room. l0: the ⌊eps⌋ coordinates with most to gain, at the box.

    Args:
        grad: [n, …]
        p: norm of the ball.
        eps: its radius; a number, or [n].
        lower: broadcasts to grad, at most 0.
        upper: broadcasts to grad, at least 0; both finite for "l0".

    Returns:
        [n, …]; 0 where the gradient is.
    """
    flat, low, high, radius = _flat(grad, eps, lower, upper)
    room = torch.where(flat > 0, high, -low)
    sign = flat.sign()
    match p:
        case "linf":
            found = sign * torch.minimum(room, radius[:, None])
        case "l2":
            found = _scaled(flat, low, high, radius, float("inf"))
        case "l1":
            order = flat.abs().argsort(dim=1, descending=True, stable=True)
            sizes = torch.where(sign != 0, room, 0.0).gather(1, order).clamp(max=radius[:, None])
            before = sizes.cumsum(1) - sizes
            filled = torch.minimum(sizes, (radius[:, None] - before).clamp(min=0))
            found = sign * torch.zeros_like(flat).scatter(1, order, filled)
        case "l0":
            if not bool(torch.isfinite(room).all()):
                raise ConfigError(
                    "l0 without bounds", rule="a linear loss has its best point at finite bounds", who=p
                )
            found = sign * room * _largest(flat.abs() * room, radius)
        case _:
            raise _unknown(p)
    return found.view_as(grad)


def _flat(delta: Tensor, eps: Radius, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = len(delta)
    radius = torch.as_tensor(eps, dtype=delta.dtype, device=delta.device).expand(n)
    low, high = (bound.to(delta).expand_as(delta).flatten(1) for bound in (lower, upper))
    return delta.flatten(1), low, high, radius


def _shrunk(delta: Tensor, p: Norm, radius: Tensor) -> Tensor:
    """What rounding has put beyond the radius is brought back."""
    size = norm(delta, p)
    factor = torch.where(size > radius, radius / size.clamp(min=torch.finfo(size.dtype).tiny), 1.0)
    return delta * factor[:, None]


def filled(ends: Tensor, speeds: Tensor, stops: Tensor, wanted: Tensor) -> Tensor:
    """The smallest u ≥ 0 with Σ min(u · speed, stop) = wanted: a step that some coordinates cannot follow.

    Newton's method from below on a concave, piecewise linear function: coordinates that have stopped at one u
    have stopped at every larger one, so that it ends, mostly after a few rounds, and without any sorting.

    Args:
        ends: [n, d], u at which each coordinate stops; infinite where it never does.
        speeds: [n, d], at least 0.
        stops: [n, d], speed · end; 0 where that is infinite.
        wanted: [n], at least 0.

    Returns:
        [n]; infinite where all have stopped before.
    """
    free, done = speeds.sum(1), torch.zeros_like(wanted)
    u = torch.zeros_like(wanted)
    stopped = -1
    while True:
        u = torch.maximum(u, torch.where(free > 0, (wanted - done).clamp(min=0) / free, torch.inf))
        over = ends <= u[:, None]
        now = int(over.sum())
        if now == stopped:
            return u
        stopped = now
        free, done = torch.where(over, 0.0, speeds).sum(1), torch.where(over, stops, 0.0).sum(1)


def _scaled(direction: Tensor, low: Tensor, high: Tensor, radius: Tensor, most: float) -> Tensor:
    """clip(s · direction) for the largest s ≤ most that stays in the l2 ball.

    The squared norm is s² Σ d² over the coordinates that are free at s plus Σ bound² over the others, and
    coordinate k is free until s = bound/d. A radius of which the square is no normal number counts as 0.
    """
    radius = torch.where(radius.square() < torch.finfo(radius.dtype).tiny, 0.0, radius)
    bound = torch.where(direction > 0, high, low)
    ends = torch.where(direction != 0, bound / direction, torch.inf).square()
    stops = torch.where(torch.isfinite(ends), bound.square(), 0.0)
    s = filled(ends, direction.square(), stops, radius.square()).sqrt().clamp(max=most)
    free_s = torch.where(torch.isfinite(s), s, torch.zeros_like(s))[:, None]
    moved = torch.where(
        torch.isfinite(s)[:, None], free_s * direction, torch.where(direction != 0, bound, 0.0)
    )
    return torch.minimum(torch.maximum(moved, low), high)


def _soft(delta: Tensor, low: Tensor, high: Tensor, radius: Tensor) -> Tensor:
    """clip(sign(δ)·max(|δ| − λ, 0)) with the λ at which the l1 norm is the radius.

    That norm is Σ min(max(|δ| − λ, 0), bound): constant until λ = |δ| − bound, then falling by 1 until |δ|.
    """
    size = delta.abs()
    bound = torch.where(delta > 0, high, -low)
    starts = (size - bound).clamp(min=0)
    points, order = torch.cat([starts, size], 1).sort(1)
    slopes = torch.cat([-torch.ones_like(size), torch.ones_like(size)], 1).gather(1, order).cumsum(1)
    whole = torch.minimum(size, bound).sum(1, keepdim=True)
    steps = points.diff(dim=1) * slopes[:, :-1]
    values = torch.cat([whole, whole + steps.cumsum(1)], 1)  # at the points
    below = values <= radius[:, None]
    first = torch.where(below.any(1), below.to(torch.uint8).argmax(1), values.shape[1] - 1)[:, None]
    before = (first - 1).clamp(min=0)
    slope = slopes.gather(1, before).clamp(max=-1.0)
    level = points.gather(1, before) + (values.gather(1, before) - radius[:, None]).clamp(min=0) / -slope
    shrunk = torch.minimum((size - level).clamp(min=0), bound)
    return delta.sign() * shrunk


def _largest(gain: Tensor, radius: Tensor) -> Tensor:
    """1 for the ⌊radius⌋ largest of each row, 0 for the others."""
    order = gain.argsort(dim=1, descending=True, stable=True)
    rank = torch.zeros_like(order).scatter(
        1, order, torch.arange(gain.shape[1], device=gain.device).expand_as(order)
    )
    return (rank < radius.floor()[:, None]).to(gain.dtype)


def _unknown(p: str) -> ConfigError:
    return ConfigError(f"norm {p!r}", rule=f"one of {', '.join(NORMS)}", who="norm")
