"""The laws of clipped gradients, whatever the operators; `rules/` has those of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.types import Tensors
from mycelia.privacy.clip import PerLayer
from mycelia.privacy.clipped_grad import Clipped, clipped_grad, explain
from tests.engine.transforms.programs import models
from tests.engine.zoo import ZOO, captured
from tests.privacy.models import CASES, batch_of, loss, module_of
from tests.privacy.oracle import abadi, clipped_of, close, one_by_one, program_of, smooth

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Using padding='same' with even:UserWarning"
)

torch.set_num_threads(1)


def run(name: str, size: int, dtype: torch.dtype = torch.float64, **options: object) -> Clipped:
    clipped = clipped_of(name, dtype, **options)
    return clipped(*clipped.program.init(), batch_of(name, size, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_vmap_agrees(name: str) -> None:
    batch = batch_of(name, 4)
    close(run(name, 4, backend="vmap"), one_by_one(module_of(name), batch, abadi), 1e-10)


@pytest.mark.parametrize("name", ["linear-ghost", "conv2d", "rnn", "attention", "tied-head", "instance-norm"])
def test_float32(name: str) -> None:
    close64 = one_by_one(module_of(name), batch_of(name, 6), abadi)
    found = run(name, 6, torch.float32)
    wide = Clipped({n: t.double() for n, t in found.total.items()}, *(part.double() for part in found[1:]))
    close(wide, close64, 1e-5)


@pytest.mark.parametrize("name", ["linear-formed", "conv2d-groups", "shared-thrice", "embedding", "prelu"])
def test_another_clip_function(name: str) -> None:
    program, batch = program_of(name), batch_of(name, 5)
    found = clipped_grad(program, smooth)(*program.init(), batch)
    close(found, one_by_one(module_of(name), batch, smooth), 1e-10)


@pytest.mark.parametrize("name", ["group-norm", "attention", "weight-norm", "unused"])
@pytest.mark.parametrize("bounds", [0.6, (0.3, 0.5)], ids=str)
def test_groups_of_parameters(name: str, bounds: float | tuple[float, float]) -> None:
    """Each group clipped for itself; both together never move the total by more than the sensitivity."""
    program, batch = program_of(name), batch_of(name, 5)
    names = list(program.init()[0])
    clip = PerLayer(bounds, (tuple(names[1:]), (names[0],)))
    clipped = clipped_grad(program, clip)
    found = clipped(*program.init(), batch)
    total = {n: torch.zeros_like(p) for n, p in program.init()[0].items()}
    gradient = clipped_grad(program, torch.ones_like)
    for row in range(5):
        one = gradient(*program.init(), tuple(part[row : row + 1] for part in batch))
        for group, bound in zip(clip.groups, clip.bounds, strict=True):
            norm = torch.cat([one.total[n].flatten() for n in group]).norm()
            factor = min(1.0, bound / float(norm)) if norm > 0 else 1.0
            for n in group:
                total[n] += factor * one.total[n]
    torch.testing.assert_close(found.total, total, rtol=1e-10, atol=1e-10)
    alone = clipped(*program.init(), tuple(part[-1:] for part in batch))
    assert torch.cat([t.flatten() for t in alone.total.values()]).norm() <= clip.sensitivity().bound * (
        1 + 1e-12
    )


def test_groups_must_cover_the_parameters() -> None:
    with pytest.raises(ConfigError, match="bias"):
        clipped_grad(program_of("linear"), PerLayer(1.0, (("weight",),)))


@pytest.mark.parametrize(
    "name", ["linear", "conv2d", "rnn", "tied-head", "prelu", "weight-norm", "embedding-bag"]
)
@pytest.mark.parametrize("physical", [1, 4])
def test_split_equals_whole(name: str, physical: int) -> None:
    close(run(name, 7, physical=physical), run(name, 7), 1e-12)


@pytest.mark.parametrize("name", ["conv2d", "conv2d-ghost", "linear-formed", "conv-transpose2d"])
def test_without_room_to_keep_gradients(name: str) -> None:
    close(run(name, 6, workspace_mb=0), run(name, 6), 1e-12)


@pytest.mark.parametrize(
    "name", ["linear", "conv2d", "embedding", "rnn", "layer-norm", "prelu", "attention", "weight-norm"]
)
def test_padded_rows_count_nothing(name: str) -> None:
    program = program_of(name)
    clipped = clipped_of(name)
    inputs, targets = batch_of(name, 4)
    rows = torch.tensor([0, 1, 1, 2, 3, 3])
    mask = torch.tensor([True, True, False, True, True, False])
    padded, goals = inputs[rows].clone(), targets[rows].clone()
    if padded.is_floating_point():
        padded[~mask] = float("nan")
    goals[~mask] = float("inf")
    found = clipped(*program.init(), (padded, goals), mask)
    plain = clipped(*program.init(), (inputs, targets))
    kept = Clipped(found.total, *(part[mask] for part in found[1:]))
    close(kept, plain, 1e-12)
    assert not any(bool(part[~mask].any()) for part in found[1:])


@pytest.mark.parametrize("name", ["linear", "conv2d", "rnn", "group-norm", "prelu", "attention", "scale"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_example_contributes_zero(name: str, value: float) -> None:
    program = program_of(name)
    clipped = clipped_of(name)
    inputs, targets = batch_of(name, 5)
    spoilt = inputs.clone()
    spoilt[2].view(-1)[0] = value
    targets[2] = value  # a saturating activation would make an infinite input harmless
    others = torch.tensor([0, 1, 3, 4])
    found = clipped(*program.init(), (spoilt, targets))
    plain = clipped(*program.init(), (inputs[others], targets[others]))
    close(Clipped(found.total, *(part[others] for part in found[1:])), plain, 1e-12)
    assert found.factors[2] == 0
    assert found.norms[2] == 0


@pytest.mark.parametrize("name", ["linear", "conv2d", "tied-head", "prelu", "weight-norm", "embedding-bag"])
def test_no_example_and_none_that_is_real(name: str) -> None:
    program = program_of(name)
    clipped = clipped_of(name)
    inputs, targets = batch_of(name, 3)
    none = clipped(*program.init(), (inputs[:0], targets[:0]))
    padded = clipped(*program.init(), (inputs, targets), torch.zeros(3, dtype=torch.bool))
    assert none.norms.shape == (0,)
    for found in (none, padded):
        assert found.total.keys() == program.init()[0].keys()
        assert not any(bool(t.any()) for t in found.total.values())


def test_without_clipping_it_is_the_gradient() -> None:
    module = module_of("attention")
    batch = batch_of("attention", 6)
    program = program_of("attention")
    found = clipped_grad(program, torch.ones_like)(*program.init(), batch)
    loss(module(batch[0]), batch[1]).sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found.total[name], parameter.grad, rtol=1e-10, atol=1e-10)


def test_the_opposite_loss_has_the_opposite_total() -> None:
    module, batch = module_of("conv2d"), batch_of("conv2d", 6)
    program = capture(module, lambda outputs, targets: -loss(outputs, targets), batch)
    found, other = run("conv2d", 6), clipped_grad(program, abadi)(*program.init(), batch)
    torch.testing.assert_close(other.norms, found.norms, rtol=1e-12, atol=1e-12)
    opposite = {name: -total for name, total in other.total.items()}
    torch.testing.assert_close(opposite, found.total, rtol=1e-12, atol=1e-12)


def test_order_does_not_matter() -> None:
    program = program_of("conv2d")
    clipped = clipped_of("conv2d")
    inputs, targets = batch_of("conv2d", 9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    one, two = (clipped(*program.init(), b) for b in ((inputs, targets), (inputs[order], targets[order])))
    torch.testing.assert_close(one.total, two.total, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one.norms[order], two.norms, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (4,)),
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), (2, 5, 5)),
    ],
    ids=["1d", "2d"],
)
def test_batchnorm_refused(module: nn.Module, shape: tuple[int, ...]) -> None:
    program = capture(module, loss, (torch.randn(4, *shape), torch.zeros(4)))
    for backend in ("auto", "vmap"):
        with pytest.raises(
            CaptureError, match=r"BatchNorm mixes .*\(1 File .*line \d+[\s\S]*Fix: use GroupNorm"
        ):
            clipped_grad(program, abadi, backend=backend)


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x - x.mean(0), lambda x: x / x.norm(), lambda x: torch.softmax(x, 0),
        lambda x: x + x.flip(0), lambda x: torch.sort(x, 0).values, lambda x: (x @ x.t()) @ x,
        lambda x: torch.cumsum(x, 0), lambda x: x.roll(1, 0),
    ],
    ids=["mean", "norm", "softmax", "flip", "sort", "gram", "cumsum", "roll"],
)  # fmt: skip
def test_what_mixes_examples_is_refused(mix: Callable[[Tensor], Tensor]) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return mix(self.layer(x))

    program = capture(Mixing(), loss, (torch.randn(4, 4), torch.zeros(4)))
    with pytest.raises(CaptureError, match=r"mixes the examples|depends on"):
        clipped_grad(program, abadi)


def test_batch_norm_in_evaluation_mode_passes() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            self.norm.eval()
            return self.norm(self.enter(x))

    module = Frozen().double()
    batch = torch.randn(5, 4, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    program = capture(module, loss, batch)
    close(clipped_grad(program, abadi)(*program.init(), batch), one_by_one(module, batch, abadi), 1e-10)


def test_strict_names_operator_and_parameter() -> None:
    with pytest.raises(CaptureError, match=r"weight.*prelu"):
        clipped_grad(program_of("prelu"), abadi, strict=True)


def test_bad_settings() -> None:
    program = program_of("linear")
    with pytest.raises(ConfigError, match="auto, taps, vmap"):
        clipped_grad(program, abadi, backend="hooks")
    with pytest.raises(ConfigError, match="at least 1"):
        clipped_grad(program, abadi, physical=0)
    with pytest.raises(ConfigError, match=r"bool \[3\]"):
        clipped_grad(program, abadi)(*program.init(), batch_of("linear", 3), torch.ones(3))


def test_explain_says_how() -> None:
    text = explain(clipped_grad(program_of("conv2d-ghost"), abadi))
    assert "weight: alone: aten.conv2d.default ghost, T = 4" in text
    assert "prelu" in explain(clipped_grad(program_of("prelu"), abadi))
    assert "b.weight: not used" in explain(clipped_grad(program_of("unused"), abadi))


def test_arguments_stay_as_they_were() -> None:
    program = program_of("conv2d")
    params, buffers = program.init()
    before: Tensors = {n: t.clone() for n, t in params.items()}
    clipped_grad(program, abadi)(params, buffers, batch_of("conv2d", 4))
    assert all(torch.equal(params[n], t) and not params[n].requires_grad for n, t in before.items())


@models(tuple(name for name, case in ZOO.items() if not case.coupled), quick=("lenet", "transformer-dropout"))
def test_zoo(name: str) -> None:
    """The engine's models; with dropout, each example's own masks."""
    case = ZOO[name]
    program = captured(name)
    params, buffers = program.init()
    batch = case.batch(4)
    found = clipped_grad(program, abadi)(params, buffers, batch, seed=5)
    total = {n: torch.zeros_like(p) for n, p in params.items()}
    for row in range(4):
        leaves = {n: p.requires_grad_() for n, p in program.init()[0].items()}
        one = tuple(part[row : row + 1] for part in batch)
        value = program.forward(leaves, buffers, *one, seed=5, first=row).losses[0]
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
        norm = torch.cat([g.flatten() for g in grads]).norm()
        torch.testing.assert_close(found.norms[row], norm, rtol=1e-10, atol=1e-10)
        for n, g in zip(leaves, grads, strict=True):
            total[n] += abadi(norm) * g
    torch.testing.assert_close(found.total, total, rtol=1e-10, atol=1e-10)
