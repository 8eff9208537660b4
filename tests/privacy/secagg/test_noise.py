"""Shares of noise against exact laws, and what is accounted for them against exact divergences."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import mpmath
import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import logsumexp

from mycelia.engine.errors import ConfigError
from mycelia.engine.rng import generator
from mycelia.privacy.accounting import compose, spent
from mycelia.privacy.events import Event
from mycelia.privacy.noise import Skellam
from mycelia.privacy.secagg.canonical import Reason, SecureSumError
from mycelia.privacy.secagg.encoding import Encoding
from mycelia.privacy.secagg.noise import TAIL, NoiseShare, rounded_norm
from mycelia.privacy.secagg.round_config import Mechanism, NoiseBlock
from tests.privacy.secagg.encodings import SOURCE, Array, Bits, add, codes_of, encode, encoding, told

SKELLAM, GAUSSIAN = Mechanism.SKELLAM, Mechanism.DISCRETE_GAUSSIAN


def noisy(size: int, variance: int, *, mechanism: Mechanism = SKELLAM, **changes: Any) -> Encoding:
    block = NoiseBlock(mechanism, variance, changes.pop("corrupt", 0), changes.pop("beta_ppb", 606_530_660))
    return encoding(size, changes.pop("n", 6), noise=block, **{"l2_steps": 500, **changes})


@pytest.mark.parametrize("mechanism", [SKELLAM, GAUSSIAN])
@pytest.mark.parametrize(("variance", "n_min", "corrupt"), [(50, 4, 1), (4, 3, 0), (10**6, 5, 4), (7, 4, 2)])
def test_those_who_surely_stay_add_what_was_accounted(
    mechanism: Mechanism, variance: int, n_min: int, corrupt: int
) -> None:
    form = noisy(40_000, variance, mechanism=mechanism, n_min=n_min, corrupt=corrupt, n=12)
    assert form.noise is not None
    assert form.noise.parties == n_min - corrupt  # not the cohort of twelve
    if mechanism is SKELLAM:
        assert 2 * Fraction(form.noise.spread**2 / 2) * (n_min - corrupt) >= variance
    vector = np.zeros(form.size, int)
    residues = [encode(form, vector, client=i) for i in range(1, n_min - corrupt + 1)]
    total = codes_of(form, add(form, residues)).astype(float)
    found = float(total.var())
    # Twice the variance of a sample variance of so many nearly normal numbers, four times.
    error = 4 * math.sqrt(2 / len(total)) * variance
    assert variance - error < found < variance + error
    assert abs(total.mean()) < 4 * math.sqrt(variance / len(total))


@cache
def exact_law(mechanism: Mechanism, spread: float) -> list[Any]:
    """P(noise = k) for k = 0, 1, … with many digits."""
    with mpmath.workdps(30):
        variance = mpmath.mpf(spread) ** 2
        reach = range(int(16 * spread) + 60)
        if mechanism is SKELLAM:
            return [mpmath.exp(-variance) * mpmath.besseli(k, variance) for k in reach]
        weights = [mpmath.exp(-mpmath.mpf(k * k) / (2 * variance)) for k in reach]
        whole = 2 * mpmath.fsum(weights) - 1
        return [weight / whole for weight in weights]


@pytest.mark.parametrize(
    ("mechanism", "variance", "parties"),
    [(GAUSSIAN, 1, 5), (SKELLAM, 2**42, 3), (SKELLAM, 0, 3), (SKELLAM, 5, 0), (SKELLAM, 5, -1)],
)
def test_shares_that_cannot_be_drawn(mechanism: Mechanism, variance: int, parties: int) -> None:
    with pytest.raises(SecureSumError) as error:
        NoiseShare(mechanism, variance, parties)
    told(error, Reason.CONFIG)


def test_the_widest_and_the_narrowest_share() -> None:
    assert NoiseShare(GAUSSIAN, 1, 4).share == Fraction(1, 4)
    assert NoiseShare(SKELLAM, 3 * 2**40, 3).spread == 2.0**20
    assert NoiseShare(SKELLAM, 1, 2**15).spread == pytest.approx(2**-7.5)


@pytest.mark.parametrize("mechanism", [SKELLAM, GAUSSIAN])
@pytest.mark.parametrize("variance", [1, 6, 500])
@pytest.mark.parametrize("draws", [100_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_the_law_of_a_share(mechanism: Mechanism, variance: int, draws: int) -> None:
    share = NoiseShare(mechanism, variance, 3)
    law = np.array(exact_law(mechanism, share.spread), float)
    law = np.concatenate([law[:0:-1], law])
    drawn = share.draw(draws, SOURCE, 0, "law")
    counts = np.bincount(drawn + len(law) // 2, minlength=len(law))
    likely = law * draws > 20
    seen = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(law[likely], 1 - law[likely].sum()) * draws
    assert stats.chisquare(seen, expected).pvalue > 1e-3


@pytest.mark.parametrize("variance", [1, 2, 3, 5, 9])
def test_a_small_discrete_gaussian_has_the_variance_itself(variance: int) -> None:
    share = NoiseShare(GAUSSIAN, variance, 3)
    law = exact_law(GAUSSIAN, share.spread)
    with mpmath.workdps(30):
        exact = 2 * mpmath.fsum(k * k * p for k, p in enumerate(law))
        assert mpmath.mpf(variance) / 3 <= exact <= mpmath.mpf(variance) / 3 * mpmath.mpf("1.01")


@pytest.mark.parametrize("mechanism", [SKELLAM, GAUSSIAN])
@pytest.mark.parametrize("variance", [1, 3, 40, 700])
@pytest.mark.parametrize("count", [3, 10**5, 10**11])
def test_the_tail_is_the_least(mechanism: Mechanism, variance: int, count: int) -> None:
    share = NoiseShare(mechanism, variance, 3)
    law = exact_law(mechanism, share.spread)
    tail, probability = share.tail(count)
    assert probability <= TAIL
    assert float(2 * count * mpmath.fsum(law[tail + 1 :])) == pytest.approx(probability, rel=1e-6)
    assert 2 * count * mpmath.fsum(law[tail:]) > TAIL


@pytest.mark.parametrize("variance", [10**8, 10**11])
@pytest.mark.parametrize("mechanism", [SKELLAM, GAUSSIAN])
def test_the_tail_of_wide_noise(mechanism: Mechanism, variance: int) -> None:
    """Far above a step both laws are normal; a cell is a 256th of the spread."""
    share = NoiseShare(mechanism, variance, 1)
    tail, probability = share.tail(10**9)
    exact = stats.norm.isf(TAIL / 1e9 / 2)
    assert exact - 1e-3 <= tail / share.spread <= exact + 1 / 256 + 1e-3
    assert TAIL / 1.1 < probability <= TAIL


def test_the_tail_counts_for_the_ring() -> None:
    form = noisy(1000, 3000, bits=40)
    tail, probability = NoiseShare(SKELLAM, 3000, 3).tail(6 * 1000)
    assert (form.proof.tail, form.proof.probability) == (tail, probability)
    assert form.proof.needed_bits == 1 + (6 * (1000 + 1 + tail)).bit_length()
    assert encoding(1000).proof.probability == 0
    top = form.decode(add(form, [encode(form, np.full(1000, 0.06), client=i) for i in range(1, 4)]), 3)
    assert np.abs(top.total).max() <= 3 * (1000 + tail)
    with pytest.raises(SecureSumError) as error:
        replace(form, config=replace(form.config, bits=form.proof.needed_bits - 1))
    assert told(error, Reason.OVERFLOW).need == form.proof.needed_bits


def test_no_two_noises_are_the_same() -> None:
    size = 600_000  # three blocks
    form = noisy(size, 3000)
    zeros = np.zeros(size, int)
    again = replace(form, config=replace(form.config, attempt=1))
    drawn = [codes_of(form, encode(form, zeros, client=client)) for client in (1, 2, 11)]
    drawn.append(codes_of(again, encode(again, zeros, client=1)))
    parts = [each[start : start + 2**18] for each in drawn for start in (0, 2**18)]
    for number, one in enumerate(parts):
        for other in parts[:number]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(2**18)
    assert np.array_equal(drawn[0], codes_of(form, encode(form, zeros, client=1)))


def test_noise_needs_its_secret_and_equal_weights() -> None:
    form = noisy(5, 3000)
    with pytest.raises(ConfigError, match="source of noise"):
        form.encode(np.zeros(5), client=1, rounding=generator(0, "rounding"))
    with pytest.raises(SecureSumError) as error:
        encode(form, np.zeros(5), 0)
    told(error, Reason.INVALID_INPUT)


@settings(deadline=None)
@given(st.integers(1, 10**9), st.integers(1, 2**30), st.integers(0, 10**9 - 1))
def test_the_bound_of_rounded_norms(steps: int, size: int, beta_ppb: int) -> None:
    with mpmath.workdps(40):
        root = mpmath.sqrt(size)
        exact = (steps + root) ** 2
        if beta_ppb:
            factor = mpmath.sqrt(2 * mpmath.log(mpmath.mpf(10**9) / beta_ppb))
            exact = min(exact, steps**2 + mpmath.mpf(size) / 4 + factor * (steps + root / 2))
        assert abs(rounded_norm(steps, size, beta_ppb) - exact) <= 1 + exact * 1e-15
    assert steps**2 < rounded_norm(steps, size, beta_ppb) <= exact + exact * 1e-15


def test_rounding_is_drawn_again_until_the_norm_is_kept() -> None:
    """All bits set round every positive number up: the norm would be sqrt(10000) steps instead of 1."""
    vector = np.full(10_000, 1 / 256 / 100)
    form = noisy(10_000, 3, l2_steps=1, mechanism=GAUSSIAN)
    assert form.norm_limit == rounded_norm(1, 10_000, 606_530_660) < 10_000
    quiet = encoding(10_000, l2_steps=1)
    for failures in (0, 3, 64, 65, 200):
        bits = Bits(*[2**64 - 1] * failures)
        rounding = np.random.Generator(bits)
        found = form.encode(vector, client=1, rounding=rounding, noise=SOURCE)
        assert bits.asked == min(failures + 1, 65)  # a first draw and at most 64 more
        noise = codes_of(form, encode(form, np.zeros(10_000, int)))
        assert not (codes_of(form, found) - noise).any()  # zero bits, and rounding towards zero, give zeros
    loud = quiet.encode(vector, client=1, rounding=np.random.Generator(Bits(2**64 - 1)))
    assert codes_of(quiet, loud).all()  # without noise there is nothing to keep to


@pytest.mark.parametrize("beta_ppb", [10**6, 606_530_660, 10**9 - 1])
def test_codes_keep_to_the_accounted_norm(beta_ppb: int) -> None:
    rng = np.random.default_rng(6)
    for size in (1, 7, 500, 20_000):
        form = noisy(size, 3, l2_steps=20, beta_ppb=beta_ppb, mechanism=GAUSSIAN)
        noise = codes_of(form, encode(form, np.zeros(size, int)))
        for _ in range(5):
            codes = codes_of(form, encode(form, rng.normal(0, 10, size))) - noise
            assert int((codes**2).sum()) <= form.norm_limit


def test_without_a_clip_the_coordinates_bound_the_norm() -> None:
    form = noisy(5, 3000, l2_steps=0)
    assert form.norm_limit == 5 * 1000**2
    assert noisy(5, 3000, l2_steps=10**6).norm_limit == 5 * 1000**2
    assert codes_of(form, encode(form, np.full(5, 99.0))).min() > 500


def exact_divergence(law: Array, order: float, move: int) -> float:
    """Of a law on the integers, given by its logarithms, against itself moved."""
    return float(logsumexp(order * law[move:] + (1 - order) * law[:-move])) / (order - 1)


@pytest.mark.parametrize("variance", [3, 6, 12])
@pytest.mark.parametrize("honest", [3, 5])
def test_sums_of_discrete_gaussians_are_as_private_as_said(variance: int, honest: int) -> None:
    share = NoiseShare(GAUSSIAN, variance, 3)
    support = np.arange(-60, 61)
    one = np.exp(-((support / share.spread) ** 2) / 2)
    law = one = one / one.sum()
    for _ in range(honest - 1):
        law = np.convolve(law, one)
    law = np.log(law[law > 1e-250])
    orders = (1.5, 2.0, 3.0, 6.0)
    for move in (1, 2):
        bounds = share.rdp(orders, float(move), 1, honest)
        for order, bound in zip(orders, bounds, strict=True):
            exact = exact_divergence(law, order, move)
            assert exact <= bound
            if variance == 12:  # four steps² each: a Gaussian but for the rounding of the arithmetic
                assert bound <= order * move**2 / (2 * honest * variance / 3) * 1.001


def test_the_bound_of_the_paper() -> None:
    """Theorem 1 and proposition 14, written out with many digits."""
    share, norm, size, honest = NoiseShare(GAUSSIAN, 10, 4), 3.0, 50, 6
    with mpmath.workdps(30):
        local = mpmath.mpf(10) / 4
        tau = 10 * mpmath.fsum(mpmath.exp(-2 * mpmath.pi**2 * local * k / (k + 1)) for k in range(1, honest))
        total = mpmath.sqrt(local * honest)
        two, one = norm / total, min(mpmath.sqrt(size) * norm, norm**2) / total
        for order, found in zip(
            (1.25, 2.0, 40.0), share.rdp((1.25, 2.0, 40.0), norm, size, honest), strict=True
        ):
            expected = min(
                order / 2 * two**2 + tau * size,
                order / 2 * (two**2 + 2 * one * tau + tau**2 * size),
                order / 2 * (two + mpmath.sqrt(size) * tau) ** 2,
            )
            assert found == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("mechanism", [SKELLAM, GAUSSIAN])
def test_epsilon_is_that_of_a_gaussian_when_noise_is_wide(mechanism: Mechanism) -> None:
    form = noisy(1000, (4 * 2**14) ** 2, mechanism=mechanism, l2_steps=2**14, bits=40, value_bound=2**14)
    orders = tuple(float(order) for order in range(2, 65))
    curve = form.rdp(orders, 3)
    event = Event("full", 1.0, 0.0, "zero-out", unit="client", mechanism="curve", orders=orders, values=curve)
    found = spent(compose([event]), 1e-6)
    accountant = rdp.RdpAccountant(orders)
    sensitivity = math.sqrt(form.norm_limit)
    accountant.compose(dp_event.GaussianDpEvent(4 * 2**14 / sensitivity))
    expected = accountant.get_epsilon(1e-6)
    assert expected <= found * (1 + 1e-9)
    assert found <= expected * 1.001


def test_survivors_beyond_the_least_are_credited() -> None:
    form = noisy(100, 3000, corrupt=1)
    least, more = form.rdp((2.0, 8.0), 3), form.rdp((2.0, 8.0), 6)
    assert all(high > low for high, low in zip(least, more, strict=True))
    norm = math.nextafter(math.sqrt(form.norm_limit), math.inf)
    total = math.sqrt(3000 / 2 * 5)
    want = Skellam.rdp((2.0, 8.0), total, Skellam.l1_bound(norm, 100), norm)
    assert more == pytest.approx(want, rel=1e-12)
    assert all(found >= exact for found, exact in zip(more, want, strict=True))
    with pytest.raises(ConfigError, match="planned"):
        form.rdp((2.0,), 2)
    with pytest.raises(ConfigError, match="above 1"):
        noisy(100, 3000, mechanism=GAUSSIAN).rdp((1.0,), 3)
    assert encoding(5).rdp((2.0,), 3) == (math.inf,)
