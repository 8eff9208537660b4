"""What a search remembers when a loss is no number, and how many passes a success has to stand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks import PGD, AutoAttack, Status, Targeted, Untargeted
from mycelia.attacks.base import Attack
from mycelia.attacks.planted import affine
from mycelia.attacks.search import Search, towards
from mycelia.engine.errors import ConfigError, DataError


class Hole(nn.Module):
    """The margin of class 1 rises with the first coordinate; from 0.58 to 0.62 there are no numbers."""

    def forward(self, x: Tensor) -> Tensor:
        where = x[:, 0]
        hole = (where > 0.58) & (where < 0.62)
        return torch.stack([torch.where(hole, torch.nan, 2 - where), torch.where(hole, torch.nan, where)], 1)


class Visits(Attack):
    """First the hole, then a point with a number."""

    needs = "score"

    def search(self, search: Search) -> None:
        for step, way in enumerate((0.1, 0.05)):
            search.look(search.x + way, search.active, step)


class VisitsTogether(Attack):
    """The same in one look."""

    needs = "score"

    def search(self, search: Search) -> None:
        points = torch.stack([search.x + 0.1, search.x + 0.05], 1)
        losses, _ = search.look_many(points, search.active, torch.full((len(points),), 2), 1)
        assert not bool(losses.isnan().any())


@pytest.mark.parametrize("attack", [Visits(), VisitsTogether()])
def test_a_loss_that_is_no_number_hides_nothing(attack: Attack) -> None:
    x = torch.full((2, 3), 0.5)
    for keep in ("closest", "loss"):
        result = attack.run(Hole(), x, Untargeted(torch.zeros(2, dtype=torch.int64)), eps=0.2, keep=keep)
        assert (result.status == int(Status.HELD)).all()
        assert torch.equal(result.x_adv, x + 0.05)
        assert result.loss.tolist() == pytest.approx([2 * 0.55 - 2] * 2)
        assert result.best_step.tolist() == [1, 1]


class Flickers(nn.Module):
    """Of a changed input two of three passes say another class; what they say of others changes a little."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        wrong = (x[:, 0] > 0.55) & (self.calls % 3 != 0)
        one = torch.full_like(x[:, 0], 0.1 * (self.calls % 2))
        return torch.stack([torch.where(wrong, 0.0, 1.0), torch.where(wrong, 1.0, one)], 1) + 0 * x[:, :1]


class Lucky(nn.Module):
    """Says another class beyond 0.55 by luck, in one of four passes, and beyond 0.58 always."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        wrong = (x[:, 0] > 0.58) | ((x[:, 0] > 0.55) & (self.calls % 4 == 0))
        return torch.stack([torch.where(wrong, 0.0, 1.0), torch.where(wrong, x[:, 0], 0.0)], 1)


class Creeps(Attack):
    """Nearer and nearer to the far corner."""

    needs = "label"

    def search(self, search: Search) -> None:
        for step in range(1, 5):
            if len(rows := search.active):
                search.look(search.inside(search.x[rows] + step / 4 * search.eps, rows), rows, step)


def test_luck_does_not_end_the_search_of_a_random_model() -> None:
    x = torch.full((2, 3), 0.5)
    goal = Untargeted(torch.zeros(2, dtype=torch.int64))
    once = Creeps().run(Lucky(), x, goal, eps=0.1)
    found = Creeps().run(Lucky(), x, goal, eps=0.1, votes=3)
    assert (found.counts.broken, found.unreproduced) == (2, 0)
    assert set(found.reason) == {""}
    assert bool((found.x_adv[:, 0] > 0.58).all())
    assert found.distance["linf"].tolist() == pytest.approx([0.1] * 2, abs=1e-6)
    assert bool((found.queries > once.queries).all())
    limited = Creeps().run(Lucky(), x, goal, eps=0.1, votes=3, queries=20)
    assert limited.counts.broken in (0, 2)


class Goes(Attack):
    """Three times to the far corner."""

    needs = "label"

    def search(self, search: Search) -> None:
        for step in range(3):
            if len(rows := search.active):
                search.look(search.inside(search.x[rows] + search.eps, rows), rows, step)


def test_most_passes_decide_whether_a_success_comes_again() -> None:
    x, goal = torch.full((2, 3), 0.5), Untargeted(torch.zeros(2, dtype=torch.int64))
    once = Goes().run(Flickers(), x, goal, eps=0.1)  # passes 1, 2, and the second look in pass 3
    assert (once.counts.broken, once.unreproduced, once.votes) == (0, 2, 1)
    assert once.reason == ("not reproduced",) * 2
    often = Goes().run(Flickers(), x, goal, eps=0.1, votes=3)
    assert (often.counts.broken, often.unreproduced, often.votes) == (2, 0, 3)
    rounded = Goes().run(Flickers(), x, goal, eps=0.1, votes=3, quantise=8)
    assert rounded.survive_8bit == 1.0
    half = Goes().run(Flickers(), x, goal, eps=0.1, votes=2)  # one of two is not most of them
    assert half.counts.broken == 0
    with pytest.raises(ConfigError, match="votes 0"):
        Goes().run(Flickers(), x, goal, eps=0.1, votes=0)


def test_averaged_gradients_are_verified_over_as_many_passes() -> None:
    x = torch.full((2, 3), 0.5, dtype=torch.float64)
    goal = Untargeted(affine(4, 3)(x).argmax(1))
    assert PGD(steps=2, eot=3).run(affine(4, 3), x, goal, eps=0.1).votes == 3
    assert PGD(steps=2).run(affine(4, 3), x, goal, eps=0.1).votes == 1
    assert AutoAttack("rand", steps=2).run(affine(4, 3), x, goal, eps=0.1).votes == 20


def test_halves_are_rounded_towards_the_input() -> None:
    """As near as NumPy's own neighbours allow, and never further from x than what was wanted."""
    draw = np.random.default_rng(0)
    x = torch.from_numpy(
        np.concatenate([draw.normal(size=500), np.zeros(50), [6e-8, -6e-8]]).astype(np.float16)
    )
    wanted = x.double() + torch.from_numpy(draw.normal(scale=0.02, size=len(x)))
    found = towards(x, wanted)
    assert found.dtype == torch.float16
    nearest = wanted.to(torch.float16).numpy()
    neighbour = np.nextafter(nearest, x.numpy())
    beyond = np.abs(nearest.astype(float) - x.double().numpy()) > (wanted - x.double()).abs().numpy()
    assert 0 < beyond.sum() < len(x)
    assert np.array_equal(found.numpy(), np.where(beyond, neighbour, nearest))
    assert bool(((found.double() - x.double()).abs() <= (wanted - x.double()).abs()).all())
    brains = x.bfloat16()
    moved = towards(brains, brains.double() + 0.01)
    assert bool(((moved.double() - brains.double()).abs() <= 0.01).all())


def test_a_goal_that_is_none_and_classes_that_there_are_not() -> None:
    x = torch.rand(3, 4)
    with pytest.raises(ConfigError, match=r"(?s)a Tensor for a goal.*Untargeted"):
        PGD(steps=1).run(affine(3, 4), x, torch.zeros(3, dtype=torch.int64), eps=0.1)  # type: ignore[arg-type]
    y = torch.tensor([0, 1, 7])
    for goal in (Untargeted(y), Targeted(y)):
        with pytest.raises(DataError, match=r"class 7 in row 2, 3 outputs"):
            PGD(steps=1).run(affine(3, 4), x, goal, eps=0.1, batch=2)
