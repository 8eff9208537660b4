"""Smallest changes: frozen coordinates, limits that fall, walks along the boundary, projections."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from mycelia.attacks import (
    EAD,
    FAB,
    JSMA,
    BrendelBethge,
    CarliniWagner,
    CarliniWagnerL0,
    CarliniWagnerLinf,
    DeepFool,
    HopSkipJump,
    NewtonFool,
    SparseFool,
    Status,
    Targeted,
    Untargeted,
)
from mycelia.attacks.evasion.trust_region import nearest_on_plane
from mycelia.attacks.norms import Norm, norm
from mycelia.engine.errors import ConfigError
from tests.attacks.closed import distances
from tests.attacks.digits import digits_mlp
from tests.attacks.worlds import Affine, affine, images, small

WIDE = (-50.0, 50.0)


def several() -> tuple[Affine, Tensor, Tensor]:
    """Rows of an affine model of four classes; of some the nearest class is not the runner-up."""
    model = affine()
    x = 0.5 + 0.1 * torch.randn(20, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return model, x, model(x).argmax(1)


def plane() -> tuple[Affine, Tensor, Untargeted]:
    """f(x) = 3 x_1 − 4 x_2 + 1 as the logit of class 1, at (2, 1): f = 3."""
    weight = torch.tensor([[0.0, 0.0], [3.0, -4.0]], dtype=torch.float64)
    model = Affine(weight, torch.tensor([0.0, 1.0], dtype=torch.float64))
    return model, torch.tensor([[2.0, 1.0]], dtype=torch.float64), Untargeted(torch.tensor([1]))


@pytest.mark.parametrize(
    ("attack", "near"),
    [
        (CarliniWagnerLinf(), 0.02),
        (NewtonFool(), 0.01),
        (SparseFool(), 0.01),
        *((BrendelBethge(norm=p, steps=40, restarts=1), 0.01) for p in ("l2", "linf", "l1")),
    ],
    ids=lambda each: f"{type(each).__name__}-{each.norm}" if hasattr(each, "norm") else "",
)
def test_smallest_change_to_a_plane(attack: Any, near: float) -> None:
    model, x, goal = plane()
    result = attack.run(model, x, goal, bounds=(-10.0, 10.0))
    expected = {"l2": 0.6, "linf": 3 / 7, "l1": 3 / 4}[attack.norm]
    found = float(result.distance[attack.norm])
    assert expected * (1 - 1e-9) <= found <= expected * (1 + near)
    assert attack.run(model, x, goal, bounds=(-10.0, 10.0), eps=expected * 0.99).counts.held == 1


def test_from_the_boundary_every_row_is_within_one_percent() -> None:
    """Of the closed form; descent from the input makes for the runner-up, which is not always the nearest."""
    model, x, y = several()
    expected = distances(model, x, y, "l2")
    ratio = {
        start: CarliniWagner(steps=150, constant=0.1, searches=8, start=start)
        .run(model, x, Untargeted(y), bounds=WIDE)
        .distance["l2"]
        / expected
        for start in ("input", "boundary")
    }  # type: ignore[arg-type]
    assert float(ratio["boundary"].min()) >= 1 - 1e-9
    assert float(ratio["boundary"].max()) <= 1.01
    assert float(ratio["boundary"].max()) < float(ratio["input"].max())


def test_limits_on_all_coordinates_are_near_the_closed_form() -> None:
    model, x, y = several()
    result = CarliniWagnerLinf().run(model, x, Untargeted(y), bounds=WIDE)
    ratio = result.distance["linf"] / distances(model, x, y, "linf")
    assert result.counts.broken == len(x)
    assert float(ratio.min()) >= 1 - 1e-9
    assert float(ratio.median()) <= 1.02


def test_frozen_coordinates_leave_as_few_as_an_exhaustive_search() -> None:
    """On two classes: the fewest coordinates of which the room to the bounds is worth the margin."""
    draw = torch.Generator().manual_seed(4)
    weight = torch.randn(2, 8, dtype=torch.float64, generator=draw)
    model = Affine(weight, torch.zeros(2, dtype=torch.float64))
    x = torch.rand(15, 8, dtype=torch.float64, generator=draw)
    z = model(x).detach()
    y = z.argmax(1)
    result = CarliniWagnerL0().run(model, x, Untargeted(y))
    slope = (weight[1] - weight[0]) * (1 - 2 * y[:, None])
    worth = torch.where(slope > 0, slope * (1 - x), -slope * x)
    margin = (z[:, 1] - z[:, 0]).abs()
    for row in range(len(x)):
        enough = [
            count
            for count in range(1, 9)
            if any(float(worth[row, list(some)].sum()) > float(margin[row]) * 1.01
                   for some in combinations(range(8), count))
        ]  # fmt: skip
        if enough:
            assert bool(result.is_(Status.BROKEN)[row])
            assert int(result.distance["l0"][row]) <= enough[0] + 1
    best = [int(result.distance["l0"][row]) for row in range(len(x))]
    assert min(best) == 1


def test_a_planted_coordinate_is_found() -> None:
    """One coordinate of 200 does it alone; hundreds that are worth a little each do not mislead."""
    weight = torch.full((2, 200), 0.01, dtype=torch.float64)
    weight[0] = 0
    weight[1, 77] = 5.0
    model = Affine(weight, torch.tensor([3.0, 0.0], dtype=torch.float64))
    x = torch.zeros(2, 200, dtype=torch.float64)
    goal = Untargeted(torch.zeros(2, dtype=torch.int64))
    for attack in (CarliniWagnerL0(), SparseFool(norm="l0")):
        result = attack.run(model, x, goal)
        assert result.distance["l0"].tolist() == [1.0, 1.0]
        assert (result.x_adv[0] != 0).nonzero()[:, 0].tolist() == [77]


@pytest.mark.parametrize("p", ["l2", "l1", "linf"])
def test_steps_on_the_plane_are_the_smallest(p: Norm) -> None:
    """Inside box and trust region; beside a general solver."""
    draw = torch.Generator().manual_seed(0)
    n, d = 12, 5
    lower, upper = (sign * torch.rand(n, d, dtype=torch.float64, generator=draw) for sign in (-1, 1))
    now = lower + (upper - lower) * torch.rand(n, d, dtype=torch.float64, generator=draw)
    slope = 3 * torch.randn(n, d, dtype=torch.float64, generator=draw)
    rise = 0.5 * torch.randn(n, dtype=torch.float64, generator=draw)
    radius = 0.1 + torch.rand(n, dtype=torch.float64, generator=draw)
    found = nearest_on_plane(now, slope, rise, p, radius, lower, upper)
    assert bool(((found >= lower) & (found <= upper)).all())
    assert bool((norm(found - now, "l2") <= radius * (1 + 1e-6)).all())
    there = ((slope * (found - now)).sum(1) - rise).abs() <= 1e-4 * rise.abs()
    assert int(there.sum()) >= n - 3
    for row in there.nonzero()[:, 0].tolist():
        best = _solved(p, *(each[row].numpy() for each in (now, slope, rise, radius, lower, upper)))
        if best is not None:
            assert float(norm(found[row : row + 1], p)) <= best * 1.01


def _solved(p: Norm, now: Any, slope: Any, rise: Any, radius: Any, lower: Any, upper: Any) -> float | None:
    """By SLSQP: unknowns are the change and, for l1 and linf, bounds on its coordinates."""
    d = len(now)
    conditions: list[dict[str, Any]] = [
        {"type": "eq", "fun": lambda u: slope @ (u[:d] - now) - rise},
        {"type": "ineq", "fun": lambda u: radius**2 - ((u[:d] - now) ** 2).sum()},
    ]
    more = {"l2": 0, "l1": d, "linf": 1}[p]
    start = np.concatenate([now, np.abs(now)[:more] if p == "l1" else [np.abs(now).max()] * more])
    for k in range(d if more else 0):
        at = d + (k if p == "l1" else 0)
        conditions += [{"type": "ineq", "fun": lambda u, k=k, at=at, s=s: u[at] - s * u[k]} for s in (-1, 1)]
    made = minimize(
        (lambda u: (u**2).sum()) if p == "l2" else (lambda u: u[d:].sum()),
        start,
        bounds=[*zip(lower, upper, strict=True), *[(0, None)] * more],
        constraints=conditions,
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 500},
    )
    if not made.success:
        return None
    return float(made.fun**0.5 if p == "l2" else made.fun)


def test_walks_end_nearer_than_by_labels_alone() -> None:
    """As many queries, the same pool of starts: gradients of the boundary are worth something."""
    model, x, y = digits_mlp(12)
    pool = x[y != y[0]][:10]
    walk = BrendelBethge(steps=60, restarts=1, pool=pool).run(model, x, Untargeted(y))
    most = int(walk.queries.max())
    labels = HopSkipJump(pool=pool).run(model, x, Untargeted(y), queries=most)
    assert walk.counts.broken == len(x)
    assert float(walk.distance["l2"].median()) < 0.8 * float(labels.distance["l2"].median())
    given = BrendelBethge(steps=60, restarts=1, tries=0).run(model, x, Untargeted(y))
    assert given.counts.failed == len(x)
    assert set(given.reason) == {"no start point in 0 draws"}


def test_projections_of_the_input_bring_deepfool_nearer() -> None:
    """Never further, nearer where the boundary is curved, and no more queries where it is not."""
    model, x, y = digits_mlp(40)
    for p in ("l2", "linf"):
        plain = DeepFool(norm=p, refinements=0).run(model, x, Untargeted(y))
        found = DeepFool(norm=p).run(model, x, Untargeted(y))
        assert bool((found.distance[p] <= plain.distance[p] * (1 + 1e-9)).all())
        assert float(found.distance[p].mean()) < float(plain.distance[p].mean())
    flat, rows, labels = several()
    assert torch.equal(
        DeepFool().run(flat, rows, Untargeted(labels), bounds=WIDE).queries,
        DeepFool(refinements=0).run(flat, rows, Untargeted(labels), bounds=WIDE).queries,
    )


def test_newton_steps_are_no_longer_than_their_share() -> None:
    """η‖x‖ for the first, and the fall to 1/classes where that is nearer; the input is left at its scale."""
    x = images(6)
    y = small()(x).argmax(1)
    result = NewtonFool(steps=1, eta=1e-3, halvings=0).run(small(), x, Untargeted(y))
    size = norm(x, "l2")
    assert bool((result.distance["l2"] <= 1e-3 * size * (1 + 1e-9)).all())
    assert float(result.distance["l2"].max()) > 0
    model, one, goal = plane()
    wide = NewtonFool(steps=1, eta=10.0, halvings=0).run(model, one, goal, bounds=WIDE)
    # F = σ(3), ∇F = F(1 − F)·(3, −4): the step is (F − 1/2) / (5 F (1 − F)).
    share = 1 / (1 + np.exp(-3.0))
    assert float(wide.distance["l2"]) == pytest.approx((share - 0.5) / (5 * share * (1 - share)))


def test_strength_beside_other_attacks() -> None:
    """At about as many gradients, on a network: few coordinates, small sums, small limits."""
    model, x, y = digits_mlp(15)
    goal = Untargeted(y)

    def mean(attack: Any) -> float:
        found = attack.run(model, x, goal)
        assert found.counts.broken >= len(x) - 1
        return float(found.distance[attack.norm][found.is_(Status.BROKEN)].mean())

    assert mean(CarliniWagnerL0()) < mean(JSMA(share=1.0))
    assert mean(SparseFool(norm="l0")) < mean(JSMA(share=1.0))
    assert mean(SparseFool()) < mean(EAD(steps=20, searches=2, constant=0.1, rule="L1"))
    assert mean(CarliniWagnerLinf()) < 1.1 * mean(FAB(steps=20))
    assert mean(NewtonFool()) < 1.1 * mean(DeepFool())


@pytest.mark.parametrize("kind", [CarliniWagnerL0, CarliniWagnerLinf])
def test_confidence_is_asked_of_what_is_returned(kind: Any) -> None:
    model, x, goal = plane()
    result = kind(kappa=2.0).run(model, x, goal, bounds=(-10.0, 10.0))
    assert result.is_(Status.BROKEN).all()
    assert float(goal.loss(model(result.x_adv).detach(), "margin")) >= 2
    if kind is CarliniWagnerLinf:
        assert float(result.distance["linf"]) == pytest.approx(5 / 7, rel=0.02)


@pytest.mark.parametrize(
    "attack",
    [CarliniWagner(start="boundary"), CarliniWagnerL0(), CarliniWagnerLinf(), NewtonFool(), DeepFool(),
     BrendelBethge(), SparseFool()],
    ids=lambda attack: type(attack).__name__,
)  # fmt: skip
def test_query_limits_are_kept(attack: Any) -> None:
    x = images(4)
    y = small()(x).argmax(1)
    for most in (1, 2, 3, 7):
        result = attack.run(small(), x, Untargeted(y), queries=most)
        assert bool((result.queries <= most + 1).all())  # and the clean look
    if attack.targeted:
        found = attack.run(small(), x, Targeted((y + 1) % 4, y), queries=5)
        assert bool((found.queries <= 6).all())


@pytest.mark.parametrize(
    "make",
    [
        lambda: CarliniWagner(start="middle"), lambda: CarliniWagnerL0(share=1.0),
        lambda: CarliniWagnerL0(largest=1e-9), lambda: CarliniWagnerLinf(decrease=1.0),
        lambda: CarliniWagnerLinf(rounds=0), lambda: NewtonFool(eta=0.0), lambda: DeepFool(refinements=-1),
        lambda: BrendelBethge(overshoot=2.0), lambda: BrendelBethge(norm="l0"), lambda: SparseFool(reach=0.5),
        lambda: SparseFool(norm="l2"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()
