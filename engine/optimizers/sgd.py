"""Stochastic gradient descent, with momentum if wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.engine.optimizers.base import Kernel, Optimizer, from_rule
from mycelia.engine.schedules import Schedule, check_number
from mycelia.engine.types import Tensors

__all__ = ["sgd"]


def sgd(
    lr: float | Schedule,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    dampening: float = 0.0,
) -> Optimizer:
    """Gradient descent with momentum, as in `torch.optim.SGD`.

    b <- momentum * b + (1 - dampening) * g; w <- w - lr * b. The first update starts b at g, undamped.
    Nesterov's form moves by g + momentum * b (Sutskever et al., "On the importance of initialization and
    momentum in deep learning", ICML 2013).

    Args:
        lr: rate, at least 0, or a schedule.
        momentum: in [0, 1).
        nesterov: look ahead; needs momentum and no dampening.
        weight_decay: multiple of w added to g, at least 0.
        dampening: in [0, 1].

    Raises:
        ConfigError: a value out of range.
    """
    check_number("sgd", "momentum", momentum, below=1)
    check_number("sgd", "weight_decay", weight_decay)
    check_number("sgd", "dampening", dampening, high=1)
    if nesterov and (momentum == 0 or dampening != 0):
        raise ConfigError(
            f"nesterov with momentum {momentum} and dampening {dampening}",
            rule="Nesterov's form needs momentum > 0 and dampening = 0",
            who="sgd",
        )

    def rule(count: Tensor) -> Kernel:
        share = 1 - dampening * (count > 1).double() if dampening else None

        def kernel(grad: Tensor, param: Tensor, slots: Tensors, into: Tensors) -> tuple[Tensor, Tensors]:
            if weight_decay:
                grad = torch.add(grad, param, alpha=weight_decay)
            if not momentum:
                return grad, {}
            damped = grad if share is None else grad * share
            buffer = torch.add(damped, slots["momentum"], alpha=momentum, out=into.get("momentum"))
            direction = torch.add(grad, buffer, alpha=momentum) if nesterov else buffer
            return direction, {"momentum": buffer}

        return kernel

    return from_rule("sgd", lr, {"momentum": 0.0} if momentum else {}, rule)
