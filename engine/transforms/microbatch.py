"""Gradient accumulation: a large batch in parts that fit into memory."""

from __future__ import annotations

import torch
from torch import Tensor

from mycelia.engine import structure
from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.program import Forward, Program
from mycelia.engine.transforms.coupling import coupling
from mycelia.engine.transforms.value_and_grad import GradFn, Gradients, gradients_of
from mycelia.engine.types import Tensors

__all__ = ["microbatch"]


def microbatch(program: Program, size: int) -> GradFn:
    """`value_and_grad` in parts of `size` examples: activations of one part at a time are in memory.

    Parts are taken in order and their gradients summed in that order, so results repeat; they are those of
    `value_and_grad` up to the order of additions, dropout included. Tensors among the outputs are joined
    along their first axis. Counters are as after one pass.

    Args:
        program: its training pass must treat the examples one by one.
        size: examples a part, at least 1; the last part may be smaller.

    Raises:
        ConfigError: a size below 1.
        CaptureError: the training pass mixes examples or updates float buffers, as BatchNorm does; on a
            call, an output tensor without the batch in front.
    """
    if size < 1:
        raise ConfigError(f"parts of {size} examples", rule="at least 1", who="microbatch")
    reason = coupling(program)
    if reason is not None:
        raise CaptureError(
            f"the batch cannot be cut in parts: {reason}",
            rule="parts give what the whole batch would",
            fix="use GroupNorm or LayerNorm in place of BatchNorm, or a batch that fits",
            who="microbatch",
        )

    def run(
        params: Tensors, buffers: Tensors, inputs: Tensor, targets: Tensor, *, seed: int | Tensor = 0
    ) -> Gradients:
        batch = inputs.shape[0]

        def part(start: int) -> Gradients:
            rows = slice(start, start + size)

            def total(leaves: Tensors) -> tuple[Tensor, Forward]:
                forward = program.forward(
                    leaves, buffers, inputs[rows], targets[rows], seed=seed, first=start
                )
                return forward.losses.sum() / batch, forward

            return gradients_of(total, params)

        grads: Tensors = {}
        parts: list[Gradients] = []
        for start in range(0, batch, size):
            found = part(start)
            # out of place, so that it can be traced and vmapped; one more gradient's worth of memory
            grads = {name: grads[name] + grad if grads else grad for name, grad in found.grads.items()}
            parts.append(found._replace(grads={}))
        losses = torch.cat([found.losses for found in parts])
        outputs = _joined(parts, size)
        return Gradients(losses.mean(), grads, parts[0].buffers, losses, outputs)

    return run


def _joined(parts: list[Gradients], size: int) -> object:
    if len(parts) == 1:
        return parts[0].outputs
    flat = [structure.flatten(found.outputs) for found in parts]
    for leaves, _ in flat[:-1]:
        for leaf in leaves:
            if leaf.dim() == 0 or leaf.shape[0] != size:
                raise CaptureError(
                    f"an output of shape {tuple(leaf.shape)} for a part of {size} examples",
                    rule="outputs [B, ...]",
                    fix="return it from the model with the batch in front",
                    who="microbatch",
                )
    return structure.unflatten(flat[0][1], [torch.cat(same) for same in zip(*(f[0] for f in flat), strict=True)])
