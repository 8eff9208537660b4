"""Opacus: as a backend, and as an independent oracle for the other backends."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.program import Program
from mycelia.engine.types import Tensors
from mycelia.privacy.attach import attach
from mycelia.privacy.clip import Abadi, PerLayer
from mycelia.privacy.clipped_grad import Clipped, clipped_grad, explain
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.sampling import Poisson
from tests.privacy.models import Function, batch_of, loss, module_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even:UserWarning",
    "ignore:Full backward hook is firing:UserWarning",  # the oracle's own
    "ignore::FutureWarning",
)

torch.set_num_threads(1)

BOUND = 0.7
# what Opacus has no right gradients for, and how it shows
REFUSED = {
    "conv2d-reflect": "padding",
    "conv2d-circular": "padding",
    "conv2d-replicate": "padding",
    "embedding-padding": "padding",
    "embedding-bag": "fail",
    "tied-head": "without a call of its layer",
    "bilinear": "fail",
    "in-place": "inplace",
    "checkpoint": "do not add up",
    "attention": "fail",
    "attention-separate": "fail",
    "attention-cross": "fail",
    "lstm": "fail",
    "lstm-both-ways": "fail",
    "gru": "fail",
    "rnn": "fail",
}
QUICK = (
    "linear-ghost", "matmul", "conv1d", "conv2d-groups", "conv-transpose2d", "embedding", "layer-norm",
    "group-norm", "shared-thrice", "chunked-overlapping", "frozen-bias", "position-table", "prelu", "unused",
)  # fmt: skip
AGREE = (
    *QUICK, "linear", "linear-no-bias", "linear-formed", "linear-two-axes", "matmul-transposed",
    "conv1d-stride-dilation", "conv2d", "conv2d-ghost", "conv2d-stride", "conv2d-dilation", "conv2d-same",
    "conv2d-depthwise", "conv2d-same-dilated", "conv2d-valid", "conv2d-kernel-1", "conv3d",
    "conv-transpose1d", "conv-transpose2d-dilation", "conv-transpose3d", "layer-norm-two-axes", "rms-norm",
    "instance-norm", "shared-twice", "shared-convolution", "shared-norm", "tied-transposed",
    "chunked-disjoint", "frozen-weight", "scale", "scalar", "class-token", "subclass",
)  # fmt: skip


def oracle(module: nn.Module, batch: tuple[Tensor, Tensor], **options: Any) -> Clipped:
    """Per-example gradients by Opacus alone, clipped to BOUND."""
    hooks = GradSampleModule(copy.deepcopy(module), loss_reduction="sum", strict=False, **options)
    losses = loss(hooks(batch[0]), batch[1])
    losses.sum().backward()
    rows = {
        name.removeprefix("_module."): torch.zeros(len(losses), *p.shape).to(p)
        if p.grad_sample is None
        else p.grad_sample
        for name, p in hooks.named_parameters()
        if p.requires_grad
    }
    norms = torch.stack([g.flatten(1).square().sum(1) for g in rows.values()]).sum(0).sqrt()
    factors = (BOUND / norms).clamp(max=1)
    total = {name: torch.tensordot(factors, g, 1) for name, g in rows.items()}
    return Clipped(total, norms, factors, losses.detach())


def near(found: Clipped, expected: Clipped, tolerance: float = 1e-5) -> None:
    assert found.total.keys() == expected.total.keys()
    pairs = {name: (found.total[name], expected.total[name]) for name in found.total}
    pairs |= {
        name: (getattr(found, name), getattr(expected, name)) for name in ("norms", "factors", "losses")
    }
    for name, (mine, theirs) in pairs.items():
        assert mine.shape == theirs.shape, name
        assert float((mine - theirs).norm()) <= tolerance * float(theirs.norm()), name


def eager(name: str, dtype: torch.dtype = torch.float32) -> Program:
    return capture(module_of(name, dtype), loss, batch_of(name, 3, dtype), backend="eager")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in AGREE],
)
def test_all_backends_agree_with_opacus(name: str) -> None:
    module, batch = module_of(name, torch.float32), batch_of(name, 5, torch.float32)
    expected = oracle(module, batch)
    graph = capture(module, loss, batch_of(name, 3, torch.float32))
    for program, backend in (
        (graph, "taps"),
        (graph, "vmap"),
        (eager(name), "opacus"),
        (eager(name), "auto"),
    ):
        clipped = clipped_grad(program, Abadi(BOUND), backend=backend)
        near(clipped(*program.init(), batch), expected)


@pytest.mark.parametrize(("name", "says"), REFUSED.items())
def test_wrong_gradients_are_refused(name: str, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        clipped_grad(eager(name), Abadi(BOUND), backend="opacus")


def test_taps_agree_with_the_lstm_of_opacus() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.LSTM(4, 3, 2, batch_first=True), DPLSTM(4, 3, 2, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    batch = torch.randn(5, 6, 4), torch.randn(5)

    def states(model: Any, x: Tensor) -> Tensor:
        return model.r(x)[0]

    program = capture(Function(states, r=ours), loss, batch)
    found = clipped_grad(program, Abadi(BOUND), backend="taps", strict=True)(*program.init(), batch)
    near(found, oracle(Function(states, r=theirs), batch))


def test_taps_agree_with_the_attention_of_opacus() -> None:
    """With positions first: given the examples first, that layer of Opacus 1.6 mixes the heads."""
    torch.manual_seed(0)
    ours, theirs = nn.MultiheadAttention(8, 2), DPMultiheadAttention(8, 2)
    nn.init.normal_(ours.in_proj_bias)
    for kind in ("weight", "bias"):
        getattr(theirs.out_proj, kind).data = getattr(ours.out_proj, kind).detach()
        for part, rows in zip("qkv", getattr(ours, f"in_proj_{kind}").detach().chunk(3), strict=True):
            getattr(getattr(theirs, f"{part}linear"), kind).data = rows
    batch = torch.randn(5, 6, 8), torch.randn(5)

    def mixed(model: Any, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return model.a(x, x, x, need_weights=False)[0].transpose(0, 1)

    expected = oracle(Function(mixed, a=theirs), batch, batch_first=False)
    total = {f"a.out_proj.{kind}": expected.total[f"a.out_proj.{kind}"] for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):
        total[f"a.in_proj_{kind}"] = torch.cat([expected.total[f"a.{part}linear.{kind}"] for part in "qkv"])
    program = capture(Function(mixed, a=ours), loss, batch)
    found = clipped_grad(program, Abadi(BOUND), backend="taps", strict=True)(*program.init(), batch)
    near(found, expected._replace(total=total))


@pytest.mark.parametrize("name", ["conv2d", "embedding", "group-norm", "shared-twice", "prelu"])
def test_masks_parts_and_groups(name: str) -> None:
    program = eager(name, torch.float64)
    params, buffers = program.init()
    inputs, targets = batch_of(name, 5)
    rows = torch.tensor([0, 1, 1, 2, 3, 4])
    mask = rows.new_tensor([1, 1, 0, 1, 1, 1]).bool()
    padded, goals = inputs[rows], targets[rows].clone()
    goals[~mask] = float("nan")
    clips = [Abadi(BOUND)]
    if len(params) > 1:
        first, *others = params
        clips.append(PerLayer(BOUND, ((first,), tuple(others))))  # type: ignore[arg-type]
    for clip in clips:
        expected = clipped_grad(program, clip, backend="vmap")(params, buffers, (inputs, targets))
        for physical in (None, 1, 2):
            clipped = clipped_grad(program, clip, backend="opacus", physical=physical)
            found = clipped(params, buffers, (padded, goals), mask)
            near(Clipped(found.total, *(part[mask] for part in found[1:])), expected, 1e-10)
            assert not any(bool(part[~mask].any()) for part in found[1:])
            none = clipped(params, buffers, (padded, goals), torch.zeros_like(mask))
            empty = clipped(params, buffers, (inputs[:0], targets[:0]))
            assert not any(bool(part.any()) for found in (none, empty) for part in found.total.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_example_that_is_not_finite_counts_nothing(value: float) -> None:
    program = eager("conv2d", torch.float64)
    clipped = clipped_grad(program, Abadi(BOUND), backend="opacus")
    inputs, targets = batch_of("conv2d", 4)
    spoilt = inputs.clone()
    spoilt[2, 0, 0, 0] = value
    others = torch.tensor([0, 1, 3])
    found = clipped(*program.init(), (spoilt, targets))
    plain = clipped(*program.init(), (inputs[others], targets[others]))
    near(Clipped(found.total, *(part[others] for part in found[1:])), plain, 1e-12)
    assert found.factors[2] == 0


def test_nothing_stays_behind() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2), nn.PReLU())
    handlers = list(logging.root.handlers)
    program = capture(module, loss, batch_of("linear", 3, torch.float32), backend="eager")
    params, buffers = program.init()
    before: Tensors = {name: part.clone() for name, part in params.items()}
    clipped = clipped_grad(program, Abadi(BOUND), backend="opacus")
    clipped(params, buffers, batch_of("linear", 3, torch.float32))
    assert clipped.hooks is not None
    for kept in (module, program.training.module, clipped.hooks.call.module):  # type: ignore[attr-defined]
        for part in kept.modules():
            assert not part._forward_hooks
            assert not part._backward_hooks
            assert (
                not {"activations", "autograd_grad_sample_hooks", "ft_compute_sample_grad"}
                & vars(part).keys()
            )
        for parameter in kept.parameters():
            assert parameter.grad is None
            assert not vars(parameter)
    for name, part in params.items():
        assert torch.equal(part, before[name])
        assert part.grad is None
        assert not part.requires_grad
        assert not vars(part)
    assert logging.root.handlers == handlers


class Straight(torch.autograd.Function):
    """A sign whose gradient is that of the identity; neither export nor vmap knows what to do with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def straight(size: int = 4, dropout: float = 0.0) -> nn.Module:
    return Function(
        lambda s, x: s.leave(s.drop(Straight.apply(s.drop(s.enter(x))))),
        enter=nn.Linear(6, size), leave=nn.Linear(size, 2), drop=nn.Dropout(dropout),
    )  # fmt: skip


def branching() -> nn.Module:
    """What is done with an example hangs on a value of it."""
    return Function(lambda s, x: s.a(x) if x.abs().sum() < 8 else s.a(x.tanh()), a=nn.Linear(6, 3))


def by_hand(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Clipped:
    """The definition: each example alone."""
    params = dict(module.named_parameters())
    total = {name: torch.zeros_like(part) for name, part in params.items()}
    rows = []
    for x, y in zip(*batch, strict=True):
        value = loss(module(x[None]), y[None])[0]
        grads = torch.autograd.grad(value, list(params.values()))
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        factor = (BOUND / norm).clamp(max=1)
        for name, grad in zip(params, grads, strict=True):
            total[name] += factor * grad
        rows.append(torch.stack([norm, factor, value.detach()]))
    return Clipped(total, *torch.stack(rows, 1))


BATCH = batch_of("linear", 7, torch.float32)


@pytest.mark.parametrize(
    ("module", "backend", "says"),
    [
        (nn.Linear(6, 4), "vmap", "has no graph"),
        (straight(), "opacus", "vmap cannot batch it"),
        (branching(), "vmap", "one example at a time (the pass does not run without the values"),
        (module_of("in-place", torch.float32), "vmap", "has no graph"),
    ],
    ids=["vmap", "hooks", "one-by-one", "in-place"],
)  # fmt: skip
def test_the_order_of_auto(module: nn.Module, backend: str, says: str) -> None:
    program = capture(module, loss, tuple(part[:2] for part in BATCH), backend="eager")  # type: ignore[arg-type]
    clipped = clipped_grad(program, Abadi(BOUND))
    assert clipped.backend == backend
    assert all(says in reason for reason in clipped.reasons.values())
    assert f"backend {backend}" in explain(clipped)
    assert says in explain(clipped)
    near(clipped(*program.init(), BATCH), by_hand(module, BATCH))
    with pytest.raises(CaptureError, match="no graph"):
        clipped_grad(program, Abadi(BOUND), strict=True)


def test_without_opacus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    module = straight()
    program = capture(module, loss, BATCH, backend="eager")
    with pytest.raises(ConfigError, match=r"pip install 'mycelia\[opacus\]'"):
        clipped_grad(program, Abadi(BOUND), backend="opacus")
    clipped = clipped_grad(program, Abadi(BOUND))
    assert clipped.backend == "vmap"
    assert "one example at a time (Opacus cannot be imported" in clipped.reasons["enter.weight"]
    near(clipped(*program.init(), BATCH), by_hand(module, BATCH))


def test_a_graph_is_refused() -> None:
    program = capture(nn.Linear(6, 4), loss, BATCH)
    with pytest.raises(CaptureError, match="backend='eager'"):
        clipped_grad(program, Abadi(BOUND), backend="opacus")


class Keyword(nn.Module):
    """A layer whose second input the hooks do not see."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x @ self.weight.t() * scale


def _positions_first(self: Any, x: Tensor) -> Tensor:
    return self.a(x.reshape(len(x), 2, 3).transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize(
    ("module", "size", "says"),
    [
        (Function(lambda s, x: s.a(x, scale=3.0), a=Keyword()), 3, "do not add up"),
        (Function(_positions_first, a=nn.Linear(3, 2)), 3, r"\[2, 2, 3\] for 3 examples"),
        (Function(_positions_first, a=nn.Linear(3, 2)), 2, "depends on the other examples"),
        (branching(), 3, "without the values"),
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), 3, "BatchNorm"),
        (Function(lambda s, x: s.a(x) - s.a(x).mean(0), a=nn.Linear(6, 4)), 3, "depends on"),
    ],
    ids=["keyword", "first-axis", "first-axis-of-equal-size", "branch", "batch-norm", "mean"],
)
def test_hooks_that_mix_or_miss_are_refused(module: nn.Module, size: int, says: str) -> None:
    """Whatever the values at capture, zeros among them."""
    for scale in (0.0, 1.0):
        example = scale * torch.randn(size, 6), torch.zeros(size)
        program = capture(module, loss, example, backend="eager")
        with pytest.raises(CaptureError, match=says):
            clipped_grad(program, Abadi(BOUND), backend="opacus")


def test_what_shows_later_is_refused_later() -> None:
    """A padding row that the example at capture did not hold."""
    module = Function(lambda s, x: s.table(x), table=nn.Embedding(7, 3, padding_idx=2))
    program = capture(module, loss, (torch.tensor([[0, 1], [3, 4]]), torch.zeros(2)), backend="eager")
    clipped = clipped_grad(program, Abadi(BOUND), backend="opacus")
    clipped(*program.init(), (torch.tensor([[5, 6]]), torch.zeros(1)))
    with pytest.raises(CaptureError, match="do not add up"):
        clipped(*program.init(), (torch.tensor([[5, 2]]), torch.ones(1)))


def test_dropout_follows_the_seed() -> None:
    """Without clipping the sum is the gradient of the pass that the seed stands for."""
    module = straight(64, dropout=0.5)
    program = capture(module, loss, BATCH, backend="eager")
    params, buffers = program.init()
    clipped = clipped_grad(program, torch.ones_like)
    assert clipped.backend == "opacus"
    found = [clipped(params, buffers, BATCH, seed=seed) for seed in (3, 3, 4)]
    near(found[0], found[1], 0.0)
    assert not torch.equal(found[0].norms, found[2].norms)
    leaves = {name: part.clone().requires_grad_() for name, part in params.items()}
    value = program.forward(leaves, buffers, *BATCH, seed=3).losses.sum()
    grads = torch.autograd.grad(value, list(leaves.values()))
    for name, grad in zip(leaves, grads, strict=True):
        torch.testing.assert_close(found[0].total[name], grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["vmap", "opacus"])
def test_half_precision_is_summed_in_float32(backend: str) -> None:
    module = module_of("linear", torch.bfloat16)
    program = capture(module, loss, batch_of("linear", 3, torch.bfloat16), backend="eager")
    found = clipped_grad(program, Abadi(BOUND), backend=backend)(
        *program.init(), batch_of("linear", 6, torch.bfloat16)
    )
    assert {part.dtype for part in found.total.values()} == {found.norms.dtype} == {torch.float32}
    near(
        Clipped(*found[:3], found.losses.float()),
        by_hand(module.float(), batch_of("linear", 6, torch.float32)),
        0.03,
    )


@pytest.mark.parametrize("make", [straight, branching])
def test_a_model_that_cannot_be_exported_trains(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = attach(
        model, loss, optimizer, sampler=Poisson(0.5), clip=Abadi(1.0), noise=1.0, expected_batch=4,
        source=NoiseSource.seeded(0),
    )  # fmt: skip
    before = [part.detach().clone() for part in model.parameters()]
    for step, batch in enumerate(train.batches(BATCH)):
        train.loss(batch).backward()
        optimizer.step()
        if step == 2:
            break
    assert train.steps == 3
    assert not any(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
