"""A Program: a model and its loss as one pure function of parameters, buffers, batch and seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.portable import PortableGraph
from mycelia.engine.schema import Role, Schema
from mycelia.engine.types import Tensors

__all__ = ["Forward", "Program"]


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


Call = Callable[[Tensors, Tensors, Tensors, Tensor, Tensor, Tensor], Forward]


@dataclass(frozen=True)
class Program:
    """A pure function `losses(params, buffers, batch) -> Tensor[B]` captured from a module and a loss.

    Make one with `mycelia.engine.capture`. A Program is never mutated; transforms return new ones.

    Attributes:
        schema: names, roles, shapes and dtypes of all tensors.
        initial: the tensors' values at capture, by name.
        training: the forward pass in training mode: (params, buffers, frozen, inputs, targets, seed).
        evaluation: the same in evaluation mode.
        backend: "export" (a graph) or "eager" (the module as it is).
        graphs: the FX graphs behind the two modes, None for the eager backend.
        note: what transforms were applied, in order.
    """

    schema: Schema
    initial: Mapping[str, Tensor] = field(repr=False)
    training: Call = field(repr=False)
    evaluation: Call = field(repr=False)
    predictor: Callable[[Tensors, Tensors, Tensors, Tensor], Any] = field(repr=False)
    backend: str = "export"
    graphs: tuple[fx.GraphModule, fx.GraphModule] | None = field(default=None, repr=False)
    example: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    note: tuple[str, ...] = ()

    def init(self) -> tuple[Tensors, Tensors]:
        """Fresh copies of the captured parameters and of the buffers (float buffers and counters)."""
        params = {e.name: self.initial[e.name].clone() for e in self.schema.of(Role.PARAMETER)}
        buffers = {e.name: self.initial[e.name].clone() for e in self.schema.of(Role.BUFFER, Role.COUNTER)}
        return params, buffers

    def __reduce__(self) -> tuple[object, ...]:
        """Travel to a spawned process; the graphs are those of the calls, so they go once."""
        return _arrived_program, (
            self.schema,
            dict(self.initial),
            self.training,
            self.evaluation,
            self.predictor,
            self.backend,
            self.graphs is not None,
            self.note,
        )

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
        training: bool = True,
    ) -> Forward:
        """One forward pass.

        Args:
            params: trainable tensors by name.
            buffers: float buffers and counters by name; not changed.
            inputs: model input, [B, ...].
            targets: what the loss compares with, [B, ...].
            seed: drives dropout and other randomness; the same seed gives the same pass.
            training: training mode, or evaluation mode.
        """
        call = self.training if training else self.evaluation
        seed = seed if isinstance(seed, Tensor) else torch.tensor(seed, dtype=torch.int64)
        return call(params, buffers, self.frozen, inputs, targets, seed)

    def losses(
        self, params: Tensors, buffers: Tensors, batch: tuple[Tensor, Tensor], *, seed: int | Tensor = 0
    ) -> Tensor:
        """One loss per example, shape [B], in training mode."""
        return self.forward(params, buffers, *batch, seed=seed).losses

    def predict(self, params: Tensors, buffers: Tensors, inputs: Tensor) -> Any:
        """The model's outputs in evaluation mode; needs no targets."""
        return self.predictor(params, buffers, self.frozen, inputs)

    @property
    def dimension(self) -> int:
        """Number of trainable scalars."""
        return sum(entry.numel for entry in self.schema.of(Role.PARAMETER))

    def flatten(self, params: Tensors) -> Tensor:
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

    def unflatten(self, vector: Tensor) -> Tensors:
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
        """A new Program with other forward passes and one more note."""
        return replace(self, training=training, evaluation=evaluation, note=(*self.note, note))

    def graph(self, what: str) -> fx.GraphModule:
        """The training graph, for transforms that need one.

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
        return self.graphs[0]


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
        graphs = (training.module, evaluation.module)
    return Program(schema, initial, training, evaluation, predictor, backend, graphs, None, note)


@dataclass(frozen=True, eq=False)
class GraphCall:
    """The forward pass of a graph; made by `call_of_graph`, and fit to travel to a spawned process."""

    module: fx.GraphModule
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    frozen: tuple[str, ...]

    def __call__(
        self, p: Tensors, b: Tensors, f: Tensors, inputs: Tensor, targets: Tensor, seed: Tensor
    ) -> Forward:
        """Losses, outputs and new buffers."""
        values = [*(p[n] for n in self.params), *(b[n] for n in self.buffers), *(f[n] for n in self.frozen)]
        losses, outputs, *updates = self.module(*values, inputs, targets, seed)
        return Forward(losses, outputs, dict(zip(self.buffers, updates, strict=True)))

    def __reduce__(self) -> tuple[object, ...]:
        """Travel as a portable graph."""
        return _arrived, (GraphCall, PortableGraph.of(self.module), self.params, self.buffers, self.frozen)


@dataclass(frozen=True, eq=False)
class GraphPredictor:
    """The outputs of an evaluation graph without its loss."""

    module: fx.GraphModule
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    frozen: tuple[str, ...]

    def __call__(self, p: Tensors, b: Tensors, f: Tensors, inputs: Tensor) -> Any:
        """What the model returns."""
        values = [*(p[n] for n in self.params), *(b[n] for n in self.buffers), *(f[n] for n in self.frozen)]
        return self.module(*values, inputs, None, None)

    def __reduce__(self) -> tuple[object, ...]:
        """Travel as a portable graph."""
        graph = PortableGraph.of(self.module)
        return _arrived, (GraphPredictor, graph, self.params, self.buffers, self.frozen)


def _arrived(
    kind: type[GraphCall] | type[GraphPredictor], graph: PortableGraph, *names: tuple[str, ...]
) -> GraphCall | GraphPredictor:
    return kind(graph.build(), *names)


def call_of_graph(module: fx.GraphModule, schema: Schema) -> Call:
    """The forward pass of a graph whose placeholders are the schema's tensors, inputs, targets, seed."""
    return GraphCall(module, *_names(schema))


def predictor_of_graph(module: fx.GraphModule, schema: Schema) -> GraphPredictor:
    """The predictor of a graph with the same placeholders that returns the outputs alone."""
    return GraphPredictor(module, *_names(schema))


def _names(schema: Schema) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    params, buffers, frozen = (
        tuple(entry.name for entry in schema.of(*roles))
        for roles in ((Role.PARAMETER,), (Role.BUFFER, Role.COUNTER), (Role.FROZEN,))
    )
    return params, buffers, frozen


def call_of_module(module: nn.Module, loss: Callable[[Any, Tensor], Tensor], training: bool) -> Call:
    """The forward pass of a module as it is; randomness is seeded on PyTorch's own generator."""

    def call(p: Tensors, b: Tensors, f: Tensors, inputs: Tensor, targets: Tensor, seed: Tensor) -> Forward:
        own = {name: tensor.clone() for name, tensor in b.items()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(seed))
            was = module.training
            module.train(training)
            try:
                outputs = torch.func.functional_call(module, {**p, **own, **f}, (inputs,))
                losses = loss(outputs, targets)
            finally:
                module.train(was)
        return Forward(losses, outputs, own)

    return call
