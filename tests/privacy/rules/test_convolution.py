"""Convolutions: every form, and what they take in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.privacy.clipped_grad import clipped_grad
from tests.privacy.memory import peak
from tests.privacy.models import CONVOLUTION
from tests.privacy.oracle import abadi, agrees, compare

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Using padding='same' with even:UserWarning"
)

torch.set_num_threads(1)


@pytest.mark.parametrize("name", CONVOLUTION)
def test_equals_one_by_one(name: str) -> None:
    agrees(name)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    axes, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    channels, outputs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    each = st.integers(1, 3 if axes < 3 else 2)
    kernel, stride = (tuple(draw(each) for _ in range(axes)) for _ in range(2))
    dilation, padding = draw(st.integers(1, 2)), draw(st.integers(0, 1))
    size = tuple(draw(st.integers(2, 5 if axes < 3 else 3)) for _ in range(axes))
    transposed = draw(st.booleans())
    kinds: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if transposed:
        kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    else:
        spans = zip(size, kernel, strict=True)
        assume(all(length + 2 * padding >= dilation * (width - 1) + 1 for length, width in spans))
    layer = kinds[axes - 1](
        channels, outputs, kernel, stride, padding, dilation=dilation, groups=groups, bias=draw(st.booleans())
    )
    return layer.double(), (channels, *size)


@settings(max_examples=5, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(convolutions())
def test_drawn_shapes(drawn: tuple[nn.Module, tuple[int, ...]]) -> None:
    module, shape = drawn
    try:
        empty = module(torch.zeros(1, *shape).double()).numel() == 0
    except RuntimeError:  # a transposed convolution with nothing left
        empty = True
    assume(not empty)
    compare(module, torch.randn(4, *shape).double())


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_conv_padding_modes(axes: int, mode: str) -> None:
    """What the layer pads with, which is zeros in one mode only."""
    kind: type[nn.Module] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    layer = kind(1, 1, 3, padding=1, padding_mode=mode, bias=False).double()
    batch = torch.ones(2, 1, *[4] * axes).double(), torch.zeros(2).double()

    def alternating(outputs: Tensor, targets: Tensor) -> Tensor:
        signs = (-1.0) ** torch.arange(outputs[0].numel())
        return (outputs.flatten(1) * signs).sum(1) - targets

    program = capture(layer, alternating, batch)
    norms = clipped_grad(program, abadi)(*program.init(), batch).norms
    # with any padding that repeats the ones, every window is ones, and the signs cancel
    assert bool((norms > 0.5).all()) if mode == "zeros" else bool((norms < 1e-12).all())


@pytest.mark.parametrize("workspace_mb", [0, 64])
def test_conv_workspace(workspace_mb: float) -> None:
    """No unfolded windows of the whole batch are kept, and no block of every group with every other."""
    size, channels, groups, side = 32, 64, 64, 8
    layer = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False)
    batch = torch.randn(size, channels, side, side), torch.zeros(size)
    program = capture(layer, lambda o, t: o.sin().flatten(1).mean(1) - t, batch)
    clipped = clipped_grad(program, abadi, workspace_mb=workspace_mb)
    arguments = program.init()

    def plain() -> None:
        weight = arguments[0]["weight"].clone().requires_grad_()
        program.losses({"weight": weight}, {}, batch).sum().backward()

    unfolded = 9 * batch[0].numel() * 4
    blocks = size * groups * channels * 9 * 4
    used = peak(lambda: clipped(*arguments, batch)) - peak(plain)
    assert used < 1.5 * 2**20 < min(unfolded, blocks) / 2
