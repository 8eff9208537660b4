"""APGD: its first paper's algorithm written out for one row, the balls of its l1 form, and few classes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mycelia.attacks import APGD, APGDT, PGD, Status, Targeted, Untargeted
from mycelia.attacks.evasion.apgd import checkpoints
from mycelia.attacks.losses import dlr_targeted
from mycelia.engine.errors import ConfigError
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


def test_checkpoints_of_the_paper() -> None:
    assert checkpoints(100) == (22, 41, 57, 70, 80, 87, 93, 99)
    assert checkpoints(10) == (3, 5, 6, 7, 8, 9, 10)
    assert checkpoints(1) == (1,)
    for steps in (20, 50, 400, 1000):
        exact, gap, found = 22, 22, []
        while exact <= 100:
            found.append(math.ceil(exact * steps / 100 - 1e-9))
            gap = max(gap - 3, 6)
            exact += gap
        assert checkpoints(steps) == tuple(dict.fromkeys(found))


def algorithm(start: Tensor, x: Tensor, y: Tensor, p: str, eps: float, steps: int) -> list[Tensor]:
    """Algorithm 1 of Croce & Hein 2020 for one row without a box: its points in order."""

    def value(point: Tensor) -> tuple[float, Tensor]:
        leaf = point.clone().requires_grad_()
        loss = functional.cross_entropy(small()(leaf), y)
        (grad,) = torch.autograd.grad(loss, leaf)
        return float(loss.detach()), grad

    def project(point: Tensor) -> Tensor:
        delta = point - x
        if p == "linf":
            return x + delta.clamp(-eps, eps)
        return x + delta * min(1.0, eps / float(delta.norm()))

    def unit(grad: Tensor) -> Tensor:
        return grad.sign() if p == "linf" else grad / grad.norm()

    eta, rho, alpha = 2 * eps, 0.75, 0.75
    points, values = [start], [value(start)[0]]
    grad = value(start)[1]
    best, best_value, best_grad = start, values[0], grad
    now, now_value, before = start, values[0], start
    rises, checked_at, checked_best, kept = 0, 0, values[0], False
    for k in range(1, steps + 1):
        new = project(now + eta * unit(grad))
        if k > 1:
            new = project(now + alpha * (new - now) + (1 - alpha) * (now - before))
        new_value, new_grad = value(new)
        points.append(new)
        rises += new_value > now_value
        before, now, now_value, grad = now, new, new_value, new_grad
        if new_value > best_value:
            best, best_value, best_grad = new, new_value, new_grad
        if k in checkpoints(steps):
            first = rises <= rho * (k - checked_at)
            second = kept and checked_best == best_value
            kept = not (first or second)
            if first or second:
                eta, now, now_value, grad = eta / 2, best, best_value, best_grad
            rises, checked_at, checked_best = 0, k, best_value
    return points


@pytest.mark.parametrize("p", ["linf", "l2"])
def test_its_path_is_the_algorithm_of_the_paper(p: str) -> None:
    steps, eps = 40, 0.3
    for row in range(4):
        x = images()[row : row + 1]
        y = small()(x).argmax(1)
        model = Watched(small())
        APGD(norm=p, steps=steps).run(model, x, Untargeted(y), eps=eps, bounds=FREE, keep="loss", rng=row)  # type: ignore[arg-type]
        path = model.seen[1 : steps + 2]  # first a look at x, last a second look
        expected = algorithm(path[0], x, y, p, eps, steps)
        assert len(model.seen) == steps + 3
        for one, two in zip(path, expected, strict=True):
            assert torch.allclose(one, two, atol=1e-8)


@pytest.mark.parametrize("p", ["linf", "l2", "l1"])
@pytest.mark.parametrize("loss", ["ce", "dlr", "margin"])
def test_no_point_of_its_path_is_better(p: str, loss: str) -> None:
    x = images(8)
    y = small()(x).argmax(1)
    model = Watched(small())
    eps = {"linf": 0.05, "l2": 0.3, "l1": 0.8}[p]
    found = APGD(norm=p, loss=loss, steps=25).run(model, x, Untargeted(y), eps=eps, keep="loss")  # type: ignore[arg-type]
    goal = Untargeted(y)
    for points in model.seen:
        inside = torch.linalg.vector_norm(
            (points - x).flatten(1), ord={"linf": math.inf, "l2": 2, "l1": 1}[p], dim=1
        ) <= eps * (1 + 1e-9)
        assert bool((found.loss[inside] >= goal.loss(small()(points), loss).detach()[inside] - 1e-12).all())
    assert torch.allclose(found.loss, goal.loss(small()(found.x_adv), loss).detach())


def test_l1_begins_in_wider_balls_and_gets_sparse() -> None:
    x = torch.rand(6, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = Watched(affine(4, 200))
    y = model.inner(x).argmax(1)
    eps, steps = 0.7, 100
    found = APGD(norm="l1", loss="margin", steps=steps).run(model, x, Untargeted(y), eps=eps, keep="loss")
    sizes = torch.stack([(points - x).abs().sum(1) for points in model.seen[1:-1]])  # [points, rows]
    assert len(sizes) == steps + 3  # each ball has a start
    for part, factor in ((slice(0, 31), 3), (slice(31, 62), 2), (slice(62, None), 1)):
        assert float(sizes[part].max()) <= factor * eps * (1 + 1e-9)
        assert float(sizes[part].amax(0).min()) > 0.9 * factor * eps
    assert int((found.x_adv != x).sum(1).max()) < 20


@pytest.mark.parametrize(("p", "eps"), [("linf", 0.05), ("l2", 0.3), ("l1", 1.0)])
def test_it_is_not_weaker_than_pgd(p: str, eps: float) -> None:
    x = images(60)
    y = small()(x).argmax(1)
    pgd = PGD(norm=p, steps=40).run(small(), x, Untargeted(y), eps=eps, keep="loss")  # type: ignore[arg-type]
    apgd = APGD(norm=p, steps=40).run(small(), x, Untargeted(y), eps=eps, keep="loss")  # type: ignore[arg-type]
    assert float(apgd.loss.mean()) >= float(pgd.loss.mean()) - 1e-3
    assert apgd.counts.broken >= pgd.counts.broken


def test_restarts_are_for_rows_that_hold() -> None:
    x = images(20)
    y = small()(x).argmax(1)
    one, two = (
        APGD(steps=10, restarts=restarts).run(small(), x, Untargeted(y), eps=0.05, rng=4)
        for restarts in (1, 2)
    )
    broken = one.is_(Status.BROKEN)
    assert torch.equal(one.queries[broken], two.queries[broken])
    held = two.is_(Status.HELD)
    assert bool((two.queries[held] == 1 + 2 * 11).all())
    assert bool((two.gradients[held] == 2 * 10).all())  # the last point of a run needs none
    assert bool((two.is_(Status.BROKEN) | ~broken).all())


def test_few_classes_take_the_margin() -> None:
    x = torch.rand(30, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for classes in (2, 3):
        model = affine(classes, 10)
        y = model(x).argmax(1)
        dlr, margin = (
            APGD(loss=loss, steps=10).run(model, x, Untargeted(y), eps=0.1, rng=1)
            for loss in ("dlr", "margin")
        )
        if classes == 2:
            assert torch.equal(dlr.x_adv, margin.x_adv)
        towards = APGDT(steps=10).run(model, x, Untargeted(y), eps=0.1, rng=1)
        assert towards.counts.failed == 0
        assert torch.equal(towards.status, margin.status)  # both exact on an affine model
        t = (y + 1) % classes
        for goal in (Targeted(t), Targeted(t, y)):
            aimed = APGDT(steps=10).run(model, x, goal, eps=0.1, rng=1)
            assert torch.equal(aimed.is_(Status.BROKEN), model(aimed.x_adv).argmax(1) == t)


def test_targets_are_the_best_other_classes_and_no_more_than_there_are() -> None:
    x = torch.rand(1, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for classes, targets, runs in ((4, 9, 3), (100, 9, 9), (4, 2, 2)):
        model = affine(classes, 10)
        y = model(x).argmax(1)
        found = APGDT(steps=5, targets=targets).run(model, x, Untargeted(y), eps=1e-6)
        assert found.counts.held == 1
        assert int(found.queries) == 1 + runs * 6
    model = affine(6, 10)
    z = model(x).detach()
    y, runner_up = z.topk(2, 1).indices[0].split(1)
    found = APGDT(steps=5, targets=1).run(model, x, Untargeted(y), eps=1e-9, keep="loss")
    assert float(found.loss) == pytest.approx(float(dlr_targeted(z, y, runner_up)), abs=1e-6)


def test_gradients_of_random_models_are_averaged() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.draw, self.calls = torch.Generator().manual_seed(0), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            found: Tensor = small()(x + 0.1 * torch.randn(x.shape, generator=self.draw, dtype=x.dtype))
            return found

    x = images(1)
    y = small()(x).argmax(1)
    model = Noisy()
    found = APGD(steps=5, eot=7).run(model, x, Untargeted(y), eps=1e-4)
    assert int(found.queries) == 1 + 7 * 6
    assert int(found.gradients) == 7 * 6
    assert model.calls == int(found.queries) + found.votes  # and those of the second look


def test_settings_that_are_refused() -> None:
    for bad in ({"steps": 0}, {"restarts": 0}, {"rho": 1.5}, {"eot": 0}):
        for attack in (APGD, APGDT):
            with pytest.raises(ConfigError, match="at least 1 each"):
                attack(**bad)
    with pytest.raises(ConfigError, match="targets 0"):
        APGDT(targets=0)
