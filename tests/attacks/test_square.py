"""Random search by squares: what a proposal is, what is kept, and torchattacks."""

from __future__ import annotations

import pytest
import torch
import torchattacks
from torch import Tensor, nn

from mycelia.attacks import Square, Status, Targeted, Untargeted
from mycelia.attacks.evasion.square import share_of_pixels
from mycelia.attacks.losses import margin
from mycelia.attacks.norms import Norm, norm
from mycelia.engine.errors import ConfigError
from tests.attacks.digits import digits_mlp
from tests.attacks.worlds import EPS, Small, affine, images, small

NORMS = pytest.mark.parametrize("p", ["linf", "l2", "l1"])


class Seen:
    """A function that keeps what it was asked; it has no gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.points = model, list[Tensor]()

    def __call__(self, x: Tensor) -> Tensor:
        self.points.append(x.clone())
        with torch.no_grad():
            found: Tensor = self.model(x)
        return found


def test_the_schedule_is_that_of_the_paper() -> None:
    """Halved at 10, 50, 200, 500, 1000, 2000, 4000, 6000 and 8000 of 10,000 steps."""
    for before, divisor in zip(
        (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000, 9999),
        (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
        strict=True,
    ):
        assert share_of_pixels(before, 10_000, 0.8) == 0.8 / divisor
    assert share_of_pixels(11, 10_000, 0.8) == 0.4
    assert share_of_pixels(100, 5_000, 0.8) == 0.8 / 4  # stretched: 200 of 10,000


@NORMS
def test_a_proposal_is_kept_only_if_the_margin_improves(p: Norm) -> None:
    """Every proposal is a window away from the best point before it, which is replayed here."""
    model = small()
    x = images(1, seed=4)
    y = model(x).argmax(1)
    eps = EPS[p] / 3  # it holds, so that the search goes on
    seen = Seen(model)
    result = Square(norm=p, steps=150).run(seen, x, Untargeted(y), eps=eps, rng=2)
    assert int(result.status[0]) == Status.HELD
    asked = seen.points[1:-1]  # without the clean and the second look
    assert len(asked) == 150 == int(result.queries[0]) - 1
    best, value = asked[0], margin(model(asked[0]), y).detach()
    rose = 0
    for step, point in enumerate(asked[1:], 1):
        changed = ((point - best)[0, 0].abs() > 1e-9).nonzero()  # l2 is scaled, which rounds everywhere
        side = max(round((share_of_pixels(step, 150, 0.8) * 36) ** 0.5), 1 if p == "linf" else 3)
        if p == "linf" and len(changed):
            assert int((changed.amax(0) - changed.amin(0)).max()) < side
        elif p == "l2" and side <= 3 and len(changed):
            assert len(changed) <= 2 * 9  # two windows of 3×3
        now = margin(model(point), y).detach()
        if bool(now > value):
            best, value, rose = point, now, rose + 1
    assert rose > 3
    assert torch.equal(result.x_adv, best)
    assert float(result.loss[0]) == pytest.approx(float(value))


def test_linf_points_are_at_the_ends_of_the_ball() -> None:
    x, eps = images(5), 0.05
    y = small()(x).argmax(1)
    seen = Seen(small())
    Square(steps=40).run(seen, x, Untargeted(y), eps=eps, rng=0)
    low, high = (x - eps).clamp(min=0), (x + eps).clamp(max=1)
    stripes = seen.points[1]
    assert torch.allclose(
        torch.minimum((stripes - low).abs(), (high - stripes).abs()), torch.zeros(1).double()
    )
    up = (stripes > x).expand(-1, 1, 6, 6)
    assert torch.equal(up, up[:, :, :1].expand_as(up))  # columns go the same way
    assert bool(up.any() & ~up.all())


@NORMS
def test_the_ball_is_used_up(p: Norm) -> None:
    x = 0.5 + 0 * images(6)
    x = x + 0.01 * images(6)
    y = small()(x).argmax(1)
    seen = Seen(small())
    result = Square(norm=p, steps=60).run(seen, x, Untargeted(y), eps=EPS[p] / 4, rng=0)
    held = result.is_(Status.HELD)
    assert bool(held.any())
    assert torch.allclose(result.distance[p][held], torch.tensor(EPS[p] / 4, dtype=torch.float64), rtol=1e-5)


def test_affine_models_are_broken_where_they_can_be() -> None:
    """linf: distance = margin / ‖w_i − w_j‖₁; the best point is a corner, which the search has to find."""
    model = affine()
    x = 0.1 * torch.randn(40, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    z = model(x).detach()
    y = z.argmax(1)
    weight = model.linear.weight.detach()
    gaps = (z.gather(1, y[:, None]) - z).scatter(1, y[:, None], torch.inf)
    slopes = (weight[y][:, None] - weight[None]).abs().sum(2).clamp(min=1e-300)
    distance = (gaps / slopes).amin(1)
    eps = float(distance.median())
    result = Square(steps=600).run(model, x, Untargeted(y), eps=eps, rng=0, bounds=(-9.0, 9.0))
    broken = result.is_(Status.BROKEN)
    assert not bool(broken[distance > eps].any())
    assert bool(broken[distance < 0.98 * eps].all())


@NORMS
def test_a_flat_input_is_an_image_of_one_row_and_layouts_agree(p: Norm) -> None:
    class Any(nn.Module):
        def __init__(self, shape: tuple[int, ...], *, last: bool = False) -> None:
            super().__init__()
            self.shape, self.last = shape, last
            draw = torch.Generator().manual_seed(0)
            self.weight = nn.Parameter(torch.randn(48, 3, dtype=torch.float64, generator=draw))

        def forward(self, x: Tensor) -> Tensor:
            x = x.movedim(-1, 1) if self.last else x
            found: Tensor = x.reshape(len(x), 48).tanh() @ self.weight
            return found

    attack = {"eps": EPS[p], "rng": 3, "ids": torch.arange(8)}
    x = torch.rand(8, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = Any((3, 4, 4))(x).argmax(1)
    first = Square(norm=p, steps=50).run(Any((3, 4, 4)), x, Untargeted(y), **attack)
    last = Square(norm=p, steps=50, layout="nhwc").run(
        Any((4, 4, 3), last=True), x.movedim(1, -1).contiguous(), Untargeted(y), **attack
    )
    assert torch.allclose(last.x_adv.movedim(-1, 1), first.x_adv)
    flat = Square(norm=p, steps=50).run(Any((48,)), x.flatten(1), Untargeted(y), **attack)
    row = Square(norm=p, steps=50).run(Any((1, 1, 48)), x.reshape(8, 1, 1, 48), Untargeted(y), **attack)
    assert torch.allclose(row.x_adv.flatten(1), flat.x_adv)
    assert torch.equal(row.status, flat.status)


@NORMS
@pytest.mark.parametrize("shape", [(1,), (2,), (1, 1, 1), (3, 2, 5), (2, 7), (1, 3, 3, 4)])
def test_every_size_and_rank_works(p: Norm, shape: tuple[int, ...]) -> None:
    x = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 3))
    y = model(x).argmax(1)
    result = Square(norm=p, steps=30).run(model, x, Untargeted(y), eps=0.2, rng=0)
    assert result.counts.failed == 0
    assert bool((result.distance[p] <= 0.2 * (1 + 1e-6)).all())


@NORMS
def test_restarts_only_go_on_with_rows_that_hold(p: Norm) -> None:
    x = images(30)
    y = small()(x).argmax(1)
    one = Square(norm=p, steps=30).run(small(), x, Untargeted(y), eps=EPS[p], rng=0)
    three = Square(norm=p, steps=30, restarts=3).run(small(), x, Untargeted(y), eps=EPS[p], rng=0)
    broken = one.is_(Status.BROKEN)
    assert bool(three.is_(Status.BROKEN)[broken].all())
    assert torch.equal(three.queries[broken], one.queries[broken])
    assert bool((three.queries[~broken] > one.queries[~broken]).all())
    assert bool((one.gradients == 0).all())


def test_a_target_of_its_own_loss() -> None:
    x = images(20)
    z = small()(x).detach()
    y, t = z.argmax(1), z.topk(2, 1).indices[:, 1]
    result = Square(steps=100).run(small(), x, Targeted(t, y), eps=0.1, rng=0)
    broken = result.is_(Status.BROKEN)
    assert bool(broken.any())
    assert torch.equal(small()(result.x_adv).argmax(1)[broken], t[broken])


def test_settings_that_are_refused() -> None:
    for wrong in (
        {"steps": 0},
        {"restarts": 0},
        {"p_init": 0.0},
        {"p_init": 1.1},
        {"layout": "hwc"},
        {"norm": "l0"},
    ):
        with pytest.raises(ConfigError):
            Square(**wrong)  # type: ignore[arg-type]


def test_no_gradient_is_ever_asked_for() -> None:
    class NoGradient(Small):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled() or x.requires_grad:
                raise AssertionError("a gradient was asked for")
            return super().forward(x)

    x = images()
    y = small()(x).argmax(1)
    result = Square(steps=20).run(NoGradient().double(), x, Untargeted(y), eps=0.08, rng=0)
    assert int(result.gradients.sum()) == 0


def test_it_is_no_weaker_than_torchattacks() -> None:
    """Robust accuracy at an equal number of queries; seeds differ, so within 3 points."""
    model, x, y = digits_mlp()
    for p, name, eps in (("linf", "Linf", 0.07), ("l2", "L2", 0.35)):
        mine = Square(norm=p, steps=300).run(model, x, Untargeted(y), eps=eps, rng=0)  # type: ignore[arg-type]
        other = torchattacks.Square(model, norm=name, eps=eps, n_queries=300, seed=0)
        theirs = other(x, y)
        outside = norm((theirs - x).double(), p) > eps * (1 + 1e-5)  # type: ignore[arg-type]
        held = (model(theirs).argmax(1) == y) | outside
        assert mine.counts.held / len(x) <= float(held.double().mean()) + 0.03
