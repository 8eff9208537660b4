"""Graph passes: named rewrites of a captured graph, with a printer to read them by.

A pass never touches the graph it is given. `show` prints a graph, `Pass.diff` what a pass did to one, and
`mycelia.engine.verify` checks the result.
"""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = [
    "Pass",
    "Writer",
    "fake_mode",
    "is_getitem",
    "is_library",
    "nested",
    "rebuild",
    "replace_by",
    "show",
    "size",
    "source_line",
    "value_of",
]

aten = torch.ops.aten


@dataclass(frozen=True)
class Pass:
    """A named rewrite.

    Attributes:
        name: what notes and printouts call it.
        rewrite: changes the graph it is given; `Pass.__call__` gives it a copy.
    """

    name: str
    rewrite: Callable[[fx.Graph], object]

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        """A new module with the rewritten graph; tensors and nested graphs are shared with the old one."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        new = rebuild(module, graph)
        self.rewrite(new.graph)
        new.graph.eliminate_dead_code()
        new.graph.lint()
        new.recompile()
        return new

    def diff(self, module: fx.GraphModule) -> str:
        """What the pass does to a graph, as a unified diff of `show` before and after."""
        before, after = show(module).splitlines(), show(self(module)).splitlines()
        return "\n".join(
            difflib.unified_diff(before, after, "before", f"after {self.name}", lineterm="", n=1)
        )


def rebuild(module: fx.GraphModule | torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule of `graph` with what it refers to taken from `module`."""
    new = fx.GraphModule(module, graph, class_name="Graph")
    new.meta = dict(getattr(module, "meta", {}))
    return new


_TORCH = f"/{os.path.basename(os.path.dirname(os.path.dirname(torch.__file__)))}/torch/"
_ORIGIN: tuple[str, ...] = ("stack_trace", "nn_module_stack")


class Writer:
    """Writes calls into a graph, each with its value on fake tensors, as export does.

    Args:
        graph: the graph; nodes go to its current insertion point.
        origin: the node whose source line and module the new nodes inherit.
    """

    def __init__(self, graph: fx.Graph, origin: fx.Node) -> None:
        self.graph = graph
        self._meta: dict[str, Any] = {key: origin.meta[key] for key in _ORIGIN if key in origin.meta}
        self._mode = fake_mode(graph)

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """One call node."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta = dict(self._meta)
        node.meta["val"] = value_of(node, self._mode)
        return node

    def known(self, value: Any, target: Callable[..., Any], *args: Any) -> fx.Node:
        """One call node whose value is like `value`: for operators that would fix the batch size."""
        node = self.graph.call_function(target, args)
        node.meta = dict(self._meta) | {"val": value}
        return node


def replace_by(node: fx.Node, function: Callable[..., Any], *, whole: bool = True) -> None:
    """Put what `function` computes of a node's arguments in the node's place.

    Args:
        node: a call with its value on record; it is erased.
        function: takes the node's arguments and returns what it returns; of several results, those that
            nobody reads may be None.
        whole: keep composite operators, `linear` among them, as they are.
    """
    graph, sources = node.graph, node.all_input_nodes

    def plain(*values: Any) -> Any:
        known = dict(zip(sources, values, strict=True))
        call: Any = fx.map_arg((node.args, node.kwargs), lambda argument: known[argument])
        return function(*call[0], **call[1])

    with fake_mode(graph), torch.no_grad():
        traced: fx.GraphModule = make_fx(plain, pre_dispatch=whole)(*(s.meta["val"] for s in sources))
    for view in (aten.view.default, aten._unsafe_view.default):  # strides will not be those of the trace
        for found in traced.graph.find_nodes(op="call_function", target=view):
            found.target = aten.reshape.default
    inner = dict(zip(traced.graph.find_nodes(op="placeholder"), sources, strict=True))
    with graph.inserting_before(node):
        results: Any = graph.graph_copy(traced.graph, inner)
    for copied in inner.values():
        for key in _ORIGIN:
            if key in node.meta:
                copied.meta.setdefault(key, node.meta[key])
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):  # each takes one of the results
            if user.users:
                user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


def size(tensor: Tensor, axis: int) -> int:
    """`aten.sym_size`, which `vmap` has no rule for."""
    return tensor.shape[axis]


def value_of(node: fx.Node, mode: Any) -> Any:
    """The value of a call on the fake tensors of its arguments."""
    call: Any = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    args, kwargs = call
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def fake_mode(graph: fx.Graph) -> Any:
    """The mode that the values of a graph's placeholders belong to."""
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    return next(mode for value in values if (mode := getattr(value, "fake_mode", None)) is not None)


def nested(graph: fx.Graph) -> list[fx.Graph]:
    """The branch and body graphs of control-flow operators, at any depth."""
    owner = graph.owning_module
    parts = [] if owner is None else list(owner.modules())
    return [part.graph for part in parts if isinstance(part, fx.GraphModule) and part is not owner]


def is_getitem(node: fx.Node) -> bool:
    """Whether the node takes one element of a tuple."""
    return node.op == "call_function" and node.target is operator.getitem


def source_line(node: fx.Node) -> str:
    """Where a node comes from: module path and the last line of user code on record."""
    stack = node.meta.get("nn_module_stack") or {}
    module = next((str(path) for path, _ in reversed(list(stack.values())) if path), "")
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    frames = list(zip(lines[::2], lines[1::2], strict=False))
    own = [frame for frame in frames if not is_library(frame[0])]
    place = " ".join((own or frames[-1:])[-1]) if frames else ""
    return " ".join(part for part in (module.removeprefix("model."), place) if part) or node.name


def is_library(place: str) -> bool:
    """Whether a stack frame belongs to PyTorch or to capture itself, not to the user's code."""
    path = place.replace(os.sep, "/")
    return any(part in path for part in (_TORCH, "/engine/tracing.py", "<eval_with_key>", "<string>"))


def show(module: fx.GraphModule) -> str:
    """The graph as text: one line a node with its value's type and the module it comes from."""
    lines = []
    for node in module.graph.nodes:
        if node.op == "output":
            lines.append(f"return {fx.map_arg(node.args[0], lambda part: fx.Proxy(part).node)}")
            continue
        stack = node.meta.get("nn_module_stack") or {}
        path = next((str(path) for path, _ in reversed(list(stack.values())) if path), "")
        call = "" if node.op == "placeholder" else f" = {node.target}{node.args}{node.kwargs or ''}"
        lines.append(f"{node.name}: {_type(node.meta.get('val'))}{call}" + (f"  # {path}" if path else ""))
    return "\n".join(lines)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_type(part) for part in value)})"
    return type(value).__name__
