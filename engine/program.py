"""A Program: a model and its loss as one pure function of parameters, buffers, batch and seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, fx, nn

from mycelia.engine import archive, structure
from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.graph import Pass
from mycelia.engine.portable import PortableGraph
from mycelia.engine.schema import Role, Schema
from mycelia.engine.types import Tensors

__all__ = ["Forward", "Graphs", "Program"]


class Forward(NamedTuple):
    """What one forward pass gives.

    Attributes:
        losses: one loss per example, shape [B].
        outputs: what the model returned.
        buffers: float buffers and counters after the pass.
    """

    losses: Tensor
    outputs: Any
    buffers: Tensors


class Graphs(NamedTuple):
    """The FX graphs behind a Program's two modes.

    Arguments of each: parameters, buffers and counters, frozen tensors (schema order within each group),
    inputs, targets, seed, and `first` (default 0). Results: losses, the tensors of the outputs, then
    buffers and counters after the pass.
    """

    training: fx.GraphModule
    evaluation: fx.GraphModule


class Call(Protocol):
    """A forward pass: (params, buffers, frozen, inputs, targets, seed, first)."""

    def __call__(
        self,
        params: Tensors,
        buffers: Tensors,
        frozen: Tensors,
        inputs: Tensor,
        targets: Tensor,
        seed: Tensor,
        first: int | Tensor = 0,
        /,
    ) -> Forward: ...


@dataclass(frozen=True)
class Program:
    """A pure function `losses(params, buffers, batch) -> Tensor[B]` captured from a module and a loss.

    Make one with `mycelia.engine.capture`. A Program is never mutated; transforms return new ones.

    Attributes:
        schema: names, roles, shapes and dtypes of all tensors.
        initial: the tensors' values at capture, by name.
        training: the forward pass in training mode.
        evaluation: the same in evaluation mode.
        predictor: outputs in evaluation mode: (params, buffers, frozen, inputs).
        backend: "export" (a graph) or "eager" (the module as it is).
        graphs: the graphs behind the two modes, None for the eager backend.
        example: inputs and targets as at capture.
        note: what transforms were applied, in order.
    """

    schema: Schema
    initial: Mapping[str, Tensor] = field(repr=False)
    training: Call = field(repr=False)
    evaluation: Call = field(repr=False)
    predictor: Callable[[Tensors, Tensors, Tensors, Tensor], Any] = field(repr=False)
    backend: str = "export"
    graphs: Graphs | None = field(default=None, repr=False)
    example: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    note: tuple[str, ...] = ()

    @classmethod
    def of_graphs(
        cls,
        schema: Schema,
        initial: Mapping[str, Tensor],
        graphs: Graphs,
        example: tuple[Tensor, Tensor] | None,
        note: tuple[str, ...] = (),
    ) -> Program:
        """The Program that two graphs stand for."""
        return cls(
            schema,
            initial,
            call_of_graph(graphs.training, schema),
            call_of_graph(graphs.evaluation, schema),
            _predictor(graphs.evaluation, schema),
            graphs=graphs,
            example=example,
            note=note,
        )

    def init(self) -> tuple[Tensors, Tensors]:
        """Fresh copies of the captured parameters and of the buffers (float buffers and counters)."""
        params = {e.name: self.initial[e.name].clone() for e in self.schema.of(Role.PARAMETER)}
        buffers = {e.name: self.initial[e.name].clone() for e in self.schema.of(Role.BUFFER, Role.COUNTER)}
        return params, buffers

    def __reduce__(self) -> tuple[object, ...]:
        """Travel to a spawned process; the example stays behind."""
        parts = (self.schema, dict(self.initial), self.training, self.evaluation, self.predictor)
        return _arrived_program, (*parts, self.backend, self.graphs is not None, self.note)

    @cached_property
    def frozen(self) -> Tensors:
        """Tensors that are neither trained nor sent."""
        return {entry.name: self.initial[entry.name] for entry in self.schema.of(Role.FROZEN)}

    def forward(
        self,
        params: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        targets: Tensor,
        *,
        seed: int | Tensor = 0,
        first: int | Tensor = 0,
        training: bool = True,
    ) -> Forward:
        """One forward pass.

        Args:
            params: trainable tensors by name.
            buffers: float buffers and counters by name; not changed.
            inputs: model input, [B, ...].
            targets: what the loss compares with, [B, ...].
            seed: drives dropout and other randomness, in [0, 2**63); the same seed gives the same pass.
            first: number of the first example here within the batch that the seed stands for, so that a
                batch cut in parts draws what the whole would.
            training: training mode, or evaluation mode.
        """
        call = self.training if training else self.evaluation
        seed = seed if isinstance(seed, Tensor) else torch.tensor(seed, dtype=torch.int64)
        return call(params, buffers, self.frozen, inputs, targets, seed, first)

    def losses(
        self, params: Tensors, buffers: Tensors, batch: tuple[Tensor, Tensor], *, seed: int | Tensor = 0
    ) -> Float[Tensor, " batch"]:
        """One loss per example, shape [B], in training mode."""
        return self.forward(params, buffers, *batch, seed=seed).losses

    def predict(self, params: Tensors, buffers: Tensors, inputs: Tensor) -> Any:
        """The model's outputs in evaluation mode; needs no targets."""
        return self.predictor(params, buffers, self.frozen, inputs)

    @property
    def dimension(self) -> int:
        """Number of trainable scalars."""
        return sum(entry.numel for entry in self.schema.of(Role.PARAMETER))

    def flatten(self, params: Tensors) -> Shaped[Tensor, " d"]:
        """All parameters as one vector [d] in schema order; zero-copy for views made by `unflatten`."""
        entries = self.schema.of(Role.PARAMETER)
        if not entries:
            return torch.zeros(0)
        first = params[entries[0].name]
        offset = first.storage_offset()
        for entry in entries:
            tensor = params[entry.name]
            adjacent = (
                tensor.dtype == first.dtype
                and tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
                and tensor.storage_offset() == offset
                and tensor.is_contiguous()
            )
            if not adjacent:
                return torch.cat([params[e.name].reshape(-1) for e in entries])
            offset += entry.numel
        return first.as_strided((self.dimension,), (1,), first.storage_offset())

    def unflatten(self, vector: Shaped[Tensor, " d"]) -> Tensors:
        """The inverse of `flatten`: views into `vector` [d] where the dtype is that of the schema."""
        if vector.shape != (self.dimension,):
            raise ConfigError(
                f"a vector of shape {tuple(vector.shape)}", rule=f"shape ({self.dimension},)", who="unflatten"
            )
        params: Tensors = {}
        offset = 0
        for entry in self.schema.of(Role.PARAMETER):
            part = vector[offset : offset + entry.numel].view(entry.shape)
            params[entry.name] = part if part.dtype == entry.dtype else part.to(entry.dtype)
            offset += entry.numel
        return params

    def with_calls(self, training: Call, evaluation: Call, note: str) -> Program:
        """A new Program with other forward passes and one more note; the graphs stay those of the old."""
        return replace(self, training=training, evaluation=evaluation, note=(*self.note, note))

    def rewrite(self, change: Pass) -> Program:
        """A new Program with both graphs rewritten and the pass's name as one more note."""
        training = self.graph(change.name)
        evaluation = training if self.graphs is None else self.graphs.evaluation
        new = change(training)  # most models do the same in both modes
        graphs = Graphs(new, new if evaluation is training else change(evaluation))
        return self.of_graphs(self.schema, self.initial, graphs, self.example, (*self.note, change.name))

    def graph(self, what: str) -> fx.GraphModule:
        """The training graph, for the transform `what`, which needs one.

        Raises:
            CaptureError: the Program runs the module as it is.
        """
        if self.graphs is None:
            raise CaptureError(
                f"{what} needs a graph and this Program has none",
                rule="backend='eager' runs the module as it is",
                fix="capture with backend='export'",
                who=what,
            )
        return self.graphs.training

    def save(self, path: Path | str) -> None:
        """Write the Program into a new folder: graphs (.pt2), tensors (safetensors) and program.json.

        Raises:
            CaptureError: the Program has no graph, or runs something else than its graphs.
            ConfigError: the folder exists and is not empty.
        """
        self.graph("save")
        if self.graphs is None or getattr(self.training, "graph", None) is not self.graphs.training:
            raise CaptureError(
                f"a Program with {', '.join(self.note)} applied does not run its graphs",
                rule="what is saved is the graphs",
                fix="save the Program before that transform and apply it again after loading",
                who="save",
            )
        archive.write(Path(path), self.schema, self.initial, self.graphs, self.example, self.note)

    @classmethod
    def load(cls, path: Path | str) -> Program:
        """The Program in a folder that `save` wrote; its `example` is zeros of the shapes at capture.

        A graph file is code: load only what you would also run. Tensors and JSON are plain data, graphs
        are refused unless they are free of pickled objects and call nothing but PyTorch operators.

        Raises:
            DataError: a file is missing, changed, of another version, or holds what is refused.
        """
        schema, initial, training, evaluation, example, note = archive.read(Path(path))
        return cls.of_graphs(schema, initial, Graphs(training, evaluation), example, note)


def _arrived_program(
    schema: Schema,
    initial: Tensors,
    training: Call,
    evaluation: Call,
    predictor: Callable[..., Any],
    backend: str,
    graphed: bool,
    note: tuple[str, ...],
) -> Program:
    graphs = None
    if graphed and isinstance(training, GraphCall) and isinstance(evaluation, GraphCall):
        graphs = Graphs(training.graph, evaluation.graph)
    return Program(schema, initial, training, evaluation, predictor, backend, graphs, None, note)


@dataclass(frozen=True)
class GraphCall:
    """The forward pass of a graph whose arguments and results are as `Graphs` says."""

    graph: fx.GraphModule
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    frozen: tuple[str, ...]

    def __call__(
        self,
        params: Tensors,
        buffers: Tensors,
        frozen: Tensors,
        inputs: Tensor,
        targets: Tensor,
        seed: Tensor,
        first: int | Tensor = 0,
        /,
    ) -> Forward:
        """One pass."""
        values = [
            *(params[name] for name in self.params),
            *(buffers[name] for name in self.buffers),
            *(frozen[name] for name in self.frozen),
        ]
        # forward, not __call__: the latter prints the graph on an error, and has no hooks to run
        losses, *rest = self.graph.forward(*values, inputs, targets, seed, first)
        count = len(rest) - len(self.buffers)
        outputs = structure.unflatten(self.graph.meta["outputs"], rest[:count])
        return Forward(losses, outputs, dict(zip(self.buffers, rest[count:], strict=True)))

    def __reduce__(self) -> tuple[object, ...]:
        """Travel to a spawned process as a portable graph."""
        return _arrived_call, (PortableGraph.of(self.graph), self.params, self.buffers, self.frozen)


def _arrived_call(graph: PortableGraph, *names: tuple[str, ...]) -> GraphCall:
    return GraphCall(graph.build(), *names)


@dataclass(frozen=True)
class GraphPredictor:
    """The outputs of a graph without the loss."""

    call: GraphCall

    def __call__(self, params: Tensors, buffers: Tensors, frozen: Tensors, inputs: Tensor) -> Any:
        """What the model returns for these inputs."""
        unused: Any = None
        return self.call(params, buffers, frozen, inputs, unused, unused).outputs


def call_of_graph(module: fx.GraphModule, schema: Schema) -> GraphCall:
    """The forward pass of a graph, see `Graphs`."""
    return GraphCall(
        module,
        tuple(e.name for e in schema.of(Role.PARAMETER)),
        tuple(e.name for e in schema.of(Role.BUFFER, Role.COUNTER)),
        tuple(e.name for e in schema.of(Role.FROZEN)),
    )


def _predictor(evaluation: fx.GraphModule, schema: Schema) -> GraphPredictor:
    """The evaluation graph without the loss."""

    def no_loss(graph: fx.Graph) -> None:
        node = graph.output_node()
        results = node.args[0]
        if isinstance(results, (tuple, list)):
            node.args = ((None, *results[1:]),)
        for node in reversed(list(graph.nodes)):  # checks, those of the targets among them, have no readers
            if not node.users and "assert" in str(node.target):
                graph.erase_node(node)

    return GraphPredictor(call_of_graph(Pass("predict", no_loss)(evaluation), schema))


@dataclass(frozen=True)
class ModuleCall:
    """The forward pass of a module as it is; randomness is seeded on PyTorch's own generator."""

    module: nn.Module
    loss: Callable[[Any, Tensor], Tensor]

    def __call__(
        self,
        params: Tensors,
        buffers: Tensors,
        frozen: Tensors,
        inputs: Tensor,
        targets: Tensor,
        seed: Tensor,
        first: int | Tensor = 0,
        /,
    ) -> Forward:
        """One pass."""
        masks = [name for name, _ in self.module.named_buffers()]
        fixed = {name: frozen[name] for name in masks if name in frozen}
        own = {name: tensor.clone() for name, tensor in (buffers | fixed).items()}
        tensors = {**params, **frozen, **own}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((int(seed) + 0x9E3779B97F4A7C15 * int(first)) % 2**63)
            # a buffer that the module replaces comes back in the dictionary, one changed in place does too
            outputs = torch.func.functional_call(self.module, tensors, (inputs,))
            losses = self.loss(outputs, targets)
        for name, old in buffers.items():
            check_replaced(name, old, tensors[name])
        if changed := [name for name, old in fixed.items() if not torch.equal(tensors[name], old)]:
            raise changed_fixed(changed[0])
        return Forward(losses, outputs, {name: tensors[name].detach() for name in buffers})


def changed_fixed(name: str) -> CaptureError:
    """The error for a pass that changes a parameter or a frozen tensor."""
    return CaptureError(
        f"the forward pass changes {name!r}",
        rule="a pass may change float buffers and integer counters, nothing else",
        fix="register it as a float or integer buffer, or change it outside forward",
        who=name,
    )


def check_replaced(name: str, old: Tensor, new: Any) -> None:
    """Raise CaptureError when a module replaced its buffer `name` by something of another kind."""
    if not isinstance(new, Tensor) or new.dtype != old.dtype or new.shape != old.shape:
        kind = f"{new.dtype} {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
        raise CaptureError(
            f"the forward pass replaces the buffer {name!r} by {kind}",
            rule=f"a buffer keeps dtype and shape, {old.dtype} {tuple(old.shape)}",
            fix="change it in place, or convert what is assigned",
            who=name,
        )


def predictor_of_module(module: nn.Module) -> Callable[[Tensors, Tensors, Tensors, Tensor], Any]:
    """Outputs of a module in evaluation mode, as it is."""

    def predict(p: Tensors, b: Tensors, f: Tensors, inputs: Tensor) -> Any:
        own = {name: tensor.clone() for name, tensor in b.items()}
        return torch.func.functional_call(module, {**p, **own, **f}, (inputs,))

    return predict
