"""The rewritten convolution and pooling against the captured ones, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.program import GraphCall, Program
from mycelia.engine.transforms.layout import layout
from mycelia.engine.transforms.value_and_grad import value_and_grad
from tests.engine.transforms.programs import models, program_of, same_gradients
from tests.engine.zoo import ZOO


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(1), targets, reduction="none")


class Pooled(nn.Module):
    """A convolution, ReLU and max-pool as the user writes them."""

    def __init__(self, conv: nn.Module, pool: nn.Module, *, twice: bool = False) -> None:
        super().__init__()
        self.conv, self.pool, self.twice = conv, pool, twice

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv(x))
        pooled = self.pool(y)
        return pooled + y.mean() * 0.5 if self.twice else pooled


def program(module: nn.Module, shape: tuple[int, ...] = (3, 8, 8)) -> Program:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
    return capture(module.double(), loss, batch(2, shape))


def batch(size: int, shape: tuple[int, ...] = (3, 8, 8), *, ties: bool = False) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    inputs = torch.randn(size, *shape, generator=draw, dtype=torch.float64)
    if ties:  # few values, so that windows hold the same maximum more than once
        inputs = inputs.round()
    return inputs, torch.zeros(size, dtype=torch.int64)


def calls(found: Program) -> list[str]:
    """What the training pass calls, by name."""
    assert isinstance(found.training, GraphCall)
    nodes = found.training.graph.graph.nodes
    return [getattr(node.target, "__name__", "") for node in nodes if node.op == "call_function"]


CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(3, 6, 3),
    "no-bias": lambda: nn.Conv2d(3, 6, 3, bias=False),
    "padding": lambda: nn.Conv2d(3, 6, 3, padding=1),
    "kernel-5": lambda: nn.Conv2d(3, 6, 5, padding=2),
    "kernel-1": lambda: nn.Conv2d(3, 6, 1),
    "not-square": lambda: nn.Conv2d(3, 6, (3, 1)),
    "padding-same": lambda: nn.Conv2d(3, 6, 3, padding="same"),
}
UNTOUCHED = {
    "groups": lambda: nn.Conv2d(4, 8, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "dilation": lambda: nn.Conv2d(4, 6, 3, dilation=2),
    "stride": lambda: nn.Conv2d(4, 6, 3, stride=2),
    "uneven-padding": lambda: nn.Conv2d(4, 6, 3, padding=(1, 0)),
    "many-terms": lambda: nn.Conv2d(4, 2, 9, padding=4),
}


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_by_columns(name: str, size: int) -> None:
    plain = program(
        nn.Sequential(CONVOLUTIONS[name](), nn.Tanh(), nn.Conv2d(6, 2, 3, padding=1), nn.Flatten())
    )
    new = layout(plain)
    assert "_convolve" in calls(new)
    values = batch(size)
    same_gradients(
        value_and_grad(new)(*new.init(), *values), value_and_grad(plain)(*plain.init(), *values), 1e-12
    )


@pytest.mark.parametrize("name", UNTOUCHED)
def test_other_convolutions_are_left(name: str) -> None:
    plain = program(nn.Sequential(UNTOUCHED[name](), nn.Flatten()), (4, 9, 9))
    assert layout(plain) is plain


@pytest.mark.parametrize("side", [8, 9])
@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(2), nn.MaxPool2d(2, 2), nn.MaxPool2d(3, 2), nn.MaxPool2d(2, 1), nn.MaxPool2d(2, 2, 1),
     nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d((2, 1))],
    ids=str,
)  # fmt: skip
def test_pooling(pool: nn.Module, side: int) -> None:
    """With ties: a convolution by one, so that ties in the input are ties in the windows."""
    plain = program(Pooled(nn.Conv2d(3, 3, 1, bias=False), pool), (3, side, side))
    new, (params, buffers) = layout(plain), plain.init()
    one = {n: torch.eye(3, dtype=torch.float64).reshape(3, 3, 1, 1) for n in params}
    for size in (1, 7):
        for ties, weights in ((False, params), (True, one)):
            values = batch(size, (3, side, side), ties=ties)
            same_gradients(
                value_and_grad(new)(weights, buffers, *values),
                value_and_grad(plain)(weights, buffers, *values),
                1e-12,
            )
    names = calls(new)
    assert ("_convolve_pooled" in names) == (side == 8 and _is_half(pool))
    pools = [place for place, name in enumerate(names) if "pool" in name]
    assert names[pools[0] + 1].startswith("relu")


def _is_half(pool: nn.Module) -> bool:
    pair = [
        value if isinstance(value, tuple) else (value, value) for value in (pool.kernel_size, pool.stride)
    ]
    return pair == [(2, 2), (2, 2)] and pool.padding == 0 and not pool.ceil_mode


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize(
    ("kernel", "padding", "shape"),
    [(3, 0, (3, 10, 14)), (3, 1, (1, 8, 12)), (5, 2, (2, 12, 8)), (1, 0, (3, 8, 4)),
     ((3, 5), 0, (2, 10, 12))],
    ids=str,
)  # fmt: skip
def test_a_pool_joins_the_convolution_it_alone_reads(
    kernel: int | tuple[int, int], padding: int, shape: tuple[int, ...], size: int
) -> None:
    """Behind the input, which needs no gradient, and again behind a layer, whose output needs one."""
    plain = program(
        nn.Sequential(
            nn.Conv2d(shape[0], 4, kernel, padding=padding), nn.MaxPool2d(2), nn.Conv2d(4, 3, 3, padding=1),
            nn.MaxPool2d(2), nn.Flatten(),
        ),
        shape,
    )  # fmt: skip
    new = layout(plain)
    assert calls(new).count("_convolve_pooled") == 2
    for ties in (False, True):
        values = batch(size, shape, ties=ties)
        same_gradients(
            value_and_grad(new)(*new.init(), *values), value_and_grad(plain)(*plain.init(), *values), 1e-12
        )


def test_ties_reach_the_first_maximum() -> None:
    """All four of a window are equal: the gradient goes to the first of them, as PyTorch's does."""
    plain = program(Pooled(nn.Conv2d(1, 1, 1), nn.MaxPool2d(2)), (1, 4, 4))
    new = layout(plain)
    params, buffers = new.init()
    params = {n: torch.ones_like(t) for n, t in params.items()}
    inputs = torch.ones(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.zeros(1, dtype=torch.int64)
    grads = [
        torch.autograd.grad(p.forward(params, buffers, inputs, targets).losses.sum(), inputs)[0]
        for p in (new, plain)
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)
    assert int((grads[0] != 0).sum()) == 4


def test_a_relu_with_another_reader_stays_before_the_pool() -> None:
    plain = program(Pooled(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), twice=True), (3, 10, 10))
    new = layout(plain)
    names = calls(new)
    assert names.index("relu.default") < next(n for n, name in enumerate(names) if "pool" in name)
    values = batch(3, (3, 10, 10))
    same_gradients(
        value_and_grad(new)(*new.init(), *values), value_and_grad(plain)(*plain.init(), *values), 1e-12
    )


@models(quick=("lenet", "unet", "mlp"))
@pytest.mark.parametrize("size", [1, 7])
def test_zoo(name: str, size: int) -> None:
    case, plain = ZOO[name], program_of(name)
    if case.coupled and size == 1 and not case.flow:
        size = 2  # BatchNorm needs more than one value a channel
    new, values = layout(plain), case.batch(size)
    same_gradients(
        value_and_grad(new)(*new.init(), *values, seed=3),
        value_and_grad(plain)(*plain.init(), *values, seed=3),
        1e-10 if case.double else 1e-5,
    )


def test_only_the_training_pass_changes_and_the_original_does_not() -> None:
    plain = program_of("lenet")
    before = plain.graph("test").code
    new = layout(plain)
    assert plain.graph("test").code == before
    assert new.evaluation is plain.evaluation
    assert new.note == ("layout",)
    assert plain.note == ()


def test_what_has_no_convolution_or_graph_is_returned_as_it_is() -> None:
    assert layout(program_of("mlp")) is program_of("mlp")
    eager = capture(
        nn.Linear(3, 2), lambda o, t: o.sum(1), (torch.ones(2, 3), torch.ones(2)), backend="eager"
    )
    assert layout(eager) is eager
