"""Tracing: a module and a loss go through `torch.export` and come out as the graph of one mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import ExportGraphSignature, OutputKind

from mycelia.engine import structure
from mycelia.engine.errors import CaptureError
from mycelia.engine.explain import place_of, reason_of
from mycelia.engine.exported import TAIL, keep_no_grad, order, quiet, to_graph
from mycelia.engine.packed import packed_sequences
from mycelia.engine.program import changed_fixed, check_replaced
from mycelia.engine.schema import Role, Schema
from mycelia.engine.seeding import drive_by_seed

__all__ = ["Loss", "Traced", "export", "lower"]

Loss = Callable[[Any, Tensor], Tensor]


class _Seen:
    """What tracing saw of the outputs; apart from the module, whose attributes export restores."""

    outputs: Any = None


class _WithLoss(nn.Module):
    """What is exported: the model and the loss, so that one graph holds both."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.seen = _Seen()

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        before = dict(self.model.named_buffers(remove_duplicate=False))
        outputs = self.model(inputs)
        _write_back(self.model, before)
        leaves, self.seen.outputs = structure.flatten(outputs)
        return self.loss(outputs, targets), *leaves


def _write_back(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """What the model assigned to its buffers is written into them, where export sees it."""
    for name, old in before.items():
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        new = getattr(owner, last)
        if new is not old:
            check_replaced(name, old, new)
            old.copy_(new.detach())
            setattr(owner, last, old)


@dataclass(frozen=True)
class Traced:
    """A model and loss as exported, before operators are made functional."""

    model: nn.Module
    exported: torch.export.ExportedProgram
    outputs: Any

    def same(self, other: Traced) -> bool:
        """Whether both compute the same."""
        mine, others = self.exported, other.exported
        return (
            _code(mine.graph_module) == _code(others.graph_module)
            and str(mine.graph_signature) == str(others.graph_signature)
            and self.outputs == other.outputs
            and mine.constants.keys() == others.constants.keys()
            and all(_equal(value, others.constants[name]) for name, value in mine.constants.items())
        )


def _code(module: nn.Module) -> list[str]:
    return [part.code for part in module.modules() if isinstance(part, fx.GraphModule)]


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    return one is two


def export(model: nn.Module, loss: Loss, example: tuple[Tensor, Tensor], dynamic: bool) -> Traced:
    """Trace a model, in the mode it is in, with its loss.

    Raises:
        CaptureError: it cannot be exported; names module, source line and operator.
    """
    wrapper = _WithLoss(model, loss)
    batch = torch.export.Dim("batch") if dynamic else None
    shapes = ({0: batch}, {0: batch}) if dynamic else None
    args = (example[0].clone(), example[1].clone())  # the model may write into its input
    with _explained(model), packed_sequences(model):
        exported = torch.export.export(wrapper, args, dynamic_shapes=shapes, strict=False)
    keep_no_grad(exported)
    return Traced(model, exported, wrapper.seen.outputs)


@contextlib.contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Export in silence, its errors as ours."""
    try:
        with quiet():
            yield
    except CaptureError:
        raise
    except Exception as error:
        where, line = place_of(error, model)
        raise CaptureError(
            f"the model cannot be exported{line}: {reason_of(error)}",
            rule="torch.export traces the model with a symbolic batch size and without values",
            fix="use torch.cond for branches on values, avoid .item() and Python loops over the batch, "
            "or capture with backend='eager'",
            who=where,
        ) from error


def lower(traced: Traced, schema: Schema, initial: dict[str, Tensor], dynamic: bool) -> fx.GraphModule:
    """The graph of what was traced, with arguments and results as `Graphs` says.

    Raises:
        CaptureError: a pass that changes a parameter or a frozen tensor, a loss of a fixed length, a constant
            that is trained, or a random operator without a seeded form.
    """
    with _explained(traced.model):
        # an empty table functionalises and keeps linear, conv2d, lstm, ... whole
        exported = traced.exported.run_decompositions({})
    signature = exported.graph_signature
    known = _known(traced.model)
    names = dict(zip(map(str, signature.user_inputs), TAIL, strict=False))
    for table in (signature.inputs_to_parameters, signature.inputs_to_buffers):
        names |= {holder: known[target] for holder, target in table.items() if target in known}
    module = to_graph(
        exported,
        names,
        schema,
        initial,
        lambda values, holders: _results(values, signature, known, schema, holders),
    )
    module.meta["outputs"] = traced.outputs
    _check_losses(module, dynamic)
    inputs, _, seed, first = module.graph.find_nodes(op="placeholder")[-len(TAIL) :]
    drive_by_seed(module.graph, seed, first, inputs.meta["val"].shape[0])
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return module


def _known(model: nn.Module) -> dict[str, str]:
    """Export's names of the model's tensors and ours; a tied tensor goes by its first name."""
    first: dict[int, str] = {}
    for name, tensor in _named_tensors(model):
        first.setdefault(id(tensor), name)
    return {f"model.{name}": first[id(tensor)] for name, tensor in _named_tensors(model)}


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All names, those of tied tensors too, in the order of the schema."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _results(
    found: Sequence[Any],
    signature: ExportGraphSignature,
    known: Mapping[str, str],
    schema: Schema,
    holders: Mapping[str, fx.Node],
) -> tuple[Any, ...]:
    """Losses, outputs, then every buffer and counter: as it is after the pass, or as it came."""
    returned: list[Any] = []
    updates: dict[str, Any] = {}
    updatable = {entry.name for entry in schema.of(Role.BUFFER, Role.COUNTER)}
    for spec, value in zip(signature.output_specs, found, strict=True):
        name = known.get(spec.target or "", spec.target or "")
        if spec.kind is OutputKind.USER_OUTPUT:
            returned.append(value)
        elif spec.kind is OutputKind.BUFFER_MUTATION and name in updatable:
            updates[name] = value
        elif spec.kind is not OutputKind.USER_INPUT_MUTATION:  # the caller's batch is never changed
            raise changed_fixed(name or spec.kind.name)
    return (*returned, *(updates.get(name, holders[name]) for name in order(schema) if name in updatable))


def _check_losses(module: fx.GraphModule, dynamic: bool) -> None:
    losses: Any = module.graph.output_node().args[0]
    value = losses[0].meta["val"]
    if value.dim() != 1 or (dynamic and not isinstance(value.shape[0], torch.SymInt)):
        raise CaptureError(
            f"the loss gives shape {tuple(value.shape)} whatever the batch",
            rule="loss(outputs, targets) -> Tensor[B], one loss per example",
            fix="use targets.shape[0] in place of a fixed number",
            who="loss",
        )
