"""The check that runs after a graph pass in tests, and on every graph read from a file."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from mycelia.engine.errors import CaptureError
from mycelia.engine.exported import TAIL, order
from mycelia.engine.graph import fake_mode, is_getitem, nested, size, source_line, value_of
from mycelia.engine.schema import Role, Schema
from mycelia.engine.seeding import is_random

__all__ = ["verify"]

# sizes and arithmetic on them
_SCALAR = {
    size,
    *(getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "pow", "truediv")),
    *(getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_")),
    *(math.ceil, math.floor, math.trunc),
    *(torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_float, torch.sym_int, torch.sym_ite),
}


def verify(module: fx.GraphModule, schema: Schema, *, values: bool = False) -> None:
    """Check a Program's graph.

    Its arguments are the schema's tensors and `TAIL`; every call is a PyTorch operator, none of them random,
    none in place, and carries its value on fake tensors; the results are losses, outputs, and one tensor per
    buffer and counter that keeps dtype and shape.

    Args:
        module: the graph.
        schema: the tensors of the model.
        values: compute every value again and compare dtype and shape; slow.

    Raises:
        CaptureError: the first thing that is wrong, with its source line.
    """
    module.graph.lint()
    expected = (*order(schema), *TAIL)
    holders = module.graph.find_nodes(op="placeholder")
    if len(holders) != len(expected):
        raise CaptureError(
            f"a graph of {len(holders)} arguments", rule=f"{len(expected)}: {expected}", who="verify"
        )
    for name, holder in zip(expected, holders, strict=True):
        entry = next((entry for entry in schema if entry.name == name), None)
        if entry is not None:
            _same(holder, holder.meta.get("val"), entry.shape, entry.dtype, f"the schema's {name!r}")
    for graph in (module.graph, *nested(module.graph)):
        for node in graph.nodes:
            _check(node, nested=graph is not module.graph)
    if values:
        for node in module.graph.nodes:
            _check_value(node, fake_mode(module.graph))
    results: Any = module.graph.output_node().args[0]
    kept = schema.of(Role.BUFFER, Role.COUNTER)
    if len(results) < 1 + len(kept) or not isinstance(results[0], fx.Node):
        raise CaptureError(
            f"a graph of {len(results)} results", rule="losses, outputs, buffers", who="verify"
        )
    for entry, node in zip(kept, results[len(results) - len(kept) :], strict=True):
        _same(node, node.meta.get("val"), entry.shape, entry.dtype, f"buffer {entry.name!r}")


def _check(node: fx.Node, *, nested: bool) -> None:
    if node.op in ("placeholder", "output", "get_attr"):
        return
    target = node.target
    operator_ = isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
    if node.op != "call_function" or not (operator_ or target in _SCALAR or is_getitem(node)):
        raise _wrong(node, f"it calls {target}", "a graph calls PyTorch operators and nothing else")
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        raise _wrong(node, f"{target} changes its argument", "a graph is functional")
    if is_random(node):
        raise _wrong(node, f"{target} draws random numbers", "randomness is driven by the seed")
    if "val" not in node.meta and node.users and not nested:
        raise _wrong(node, f"{target} carries no value", "each node carries its value on fake tensors")


def _check_value(node: fx.Node, mode: Any) -> None:
    # control flow needs its branches, and a recurrent operator would fix the batch size
    plain = isinstance(node.target, torch._ops.OpOverload) and str(node.target) not in _UNRUN
    if node.op != "call_function" or not plain:
        return
    found = value_of(node, mode)
    pairs = (
        zip(found, node.meta["val"], strict=True) if isinstance(found, tuple) else [(found, node.meta["val"])]
    )
    for new, old in pairs:
        if isinstance(new, Tensor) and old is not None:
            _same(node, old, tuple(new.shape), new.dtype, "what its operator gives")


_UNRUN = {
    f"aten.{name}.{form}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")
}


def _same(node: fx.Node, value: Any, shape: tuple[Any, ...], dtype: torch.dtype, what: str) -> None:
    if not isinstance(value, Tensor) or value.dtype != dtype or _text(value.shape) != _text(shape):
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise _wrong(node, f"its value is {found}", f"{what} is {dtype} {tuple(shape)}")


def _text(shape: Any) -> list[str]:
    return [str(size) for size in shape]


def _wrong(node: fx.Node, found: str, rule: str) -> CaptureError:
    return CaptureError(f"node {node.name}: {found}", rule=rule, who=source_line(node))
