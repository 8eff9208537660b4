"""A module or a Program read as a chain of layers, in evaluation mode."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from mycelia.attacks.defences.verification.layers import (
    Average,
    Chain,
    Convolution,
    Flatten,
    Layer,
    Linear,
    MaxPool,
    ReLU,
    Scale,
)
from mycelia.attacks.model import Normalised
from mycelia.engine.errors import ConfigError
from mycelia.engine.program import ModuleCall, Program
from mycelia.engine.schema import Role
from mycelia.engine.types import Tensors

__all__ = ["read", "read_program"]

KNOWN: Final = "linear, conv2d, relu, max_pool2d, avg_pool2d, fixed normalisation, flatten, dropout"

aten = torch.ops.aten


def read(
    model: nn.Module | Program, params: Tensors | None = None, buffers: Tensors | None = None
) -> tuple[Chain, Tensors]:
    """The layers of a model and the tensors that they name.

    Args:
        model: `nn.Sequential`s of known layers, or a Program whose graph is a chain of known operations.
        params: of a Program; None: as captured.
        buffers: of a Program; None: as captured.

    Raises:
        ConfigError: something that there are no bounds for, by name.
    """
    if isinstance(model, Program):
        own_params, own_buffers = model.init()
        tensors = {**model.frozen, **(own_buffers if buffers is None else buffers)}
        return read_program(model), tensors | (own_params if params is None else dict(params))
    chain = Chain(tuple(_layers_of(model, "")))
    return chain, {name: each.detach() for name, each in [*model.named_parameters(), *model.named_buffers()]}


def read_program(program: Program) -> Chain:
    """The layers of a Program, which name tensors of its schema.

    Raises:
        ConfigError: as `read`.
    """
    if program.graphs is None:
        if not isinstance(program.evaluation, ModuleCall):
            raise _unknown(type(program.evaluation).__name__)
        return Chain(tuple(_layers_of(program.evaluation.module, "")))
    return Chain(tuple(_layers_of_graph(program)))


def _unknown(what: str) -> ConfigError:
    return ConfigError(
        f"no bounds for {what}",
        rule=f"a chain without branches of {KNOWN}",
        who="verification",
    )


# --- modules ----------------------------------------------------------------------------------------


def _layers_of(module: nn.Module, prefix: str) -> list[Layer]:
    if isinstance(module, nn.Sequential):
        return [
            layer
            for name, child in module.named_children()
            for layer in _layers_of(child, f"{prefix}{name}.")
        ]
    # Subclasses may compute anything, so types are compared, not families.
    if type(module) in (nn.Dropout, nn.Dropout2d, nn.Identity):
        return []
    make = _MODULES.get(type(module))
    if make is None:
        raise _unknown(f"{prefix.removesuffix('.') or 'the model'}, a {type(module).__name__}")
    return [make(module, prefix)]


def _bias(module: nn.Module, prefix: str) -> str | None:
    return None if getattr(module, "bias", None) is None else f"{prefix}bias"


def _linear(module: Any, prefix: str) -> Layer:
    return Linear(f"{prefix}weight", _bias(module, prefix))


def _convolution(module: Any, prefix: str) -> Layer:
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        raise _unknown(f"{prefix}padding {module.padding!r}, {module.padding_mode}")
    return Convolution(
        f"{prefix}weight",
        _bias(module, prefix),
        module.stride,
        module.padding,
        module.dilation,
        module.groups,
    )


def _max_pool(module: Any, prefix: str) -> Layer:
    if module.ceil_mode or module.return_indices:
        raise _unknown(f"{prefix}ceil_mode or return_indices")
    window, stride, padding, dilation = (
        _pair(each) for each in (module.kernel_size, module.stride, module.padding, module.dilation)
    )
    return MaxPool(window, stride, padding, dilation)


def _average(module: Any, prefix: str) -> Layer:
    if module.ceil_mode or _pair(module.padding) != (0, 0) or module.divisor_override:
        raise _unknown(f"{prefix}a mean with padding, ceil_mode or a divisor")
    return Average(_pair(module.kernel_size), _pair(module.stride))


def _whole_average(module: Any, prefix: str) -> Layer:
    if module.output_size not in (1, (1, 1), [1, 1]):
        raise _unknown(f"{prefix}an adaptive mean of size {module.output_size}")
    return Average()


def _flatten(module: Any, prefix: str) -> Layer:
    if (module.start_dim, module.end_dim) != (1, -1):
        raise _unknown(f"{prefix}flatten of axes {module.start_dim} to {module.end_dim}")
    return Flatten()


def _norm(module: Any, prefix: str) -> Layer:
    if module.running_mean is None:
        raise _unknown(f"{prefix}batch statistics")
    weight = f"{prefix}weight" if module.affine else None
    return Scale(f"{prefix}running_mean", f"{prefix}running_var", module.eps, weight, _bias(module, prefix))


_MODULES: Final[Mapping[type[nn.Module], Callable[[Any, str], Layer]]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.ReLU: lambda module, prefix: ReLU(),
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _average,
    nn.AdaptiveAvgPool2d: _whole_average,
    nn.Flatten: _flatten,
    nn.BatchNorm1d: _norm,
    nn.BatchNorm2d: _norm,
    Normalised: lambda module, prefix: Scale(f"{prefix}mean", deviation=f"{prefix}std"),
}


# --- graphs -----------------------------------------------------------------------------------------


def _layers_of_graph(program: Program) -> list[Layer]:
    """From the outputs back to the inputs: each operation has one argument that depends on them."""
    graph = program.graph("verification") if program.graphs is None else program.graphs.evaluation
    roles = ((Role.PARAMETER,), (Role.BUFFER, Role.COUNTER), (Role.FROZEN,))
    names = [entry.name for role in roles for entry in program.schema.of(*role)]
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    tensors = {node: name for node, name in zip(places, names, strict=False)}
    inputs = places[len(names)]
    results = graph.graph.output_node().args[0]
    assert_outputs = (
        isinstance(results, tuple | list) and len(results) > 1 and isinstance(results[1], fx.Node)
    )
    if not assert_outputs:
        raise _unknown("a model without one tensor of outputs")
    layers, node = list[Layer](), results[1]  # type: ignore[index]
    while node is not inputs:
        if not isinstance(node, fx.Node) or node.op != "call_function":
            raise _unknown(f"outputs that come from {node}, and not from the inputs")
        layer = _layer_of(node, tensors)
        layers += [] if layer is None else [layer]
        node = node.args[0]
    return layers[::-1]


def _layer_of(node: fx.Node, tensors: Mapping[fx.Node, str]) -> Layer | None:
    what, args = node.target, node.args
    if node.kwargs and what not in _SAME:
        raise _unknown(f"{node.name} with {', '.join(node.kwargs)}")
    if what in _SAME or (what is operator.getitem and args[1] == 0):  # the first of several results
        return None
    make = _OPERATIONS.get(what)
    if make is None:
        raise _unknown(f"{node.name}, {what}")

    def name(place: int) -> str | None:
        given = args[place] if place < len(args) else None
        if given is None:
            return None
        if not isinstance(given, fx.Node) or given not in tensors:
            raise _unknown(f"{node.name}, of which argument {place} is no tensor of the model")
        return tensors[given]

    def option(place: int, default: Any) -> Any:
        return args[place] if place < len(args) else default

    return make(node, name, option)


_Name = Callable[[int], str | None]
_Option = Callable[[int, Any], Any]


def _some(name: str | None, node: fx.Node) -> str:
    if name is None:
        raise _unknown(f"{node.name} without a weight")
    return name


def _linear_call(node: fx.Node, name: _Name, option: _Option) -> Layer:
    del option
    return Linear(_some(name(1), node), name(2))


def _convolution_call(node: fx.Node, name: _Name, option: _Option) -> Layer:
    stride, padding, dilation = _pair(option(3, 1)), _pair(option(4, 0)), _pair(option(5, 1))
    return Convolution(_some(name(1), node), name(2), stride, padding, dilation, option(6, 1))


def _max_pool_call(node: fx.Node, name: _Name, option: _Option) -> Layer:
    del name
    window, stride = _pair(option(1, 1)), _pair(option(2, None) or option(1, 1))
    if option(5, False):
        raise _unknown(f"{node.name} with ceil_mode")
    return MaxPool(window, stride, _pair(option(3, 0)), _pair(option(4, 1)))


def _average_call(node: fx.Node, name: _Name, option: _Option) -> Layer:
    del name
    window, stride = _pair(option(1, 1)), _pair(option(2, None) or option(1, 1))
    if _pair(option(3, 0)) != (0, 0) or option(4, False) or option(6, None):
        raise _unknown(f"{node.name} with padding, ceil_mode or a divisor")
    return Average(window, stride)


def _whole_average_call(node: fx.Node, name: _Name, option: _Option) -> Layer:
    del name
    if list(option(1, [])) != [1, 1]:
        raise _unknown(f"{node.name} of size {option(1, [])}")
    return Average()


def _flatten_call(node: fx.Node, name: _Name, option: _Option) -> Layer:
    del name, option
    before, after = (each.meta["val"] for each in (node.args[0], node) if isinstance(each, fx.Node))
    kept = isinstance(before, Tensor) and isinstance(after, Tensor) and after.shape[0] == before.shape[0]
    if not kept or after.dim() != 2:
        raise _unknown(f"{node.name}, a change of shape other than one vector per row")
    return Flatten()


def _norm_call(node: fx.Node, name: _Name, option: _Option) -> Layer:
    return Scale(_some(name(3), node), _some(name(4), node), option(6, 1e-5), name(1), name(2))


_SAME: Final = (aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default)
_OPERATIONS: Final[Mapping[Any, Callable[[fx.Node, _Name, _Option], Layer]]] = {
    aten.linear.default: _linear_call,
    aten.conv2d.default: _convolution_call,
    aten.relu.default: lambda node, name, option: ReLU(),
    aten.max_pool2d.default: _max_pool_call,
    aten.avg_pool2d.default: _average_call,
    aten.adaptive_avg_pool2d.default: _whole_average_call,
    aten.reshape.default: _flatten_call,
    aten.view.default: _flatten_call,
    aten.flatten.using_ints: _flatten_call,
    aten._native_batch_norm_legit_no_training.default: _norm_call,
}


def _pair(value: Any) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else (value * 2)[:2]
    return int(first), int(second)
