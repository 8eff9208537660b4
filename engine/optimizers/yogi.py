"""Yogi: Adam whose second moment cannot jump."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mycelia.engine.optimizers.base import Kernel, Optimizer, from_rule
from mycelia.engine.optimizers.moments import Moments
from mycelia.engine.schedules import Schedule, check_number
from mycelia.engine.types import Tensors

__all__ = ["yogi"]


def yogi(
    lr: float | Schedule = 1e-2,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-3,
    weight_decay: float = 0.0,
    *,
    eps_root: float = 0.0,
    initial_accumulator_value: float = 1e-6,
    bias_correction: bool = True,
) -> Optimizer:
    """Adam with v <- v - (1 - beta2) sign(v - g²) g² (Zaheer et al., NeurIPS 2018, algorithm 2).

    The paper corrects no bias; `bias_correction=False` is its form, and that of FedYogi (Reddi et al., ICLR
    2021, algorithm 2) with `eps=tau`, `initial_accumulator_value=tau**2`. The paper recommends the lr and eps
    that are the defaults.

    Args:
        lr: rate, at least 0, or a schedule.
        betas: decay of m and of v, each in [0, 1).
        eps: added to the root, at least 0.
        weight_decay: multiple of w added to g, at least 0.
        eps_root: added under the root, at least 0.
        initial_accumulator_value: v before the first update, at least 0.
        bias_correction: divide the moments by 1 - beta**t as Adam does.

    Raises:
        ConfigError: a value out of range.
    """
    moments = Moments("yogi", betas, eps, eps_root, initial_accumulator_value, bias_correction)
    check_number("yogi", "weight_decay", weight_decay)

    def rule(count: Tensor) -> Kernel:
        ratio = moments.ratio(count)

        def kernel(grad: Tensor, param: Tensor, slots: Tensors, into: Tensors) -> tuple[Tensor, Tensors]:
            if weight_decay:
                grad = torch.add(grad, param, alpha=weight_decay)
            m, square = moments.first(slots["m"], grad, into), grad * grad
            change = torch.sign(slots["v"] - square) * square
            v = torch.sub(slots["v"], change, alpha=1 - betas[1], out=into.get("v"))
            return ratio(m, v, into), {"m": m, "v": v}

        return kernel

    return from_rule("yogi", lr, moments.slots, rule)
