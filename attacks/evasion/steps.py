"""What gradient attacks have in common: a step of a norm, and a start in the ball."""

from __future__ import annotations

import torch
from torch import Tensor

from mycelia.attacks.norms import Norm, norm
from mycelia.attacks.search import Search

__all__ = ["direction", "random_start", "step_length"]


def direction(grad: Tensor, p: Norm, share: float = 0.05) -> Tensor:
    """The steepest step of norm 1: signs for linf, the gradient for l2, its largest coordinates for l1.

    Args:
        grad: [n, …]
        p: norm.
        share: of the coordinates that an l1 step moves (Tramèr, Boneh: "Adversarial training and robustness
            for multiple perturbations", NeurIPS 2019).

    Returns:
        [n, …]; 0 for a gradient of 0.
    """
    if p == "linf":
        return grad.sign()
    wide = (-1, *[1] * (grad.dim() - 1))
    if p == "l2":
        length = norm(grad, "l2").view(wide)
        return grad / torch.where(length > 0, length, torch.ones_like(length))
    flat = grad.flatten(1)
    count = max(1, round(share * flat.shape[1]))
    largest = flat.abs().topk(count, 1).values[:, -1:]
    chosen = flat.sign() * (flat.abs() >= largest.clamp(min=torch.finfo(flat.dtype).tiny))
    moved = chosen.abs().sum(1, keepdim=True).clamp(min=1)
    return (chosen / moved).view_as(grad)


def random_start(search: Search, rows: Tensor, restart: int = 0) -> Tensor:
    """Points drawn uniformly from the ball of these rows, then brought into the box."""
    x = search.x[rows]
    unit = search.draws.of(rows).in_ball("start", search.norm, x, restart=restart)
    return search.inside(x + search.eps * unit, rows)


def step_length(eps: float, steps: int, given: float | None = None) -> float:
    """The length that is given; else 2.5 · eps / steps (Madry et al., ICLR 2018), and at least eps / 4.

    Longer steps overshoot in the end, but the best point counts and not the last: with many steps they find
    more.
    """
    return given or max(2.5 / steps, 0.25) * eps
