"""Capture: an ordinary module and a per-example loss become a Program."""

from __future__ import annotations

import copy
import linecache
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.program import Program, call_of_graph, call_of_module, predictor_of_graph
from mycelia.engine.schema import Entry, Role, Schema
from mycelia.engine.seeding import drive_by_seed

__all__ = ["capture"]

Loss = Callable[[Any, Tensor], Tensor]


class _WithLoss(nn.Module):
    """What is exported: the model and the loss, so that one graph holds both."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        outputs = self.model(inputs)
        return self.loss(outputs, targets), outputs


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
    inputs, targets = _two_examples(example)
    model = copy.deepcopy(model)
    _check_loss(copy.deepcopy(model), loss, inputs, targets)
    schema, initial = _schema_of(model)
    if backend == "eager":
        module = copy.deepcopy(model)
        return Program(
            schema,
            initial,
            call_of_module(module, loss, training=True),
            call_of_module(module, loss, training=False),
            lambda p, b, f, x: torch.func.functional_call(module.eval(), {**p, **b, **f}, (x,)),
            backend="eager",
            example=(inputs, targets),
        )
    graphs = []
    for training in (True, False):
        module = copy.deepcopy(model).train(training) if training else copy.deepcopy(model).eval()
        exported = _export(_WithLoss(module, loss), (inputs, targets), dynamic_batch, module)
        graph, schema, initial = _functional(exported, schema, initial)
        graphs.append(graph)
    # a constant found in the second graph extends the schema, so the placeholders are set last
    graphs = [_with_placeholders(graph, schema) for graph in graphs]
    return Program(
        schema,
        initial,
        call_of_graph(graphs[0], schema),
        call_of_graph(graphs[1], schema),
        predictor_of_graph(_outputs_alone(graphs[1]), schema),
        graphs=(graphs[0], graphs[1]),
        example=(inputs, targets),
    )


def _outputs_alone(evaluation: fx.GraphModule) -> fx.GraphModule:
    """The evaluation graph without its loss: what depends on the targets is gone."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    result: Any = graph.graph_copy(evaluation.graph, mapping)
    graph.output(result[1])
    holders = {node.target: node for node in graph.nodes if node.op == "placeholder"}
    inputs, targets = holders["inputs"], holders["targets"]
    for node in list(targets.users):
        # export may have read the batch size off the targets; the inputs have the same
        if node.target is torch.ops.aten.sym_size.int and node.args[1] == 0:
            node.replace_input_with(targets, inputs)
    graph.eliminate_dead_code()
    if targets.users:
        raise CaptureError(
            "the outputs depend on the targets",
            rule="a prediction is made from the inputs alone",
            fix="keep the targets in the loss",
            who="model",
        )
    return fx.GraphModule(evaluation, graph)


def _two_examples(example: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The example with at least two rows: export specialises a batch of one."""
    inputs, targets = (torch.as_tensor(part) for part in example)
    if inputs.dim() == 0 or targets.dim() == 0 or len(inputs) != len(targets) or len(inputs) == 0:
        raise CaptureError(
            f"an example of shapes {tuple(inputs.shape)} and {tuple(targets.shape)}",
            rule="inputs [B, ...] and targets [B, ...] with the same B >= 1",
            who="example",
        )
    if len(inputs) == 1:
        return torch.cat([inputs, inputs]), torch.cat([targets, targets])
    return inputs, targets


def _check_loss(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> None:
    with torch.no_grad():
        outputs = model(inputs)
        losses = loss(outputs, targets)
    batch = len(inputs)
    if not isinstance(losses, Tensor) or tuple(losses.shape) != (batch,):
        found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        reduced = isinstance(losses, Tensor) and losses.dim() == 0
        raise CaptureError(
            f"the loss gives {'a single number' if reduced else f'shape {found}'} for {batch} examples",
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


def _export(
    module: nn.Module, args: tuple[Tensor, ...], dynamic: bool, model: nn.Module
) -> torch.export.ExportedProgram:
    batch = torch.export.Dim.DYNAMIC if dynamic else None
    shapes = tuple({0: batch} for _ in args) if dynamic else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # export talks about its own deprecations and RNN weight lists
            exported = torch.export.export(module, args, dynamic_shapes=shapes, strict=False)
            # an empty table functionalises and keeps linear, conv2d, lstm, ... whole
            functional: torch.export.ExportedProgram = exported.run_decompositions({})
            return functional
    except Exception as error:
        raise _not_exportable(error, model) from error


def _not_exportable(error: Exception, model: nn.Module) -> CaptureError:
    """Name the innermost module, the last line of user code, and what export said."""
    paths = {id(module): path for path, module in model.named_modules()}
    where, line, frame = "", "", error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and paths.get(id(owner)):
            where = f"{paths[id(owner)]} ({type(owner).__name__})"
        if "/torch/" not in code.co_filename and not code.co_filename.endswith(("capture.py", "<string>")):
            text = linecache.getline(code.co_filename, frame.tb_lineno).strip()
            line = f"{code.co_filename}:{frame.tb_lineno}: {text}"
        frame = frame.tb_next
    reason = next((part.strip() for part in str(error).splitlines() if part.strip()), type(error).__name__)
    if not line:
        line = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    return CaptureError(
        f"the model cannot be exported: {reason}",
        rule="torch.export traces the model with a symbolic batch size, at " + line,
        fix="use torch.cond for branches on values, avoid .item() and Python loops over the batch, "
        "or capture with backend='eager'",
        who=where or type(model).__name__,
    )


def _functional(
    exported: torch.export.ExportedProgram, schema: Schema, initial: dict[str, Tensor]
) -> tuple[fx.GraphModule, Schema, dict[str, Tensor]]:
    """The exported graph, its placeholders renamed to schema names; lifted constants join as frozen."""
    signature = exported.graph_signature
    targets = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    known = {entry.name for entry in schema}
    aliases = _aliases(exported, known)
    entries = list(schema.entries)
    initial = dict(initial)
    module = exported.graph_module
    for node in module.graph.nodes:
        if node.op != "placeholder" or node.name not in targets:
            continue
        target = targets[node.name]
        name = target.removeprefix("model.")
        name = aliases.get(name, name)
        if name not in known:
            constant = exported.constants.get(target, exported.state_dict.get(target))
            if not isinstance(constant, Tensor):
                raise CaptureError(f"graph input {target!r} has no value", rule="all inputs are tensors")
            entries.append(Entry(name, Role.FROZEN, tuple(constant.shape), constant.dtype))
            initial[name] = constant.detach().clone()
            known.add(name)
        node.meta["mycelia_name"] = name
    # outputs: buffer updates first, then what forward returned
    mutated = {
        spec.arg.name: (spec.target or "").removeprefix("model.")
        for spec in signature.output_specs
        if spec.kind.name == "BUFFER_MUTATION"
    }
    module.meta["mycelia_mutated"] = mutated
    return module, Schema(tuple(entries)), initial


def _aliases(exported: torch.export.ExportedProgram, known: set[str]) -> dict[str, str]:
    """Second names of tied tensors, by storage."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for target, tensor in exported.state_dict.items():
        name = target.removeprefix("model.")
        if not isinstance(tensor, Tensor) or tensor.numel() == 0:
            continue
        if name in known:
            first.setdefault(tensor.data_ptr(), name)
    for target, tensor in exported.state_dict.items():
        name = target.removeprefix("model.")
        if name not in known and isinstance(tensor, Tensor) and tensor.data_ptr() in first:
            aliases[name] = first[tensor.data_ptr()]
    return aliases


def _with_placeholders(module: fx.GraphModule, schema: Schema) -> fx.GraphModule:
    """The graph with one placeholder per schema tensor, then inputs, targets and seed, in that order."""
    old = module.graph
    graph = fx.Graph()
    order = [
        *schema.of(Role.PARAMETER),
        *schema.of(Role.BUFFER, Role.COUNTER),
        *schema.of(Role.FROZEN),
    ]
    holders = {entry.name: graph.placeholder(f"t{number}") for number, entry in enumerate(order)}
    users = [node for node in old.nodes if node.op == "placeholder" and "mycelia_name" not in node.meta]
    inputs = [graph.placeholder(name) for name in ("inputs", "targets")]
    seed = graph.placeholder("seed")
    mapping: dict[fx.Node, fx.Node] = dict(zip(users, inputs, strict=False))
    for node in old.nodes:
        if node.op == "placeholder" and "mycelia_name" in node.meta:
            new = holders[node.meta["mycelia_name"]]
            new.meta.setdefault("val", node.meta.get("val"))
            mapping[node] = new
        elif node in mapping:
            mapping[node].meta["val"] = node.meta.get("val")
    result: Any = graph.graph_copy(old, mapping)
    mutated: dict[str, str] = module.meta["mycelia_mutated"]
    output = next(node for node in old.nodes if node.op == "output")
    updates: dict[str, fx.Node] = {}
    returned: list[fx.Node] = []
    for old_value, value in zip(output.args[0], result, strict=True):
        if isinstance(old_value, fx.Node) and old_value.name in mutated and len(updates) < len(mutated):
            updates[mutated[old_value.name]] = value
        else:
            returned.append(value)
    names = [entry.name for entry in schema.of(Role.BUFFER, Role.COUNTER)]
    graph.output((*returned, *(updates.get(name, holders[name]) for name in names)))
    drive_by_seed(graph, seed)
    graph.eliminate_dead_code()
    new_module = fx.GraphModule(module, graph)
    new_module.graph.lint()
    return new_module
