"""Weight updates of linear layers as one matrix product into the weight itself.

The gradient of a linear layer's weight W [o, i] is a product G^T X of a batch's output gradients G [n, o] and
inputs X [n, i]. A plain SGD step materialises it, scales it and subtracts it: three passes over memory of the
weight's size. `W.addmm_(G^T, X, alpha=-lr)` does all in one pass, and the factors are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

__all__ = ["apply_products", "defer_products"]

aten = torch.ops.aten

_WORTHWHILE = 16_384  # elements; below, a call costs more than the passes it saves


def defer_products(graph: fx.Graph, scale: fx.Node) -> tuple[int, ...]:
    """Pass over a traced step: take updates W <- W - scale * (A @ B) out, and return the factors instead.

    Args:
        graph: ends with one in-place copy per updated argument and an output tuple.
        scale: the placeholder of the learning rate.

    Returns:
        positions among the arguments of the weights W that are left to `apply_products`. For each, the graph
        now returns two tensors more, -scale * A and B, in this order behind its other outputs.
    """
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    output = graph.output_node()
    returned = list(output.args[0])  # type: ignore[arg-type]
    found = []
    for copy in [node for node in graph.nodes if node.target is aten.copy_.default]:
        weight, new = copy.args[:2]
        product = _product(weight, new, scale)
        if product is None or _numel(weight) < _WORTHWHILE:
            continue
        left, right = product.args
        with graph.inserting_before(output):
            minus = graph.call_function(aten.neg.default, (scale,))
            scaled = graph.call_function(aten.mul.Tensor, (left, minus))
        returned += [scaled, right]
        found.append(arguments.index(weight))
        graph.erase_node(copy)
    if found:
        output.args = (tuple(returned),)
        graph.eliminate_dead_code()
        graph.lint()
    return tuple(found)


def apply_products(weights: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """Add A @ B to each weight in place; `factors` is A, B, A, B, ..."""
    for weight, left, right in zip(weights, factors[::2], factors[1::2], strict=True):
        weight.addmm_(left, right)


def _product(weight: Any, new: Any, scale: fx.Node) -> fx.Node | None:
    """The matrix product in `new = weight - scale * transposed twice(product)`, if nothing else reads it."""
    if not _is(new, aten.sub.Tensor) or new.args[0] is not weight or new.kwargs:
        return None
    change = new.args[1]
    if not _is(change, aten.mul.Tensor) or change.args[0] is not scale:
        return None
    node: Any = change.args[1]
    transposed = False
    read_once = [new, change]
    while _is(node, aten.t.default):
        read_once.append(node)
        node, transposed = node.args[0], not transposed
    read_once.append(node)
    if transposed or not _is(node, aten.mm.default) or any(len(part.users) != 1 for part in read_once):
        return None
    return cast(fx.Node, node)


def _is(node: Any, target: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def _numel(node: fx.Node) -> int:
    return int(node.meta["val"].numel()) if "val" in node.meta else 0
