"""One step of central training as a pure function: forward, backward, clip, update."""

from __future__ import annotations

import torch
from torch import Tensor

from mycelia.engine.optimizers import Optimizer, flatten_state, unflatten_state
from mycelia.engine.program import Program
from mycelia.engine.step import Step, StepResult
from mycelia.engine.transforms.value_and_grad import value_and_grad
from mycelia.engine.types import Tensors

__all__ = ["GRADIENT_NORM", "clip_by_global_norm", "initial_carry", "split_carry", "update_step"]

_BUFFER, _STATE = "buffer/", "optimizer/"
GRADIENT_NORM = "gradient_norm"
"""Where the carry keeps the norm of the last gradient, before clipping; absent without clipping."""


def initial_carry(buffers: Tensors, optimizer: Optimizer, params: Tensors, *, clip_norm: float) -> Tensors:
    """What a step changes besides the parameters: buffers, optimiser state and gradient norm, by name."""
    carry = {_BUFFER + name: tensor for name, tensor in buffers.items()}
    carry |= {_STATE + name: tensor for name, tensor in flatten_state(optimizer.init(params)).items()}
    if clip_norm:
        carry[GRADIENT_NORM] = torch.zeros(())
    return carry


def split_carry(carry: Tensors) -> tuple[Tensors, Tensors]:
    """The buffers and the flat optimiser state of a carry, by their own names."""
    buffers, state = (
        {name.removeprefix(prefix): tensor for name, tensor in carry.items() if name.startswith(prefix)}
        for prefix in (_BUFFER, _STATE)
    )
    return buffers, state


def update_step(
    program: Program, optimizer: Optimizer, *, clip_norm: float = 0.0, in_place: bool = False
) -> Step:
    """The step `(params, carry) -> (params, carry)` that an optimiser makes of a Program.

    It has the shape of `engine.step.Step` with the carry in the place of the buffers, so a plan can trace and
    compile it; `extra` is not read.

    Args:
        program: gives the losses; the gradient is that of the batch's mean.
        optimizer: makes new parameters of the gradient.
        clip_norm: largest global gradient norm; 0 does not clip.
        in_place: the same bits, with the optimiser writing over parameters and state; faster where nothing is
            fused, and no longer pure.
    """
    gradients = value_and_grad(program)
    update = optimizer.update_ if in_place else optimizer.update

    def step(
        params: Tensors, carry: Tensors, inputs: Tensor, targets: Tensor, seed: Tensor, extra: Tensors
    ) -> StepResult:
        buffers, state = split_carry(carry)
        found = gradients(params, buffers, inputs, targets, seed=seed)
        grads, new = found.grads, {}
        with torch.no_grad():
            if clip_norm:
                grads, new[GRADIENT_NORM] = clip_by_global_norm(grads, clip_norm)
            moved, state_after = update(grads, unflatten_state(state), params)
            new |= {_BUFFER + name: tensor for name, tensor in found.buffers.items()}
            new |= {_STATE + name: tensor for name, tensor in flatten_state(state_after).items()}
            return StepResult(moved, new, found.loss)

    return step


def clip_by_global_norm(grads: Tensors, max_norm: float) -> tuple[Tensors, Tensor]:
    """Gradients times min(1, max_norm / norm), and norm, their L2 norm over all tensors (0-d float32).

    Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013, algorithm 1. A norm
    that is not finite leaves gradients that are not finite.
    """
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale = (max_norm / norm).clamp(max=1.0)  # 0 / 0 cannot be: a zero norm gives infinity, clamped to 1
    return {name: (grad * scale).to(grad.dtype) for name, grad in grads.items()}, norm
