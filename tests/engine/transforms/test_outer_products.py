"""What is taken out of a step and put back must be the step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from mycelia.engine.capture import capture
from mycelia.engine.program import Program
from mycelia.engine.step import Adjust, sgd_step
from mycelia.engine.transforms.compile import TracedStep, trace_step
from mycelia.engine.transforms.outer_products import apply_products
from mycelia.engine.types import Tensors


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def program(*, tied: bool = False, hidden: int = 160) -> Program:
    layers = [nn.Linear(160, hidden), nn.ReLU(), nn.Linear(hidden, 160), nn.Tanh(), nn.Linear(160, 5)]
    if tied:
        layers[2].weight = layers[0].weight
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for layer in layers:
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=0.1)
    return capture(nn.Sequential(*layers).double(), loss, batch())


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(7, 160, generator=draw, dtype=torch.float64), torch.arange(7) % 5


def traced(found: Program, adjust: Adjust | None = None) -> tuple[TracedStep, Tensors, list[Tensor]]:
    params, buffers = found.init()
    extra = {"lr": torch.tensor(0.3, dtype=torch.float64)}
    rest = [*batch(), torch.tensor(0), *extra.values()]
    step = trace_step(sgd_step(found, adjust), params, buffers, *batch(), torch.tensor(0), extra)
    return step, params, rest


def after(step: TracedStep, params: Tensors, rest: list[Tensor]) -> tuple[Tensors, Tensor]:
    own = {name: tensor.clone() for name, tensor in params.items()}
    args = [*own.values(), *rest]
    outputs = step.graph(*args)
    apply_products([args[position] for position in step.deferred], outputs[1:])
    return own, outputs[0]


def expected(found: Program, adjust: Adjust | None = None) -> tuple[Tensors, Tensor]:
    params, buffers = found.init()
    extra = {"lr": torch.tensor(0.3, dtype=torch.float64)}
    result = sgd_step(found, adjust)(params, buffers, *batch(), torch.tensor(0), extra)
    return result.params, result.loss


def decayed(grads: Tensors, params: Tensors, extra: Tensors) -> Tensors:
    return {name: grad + 0.1 * params[name] for name, grad in grads.items()}


@pytest.mark.parametrize(
    ("found", "adjust", "deferred"),
    [
        (program(), None, (0, 2)),  # the last layer is too small to be worth a call
        (program(), decayed, ()),  # the gradient is no product any more
        (program(tied=True), None, ()),  # a sum of two products
        (program(hidden=8), None, ()),
    ],
    ids=["plain", "decayed", "tied", "small"],
)
def test_the_step_is_the_same(found: Program, adjust: Adjust | None, deferred: tuple[int, ...]) -> None:
    step, params, rest = traced(found, adjust)
    assert step.deferred == deferred
    own, value = after(step, params, rest)
    wanted, wanted_value = expected(found, adjust)
    torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(value, wanted_value, rtol=1e-12, atol=1e-12)


def test_what_is_deferred_is_not_computed_in_the_graph() -> None:
    step, _, _ = traced(program())
    shapes = [
        tuple(node.meta["val"].shape)
        for node in step.graph.graph.nodes
        if isinstance(node, fx.Node) and node.op == "call_function" and "val" in node.meta
        and isinstance(node.meta["val"], Tensor) and node.target is torch.ops.aten.mm.default
    ]  # fmt: skip
    assert (160, 160) not in shapes
