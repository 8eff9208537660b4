"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mycelia.engine.optimizers.base import Kernel, Optimizer, from_rule
from mycelia.engine.optimizers.moments import Moments
from mycelia.engine.schedules import Schedule, check_number
from mycelia.engine.types import Tensors

__all__ = ["adam", "adamw"]


def adam(
    lr: float | Schedule = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    *,
    eps_root: float = 0.0,
    initial_accumulator_value: float = 0.0,
    bias_correction: bool = True,
) -> Optimizer:
    """Adam (Kingma & Ba, ICLR 2015, algorithm 1), as in `torch.optim.Adam`.

    m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g²; w <- w - lr m̂ / (sqrt(v̂ + eps_root) + eps),
    where the hats divide by 1 - beta**t, t = 1 at the first update. As the server step of FedAdam (Reddi et
    al., ICLR 2021, algorithm 2): `bias_correction=False`, `eps=tau`, `initial_accumulator_value=tau**2`.

    Args:
        lr: rate, at least 0, or a schedule.
        betas: decay of m and of v, each in [0, 1).
        eps: added to the root, at least 0.
        weight_decay: multiple of w added to g (L2 penalty), at least 0.
        amsgrad: divide by the largest v so far (Reddi et al., ICLR 2018).
        eps_root: added under the root, at least 0.
        initial_accumulator_value: v before the first update, at least 0.
        bias_correction: False leaves the hats out.

    Raises:
        ConfigError: a value out of range.
    """
    moments = Moments("adam", betas, eps, eps_root, initial_accumulator_value, bias_correction)
    return _adam(moments, lr, weight_decay, amsgrad, decoupled=False)


def adamw(
    lr: float | Schedule = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    amsgrad: bool = False,
    *,
    eps_root: float = 0.0,
    initial_accumulator_value: float = 0.0,
    bias_correction: bool = True,
) -> Optimizer:
    """Adam with decoupled weight decay, w <- w - lr (ratio + weight_decay w), as in `torch.optim.AdamW`.

    Loshchilov & Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2. The decay does not
    enter the moments; the other arguments are those of `adam`.

    Raises:
        ConfigError: a value out of range.
    """
    moments = Moments("adamw", betas, eps, eps_root, initial_accumulator_value, bias_correction)
    return _adam(moments, lr, weight_decay, amsgrad, decoupled=True)


def _adam(
    moments: Moments, lr: float | Schedule, weight_decay: float, amsgrad: bool, *, decoupled: bool
) -> Optimizer:
    check_number(moments.who, "weight_decay", weight_decay)

    def rule(count: Tensor) -> Kernel:
        ratio = moments.ratio(count)

        def kernel(grad: Tensor, param: Tensor, slots: Tensors, into: Tensors) -> tuple[Tensor, Tensors]:
            if weight_decay and not decoupled:
                grad = torch.add(grad, param, alpha=weight_decay)
            m, v = moments.first(slots["m"], grad, into), moments.second(slots["v"], grad, into)
            new = {"m": m, "v": v}
            if amsgrad:
                v = new["v_max"] = torch.maximum(slots["v_max"], v, out=into.get("v_max"))
            direction = ratio(m, v, into)
            if weight_decay and decoupled:
                direction = torch.add(direction, param, alpha=weight_decay)
            return direction, new

        return kernel

    slots = moments.slots
    if amsgrad:
        slots["v_max"] = moments.initial_accumulator_value
    return from_rule(moments.who, lr, slots, rule)
