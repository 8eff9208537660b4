"""Smallest changes by gradients: closed forms, box and constants, pairs of coordinates, confidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mycelia.attacks import DDN, EAD, FMN, JSMA, LBFGS, CarliniWagner, DeepFool, Status, Targeted, Untargeted
from mycelia.attacks.evasion.halfspace import smallest_step
from mycelia.attacks.evasion.jsma import best_pair
from mycelia.attacks.norms import Norm, norm
from mycelia.engine.errors import ConfigError
from tests.attacks.closed import distances
from tests.attacks.worlds import Affine, affine, images, small

WIDE = (-50.0, 50.0)
FAST = CarliniWagner(steps=200, searches=7, constant=0.1, learning_rate=0.01)


def plane() -> tuple[Affine, Tensor, Untargeted]:
    """f(x) = 3 x_1 − 4 x_2 + 1 as the logit of class 1, at (2, 1): f = 3."""
    weight = torch.tensor([[0.0, 0.0], [3.0, -4.0]], dtype=torch.float64)
    model = Affine(weight, torch.tensor([0.0, 1.0], dtype=torch.float64))
    return model, torch.tensor([[2.0, 1.0]], dtype=torch.float64), Untargeted(torch.tensor([1]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_step_to_a_plane(dtype: torch.dtype) -> None:
    model, x, goal = plane()
    close = 1e-6 if dtype is torch.float64 else 1e-4
    result = DeepFool().run(model.to(dtype), x.to(dtype), goal, bounds=(-10.0, 10.0))
    assert (result.x_adv.double() - x)[0].tolist() == pytest.approx([-0.36, 0.48], rel=close)
    assert float(result.distance["l2"]) == pytest.approx(0.6, rel=close)
    assert int(result.queries) == 3
    linf = DeepFool(norm="linf").run(model.to(dtype), x.to(dtype), goal, bounds=(-10.0, 10.0))
    assert (linf.x_adv.double() - x)[0].tolist() == pytest.approx([-3 / 7, 3 / 7], rel=close)


@pytest.mark.parametrize(
    "attack",
    [
        CarliniWagner(),
        DDN(),
        LBFGS(),
        *(FMN(norm=p) for p in ("l2", "linf", "l1")),
        EAD(rule="L1", beta=0.05, steps=100, searches=6),
    ],
    ids=lambda attack: f"{type(attack).__name__}-{attack.norm}",
)
def test_smallest_change_to_a_plane(attack: Any) -> None:
    model, x, goal = plane()
    result = attack.run(model, x, goal, bounds=(-10.0, 10.0))
    expected = {"l2": 0.6, "linf": 3 / 7, "l1": 3 / 4}[attack.norm]
    assert float(result.distance[attack.norm]) >= expected * (1 - 1e-9)
    near = {"EAD": 0.05, "DDN": 0.03}.get(type(attack).__name__, 0.01)
    assert float(result.distance[attack.norm]) <= expected * (1 + near)
    short = attack.run(model, x, goal, bounds=(-10.0, 10.0), eps=expected * 0.99)
    assert short.is_(Status.HELD).all()


@pytest.mark.parametrize("attack", [FAST, *(FMN(norm=p) for p in ("l2", "linf", "l1"))], ids=repr)
def test_smallest_change_among_several_classes(attack: Any) -> None:
    model = affine()
    x = 0.5 + 0.1 * torch.randn(20, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y = model(x).argmax(1)
    result = attack.run(model, x, Untargeted(y), bounds=WIDE)
    expected = distances(model, x, y, attack.norm)
    assert result.counts.broken == len(x)
    ratio = result.distance[attack.norm] / expected
    assert float(ratio.min()) >= 1 - 1e-9
    assert float(ratio.median()) <= 1.01  # a nearest class that was not the runner-up at x may be missed
    assert float(ratio.quantile(0.75)) <= 1.005


def test_without_bounds_there_is_no_tanh() -> None:
    model, x, goal = plane()
    free = FAST.run(model, x, goal, bounds=(-torch.inf, torch.inf))
    assert float(free.distance["l2"]) == pytest.approx(0.6, rel=0.01)
    low, high = (torch.tensor(ends, dtype=torch.float64) for ends in ([1.9, -10.0], [torch.inf, 10.0]))
    half = FAST.run(model, x, goal, bounds=(low, high))
    assert float(half.x_adv[0, 0]) >= 1.9  # the first moves by 0.1, the second makes up for the rest of 3
    assert float(half.distance["l2"]) == pytest.approx((0.1**2 + (2.7 / 4) ** 2) ** 0.5, rel=0.01)


def test_an_input_on_its_bound_can_leave_it() -> None:
    weight = torch.tensor([[0.0, 0.0], [4.0, 3.0]], dtype=torch.float64)
    model = Affine(weight, torch.tensor([1.0, 0.0], dtype=torch.float64))
    x = torch.zeros(1, 2, dtype=torch.float64)
    result = FAST.run(model, x, Untargeted(torch.tensor([0])))
    assert float(result.distance["l2"]) == pytest.approx(0.2, rel=0.01)


@pytest.mark.parametrize("kind", [CarliniWagner, EAD])
def test_confidence_is_asked_of_what_is_returned(kind: Any) -> None:
    model, x, goal = plane()
    result = kind(kappa=2.0, steps=200, searches=6, constant=0.1).run(model, x, goal, bounds=(-10.0, 10.0))
    assert result.is_(Status.BROKEN).all()
    assert float(goal.loss(model(result.x_adv).detach(), "margin")) >= 2
    if kind is CarliniWagner:
        assert float(result.distance["l2"]) == pytest.approx(1.0, rel=0.01)  # (3 + 2) / 5


@given(st.integers(0, 10**6), st.sampled_from(["l2", "linf"]))
@settings(max_examples=50, deadline=None)
def test_steps_into_a_halfspace_are_the_smallest(seed: int, p: Norm) -> None:
    """On the boundary, inside the box; and no change of smaller norm rises as much (its best is known)."""
    from mycelia.attacks.norms import linear_max

    draw = torch.Generator().manual_seed(seed)
    slope = torch.randn(6, 7, dtype=torch.float64, generator=draw)
    slope[torch.rand(6, 7, generator=draw) < 0.2] = 0
    lower, upper = (
        -torch.rand(6, 7, dtype=torch.float64, generator=draw),
        torch.rand(6, 7, dtype=torch.float64, generator=draw),
    )
    most = (torch.where(slope > 0, upper, lower) * slope).sum(1)
    rise = most * torch.tensor([0.1, 0.5, 0.9, 0.99, 1.1, 2.0], dtype=torch.float64)
    delta, size = smallest_step(slope, rise, p, lower, upper)
    assert bool(((delta >= lower) & (delta <= upper)).all())
    got = (delta * slope).sum(1)
    assert torch.allclose(got[:4], rise[:4], atol=1e-10)
    assert torch.allclose(got[4:], most[4:], atol=1e-10)
    assert torch.equal(size[4:], torch.full_like(size[4:], torch.inf))
    assert torch.allclose(size[:4], norm(delta, p)[:4])
    smaller = linear_max(slope, p, norm(delta, p) * 0.999, lower, upper)
    assert bool(((smaller * slope).sum(1)[:4] < rise[:4]).all())


@given(st.integers(0, 10**6), st.integers(2, 14), st.booleans())
@settings(max_examples=80, deadline=None)
def test_best_pairs_are_those_of_a_full_map(seed: int, d: int, coarse: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(5, d, dtype=torch.float64, generator=draw) for _ in range(2))
    if coarse:  # ties
        a, b = a.round(), b.round()
    allowed = torch.rand(5, d, generator=draw) < 0.8
    pair, count = best_pair(a, b, allowed)
    for row in range(5):
        best = 0.0
        for p in range(d):
            for q in range(p + 1, d):
                one, two = float(a[row, p] + a[row, q]), float(b[row, p] + b[row, q])
                if allowed[row, p] and allowed[row, q] and one > 0 and two > 0:
                    best = max(best, one * two)
        p, q = pair[row].tolist()
        if best:
            assert int(count[row]) == 2
            assert p != q
            assert float((a[row, p] + a[row, q]) * (b[row, p] + b[row, q])) == pytest.approx(best)
            assert bool(allowed[row, p] & allowed[row, q])
        else:
            assert int(count[row]) < 2


def test_jsma_changes_few_coordinates_and_no_more_than_it_may() -> None:
    x = images(10)
    y = small()(x).argmax(1)
    for most in (1.0, 3.0, 4.0):
        result = JSMA(share=1.0).run(small(), x, Untargeted(y), eps=most)
        assert bool((result.distance["l0"] <= most).all())
    free = JSMA(share=1.0).run(small(), x, Untargeted(y))
    assert free.counts.broken == len(x)
    moderate = JSMA(share=1.0, theta=0.25, steps=60).run(small(), x, Untargeted(y))
    assert float((moderate.x_adv - x).abs().max()) <= 1
    t = (y + 1) % 4
    assert JSMA(share=1.0).run(small(), x, Targeted(t, y)).counts.broken >= 7
    with pytest.raises(ConfigError, match="no theta and no bounds"):
        JSMA().run(small(), x, Untargeted(y), bounds=(-torch.inf, torch.inf))


def test_the_rule_of_ead_decides_what_is_returned() -> None:
    x = images(10)
    y = small()(x).argmax(1)
    found = {
        rule: EAD(rule=rule, steps=40, searches=5, constant=0.1, beta=0.02).run(small(), x, Untargeted(y))
        for rule in ("EN", "L1")
    }  # type: ignore[arg-type]
    net = {rule: 0.02 * each.distance["l1"] + each.distance["l2"] ** 2 for rule, each in found.items()}
    assert all(each.counts.broken == len(x) for each in found.values())
    assert bool((found["L1"].distance["l1"] <= found["EN"].distance["l1"] + 1e-9).all())
    assert bool((net["EN"] <= net["L1"] + 1e-9).all())
    dense = FAST.run(small(), x, Untargeted(y))
    assert float(found["L1"].distance["l1"].mean()) < float(dense.distance["l1"].mean())


def test_rows_that_stand_still_stop_alone() -> None:
    x = images(8)
    y = small()(x).argmax(1)
    attack = CarliniWagner(steps=50, searches=3, start="input")
    early = attack.run(small(), x, Untargeted(y))
    late = replace(attack, early_abort=False).run(small(), x, Untargeted(y))
    assert bool((late.queries == 151).all())
    assert bool((early.queries < 151).any())
    assert len(set(early.queries.tolist())) > 1


@pytest.mark.parametrize("attack", [FAST, EAD(), LBFGS(), DDN(), FMN(), DeepFool(), JSMA()], ids=repr)
def test_query_limits_are_kept(attack: Any) -> None:
    x = images(4)
    y = small()(x).argmax(1)
    for most in (1, 2, 3, 7):
        result = attack.run(small(), x, Untargeted(y), queries=most)
        assert bool((result.queries <= most + 1).all())  # and the clean look


@pytest.mark.parametrize(
    "make",
    [
        lambda: CarliniWagner(steps=0), lambda: CarliniWagner(kappa=-1.0), lambda: LBFGS(constant=0.0),
        lambda: DeepFool(candidates=1), lambda: DeepFool(overshoot=0.0), lambda: JSMA(share=0.0),
        lambda: JSMA(theta=-1.0), lambda: EAD(rule="l2"), lambda: EAD(beta=-1.0), lambda: DDN(gamma=1.0),
        lambda: FMN(step_size=0.0), lambda: FMN(last_step_size=2.0), lambda: LBFGS(searches=0),
        lambda: CarliniWagner(norm="linf"), lambda: DeepFool(norm="l1"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()
