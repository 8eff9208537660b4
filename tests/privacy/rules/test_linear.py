"""Linear maps: every way a matrix meets the examples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.privacy.clipped_grad import clipped_grad, explain
from tests.privacy.models import LINEAR, Function, module_of
from tests.privacy.oracle import abadi, agrees, clipped_of, close, compare, one_by_one

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

torch.set_num_threads(1)


@pytest.mark.parametrize("name", LINEAR)
def test_equals_one_by_one(name: str) -> None:
    agrees(name)


@settings(max_examples=5, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    st.lists(st.integers(1, 4), max_size=2),
    st.integers(1, 5),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
)
def test_drawn_shapes(positions: list[int], inputs: int, outputs: int, bias: bool, transposed: bool) -> None:
    weight = nn.Parameter(torch.randn((inputs, outputs) if transposed else (outputs, inputs)).double())
    offset = nn.Parameter(torch.randn(outputs).double()) if bias else None
    module = Function(lambda s, x: F.linear(x, s.w.t() if transposed else s.w, s.b), w=weight, b=offset)
    compare(module, torch.randn(4, *positions, inputs).double())


def test_bias_time_sum() -> None:
    """Gradients at two positions that cancel leave a bias without a gradient."""

    def opposite(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - outputs[:, 1]).sum(1) + 0 * targets

    layer = nn.Linear(3, 2)
    layer.weight.requires_grad_(False)
    batch = torch.randn(4, 2, 3), torch.zeros(4)
    for backend in ("taps", "vmap"):
        program = capture(layer, opposite, batch)
        assert not clipped_grad(program, abadi, backend=backend)(*program.init(), batch).norms.any()


@pytest.mark.parametrize(
    ("positions", "inputs", "outputs", "form"),
    [
        (1, 3, 2, "product"),
        (2, 12, 10, "ghost"),
        (9, 3, 2, "formed"),
        (4, 12, 4, "formed"),
        (4, 16, 16, "ghost"),
    ],
)
def test_the_cheaper_way_is_taken(positions: int, inputs: int, outputs: int, form: str) -> None:
    """T (p + d) <= p d and 2 T^2 <= p d: inner products over positions."""
    batch = torch.randn(2, positions, inputs), torch.zeros(2)
    program = capture(nn.Linear(inputs, outputs, bias=False), lambda o, t: o.sum((1, 2)) - t, batch)
    assert f"{form}, T = {positions}, {inputs * outputs} entries" in explain(clipped_grad(program, abadi))


@pytest.mark.parametrize("name", ["linear-ghost", "linear-formed", "matmul-heads", "matmul-left"])
def test_without_room(name: str) -> None:
    """Nothing kept, and more examples than are formed at a time."""
    module, inputs = module_of(name), torch.randn(5, *LINEAR[name].shape).double()
    small = clipped_of(name, workspace_mb=0)
    found = small(*small.program.init(), (inputs, torch.ones(5).double()))
    close(found, one_by_one(module, (inputs, torch.ones(5).double()), abadi), 1e-10)
