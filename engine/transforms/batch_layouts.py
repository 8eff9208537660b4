"""Where the examples lie in each tensor of a graph, which need not be the first axis.

Examples are told apart without knowing what an operator means: the pass is run on the captured example, once
as it is and once with each example changed, and whatever differs belongs to the example that was changed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from mycelia.engine.errors import CaptureError
from mycelia.engine.graph import source_line
from mycelia.engine.program import Program
from mycelia.engine.schema import Role
from mycelia.engine.transforms.coupling import coupling
from mycelia.engine.types import Tensors

__all__ = ["BatchLayout", "batch_layouts", "graph_arguments", "refuse_coupling", "symbolic_axes"]


class BatchLayout(NamedTuple):
    """Where the examples lie in a tensor: `axis` is of size `outer * B * inner`, in this order."""

    axis: int
    outer: int
    inner: int

    def front(self, tensor: Tensor, batch: int) -> Tensor:
        """The tensor as [B, ...]: the other factors of the axis stay where the axis was."""
        shape = tensor.shape
        if self == (0, 1, 1):
            return tensor
        split = (*shape[: self.axis], self.outer, batch, self.inner, *shape[self.axis + 1 :])
        moved = tensor.reshape(split).movedim(self.axis + 1, 0)
        # factors of one are dropped, so that a plain batch axis leaves no trace
        keep = [
            size
            for place, size in enumerate(moved.shape)
            if not (place in (self.axis + 1, self.axis + 2) and size == 1)
        ]
        return moved.reshape(keep)


def refuse_coupling(program: Program) -> None:
    """Refuse a Program one of whose operators is known to mix examples.

    Raises:
        CaptureError: there is one.
    """
    reason = coupling(program)
    if reason is not None:
        raise _mixing(reason)


def batch_layouts(program: Program) -> dict[str, BatchLayout | None]:
    """Where the examples lie in each tensor of the training graph; None where they have no part in it.

    Found by running: an element belongs to example j if it changes when example j does.

    Raises:
        CaptureError: the Program has no graph, or an operator mixes the examples; the first one is named.
    """
    module = program.graph("batch_layouts")
    if program.example is None:
        raise CaptureError("the Program has no example to run", fix="capture it again", who="batch_layouts")
    inputs, targets = _distinct(*program.example)
    batch = inputs.shape[0]
    plain = _values(program, module, inputs, targets)
    marks: dict[str, list[Tensor]] = {name: [] for name in plain}
    for example in range(batch):
        other = _values(program, module, *_changed(inputs, targets, example))
        for name, value in plain.items():
            marks[name].append(~_equal(value, other[name]))
    layouts: dict[str, BatchLayout | None] = {}
    for node in module.graph.nodes:
        if node.name not in plain:
            continue
        mark = marks[node.name]
        # memory that nobody has written to holds anything
        if "empty" in str(node.target) or not any(bool(part.any()) for part in mark):
            layouts[node.name] = _untouched(node)
            continue
        layout = _layout(mark, plain[node.name].shape, node.meta.get("val"), batch)
        if layout is None and node.op == "call_function":
            raise _mixing(f"{node.target} mixes the examples of a batch ({source_line(node)})")
        layouts[node.name] = layout
    return layouts


def _mixing(reason: str) -> CaptureError:
    return CaptureError(
        reason,
        rule="the loss of an example depends on no other example; otherwise it has no gradient of its own",
        fix="use GroupNorm or LayerNorm in place of BatchNorm, and losses that look at one example",
        who="taps",
    )


def _equal(one: Tensor, two: Tensor) -> Tensor:
    """Element by element, where NaN equals NaN."""
    same = one == two
    return same | (one.isnan() & two.isnan()) if one.is_floating_point() else same


_EXAMPLES = 3


def _distinct(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Three examples: those of the capture, repeated where there are fewer, with values that differ."""
    rows = torch.arange(_EXAMPLES) % inputs.shape[0]
    inputs, targets = inputs[rows].clone(), targets[rows].clone()
    draw = torch.Generator().manual_seed(1)
    if inputs.is_floating_point():
        inputs += torch.randn(inputs.shape, generator=draw, dtype=inputs.dtype)
    return inputs, targets


def _changed(inputs: Tensor, targets: Tensor, example: int) -> tuple[Tensor, Tensor]:
    inputs, targets = inputs.clone(), targets.clone()
    draw = torch.Generator().manual_seed(2 + example)
    for part in (inputs, targets):
        row = part[example]
        if part.is_floating_point():
            part[example] = row * 1.5 + torch.randn(row.shape, generator=draw, dtype=part.dtype)
        elif part.dtype == torch.bool:
            part[example] = ~row
        else:  # numbers of classes or tokens: others that occur, so that they are valid
            low, high = int(part.min()), int(part.max())
            part[example] = low + (row - low + 1) % (high - low + 1)
    return inputs, targets


def _values(program: Program, module: fx.GraphModule, inputs: Tensor, targets: Tensor) -> Tensors:
    """The value of every node of the training graph that is a tensor."""
    arguments = graph_arguments(program, *program.init())
    record = _Record(module)
    with torch.no_grad():
        record.run(*arguments, inputs, targets, torch.tensor(0), 0)
    return record.values


class _Record(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: Tensors = {}

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if isinstance(value, Tensor) and node.op != "output":
            self.values[node.name] = value.detach().clone()
        return value


def _untouched(node: fx.Node) -> BatchLayout | None:
    """A tensor that no example changes, but that has one row for each, as zeros of the batch's size have."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    axes = symbolic_axes(value)
    plain = len(axes) == 1 and _factor(value.shape[axes[0]]) == 1
    return BatchLayout(axes[0], 1, 1) if plain else None


def _factor(size: Any) -> int | None:
    """The k of a symbolic size k * B; None for another expression."""
    expression = size.node.expr
    symbols = list(expression.free_symbols)
    if len(symbols) != 1:
        return None
    factor = expression / symbols[0]
    return int(factor) if factor.is_Integer else None


def _layout(marks: list[Tensor], shape: torch.Size, value: Any, batch: int) -> BatchLayout | None:
    """The layout that explains which elements each example changed; None if there is none."""
    axes = symbolic_axes(value) if isinstance(value, Tensor) else []
    for axis in axes or range(len(shape)):
        if shape[axis] % batch:
            continue
        factor = shape[axis] // batch
        # an element that is changed by example j lies in a row of the axis that belongs to j
        rows = torch.stack([mark.movedim(axis, 0).reshape(shape[axis], -1).any(1) for mark in marks])
        for outer in (n for n in range(1, factor + 1) if factor % n == 0):
            owner = torch.arange(batch).repeat_interleave(factor // outer).repeat(outer)
            if not bool((rows & (owner[None, :] != torch.arange(batch)[:, None])).any()):
                return BatchLayout(axis, outer, factor // outer)
    return None


def symbolic_axes(value: Tensor) -> list[int]:
    """The axes whose size depends on the batch."""
    sizes: tuple[Any, ...] = tuple(value.shape)
    return [axis for axis, size in enumerate(sizes) if isinstance(size, torch.SymInt)]


def graph_arguments(program: Program, params: Tensors, buffers: Tensors) -> list[Tensor]:
    """What a graph of the Program takes before the batch, see `Graphs`."""
    schema = program.schema
    return [
        *(params[entry.name] for entry in schema.of(Role.PARAMETER)),
        *(buffers[entry.name] for entry in schema.of(Role.BUFFER, Role.COUNTER)),
        *program.frozen.values(),
    ]
