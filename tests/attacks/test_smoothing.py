"""Randomized smoothing: closed forms, scipy as an oracle, and coverage by simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from mycelia.attacks.defences import (
    ABSTAIN,
    Certificates,
    Smoothed,
    certified_radius,
    draws_needed,
    max_radius,
)
from mycelia.attacks.defences.certificates import Ints, Look, count_until, looks, lower_bound, top_two_p
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.worlds import Affine, Small, images

torch.set_num_threads(1)

SIGMA = 0.5


def half_space(offset: float = 0.0) -> Affine:
    """Class 1 where (3, −4)·x > offset: a boundary at distance |(3, −4)·x − offset| / 5."""
    weight = torch.tensor([[0.0, 0.0], [3.0, -4.0]], dtype=torch.float64)
    return Affine(weight, torch.tensor([0.0, -offset], dtype=torch.float64))


def at_distance(distances: list[float]) -> Tensor:
    """Points of class 1, so far from the boundary of `half_space`, that share nothing else."""
    along = torch.arange(len(distances), dtype=torch.float64)[:, None] * torch.tensor([0.8, 0.6])
    return torch.tensor(distances, dtype=torch.float64)[:, None] * torch.tensor([0.6, -0.8]) + along


# --- closed forms -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "radius"), [(100, 0.3751), (100_000, 0.9529)])
def test_radius_where_all_draws_agree(n: int, radius: float) -> None:
    expected = 0.25 * stats.norm.ppf(0.001 ** (1 / n))
    assert certified_radius(n, n, 0.25, 0.001) == pytest.approx(expected, rel=1e-9)
    assert max_radius(n, 0.25, 0.001) == pytest.approx(expected, rel=1e-9)
    assert expected == pytest.approx(radius, abs=5e-5)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 2.0])
def test_affine_radius_is_the_distance_whatever_sigma(sigma: float) -> None:
    """With p known (from very many draws), σ·Φ⁻¹(Φ(distance / σ)) is the distance."""
    n = 10**12
    for distance in (0.05, 0.3, 0.6):
        count = round(n * stats.norm.cdf(distance / sigma)) if distance < 4 * sigma else None
        if count is not None:
            found = certified_radius(count, n, sigma, 0.001)
            assert distance * (1 - 1e-4) - 1e-4 * sigma < found < distance


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5000), st.floats(0, 1), st.sampled_from([0.5, 0.05, 0.001, 1e-6]))
def test_lower_bound_is_scipys(n: int, share: float, alpha: float) -> None:
    k = round(share * n)
    expected = stats.binomtest(k, n, alternative="greater").proportion_ci(1 - alpha, "exact").low
    assert float(lower_bound(k, n, alpha)) == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert certified_radius(k, n, SIGMA, alpha) == pytest.approx(
        max(0.0, SIGMA * stats.norm.ppf(expected)), rel=1e-4, abs=1e-7
    )


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 400), st.integers(0, 400))
def test_two_sided_test_is_scipys(first: int, second: int) -> None:
    expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
    assert float(top_two_p(first, second)) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 3), st.sampled_from([0.1, 0.001]))
def test_draws_needed_is_the_smallest(radius: float, alpha: float) -> None:
    n = draws_needed(radius, 1.0, alpha)
    assert max_radius(n, 1.0, alpha) >= radius
    assert n == 1 or max_radius(n - 1, 1.0, alpha) < radius or max_radius(n - 1, 1.0, alpha) == 0


def test_numbers_out_of_range_are_refused() -> None:
    for call in (
        lambda: max_radius(0, 1.0, 0.1),
        lambda: max_radius(10, 0.0, 0.1),
        lambda: max_radius(10, 1.0, 1.0),
        lambda: certified_radius(11, 10, 1.0, 0.1),
        lambda: draws_needed(-1.0, 1.0, 0.1),
        lambda: draws_needed(50.0, 1.0, 0.1),
        lambda: Smoothed(half_space(), sigma=-1.0),
    ):
        with pytest.raises(ConfigError):
            call()


# --- coverage ---------------------------------------------------------------------------------------


def simulated(p: np.ndarray[Any, np.dtype[np.float64]], seed: int) -> Any:
    """What `count_until` draws, where class probabilities are known."""
    rng = np.random.default_rng(seed)

    def draw(rows: Ints, look: Look, size: int) -> Ints:
        del look
        return rng.binomial(size, p[rows])

    return draw


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("p", [0.6, 0.9, 0.99])
def test_coverage(p: float, adaptive: bool) -> None:
    """10,000 certificates: the bound is above the probability in at most alpha of them, at any look."""
    rows, alpha, n = 10_000, 0.02, 1000
    shares = np.full(rows, p)
    radius = SIGMA * float(stats.norm.ppf(p))  # the hardest one: it is exactly the true radius
    schedule = looks(n, alpha, adaptive=adaptive)
    assert sum(look.alpha for look in schedule) <= alpha * (1 + 1e-12)
    for radii in ((radius,), (0.0, radius, 2.0), ()):  # whatever makes rows stop
        found = count_until(simulated(shares, 1), rows, schedule, SIGMA, radii)
        wrong = int((found.lower > p).sum())
        assert wrong <= alpha * rows
        assert bool((found.agreed <= found.n).all())
        assert bool((found.n <= n).all())


def test_adaptive_needs_half_of_the_draws_for_equal_verdicts() -> None:
    """Rows that are not at the very edge of the radius get the verdict that all draws give."""
    n, alpha, radius = 10_000, 0.001, SIGMA  # certified from p = Φ(1) = 0.841 on
    p = np.repeat([0.1, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.9, 0.95, 0.99, 0.999, 1.0], 200)
    whole = count_until(simulated(p, 2), len(p), looks(n, alpha), SIGMA)
    early = count_until(simulated(p, 3), len(p), looks(n, alpha, adaptive=True), SIGMA, (radius,))
    share = stats.norm.cdf(1.0)
    np.testing.assert_array_equal(early.lower >= share, p > share)
    np.testing.assert_array_equal(whole.lower >= share, early.lower >= share)
    assert early.n.sum() <= 0.5 * whole.n.sum()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 10**6), st.booleans())
def test_looks_spend_alpha_and_end_with_all_draws(n: int, adaptive: bool) -> None:
    found = looks(n, 0.01, adaptive=adaptive)
    sizes = [look.n for look in found]
    assert sizes[-1] == n
    assert sizes == sorted(set(sizes))
    assert math.fsum(look.alpha for look in found) == pytest.approx(0.01)


# --- the smoothed model -----------------------------------------------------------------------------


def test_certificates_of_an_affine_model() -> None:
    """No radius is beyond the boundary, most are near it, and points on the wrong side get no class 1."""
    true = [0.1, 0.3, 0.5, 0.8, 1.0]
    found = Smoothed(half_space(), SIGMA).certify(at_distance(true), n0=200, n=5000, alpha=1e-4, rng=0)
    assert found.label.tolist() == [1] * 5
    for radius, distance in zip(found.radius.tolist(), true, strict=True):
        assert distance - 0.15 < radius <= distance  # five standard errors at the farthest
    assert found.draws.tolist() == [5200] * 5
    for count, radius in zip(found.count.tolist(), found.radius.tolist(), strict=True):
        assert radius == pytest.approx(certified_radius(count, 5000, SIGMA, 1e-4))


def test_a_hundred_thousand_draws_come_within_one_per_cent() -> None:
    distance, smoothed = 1.5 * SIGMA, Smoothed(half_space(), SIGMA)
    found = smoothed.certify(at_distance([distance]), n0=10, n=100_000, alpha=0.05, rng=1)
    assert 0.99 * distance < float(found.radius[0]) <= distance


def test_predict_abstains_at_the_boundary() -> None:
    smoothed = Smoothed(half_space(), SIGMA)
    assert smoothed.predict(at_distance([1.0, -1.0]), n=100, alpha=0.001, rng=0).tolist() == [1, 0]
    edge = smoothed.predict(at_distance([0.0] * 200), n=100, alpha=0.05, rng=0)
    wrong = int((edge != ABSTAIN).sum())
    assert wrong <= stats.binom.ppf(0.9999, 200, 0.05)
    assert smoothed.predict(at_distance([9.0]), n=1, alpha=0.001, rng=0).tolist() == [ABSTAIN]


def test_nothing_is_certified_at_the_boundary() -> None:
    found = Smoothed(half_space(), SIGMA).certify(at_distance([0.0] * 100), n0=20, n=200, alpha=0.01, rng=3)
    sure = found.label != ABSTAIN
    assert int(sure.sum()) <= stats.binom.ppf(0.9999, 100, 0.01)
    assert bool((found.radius[~sure] == 0).all())


def test_adaptive_certificates_stop_early() -> None:
    true = [0.1, 0.6, 0.9]
    smoothed = Smoothed(half_space(), SIGMA)
    found = smoothed.certify(at_distance(true), n0=20, n=4000, alpha=0.001, rng=0, radius=0.4, adaptive=True)
    assert (found.radius >= 0.4).tolist() == [False, True, True]
    assert bool((found.radius <= torch.tensor(true)).all())
    assert int(found.draws.sum()) < 0.5 * 3 * 4020
    with pytest.raises(ConfigError, match="without a radius"):
        smoothed.certify(at_distance(true), 20, 400, 0.01, 0, adaptive=True)


def test_noise_is_fresh_normal_and_not_clipped() -> None:
    seen: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return torch.tensor([[1.0, 0.0]]).expand(len(x), 2)

    x = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    Smoothed(model, SIGMA).certify(x, n0=300, n=2000, alpha=0.01, rng=5)
    points = torch.cat(seen)
    assert len(points) == 2 * 2300
    assert float(points.min()) < -SIGMA
    assert float(points.max()) > 1 + SIGMA
    values = points.flatten()
    assert len(values.unique()) == len(values)  # no draw comes twice, for no row, and none is used again
    for part in seen:
        noise = (part.view(2, -1, 2) - x[:, None]).flatten().numpy() / SIGMA
        assert stats.kstest(noise, "norm").pvalue > 1e-3


def test_rows_stand_for_themselves_and_seeds_say_all() -> None:
    x = images(5)
    model = Small().double()
    smoothed, before = Smoothed(model, 0.3, batch=64), torch.get_rng_state()
    whole = smoothed.certify(x, n0=20, n=150, alpha=0.05, rng=2)
    again = Smoothed(model, 0.3, batch=7).certify(x, n0=20, n=150, alpha=0.05, rng=2)
    alone = [smoothed.certify(x[k : k + 1], n0=20, n=150, alpha=0.05, rng=2) for k in (4, 0)]
    other = smoothed.certify(x, n0=20, n=150, alpha=0.05, rng=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(whole.count, again.count)
    assert [int(each.count[0]) for each in alone] == [int(whole.count[4]), int(whole.count[0])]
    assert not torch.equal(whole.count, other.count)
    assert torch.equal(smoothed.predict(x, 60, 0.05, 2)[2:3], smoothed.predict(x[2:3], 60, 0.05, 2))


def test_the_model_is_untouched_and_in_evaluation_mode() -> None:
    model = Small().double().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    smoothed = Smoothed(model, 0.3)
    labels = smoothed.predict(images(3), 40, 0.05, 0)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(labels, Smoothed(Small().double().eval(), 0.3).predict(images(3), 40, 0.05, 0))


def test_models_of_labels_and_of_many_classes() -> None:
    def labels(x: Tensor) -> Tensor:
        return torch.full((len(x),), 99)

    from mycelia.attacks import as_model

    found = Smoothed(as_model(labels, "labels"), 1.0).certify(at_distance([1.0]), 5, 100, 0.01, 0)
    assert (found.label.tolist(), found.count.tolist()) == ([99], [100])


def test_a_row_that_is_not_finite_gets_nothing() -> None:
    x = at_distance([5.0, 5.0])
    x[0, 0] = math.nan
    smoothed = Smoothed(half_space(), 0.1)
    found = smoothed.certify(x, n0=5, n=50, alpha=0.01, rng=0)
    assert found.label.tolist() == [ABSTAIN, 1]
    assert smoothed.predict(x, 50, 0.01, 0).tolist() == [ABSTAIN, 1]
    empty = smoothed.certify(x[:0], n0=5, n=50, alpha=0.01, rng=0, radius=0.1)
    assert len(empty) == 0
    assert empty.accuracy(torch.zeros(0, dtype=torch.int64))[0].accuracy is None


# --- the report -------------------------------------------------------------------------------------


def certificates() -> Certificates:
    return Certificates(
        label=torch.tensor([0, 1, ABSTAIN, 2]),
        radius=torch.tensor([0.5, 0.2, 0.0, 0.9], dtype=torch.float64),
        lower=torch.tensor([0.9, 0.7, 0.4, 0.99], dtype=torch.float64),
        count=torch.tensor([99, 80, 50, 100]),
        draws=torch.tensor([110, 110, 60, 110]),
        sigma=0.5, n0=10, n=100, alpha=0.01, adaptive=False, asked=(0.2, 0.5), seed=0,
    )  # fmt: skip


def test_certified_accuracy_counts_abstentions_as_wrong() -> None:
    found = certificates()
    y = torch.tensor([0, 1, 2, 0])
    lines = found.accuracy(y)
    assert [(line.radius, line.correct, line.accuracy) for line in lines] == [(0.2, 2, 0.5), (0.5, 1, 0.25)]
    assert {(line.abstained, line.n, line.draws, line.alpha) for line in lines} == {(1, 4, 390, 0.01)}
    said = lines[0].to_json()
    low, high = stats.binomtest(2, 4).proportion_ci(0.95, "exact")
    assert said["accuracy_ci95"] == pytest.approx([low, high])
    assert said.keys() >= {"radius", "accuracy", "abstained", "abstained_ci95", "n", "alpha", "draws"}
    with pytest.raises(DataError):
        found.accuracy(y[:3])
