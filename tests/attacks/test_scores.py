"""Each score against its closed form, or against a law that it obeys."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from mycelia.attacks import DDN, PGD, AttackResult, Curve, DeepFool, Status, Targeted, Untargeted
from mycelia.attacks.norms import NORMS, norm
from mycelia.attacks.scores import (
    Ball,
    _endpoint,
    clever,
    empirical_robustness,
    great_score,
    loss_sensitivity,
    security_curve_area,
)
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.closed import distances
from tests.attacks.worlds import Affine, affine, images, small

B, H, W, F = Status.BROKEN, Status.HELD, Status.CLEAN_WRONG, Status.FAILED
BALLS: tuple[Ball, ...] = ("l1", "l2", "linf")
FREE = (-math.inf, math.inf)
FEW: dict[str, Any] = {"batches": 20, "samples": 8}


def points(n: int = 6, d: int = 10, seed: int = 3) -> Tensor:
    return torch.rand(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def result(x: Tensor, x_adv: Tensor, *status: Status, **more: Any) -> AttackResult:
    """What an attack said, by hand."""
    n = len(x)
    delta = x_adv.double() - x.double()
    fields: dict[str, Any] = {
        "x_adv": x_adv, "status": torch.tensor([int(each) for each in status], dtype=torch.int8),
        "reason": ("",) * n, "distance": {p: norm(delta, p) for p in NORMS}, "loss": torch.zeros(n),
        "queries": torch.ones(n), "gradients": torch.ones(n), "best_step": torch.zeros(n),
        "verified": torch.ones(n, dtype=torch.bool), "unreproduced": 0, "eps": None, "attack": DDN(),
        "norm": "l2", "seed": 0, "seconds": 1.0,
    }  # fmt: skip
    return AttackResult(**(fields | more))


class Bowl(nn.Module):
    """z = (c, −|x|² / 2): the gradient of the margin is x, its largest in a ball |x| + eps."""

    def __init__(self, c: float) -> None:
        super().__init__()
        self.c = c

    def forward(self, x: Tensor) -> Tensor:
        low = -x.flatten(1).square().sum(1) / 2
        return torch.stack([torch.full_like(low, self.c), low], 1)


def smooth() -> nn.Module:
    """Of ten inputs and three classes."""
    draw = torch.Generator().manual_seed(6)
    model = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, dtype=each.dtype, generator=draw))
    return model


# --- empirical robustness ---------------------------------------------------------------------------


def test_empirical_robustness_is_the_mean_over_broken_rows_that_have_a_norm() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0], [1.0, 1.0], [5.0, 5.0]])
    x_adv = torch.tensor([[3.0, 5.0], [1.0, 2.0], [1.0, 0.0], [1.0, 1.0], [5.0, 5.0]])
    found = empirical_robustness(x, result(x, x_adv, B, B, B, H, W))
    assert (found.norm, found.rows, found.zero, found.held) == ("l2", 2, 1, 1)
    assert found.mean == pytest.approx((1 / 5 + 1 / 2) / 2)
    other = empirical_robustness(x, result(x, x_adv, B, B, B, H, W), "l1")
    assert other.mean == pytest.approx((1 / 7 + 1 / 2) / 2)


@pytest.mark.parametrize("attack", [DeepFool(), DDN(steps=200)], ids=lambda each: type(each).__name__)
def test_empirical_robustness_of_an_affine_model_is_its_closed_form(attack: Any) -> None:
    model, x = affine(), points()
    y = model(x).argmax(1)
    found = empirical_robustness(x, attack.run(model, x, Untargeted(y), bounds=(-100.0, 100.0)))
    wanted = distances(model, x, y, "l2") / x.norm(dim=1)
    assert (found.rows, found.held) == (len(x), 0)
    assert found.mean is not None
    assert found.mean == pytest.approx(float(wanted.mean()), rel=0.05)
    assert found.mean >= float(wanted.mean()) * (1 - 1e-9)


def test_empirical_robustness_refuses_what_it_has_no_meaning_for() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ConfigError, match="stays in a ball"):
        empirical_robustness(x, result(x, x, B, H, attack=PGD()))
    with pytest.raises(DataError):
        empirical_robustness(x[:1], result(x, x, B, H))
    assert empirical_robustness(x, result(x, x, H, W)).mean is None


# --- loss sensitivity -------------------------------------------------------------------------------


@pytest.mark.parametrize("p", BALLS)
def test_loss_sensitivity_of_an_affine_model_is_its_closed_form(p: Ball) -> None:
    model, x = affine(), points()
    y = torch.arange(6) % 4
    weight = model.linear.weight.detach()
    rest = model(x).detach().softmax(1) - nn.functional.one_hot(y, 4)
    wanted = torch.linalg.vector_norm(rest @ weight, ord={"l1": 1, "l2": 2, "linf": math.inf}[p], dim=1)
    found = loss_sensitivity(model, x, y, p=p, batch=4)
    torch.testing.assert_close(found.each, wanted)
    assert found.mean == pytest.approx(float(wanted.mean()))
    assert (found.norm, found.rows) == (p, 6)


def test_loss_sensitivity_has_the_norm_of_the_paper_and_takes_other_losses() -> None:
    model, x = affine(), points()
    y = model(x).argmax(1)
    assert loss_sensitivity(model, x, y).norm == "l1"
    weight = model.linear.weight.detach()
    second = model(x).detach().scatter(1, y[:, None], -torch.inf).argmax(1)
    wanted = (weight[second] - weight[y]).abs().sum(1)
    torch.testing.assert_close(loss_sensitivity(model, x, y, loss="margin").each, wanted)


def test_loss_sensitivity_leaves_out_rows_without_a_gradient() -> None:
    x = points(3)
    x[1, 0] = torch.nan
    found = loss_sensitivity(affine(), x, torch.tensor([0, 1, 2]))
    assert found.rows == 2
    assert found.mean == pytest.approx(float(found.each[[0, 2]].mean()))
    assert loss_sensitivity(affine(), x[:0], torch.zeros(0, dtype=torch.int64)).mean is None


# --- CLEVER -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", BALLS)
def test_clever_of_an_affine_model_is_margin_over_dual_norm(p: Ball) -> None:
    model, x = affine(), points()
    y = model(x).argmax(1)
    found = clever(model, x, Untargeted(y), eps=1000.0, p=p, bounds=FREE, **FEW)
    torch.testing.assert_close(found.score, distances(model, x, y, p), rtol=1e-9, atol=0)
    t = (y + 1) % 4
    aimed = clever(model, x, Targeted(t), eps=1000.0, p=p, bounds=FREE, **FEW)
    wanted = torch.cat([distances(model, x[i : i + 1], y[i : i + 1], p, int(t[i])) for i in range(6)])
    torch.testing.assert_close(aimed.score, wanted, rtol=1e-9, atol=0)
    assert torch.equal(aimed.nearest, t)
    assert found.mean == pytest.approx(float(found.score.mean()))
    assert bool((found.score <= aimed.score * (1 + 1e-9)).all())


def test_clever_is_no_larger_than_its_radius() -> None:
    model, x = affine(), points()
    y = model(x).argmax(1)
    exact = distances(model, x, y, "l2")
    eps = float(exact.median())
    found = clever(model, x, Untargeted(y), eps=eps, bounds=FREE, **FEW)
    torch.testing.assert_close(found.score, exact.clamp(max=eps), rtol=1e-9, atol=0)


def test_clever_finds_the_largest_gradient_of_a_bowl() -> None:
    x = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    model = Bowl(8.0)
    found = clever(model, x, Untargeted(torch.tensor([0, 0])), eps=1.0, bounds=FREE, batches=100, samples=64)
    steepest = torch.tensor([4.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(found.slope, steepest, rtol=0.02, atol=0)
    assert bool(found.located.all())
    assert bool((found.p_value > 0.01).all())
    assert found.score.tolist() == [1.0, 1.0]  # (8 + 4.5) / 4 and (8 + 0.5) / 2 are more than the radius


def test_clever_stays_inside_the_box() -> None:
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)  # no gradient in the box is longer than √2
    goal = Untargeted(torch.tensor([0]))
    inside = clever(Bowl(0.0), x, goal, eps=3.0, bounds=(0.0, 1.0), **FEW)
    assert float(inside.slope) == pytest.approx(math.sqrt(2), rel=1e-6)
    assert float(clever(Bowl(0.0), x, goal, eps=3.0, bounds=FREE, **FEW).slope) > 3


def test_clever_of_a_model_without_a_slope_is_the_radius() -> None:
    flat = Affine(torch.zeros(3, 10, dtype=torch.float64), torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
    found = clever(flat, points(2), Untargeted(torch.tensor([0, 0])), eps=0.5, **FEW)
    assert found.score.tolist() == [0.5, 0.5]


def test_clever_of_rows_that_are_there_already_or_unreadable() -> None:
    model, x = affine(), points(4)
    y = model(x).argmax(1)
    x[3, 2] = torch.nan
    wrong = y.clone()
    wrong[0] = (y[0] + 1) % 4
    found = clever(model, x, Untargeted(wrong), eps=1.0, bounds=FREE, **FEW)
    assert (float(found.score[0]), int(found.nearest[0])) == (0.0, -1)
    assert math.isnan(float(found.score[3]))
    assert found.rows == 2
    assert found.mean == pytest.approx(float(found.score[1:3].mean()))
    aimed = clever(model, x[:1], Targeted(y[:1]), eps=1.0, bounds=FREE, **FEW)
    assert aimed.score.tolist() == [0.0]
    assert aimed.mean is None
    none = clever(model, x[:0], Untargeted(y[:0]), eps=1.0, **FEW)
    assert (len(none.score), none.mean) == (0, None)


def test_clever_is_seeded_and_of_each_row_alone() -> None:
    model, x = smooth(), points(3)
    y = model(x).argmax(1)
    whole = clever(model, x, Untargeted(y), eps=0.5, rng=4, batch=77, **FEW)
    order = torch.tensor([2, 0])
    some = clever(model, x[order], Untargeted(y[order]), eps=0.5, rng=4, batch=256, **FEW)
    torch.testing.assert_close(some.score, whole.score[order], rtol=1e-5, atol=0)
    again = clever(model, x[:1], Untargeted(y[:1]), eps=0.5, rng=4, batch=77, **FEW)
    other = clever(model, x[:1], Untargeted(y[:1]), eps=0.5, rng=5, batch=77, **FEW)
    torch.testing.assert_close(again.slope, whole.slope[:1], rtol=1e-5, atol=0)
    assert abs(float(other.slope) / float(again.slope) - 1) > 1e-6


def test_clever_of_a_smooth_model_lies_below_what_an_attack_needs() -> None:
    model, x = smooth(), points(5)
    y = model(x).argmax(1)
    goal = Untargeted(y)
    needed = DDN(steps=200).run(model, x, goal, bounds=(-9.0, 9.0))
    broken = needed.is_(B)
    found = clever(model, x, goal, eps=0.5, bounds=FREE, batches=20, samples=32)
    assert int(broken.sum()) >= 4
    assert bool((found.score <= needed.distance["l2"] * 1.02)[broken].all())
    assert float(found.score[broken].mean()) > 0.1 * float(needed.distance["l2"][broken].mean())


def test_clever_of_a_network_linear_in_pieces_takes_the_slope_that_it_saw_often() -> None:
    x = images(2)
    y = small()(x).argmax(1)
    more: dict[str, Any] = {"eps": 0.5, "batches": 20, "samples": 64}
    exact = clever(small(), x, Untargeted(y), **more)
    single = clever(small(torch.float32), x.float(), Untargeted(y), **more)
    needed = DDN(steps=100).run(small(), x, Untargeted(y)).distance["l2"]
    torch.testing.assert_close(single.score, exact.score, rtol=1e-3, atol=0)
    assert bool((exact.score <= needed).all())
    assert bool((exact.score > 0.9 * needed).all())


def test_clever_leaves_the_model_as_it_was() -> None:
    model = small().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    clever(model, images(2), Untargeted(torch.tensor([0, 1])), eps=0.5, **FEW)
    loss_sensitivity(model, images(2), torch.tensor([0, 1]))
    assert all(module.training for module in model.modules())
    assert all(value.grad is None and value.requires_grad for value in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("shape", [1.5, 3.0])
def test_the_endpoint_of_a_reverse_weibull_distribution_is_found(shape: float) -> None:
    draw = np.random.default_rng(5)
    errors, seen = [], []
    for _ in range(8):
        values = stats.weibull_max.rvs(shape, loc=7.0, scale=2.0, size=400, random_state=draw)
        place, p_value, located = _endpoint(values)
        assert located == 1.0
        assert p_value > 0.01
        errors.append(place - 7.0)
        seen.append(values.max() - 7.0)
    assert abs(np.mean(errors)) < abs(np.mean(seen))  # nearer than the largest value, which is too small
    assert np.abs(errors).max() < 0.4


def test_maxima_without_an_endpoint_do_not_run_away() -> None:
    values = stats.gumbel_r.rvs(loc=5.0, size=300, random_state=np.random.default_rng(1))
    place, _, _ = _endpoint(values)
    assert values.max() <= place <= values.max() + np.ptp(values)
    assert _endpoint(np.full(20, 3.0))[0] == 3.0
    assert _endpoint(np.array([2.0, 1.0, 2.5, *[3.0] * 17]))[::2] == (3.0, 1.0)
    assert _endpoint(np.array([1.0] * 19 + [math.inf]))[0] == math.inf


def test_clever_refuses_what_it_cannot_do() -> None:
    model, x = affine(), points(2)
    goal = Untargeted(torch.tensor([0, 1]))
    for wrong in (
        {"eps": 0.0},
        {"eps": 1.0, "batches": 9},
        {"eps": 1.0, "samples": 0},
        {"eps": 1.0, "p": "l0"},
    ):
        with pytest.raises(ConfigError):
            clever(model, x, goal, **({"eps": 1.0} | wrong))
    with pytest.raises(ConfigError, match="gradients"):
        clever(lambda given: given, x, goal, eps=1.0)
    with pytest.raises(DataError):
        clever(model, x, Untargeted(torch.tensor([0])), eps=1.0)
    with pytest.raises(DataError, match="class 4"):
        clever(model, x, Untargeted(torch.tensor([0, 4])), eps=1.0)


# --- GREAT score ------------------------------------------------------------------------------------


def test_great_score_is_the_mean_margin_of_samples_that_are_right() -> None:
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [1.0, 0.0, 0.0]], dtype=torch.float64)
    found = great_score(scores, torch.tensor([0, 0, 0]))
    factor = math.sqrt(math.pi / 2)
    assert found.each.tolist() == pytest.approx([0.5 * factor, 0.0, factor])
    assert found.mean == pytest.approx(0.5 * factor)
    half = factor * math.sqrt(math.log(40) / 6)
    assert found.ci95 == pytest.approx((max(0.0, 0.5 * factor - half), min(factor, 0.5 * factor + half)))


def test_great_score_contains_the_truth_and_refuses_logits() -> None:
    draw = torch.Generator().manual_seed(0)
    top = 0.5 + 0.5 * torch.rand(4000, dtype=torch.float64, generator=draw)  # the mean margin is 0.5
    found = great_score(torch.stack([top, 1 - top], 1), torch.zeros(4000, dtype=torch.int64))
    assert found.ci95 is not None
    assert found.ci95[0] < 0.5 * math.sqrt(math.pi / 2) < found.ci95[1]
    assert found.ci95[1] - found.ci95[0] < 0.06
    with pytest.raises(DataError):
        great_score(torch.tensor([[2.0, -1.0]]), torch.tensor([0]))
    with pytest.raises(DataError):
        great_score(torch.tensor([[0.5, 0.5]]), torch.tensor([2]))
    assert great_score(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))[1:] == (None, None)


# --- area under the security curve ------------------------------------------------------------------


def curve(eps: tuple[float, ...], *statuses: tuple[Status, ...]) -> Curve:
    x = torch.zeros(len(statuses[0]), 2)
    return Curve(eps, tuple(result(x, x, *each, attack=PGD()) for each in statuses))


def test_area_of_known_curves() -> None:
    whole = security_curve_area(curve((0.0, 0.5, 2.0), (H, H), (H, H), (H, H)))
    assert whole == (0.0, 2.0, 1.0, 1.0)
    gone = security_curve_area(curve((0.0, 1.0), (W, F), (W, F)))
    assert (gone.raw, gone.nested) == (0.0, 0.0)
    line = security_curve_area(curve((0.0, 4.0), (H, H), (B, B)))
    assert line.raw == pytest.approx(0.5)
    near = 1e-9  # a step at 0.3, from 1 to a half
    step = security_curve_area(curve((0.0, 0.3, 0.3 + near, 1.0), (H, H), (H, H), (H, B), (H, B)))
    assert step.raw == pytest.approx(0.3 + 0.7 / 2)
    uneven = security_curve_area(curve((1.0, 2.0, 5.0), (H, H), (H, B), (B, B)))
    assert uneven.raw == pytest.approx((0.75 * 1 + 0.25 * 3) / 4)


def test_nested_area_does_not_forget_what_broke() -> None:
    found = security_curve_area(curve((0.0, 1.0, 2.0), (H, H), (B, H), (H, H)))
    assert found.raw == pytest.approx((0.75 + 0.75) / 2)
    assert found.nested == pytest.approx((0.75 + 0.5) / 2)


def test_area_of_an_affine_model_under_an_exact_attack() -> None:
    model, x = affine(), points(8)
    y = model(x).argmax(1)
    exact = distances(model, x, y, "linf")
    eps = tuple(np.linspace(0, float(exact.max()) * 1.1, 9).tolist())
    found = security_curve_area(PGD(steps=20).curve(model, x, Untargeted(y), eps=eps, bounds=(-9.0, 9.0)))
    held = [float((exact > each).double().mean()) for each in eps]
    wanted = np.mean([(a + b) / 2 for a, b in pairwise(held)])
    assert found.nested == pytest.approx(wanted, abs=0.03)


def test_area_needs_two_radii_and_rows() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        security_curve_area(curve((1.0,), (H,)))
    assert security_curve_area(curve((0.0, 1.0), (), ()))[2:] == (None, None)
