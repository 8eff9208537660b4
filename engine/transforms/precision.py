"""Mixed precision: matrix products and convolutions in bfloat16, everything else as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.graph import Pass, Writer
from mycelia.engine.program import Program
from mycelia.engine.schema import Role

__all__ = ["PRECISIONS", "precision"]

aten = torch.ops.aten

PRECISIONS = ("fp32", "bf16")

# attention kernels keep their softmax in float32 whatever they are given
_PRODUCTS = {
    aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default,
    aten.baddbmm.default, aten.einsum.default, aten.scaled_dot_product_attention.default,
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding, aten.convolution.default,
    aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input,
}  # fmt: skip
# these only move or compare values, so that they give the same in either precision
_EXACT = {
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.permute.default,
    aten.transpose.int, aten.t.default, aten.relu.default, aten.max_pool2d.default, aten.unsqueeze.default,
}  # fmt: skip


def precision(program: Program, name: str) -> Program:
    """A Program that computes in the named precision.

    With "bf16" the operands of matrix products, convolutions and attention are rounded to bfloat16 (8 bits of
    precision, the range of float32; Kalamkar et al. 2019), products are accumulated in float32 inside the
    kernels, and results go back to the dtype they had. Norms, softmax, sums, the loss, parameters,
    gradients, buffers and outputs keep their dtype. Recurrent layers and the bodies of branches and loops
    are left as they are.

    Args:
        program: with a graph; apply `layout` after `precision`.
        name: "fp32" (returns the Program itself) or "bf16".

    Raises:
        ConfigError: another name.
        CaptureError: "bf16" and the Program runs something else than its graphs.
    """
    if name not in PRECISIONS:
        raise ConfigError(f"precision {name!r}", rule=f"one of {', '.join(PRECISIONS)}", who="precision")
    if name == "fp32":
        return program
    training = program.graph("precision")
    if getattr(program.training, "graph", None) is not training:
        raise CaptureError(
            f"a Program with {', '.join(program.note)} applied does not run its graphs",
            rule="precision rewrites the graphs",
            fix="apply precision first",
            who="precision",
        )
    kept = len(program.schema.of(Role.BUFFER, Role.COUNTER))
    return program.rewrite(Pass("bf16", lambda graph: _to_bf16(graph, kept)))


def _to_bf16(graph: fx.Graph, kept: int) -> None:
    model = _before_outputs(graph, kept)
    narrow: dict[fx.Node, fx.Node] = {}  # a node and its value in bfloat16
    for node in list(graph.nodes):
        if node.op != "call_function" or node not in model or not _floating(node):
            continue
        exact = node.target in _EXACT and node.args[0] in narrow and _is_widened(node.args[0])
        if exact or node.target in _PRODUCTS:
            _narrow(graph, node, narrow)


def _narrow(graph: fx.Graph, node: fx.Node, narrow: dict[fx.Node, fx.Node]) -> None:
    """Let `node` compute in bfloat16 and its readers see the result in the dtype it had."""
    with graph.inserting_before(node):
        write = Writer(graph, node)

        def rounded(argument: fx.Node) -> fx.Node:
            if not _floating(argument):
                return argument
            if argument not in narrow:
                narrow[argument] = write(aten._to_copy.default, argument, dtype=torch.bfloat16)
            return narrow[argument]

        args, kwargs = fx.map_arg((node.args, node.kwargs), rounded)
        result = write(node.target, *args, **kwargs)  # type: ignore[arg-type]
        wide = write(aten._to_copy.default, result, dtype=node.meta["val"].dtype)
    narrow[wide] = result
    node.replace_all_uses_with(wide)
    graph.erase_node(node)


def _is_widened(node: Any) -> bool:
    return node.target is aten._to_copy.default and node.args[0].meta["val"].dtype is torch.bfloat16


def _floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)


def _before_outputs(graph: fx.Graph, kept: int) -> set[fx.Node]:
    """The nodes that the outputs depend on: what only the losses depend on keeps its precision."""
    results: Any = graph.output_node().args[0]
    outputs = results[1 : len(results) - kept]
    found: set[fx.Node] = set()
    waiting = [node for node in outputs if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found
