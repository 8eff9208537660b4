"""ε against published answers, closed forms and dp-accounting's own accountants."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm

from mycelia.engine.errors import ConfigError
from mycelia.privacy.accounting import Statement, compose, epsilon, state
from mycelia.privacy.events import Event
from mycelia.privacy.sampling import (
    CyclicPoisson,
    FixedSize,
    FullBatch,
    MinSep,
    Poisson,
    Sampler,
    ShuffledEpochs,
    TruncatedPoisson,
)
from mycelia.privacy.schedules import ExpDecay, parse

# q, z, T, δ, ε by privacy loss distributions, ε by RDP.
ANSWERS = [
    (0.04, 1.5, 2250, 1e-5, 6.7688, 7.3291),
    (150 / 60000, 1.3, 6000, 1e-5, 0.6401, 0.72422),
    (0.01, 0.7, 120, 1e-5, 2.4612, 3.2393),
    (64 / 10000, 1.0, 782, 1e-6, 1.1987, 1.6164),
    (256 / 60000, 1.1, 14062, 1e-5, 2.3816, 2.5966),
    (256 / 60000, 1.3, 3515, 1e-5, 0.8644, 0.9544),
    (0.1, 3.0, 512, 1e-6, 3.7697, 4.0510),
    (100 / 342477, 0.5, 2000, 1e-6, 2.7220, 3.982),
    (1.0, 10.0, 100, 1e-5, 4.37718, 4.7285),
    (0.05, 1.5, 100, 1e-6, 1.9437, None),
    (0.001, 1.5, 20000, 1e-6, 0.4269, None),
]
EXTREMES = list(
    product(
        (0.0, 1e-12, 1e-6, 1e-3, 0.3, 1 - 1e-9, 1.0),
        (0.0, 1e-3, 0.3, 1.0, 30.0, 1e3),
        (0, 1, 1000, 10**7),
        (1e-15, 1e-9, 1e-5, 0.999),
    )
)


def within(found: float, tight: float) -> bool:
    return tight * (1 - 5e-4) <= found <= tight + max(0.005 * tight, 0.001)


@pytest.mark.parametrize(("q", "z", "steps", "delta", "tight", "rdp"), ANSWERS)
def test_known_answers(q: float, z: float, steps: int, delta: float, tight: float, rdp: float | None) -> None:
    statement = epsilon(Poisson(q), z, steps, delta)
    assert within(statement.epsilon, tight)
    assert statement.epsilon_rdp is not None
    assert statement.accountant == ("gaussian" if q == 1 else "pld")
    if rdp is not None:
        assert within(statement.epsilon_rdp, rdp)
        assert epsilon(Poisson(q), z, steps, delta, accountant="rdp").epsilon == statement.epsilon_rdp


def test_rdp_orders() -> None:
    for row, order in ((0, 3.9), (1, 19), (4, 8.1)):
        q, z, steps, delta, *_ = ANSWERS[row]
        assert epsilon(Poisson(q), z, steps, delta).rdp_order == pytest.approx(order)


def test_rdp_curve() -> None:
    statement = epsilon(Poisson(0.01), 2.5, 50, 1e-5)
    expected = [6.70580e-4, 1.08549e-3, 2.18076e-3, 2.38460e-2, 167.416]
    np.testing.assert_allclose(statement.rdp([1.5, 2.5, 5, 50, 100]), expected, rtol=1e-5)


def test_mixed_history_by_integer_orders() -> None:
    events = [*Poisson(1e-5).events(1.0, 10), *Poisson(1e-4).events(3.0, 4, first_step=10)]
    orders = list(range(2, 33))
    found = dp.rdp.compute_epsilon(orders, state(events, 1e-5).rdp(orders), 1e-5)
    assert found[0] == pytest.approx(0.33634, abs=5e-6)
    assert found[1] == 23


def test_one_gaussian() -> None:
    statement = epsilon(FullBatch(), 1.0, 1, 1e-5)
    assert statement.delta(1.0) == pytest.approx(0.126937, abs=5e-7)
    assert statement.delta(statement.epsilon) == pytest.approx(1e-5, rel=1e-6)


def test_gaussian_equals_the_analytic_formula() -> None:
    for z, steps, delta in ((0.3, 7, 1e-6), (5.0, 1000, 1e-9), (40.0, 3, 0.1)):
        exact = dp.get_epsilon_gaussian(z / math.sqrt(steps), delta)
        assert epsilon(FullBatch(), z, steps, delta).epsilon == pytest.approx(exact, rel=1e-9, abs=1e-11)
        by_grid = epsilon(FullBatch(), z, steps, delta, accountant="pld").epsilon
        assert exact - 1e-9 <= by_grid <= exact * 1.005 + 1e-3


def test_shuffled_epoch() -> None:
    statement = epsilon(ShuffledEpochs(60, 60_000), 1.0, 1000, 1e-6)
    assert statement.epsilon == pytest.approx(4.88655, abs=1e-5)
    assert (statement.participations, statement.amplified, statement.relation) == (1, False, "zero-out")


def test_shuffle_not_poisson() -> None:
    shuffled = epsilon(ShuffledEpochs(1, 1000), 1.0, 1000, 1e-6)
    poisson = epsilon(Poisson(0.001), 1.0, 1000, 1e-6)
    assert poisson.epsilon < 0.2
    assert shuffled.epsilon > 3.72  # the proved lower bound
    assert "shuffle" in str(shuffled)
    assert "not amplified" in str(shuffled)
    assert epsilon(ShuffledEpochs(1, 1000), 1.0, 1001, 1e-6).participations == 2


def test_cyclic_poisson() -> None:
    assert within(epsilon(CyclicPoisson(0.01, 1), 2.0, 2000, 1e-6).epsilon, 1.035)
    banded = epsilon(CyclicPoisson(0.01, 16), 2.0, 2000, 1e-6)
    assert within(banded.epsilon, 4.986)
    assert banded.participations == 125


def test_min_sep_is_one_release() -> None:
    def one(z: float) -> Any:
        return pytest.approx(dp.get_epsilon_gaussian(z, 1e-6), rel=1e-9)

    # Without a factorisation an example is in at most k updates; with one, everything is one release.
    assert epsilon(MinSep(3, 10), 2.0, 1000, 1e-6).epsilon == one(2 / math.sqrt(3))
    assert epsilon(MinSep(3, 10), 2.0, 15, 1e-6).epsilon == one(2 / math.sqrt(2))
    assert epsilon(MinSep(3, 10, sensitivity=1.7), 2.0, 1000, 1e-6).epsilon == one(2 / 1.7)
    assert epsilon(MinSep(3, 10), 2.0, 1000, 1e-6, relation="replace-one").epsilon == one(1 / math.sqrt(3))


def test_fixed_size_is_the_bound_without_replacement() -> None:
    statement = epsilon(FixedSize(100, 10_000), 2.0, 500, 1e-5)
    event = dp.SampledWithoutReplacementDpEvent(10_000, 100, dp.GaussianDpEvent(1.0))  # sensitivity 2C
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    expected = accountant.compose(event, 500).get_epsilon(1e-5)
    assert (statement.accountant, statement.relation) == ("rdp", "replace-one")
    assert statement.epsilon == pytest.approx(expected, rel=1e-6)
    assert epsilon(FixedSize(10, 10), 2.0, 5, 1e-5).epsilon == pytest.approx(
        dp.get_epsilon_gaussian(1 / math.sqrt(5), 1e-5)
    )


def against_pld(sampler: Sampler, z: float, event: Any, relation: str = "add-remove") -> None:
    """Ours is never below dp-accounting's grid less its error, and little above."""
    which = dp.NeighboringRelation.REPLACE_ONE if relation == "replace-one" else None
    accountant = dp.pld.PLDAccountant(*([which] if which else []), value_discretization_interval=1e-3)
    expected = accountant.compose(event, 40).get_epsilon(1e-5)
    found = epsilon(sampler, z, 40, 1e-5, relation=relation).epsilon
    assert expected * (1 - 2e-3) <= found <= expected * 1.005 + 1e-3


def test_truncated_poisson() -> None:
    against_pld(
        TruncatedPoisson(0.05, 1000, 60), 1.0, dp.TruncatedSubsampledGaussianDpEvent(1000, 0.05, 60, 1.0)
    )


def test_replace_one_consistent() -> None:
    against_pld(
        Poisson(0.05), 1.0, dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(1.0)), relation="replace-one"
    )
    both = [
        epsilon(FullBatch(), 3.0, 10, 1e-5, relation="replace-one", accountant=name).epsilon
        for name in ("auto", "pld", "rdp")
    ]
    halved = [epsilon(FullBatch(), 1.5, 10, 1e-5, accountant=name).epsilon for name in ("auto", "pld", "rdp")]
    np.testing.assert_allclose(both, halved, rtol=1e-3)
    raw = dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_ONE).compose(dp.GaussianDpEvent(3.0), 10)
    assert both[0] == pytest.approx(raw.get_epsilon(1e-5), rel=1e-3)


def test_users() -> None:
    k, q, z = 3, 0.05, 1.5
    chances = binom.pmf(range(k + 1), k, q)
    accountant = dp.pld.PLDAccountant(value_discretization_interval=0.02)
    event = dp.dp_event.MixtureOfGaussiansDpEvent(z, list(range(k + 1)), list(chances))
    expected = accountant.compose(event, 40).get_epsilon(1e-5)
    statement = epsilon(Poisson(q), z, 40, 1e-5, unit="user", max_examples=k)
    assert expected * 0.99 <= statement.epsilon <= expected * 1.005
    assert statement.unit == "user (≤ 3 examples)"
    assert epsilon(Poisson(q), z, 40, 1e-5).epsilon < statement.epsilon
    # Never above what group privacy gives, and without amplification exactly z / k.
    group = epsilon(Poisson(q), z, 40, 1e-5 / (1 + math.exp(5) + math.exp(10))).epsilon
    assert statement.epsilon < k * group
    plain = epsilon(FullBatch(), z, 10, 1e-5, unit="user", max_examples=k).epsilon
    assert plain == epsilon(FullBatch(), z / k, 10, 1e-5).epsilon
    with pytest.raises(ConfigError, match="Poisson sampling"):
        epsilon(FixedSize(10, 100), z, 10, 1e-5, unit="user", max_examples=k)
    with pytest.raises(ConfigError, match="only a user"):
        epsilon(Poisson(q), z, 10, 1e-5, max_examples=k)


def test_statement_names_relation() -> None:
    line = str(epsilon(Poisson(0.01), 1.0, 100, 1e-5, unit="client"))
    assert "\n" not in line
    for part in ("per client", "add-remove", "δ = 1e-05", "pld", "RDP", "poisson", "q 0.01", "z 1"):
        assert part in line
    for part in ("100 updates", "noise source", "the released updates", "losses"):
        assert part in line
    # The number of examples is said to be public where it is used, and is used nowhere else.
    public = "the number of examples is public"
    assert Poisson(0.01).events(1.0, 1)[0].population == 0
    assert public not in epsilon(Poisson(0.01), 1.0, 100, 1e-5).assumptions
    assert public in epsilon(FixedSize(10, 1000), 1.0, 100, 1e-5).assumptions


def test_gdp_never_bound() -> None:
    q, z, steps, delta, tight, _ = ANSWERS[0]
    mu = q * math.sqrt(steps * math.expm1(1 / z**2))  # the central limit theorem of Dong et al.
    assert dp.get_epsilon_gaussian(1 / mu, delta) < 6.65 < tight
    assert epsilon(Poisson(q), z, steps, delta).epsilon >= tight * (1 - 5e-4)
    for name in ("gdp", "clt"):
        with pytest.raises(ConfigError, match="auto, pld, rdp"):
            epsilon(Poisson(q), z, steps, delta, accountant=name)


@pytest.mark.parametrize("part", range(4))
def test_accountant_total(part: int) -> None:
    for q, z, steps, delta in EXTREMES[part * 7 :: 29]:
        found = epsilon(Poisson(q), z, steps, delta).epsilon
        assert found >= 0
        if q == 0 or steps == 0:
            assert found == 0
        elif z == 0:
            assert found == math.inf


@pytest.mark.slow
def test_accountant_total_everywhere() -> None:
    for q, z, steps, delta in EXTREMES:
        assert epsilon(Poisson(q), z, steps, delta).epsilon >= 0


@pytest.mark.parametrize(
    ("sampler", "extra"),
    [
        (FixedSize(1, 1000), {}),
        (TruncatedPoisson(0.01, 1000, 5), {}),
        (Poisson(0.01), {"relation": "replace-one"}),
        (Poisson(0.01), {"unit": "user", "max_examples": 4}),
        (CyclicPoisson(0.01, 7), {}),
        (MinSep(3, 5), {}),
        (ShuffledEpochs(3, 1000), {}),
    ],
)
def test_every_sampler_is_total(sampler: Sampler, extra: dict[str, Any]) -> None:
    for z, steps, delta in ((0.0, 5, 1e-5), (0.01, 1000, 1e-9), (1.0, 10**7, 1e-6), (1e3, 10, 0.5)):
        found = epsilon(sampler, z, steps, delta, **extra).epsilon
        assert found >= 0
        assert (found == math.inf) if z == 0 else True


@settings(max_examples=12, deadline=None)
@given(
    q=st.floats(1e-4, 0.5),
    z=st.floats(0.5, 5),
    steps=st.integers(1, 3000),
    delta=st.sampled_from([1e-4, 1e-6, 1e-8]),
)
def test_ordered_like_the_truth(q: float, z: float, steps: int, delta: float) -> None:
    """RDP is above; more steps, a higher rate, less noise or a smaller δ never make ε smaller."""
    statement = epsilon(Poisson(q), z, steps, delta)
    assert statement.epsilon_rdp is not None
    assert 0 <= statement.epsilon <= statement.epsilon_rdp * 1.01 + 1e-3
    least = statement.epsilon * (1 - 2e-3) - 1e-4
    assert epsilon(Poisson(q), z, steps * 2, delta).epsilon >= least
    assert epsilon(Poisson(q * 1.5), z, steps, delta).epsilon >= least
    assert epsilon(Poisson(q), z / 1.2, steps, delta).epsilon >= least
    assert epsilon(Poisson(q), z, steps, delta / 10).epsilon >= least


@settings(max_examples=15, deadline=None)
@given(q=st.floats(1e-3, 0.3), z=st.floats(0.6, 4), steps=st.integers(1, 500))
def test_never_below_a_fine_grid(q: float, z: float, steps: int) -> None:
    """An optimistic grid of dp-accounting bounds the truth from below."""
    low = dp.pld.privacy_loss_distribution.from_gaussian_mechanism(
        z, pessimistic_estimate=False, value_discretization_interval=2e-3, sampling_prob=q,
        use_connect_dots=False,
    )  # fmt: skip
    below = low.self_compose(steps).get_epsilon_for_delta(1e-5)
    assert epsilon(Poisson(q), z, steps, 1e-5).epsilon >= below - 1e-9


def test_delta_and_tpr() -> None:
    statement = epsilon(Poisson(0.01), 1.0, 500, 1e-5)
    assert statement.delta(statement.epsilon) == pytest.approx(1e-5, rel=0.02)
    deltas = [statement.delta(e) for e in (0.0, 0.5, 1.0, 2.0, 5.0)]
    assert deltas == sorted(deltas, reverse=True)
    assert deltas[-1] < 1e-12
    rates = [statement.tpr(fpr) for fpr in (0.0, 1e-3, 0.1, 0.5, 1.0)]
    assert rates == sorted(rates)
    assert rates[0] < 1e-3
    assert rates[-1] == 1
    # One Gaussian: Φ(Φ⁻¹(fpr) + 1/z).
    plain = epsilon(FullBatch(), 1.0, 1, 1e-5)
    for fpr in (0.001, 0.1, 0.5):
        exact = norm.cdf(norm.ppf(fpr) + 1)
        assert exact - 1e-9 <= plain.tpr(fpr) <= exact + 1e-3
    with pytest.raises(ConfigError, match="privacy loss distribution"):
        epsilon(FixedSize(1, 10), 1.0, 5, 1e-5).tpr(0.1)
    by_rdp = epsilon(FixedSize(1, 100), 2.0, 50, 1e-5)
    assert by_rdp.delta(by_rdp.epsilon) == pytest.approx(1e-5, rel=0.2)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="'rdp'"):
        epsilon(FixedSize(10, 100), 1.0, 10, 1e-5, accountant="pld")
    with pytest.raises(ConfigError, match="'pld'"):
        epsilon(Poisson(0.1), 1.0, 10, 1e-5, accountant="rdp", relation="replace-one")
    with pytest.raises(ConfigError, match="zero-out and replace-one"):
        epsilon(ShuffledEpochs(10, 100), 1.0, 10, 1e-5, relation="add-remove")
    for bad in (0.0, 1.0, -1e-5, math.nan):
        with pytest.raises(ConfigError, match="delta"):
            epsilon(Poisson(0.1), 1.0, 10, bad)
    for z in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="noise_multiplier"):
            epsilon(Poisson(0.1), z, 10, 1e-5)
    with pytest.raises(ConfigError, match="steps"):
        epsilon(Poisson(0.1), 1.0, -1, 1e-5)
    mixed = [*Poisson(0.1).events(1.0, 5), *ShuffledEpochs(1, 10).events(1.0, 5)]
    with pytest.raises(ConfigError, match="two statements"):
        state(mixed, 1e-5)
    curve = Event("full", 1.0, 0.0, "add-remove", mechanism="curve", orders=(2.0,), values=(0.1,))
    truncated = TruncatedPoisson(0.1, 100, 20).events(1.0, 1)
    with pytest.raises(ConfigError, match="apart"):
        state([curve, *truncated], 1e-5)


def test_curve_events() -> None:
    orders = (2.0, 4.0, 8.0, 16.0, 1e9, math.inf)
    values = (0.1, 0.2, 0.4, 0.8, math.inf, math.inf)  # a Gaussian's α/(2z²), z² = 10
    curve = Event("full", 1.0, 0.0, "add-remove", mechanism="curve", orders=orders, values=values, count=3)
    found = state([curve], 1e-5)
    assert found.accountant == "rdp"
    expected = dp.rdp.compute_epsilon(orders[:4], 3 * np.array(values[:4]), 1e-5)[0]
    assert found.epsilon == pytest.approx(expected)
    # Between its orders, (α − 1) times the divergence lies below a chord.
    assert 3 * 3 / 20 <= found.rdp([3])[0] <= 3 * 0.175 + 1e-12
    assert found.rdp([20])[0] == math.inf
    both = state([curve, *Poisson(0.01).events(1.0, 10, first_step=3)], 1e-5)
    assert both.epsilon > found.epsilon


def test_laplace() -> None:
    found = epsilon(FullBatch(), 1.0, 1, 1e-9)
    event = FullBatch().events(2.0, 4, mechanism="laplace")
    statement = state(event, 1e-9)
    accountant = dp.pld.PLDAccountant(value_discretization_interval=1e-3).compose(dp.LaplaceDpEvent(2.0), 4)
    assert statement.epsilon == pytest.approx(accountant.get_epsilon(1e-9), rel=1e-2)
    assert statement.epsilon <= 4 / 2 + 1e-2 < found.epsilon
    with pytest.raises(ConfigError, match="Laplace"):
        ShuffledEpochs(1, 10).events(2.0, 4, mechanism="laplace")


def exactly(q: float, zs: np.ndarray, delta: float) -> float:
    """Every step by itself, on dp-accounting's plain grid."""
    build = dp.pld.privacy_loss_distribution.from_gaussian_mechanism
    total = None
    for z in zs:
        step = build(float(z), sampling_prob=q, value_discretization_interval=1e-3)
        total = step if total is None else total.compose(step)
    assert total is not None
    return float(total.get_epsilon_for_delta(delta))


@pytest.mark.parametrize(("shape", "q", "z"), [("time:0.01", 0.01, 2.0), ("exp:0.003", 0.02, 2.0)])
def test_schedule_is_above_the_truth_by_a_hundredth(shape: str, q: float, z: float) -> None:
    zs = parse(shape, z)(np.arange(120))
    true = exactly(q, zs, 1e-5)
    found = epsilon(Poisson(q), z, 120, 1e-5, schedule=shape)
    assert true * (1 - 5e-4) <= found.epsilon <= true * 1.01
    # Chords in 1/z² for RDP: above at integer orders, and little.
    orders = [2, 5, 16]
    each = sum(
        dp.rdp.RdpAccountant(orders).compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(float(x)))).rdp
        for x in zs
    )
    assert np.all(found.rdp(orders) >= each * (1 - 1e-12))
    np.testing.assert_allclose(found.rdp(orders), each, rtol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "q", "z"), [("exp:0.00001", 0.004, 2.0), ("time:0.00001", 0.004, 2.0)])
def test_long_schedule(shape: str, q: float, z: float) -> None:
    """Between groups of equal size with the noise rounded up and, but for a hundredth, rounded down."""
    build = dp.pld.privacy_loss_distribution.from_gaussian_mechanism
    groups = np.array_split(np.sort(parse(shape, z)(np.arange(100_000))), 200)
    bounds = []
    for end in (-1, 0):
        total = None
        for group in groups:
            step = build(float(group[end]), sampling_prob=q, value_discretization_interval=2.0**-12)
            many = step.self_compose(len(group), 1e-13)
            total = many if total is None else total.compose(many, 1e-13)
        assert total is not None
        bounds.append(total.get_epsilon_for_delta(1e-5))
    assert bounds[0] * (1 - 2e-3) <= epsilon(Poisson(q), z, 100_000, 1e-5, schedule=shape).epsilon
    assert epsilon(Poisson(q), z, 100_000, 1e-5, schedule=shape).epsilon <= bounds[1] * 1.01


def test_schedule_equals_its_events() -> None:
    shape = ExpDecay(2.0, 0.01)
    for sampler in (Poisson(0.02), ShuffledEpochs(1, 7), CyclicPoisson(0.02, 5), MinSep(3, 4)):
        whole = epsilon(sampler, 2.0, 100, 1e-5, schedule=shape)
        assert whole.epsilon == pytest.approx(state(sampler.events(shape, 100), 1e-5).epsilon, rel=1e-12)
    # An epoch counts with the least noise in it.
    zs = shape(np.arange(21))
    worst = 1 / math.sqrt(np.sum(1 / zs[[6, 13, 20]] ** 2))
    found = epsilon(ShuffledEpochs(1, 7), 2.0, 21, 1e-5, schedule=shape).epsilon
    assert found == pytest.approx(dp.get_epsilon_gaussian(worst, 1e-5), rel=1e-9)
    with pytest.raises(ConfigError, match="starts at 2"):
        epsilon(Poisson(0.02), 1.0, 10, 1e-5, schedule=shape)


def test_repeated_steps_count_again() -> None:
    sampler = ShuffledEpochs(1, 10)
    once = sampler.events(1.0, 15)
    again = [*once, *sampler.events(1.0, 5, first_step=10)]
    assert state(once, 1e-5).participations == 2
    assert state(again, 1e-5).participations == 3
    # Steps that follow each other are one pass, however they are cut.
    cut = [*sampler.events(1.0, 3), *sampler.events(1.0, 12, first_step=3)]
    assert compose(cut).gaussian == compose(once).gaussian
    noisier = [*sampler.events(1.0, 3), *sampler.events(4.0, 7, first_step=3)]
    assert state(noisier, 1e-5).epsilon == state(sampler.events(1.0, 10), 1e-5).epsilon


def test_a_hundred_thousand_events() -> None:
    rng = np.random.default_rng(0)
    rates, noises = rng.choice([0.001, 0.002, 0.004, 0.005], 100_000), rng.choice([0.9, 1, 1.1, 1.2], 100_000)
    events = [Event("poisson", q, z, "add-remove") for q, z in zip(rates.tolist(), noises.tolist())]  # noqa: B905
    assert within(state(events, 1e-5).epsilon, by_counts(rates, noises))
    assert epsilon(Poisson(0.004), 2.0, 100_000, 1e-5, schedule="exp:0.00001").accountant == "pld"


def by_counts(rates: np.ndarray, noises: np.ndarray) -> float:
    accountant = dp.pld.PLDAccountant(value_discretization_interval=2e-4)
    for q in np.unique(rates):
        for z in np.unique(noises):
            count = int(np.sum((rates == q) & (noises == z)))
            accountant.compose(dp.PoissonSampledDpEvent(float(q), dp.GaussianDpEvent(float(z))), count)
    return float(accountant.get_epsilon(1e-5))


def test_statement_as_json() -> None:
    keys = {
        "epsilon", "delta", "accountant", "epsilon_rdp", "rdp_order", "sampling", "sampling_rate",
        "noise_multiplier", "steps", "participations", "relation", "unit", "amplified", "bound",
        "assumptions", "version",
    }  # fmt: skip
    found: Statement = epsilon(Poisson(0.01), 1.0, 10, 1e-5)
    assert set(found.as_dict()) == keys
    assert found.as_dict()["bound"] == "upper"
