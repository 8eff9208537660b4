"""Peak memory of a training pass, from the liveness of tensors in its traced graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mycelia.engine import _torch
from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.program import Program
from mycelia.engine.transforms.value_and_grad import Gradients, value_and_grad

__all__ = ["peak_memory"]


def peak_memory(program: Program, batch_size: int) -> int:
    """Bytes in use at the highest point of one `value_and_grad` of a batch; nothing is allocated.

    Counts parameters, buffers, frozen tensors and the batch (held throughout), then each tensor of the
    forward and backward pass from where it is made to its last reader, views once with their base; gradients,
    losses, outputs and new buffers stay to the end. Not counted: what kernels use inside themselves
    (unfolded columns of a convolution, packed weights, an LSTM's workspace, which is several times its
    result), an allocator's rounding, the optimiser's state. A compiled plan fuses operators and needs less.

    Args:
        program: with a graph and an `example` (what `capture` and `Program.load` give).
        batch_size: examples, at least 1.

    Raises:
        ConfigError: a batch size below 1.
        CaptureError: no graph, no example, or an operator that cannot be traced.
    """
    if batch_size < 1:
        raise ConfigError(f"a batch of {batch_size}", rule="at least 1", who="peak_memory")
    program.graph("peak_memory")
    if program.example is None:
        raise CaptureError(
            "the Program has no example",
            rule="its shapes are needed",
            fix="capture it here",
            who="peak_memory",
        )
    graph = _trace(program, batch_size).graph
    held = sum(_bytes(tensor) for tensor in program.frozen.values())
    return held + _peak(graph)


def _trace(program: Program, batch_size: int) -> fx.GraphModule:
    run = value_and_grad(program)

    def passed(*args: Any) -> Gradients:
        params, buffers, inputs, targets, seed = args
        return run(params, buffers, inputs, targets, seed=seed)

    params, buffers = program.init()
    with _torch.fake_mode() as mode:
        batch = [
            torch.empty((batch_size, *part.shape[1:]), dtype=part.dtype) for part in program.example or ()
        ]
        fake = [{n: mode.from_tensor(t) for n, t in part.items()} for part in (params, buffers)]
        seed = torch.empty((), dtype=torch.int64)
    try:
        traced: fx.GraphModule = make_fx(passed, tracing_mode="fake", _allow_non_fake_inputs=True)(
            *fake, *batch, seed
        )
    except Exception as error:
        raise CaptureError(
            f"the training pass cannot be traced: {error}",
            rule="each operator runs on tensors without values",
            who="peak_memory",
        ) from error
    return traced


def _peak(graph: fx.Graph) -> int:
    """The highest sum of storages alive, over the nodes in the order they run."""
    nodes = list(graph.nodes)
    last: dict[int, int] = {}  # storage -> position of its last reader
    size: dict[int, int] = {}
    made: dict[int, list[int]] = {}
    for position, node in enumerate(nodes):
        forever = node.op in ("placeholder", "get_attr")
        for key, count in _storages(node):
            if key not in size:
                size[key] = count
                made.setdefault(position, []).append(key)
            last[key] = len(nodes) if forever else max(position, last.get(key, 0))
        for reader in node.all_input_nodes:
            for key, _ in _storages(reader):
                last[key] = max(last[key], len(nodes) if node.op == "output" else position)
    alive = peak = 0
    dies: dict[int, list[int]] = {}
    for key, position in last.items():
        dies.setdefault(position, []).append(key)
    for position in range(len(nodes)):
        alive += sum(size[key] for key in made.get(position, ()))
        peak = max(peak, alive)
        alive -= sum(size[key] for key in dies.get(position, ()))
    return peak


def _storages(node: fx.Node) -> list[tuple[int, int]]:
    value = node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else [value]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return [(_torch.storage(part), part.untyped_storage().nbytes()) for part in tensors]


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
