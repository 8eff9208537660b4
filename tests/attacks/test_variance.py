"""Attacks made to transfer: limits in which they are one another, definitions, and torchattacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchattacks
from scipy import signal, stats
from torch import Tensor, nn
from torch.nn import functional

from mycelia.attacks import (
    BIM,
    MIM,
    NI,
    PGD,
    PI,
    SINI,
    TI,
    VMI,
    VNI,
    Attack,
    Jitter,
    Status,
    Targeted,
    Untargeted,
)
from mycelia.attacks.filters import convolved
from mycelia.attacks.windows import Layout
from mycelia.engine.errors import ConfigError
from tests.attacks.digits import digits_mlp
from tests.attacks.worlds import EPS, Affine, affine, images, small

NORMS = pytest.mark.parametrize("p", ["linf", "l2", "l1"])


def same(one: Attack, two: Attack, *, exactly: bool = True) -> None:
    for dtype in (torch.float32, torch.float64):
        x = images(20, dtype)
        y = small(dtype)(x).argmax(1)
        first, second = (
            each.run(small(dtype), x, Untargeted(y), eps=EPS[each.norm] / 2, keep="loss")
            for each in (one, two)
        )
        if exactly:
            assert torch.equal(first.x_adv, second.x_adv)
        elif dtype is torch.float64:
            assert torch.allclose(first.x_adv, second.x_adv, atol=1e-9)


@NORMS
def test_limits(p: Any) -> None:
    """Without a neighbourhood, without momentum, without copies."""
    same(VMI(norm=p, radius=0.0), MIM(norm=p), exactly=False)
    same(SINI(norm=p, copies=1), NI(norm=p))
    same(NI(norm=p, decay=0.0), MIM(norm=p, decay=0.0))
    if p != "l1":
        same(TI(norm=p, layout="nchw", size=1), BIM(norm=p))
        same(TI(norm=p, layout="nchw", size=1, decay=1.0), MIM(norm=p))


def test_patches_without_their_step_are_long_steps() -> None:
    x = images(20)
    y = small()(x).argmax(1)
    for amplification in (2.5, 10.0):
        mine = PI(layout="nchw", project=0.0, amplification=amplification)
        eps = 0.05
        one, two = (
            each.run(small(), x, Untargeted(y), eps=eps, keep="loss")
            for each in (mine, BIM(step_size=amplification * eps / 10))
        )
        assert torch.allclose(one.x_adv, two.x_adv, atol=1e-12)


@NORMS
def test_the_gradient_of_an_affine_loss_has_no_variance(p: Any) -> None:
    """With two classes and the margin as loss, all of them go where MIM goes."""
    model = affine(2, 10)
    x = 0.3 + 0.4 * torch.rand(20, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = model(x).argmax(1)
    results = [
        attack.run(model, x, Untargeted(y), eps=0.1, rng=1, keep="loss")
        for attack in (
            MIM(norm=p, loss="margin"), VMI(norm=p, loss="margin"), VNI(norm=p, loss="margin"),
            NI(norm=p, loss="margin"), SINI(norm=p, loss="margin"),
        )
    ]  # fmt: skip
    for found in results[1:]:
        assert torch.allclose(found.x_adv, results[0].x_adv, atol=1e-9)


def slope(points: Tensor, y: Tensor) -> Tensor:
    leaf = points.clone().requires_grad_()
    return torch.autograd.grad(functional.cross_entropy(small()(leaf), y, reduction="sum"), leaf)[0]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.0, 5.0), (-torch.inf, torch.inf)])
def test_ni_and_si_ni_are_the_papers(low: float, high: float) -> None:
    """Written out: x + α μ g, the mean gradient of copies half as bright each, and MIM's recurrence."""
    x = images(20) if low != 2 else 2 + 3 * images(20)
    y = small()(x).argmax(1)
    eps, steps, size, decay = 0.1, 5, 0.03, 0.9
    dark = 0.0 if low == -torch.inf else low
    for attack, copies in ((NI, 1), (SINI, 4)):
        points, gathered = x, torch.zeros_like(x)
        for _ in range(steps):
            ahead = (points + size * decay * gathered).clamp(low, high)
            grad = torch.zeros_like(x)
            for i in range(copies):
                grad += slope(dark + (ahead - dark) / 2**i, y) / 2**i / copies
            gathered = decay * gathered + grad / grad.abs().mean((1, 2, 3), keepdim=True)
            points = (points + size * gathered.sign()).clamp(x - eps, x + eps).clamp(low, high)
        more = {"copies": copies} if attack is SINI else {}
        found = attack(steps=steps, step_size=size, decay=decay, **more).run(
            small(), x, Untargeted(y), eps=eps, keep="loss", bounds=(low, high)
        )
        last = found.best_step == steps
        assert int(last.sum()) > 4
        assert torch.allclose(found.x_adv[last], points[last], atol=1e-9)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("size", [3, 7, 15])
def test_gradients_are_blurred_as_scipy_does(size: int, layout: Layout) -> None:
    values = torch.rand(3, 2, 9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = stats.norm.pdf(np.linspace(-3, 3, size))
    kernel = np.outer(weight, weight) / weight.sum() ** 2
    given = values if layout == "nchw" else values.movedim(1, 3)
    found = convolved(given, TI(layout=layout, size=size).kernel(values), layout)
    found = found if layout == "nchw" else found.movedim(3, 1)
    for row in range(3):
        for channel in range(2):
            expected = signal.convolve2d(values[row, channel].numpy(), kernel, mode="same")
            if size > 5:  # SciPy centres on the larger of the two
                whole = signal.convolve2d(values[row, channel].numpy(), kernel, mode="full")
                half = size // 2
                expected = whole[half : half + 9, half : half + 5]
            assert np.allclose(found[row, channel].numpy(), expected)


def test_ti_steps_along_blurred_gradients() -> None:
    x = images(20)
    y = small()(x).argmax(1)
    points = x
    weight = torch.from_numpy(stats.norm.pdf([-2.0, -1.0, 0.0, 1.0, 2.0]))
    kernel = (torch.outer(weight, weight) / weight.sum() ** 2)[None, None]
    for _ in range(4):
        points = (points + 0.03 * functional.conv2d(slope(points, y), kernel, padding=2).sign()).clamp(
            x - 0.08, x + 0.08
        ).clamp(0, 1)  # fmt: skip
    found = TI(layout="nchw", steps=4, step_size=0.03, size=5, spread=2.0).run(
        small(), x, Untargeted(y), eps=0.08, keep="loss"
    )
    last = found.best_step == 4
    assert int(last.sum()) > 4
    assert torch.allclose(found.x_adv[last], points[last], atol=1e-9)


def test_pi_is_the_papers() -> None:
    """Written out with SciPy's convolution; what goes beyond eps moves the neighbours."""
    x = images(20)
    y = small()(x).argmax(1)
    eps, steps, beta = 0.1, 4, 10.0
    kernel = np.ones((3, 3)) / 8
    kernel[1, 1] = 0
    size = beta * eps / steps
    points, amplified = x, torch.zeros_like(x)
    for _ in range(steps):
        along = size * slope(points, y).sign()
        amplified = amplified + along
        excess = (amplified.abs() - eps).clamp(min=0) * amplified.sign()
        around = np.stack([signal.convolve2d(row[0].numpy(), kernel, mode="same") for row in excess])
        handed = size * torch.from_numpy(np.sign(np.round(around, 9)))[:, None]
        amplified = amplified + handed
        points = (points + along + handed).clamp(x - eps, x + eps).clamp(0, 1)
    found = PI(layout="nchw", steps=steps).run(small(), x, Untargeted(y), eps=eps, keep="loss")
    last = found.best_step == steps
    assert int(last.sum()) > 2
    assert torch.allclose(found.x_adv[last], points[last], atol=1e-9)


def jittered(z: Tensor, y: Tensor) -> Tensor:
    """As torchattacks has it, without noise."""
    share = nn.Softmax(dim=1)(10 * z / torch.norm(z, p=float("inf"), dim=1, keepdim=True))
    return nn.MSELoss(reduction="none")(share, functional.one_hot(y, 4).to(z.dtype)).mean(dim=1)


@NORMS
def test_jitter_without_noise_is_pgd_on_its_loss(p: Any) -> None:
    same(Jitter(norm=p, noise=0.0, random_start=False), BIM(norm=p, loss=jittered), exactly=False)
    x = images(20)
    z = small()(x).detach()
    goal = Targeted(z.topk(2, 1).indices[:, 1], z.argmax(1))
    one, two = (
        attack.run(small(), x, goal, eps=EPS[attack.norm] / 2, keep="loss")
        for attack in (
            Jitter(norm=p, noise=0.0, random_start=False), BIM(norm=p, loss=jittered),
        )
    )  # fmt: skip
    assert torch.allclose(one.x_adv, two.x_adv, atol=1e-9)


def test_noise_moves_jitter_and_not_what_it_reports() -> None:
    x = images(20)
    y = small()(x).argmax(1)
    plain, noisy, more = (
        Jitter(noise=noise, random_start=False).run(small(), x, Untargeted(y), eps=0.1, keep="loss")
        for noise in (0.0, 0.1, 0.3)
    )
    for found in (plain, noisy, more):
        assert torch.allclose(found.loss, jittered(small()(found.x_adv).detach(), y))
    assert not torch.equal(plain.x_adv, noisy.x_adv)
    assert not torch.equal(more.x_adv, noisy.x_adv)


def test_jitter_does_not_lose_its_gradient_where_logits_are_huge() -> None:
    """Where cross-entropy is 0 to the last bit, PGD stands still."""
    model = affine()
    with torch.no_grad():
        model.linear.weight.mul_(1e4)
        model.linear.bias.mul_(1e4)
    x = torch.rand(40, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = model(x).argmax(1)
    mine, other = (
        attack.run(model, x, Untargeted(y), eps=0.3)
        for attack in (Jitter(), PGD(steps=10, random_start=False))
    )
    assert mine.counts.broken > other.counts.broken


def test_channels_first_and_last_are_the_same_attack() -> None:
    draw = torch.Generator().manual_seed(5)
    x = torch.rand(20, 3, 8, 8, dtype=torch.float64, generator=draw)
    weight = torch.randn(4, 192, dtype=torch.float64, generator=draw)
    first = Affine(weight, torch.zeros(4, dtype=torch.float64))
    last = Affine(weight.view(4, 3, 8, 8).movedim(1, 3).flatten(1), torch.zeros(4, dtype=torch.float64))
    y = first(x).argmax(1)
    for attack, other in ((TI(layout="nchw"), TI(layout="nhwc")), (PI(layout="nchw"), PI(layout="nhwc"))):
        one = attack.run(first, x, Untargeted(y), eps=0.02)
        two = other.run(last, x.movedim(1, 3), Untargeted(y), eps=0.02)
        assert torch.equal(one.status, two.status)
        assert torch.allclose(one.x_adv, two.x_adv.movedim(3, 1), atol=1e-9)


@pytest.mark.parametrize(
    "attack",
    [VMI(), VNI(neighbours=2), NI(), SINI(), TI(layout="nchw"), PI(layout="nchw")],
    ids=lambda attack: type(attack).__name__,
)
def test_no_row_asks_more_often_than_it_may(attack: Attack) -> None:
    x = images(12)
    y = small()(x).argmax(1)
    for budget in (1, 2, 9):
        found = attack.run(small(), x, Untargeted(y), eps=0.01, queries=budget)
        assert bool((found.queries <= 1 + budget).all())
        assert bool((found.queries[found.is_(Status.HELD)] == 1 + budget).all())


def test_random_models_are_averaged_over() -> None:
    x = images(6)
    y = small()(x).argmax(1)
    one, three = (
        VMI(steps=3, neighbours=2, eot=eot).run(small(), x, Untargeted(y), eps=0.01) for eot in (1, 3)
    )
    assert torch.allclose(one.x_adv, three.x_adv, atol=1e-9)  # the model is none
    held = one.is_(Status.HELD)
    assert bool((three.gradients[held] == 3 * one.gradients[held]).all())


def test_settings_that_are_refused() -> None:
    common = ({"steps": 0}, {"eot": 0}, {"step_size": 0.0}, {"decay": -1.0})
    for attack in (VMI, VNI, NI, SINI):
        for bad in common:
            with pytest.raises(ConfigError, match="at least 1"):
                attack(**bad)  # type: ignore[arg-type]
    for bad in ({"neighbours": 0}, {"radius": -0.1}):
        with pytest.raises(ConfigError, match="radius at least 0"):
            VMI(**bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="copies 0"):
        SINI(copies=0)
    for bad in ({"scale": 0.0}, {"noise": -0.1}, {"restarts": 0}, {"step_size": 0.0}):
        with pytest.raises(ConfigError, match="noise at least 0"):
            Jitter(**bad)  # type: ignore[arg-type]
    for kind in (TI, PI):
        for layout in (None, "chw"):
            with pytest.raises(ConfigError, match='layout="nchw" or layout="nhwc"'):
                kind(layout=layout)
        with pytest.raises(ConfigError, match="size odd"):
            kind(layout="nchw", size=4)
        flat = torch.rand(3, 10, dtype=torch.float64)
        with pytest.raises(ConfigError, match="four axes"):
            kind(layout="nchw").run(affine(), flat, Untargeted(affine()(flat).argmax(1)), eps=0.1)
    for bad in ({"spread": 0.0}, {"decay": -1.0}, {"step_size": -1.0}, {"steps": 0}):
        with pytest.raises(ConfigError, match="spread above 0"):
            TI(layout="nchw", **bad)  # type: ignore[arg-type]
    for bad in ({"amplification": 0.0}, {"project": -1.0}, {"eot": 0}):
        with pytest.raises(ConfigError, match="amplification above 0"):
            PI(layout="nchw", **bad)  # type: ignore[arg-type]


# --- beside torchattacks --------------------------------------------------------------------------

PEERS = {
    "vmi": (VMI(step_size=0.02), "VMIFGSM", {}), "vni": (VNI(step_size=0.02), "VNIFGSM", {}),
    "ni": (NI(step_size=0.02), "NIFGSM", {}), "sini": (SINI(step_size=0.02), "SINIFGSM", {}),
    "ti": (TI(layout="nchw", step_size=0.02, size=5), "TIFGSM", {"diversity_prob": 0.0, "len_kernel": 5}),
    "pi": (PI(layout="nchw"), "PIFGSM", {}), "jitter": (Jitter(step_size=0.02), "Jitter", {}),
}  # fmt: skip


class Grey(nn.Module):
    """A model of grey images for coloured ones, which some peers insist on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x.mean(1, keepdim=True))
        return found


@pytest.mark.parametrize("name", PEERS)
def test_as_many_rows_break_as_with_torchattacks(name: str) -> None:
    """At the same steps; draws differ, and a row of a hundred more or less."""
    attack, peer, more = PEERS[name]
    model, x, y = digits_mlp()
    if name in ("ti", "pi"):
        model, x = Grey(model).eval(), x.expand(-1, 3, -1, -1).contiguous()
    eps = 0.08
    steps = {"eps": eps, "alpha": 0.02, "steps": 10}
    if name == "pi":
        steps = {"max_epsilon": eps, "num_iter_set": 10}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = getattr(torchattacks, peer)(model, **steps, **more)(x, y)
    right = int((model(theirs).argmax(1) == y).sum())
    mine = attack.run(model, x, Untargeted(y), eps=eps)
    assert 0 < right < len(x)
    assert mine.counts.held <= right + 1
