"""The gradient of a client's loss at a given model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mycelia.engine.local import ClientData
from mycelia.engine.program import Program
from mycelia.engine.types import Tensors

__all__ = ["mean_gradient"]

_CHUNK = 256  # examples a pass: enough to fill the kernels, few enough for any memory


def mean_gradient(
    program: Program, vector: Tensor, buffers: Tensors, data: ClientData, *, seed: int = 0
) -> Tensor:
    """Gradient of the client's mean loss in training mode, [d], float32 at least.

    A model that mixes the examples of a batch, as BatchNorm does, sees batches of up to 256.

    Args:
        program: gives the losses.
        vector: parameters [d].
        buffers: float buffers and counters; not changed.
        data: the client's examples, at least one.
        seed: drives dropout.
    """
    leaves = {n: p.detach().clone().requires_grad_() for n, p in program.unflatten(vector).items()}
    total = torch.zeros_like(vector, dtype=torch.promote_types(vector.dtype, torch.float32))
    for first in range(0, len(data), _CHUNK):
        inputs, targets = data.tensors(np.arange(first, min(first + _CHUNK, len(data))))
        with torch.enable_grad():
            losses = program.forward(leaves, buffers, inputs, targets, seed=(seed + first) % 2**63).losses
            grads = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        offset = 0
        for leaf, grad in zip(leaves.values(), grads, strict=True):
            if grad is not None:
                total[offset : offset + leaf.numel()] += grad.reshape(-1)
            offset += leaf.numel()
    return total.div_(len(data))
