"""Graphs that travel to a spawned process as they are.

`fx.GraphModule` pickles its source and traces it again on arrival, which looks into functions that belong to
one node. Here the nodes themselves are written down: operators by their name, functions by theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

__all__ = ["PortableGraph"]


@dataclass(frozen=True)
class _Node:
    index: int


@dataclass(frozen=True)
class _Operator:
    name: str  # such as aten.add.Tensor


@dataclass(frozen=True)
class PortableGraph:
    """The nodes of a graph module, and the modules and tensors it holds.

    Attributes:
        rows: (name, op, target, args, kwargs) in order, with nodes replaced by their positions.
        attributes: by dotted name; graph modules among them are portable graphs.
        outputs: the structure of what the model returns, see `structure`.
    """

    rows: tuple[tuple[str, str, Any, Any, Any], ...]
    attributes: tuple[tuple[str, Any], ...]
    outputs: Any

    @classmethod
    def of(cls, module: fx.GraphModule) -> PortableGraph:
        """Write a graph module down."""
        place: dict[fx.Node, Any] = {node: _Node(index) for index, node in enumerate(module.graph.nodes)}
        rows = tuple(
            (
                node.name,
                node.op,
                _written(node.target),
                fx.node.map_arg(node.args, place.__getitem__),
                fx.node.map_arg(node.kwargs, place.__getitem__),
            )
            for node in module.graph.nodes
        )
        names = sorted({str(node.target) for node in module.graph.nodes if node.op == "get_attr"})
        found = [(name, _attribute(module, name)) for name in names]
        attributes = tuple((n, cls.of(v) if isinstance(v, fx.GraphModule) else v) for n, v in found)
        return cls(rows, attributes, module.meta.get("outputs"))

    def build(self) -> fx.GraphModule:
        """The graph module again; without what tracing knew of shapes and source lines."""
        root = nn.Module()
        for name, value in self.attributes:
            owner = root
            *path, last = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            setattr(owner, last, value.build() if isinstance(value, PortableGraph) else value)
        graph = fx.Graph()
        made: list[fx.Node] = []
        for name, op, target, args, kwargs in self.rows:
            found = _operator(target.name) if isinstance(target, _Operator) else target
            made.append(graph.create_node(op, found, _filled(args, made), _filled(kwargs, made), name))
        module = fx.GraphModule(root, graph)
        module.meta["outputs"] = self.outputs
        return module


def _written(target: Any) -> Any:
    if isinstance(target, torch._ops.OpOverload):
        return _Operator(str(target))
    if isinstance(target, torch._ops.HigherOrderOperator):  # control flow
        return _Operator(f"higher_order.{target.name()}")
    return target


def _filled(value: Any, made: list[fx.Node]) -> Any:
    if isinstance(value, _Node):
        return made[value.index]
    if isinstance(value, tuple):
        return tuple(_filled(part, made) for part in value)
    if isinstance(value, list):
        return [_filled(part, made) for part in value]
    if isinstance(value, dict):
        return {key: _filled(part, made) for key, part in value.items()}
    return value


def _operator(name: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _attribute(module: nn.Module, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found
