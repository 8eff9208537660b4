"""Adagrad: each coordinate's rate falls with the gradients it has seen."""

from __future__ import annotations

import torch
from torch import Tensor

from mycelia.engine.optimizers.base import Kernel, Optimizer, from_rule
from mycelia.engine.schedules import Schedule, check_number
from mycelia.engine.types import Tensors

__all__ = ["adagrad"]


def adagrad(
    lr: float | Schedule = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    *,
    eps_root: float = 0.0,
    beta1: float = 0.0,
) -> Optimizer:
    """Adagrad (Duchi et al., JMLR 12, 2011), as in `torch.optim.Adagrad`.

    v <- v + g²; w <- w - lr g / (sqrt(v + eps_root) + eps). As the server step of FedAdagrad (Reddi et al.,
    ICLR 2021, algorithm 2): `eps=tau`, `initial_accumulator_value=tau**2`, and `beta1` for its first moment,
    which then takes the place of g, uncorrected.

    Args:
        lr: rate, at least 0, or a schedule.
        lr_decay: divide the rate by 1 + lr_decay * step, at least 0.
        weight_decay: multiple of w added to g, at least 0.
        initial_accumulator_value: v before the first update, at least 0.
        eps: added to the root, at least 0.
        eps_root: added under the root, at least 0.
        beta1: decay of the first moment, in [0, 1).

    Raises:
        ConfigError: a value out of range.
    """
    for name, value in (
        ("lr_decay", lr_decay),
        ("weight_decay", weight_decay),
        ("initial_accumulator_value", initial_accumulator_value),
        ("eps", eps),
        ("eps_root", eps_root),
    ):
        check_number("adagrad", name, value)
    check_number("adagrad", "beta1", beta1, below=1)

    def rule(count: Tensor) -> Kernel:
        slowdown = 1 + (count - 1) * lr_decay if lr_decay else None

        def kernel(grad: Tensor, param: Tensor, slots: Tensors, into: Tensors) -> tuple[Tensor, Tensors]:
            if weight_decay:
                grad = torch.add(grad, param, alpha=weight_decay)
            new = {"v": torch.addcmul(slots["v"], grad, grad, out=into.get("v"))}
            if beta1:
                grad = new["m"] = torch.lerp(slots["m"], grad, 1 - beta1, out=into.get("m"))
            divisor = torch.sqrt(new["v"] + eps_root if eps_root else new["v"]) + eps
            if slowdown is not None:
                divisor = divisor * slowdown
            return torch.div(grad, divisor, out=divisor if into else None), new

        return kernel

    slots = {"v": initial_accumulator_value}
    return from_rule("adagrad", lr, {"m": 0.0, **slots} if beta1 else slots, rule)
