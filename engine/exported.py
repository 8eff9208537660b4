"""Between `torch.export`'s form and the graph of a Program.

Export names a placeholder for every parameter, buffer and constant. A Program's graph has one placeholder
per schema tensor in a fixed order, then `inputs`, `targets`, `seed` and `first`; constants are attributes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from mycelia.engine.errors import CaptureError
from mycelia.engine.graph import Writer, fake_mode, rebuild, size, source_line, value_of
from mycelia.engine.schema import Role, Schema

__all__ = ["TAIL", "from_graph", "keep_no_grad", "order", "quiet", "to_graph"]

aten = torch.ops.aten

_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_END = 2**63 - 1  # where a slice without an end ends

TAIL = ("inputs", "targets", "seed", "first")
"""What follows the schema's tensors in the arguments of a graph."""

# they log what the error or the result says anyway
_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._export.serde.serialize")

Results = Callable[[Sequence[Any], Mapping[str, fx.Node]], Sequence[Any]]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Export without its printing, logging and warnings (own deprecations, RNN weight lists)."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def order(schema: Schema) -> list[str]:
    """Names of the schema's tensors in the order of a graph's arguments."""
    groups = ((Role.PARAMETER,), (Role.BUFFER, Role.COUNTER), (Role.FROZEN,))
    return [entry.name for group in groups for entry in schema.of(*group)]


def keep_no_grad(exported: ExportedProgram) -> None:
    """Detach, in place, what is computed under `torch.no_grad()`; `run_decompositions` forgets that it was.

    Raises:
        CaptureError: a change in place, under `no_grad`, of a tensor that has a gradient.
    """
    for part in exported.graph_module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in part.graph.find_nodes(op="call_function", target=_SET_GRAD):
            enabled, body = node.args[:2]
            if not enabled and isinstance(body, fx.Node):
                inner = part.get_submodule(str(body.target))
                if isinstance(inner, fx.GraphModule):
                    _check_in_place(inner.graph, node)
                    _detach_results(inner)


def _detach_results(module: fx.GraphModule) -> None:
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        for node in output.all_input_nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.is_floating_point():
                detached = module.graph.call_function(aten.detach.default, (node,))
                detached.meta = dict(node.meta)
                output.replace_input_with(node, detached)
    module.recompile()


def _check_in_place(body: fx.Graph, call: fx.Node) -> None:
    given = dict(zip(body.find_nodes(op="placeholder"), call.args[2:], strict=True))
    for node in body.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            continue
        changed = given.get(node.all_input_nodes[0])
        if isinstance(changed, fx.Node) and changed.op != "placeholder":
            raise CaptureError(
                f"{node.target} changes a tensor in place under torch.no_grad()",
                rule="the gradient of such a change cannot be exported",
                fix="compute a new tensor",
                who=source_line(node),
            )


def to_graph(
    exported: ExportedProgram,
    names: Mapping[str, str],
    schema: Schema,
    initial: Mapping[str, Tensor],
    results: Results,
) -> fx.GraphModule:
    """The graph of an exported program.

    Args:
        exported: functional, as `run_decompositions({})` leaves it.
        names: what each placeholder stands for, by its name: a schema tensor or one of `TAIL`. The others
            are constants.
        schema: the tensors of the model.
        initial: their values, for those that this graph does not use.
        results: from the values that `exported` returns and the new placeholders, what the graph returns.

    Raises:
        CaptureError: a constant that is no tensor, or one that is trained.
    """
    old = exported.graph
    graph = fx.Graph()
    holders: dict[str, fx.Node] = {}
    for number, name in enumerate(order(schema)):
        holders[name] = graph.placeholder(f"t{number}_{name.replace('.', '_')}")
    for name in TAIL[:-1]:
        holders[name] = graph.placeholder(name)
    holders["first"] = graph.placeholder("first", default_value=0)
    root = nn.Module()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in old.find_nodes(op="placeholder"):
        known = names.get(node.name)
        mapping[node] = _constant(graph, root, exported, node) if known is None else holders[known]
        mapping[node].meta["val"] = node.meta["val"]
    _fill_values(graph, holders, initial)
    for node in old.find_nodes(op="get_attr"):  # the branches of control-flow operators
        setattr(root, node.target, getattr(exported.graph_module, node.target))
    values: Any = graph.graph_copy(old, mapping)
    graph.output(tuple(results(values, holders)))
    _tidy(graph, holders["inputs"], holders["targets"])
    return rebuild(root, graph)


def _constant(graph: fx.Graph, root: nn.Module, exported: ExportedProgram, node: fx.Node) -> fx.Node:
    """A tensor that is part of the code rather than of the model, e.g. a loss's class weights."""
    signature = exported.graph_signature
    tables = (
        signature.inputs_to_parameters,
        signature.inputs_to_buffers,
        signature.inputs_to_lifted_tensor_constants,
    )
    target = next((table[node.name] for table in tables if node.name in table), node.name)
    value = exported.constants.get(target, exported.state_dict.get(target))
    if not isinstance(value, Tensor):
        raise CaptureError(
            f"graph input {target!r} is a {type(value).__name__}",
            rule="a Program is a function of tensors",
            fix="remove the custom object from the model, or capture with backend='eager'",
            who=target,
        )
    if value.requires_grad:
        raise CaptureError(
            f"the trainable tensor {target!r} is not a parameter of the model",
            rule="what is trained belongs to the model",
            fix="register it as nn.Parameter, or detach it",
            who=target,
        )
    name = f"constant_{len(list(root.buffers()))}"
    root.register_buffer(name, value.detach().clone())
    return graph.get_attr(name)


def _fill_values(graph: fx.Graph, holders: Mapping[str, fx.Node], initial: Mapping[str, Tensor]) -> None:
    mode = fake_mode(graph)
    for name, holder in holders.items():
        if "val" not in holder.meta:
            value = initial.get(name, torch.zeros((), dtype=torch.int64))
            holder.meta["val"] = mode.from_tensor(value, static_shapes=True)


def _tidy(graph: fx.Graph, inputs: fx.Node, targets: fx.Node) -> None:
    """Small repairs of what export gives."""
    for node in list(graph.nodes):
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # the caller's batch may have other strides than the example
        elif node.target is aten.sym_size.int:
            node.target = size
            if node.args == (targets, 0):
                node.args = (inputs, 0)  # prediction has no targets
        elif node.target is aten.cross_entropy_loss.default:
            node.meta["val"] = value_of(node, fake_mode(graph))  # torch 2.13 records a 0-d value for "none"
        elif node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)  # of dtype and device, which a graph fixes anyway
        elif node.target is aten.copy.default:
            _assign(graph, node)
        elif node.target is aten.slice.Tensor and node.args[2:] == (0, _END):
            node.replace_all_uses_with(node.all_input_nodes[0])
        elif node.target is aten.slice_scatter.default:
            _bound(graph, node)
        elif node.target is aten.instance_norm.default and node.args[3] is not None:
            raise CaptureError(
                "InstanceNorm keeps running statistics",
                rule="the operator changes them behind export's back, and a Program is pure",
                fix="use track_running_stats=False, or capture with backend='eager'",
                who=source_line(node),
            )


def _bound(graph: fx.Graph, node: fx.Node) -> None:
    """`slice_scatter` to the end with that end as a number: `vmap` knows no other."""
    old, _, axis, start, end = (*node.args, *(0, 0, _END)[len(node.args) - 2 :])[:5]
    if end == _END and isinstance(old, fx.Node) and isinstance(axis, int):
        end = old.meta["val"].shape[axis]
        if start == 0 and len(node.args) < 6:
            node.replace_all_uses_with(node.all_input_nodes[1])
            return
        with graph.inserting_before(node):
            end = end if isinstance(end, int) else Writer(graph, node)(size, old, axis)
        node.args = (*node.args[:3], start, end, *node.args[5:])


def _assign(graph: fx.Graph, node: fx.Node) -> None:
    """`copy(old, new)` as `new` in the shape and dtype of `old`: the operator itself has no derivative."""
    old, new = node.args[:2]
    if not isinstance(old, fx.Node) or not isinstance(new, fx.Node):
        return
    with graph.inserting_before(node):
        write = Writer(graph, node)
        if new.meta["val"].dtype != old.meta["val"].dtype:
            new = write(aten._to_copy.default, new, dtype=old.meta["val"].dtype)
        if [str(size) for size in new.meta["val"].shape] != [str(size) for size in old.meta["val"].shape]:
            new = write(aten.expand_as.default, new, old)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


class _Run(nn.Module):
    """Runs a graph node by node, so that export keeps each node's source line."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *args: Tensor) -> Any:
        with fx.traceback.preserve_node_meta():
            return fx.Interpreter(self.graph).run(*args)


def from_graph(
    graph: fx.GraphModule, schema: Schema, initial: Mapping[str, Tensor], example: tuple[Tensor, Tensor]
) -> ExportedProgram:
    """The exported program of a graph, without example inputs."""
    # a tensor given twice would become one argument
    last = (torch.zeros((), dtype=torch.int64) for _ in range(2))
    args = (*(initial[name].detach() for name in order(schema)), *(part.clone() for part in example), *last)
    held = graph.graph.find_nodes(op="placeholder")
    batch = torch.export.Dim("batch")
    shapes = tuple(
        {0: batch} if node.name in TAIL[:2] and isinstance(node.meta["val"].shape[0], torch.SymInt) else None
        for node in held
    )
    with quiet():
        exported = torch.export.export(_Run(graph), args, dynamic_shapes=(shapes,), strict=False)
    exported.example_inputs = None  # they would be written as a pickle, and are somebody's data
    return exported
