"""Skellam noise against the exact law, and its divergence bound against exact divergences."""

import math

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

from mycelia.engine.errors import ConfigError
from mycelia.privacy.noise import NoiseSource, Skellam
from mycelia.privacy.noise.skellam import _log_poisson

SOURCE = NoiseSource.seeded(17)


def check_law(drawn: npt.NDArray[np.int64], variance: float) -> None:
    reach = int(12 * math.sqrt(variance)) + 12
    support = np.arange(-reach, reach + 1)
    probability = stats.skellam.pmf(support, variance / 2, variance / 2)
    counts = np.bincount(drawn + reach, minlength=len(support))
    likely = probability * len(drawn) > 20
    seen = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(probability[likely], 1 - probability[likely].sum()) * len(drawn)
    assert stats.chisquare(seen, expected).pvalue > 1e-3


@pytest.mark.parametrize("std", [0.3, 1.0, 4.47, 4.48, 12.0, 60.0])  # 10 = 4.472² / 2 changes the method
def test_law(std: float) -> None:
    drawn = Skellam().sample(100_000, std, SOURCE, "noise", 0, str(std))
    assert drawn.dtype is torch.int64
    check_law(drawn.numpy(), std * std)


@pytest.mark.parametrize("std", [200.0, 2.0**20])
def test_large_std_is_normal(std: float) -> None:
    drawn = Skellam().sample(100_000, std, SOURCE, "noise", 1)
    spread = np.random.default_rng(0).uniform(-0.5, 0.5, len(drawn))  # a continuous law for the test
    assert stats.kstest((drawn.numpy() + spread) / std, "norm").pvalue > 1e-3


@pytest.mark.parametrize("mean", [10.0, 500.0, 9999.0, 10_001.0, 1e6, 2.0**39])
def test_log_probabilities(mean: float) -> None:
    root = math.sqrt(mean)
    counts = np.array([math.floor(mean + times * root) for times in (-3, -1, 0, 1.5, 6)], np.float64)
    found = _log_poisson(counts, mean)
    with mpmath.workdps(50):
        for count, value in zip(counts, found, strict=True):
            exact = count * mpmath.log(mean) - mean - mpmath.loggamma(mpmath.mpf(count) + 1)
            assert value == pytest.approx(float(exact), abs=2e-9)


def test_shares_add_to_the_whole() -> None:
    shares = [Skellam().sample(60_000, math.sqrt(9 / 5), SOURCE, "noise", 0, f"client {k}") for k in range(5)]
    check_law(sum(shares, torch.zeros(60_000, dtype=torch.int64)).numpy(), 9.0)


def exact_divergence(order: int, variance: float, move: int) -> float:
    """Rényi divergence of the law and its shift, by summing over the integers."""
    reach = int(40 * math.sqrt(variance)) + 10 * order * move
    support = np.arange(-reach, reach + 1)
    log = stats.skellam.logpmf(support, variance / 2, variance / 2)
    moved = stats.skellam.logpmf(support - move, variance / 2, variance / 2)
    fine = np.isfinite(log) & np.isfinite(moved)
    terms = order * moved[fine] - (order - 1) * log[fine]
    top = terms.max()
    return float((top + math.log(np.exp(terms - top).sum())) / (order - 1))


@pytest.mark.parametrize(("variance", "move"), [(25.0, 1), (100.0, 3), (400.0, 10)])
def test_divergence_bound(variance: float, move: int) -> None:
    for order in (2, 3, 8):
        (bound,) = Skellam.rdp((order,), math.sqrt(variance), l1=move, l2=move)
        exact = exact_divergence(order, variance, move)
        gaussian = order * move**2 / (2 * variance)
        assert exact <= bound <= 1.15 * exact
        assert bound >= gaussian


def test_divergence_bound_by_the_formula() -> None:
    # 4 * 9/200 + min((7 * 9 + 6 * 5) / 40000, 15/200)
    assert Skellam.rdp((4,), 10.0, l1=5.0, l2=3.0) == pytest.approx([0.18 + 93 / 40_000])
    assert Skellam.rdp((2,), 0.5, l1=1.0, l2=1.0) == pytest.approx([4 + 6])  # the second term
    assert Skellam.rdp((1.5, 2, 2.5, 3), 10.0, 5.0, 3.0) == Skellam.rdp((2, 2, 3, 3), 10.0, 5.0, 3.0)
    assert Skellam.rdp((2, 3), 0.0, 1.0, 1.0) == (math.inf, math.inf)
    assert Skellam.rdp((2,), 0.0, 0.0, 0.0) == (0.0,)
    assert Skellam.l1_bound(3.0, 4) == 6.0
    assert Skellam.l1_bound(3.0, 10_000) == 9.0


def test_add() -> None:
    total = torch.arange(6).view(2, 3)
    noise = Skellam().sample((2, 3), 5.0, SOURCE, "noise", 0, "w")
    assert torch.equal(Skellam().add(total, 5.0, SOURCE, "noise", 0, "w"), total + noise)
    assert torch.equal(Skellam().add(total, 0.0, SOURCE, "noise", 0, "w"), total)
    with pytest.raises(ConfigError, match="int64"):
        Skellam().add(torch.zeros(2), 5.0, SOURCE, "noise", 0, "w")


@pytest.mark.parametrize("std", [-1.0, math.inf, math.nan, 2.0**21])
def test_std_out_of_range(std: float) -> None:
    with pytest.raises(ConfigError, match="std is"):
        Skellam().sample(3, std, SOURCE, "noise", 0)


def test_orders_out_of_range() -> None:
    with pytest.raises(ConfigError, match="above 1"):
        Skellam.rdp((1.0,), 1.0, 1.0, 1.0)
