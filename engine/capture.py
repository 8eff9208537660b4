"""Capture: an ordinary module and a per-example loss become a Program."""

from __future__ import annotations

import contextlib
import copy
import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import ExportGraphSignature, OutputKind

from mycelia.engine import structure
from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.exported import TAIL, order, quiet, to_graph
from mycelia.engine.graph import is_library
from mycelia.engine.program import Graphs, Program, call_of_module, check_replaced, predictor_of_module
from mycelia.engine.schema import Entry, Role, Schema
from mycelia.engine.seeding import drive_by_seed

__all__ = ["capture"]

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


def capture(
    model: nn.Module,
    loss: Loss,
    example: tuple[Tensor, Tensor],
    *,
    dynamic_batch: bool = True,
    backend: str = "export",
) -> Program:
    """Make a Program of a module and a loss.

    Args:
        model: any `nn.Module` that takes one tensor [B, ...]. It is copied, never changed.
        loss: `(outputs, targets) -> Tensor[B]`, one loss per example.
        example: `(inputs, targets)`, each with the batch in front; values matter only to control flow.
        dynamic_batch: keep the batch size symbolic, so that one Program serves any batch.
        backend: "export" for a graph, or "eager" to run the module as it is (no graph transforms).

    Raises:
        CaptureError: a reduced loss, a module that cannot be exported (with module, source line and
            operator), or a random operator without a seeded form.
        ConfigError: an unknown backend.

    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> program = capture(
    ...     torch.nn.Linear(3, 1),
    ...     lambda outputs, targets: mse_loss(outputs[:, 0], targets, reduction="none"),
    ...     (torch.zeros(2, 3), torch.zeros(2)),
    ... )
    >>> program.dimension
    4
    """
    if backend not in ("export", "eager"):
        raise ConfigError(f"backend {backend!r}", rule="one of 'export', 'eager'", who="capture")
    inputs, targets = _checked_example(example, dynamic_batch)
    _check_model(model, loss)
    model = copy.deepcopy(model)
    _check_loss(copy.deepcopy(model).eval(), loss, inputs, targets)
    schema, initial = _schema_of(model)
    if backend == "eager":
        training, evaluation = copy.deepcopy(model).train(), copy.deepcopy(model).eval()
        return Program(
            schema,
            initial,
            call_of_module(training, loss),
            call_of_module(evaluation, loss),
            predictor_of_module(evaluation),
            backend="eager",
            example=(inputs, targets),
        )
    train, evaluate = (
        _export(copy.deepcopy(model).train(mode), loss, (inputs, targets), dynamic_batch)
        for mode in (True, False)
    )
    training = _lower(train, schema, initial, dynamic_batch)
    # most models do the same in both modes
    evaluation = training if train.same(evaluate) else _lower(evaluate, schema, initial, dynamic_batch)
    return Program.of_graphs(schema, initial, Graphs(training, evaluation), (inputs, targets))


def _checked_example(example: tuple[Tensor, Tensor], dynamic: bool) -> tuple[Tensor, Tensor]:
    """The example, with at least two rows for a symbolic batch: export specialises a batch of one."""
    try:
        inputs, targets = (torch.as_tensor(part).detach() for part in example)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CaptureError(
            f"an example of type {type(example).__name__}: {error}",
            rule="a pair of tensors (inputs, targets)",
            who="example",
        ) from error
    if inputs.dim() == 0 or targets.dim() == 0 or len(inputs) != len(targets) or len(inputs) == 0:
        raise CaptureError(
            f"an example of shapes {tuple(inputs.shape)} and {tuple(targets.shape)}",
            rule="inputs [B, ...] and targets [B, ...] with the same B >= 1",
            who="example",
        )
    if len(inputs) == 1 and dynamic:
        return torch.cat([inputs, inputs]), torch.cat([targets, targets])
    return inputs, targets


def _check_model(model: nn.Module, loss: Loss) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise CaptureError(
                f"parameter {name!r} has no shape yet",
                rule="all parameters exist before capture",
                fix="run the model once on a batch",
                who=name,
            )
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise CaptureError(
            "the loss has trainable parameters",
            rule="what is trained belongs to the model",
            fix="make them parameters of the model and return what the loss needs from it",
            who="loss",
        )


def _check_loss(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> None:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=_cuda_devices(model)):
            losses = loss(model(inputs.clone()), targets.clone())
    except Exception as error:
        where, line = _place(error, model)
        raise CaptureError(
            f"the model or its loss fails on the example{line}: {_reason(error)}",
            rule="loss(model(inputs), targets) runs",
            fix="check the shapes and dtypes of the example",
            who=where,
        ) from error
    batch = len(inputs)
    if not isinstance(losses, Tensor) or tuple(losses.shape) != (batch,):
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        reduced = isinstance(losses, Tensor) and losses.dim() == 0
        raise CaptureError(
            f"the loss gives {'a single number' if reduced else found} for {batch} examples",
            rule="loss(outputs, targets) -> Tensor[B], one loss per example",
            fix='use reduction="none"' + ("" if reduced else " and average over all axes but the first"),
            who="loss",
        )


def _cuda_devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


def _schema_of(model: nn.Module) -> tuple[Schema, dict[str, Tensor]]:
    entries: list[Entry] = []
    initial: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        role = Role.PARAMETER if parameter.requires_grad else Role.FROZEN
        entries.append(Entry(name, role, tuple(parameter.shape), parameter.dtype))
        initial[name] = parameter.detach().clone()
    for name, buffer in model.named_buffers():
        role = Role.BUFFER if buffer.is_floating_point() or buffer.is_complex() else Role.COUNTER
        if buffer.dtype == torch.bool:  # a mask cannot be averaged, and nothing trains it
            role = Role.FROZEN
        entries.append(Entry(name, role, tuple(buffer.shape), buffer.dtype))
        initial[name] = buffer.detach().clone()
    return Schema(tuple(entries)), initial


@dataclass(frozen=True)
class _Traced:
    """A model and loss as exported, before operators are made functional."""

    model: nn.Module
    exported: torch.export.ExportedProgram
    outputs: Any

    def same(self, other: _Traced) -> bool:
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


def _export(model: nn.Module, loss: Loss, example: tuple[Tensor, Tensor], dynamic: bool) -> _Traced:
    wrapper = _WithLoss(model, loss)
    batch = torch.export.Dim("batch") if dynamic else None
    shapes = ({0: batch}, {0: batch}) if dynamic else None
    args = (example[0].clone(), example[1].clone())  # the model may write into its input
    with _explained(model):
        exported = torch.export.export(wrapper, args, dynamic_shapes=shapes, strict=False)
    return _Traced(model, exported, wrapper.seen.outputs)


@contextlib.contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Export in silence, its errors as ours."""
    try:
        with quiet():
            yield
    except CaptureError:
        raise
    except Exception as error:
        where, line = _place(error, model)
        raise CaptureError(
            f"the model cannot be exported{line}: {_reason(error)}",
            rule="torch.export traces the model with a symbolic batch size and without values",
            fix="use torch.cond for branches on values, avoid .item() and Python loops over the batch, "
            "or capture with backend='eager'",
            who=where,
        ) from error


def _lower(traced: _Traced, schema: Schema, initial: dict[str, Tensor], dynamic: bool) -> fx.GraphModule:
    """The graph of one mode, with arguments and results as `Graphs` says."""
    with _explained(traced.model):
        # an empty table functionalises and keeps linear, conv2d, lstm, ... whole
        exported = traced.exported.run_decompositions({})
    signature = exported.graph_signature
    module = to_graph(
        exported,
        _names(signature, traced.model),
        schema,
        initial,
        lambda values, holders: _results(values, signature, schema, holders),
    )
    module.meta["outputs"] = traced.outputs
    _check_losses(module, dynamic)
    inputs, _, seed, first = module.graph.find_nodes(op="placeholder")[-len(TAIL) :]
    drive_by_seed(module.graph, seed, first, inputs.meta["val"].shape[0])
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return module


def _names(signature: ExportGraphSignature, model: nn.Module) -> dict[str, str]:
    """What export's placeholders stand for; a tied tensor goes by its first name."""
    first: dict[int, str] = {}
    for name, tensor in _named_tensors(model):
        first.setdefault(id(tensor), name)
    known = {f"model.{name}": first[id(tensor)] for name, tensor in _named_tensors(model)}
    names = dict(zip(map(str, signature.user_inputs), TAIL, strict=False))
    for table in (signature.inputs_to_parameters, signature.inputs_to_buffers):
        names |= {holder: known[target] for holder, target in table.items() if target in known}
    return names


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All names, those of tied tensors too, in the order of the schema."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _results(
    found: Sequence[Any], signature: ExportGraphSignature, schema: Schema, holders: Mapping[str, fx.Node]
) -> tuple[Any, ...]:
    """Losses, outputs, then every buffer and counter: as it is after the pass, or as it came."""
    returned: list[Any] = []
    updates: dict[str, Any] = {}
    updatable = {entry.name for entry in schema.of(Role.BUFFER, Role.COUNTER)}
    for spec, value in zip(signature.output_specs, found, strict=True):
        name = (spec.target or "").removeprefix("model.")
        if spec.kind is OutputKind.USER_OUTPUT:
            returned.append(value)
        elif spec.kind is OutputKind.BUFFER_MUTATION and name in updatable:
            updates[name] = value
        elif spec.kind is not OutputKind.USER_INPUT_MUTATION:  # the caller's batch is never changed
            raise CaptureError(
                f"the forward pass changes {name or spec.kind.name!r}",
                rule="a pass may change float buffers and integer counters, nothing else",
                fix="register it as a float or integer buffer, or change it outside forward",
                who=name,
            )
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


def _place(error: Exception, model: nn.Module) -> tuple[str, str]:
    """The innermost module in which an error was raised, and the last line of user code."""
    paths = {id(module): path for path, module in model.named_modules()}
    where, line = type(model).__name__, ""
    for frame, number in _frames(error):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            where = f"{paths[id(owner)] or 'model'} ({type(owner).__name__})"
        if not is_library(frame.f_code.co_filename):
            text = linecache.getline(frame.f_code.co_filename, number).strip()
            line = f" at {frame.f_code.co_filename}:{number}: {text}"
    return where, line


def _reason(error: Exception) -> str:
    """What PyTorch said, in one line that names the operator where that can be known."""
    lines = [part.strip() for part in str(error).splitlines() if part.strip()]
    first = lines[0] if lines else type(error).__name__
    if isinstance(error, SyntaxError) and error.text:  # an operator whose overload is a Python keyword
        return f"{first}: {error.text.strip()}"
    if (fixed := re.search(r"to be a constant \((\d+)\)", str(error))) is not None:
        return f"a loop over the batch, or a test of its size, fixes that to {fixed[1]}"
    if first.startswith("Constraints violated") and len(lines) > 1:
        return lines[1].removeprefix("- ")
    if "data-dependent" in first:
        return f"Python needs the value of a tensor (operator aten.item): {first}"
    return first


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames of an error from outside in, those of its causes after its own."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    if error.__cause__ is not None:
        yield from _frames(error.__cause__)
