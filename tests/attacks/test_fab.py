"""Boundary steps against linear programming, closed forms of affine models, and torchattacks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchattacks
from scipy.optimize import linprog, minimize
from torch import Tensor

from mycelia.attacks import FAB, FABT, Status, Targeted, Untargeted
from mycelia.attacks.evasion.fab import onto_boundary
from mycelia.attacks.norms import Norm, norm
from mycelia.engine.errors import ConfigError
from tests.attacks.digits import digits_mlp
from tests.attacks.worlds import Affine, affine, images, small

DUAL: dict[Norm, Norm] = {"linf": "l1", "l2": "l2", "l1": "linf"}
NORMS = pytest.mark.parametrize("p", ["linf", "l2", "l1"])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def smallest(w: np.ndarray, p: Norm, gain: float, low: np.ndarray, high: np.ndarray) -> float:
    """The least norm of a change in a box that adds `gain`, by scipy's solvers."""
    d = len(w)
    if p == "l2":
        start = np.where(w * gain > 0, high, low)
        found = minimize(
            lambda v: (v**2).sum() / 2,
            start,
            jac=lambda v: v,
            bounds=list(zip(low, high, strict=True)),
            constraints=[{"type": "eq", "fun": lambda v: w @ v - gain, "jac": lambda _: w}],
            options={"ftol": 1e-14, "maxiter": 500},
        )
        return float(np.linalg.norm(found.x))
    eye = np.eye(d)
    extra = np.ones((d, 1)) if p == "linf" else eye
    cost = np.r_[np.zeros(d), np.ones(extra.shape[1])]
    found = linprog(
        cost,
        A_ub=np.block([[eye, -extra], [-eye, -extra]]),
        b_ub=np.zeros(2 * d),
        A_eq=np.r_[w, np.zeros(extra.shape[1])][None],
        b_eq=[gain],
        bounds=[*zip(low, high, strict=True), *[(0, None)] * extra.shape[1]],
    )
    return float(found.fun)


@NORMS
def test_the_projection_on_boundary_and_box_is_the_nearest_point(p: Norm) -> None:
    w, d = draw(20, 7, seed=1), 7
    w[3, 2] = 0.0
    low, high = -draw(20, d, seed=2).abs() * 0.5, draw(20, d, seed=3).abs() * 0.5
    low[5], high[6] = -torch.inf, torch.inf
    most = torch.where(w > 0, w * high, w * low).nan_to_num(nan=0.0).sum(1).clamp(max=5.0)
    gain = most * torch.linspace(0.05, 0.95, 20, dtype=torch.float64)
    found = onto_boundary(w, p, gain, low, high)
    assert torch.allclose((w * found).sum(1), gain)
    assert bool(((found >= low) & (found <= high)).all())
    for row in range(20):
        expected = smallest(
            w[row].numpy(),
            p,
            float(gain[row]),
            low[row].clamp(min=-1e3).numpy(),
            high[row].clamp(max=1e3).numpy(),
        )
        assert float(norm(found[row : row + 1], p)) == pytest.approx(expected, rel=1e-5)
    # The other way is the same mirrored.
    assert torch.allclose(onto_boundary(-w, p, -gain, low, high), found)


@NORMS
def test_a_box_that_does_not_reach_the_boundary_gives_its_best_corner(p: Norm) -> None:
    w = draw(5, 4)
    low, high = torch.full((5, 4), -0.1, dtype=torch.float64), torch.full((5, 4), 0.2, dtype=torch.float64)
    found = onto_boundary(w, p, torch.full((5,), 1e6, dtype=torch.float64), low, high)
    assert torch.equal(found, torch.where(w > 0, high, low))
    assert torch.equal(onto_boundary(torch.zeros_like(w), p, torch.ones(5), low, high), torch.zeros_like(w))


@NORMS
def test_no_box_is_the_closed_form(p: Norm) -> None:
    """|f| / ‖w‖_q; also where squares of the slope would be 0 in single precision."""
    for scale, dtype in ((1.0, torch.float64), (1e-30, torch.float32)):
        w, f = draw(6, 5).to(dtype) * scale, draw(6, seed=4).to(dtype) * scale
        found = onto_boundary(w, p, f, torch.tensor(-torch.inf), torch.tensor(torch.inf))
        expected = f.double().abs() / norm(w.double(), DUAL[p])
        assert torch.allclose(norm(found, p).double(), expected, rtol=1e-5)


@NORMS
@pytest.mark.parametrize("kind", [FAB, FABT])
def test_distances_on_affine_models_are_exact(kind: type[FAB], p: Norm) -> None:
    """min over j of margin_j / ‖w_y − w_j‖_q, within 1 % and never below."""
    model = affine()
    x = draw(40, 10, seed=3)
    z = model(x).detach()
    y = z.argmax(1)
    weight = model.linear.weight.detach()
    gaps = (z.gather(1, y[:, None]) - z).scatter(1, y[:, None], torch.inf)
    slopes = norm((weight[y][:, None] - weight[None]).flatten(0, 1), DUAL[p]).view(40, -1)
    expected = (gaps / slopes.clamp(min=1e-300)).amin(1)
    result = kind(norm=p, steps=10).run(model, x, Untargeted(y), rng=0, bounds=(-100.0, 100.0))
    assert result.counts.broken == 40
    found = result.distance[p]
    assert bool((found >= expected * (1 - 1e-9)).all())
    assert bool((found <= expected * 1.01).all())


@NORMS
def test_distances_in_a_tight_box_are_those_of_the_linear_programme(p: Norm) -> None:
    w, b = np.array([3.0, -4.0, 1.0]), 0.2
    model = Affine(
        torch.tensor(np.stack([-w / 2, w / 2])), torch.tensor([-b / 2, b / 2], dtype=torch.float64)
    )
    x = torch.tensor([[0.9, 0.2, 0.6], [0.5, 0.1, 0.9], [0.95, 0.05, 0.1]], dtype=torch.float64)
    result = FAB(norm=p, steps=30).run(model, x, Untargeted(torch.ones(3, dtype=torch.int64)), rng=0)
    for row, found in zip(x.numpy(), result.distance[p].tolist(), strict=True):
        assert found == pytest.approx(smallest(w, p, -float(w @ row + b), -row, 1 - row), rel=0.01)


def test_known_answer_in_the_plane() -> None:
    """w = (3, −4), b = 1, x = (2, 1): f = 3, nearest at 0.6, r = (−0.36, 0.48)."""
    model = Affine(
        torch.tensor([[0.0, 0.0], [3.0, -4.0]], dtype=torch.float64),
        torch.tensor([0.0, 1.0], dtype=torch.float64),
    )
    x = torch.tensor([[2.0, 1.0]], dtype=torch.float64)
    result = FAB(norm="l2", steps=5).run(model, x, Untargeted(torch.tensor([1])), rng=0, bounds=(-9.0, 9.0))
    assert torch.allclose(result.x_adv - x, torch.tensor([[-0.36, 0.48]], dtype=torch.float64), atol=5e-3)
    assert float(result.distance["l2"]) == pytest.approx(0.6, rel=0.005)


@NORMS
def test_a_radius_only_decides_who_counts_as_broken(p: Norm) -> None:
    x = images(30)
    y = small()(x).argmax(1)
    free = FAB(norm=p, steps=10).run(small(), x, Untargeted(y), rng=1)
    eps = float(free.distance[p][free.is_(Status.BROKEN)].median())
    confined = FAB(norm=p, steps=10).run(small(), x, Untargeted(y), eps=eps, rng=1)
    assert torch.equal(confined.x_adv, free.x_adv)  # one run from x itself draws nothing
    assert torch.equal(
        confined.is_(Status.BROKEN), free.is_(Status.BROKEN) & (free.distance[p] <= eps * (1 + 1e-6))
    )


@NORMS
def test_more_restarts_and_targets_are_never_further_away(p: Norm) -> None:
    x = images(20)
    y = small()(x).argmax(1)
    for less, more in (
        (FAB(norm=p, steps=10), FAB(norm=p, steps=10, restarts=3)),
        (FABT(norm=p, steps=10, targets=1), FABT(norm=p, steps=10, targets=3)),
    ):
        one, three = (
            torch.where(result.is_(Status.BROKEN), result.distance[p], torch.inf)
            for result in (each.run(small(), x, Untargeted(y), rng=1) for each in (less, more))
        )
        assert bool((three <= one * 1.001).all())  # the final search ends within a little of the boundary
    assert bool((three < one * 0.999).any())  # other classes than the likeliest are nearer for some rows


def test_a_target_is_reached_and_near() -> None:
    """Affine, targeted: the distance to where z_t is the largest, a quadratic programme."""
    model = affine(3, 4)
    x = draw(12, 4, seed=5)
    y = model(x).argmax(1)
    t = (y + 1) % 3
    result = FAB(norm="l2", steps=60).run(model, x, Targeted(t, y), rng=0, bounds=(-50.0, 50.0))
    assert result.counts.broken == 12
    weight, bias = (each.detach().numpy() for each in (model.linear.weight, model.linear.bias))
    for row in range(12):
        others = [c for c in range(3) if c != int(t[row])]
        rise, height = weight[int(t[row])] - weight[others], bias[int(t[row])] - bias[others]
        here = x[row].numpy()
        exact = minimize(
            lambda v: v @ v / 2,
            (result.x_adv - x)[row].numpy(),
            constraints=[{"type": "ineq", "fun": lambda v, a=rise, b=height, z=here: a @ (z + v) + b}],
            options={"ftol": 1e-12},
        )
        assert float(result.distance["l2"][row]) <= np.linalg.norm(exact.x) * 1.03


def test_passes_are_counted_and_targets_are_capped() -> None:
    """Three other classes: three gradients in a step of FAB, one in a step of FAB-T."""
    x = images(4)
    y = small()(x).argmax(1)
    fab = FAB(norm="l2", steps=5).run(small(), x, Untargeted(y), rng=0)
    assert bool((fab.gradients == 15).all())
    assert bool((fab.queries <= 1 + 5 + 5 + 5).all())  # clean; from one pass each; their ends; the line
    fabt = FABT(norm="l2", steps=5, targets=9).run(small(), x, Untargeted(y), rng=0)
    assert bool((fabt.gradients == 15).all())
    for budget in (1, 2, 7, 12):
        few = FAB(norm="l2", steps=5).run(small(), x, Untargeted(y), rng=0, queries=budget)
        assert bool((few.queries <= 1 + budget).all())
        assert few.counts.n == 4


def test_settings_that_are_refused() -> None:
    for wrong in ({"steps": 0}, {"restarts": 0}, {"norm": "l0"}):
        with pytest.raises(ConfigError):
            FAB(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="targets"):
        FABT(targets=0)


def test_distances_are_no_larger_than_those_of_torchattacks() -> None:
    model, x, y = digits_mlp()
    for p, name in (("linf", "Linf"), ("l2", "L2"), ("l1", "L1")):
        mine = FAB(norm=p, steps=30).run(model, x, Untargeted(y), rng=0)  # type: ignore[arg-type]
        other = torchattacks.FAB(model, norm=name, eps=1e3, steps=30, n_classes=10)
        theirs = other.attack_single_run(x, y).detach()
        both = (model(theirs).argmax(1) != y) & mine.is_(Status.BROKEN)
        assert int(both.sum()) >= 0.95 * len(x)
        ratio = (mine.distance[p] / norm((theirs - x).double(), p))[both]  # type: ignore[arg-type]
        assert float(ratio.mean()) <= 1.0
        assert float((ratio <= 1.01).double().mean()) >= 0.95
