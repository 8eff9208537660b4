"""The ensemble: what is in it, who gets which rows, and what is counted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks import APGD, APGDT, AttackResult, AutoAttack, Status, SuiteResult, Targeted, Untargeted
from mycelia.attacks.evasion.fab import FAB, FABT
from mycelia.attacks.evasion.square import Square
from mycelia.engine.errors import ConfigError
from tests.attacks.worlds import EPS, affine, images, small


def quick(**more: object) -> AutoAttack:
    return AutoAttack(**({"steps": 6, "queries": 30} | more))  # type: ignore[arg-type]


def test_what_is_in_it() -> None:
    for p in ("linf", "l2", "l1"):
        starts, targets = (5, 5) if p == "l1" else (1, 9)
        assert AutoAttack("standard", norm=p).members == (  # type: ignore[arg-type]
            ("apgd-ce", APGD(norm=p, loss="ce", steps=100, restarts=starts)),  # type: ignore[arg-type]
            ("apgd-t", APGDT(norm=p, steps=100, restarts=1, targets=targets)),  # type: ignore[arg-type]
            ("fab-t", FABT(norm=p, steps=100, restarts=1, targets=9)),  # type: ignore[arg-type]
            ("square", Square(norm=p, steps=5000, restarts=1, p_init=0.8)),  # type: ignore[arg-type]
        )
    assert AutoAttack() == AutoAttack("standard", norm="linf")
    plus = dict(AutoAttack("plus", norm="l2").members)
    assert list(plus) == ["apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"]
    assert plus["apgd-dlr"] == APGD(norm="l2", loss="dlr", restarts=5)
    assert plus["fab"] == FAB(norm="l2", restarts=5)
    rand = AutoAttack("rand").members
    assert rand == (("apgd-ce", APGD(eot=20)), ("apgd-dlr", APGD(loss="dlr", eot=20)))
    with pytest.raises(ConfigError, match="standard, plus, rand"):
        AutoAttack("best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="steps 0"):
        AutoAttack(steps=0)


@pytest.mark.parametrize("version", ["standard", "plus"])
def test_each_attack_gets_what_still_holds(version: str) -> None:
    x = images(40)
    y = small()(x).argmax(1)
    y[::10] = (y[::10] + 1) % 4  # wrong already
    found = quick(version=version).run(small(), x, Untargeted(y), eps=EPS["linf"] / 3, rng=1)
    assert isinstance(found, AttackResult)
    assert found.counts.clean_wrong == 4
    left = 36
    for place, facts in enumerate(found.members):
        assert (facts.attacked, facts.failed) == (left, 0)
        assert facts.broken == int((found.broken_by == place).sum())
        left -= facts.broken
        assert facts.held_after == left
    assert left == found.counts.held
    assert sum(facts.forward for facts in found.members) == int(found.queries.sum())
    assert sum(facts.backward for facts in found.members) == int(found.gradients.sum())
    assert bool((found.gradients[found.is_(Status.CLEAN_WRONG)] == 0).all())


def test_rows_that_hold_come_back_with_their_highest_margin() -> None:
    x = images(20)
    y = small()(x).argmax(1)
    found = quick().run(small(), x, Untargeted(y), eps=0.01, rng=1)
    held = found.is_(Status.HELD)
    assert int(held.sum()) > 10
    margin = Untargeted(y).loss(small()(found.x_adv), "margin").detach()
    assert torch.allclose(found.loss, margin)
    assert bool((margin[held] < 0).all())
    clean = Untargeted(y).loss(small()(x), "margin").detach()
    assert bool((margin > clean).all())
    assert float(found.distance["linf"].max()) <= 0.01 * (1 + 1e-6)
    for _, attack in quick().members[:1]:
        alone = attack.run(small(), x, Untargeted(y), eps=0.01, rng=1)
        other = Untargeted(y).loss(small()(alone.x_adv), "margin").detach()
        assert bool((margin[held] >= other[held] - 2e-3).all())


class Kinked(nn.Module):
    """Its gradient is NaN everywhere, its values are those of an affine model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = affine(4, 36)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) + (0 * x).flatten(1).sum(1, keepdim=True).sqrt()
        return found


def test_a_row_without_a_gradient_goes_to_the_attacks_that_need_none() -> None:
    x = images(12)
    y = Kinked()(x).argmax(1)
    found = quick(queries=200).run(Kinked(), x, Untargeted(y), eps=0.2, rng=1)
    for facts in found.members[:3]:
        assert facts.attacked == facts.broken  # by a random start at most
        assert facts.failed > 3
    square = found.members[3]
    assert (square.attacked, square.failed) == (found.members[2].failed, 0)
    assert found.counts.failed == 0
    assert square.broken > 3
    last = int((found.broken_by == 3).nonzero()[0])
    assert "apgd-t: a gradient that is not finite" in found.reason[last]


def test_a_budget_is_for_all_attacks_together() -> None:
    x = images(20)
    y = small()(x).argmax(1)
    whole = quick().run(small(), x, Untargeted(y), eps=0.02, rng=1)
    assert int(whole.queries.max()) > 30
    for budget in (1, 5, 12, 30):
        found = quick().run(small(), x, Untargeted(y), eps=0.02, rng=1, queries=budget)
        assert int(found.queries.max()) <= budget
        assert found.counts.n == 20
        assert bool((whole.is_(Status.BROKEN) | ~found.is_(Status.BROKEN)).all())


def test_the_random_version_averages_gradients() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.draw = small(), torch.Generator().manual_seed(0)

        def forward(self, x: Tensor) -> Tensor:
            noise = 0.02 * torch.randn(x.shape, generator=self.draw, dtype=x.dtype)
            found: Tensor = self.inner(x + noise)
            return found

    x = images(10)
    found = quick(version="rand", steps=5).run(Noisy(), x, Untargeted(small()(x).argmax(1)), eps=0.03, rng=1)
    ran = found.gradients[~found.is_(Status.CLEAN_WRONG)]
    assert bool((ran % 20 == 0).all())
    held = found.is_(Status.HELD) & torch.tensor([text == "" for text in found.reason])
    assert bool((found.gradients[held] == 2 * 20 * 6).all())


def test_eight_bits_and_curves() -> None:
    x = (images(20) * 255).round() / 255
    y = small()(x).argmax(1)
    found = quick().run(small(), x, Untargeted(y), eps=8 / 255, rng=1, quantise=8)
    assert isinstance(found, SuiteResult)
    assert found.survive_8bit is not None
    assert torch.allclose((found.x_adv * 255).round() / 255, found.x_adv, atol=1e-9)
    assert bool((found.broken_by[~found.is_(Status.BROKEN)] == -1).all())
    curve = quick().curve(small(), x, Untargeted(y), eps=[0.0, 0.02, 0.1])
    assert curve.results[0].counts.held == 20
    assert all(isinstance(result, SuiteResult) for result in curve.results)


def test_targets_and_bounds_go_along() -> None:
    x = images(16)
    z = small()(x).detach()
    t = z.topk(2, 1).indices[:, 1]
    found = quick().run(small(), x, Targeted(t, z.argmax(1)), eps=EPS["linf"], rng=1)
    assert torch.equal(found.is_(Status.BROKEN), small()(found.x_adv).argmax(1) == t)
    assert found.counts.broken > 3
    y = z.argmax(1)
    low, high = (x - 0.01).clamp(0), (x + 0.02).clamp(max=1)
    tight = quick().run(small(), x, Untargeted(y), eps=0.5, rng=1, bounds=(low, high))
    assert bool(((tight.x_adv >= low) & (tight.x_adv <= high)).all())
    flat = torch.full((3, 10), 5.0, dtype=torch.float64)
    wide = quick().run(
        affine(), flat, Untargeted(affine()(flat).argmax(1)), eps=3.0, bounds=(-math.inf, math.inf)
    )
    assert wide.counts.n == 3


def test_what_is_refused() -> None:
    x = images(4)
    y = Untargeted(small()(x).argmax(1))
    with pytest.raises(ConfigError, match="no highest one"):
        quick().run(small(), x, y, eps=0.1, keep="loss")
    with pytest.raises(ConfigError, match="no eps"):
        quick().run(small(), x, y)
    with pytest.raises(ConfigError, match="needs a gradient"):
        quick().run(lambda v: v.flatten(1)[:, :4], x, y, eps=0.1)
