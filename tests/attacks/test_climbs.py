"""AdamPGD, ACG, SPSA and VAT: closed forms, their algorithms written out, and strength at equal budgets."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mycelia.attacks import (
    ACG,
    APGD,
    NES,
    PGD,
    SPSA,
    VAT,
    AdamPGD,
    AttackResult,
    RandomNoise,
    Status,
    Targeted,
    Untargeted,
)
from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.acg import hestenes_stiefel
from mycelia.attacks.evasion.adam import Adam
from mycelia.attacks.evasion.apgd import checkpoints
from mycelia.attacks.norms import Norm
from mycelia.engine.errors import ConfigError
from tests.attacks.closed import distances
from tests.attacks.digits import digits_mlp
from tests.attacks.worlds import affine, images, small

FREE = (-math.inf, math.inf)


class Watched(nn.Module):
    """Keeps what it is shown."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.seen = inner, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        found: Tensor = self.inner(x)
        return found


def on_digits(attack: Attack, eps: float, seed: int = 0) -> AttackResult:
    model, x, y = digits_mlp()
    return attack.run(model, x, Untargeted(y), eps=eps, rng=seed, keep="loss")


def margin_at(model: nn.Module, y: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The margin of one row and its gradient."""

    def found(point: Tensor) -> tuple[Tensor, Tensor]:
        leaf = point.clone().requires_grad_()
        z = model(leaf)[0]
        loss = z[torch.arange(len(z)) != y].max() - z[y[0]]
        (grad,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), grad

    return found


# --- AdamPGD ------------------------------------------------------------------------------------------


def test_adam_without_memory_is_pgd() -> None:
    x = images(20)
    y = small()(x).argmax(1)
    for p, eps in (("linf", 0.08), ("l2", 0.4)):
        size = eps / 4
        usual = PGD(norm=p, steps=8, step_size=size, random_start=False)  # type: ignore[arg-type]
        mine = AdamPGD(norm=p, steps=8, step_size=size, random_start=False, beta1=0.0, beta2=0.0)  # type: ignore[arg-type]
        a, b = (each.run(small(), x, Untargeted(y), eps=eps) for each in (usual, mine))
        assert torch.equal(a.status, b.status)
        assert torch.allclose(a.x_adv, b.x_adv, atol=1e-12)
        assert 0 < a.counts.broken < 20


def test_adam_takes_the_steps_of_torchs() -> None:
    x = images(3)
    y = small()(x).argmax(1)
    model = Watched(small())
    attack = AdamPGD(steps=12, step_size=0.03, random_start=False, beta1=0.8, beta2=0.95)
    attack.run(model, x, Untargeted(y), eps=1e6, bounds=FREE, keep="loss")
    point = x.clone().requires_grad_()
    peer = torch.optim.Adam([point], 0.03, (0.8, 0.95), eps=1e-30, maximize=True)
    for seen in model.seen[1:13]:
        assert torch.allclose(seen, point.detach(), atol=1e-9)
        peer.zero_grad()
        functional.cross_entropy(small()(point), y, reduction="sum").backward()
        peer.step()


def test_adam_does_not_see_the_scale_of_a_loss() -> None:
    """Also where gradients are far below the ε of the paper, and squares of them below any number."""
    x = images(10, torch.float32)
    y = small(torch.float32)(x).argmax(1)

    def faint(z: Tensor, labels: Tensor) -> Tensor:
        return 2.0**-90 * functional.cross_entropy(z, labels, reduction="none")

    for p in ("linf", "l2"):
        plain, weak = (
            AdamPGD(norm=p, steps=5, loss=loss).run(  # type: ignore[arg-type]
                small(torch.float32), x, Untargeted(y), eps=0.1, keep="loss"
            )
            for loss in ("ce", faint)
        )
        assert torch.equal(plain.x_adv, weak.x_adv)
    grad = torch.tensor([[2e-30, -1e-30, 0.0], [0.0, 0.0, 0.0]])
    assert torch.equal(Adam(grad, 0.0, 0.0).step(grad), grad.sign())


def test_adam_comes_to_rest_where_signs_do_not() -> None:
    """A planted weakness: a narrow pass, at another place of each row, that steps of one length jump over."""
    eps, x = 0.1, torch.full((8, 2), 0.5, dtype=torch.float64)
    place = torch.linspace(-0.061, 0.073, 8, dtype=torch.float64)

    class Pass(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            delta = v - 0.5
            over = delta[:, 0] - 0.9 * eps - 4000 * (delta[:, 1] - place[: len(v)]).square()
            return torch.stack([torch.zeros_like(over), over], 1)

    goal = Untargeted(torch.zeros(8, dtype=torch.int64))
    attack = AdamPGD(steps=200, random_start=False, loss="margin")
    found = attack.run(Pass(), x, goal, eps=eps, keep="loss")
    assert found.counts.broken == 8
    assert torch.allclose(found.x_adv[:, 1] - 0.5, place, atol=1.6e-3)
    signs = PGD(steps=200, random_start=False, loss="margin").run(Pass(), x, goal, eps=eps, keep="loss")
    assert signs.counts.broken < 3


def test_adam_is_as_strong_as_pgd_at_the_same_budget() -> None:
    for p, eps in (("linf", 0.1), ("l2", 0.7)):
        for loss in ("ce", "margin"):
            mine, usual = (
                on_digits(kind(norm=p, loss=loss), eps)  # type: ignore[arg-type]
                for kind in (AdamPGD, PGD)
            )
            assert mine.counts.held <= usual.counts.held + 1
            assert float(mine.loss.mean()) > float(usual.loss.mean()) - 0.05
            assert int(mine.queries.max()) == int(usual.queries.max())


# --- ACG ----------------------------------------------------------------------------------------------


def test_conjugate_directions_solve_a_quadratic_in_as_many_steps_as_it_has_axes() -> None:
    """Hestenes, Stiefel 1952: with exact steps, directions are conjugate and β is |g|² / |g before|²."""
    draw = torch.Generator().manual_seed(0)
    d, n = 6, 4
    root = torch.randn(n, d, d, dtype=torch.float64, generator=draw)
    matrix = root @ root.mT + torch.eye(d, dtype=torch.float64)
    top = torch.randn(n, d, dtype=torch.float64, generator=draw)

    def slope(v: Tensor) -> Tensor:  # of −(v − top)ᵀ A (v − top) / 2
        return torch.einsum("nij,nj->ni", matrix, top - v)

    v = torch.zeros_like(top)
    grad = along = slope(v)
    for _ in range(d):
        bent = torch.einsum("nij,nj->ni", matrix, along)
        v = v + (((grad * along).sum(1) / (along * bent).sum(1))[:, None]) * along
        after = slope(v)
        beta = hestenes_stiefel(after, grad, along)
        ratio = after.square().sum(1) / grad.square().sum(1)
        if float(after.abs().max()) > 1e-6:
            assert torch.allclose(beta, ratio, rtol=1e-6)
            assert float((((after + beta[:, None] * along) * bent).sum(1)).abs().max()) < 1e-8
        grad, along = after, after + beta[:, None] * along
    assert torch.allclose(v, top, atol=1e-8)
    assert torch.equal(hestenes_stiefel(top, top, top), torch.zeros(n, dtype=torch.float64))


def test_acg_goes_on_in_half_precision() -> None:
    """Where a direction that is not scaled would leave the numbers."""
    model, x, y = digits_mlp(40)
    model = copy.deepcopy(model).half()
    y = model(x.half()).argmax(1)
    found = ACG(norm="l2").run(model, x.half(), Untargeted(y), eps=0.7)
    assert found.counts.failed == 0
    assert found.counts.broken > 30


def test_conjugate_directions_when_steps_go_to_and_fro() -> None:
    """A direction is at right angles to the last change of gradients: if that comes back, β is 0."""
    draw = torch.Generator().manual_seed(1)
    first, change, along = (torch.randn(9, 20, dtype=torch.float64, generator=draw) for _ in range(3))
    then = first - change
    beta = hestenes_stiefel(then, first, along)
    assert bool((beta.abs() > 1e-3).all())
    turned = then + beta[:, None] * along
    assert float((turned * change).sum(1).abs().max()) < 1e-12
    assert torch.equal(hestenes_stiefel(first, then, turned), torch.zeros(9, dtype=torch.float64))


def acg(start: Tensor, x: Tensor, y: Tensor, p: str, eps: float, steps: int) -> list[Tensor]:
    """Algorithm 1 of the paper for one row without a box: its points in order."""
    at = margin_at(small(), y)

    def project(point: Tensor) -> Tensor:
        delta = point - x
        return x + (delta.clamp(-eps, eps) if p == "linf" else delta * min(1.0, eps / float(delta.norm())))

    def unit(s: Tensor) -> Tensor:
        return s.sign() if p == "linf" else s / s.norm()

    def dot(a: Tensor, b: Tensor) -> float:
        return float((a * b).sum())

    eta, now = 2 * eps, start
    value, grad = at(now)
    s, points = grad, [now]
    best = (value, now, grad, grad, s)  # value, point, gradient; gradient and direction of the point before
    rises, checked_at, checked, halved = 0, 0, value, True
    for k in range(1, steps + 1):
        new = project(now + eta * unit(s))
        points.append(new)
        if k == steps:
            break
        new_value, new_grad = at(new)
        before, led = grad, s
        rises += bool(new_value > value)
        now, value, grad = new, new_value, new_grad
        if value > best[0]:
            best = (value, now, grad, before, led)
        if k in checkpoints(steps):
            halve = rises <= 0.75 * (k - checked_at) or (not halved and bool(checked >= best[0]))
            if halve:
                eta /= 2
                value, now, grad, before, led = best
            halved, checked, checked_at, rises = halve, best[0], k, 0
        y_ = before - grad
        flat = abs(dot(led, y_)) < 1e-12 * float(led.norm() * y_.norm()) or not y_.any()
        beta = 0.0 if flat else -dot(grad, y_) / dot(led, y_)
        s = grad + beta * led
    return points


@pytest.mark.parametrize(("p", "eps"), [("linf", 0.1), ("l2", 0.5)])
def test_acg_is_its_algorithm(p: Norm, eps: float) -> None:
    for row in range(4):
        x = images(4)[row : row + 1]
        y = small()(x).argmax(1)
        model = Watched(small())
        ACG(norm=p, steps=20).run(model, x, Untargeted(y), eps=eps, bounds=FREE, rng=row, keep="loss")
        seen = model.seen[1:-1]
        wanted = acg(seen[0], x, y, p, eps, 20)
        assert len(seen) == len(wanted) == 21
        for mine, other in zip(seen, wanted, strict=True):
            assert torch.allclose(mine, other, atol=1e-9)


def test_acg_on_affine_models_is_steepest_ascent() -> None:
    """Gradients do not change, so there is nothing to be conjugate to: the first steps end in the corner."""
    model = affine(2)
    x = 0.5 + 0.1 * torch.randn(30, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y = model(x).argmax(1)
    for p in ("linf", "l2"):
        distance = distances(model, x, y, p)  # type: ignore[arg-type]
        eps = float(distance.median())
        found = ACG(norm=p, steps=10).run(model, x, Untargeted(y), eps=eps, bounds=FREE)  # type: ignore[arg-type]
        sure = (distance / eps - 1).abs() > 1e-6
        assert torch.equal(found.is_(Status.BROKEN)[sure], (distance < eps)[sure])


def test_acg_finds_more_than_apgd() -> None:
    """The claim of the paper, at its 100 steps and with its loss."""
    for p, eps in (("linf", 0.1), ("l2", 0.7)):
        mine = on_digits(ACG(norm=p), eps)  # type: ignore[arg-type]
        usual = on_digits(APGD(norm=p, loss="margin"), eps)  # type: ignore[arg-type]
        assert mine.counts.held <= usual.counts.held
        assert float(mine.loss.mean()) > float(usual.loss.mean()) + 0.05


# --- SPSA ---------------------------------------------------------------------------------------------


def test_spsa_estimates_the_gradient_of_an_affine_model() -> None:
    """For a gradient w a pair gives (w·v)v, in the mean w: the cosine of n of them is √(n / (n + d − 1))."""
    model = affine(2, 10)
    x = torch.full((40, 10), 0.5, dtype=torch.float64)
    y = model(x).argmax(1)
    watched = Watched(model)
    attack = SPSA(norm="l2", steps=1, pairs=60, delta=0.05)
    attack.run(watched, x, Untargeted(y), eps=1e-3, ids=torch.arange(40))
    slope = (model.linear.weight[1] - model.linear.weight[0]) * (1.0 if int(y[0]) == 0 else -1.0)
    last = watched.seen[-2] - x
    assert torch.allclose(last.norm(dim=1), torch.full((40,), 1e-3 / 3, dtype=torch.float64))
    cosine = functional.cosine_similarity(last, slope[None].detach(), dim=1)
    assert float(cosine.mean()) == pytest.approx(1 / math.sqrt(1 + 9 / 60), abs=0.02)
    probes = torch.cat(watched.seen[2:-2])
    assert torch.allclose((probes - 0.5).abs(), torch.full_like(probes, 0.05))
    pairs = probes.view(-1, 2, 10) - 0.5
    assert torch.allclose(pairs[:, 0], -pairs[:, 1])


def test_spsa_asks_for_scores_only_and_keeps_its_budget() -> None:
    x = images(12)
    y = small()(x).argmax(1)

    def scores(v: Tensor) -> Tensor:
        assert not v.requires_grad
        return small()(v).detach()

    attack = SPSA(steps=5, pairs=7)
    found = attack.run(scores, x, Untargeted(y), eps=1e-4)
    held = found.is_(Status.HELD)
    assert bool(held.any())
    assert bool((found.queries[held] == 2 + 5 * (2 * 7 + 1)).all())
    assert bool((found.gradients == 0).all())
    for budget in (1, 2, 20, 33):
        short = attack.run(scores, x, Untargeted(y), eps=1e-4, queries=budget)
        assert int(short.queries.max()) <= 1 + budget


def test_spsa_sees_through_steps_that_hide_the_gradient() -> None:
    """The case that the paper makes: where inputs are rounded, gradients are 0 and mean nothing."""
    model, x, y = digits_mlp()

    class Rounded(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            found: Tensor = model((v * 128).round() / 128 + 0 * v)
            return found

    right = Rounded()(x).argmax(1) == y
    x, y = x[right][:40], y[right][:40]
    blind = PGD(random_start=False, loss="margin").run(Rounded(), x, Untargeted(y), eps=0.12)
    assert blind.counts.broken == 0
    open_ = PGD(loss="margin").run(model, x, Untargeted(y), eps=0.12)
    found = SPSA(steps=30).run(Rounded(), x, Untargeted(y), eps=0.12)
    assert found.counts.broken >= open_.counts.broken - 3 > 10


def test_spsa_is_as_strong_as_nes_at_the_same_budget() -> None:
    for p, eps in (("linf", 0.1), ("l2", 0.6)):
        model, x, y = digits_mlp(50)
        goal = Untargeted(y)
        mine = SPSA(norm=p, steps=20, pairs=25).run(model, x, goal, eps=eps)  # type: ignore[arg-type]
        other = NES(norm=p, steps=20, pairs=25).run(model, x, goal, eps=eps)  # type: ignore[arg-type]
        assert int(mine.queries.max()) == int(other.queries.max())
        assert mine.counts.held <= other.counts.held


# --- VAT ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_vat_finds_the_first_eigenvector(dtype: torch.dtype) -> None:
    """Of z = Wx + b the second derivatives of the divergence are Wᵀ(diag p − ppᵀ)W."""
    model = affine(5, 12).to(dtype)
    x = torch.rand(20, 12, dtype=dtype, generator=torch.Generator().manual_seed(1)) * 0.2 + 0.4
    y = model(x).argmax(1)
    eps = 1e-2 if dtype is torch.float64 else 0.1
    found = VAT(iterations=60).run(model, x, Untargeted(y), eps=eps, keep="loss")
    weight = model.linear.weight.detach().double()
    share = model(x).detach().double().softmax(1)
    bent = torch.diag_embed(share) - share[:, :, None] * share[:, None]
    values, vectors = torch.linalg.eigh(weight.T @ bent @ weight)
    clear = (values[:, -1] > 1.3 * values[:, -2]) & (values[:, -1] > 0.1)
    assert int(clear.sum()) > 8
    moved = (found.x_adv.double() - x.double())[clear]
    assert torch.allclose(moved.norm(dim=1), torch.full_like(moved[:, 0], eps), rtol=1e-3)
    cosine = functional.cosine_similarity(moved, vectors[clear][:, :, -1], dim=1).abs()
    assert float(cosine.min()) > 0.99
    wanted = values[clear, -1] * eps**2 / 2  # to second order; on one side it is more
    assert bool((found.loss[clear] >= 0.98 * wanted).all())


def test_vat_does_not_look_at_labels() -> None:
    x = images(10)
    clean = small()(x).detach()
    model = Watched(small())
    VAT(iterations=3).run(model, x, Untargeted(clean.argmax(1)), eps=0.2, keep="loss", ids=range(10))
    assert len(model.seen) == 1 + 3 + 2 + 1
    a, b = (each - x for each in model.seen[4:6])  # both sides
    assert bool((torch.minimum(a, b) <= 0).all())
    with pytest.raises(ConfigError, match="untargeted"):
        VAT().run(small(), x, Targeted(clean.argmin(1)), eps=0.2)


def test_vat_is_stronger_than_noise_and_weaker_than_gradients_that_know_the_label() -> None:
    model, x, y = digits_mlp()
    eps = 0.7
    mine = VAT().run(model, x, Untargeted(y), eps=eps)
    noise = RandomNoise(norm="l2", draws=13).run(model, x, Untargeted(y), eps=eps)
    white = PGD(norm="l2", steps=13).run(model, x, Untargeted(y), eps=eps)
    assert noise.counts.broken < 10 < mine.counts.broken <= white.counts.broken
    once = VAT(iterations=1).run(model, x, Untargeted(y), eps=eps)
    assert once.counts.broken < mine.counts.broken


# --- settings -----------------------------------------------------------------------------------------


def test_settings_that_make_no_sense() -> None:
    for make, what in (
        (lambda: AdamPGD(steps=0), "steps 0"),
        (lambda: AdamPGD(step_size=0.0), "step_size 0"),
        (lambda: AdamPGD(beta1=1.0), "beta1 1.0"),
        (lambda: AdamPGD(restarts=2, random_start=False), "2 restarts from the same point"),
        (lambda: ACG(restarts=0), "restarts 0"),
        (lambda: ACG(rho=1.5), "rho 1.5"),
        (lambda: SPSA(pairs=0), "pairs 0"),
        (lambda: SPSA(delta=0.0), "delta 0"),
        (lambda: SPSA(beta2=-0.1), "beta2 -0.1"),
        (lambda: VAT(iterations=0), "iterations 0"),
        (lambda: VAT(xi=0.0), "xi 0"),
        (lambda: VAT(norm="linf"), "norm 'linf'"),
    ):
        with pytest.raises(ConfigError, match=what):
            make()
