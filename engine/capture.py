"""Capture: an ordinary module and a per-example loss become a Program."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, fx, nn

from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.explain import place_of, reason_of
from mycelia.engine.graph import nested
from mycelia.engine.program import Graphs, ModuleCall, Program, predictor_of_module
from mycelia.engine.schema import Entry, Role, Schema
from mycelia.engine.tracing import Loss, export, lower
from mycelia.engine.types import Tensors

__all__ = ["capture"]


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
            ModuleCall(training, loss),
            ModuleCall(evaluation, loss),
            predictor_of_module(evaluation),
            backend="eager",
            example=(inputs, targets),
        )
    train, evaluate = (
        export(copy.deepcopy(model).train(mode), loss, (inputs, targets), dynamic_batch)
        for mode in (True, False)
    )
    training = lower(train, schema, initial, dynamic_batch)
    # most models do the same in both modes
    evaluation = training if train.same(evaluate) else lower(evaluate, schema, initial, dynamic_batch)
    program = Program.of_graphs(schema, initial, Graphs(training, evaluation), (inputs, targets))
    _check_gradients(program, model, loss)
    return program


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


def _losses(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> Tensor:
    """What the module itself gives; the generators stay as they were."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            return loss(model(inputs.clone()), targets.clone())
    except Exception as error:
        where, line = place_of(error, model)
        raise CaptureError(
            f"the model or its loss fails on the example{line}: {reason_of(error)}",
            rule="loss(model(inputs), targets) runs",
            fix="check the shapes and dtypes of the example",
            who=where,
        ) from error


def _check_loss(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> None:
    with torch.no_grad():
        losses = _losses(model, loss, inputs, targets)
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


def _check_gradients(program: Program, model: nn.Module, loss: Loss) -> None:
    """Compare with the module's own autograd on the example: export may lose how a model stops gradients."""
    if program.graphs is None or program.example is None:
        return
    training, evaluation = program.graphs
    for mode, graph in ((True, training), (False, evaluation)):
        if (mode and training is evaluation) or not _comparable(graph):
            continue
        mine, theirs = _gradients(program, copy.deepcopy(model).train(mode), loss)
        # relative to the largest gradient: some are zero but for rounding
        largest = max((float(grad.norm()) for grad in theirs.values()), default=0.0)
        for name, grad in theirs.items():
            tolerance = min(0.1, 10 * math.sqrt(torch.finfo(grad.dtype).eps))
            if float((mine[name] - grad).norm()) > tolerance * largest:  # never true of what is not finite
                raise CaptureError(
                    f"the exported graph gives {name!r} another gradient than the module itself",
                    rule="export keeps detach() and torch.no_grad(); it loses hooks, inference_mode and the "
                    "backward of a torch.autograd.Function",
                    fix="register the custom backward with torch.library, or capture with backend='eager'",
                    who=name,
                )


def _comparable(graph: fx.GraphModule) -> bool:
    """Whether a second pass is sure to be the same, and cheap: nothing random, no control flow."""
    seed = graph.graph.find_nodes(op="placeholder", target="seed")[0]
    return not seed.users and not nested(graph.graph)


def _gradients(program: Program, model: nn.Module, loss: Loss) -> tuple[Tensors, Tensors]:
    """Of the summed loss of the example, by the Program and by the module in the mode it is in."""
    if program.example is None:
        return {}, {}
    inputs, targets = program.example
    params, buffers = program.init()
    own = dict(model.named_parameters())
    leaves = {name: tensor.requires_grad_() for name, tensor in params.items()}
    with torch.enable_grad():
        found = program.forward(leaves, buffers, inputs, targets, training=model.training).losses
        expected = _losses(model, loss, inputs, targets)
    return _derived(found, leaves), _derived(expected, {name: own[name] for name in leaves})


def _derived(losses: Tensor, leaves: Tensors) -> Tensors:
    if losses.requires_grad:
        losses.sum().backward()  # unlike autograd.grad, it passes through re-entrant checkpoints
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
