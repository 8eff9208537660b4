"""Merge rules by role, and the sizes and bounds of what is sent."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mycelia.engine.algorithms import (
    FedAvg,
    Message,
    ServerState,
    merge_buffers,
    merge_model,
    model_specs,
    model_terms,
)
from mycelia.engine.algorithms.gradient import mean_gradient
from mycelia.engine.capture import capture
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.local import LocalResult, LocalWork
from mycelia.engine.program import Program
from mycelia.engine.sums import ExactSum, SumFormat, Total, Update
from tests.engine.algorithms.harness import (
    BOWLS,
    Federation,
    cross_entropy,
    half_square,
    net,
    net_clients,
    net_module,
    quadratic,
    total_of,
)


class Roles(nn.Module):
    """A scalar and an empty parameter, half and scalar buffers, two kinds of counter, frozen tensors."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0))
        self.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float16))
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("bytes", torch.zeros(2, dtype=torch.uint8))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


@pytest.fixture(scope="module")
def roles() -> Program:
    example = (torch.zeros(2, 2), torch.zeros(2, 2))
    return capture(Roles(), half_square, example, backend="eager")


def start_of(program: Program) -> ServerState:
    return FedAvg().start(program)


def test_terms_have_a_place_for_each_role(roles: Program) -> None:
    """Frozen tensors and masks are in none."""
    assert {name: spec.size for name, spec in model_specs(roles).items()} == {
        "params": 3,
        "buffers": 3,
        "counters": 3,
    }
    assert {name: spec.size for name, spec in model_specs(quadratic()).items()} == {"params": 2}


def test_each_role_has_its_rule(roles: Program) -> None:
    state = start_of(roles)
    total = total_of(
        params=([0.5, 1.0, -1.0], 2.0), buffers=([0.25, -0.5, 3.0], 2.0), counters=([2.4, 2.6, 7.5], 2.0)
    )
    merged = merge_model(roles, state, total, server_lr=2.0)
    params = roles.unflatten(merged.vector)
    assert params["weight"].item() == 3.0  # twice the delta, as server_lr says
    assert params["bias"].tolist() == [2.0, -2.0]
    assert merged.buffers["mean"].tolist() == [0.25, -0.5]  # buffers move by the plain mean
    assert merged.buffers["scale"].item() == 4.0
    assert merged.buffers["seen"].item() == 2
    assert merged.buffers["bytes"].tolist() == [3, 8]
    for name, tensor in {**state.buffers, "vector": state.vector}.items():
        new = merged.vector if name == "vector" else merged.buffers[name]
        assert (new.dtype, new.shape) == (tensor.dtype, tensor.shape), name


def test_counters_never_become_floats_over_many_rounds() -> None:
    """BatchNorm's counter is compared with an integer by some code; a float would break it later."""
    federation = Federation(FedAvg(), net(), LocalWork(batch_size=4), net_clients([8, 6, 4]), plan="eager")
    for number in range(1, 4):
        federation.round()
        counter = federation.state.buffers["norm.num_batches_tracked"]
        # increments 2, 2, 1 with weights 8, 6, 4: a mean of 1.78 a round, rounded each time
        assert (counter.item(), counter.dtype, counter.shape) == (2 * number, torch.int64, torch.Size([]))


def test_float_buffers_are_the_weighted_mean() -> None:
    federation = Federation(FedAvg(), net(), LocalWork(batch_size=4), net_clients([8, 6, 4]), plan="eager")
    ends = []
    for client in federation.clients:
        message = federation.message()
        result = federation.trainer.run(message.vector, message.buffers, client, 0)
        ends.append(result.buffers["norm.running_var"].clone())
    federation.round()
    expected = (8 * ends[0] + 6 * ends[1] + 4 * ends[2]) / 18
    torch.testing.assert_close(federation.state.buffers["norm.running_var"], expected, rtol=0, atol=1e-7)


def test_terms_without_kept_names_are_not_copies() -> None:
    program = net()
    state = start_of(program)
    message = Message(state.vector, state.buffers, {}, 0)
    result = LocalResult(state.vector + 1, state.buffers, 1, 0.0, 1)
    terms = model_terms(program, message, result, 2.0)
    assert terms["params"].values is result.vector
    assert terms["params"].minus is message.vector
    assert list(terms) == ["params", "buffers", "counters"]
    assert not terms["buffers"].values.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_updates_are_summed_exactly(dtype: torch.dtype) -> None:
    """A thousand deltas of one unit in the last place: a sum in halves would lose most of them."""
    program = quadratic(2, dtype, "eager")
    start = torch.tensor([1.0, 1.0], dtype=dtype)
    end = torch.nextafter(start, torch.tensor(2.0, dtype=dtype))
    unit = float(end[0].double() - 1)
    form = SumFormat.plan(model_specs(program), 5.0, 1000)
    exact = ExactSum(form)
    message, result = Message(start, {}, {}, 0), LocalResult(end, {}, 1, 0.0, 1)
    for _ in range(1000):
        exact.add(Update(model_terms(program, message, result, 5.0)))
    total = ExactSum.total(form, [exact.accumulator], exact.count)
    assert total.sums["params"].tolist() == [5000 * unit] * 2
    assert total.mean("params").tolist() == [unit] * 2
    merged = merge_model(program, ServerState(start, {}), total)
    assert torch.equal(merged.vector, end)


def test_merging_a_float64_model_does_not_write_to_it() -> None:
    program = net()
    state = start_of(program)
    before = state.vector.clone()
    size = model_specs(program, {"norm.weight"})["params"].size
    total = Total({"params": torch.ones(size, dtype=torch.float64)}, {"params": 1.0}, 1)
    merged = merge_model(program, state, total, kept={"norm.weight"})
    assert torch.equal(state.vector, before)
    moved = program.unflatten(merged.vector - before)
    assert {name for name, tensor in moved.items() if not tensor.any()} == {"norm.weight"}


def test_no_buffers_no_change() -> None:
    buffers = {"x": torch.ones(2)}
    assert merge_buffers(quadratic(), buffers, total_of(params=([0.0, 0.0], 1.0))) == buffers


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("module", "rule"), [(Complex(), "phase is torch.complex64"), (Nothing(), "no parameter is sent")]
)
def test_models_that_cannot_be_summed(module: nn.Module, rule: str) -> None:
    program = capture(module, half_square, (torch.zeros(2, 2), torch.zeros(2, 2)), backend="eager")
    with pytest.raises(ConfigError, match=rule):
        model_specs(program)


def test_a_diverged_client_is_refused() -> None:
    program = quadratic()
    form = SumFormat.plan(model_specs(program), 1.0, 3)
    message = Message(torch.zeros(2, dtype=torch.float64), {}, {}, 0)
    for bad in (2000.0, float("nan"), float("inf")):
        result = LocalResult(torch.tensor([0.0, bad], dtype=torch.float64), {}, 1, 0.0, 1)
        exact = ExactSum(form)
        with pytest.raises(DataError, match="params: value 1"):
            exact.add(Update(model_terms(program, message, result, 1.0)))
        assert not exact.accumulator.any()


def test_mean_gradient_is_that_of_autograd() -> None:
    client, module = net_clients([300])[0], net_module()
    program = net()
    state = start_of(program)
    before = {name: tensor.clone() for name, tensor in state.buffers.items()}
    found = mean_gradient(program, state.vector, state.buffers, client)
    expected = torch.zeros_like(found)
    inputs, targets = client.tensors()
    for part in (slice(0, 256), slice(256, 300)):  # BatchNorm sees the chunks
        module.train()
        loss = cross_entropy(module(inputs[part]), targets[part]).sum()
        wanted = [p for p in module.parameters() if p.requires_grad]
        expected += torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, wanted)])
    torch.testing.assert_close(found, expected / 300, rtol=0, atol=1e-12)
    assert all(torch.equal(state.buffers[name], before[name]) for name in before)


def test_mean_gradient_of_a_quadratic() -> None:
    bowl, vector = BOWLS[1], torch.tensor([1.0, -2.0], dtype=torch.float64)
    found = mean_gradient(quadratic(), vector, {}, bowl.data(0))
    np.testing.assert_allclose(found.numpy(), bowl.curvature * (vector.numpy() - bowl.optimum), rtol=1e-12)
