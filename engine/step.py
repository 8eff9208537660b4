"""One local SGD step as a pure function, the unit that plans compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mycelia.engine.program import Program
from mycelia.engine.types import Tensors

__all__ = ["Adjust", "Step", "StepResult", "sgd_step"]

Adjust = Callable[[Tensors, Tensors, Tensors], Tensors]
"""`adjust(grads, params, extra) -> grads`: what a federated algorithm adds to a local gradient."""


class StepResult(NamedTuple):
    """New parameters and buffers, and the batch's mean loss (0-d)."""

    params: Tensors
    buffers: Tensors
    loss: Tensor


Step = Callable[[Tensors, Tensors, Tensor, Tensor, Tensor, Tensors], StepResult]
"""`step(params, buffers, inputs, targets, seed, extra) -> StepResult`; `extra["lr"]` is the rate (0-d)."""


def sgd_step(program: Program, adjust: Adjust | None = None) -> Step:
    """The step w <- w - lr * adjust(grad of the mean loss).

    Args:
        program: gives the losses.
        adjust: changes the gradient, e.g. adds a proximal term; None leaves it.
    """

    def step(
        params: Tensors, buffers: Tensors, inputs: Tensor, targets: Tensor, seed: Tensor, extra: Tensors
    ) -> StepResult:
        names = list(params)
        leaves = [params[name].detach().requires_grad_() for name in names]
        with torch.enable_grad():
            forward = program.forward(
                dict(zip(names, leaves, strict=True)), buffers, inputs, targets, seed=seed
            )
            loss = forward.losses.mean()
            found = torch.autograd.grad(loss, leaves, allow_unused=True)
        with torch.no_grad():
            grads = {
                name: torch.zeros_like(leaf) if grad is None else grad
                for name, leaf, grad in zip(names, leaves, found, strict=True)
            }
            if adjust is not None:
                grads = adjust(grads, params, extra)
            new = {name: params[name] - extra["lr"] * grads[name] for name in names}
            return StepResult(new, {n: b.detach() for n, b in forward.buffers.items()}, loss.detach())

    return step
