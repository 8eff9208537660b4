"""Taps: what each use of each parameter read, and the gradient that came back to it, in one backward pass.

The gradient of a parameter is a product of two things an ordinary backward pass has in its hands: the input
`a` of the operator that uses it, and the gradient `g` of that operator's output. Multiplying them sums over
the batch and loses the examples. A tapped Program returns both factors instead, and computes no gradient of
any parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from mycelia.engine.errors import CaptureError
from mycelia.engine.graph import Pass, Writer, rebuild, replace_by, source_line
from mycelia.engine.program import Program
from mycelia.engine.schema import Role, Schema
from mycelia.engine.transforms.batch_layouts import (
    BatchLayout,
    batch_layouts,
    graph_arguments,
    refuse_coupling,
    symbolic_axes,
)
from mycelia.engine.transforms.cells import cells
from mycelia.engine.transforms.layout import pool_in_pairs, relu_after_pool
from mycelia.engine.transforms.unfused import UNFUSED
from mycelia.engine.types import Tensors

__all__ = [
    "CompiledPass",
    "Computed",
    "Reads",
    "Site",
    "Tap",
    "Tapped",
    "TappedProgram",
    "View",
    "taps",
]

aten = torch.ops.aten

# views of a parameter that select or rearrange its elements, so that norms are kept
_VIEWS = {
    aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten.reshape.default,
    aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.alias.default,
    aten.flatten.using_ints, aten.numpy_T.default, aten.squeeze.default, aten.contiguous.default,
    aten.narrow.default, aten.swapaxes.default, aten.swapdims.default, aten.movedim.int,
    aten.unflatten.int, aten._unsafe_view.default,
}  # fmt: skip
# ... and those that give several tensors
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int}
# the same values in another dtype or place; norms are taken in float32 at least
_CASTS = {aten._to_copy.default, aten.to.dtype, aten.clone.default}


class Reads(NamedTuple):
    """What an operator reads: the positions of its parameters, and of the tensors that hold the examples."""

    parameters: tuple[int, ...]
    inputs: tuple[int, ...]


class View(NamedTuple):
    """One step from a parameter to what an operator reads: `target(value, *args)`, then an element of it."""

    target: Any
    args: tuple[Any, ...]
    element: int | None = None

    def __call__(self, value: Tensor) -> Tensor:
        """The view of a tensor."""
        result: Any = self.target(value, *self.args)
        element: Tensor = result if self.element is None else result[self.element]
        return element


@dataclass(frozen=True)
class Computed:
    """What an operator reads, computed from parameters alone: a function of one of them, the others fixed.

    Attributes:
        graph: from the values of `sources` to what is read.
        sources: names of the parameters.
        place: the one among them that it is a function of.
        values: of `sources`; see `Site.bound`.
    """

    graph: fx.GraphModule
    sources: tuple[str, ...]
    place: int
    values: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)

    def __call__(self, value: Tensor) -> Tensor:
        """What is read."""
        arguments = list(self.values)
        arguments[self.place] = value
        result: Tensor = self.graph.forward(*arguments)
        return result


@dataclass(frozen=True)
class Site:
    """A place where an operator reads a parameter.

    Attributes:
        parameter: its name.
        argument: position among the operator's arguments.
        views: from the parameter to the argument, outermost last.
    """

    parameter: str
    argument: int
    views: tuple[View | Computed, ...]

    @property
    def computed(self) -> bool:
        """Whether the argument is more than some of the parameter's entries, rearranged."""
        return any(isinstance(view, Computed) for view in self.views)

    def bound(self, params: Tensors) -> Site:
        """The site at these values of the parameters, so that `view` can be called."""
        if not self.computed:
            return self
        views = (
            replace(view, values=tuple(params[name].detach() for name in view.sources))
            if isinstance(view, Computed)
            else view
            for view in self.views
        )
        return replace(self, views=tuple(views))

    def view(self, parameter: Tensor) -> Tensor:
        """What the operator reads."""
        for view in self.views:
            parameter = view(parameter)
        return parameter


@dataclass(frozen=True)
class Tap:
    """One operator that reads parameters.

    Attributes:
        target: the operator.
        args: its arguments; tensors are None, see `inputs` and `sites`.
        sites: the parameters it reads.
        inputs: positions of the tensors that depend on the examples.
        layouts: where the examples lie in each of `inputs`, in this order.
        output: where the examples lie in the result.
    """

    target: Any
    args: tuple[Any, ...]
    sites: tuple[Site, ...]
    inputs: tuple[int, ...]
    layouts: tuple[BatchLayout, ...]
    output: BatchLayout


class Tapped(NamedTuple):
    """One pass.

    Attributes:
        losses: one per example [B].
        buffers: float buffers and counters after the pass.
        values: for each tap, the tensors at its `inputs`, examples in front.
        grads: for each tap, the gradient of the sum of the losses in its result, examples in front.
    """

    losses: Tensor
    buffers: Tensors
    values: list[tuple[Tensor, ...]]
    grads: list[Tensor]


@dataclass(frozen=True)
class CompiledPass:
    """`TappedProgram.flat` for batches of one shape.

    Attributes:
        shape: of the inputs.
        run: takes and returns what `flat` does.
    """

    shape: tuple[int, ...]
    run: Callable[[list[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class TappedProgram:
    """A Program rewritten by `taps`.

    Attributes:
        program: the Program it was made of.
        taps: the operators that are tapped, in the order they run.
        unmatched: why a parameter is not covered by the taps, by name.
        unused: parameters that the losses do not depend on.
        compiled: a faster form of the pass for batches of one shape, see `compile_taps`.
    """

    program: Program
    taps: tuple[Tap, ...]
    unmatched: Mapping[str, str]
    unused: tuple[str, ...]
    graph: fx.GraphModule
    compiled: CompiledPass | None = None

    def __call__(
        self,
        params: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        targets: Tensor,
        *,
        seed: int | Tensor = 0,
        first: int | Tensor = 0,
    ) -> Tapped:
        """One forward pass, and one backward pass that ends at the first tap.

        Args:
            params: trainable tensors by name.
            buffers: float buffers and counters by name; not changed.
            inputs: [B, ...].
            targets: [B, ...].
            seed: see `Program.forward`.
            first: see `Program.forward`.
        """
        program, batch = self.program, inputs.shape[0]
        arguments = self.arguments(params, buffers, inputs, targets, seed, first)
        compiled = self.compiled if self.compiled and self.compiled.shape == tuple(inputs.shape) else None
        with torch.no_grad():
            losses, *found = compiled.run(arguments) if compiled else self.flat(arguments)
            names = [entry.name for entry in program.schema.of(Role.BUFFER, Role.COUNTER)]
            kept = {name: found.pop(0).detach() for name in names}
            grads = [tap.output.front(found.pop(0), batch) for tap in self.taps]
            values = [
                tuple(layout.front(found.pop(0).detach(), batch) for layout in tap.layouts)
                for tap in self.taps
            ]
        return Tapped(losses, kept, values, grads)

    def arguments(
        self,
        params: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        targets: Tensor,
        seed: int | Tensor,
        first: int | Tensor,
    ) -> list[Tensor]:
        """What `flat` takes."""
        numbers = [n if isinstance(n, Tensor) else torch.tensor(n, dtype=torch.int64) for n in (seed, first)]
        return [*graph_arguments(self.program, params, buffers), inputs, targets, *numbers]

    def flat(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """The pass on and to flat lists, which is what a plan compiles.

        Args:
            arguments: parameters, buffers and counters, frozen tensors, inputs, targets, seed, first.

        Returns:
            The losses; buffers and counters; for each tap the gradient of its result; what each tap read.
        """
        with torch.enable_grad():
            losses, after, outputs, read = self.graph.forward(*(part.detach() for part in arguments))
            total = losses.sum()
        found: tuple[Tensor | None, ...] = (None,) * len(outputs)
        if outputs and total.requires_grad:
            found = torch.autograd.grad(total, [output.edge for output in outputs], allow_unused=True)
        grads = (
            output.like.clone() if grad is None else grad for output, grad in zip(outputs, found, strict=True)
        )
        return [losses.detach(), *after, *grads, *(part for parts in read for part in parts)]


def taps(program: Program, operators: Mapping[Any, Reads]) -> TappedProgram:
    """Rewrite the training pass so that it returns what each use of each parameter read and got back.

    Recurrent layers are unrolled into cells, and operators that hide how they use a parameter are written as
    plain ones (`UNFUSED`). What is added to the examples or multiplies them element by element is expanded to
    one copy an example first, whose gradient is that of the example.

    Args:
        program: its training pass must treat the examples one by one.
        operators: what can be tapped, and what it reads; `aten.expand.default` among them for parameters
            that meet the examples element by element.

    Raises:
        CaptureError: the Program has no graph, or an operator mixes examples (named with its module and
            source line).
    """
    program.graph("taps")
    refuse_coupling(program)  # before what tells is rewritten
    schema = program.schema

    def tappable(graph: fx.Graph) -> None:
        cells.rewrite(graph)
        _unfuse(graph, schema)
        _spread(graph, schema)

    program = program.rewrite(Pass("taps", tappable))
    module = program.graph("taps")
    names = [entry.name for entry in schema.of(Role.PARAMETER)]
    found = _sites(program, module, operators)
    layouts = batch_layouts(program)
    covered: dict[fx.Node, list[Site]] = {}
    unmatched = dict(found.unmatched)
    for node, sites in found.sites.items():
        reason = _untappable(node, sites, operators[node.target], layouts)
        if reason is None:
            covered[node] = sites
        else:
            unmatched |= {site.parameter: reason for site in sites}
    # a parameter is covered with all its uses or not at all
    for node in list(covered):
        covered[node] = [site for site in covered[node] if site.parameter not in unmatched]
        if not covered[node]:
            del covered[node]
    order = [node for node in module.graph.nodes if node in covered]
    chosen = tuple(_tap(node, covered[node], layouts) for node in order)
    used = {site.parameter for tap in chosen for site in tap.sites}
    unused = tuple(name for name in names if name not in used and name not in unmatched)
    graph = _rewritten(program, module, [node.name for node in order], [tap.inputs for tap in chosen])
    return TappedProgram(program, chosen, unmatched, unused, graph)


class _Found(NamedTuple):
    sites: dict[fx.Node, list[Site]]
    unmatched: dict[str, str]


def _made(graph: fx.Graph, schema: Schema) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """The nodes that neither the batch nor a buffer reaches, and the parameters their gradient goes to."""
    parameters = list(graph.find_nodes(op="placeholder"))[: len(schema.of(Role.PARAMETER))]
    found: dict[fx.Node, tuple[fx.Node, ...]] = {node: (node,) for node in parameters}
    found |= dict.fromkeys(_frozen(graph, schema), ())
    for node in graph.nodes:
        if node.op == "get_attr":
            found[node] = ()
        elif node.op == "call_function" and all(part in found for part in node.all_input_nodes):
            value = node.meta.get("val")
            stops = node.target is aten.detach.default or (
                isinstance(value, Tensor) and not value.is_floating_point()
            )
            parts = [] if stops else node.all_input_nodes
            found[node] = tuple(dict.fromkeys(origin for part in parts for origin in found[part]))
    return found


def _frozen(graph: fx.Graph, schema: Schema) -> list[fx.Node]:
    """The placeholders of the frozen tensors."""
    placeholders = list(graph.find_nodes(op="placeholder"))
    first = len(schema.of(Role.PARAMETER, Role.BUFFER, Role.COUNTER))
    return placeholders[first : first + len(schema.of(Role.FROZEN))]


def _sites(program: Program, module: fx.GraphModule, operators: Mapping[Any, Reads]) -> _Found:
    """Where operators meet the examples with a parameter, or with what is made of parameters alone."""
    names = [entry.name for entry in program.schema.of(Role.PARAMETER)]
    parameters = dict(zip(module.graph.find_nodes(op="placeholder"), names, strict=False))
    made = _made(module.graph, program.schema)
    losses: Any = module.graph.output_node().args[0]
    sites: dict[fx.Node, list[Site]] = {}
    unmatched: dict[str, str] = {}
    for node, origins in made.items():
        for user in node.users if origins else ():
            if user in made or (user.op == "output" and losses[0] is not node):
                continue
            places = [place for place, value in enumerate(user.args) if value is node]
            reads = operators.get(user.target)
            known = reads is not None and set(places) <= set(reads.parameters)
            if not places or not known or user.kwargs:
                reason = f"no rule for {user.target} ({source_line(user)})"
                unmatched |= {parameters[origin]: reason for origin in origins}
                continue
            views = _views(node)
            way = None if views is not None else _computation(program, module, node, parameters)
            for origin in (parameters[origin] for origin in origins):
                steps = views if way is None else (Computed(*way, way[1].index(origin)),)
                sites.setdefault(user, []).extend(Site(origin, place, steps or ()) for place in places)
    return _Found(sites, unmatched)


def _views(node: fx.Node) -> tuple[View, ...] | None:
    """The way from a parameter to a node, if all of it selects or rearranges entries."""
    steps: list[View] = []
    while node.op != "placeholder":
        source: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and source.target in _SPLITS and _plain(source):
            steps.append(View(source.target, tuple(source.args[1:]), int(node.args[1])))  # type: ignore[arg-type]
            source = source.args[0]
        elif node.target in _VIEWS and not node.kwargs and _plain(node):
            steps.append(View(node.target, tuple(node.args[1:])))
        elif node.target not in _CASTS:
            return None
        node = source
    return tuple(reversed(steps))


def _computation(
    program: Program, module: fx.GraphModule, result: fx.Node, parameters: Mapping[fx.Node, str]
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """How a node is computed, as a graph that takes parameters; frozen tensors are constants of it."""
    needed, waiting = set(), [result]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting.extend(node.all_input_nodes)
    graph, constants = fx.Graph(), dict[str, Any]()
    copies: dict[fx.Node, fx.Node] = {}
    sources: list[str] = []
    frozen = dict(zip(_frozen(module.graph, program.schema), program.frozen.values(), strict=True))
    for node in (n for n in module.graph.nodes if n in needed):
        if node in parameters:
            sources.append(parameters[node])
            copies[node] = graph.placeholder(node.name)
        elif node.op in ("placeholder", "get_attr"):
            constants[node.name] = frozen[node] if node in frozen else getattr(module, str(node.target))
            copies[node] = graph.get_attr(node.name)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[result])
    return fx.GraphModule(constants, graph, class_name="Computed"), tuple(sources)


def _plain(node: fx.Node) -> bool:
    """Whether the other arguments are fixed: no tensor and no size that depends on the batch."""
    return len(node.all_input_nodes) == 1


def _untappable(
    node: fx.Node, sites: list[Site], reads: Reads, layouts: Mapping[str, BatchLayout | None]
) -> str | None:
    """Why an operator cannot be tapped, None if it can."""
    if not isinstance(node.meta.get("val"), Tensor):
        return f"{node.target} gives several results ({source_line(node)})"
    if layouts.get(node.name) is None:
        return f"the result of {node.target} has no axis of examples ({source_line(node)})"
    for place in set(reads.inputs) - {site.argument for site in sites}:
        value = node.args[place]
        if not isinstance(value, fx.Node) or layouts.get(value.name) is None:
            return f"{node.target} reads a tensor without an axis of examples ({source_line(node)})"
    return None


def _unfuse(graph: fx.Graph, schema: Schema) -> None:
    """Write the operators of `UNFUSED` that read a parameter as plain ones."""
    made = _made(graph, schema)
    for node in list(graph.nodes):
        if node.target in UNFUSED and any(made.get(part) for part in node.all_input_nodes):
            replace_by(node, UNFUSED[node.target], whole=node.target is not aten.einsum.default)


_ELEMENTWISE = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Tensor,
    aten.where.self, aten.maximum.default, aten.minimum.default,
}  # fmt: skip


def _spread(graph: fx.Graph, schema: Schema) -> None:
    """Expand what is made of parameters and meets the examples element by element."""
    made = _made(graph, schema)
    for node in list(graph.nodes):
        if node.target in _ELEMENTWISE and node not in made:
            for part in dict.fromkeys(
                part for part in node.args if isinstance(part, fx.Node) and made.get(part)
            ):
                _spread_at(graph, part, node)


def _spread_at(graph: fx.Graph, parameter: fx.Node, user: fx.Node) -> None:
    result, own = user.meta.get("val"), parameter.meta.get("val")
    if not isinstance(result, Tensor) or not isinstance(own, Tensor):
        return
    axes = symbolic_axes(result)
    if len(axes) != 1:
        return
    other = next(
        (part for part in user.args if part is not parameter and _spans(part, result.dim(), axes[0])), None
    )
    if other is None:
        return  # not the examples it meets
    missing = result.dim() - own.dim()
    axis = axes[0]
    if axis >= missing and own.shape[axis - missing] != 1:
        return
    with graph.inserting_before(user):
        write = Writer(graph, user)
        size = write(aten.sym_size.int, other, axis)
        shape: list[Any] = [1] * missing + [int(length) for length in own.shape]
        shape[axis] = size
        spread = write(aten.expand.default, parameter, shape)
    user.replace_input_with(parameter, spread)


def _spans(part: Any, dims: int, axis: int) -> bool:
    """Whether an argument has so many axes, and the examples along this one."""
    value = part.meta.get("val") if isinstance(part, fx.Node) else None
    return isinstance(value, Tensor) and value.dim() == dims and axis in symbolic_axes(value)


def _tap(node: fx.Node, sites: list[Site], layouts: Mapping[str, BatchLayout | None]) -> Tap:
    inputs: list[int] = []
    places: list[BatchLayout] = []
    for place, value in enumerate(node.args):
        layout = layouts.get(value.name) if isinstance(value, fx.Node) else None
        if layout is not None:
            inputs.append(place)
            places.append(layout)
    output = layouts[node.name]
    if output is None:
        raise CaptureError("a tapped operator without examples", who=source_line(node))
    return Tap(
        target=node.target,
        args=_constants(node.args),
        sites=tuple(sites),
        inputs=tuple(inputs),
        layouts=tuple(places),
        output=output,
    )


def _constants(arguments: Any) -> Any:
    """Arguments with None in the place of what the graph computes."""
    return fx.map_arg(arguments, lambda part: None)


def _rewritten(
    program: Program, module: fx.GraphModule, tapped: list[str], inputs: list[tuple[int, ...]]
) -> fx.GraphModule:
    """The graph that returns (losses, buffers, tapped results, what they read)."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    new = {old.name: node for old, node in copies.items()}
    probes, read = [], []
    for name, places in zip(tapped, inputs, strict=True):
        node = new[name]
        with graph.inserting_after(node):
            probe = graph.call_function(_probe, (node,))
        probe.meta = dict(node.meta)
        for user in list(node.users):
            if user is not probe:
                user.replace_input_with(node, probe)
        with graph.inserting_after(probe):
            probes.append(graph.call_function(_place, (probe,)))
        read.append(tuple(node.args[place] for place in places))
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    kept = len(program.schema.of(Role.BUFFER, Role.COUNTER))
    output.args = ((results[0], results[len(results) - kept :], probes, read),)
    relu_after_pool(graph)
    pool_in_pairs(graph)
    graph.eliminate_dead_code()
    graph.lint()
    return rebuild(module, graph)


def _probe(value: Tensor) -> Tensor:
    """A tensor whose gradient can be asked for; nothing before the first of them is differentiated."""
    return value if value.requires_grad else value.detach().requires_grad_()


class _Place(NamedTuple):
    """Where a gradient comes back to, without the tensor itself, which may go as soon as it was read.

    Attributes:
        edge: of the graph of autograd.
        like: zeros of the tensor's shape, all of them one number in memory.
    """

    edge: torch.autograd.graph.GradientEdge
    like: Tensor


def _place(probe: Tensor) -> _Place:
    return _Place(torch.autograd.graph.get_gradient_edge(probe), probe.new_zeros(()).expand(probe.shape))
