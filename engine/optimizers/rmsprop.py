"""RMSprop: gradients divided by a running average of their size."""

from __future__ import annotations

import torch
from torch import Tensor

from mycelia.engine.optimizers.base import Kernel, Optimizer, from_rule
from mycelia.engine.schedules import Schedule, check_number
from mycelia.engine.types import Tensors

__all__ = ["rmsprop"]


def rmsprop(
    lr: float | Schedule = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> Optimizer:
    """RMSprop (Tieleman & Hinton, Coursera lecture 6.5, 2012), as in `torch.optim.RMSprop`.

    v <- alpha v + (1 - alpha) g²; w <- w - lr g / (sqrt(v) + eps). The centred form puts the variance in the
    place of v (Graves, "Generating sequences with recurrent neural networks", 2013, equations 38-45).

    Args:
        lr: rate, at least 0, or a schedule.
        alpha: decay of v, in [0, 1).
        eps: added to the root, at least 0.
        weight_decay: multiple of w added to g, at least 0.
        momentum: of the scaled gradients, in [0, 1).
        centered: subtract the square of the mean gradient from v.

    Raises:
        ConfigError: a value out of range.
    """
    check_number("rmsprop", "alpha", alpha, below=1)
    check_number("rmsprop", "eps", eps)
    check_number("rmsprop", "weight_decay", weight_decay)
    check_number("rmsprop", "momentum", momentum, below=1)

    def rule(count: Tensor) -> Kernel:
        def kernel(grad: Tensor, param: Tensor, slots: Tensors, into: Tensors) -> tuple[Tensor, Tensors]:
            if weight_decay:
                grad = torch.add(grad, param, alpha=weight_decay)
            decayed = torch.mul(slots["v"], alpha, out=into.get("v"))
            square = torch.addcmul(decayed, grad, grad, value=1 - alpha, out=into.get("v"))
            new = {"v": square}
            if centered:
                mean = new["mean"] = torch.lerp(slots["mean"], grad, 1 - alpha, out=into.get("mean"))
                # a variance; rounding can take it below zero
                square = torch.addcmul(square, mean, mean, value=-1).clamp(min=0)
            divisor = torch.sqrt(square) + eps
            direction = torch.div(grad, divisor, out=divisor if into else None)
            if momentum:
                direction = torch.add(direction, slots["momentum"], alpha=momentum, out=into.get("momentum"))
                new["momentum"] = direction
            return direction, new

        return kernel

    slots = ["v"] + ["mean"] * centered + ["momentum"] * (momentum > 0)
    return from_rule("rmsprop", lr, dict.fromkeys(slots, 0.0), rule)
