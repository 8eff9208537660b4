"""Whether the examples of a batch are independent in a Program's training pass."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from mycelia.engine._torch import version
from mycelia.engine.graph import source_line
from mycelia.engine.program import Program
from mycelia.engine.schema import Role
from mycelia.engine.types import Tensors

__all__ = ["coupling"]

aten = torch.ops.aten

# where an operator is told to divide the gradient of a row by the times its id occurs in the batch
_BY_FREQUENCY = {
    aten.embedding.default: 3, aten.embedding_bag.default: 3, aten.embedding_bag.padding_idx: 3,
}  # fmt: skip


def coupling(program: Program, *, draws: bool = True) -> str | None:
    """What makes one example's loss, or a buffer, depend on the other examples; None if nothing does.

    Known operators are found in the graph: batch normalisation in training mode, float buffers that the pass
    updates, gradients scaled by frequency, branches and loops decided by the batch. What else there may be (a
    mean over the batch, a counter of examples) is found by running the first example of `program.example`
    alone and beside another.

    Args:
        program: what is looked at.
        draws: count it where only random draws differ: a module without a graph draws for its whole batch,
            and others for a batch of another size.
    """
    if program.graphs is not None:
        for node in program.graphs.training.graph.nodes:
            if (reason := _reason(node)) is not None:
                return f"{reason} mixes the examples of a batch ({source_line(node)})"
    return _changed_buffer(program) or _changed_result(program, draws)


def _reason(node: fx.Node) -> str | None:
    args: Any = node.args
    if node.target is aten._native_batch_norm_legit_functional.default and args[5]:
        return "BatchNorm"
    if node.target is aten._native_batch_norm_legit.no_stats and args[3]:
        # instance normalisation is written as one batch of B x C channels
        size = args[0].meta["val"].shape[0] if "val" in args[0].meta else None
        return None if isinstance(size, int) and size == 1 else "BatchNorm"
    if node.target is aten.batch_norm.default and args[5]:
        return "BatchNorm"
    if node.target in _BY_FREQUENCY and args[_BY_FREQUENCY[node.target] :][:1] == (True,):
        return "scale_grad_by_freq"
    name = str(node.target)
    return f"torch.{name}" if node.op == "call_function" and name in ("cond", "while_loop") else None


def _changed_buffer(program: Program) -> str | None:
    """A float buffer that the training pass changes, or a parameter."""
    names = [entry.name for entry in program.schema.of(Role.BUFFER)]
    changed = set()
    if program.graphs is not None:
        kept = [entry.name for entry in program.schema.of(Role.BUFFER, Role.COUNTER)]
        results: Any = program.graphs.training.graph.output_node().args[0]
        after = dict(zip(kept, results[len(results) - len(kept) :], strict=True))
        changed = {name for name in names if after[name].op != "placeholder"}
    elif program.example is not None:
        params, buffers = program.init()
        before = {name: version(tensor) for name, tensor in params.items()}
        with torch.no_grad():
            found = program.forward(params, buffers, *program.example).buffers
        written = next((name for name, tensor in params.items() if version(tensor) != before[name]), None)
        if written is not None:  # `max_norm` of an embedding does
            return f"the training pass changes the parameter {written!r} as its batch says"
        changed = {name for name in names if not torch.equal(found[name], buffers[name])}
    name = next((name for name in names if name in changed), None)
    return None if name is None else f"the training pass updates the float buffer {name!r} from its batch"


def _changed_result(program: Program, draws: bool) -> str | None:
    """Whether the first example gives another loss, or a counter another value, beside a second one."""
    if program.example is None or not _symbolic(program):
        return None
    inputs, targets = (part[:1] for part in program.example)
    other = torch.zeros_like(inputs) if inputs.any() else torch.ones_like(inputs)
    params, buffers = program.init()
    with torch.no_grad():
        alone = program.forward(params, buffers, inputs, targets)
        both = torch.cat([inputs, other]), torch.cat([targets, targets])
        beside = program.forward(params, buffers, *both)
    for name, counter in alone.buffers.items():
        if not counter.is_floating_point() and not torch.equal(counter, beside.buffers[name]):
            return f"the counter {name!r} depends on the size of the batch"
    if not _differ(alone.losses, beside.losses):
        return None
    if program.graphs is None and not draws and _drawn(program, params, buffers, (inputs, targets), both):
        return None
    return "the loss of an example depends on the other examples"


def _drawn(
    program: Program, params: Tensors, buffers: Tensors, alone: tuple[Tensor, Tensor],
    beside: tuple[Tensor, Tensor],
) -> bool:  # fmt: skip
    """Whether random draws are all that differs.

    Then the loss depends on the seed, not on the other example in a batch of the same size, and not on the
    size in evaluation mode.
    """
    twice = torch.cat([alone[0]] * 2), torch.cat([alone[1]] * 2)

    def losses(batch: tuple[Tensor, Tensor], seed: int = 0, training: bool = True) -> Tensor:
        return program.forward(params, buffers, *batch, seed=seed, training=training).losses

    with torch.no_grad():
        return (
            _differ(losses(alone), losses(alone, seed=1))
            and not _differ(losses(twice), losses(beside))
            and not _differ(losses(alone, training=False), losses(beside, training=False))
        )


def _differ(alone: Tensor, beside: Tensor) -> bool:
    one, two = float(alone[0]), float(beside[0])
    tolerance = math.sqrt(torch.finfo(alone.dtype).eps) if alone.is_floating_point() else 0.0
    return math.isfinite(one) and abs(one - two) > tolerance * (1 + abs(one))


def _symbolic(program: Program) -> bool:
    if program.graphs is None:
        return True
    inputs = program.graphs.training.graph.find_nodes(op="placeholder")[-4]  # inputs, targets, seed, first
    return "val" in inputs.meta and isinstance(inputs.meta["val"].shape[0], torch.SymInt)
