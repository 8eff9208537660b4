"""LAMB: Adam's direction, rescaled layer by layer for large batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mycelia.engine.optimizers.base import Kernel, Optimizer, from_rule
from mycelia.engine.optimizers.moments import Moments
from mycelia.engine.schedules import Schedule, check_number
from mycelia.engine.types import Tensors

__all__ = ["lamb"]


def lamb(
    lr: float | Schedule = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    bias_correction: bool = True,
) -> Optimizer:
    """LAMB (You et al., "Large batch optimization for deep learning", ICLR 2020, algorithm 2).

    w <- w - lr ‖w‖ u / ‖u‖ with u = Adam's ratio + weight_decay * w, the norms taken tensor by tensor and the
    scaling function the identity. A tensor of norm zero moves by -lr * u: it could not leave zero otherwise.

    Args:
        lr: rate, at least 0, or a schedule.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root, at least 0.
        weight_decay: multiple of w added to the ratio, at least 0; the paper uses 0.01 for BERT.
        bias_correction: divide the moments by 1 - beta**t.

    Raises:
        ConfigError: a value out of range.
    """
    moments = Moments("lamb", betas, eps, 0.0, 0.0, bias_correction)
    check_number("lamb", "weight_decay", weight_decay)

    def rule(count: Tensor) -> Kernel:
        ratio = moments.ratio(count)

        def kernel(grad: Tensor, param: Tensor, slots: Tensors, into: Tensors) -> tuple[Tensor, Tensors]:
            m, v = moments.first(slots["m"], grad, into), moments.second(slots["v"], grad, into)
            direction = ratio(m, v, into)
            if weight_decay:
                direction = torch.add(direction, param, alpha=weight_decay)
            size, length = torch.linalg.vector_norm(param), torch.linalg.vector_norm(direction)
            trust = torch.where((size > 0) & (length > 0), size / length, 1.0)
            return direction * trust, {"m": m, "v": v}

        return kernel

    return from_rule("lamb", lr, moments.slots, rule)
