"""Passes of which only the input has a gradient: PyTorch's values and gradients, whatever the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mycelia.attacks.input_passes import input_pass
from mycelia.engine.capture import capture
from mycelia.engine.losses import cross_entropy
from mycelia.engine.models import build


def images(seed: int, *shape: int, levels: int | None = None) -> Tensor:
    """Normal numbers; or few levels, so that many are equal."""
    draw = torch.Generator().manual_seed(seed)
    if levels:
        return torch.randint(levels, shape, generator=draw).double()
    return torch.randn(shape, dtype=torch.float64, generator=draw)


def gradients(run: Any, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    found = run(leaf)
    return found.detach(), torch.autograd.grad(found, leaf, images(seed, *found.shape).to(found.dtype))[0]


@given(
    seed=st.integers(0, 10**6), height=st.integers(2, 9), width=st.integers(2, 9),
    levels=st.sampled_from([2, 5]), ceil=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_pools_are_those_of_pytorch_to_the_bit(
    seed: int, height: int, width: int, levels: int, ceil: bool
) -> None:
    """Also among equal values: their gradient goes to the first one."""
    x = images(seed, 40, 5, height, width, levels=levels).repeat(6, 1, 1, 1)
    module = nn.MaxPool2d(2, ceil_mode=ceil)
    expected, found = gradients(module, x, seed), gradients(lambda z: input_pass(module, z), x, seed)
    assert torch.equal(expected[0], found[0])
    assert torch.equal(expected[1], found[1])
    with torch.no_grad():
        assert torch.equal(input_pass(module, x), expected[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_handed_on(bad: float) -> None:
    x = images(0, 200, 3, 6, 6)
    x[::3, 1, 2, 3] = bad
    expected, found = nn.MaxPool2d(2)(x), input_pass(nn.MaxPool2d(2), x)
    assert torch.equal(expected.isnan(), found.isnan())
    assert torch.equal(expected.nan_to_num(), found.nan_to_num())


@given(
    seed=st.integers(0, 10**6), channels=st.integers(1, 5), out=st.integers(1, 7),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    bias=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_gradients_of_convolutions_are_those_of_pytorch(
    seed: int, channels: int, out: int, kernel: Any, stride: Any, padding: Any, dilation: Any, bias: bool
) -> None:
    x = images(seed, 60, channels, 9, 10)
    module = nn.Conv2d(channels, out, kernel, stride, padding, dilation, bias=bias).double()
    module.requires_grad_(False)
    expected, found = gradients(module, x, seed), gradients(lambda z: input_pass(module, z), x, seed)
    assert torch.equal(expected[0], found[0])
    assert torch.allclose(expected[1], found[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "module",
    [
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d((2, 1)),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 6, 3, padding="same"),
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 3)),
    ],
    ids=str,
)
def test_other_layers_run_as_they_are(module: nn.Module) -> None:
    module = module.double().requires_grad_(False)
    x = images(1, 60, 4, 8, 8)
    expected, found = gradients(module, x, 2), gradients(lambda z: input_pass(module, z), x, 2)
    assert torch.equal(expected[0], found[0])
    assert torch.allclose(expected[1], found[1], rtol=1e-10, atol=1e-10)


def test_indices_and_parameters_with_a_gradient_get_them() -> None:
    x = images(1, 60, 4, 8, 8)
    values, places = input_pass(nn.MaxPool2d(2, return_indices=True), x)
    assert torch.equal(values, x.flatten(2).gather(2, places.flatten(2)).view_as(values))
    module = nn.Conv2d(4, 6, 3).double()
    input_pass(module, x.requires_grad_()).sum().backward()
    assert module.weight.grad is not None


def test_second_derivatives_are_there() -> None:
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.MaxPool2d(2)).double().requires_grad_(False)
    x = images(3, 70, 1, 8, 8)

    def curvature(run: Any) -> Tensor:
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(run(leaf).square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), leaf)[0]

    assert torch.allclose(curvature(module), curvature(lambda z: input_pass(module, z)), atol=1e-10)


def test_captured_programs_and_compiled_modules() -> None:
    x, y = torch.rand(40, 1, 28, 28), torch.arange(40) % 10
    model = build("lenet", (1, 28, 28), 10, seed=0).eval().requires_grad_(False)
    program = capture(model, cross_entropy, (x[:2], y[:2]))
    params, buffers = program.init()
    frozen = {name: value.detach() for name, value in params.items()}
    expected = gradients(model, x, 0)
    compiled = torch.compile(model, backend="eager")
    for run in (
        lambda z: program.predict(frozen, buffers, z),
        compiled,
        lambda z: F.relu(model(z)) + model(z).clamp(max=0),
    ):
        found = gradients(lambda z, run=run: input_pass(run, z), x, 0)  # type: ignore[misc]
        assert torch.allclose(expected[0], found[0], atol=1e-6)
        assert torch.allclose(expected[1], found[1], atol=1e-6)
