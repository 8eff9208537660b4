"""Models as people write them: compiled, checkpointed, in place, subclassed, of two precisions or losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.transforms.precision import precision
from mycelia.engine.types import Tensors
from mycelia.privacy.attach import PrivateTraining, attach
from mycelia.privacy.clip import PSAC, Abadi, AutoS, Indicator
from mycelia.privacy.clipped_grad import Clipped, clipped_grad
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.sampling import Poisson
from tests.privacy.models import OTHER, Function, batch_of, loss, module_of
from tests.privacy.oracle import BOUND, abadi, agrees, close, compare, one_by_one, program_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:None of the inputs have requires_grad"
)

torch.set_num_threads(1)


@pytest.mark.parametrize("name", OTHER)
def test_equals_one_by_one(name: str) -> None:
    agrees(name)


CLIPS = [Abadi(BOUND), AutoS(BOUND), PSAC(BOUND, 0.1), Indicator(BOUND)]


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: type(clip).__name__)
@pytest.mark.parametrize("name", ["conv2d", "tied-head", "weight-norm", "embedding-bag", "prelu"])
def test_backends_one_clip(name: str, clip: Callable[[Tensor], Tensor]) -> None:
    """Taps and vmap in float32, and the definition in float64: one bound, 1e-5 apart."""
    batch = batch_of(name, 6, torch.float32)
    exact = one_by_one(module_of(name), (batch[0] if batch[0].dtype == torch.int64 else batch[0].double(),
                                         batch[1].double()), clip)  # fmt: skip
    program = program_of(name, torch.float32)
    for backend in ("auto", "vmap"):
        found = clipped_grad(program, clip, backend=backend)(*program.init(), batch)
        total = {n: t.double() for n, t in found.total.items()}
        close(Clipped(total, *(part.double() for part in found[1:])), exact, 1e-5)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x)))


def checkpointed(reentrant: bool) -> nn.Module:
    return Function(
        lambda s, x: checkpoint(s.b, s.a(x), use_reentrant=reentrant), a=nn.Linear(6, 6), b=Part()
    )


def compiled_inside() -> nn.Module:
    module = Function(lambda s, x: s.a(x).sin(), a=Part())
    module.a.compile(backend="eager")
    return module


def ensemble(self: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda w, b: F.linear(x, w, b), out_dims=1)(self.w, self.b)


@pytest.mark.parametrize(
    ("build", "backend"),
    [
        (lambda: torch.compile(Part(), backend="eager"), "export"),
        (compiled_inside, "export"),
        (lambda: Function(lambda s, x: torch.vmap(s.a)(x), a=Part()), "export"),
        (
            lambda: Function(
                ensemble, w=nn.Parameter(torch.randn(2, 3, 6)), b=nn.Parameter(torch.randn(2, 3))
            ),
            "eager",
        ),
        (lambda: checkpointed(False), "export"),
        (lambda: checkpointed(True), "eager"),
    ],
    ids=[
        "compiled",
        "compiled-inside",
        "vmapped",
        "vmapped-weights",
        "checkpoint",
        "reentrant-eager",
    ],
)
def test_no_silent_skip(build: Callable[[], nn.Module], backend: str) -> None:
    """Every parameter is in the norm, whatever wraps the layers."""
    torch.manual_seed(1)
    module = build().double()
    batch = torch.randn(5, 6).double() * 3, torch.linspace(-1, 1, 5).double()
    program = capture(module, loss, batch, backend=backend)
    found = clipped_grad(program, abadi)(*program.init(), batch)
    norms, total = [], {n: torch.zeros_like(p) for n, p in module.named_parameters()}
    for x, y in zip(*batch, strict=True):
        module.zero_grad()
        loss(module(x[None].requires_grad_()), y[None]).sum().backward()  # what re-entrant checkpoints allow
        grads: Tensors = {n: p.grad for n, p in module.named_parameters()}  # type: ignore[misc]
        norms.append(torch.cat([g.flatten() for g in grads.values()]).norm())
        total = {n: t + abadi(norms[-1]) * grads[n] for n, t in total.items()}
    assert all(bool(t.any()) for t in found.total.values())
    torch.testing.assert_close(found.norms, torch.stack(norms), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.total, total, rtol=1e-10, atol=1e-10)


def test_a_backward_that_export_loses_is_not_skipped() -> None:
    """A re-entrant checkpoint has a backward of its own and a graph does not: refused with a way out."""
    batch = torch.randn(5, 6), torch.zeros(5)
    with pytest.raises(CaptureError, match=r"another gradient[\s\S]*backend='eager'"):
        capture(checkpointed(True), loss, batch)


def layers() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(True), nn.Conv2d(3, 2, 2), nn.SiLU(True))


def written_over(self: Any, x: Tensor) -> Tensor:
    y = self.a(x.mul_(2))
    y[:, :2].mul_(3)
    y += 1
    return self.b(F.relu_(y))


@pytest.mark.parametrize(
    ("build", "shape", "backend"),
    [
        (layers, (2, 4, 4), "export"),
        (layers, (2, 4, 4), "eager"),
        (lambda: Function(written_over, a=nn.Linear(6, 4), b=nn.Linear(4, 2)), (6,), "export"),
        (lambda: Function(lambda s, x: s.a(s.a(x).sigmoid_()).tanh_(), a=nn.Linear(6, 6)), (6,), "export"),
    ],
    ids=["layers", "layers-eager", "writes", "shared"],
)
def test_inplace_activation(build: Callable[[], nn.Module], shape: tuple[int, ...], backend: str) -> None:
    """What an operator returned is written over before its gradient comes back; the batch stays as it was."""
    torch.manual_seed(1)
    module = build().double()
    batch = torch.randn(4, *shape).double(), torch.linspace(-1, 1, 4).double()
    kept = batch[0].clone()
    expected = one_by_one(module, (kept.clone(), batch[1]), abadi)
    program = capture(module, loss, batch, backend=backend)
    close(clipped_grad(program, abadi)(*program.init(), (kept.clone(), batch[1])), expected, 1e-10)
    assert torch.equal(batch[0], kept)


class Normalised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight / self.weight.norm(), self.bias, self.stride, self.padding)


class Scaled(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.embedding_dim**0.5


class FromOne(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


class WithoutBias(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Nothing(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x @ self.weight_ih_l0.t()


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (lambda: Normalised(2, 3, 2), torch.randn(5, 2, 4, 4)),
        (lambda: Scaled(7, 3), torch.arange(20).reshape(5, 4) % 7),
        (lambda: FromOne(6), torch.randn(5, 3, 6)),
        (lambda: WithoutBias(6, 3), torch.randn(5, 6)),
        (lambda: Nothing(6, 2), torch.randn(5, 6)),
    ],
    ids=["convolution", "embedding", "norm", "linear", "lstm"],
)
def test_subclass_layers(build: Callable[[], nn.Module], inputs: Tensor) -> None:
    """What is computed counts, not the name of the class."""
    torch.manual_seed(1)
    module = build().double()
    compare(module, inputs.double() if inputs.is_floating_point() else inputs)


class Autocast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Conv1d(2, 8, 2), nn.LayerNorm(8), nn.Linear(8, 3)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            return self.leave(self.norm(self.enter(x).transpose(1, 2))).float()


@pytest.mark.parametrize("kind", ["autocast-bf16", "autocast-fp16", "engine", "parameters"])
def test_mixed_precision_norms(kind: str) -> None:
    """Products in half precision; norms, factors and sums in float32 and within 1e-2 of it."""
    torch.manual_seed(1)
    module = Autocast(torch.float16 if kind == "autocast-fp16" else torch.bfloat16)
    batch = torch.randn(6, 2, 7), torch.linspace(-1, 1, 6)
    exact = one_by_one(
        Function(lambda s, x: s.a.leave(s.a.norm(s.a.enter(x).transpose(1, 2))), a=module), batch, abadi
    )
    if kind == "parameters":
        wide = module
        module = Function(lambda s, x: s.leave(s.norm(s.enter(x.bfloat16()).transpose(1, 2))).float(),
                          enter=wide.enter, norm=wide.norm, leave=wide.leave).bfloat16()  # fmt: skip
    elif kind == "engine":
        wide = module
        module = Function(lambda s, x: s.leave(s.norm(s.enter(x).transpose(1, 2))), enter=wide.enter,
                          norm=wide.norm, leave=wide.leave)  # fmt: skip
    program = capture(module, loss, batch)
    program = precision(program, "bf16") if kind == "engine" else program
    clipped = clipped_grad(program, abadi)
    assert not clipped.reasons
    found = clipped(*program.init(), batch)
    assert {t.dtype for t in (*found.total.values(), *found[1:])} == {torch.float32}
    torch.testing.assert_close(found.norms, exact.norms, rtol=1e-2, atol=0)
    for name, value in exact.total.items():
        difference = found.total[name.removeprefix("a.")] - value
        assert float(difference.norm()) < 2e-2 * float(value.norm())


class Critic(nn.Module):
    """Scores of a real and of a made example, which are one example of the data: [B, 2, d] -> [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x)))[..., 0]


def apart(outputs: Tensor, targets: Tensor) -> Tensor:
    """Arjovsky et al. (2017), equation 2: the mean score of made examples less that of real ones."""
    return outputs[:, 1] - outputs[:, 0] + 0 * targets


def heads(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    body = torch.tanh(self.body(x))
    return self.one(body), self.two(body)


def both(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return (outputs[0][:, 0] - targets) ** 2 + F.softplus(outputs[1][:, 0] * targets)


def test_many_losses_clip_once() -> None:
    """Two heads: gradients of both losses add up in each example, and the sum is clipped."""
    torch.manual_seed(1)
    module = Function(heads, body=nn.Linear(6, 4), one=nn.Linear(4, 1), two=nn.Linear(4, 1)).double()
    batch = torch.randn(5, 6).double(), torch.linspace(-2, 2, 5).double()
    program = capture(module, both, batch)
    found = clipped_grad(program, abadi)(*program.init(), batch)
    for row in range(5):
        one = tuple(part[row : row + 1] for part in batch)
        module.zero_grad()
        both(module(one[0]), one[1]).sum().backward()
        norm = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm()
        torch.testing.assert_close(found.norms[row], norm, rtol=1e-10, atol=1e-10)
    assert bool((found.factors * found.norms <= BOUND * (1 + 1e-12)).all())


def training_of(model: nn.Module, bound: float) -> PrivateTraining:
    return attach(
        model, apart, torch.optim.RMSprop(model.parameters(), lr=0.01), sampler=Poisson(0.25),
        clip=Abadi(bound), noise=0.3, expected_batch=50, source=NoiseSource.seeded(2),
    )  # fmt: skip


def test_a_private_critic_trains() -> None:
    """A real and a made example are clipped together, and a second pass over a part is refused."""
    torch.manual_seed(1)
    model = Critic()
    data = torch.stack([torch.randn(200, 2) + 2, torch.randn(200, 2)], 1), torch.zeros(200)
    train = training_of(model, 1.0)
    with torch.no_grad():
        before = float(apart(model(data[0]), data[1]).mean())
    for number, batch in enumerate(train.batches(data)):
        train.loss(batch).backward()
        if number == 0:
            with pytest.raises(ConfigError, match="seen already"):
                train.loss(batch).backward()
        train.optimizer.step()
        train.optimizer.zero_grad()
        if number == 30:
            break
    with torch.no_grad():
        assert float(apart(model(data[0]), data[1]).mean()) < before - 0.5


def penalised(self: Any, x: Tensor) -> Tensor:
    """Gulrajani et al. (2017), equation 3: the critic's gradient between the two has length one."""
    middle = x.mean(1)
    slope = torch.func.vmap(torch.func.grad(lambda point: self.critic(point).sum()))(middle)
    return torch.cat([self.critic(x), (slope.norm(dim=1, keepdim=True) - 1) ** 2], 1)


def test_a_gradient_penalty() -> None:
    """A gradient inside the loss has no graph; the module itself is differentiated."""
    torch.manual_seed(1)
    module = Function(penalised, critic=Critic()).double()
    batch = torch.randn(5, 2, 2).double(), torch.linspace(-1, 1, 5).double()
    program = capture(module, loss, batch, backend="eager")
    close(clipped_grad(program, abadi)(*program.init(), batch), one_by_one(module, batch, abadi), 1e-10)
