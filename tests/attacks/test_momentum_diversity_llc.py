"""Momentum, input diversity, least likely classes: definitions, closed forms, PyTorch's own resizing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mycelia.attacks import BIM, DI, FGM, LLC, MDI, MIM, RLLC, Status, Targeted, Untargeted, least_likely
from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.evasion.diversity import placed
from mycelia.attacks.norms import linear_max
from mycelia.attacks.windows import Layout
from mycelia.engine.errors import ConfigError
from tests.attacks.worlds import Affine, affine, images, small


def draws(x: Tensor) -> Draws:
    return Draws(3, "DI", row_keys(x))


# --- least likely classes -------------------------------------------------------------------------


def test_least_likely_classes_are_those_of_the_lowest_score() -> None:
    x = images(20)
    z = small()(x).detach()
    found = least_likely(small().train(), x, batch=7)  # in evaluation mode all the same
    assert found.tolist() == [min(range(4), key=lambda j: float(row[j])) for row in z]
    assert least_likely(small(), x[:0]).shape == (0,)
    assert torch.equal(
        least_likely(lambda v: small()(torch.from_numpy(v)).detach().numpy(), x.numpy()), found
    )
    Targeted(found, z.argmax(1))  # never the predicted class
    with pytest.raises(ConfigError, match="labels only"):
        least_likely(_labels_only(), x)


def _labels_only() -> object:
    from mycelia.attacks import as_model

    return as_model(lambda v: v.flatten(1).argmax(1), outputs="labels")


@pytest.mark.parametrize("p", ["linf", "l2", "l1"])
def test_llc_takes_the_step_that_a_targeted_one_would(p: str) -> None:
    """As long as nothing is reached, the step is FGM's towards the least likely class."""
    x = images()
    y = small()(x).argmax(1)
    mine = LLC(norm=p).run(small(), x, Untargeted(y), eps=0.01, keep="loss")  # type: ignore[arg-type]
    other = FGM(norm=p).run(small(), x, Targeted(least_likely(small(), x)), eps=0.01, keep="loss")  # type: ignore[arg-type]
    assert torch.equal(mine.x_adv, other.x_adv)
    assert torch.allclose(mine.loss, other.loss)


def test_llc_on_an_affine_model_moves_by_the_largest_scalar_product() -> None:
    """With the margin to the target as loss, the gradient is w_t − w_j of the best other class j."""
    model = affine()
    x = torch.full((1, 10), 0.5, dtype=torch.float64)
    z = model(x).detach()
    y, t = z.argmax(1), z.argmin(1)
    weight = model.linear.weight.detach()
    for p in ("linf", "l2", "l1"):
        found = LLC(norm=p, loss="margin").run(model, x, Untargeted(y), eps=1e-3, keep="loss")  # type: ignore[arg-type]
        best = linear_max(weight[t] - weight[y], p, 1e-3, -x, 1 - x)  # type: ignore[arg-type]
        assert torch.allclose(found.x_adv, x + best, atol=1e-12)


def test_llc_counts_any_other_class_and_rllc_begins_elsewhere() -> None:
    x = images(40)
    y = small()(x).argmax(1)
    for attack in (LLC(), RLLC()):
        result = attack.run(small(), x, Untargeted(y), eps=0.15, rng=2)
        after = small()(result.x_adv).argmax(1)
        assert torch.equal(result.is_(Status.BROKEN), after != y)
        assert result.counts.broken > 5
    one, two = (RLLC().run(small(), x, Untargeted(y), eps=0.05, rng=seed).x_adv for seed in (1, 2))
    assert not torch.equal(one, two)


# --- momentum -------------------------------------------------------------------------------------


def test_mim_gathers_gradients_of_mean_size_one() -> None:
    """Beside the recurrence of the paper, written out: g ← μ g + ∇/mean|∇|, x ← clip(x + α sign g)."""
    x, eps, steps, decay = images(), 0.1, 4, 0.7
    model = small()
    y = model(x).argmax(1)
    gathered, points = torch.zeros_like(x), x.clone()
    for _ in range(steps):
        leaf = points.clone().requires_grad_()
        loss = functional.cross_entropy(model(leaf), y, reduction="sum")
        (grad,) = torch.autograd.grad(loss, leaf)
        gathered = decay * gathered + grad / grad.abs().mean((1, 2, 3), keepdim=True)
        points = (points + 0.03 * gathered.sign()).clamp(x - eps, x + eps).clamp(0, 1)
    losses = functional.cross_entropy(model(points), y, reduction="none").detach()
    found = MIM(steps=steps, step_size=0.03, decay=decay).run(model, x, Untargeted(y), eps=eps, keep="loss")
    last = found.best_step == steps
    assert int(last.sum()) > 6
    assert torch.allclose(found.x_adv[last], points[last], atol=1e-9)
    assert bool((found.loss >= losses - 1e-9).all())


def test_mim_without_momentum_is_bim_in_linf() -> None:
    x = images()
    y = small()(x).argmax(1)
    one, two = (attack.run(small(), x, Untargeted(y), eps=0.1) for attack in (MIM(decay=0.0), BIM()))
    assert torch.equal(one.x_adv, two.x_adv)


def test_mim_restarts_need_other_starts() -> None:
    with pytest.raises(ConfigError, match="random_start=True"):
        MIM(restarts=2)
    for bad in ({"steps": 0}, {"decay": -0.1}, {"step_size": 0.0}, {"eot": 0}):
        with pytest.raises(ConfigError, match="decay at least 0"):
            MIM(**bad)  # type: ignore[arg-type]


# --- diversity ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_images_are_resized_and_padded_as_pytorch_does(layout: Layout) -> None:
    x = torch.rand(40, 3, 20, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = x if layout == "nchw" else x.movedim(1, 3)
    found = placed(draws(given), given, layout, 0.6)(given)
    found = found if layout == "nchw" else found.movedim(3, 1)
    seen = set()
    for row in range(len(x)):
        lines = found[row].sum(0) != 0
        tall = lines.any(1).nonzero()[:, 0]
        wide = lines.any(0).nonzero()[:, 0]
        h, w = len(tall), len(wide)
        top, left = int(tall[0]), int(wide[0])
        small_ = functional.interpolate(x[row : row + 1], size=(h, w), mode="bilinear", align_corners=False)
        other = functional.pad(small_, (left, 13 - w - left, top, 20 - h - top))
        assert torch.allclose(found[row : row + 1], other, atol=1e-12)
        assert 12 <= h < 20
        assert w == round(h * 13 / 20)
        seen.add((h, top, left))
    assert len(seen) > 20


def test_sizes_and_places_are_all_used() -> None:
    x = torch.rand(4000, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    found = placed(draws(x), x, "nchw", 0.75)(x)[:, 0] != 0
    places = {
        (
            int(one.any(1).sum()),
            int(one.any(1).to(torch.int8).argmax()),
            int(one.any(0).to(torch.int8).argmax()),
        )
        for one in found
    }
    assert places == {(h, top, left) for h in (6, 7) for top in range(9 - h) for left in range(9 - h)}


def test_gradients_come_back_through_the_placing() -> None:
    x = torch.rand(5, 2, 9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for layout in ("nchw", "nhwc"):
        move = placed(draws(x), x, layout, 0.5)  # type: ignore[arg-type]
        leaf = x.clone().requires_grad_()
        weights = torch.randn_like(x)
        (expected,) = torch.autograd.grad((move(leaf) * weights).sum(), leaf)
        assert torch.allclose(move.back(weights), expected, atol=1e-12)


def test_diversity_that_never_happens_changes_nothing() -> None:
    for dtype in (torch.float32, torch.float64):
        x = images(dtype=dtype)
        y = small(dtype)(x).argmax(1)
        for p in ("linf", "l2"):
            for mine, other in (
                (DI(norm=p, layout="nchw", p=0.0), BIM(norm=p)),  # type: ignore[arg-type]
                (MDI(norm=p, layout="nchw", p=0.0), MIM(norm=p)),  # type: ignore[arg-type]
            ):
                one, two = (attack.run(small(dtype), x, Untargeted(y), eps=0.1) for attack in (mine, other))
                assert torch.equal(one.x_adv, two.x_adv)
                assert torch.equal(one.queries, two.queries)


class Watched(nn.Module):
    """Keeps the inputs of which a gradient was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = small(), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            self.seen.append(x.detach().clone())
        found: Tensor = self.inner(x)
        return found


@pytest.mark.parametrize("attack", [DI, MDI])
def test_diversity_fires_as_often_as_said(attack: type[DI]) -> None:
    """A placed image has a black line at its border, which the others have not."""
    x = images(300) * 0.8 + 0.1
    y = small()(x).argmax(1)
    for p, share in ((1.0, 1.0), (0.3, 0.3), (0.0, 0.0)):
        model = Watched()
        attack(layout="nchw", p=p, steps=3).run(model, x, Untargeted(y), eps=0.01, batch=1000)
        points = torch.cat(model.seen)[:, 0]
        black = (points == 0).all(2).any(1) & (points == 0).all(1).any(1)
        assert float(black.double().mean()) == pytest.approx(share, abs=0.07 if 0 < p < 1 else 0)


def test_placed_images_are_no_results() -> None:
    """What comes back is in the ball, and BROKEN means: as it is, not when it is smaller."""
    x = images(40)
    y = small()(x).argmax(1)
    result = DI(layout="nchw", p=1.0).run(small(), x, Untargeted(y), eps=0.03, rng=1)
    assert float(result.distance["linf"].max()) <= 0.03 * (1 + 1e-6)
    assert torch.equal(small()(result.x_adv).argmax(1) != y, result.is_(Status.BROKEN))
    assert result.unreproduced == 0


def test_layouts_are_said_and_never_guessed() -> None:
    for attack in (DI, MDI):
        for layout in (None, "chw", "NCHW"):
            with pytest.raises(ConfigError, match='layout="nchw" or layout="nhwc"'):
                attack(layout=layout)  # type: ignore[arg-type]
        flat = torch.rand(3, 10, dtype=torch.float64)
        goal = Untargeted(affine()(flat).argmax(1))
        with pytest.raises(ConfigError, match="four axes"):
            attack(layout="nchw").run(affine(), flat, goal, eps=0.1)
    with pytest.raises(ConfigError, match="p in"):
        DI(layout="nchw", p=1.5)
    with pytest.raises(ConfigError, match="decay"):
        MDI(layout="nchw", decay=-1.0)


def test_channels_first_and_last_are_the_same_attack() -> None:
    x = torch.rand(20, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    draw = torch.Generator().manual_seed(5)
    weight = torch.randn(4, 192, dtype=torch.float64, generator=draw)
    first = Affine(weight, torch.zeros(4, dtype=torch.float64))
    last = Affine(weight.view(4, 3, 8, 8).movedim(1, 3).flatten(1), torch.zeros(4, dtype=torch.float64))
    y = first(x).argmax(1)
    ids = torch.arange(20)
    one = MDI(layout="nchw", p=0.5).run(first, x, Untargeted(y), eps=0.02, ids=ids, rng=1)
    two = MDI(layout="nhwc", p=0.5).run(last, x.movedim(1, 3), Untargeted(y), eps=0.02, ids=ids, rng=1)
    assert torch.equal(one.status, two.status)
    assert torch.allclose(one.x_adv, two.x_adv.movedim(3, 1), atol=1e-9)
