"""Gradient accumulation: a large batch in parts that fit into memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mycelia.engine import structure
from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.program import Forward, Program
from mycelia.engine.schema import Role
from mycelia.engine.transforms.coupling import coupling
from mycelia.engine.transforms.value_and_grad import GradFn, Gradients, gradients_of
from mycelia.engine.types import Tensors

__all__ = ["microbatch"]


def microbatch(program: Program, size: int) -> GradFn:
    """`value_and_grad` in parts of `size` examples: activations of one part at a time are in memory.

    Parts are taken in order and their gradients summed in that order, so results repeat; they are those of
    `value_and_grad` up to the order of additions, dropout included. Tensors among the outputs are joined
    along the axis of the examples. Counters are as after one pass.

    Args:
        program: its training pass must treat the examples one by one.
        size: examples a part, at least 1; the last part may be smaller.

    Raises:
        ConfigError: a size below 1.
        CaptureError: the training pass mixes examples or updates float buffers, as BatchNorm does; on a
            call, an output tensor without an axis of examples.
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

    axes = _batch_axes(program)

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
        outputs = _joined(parts, [len(found.losses) for found in parts], axes)
        return Gradients(losses.mean(), grads, parts[0].buffers, losses, outputs)

    return run


def _batch_axes(program: Program) -> list[int] | None:
    """The axis of the examples in each output tensor, as the graph knows it; None without a graph."""
    if program.graphs is None:
        return None
    kept = len(program.schema.of(Role.BUFFER, Role.COUNTER))
    results: Any = program.graphs.training.graph.output_node().args[0]
    shapes = [getattr(node.meta.get("val"), "shape", ()) for node in results[1 : len(results) - kept]]
    symbolic = [[n for n, size in enumerate(shape) if isinstance(size, torch.SymInt)] for shape in shapes]
    return [axes[0] if axes else 0 for axes in symbolic]


def _joined(parts: list[Gradients], rows: list[int], axes: list[int] | None) -> Any:
    if len(parts) == 1:
        return parts[0].outputs
    flat = [structure.flatten(found.outputs) for found in parts]
    joined = []
    for number, same in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
        axis = 0 if axes is None else axes[number]
        if any(
            leaf.dim() <= axis or leaf.shape[axis] != count for leaf, count in zip(same, rows, strict=True)
        ):
            raise CaptureError(
                f"an output of shape {tuple(same[0].shape)} for a part of {rows[0]} examples",
                rule="outputs [B, ...]",
                fix="return it from the model with the batch in front",
                who="microbatch",
            )
        joined.append(torch.cat(same, axis))
    return structure.unflatten(flat[0][1], joined)
