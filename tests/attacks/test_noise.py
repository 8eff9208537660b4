"""Noise against the closed form of its success: the share of a ball beyond a plane."""

from __future__ import annotations

import math

import pytest
import torch

from mycelia.attacks import RandomNoise, Status, Untargeted
from mycelia.attacks.norms import Norm, norm
from mycelia.engine.errors import ConfigError
from tests.attacks.worlds import EPS, Affine, affine, images, small

N = 4000


@pytest.mark.parametrize(
    ("p", "beyond"),
    [
        ("linf", lambda t: (1 - t) / 2),  # of the square, beyond x₁ = t
        ("l2", lambda t: (math.acos(t) - t * math.sqrt(1 - t * t)) / math.pi),  # of the disc
        ("l1", lambda t: (1 - t) ** 2 / 2),  # of the diamond
        (
            "l0",
            lambda t: 0.5 * (0.5 - t) / 1.0,
        ),  # coordinate 1 of 2 is chosen, its value uniform over the box
    ],
)
@pytest.mark.parametrize("t", [0.0, 0.2, 0.4])
def test_one_draw_succeeds_as_often_as_the_ball_is_beyond_the_boundary(p: Norm, beyond, t: float) -> None:  # type: ignore[no-untyped-def]
    """Two coordinates, boundary at x₁ = t; within four standard errors."""
    model = Affine(
        torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64),
        torch.tensor([0.0, -t - 1e-12], dtype=torch.float64),
    )
    x = torch.zeros(N, 2, dtype=torch.float64)
    bounds = (-0.5, 0.5) if p == "l0" else (-2.0, 2.0)
    result = RandomNoise(norm=p, draws=1).run(
        model,
        x,
        Untargeted(torch.zeros(N, dtype=torch.int64)),
        eps=1.0,
        rng=4,
        bounds=bounds,
        ids=torch.arange(N),
        batch=N,
    )
    expected = beyond(t)
    share = result.counts.broken / N
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / N) + 1e-9


@pytest.mark.parametrize("p", ["linf", "l2", "l1", "l0"])
def test_rows_leave_at_their_first_success(p: Norm) -> None:
    """The number of draws is geometric: success after k of them with probability 1 − (1 − q)^k."""
    x = images(40)
    y = small()(x).argmax(1)
    few, many = (
        RandomNoise(norm=p, draws=draws).run(small(), x, Untargeted(y), eps=2 * EPS[p], rng=0)
        for draws in (20, 60)
    )
    broken = few.is_(Status.BROKEN)
    assert bool(many.is_(Status.BROKEN)[broken].all())
    assert torch.equal(many.x_adv[broken], few.x_adv[broken])
    assert bool((few.queries[broken] == few.best_step[broken] + 2).all())
    assert bool((few.queries[few.is_(Status.HELD)] == 21).all())
    assert bool((few.gradients == 0).all())


def test_l0_changes_so_many_coordinates_and_needs_bounds() -> None:
    x = images(20)
    y = torch.zeros(20, dtype=torch.int64)
    result = RandomNoise(norm="l0", draws=1).run(
        affine(4, 36), x, Untargeted(affine(4, 36)(x).argmax(1)), eps=3.7, rng=0
    )
    assert bool((norm(result.x_adv - x, "l0") == 3).all())
    with pytest.raises(ConfigError, match="l0 noise without bounds"):
        RandomNoise(norm="l0").run(affine(4, 36), x, Untargeted(y), eps=3, bounds=(-math.inf, math.inf))
    with pytest.raises(ConfigError, match="draws"):
        RandomNoise(draws=0)


def test_more_coordinates_than_there_are() -> None:
    x = images(3)
    result = RandomNoise(norm="l0", draws=2).run(
        small(), x, Untargeted(small()(x).argmax(1)), eps=1000.0, rng=0
    )
    assert result.counts.failed == 0
