"""What a secret draw takes from a release: against dp-accounting, which knows it for Gaussian noise."""

from __future__ import annotations

import math

import pytest
from dp_accounting.rdp.rdp_privacy_accountant import _compute_rdp_sample_wor_gaussian
from hypothesis import given
from hypothesis import strategies as st

from mycelia.engine.errors import ConfigError
from mycelia.privacy.subsampling import without_replacement


def gaussian(z: float, highest: int) -> dict[int, float]:
    """Mironov 2017, proposition 7."""
    return {order: order / (2 * z**2) for order in range(2, highest + 1)}


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("z", [0.5, 1.0, 4.0])
def test_dp_accounting_has_the_same_for_gaussian_noise(rate: float, z: float) -> None:
    """Its bound up to order 256 is tighter from order 3 on, and the same theorem beyond."""
    divergences = gaussian(z, 300)
    found = without_replacement(divergences, rate)
    for order in (2, 257, 300):
        theirs = _compute_rdp_sample_wor_gaussian(rate, z, [order])[0]
        assert found[order] == pytest.approx(min(theirs, divergences[order]), rel=1e-7)
    for order in (3, 4, 8, 16, 64):
        theirs = _compute_rdp_sample_wor_gaussian(rate, z, [order])[0]
        assert found[order] >= min(theirs, divergences[order]) * (1 - 1e-9)


def by_hand(divergences: dict[int, float], rate: float, alpha: int) -> float:
    """The theorem as it is written, term by term."""
    second = divergences[2]
    total = 1 + rate**2 * math.comb(alpha, 2) * min(4 * math.expm1(second), 2 * math.exp(second))
    for j in range(3, alpha + 1):
        total += 2 * rate**j * math.comb(alpha, j) * math.exp((j - 1) * divergences[j])
    return math.log(total) / (alpha - 1)


@given(st.floats(0.001, 0.99), st.floats(0.6, 8.0), st.floats(0.0, 0.2))
def test_it_is_the_theorem_for_any_divergences(rate: float, z: float, more: float) -> None:
    divergences = {order: value + more for order, value in gaussian(z, 12).items()}
    found = without_replacement(divergences, rate)
    for alpha, value in divergences.items():
        expected = min(value, by_hand(divergences, rate, alpha))
        assert found[alpha] == pytest.approx(expected, rel=1e-8)


def test_degenerate_draws() -> None:
    divergences = gaussian(1.0, 20)
    assert without_replacement(divergences, 1.0) == divergences
    nothing = without_replacement(dict.fromkeys(range(2, 20), 0.0), 0.5)
    assert nothing[2] == 0
    assert all(value == 0 for value in nothing.values())
    assert without_replacement(gaussian(1e-3, 30), 0.5)[30] <= gaussian(1e-3, 30)[30]


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_rates_are_checked(rate: float) -> None:
    with pytest.raises(ConfigError):
        without_replacement(gaussian(1.0, 4), rate)


def test_orders_have_no_gap() -> None:
    with pytest.raises(ConfigError):
        without_replacement({2: 1.0, 4: 2.0}, 0.1)
    with pytest.raises(ConfigError):
        without_replacement({}, 0.1)
    with pytest.raises(ConfigError):
        without_replacement({2: math.nan}, 0.1)
