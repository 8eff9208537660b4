"""Discrete Gaussian noise: the law of the integers, the grid, and what accounting relies on."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

from mycelia.engine.errors import ConfigError, DataError
from mycelia.privacy.noise import DiscreteGaussian, NoiseSource
from mycelia.privacy.noise.lattice import Lattice, lattice

SOURCE = NoiseSource.seeded(11)


def weights(support: npt.NDArray[np.int64], spread: float, power: int) -> npt.NDArray[np.float64]:
    scaled = np.abs(support) / spread
    return np.exp(-scaled) if power == 1 else np.exp(-(scaled**2) / 2)


def check_law(drawn: npt.NDArray[np.int64], spread: float, power: int, kept: int = 0) -> None:
    """Chi-square against the exact law, on the integers from `kept` and up to -kept - 1."""
    reach = int(60 * spread) + 60
    support = np.arange(-reach, reach + 1)
    probability = weights(support, spread, power) * ((support >= kept) | (support < -kept))
    probability /= probability.sum()
    counts = np.bincount(drawn + reach, minlength=len(support))
    likely = probability * len(drawn) >= 10
    seen = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(probability[likely], probability[~likely].sum()) * len(drawn)
    if expected[-1] < 1:
        assert seen[-1] <= 6
        seen, expected = seen[:-1], expected[:-1] * seen[:-1].sum() / expected[:-1].sum()
    if len(seen) > 1:
        assert stats.chisquare(seen, expected).pvalue > 1e-3


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("spread", [0.05, 0.3, 1.0, 3.7, 31.9, 65.0])
def test_law_of_the_integers(spread: float, power: int) -> None:
    stream = SOURCE.generator("law", 0, f"{spread} {power}")
    check_law(lattice(spread, power).draw(200_000, stream), spread, power)  # type: ignore[arg-type]


@pytest.mark.parametrize("power", [1, 2])
def test_law_when_all_points_are_decided_exactly(power: int) -> None:
    """With a margin as wide as the curve is high, float64 decides nothing."""
    table = lattice(2.5, power)  # type: ignore[arg-type]
    exact = replace(table, margin=1e6)
    check_law(exact.draw(8_000, SOURCE.generator("exact", power)), 2.5, power)


def test_exact_and_fast_decisions_agree() -> None:
    table = lattice(1.3e9, 2)
    wide = replace(table, margin=table.height * 1e-3)
    places, kept = table.points(1 << 14, SOURCE.generator("agree", 0))
    exact_places, exact_kept = wide.points(1 << 14, SOURCE.generator("agree", 0))
    assert (kept == exact_kept).all()
    assert (places[kept] == exact_places[kept]).all()


def test_tails_have_the_same_law() -> None:
    """A table of nothing but tails, which begin at 4 and -5, low enough for their envelope."""
    start = np.tile(np.array([4, -5], np.int64), 1 << 15)
    level = np.full(1 << 16, np.nan)
    tails = Lattice(Fraction(1, 18), 2, 1, 0.9, start, level, 1e-9)
    check_law(tails.draw(4_000, SOURCE.generator("tails", 0)), 3.0, 2, kept=4)


def test_far_tails_are_decided_at_once() -> None:
    stream = SOURCE.generator("far", 0)
    assert not lattice(1.0, 2)._below(10**12, Fraction(0), Fraction(1), Fraction(2**80), stream)
    assert lattice(1.0, 2)._below(0, Fraction(0), Fraction(1), Fraction(1), stream)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("spread", [0.01, 1.0, 50.0, 1e9, 2.0**44])
def test_tables_cover_the_curve(spread: float, power: int) -> None:
    """Every integer up to the tails lies in one column of cells, at least as high as the curve."""
    table = lattice(spread, power)  # type: ignore[arg-type]
    bulk = np.isfinite(table.level)
    starts, counts = np.unique(table.start[bulk], return_counts=True)
    width = 2**table.shift
    assert (np.diff(starts) == width).all()
    nearest = np.where(starts >= 0, starts, starts + width - 1)
    assert (counts >= table.height * weights(nearest, spread, power) * (1 - 1e-13)).all()
    right, left = sorted(table.start[np.isnan(table.level)].tolist(), reverse=True)
    assert (right, left) == (starts[-1] + width, starts[0] - 1)
    for segment in range(20):  # the envelope of a tail
        edge = right + width * (2**segment - 1)
        assert table.height * weights(np.array([edge]), spread, power)[0] <= 2.0 ** -(2 * segment + 1)


def test_large_spreads_are_normal() -> None:
    drawn = lattice(1.3e9, 2).draw(300_000, SOURCE.generator("large", 0))
    assert stats.kstest(drawn / 1.3e9, "norm").pvalue > 1e-3
    last_bits = np.bincount(drawn & 7, minlength=8)  # even the last bits are even
    assert stats.chisquare(last_bits).pvalue > 1e-3


@pytest.mark.parametrize("sampler", ["exact", "rounded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_add_is_the_rounded_total_plus_the_sample(sampler: str, dtype: torch.dtype) -> None:
    mechanism = DiscreteGaussian(sampler=sampler)  # type: ignore[arg-type]
    bound = 0.7
    grid = mechanism.grid(bound)
    total = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (50, 700))).to(dtype)
    noised = mechanism.add(total, 0.9, SOURCE, "noise", 2, "w", bound=bound)
    noise = mechanism.sample(total.shape, 0.9, SOURCE, "noise", 2, "w", bound=bound)
    integers = (noise / grid).to(torch.int64)
    assert torch.equal(integers.double() * grid, noise)  # the noise lies on the grid
    rounded = torch.tensor([round(Fraction(value) / Fraction(grid)) for value in total.view(-1).tolist()])
    expected = (rounded.view(total.shape) + integers).double() * grid
    assert noised.dtype is dtype
    assert torch.equal(noised, expected.to(dtype))
    assert stats.kstest(noise.view(-1).numpy() / 0.9, "norm").pvalue > 1e-3


def test_grid_is_a_power_of_two_below_the_step() -> None:
    assert DiscreteGaussian().grid(1.0) == 2.0**-30
    assert DiscreteGaussian().grid(3.0) == 2.0**-29
    assert DiscreteGaussian(step=0.25).grid(17.0) == 0.25
    assert DiscreteGaussian(step=0.3).grid(17.0) == 0.25
    for bound in (1e-6, 0.1, 1.0, 1234.5):
        assert bound * 0.5e-9 < DiscreteGaussian().grid(bound) <= bound * 1e-9


def test_totals_that_round_alike_are_released_alike() -> None:
    mechanism = DiscreteGaussian(step=2.0**-10)
    first = torch.tensor([1.0, -3.0], dtype=torch.float64)
    second = first + 2.0**-12
    noised = [mechanism.add(total, 5.0, SOURCE, "noise", 0) for total in (first, second)]
    assert torch.equal(*noised)


def test_slack_bounds_what_rounding_moves() -> None:
    mechanism = DiscreteGaussian(step=2.0**-6)
    rng = np.random.default_rng(1)
    slack = mechanism.slack(1.0, 1000)
    assert slack == math.sqrt(1000) * 2.0**-6
    for _ in range(20):
        first = torch.from_numpy(rng.normal(0, 1, 1000))
        apart = torch.from_numpy(rng.normal(0, 0.01, 1000))
        rounded = [mechanism.add(total, 0.0, SOURCE, "noise", 0) for total in (first, first + apart)]
        assert (rounded[0] - rounded[1]).norm() <= apart.norm() + slack
    corner = torch.full((1000,), 2.0**-7 + 2.0**-30, dtype=torch.float64)  # and rounding reaches it
    moved = mechanism.add(corner, 0.0, SOURCE, "noise", 0) - mechanism.add(
        corner - 2.0**-29, 0.0, SOURCE, "noise", 0
    )
    assert moved.norm() == pytest.approx(slack)


def test_privacy_is_that_of_the_gaussian() -> None:
    """The coarsest grid allowed: δ(ε) of the discrete law is the Gaussian one to 1e-6."""
    spread, shift = 1000, 700
    support = np.arange(-12 * spread, 12 * spread + 1)
    for move in (shift, shift + 1, 999, 1000):
        first = np.exp(-(support**2) / (2 * spread**2))
        second = np.exp(-((support - move) ** 2) / (2 * spread**2))
        normaliser = math.fsum(first)
        for epsilon in (0.0, 0.1, 1.0, 2.5):
            found = math.fsum(np.maximum(second - math.exp(epsilon) * first, 0)) / normaliser
            z = spread / move
            exact = stats.norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * stats.norm.cdf(
                -0.5 / z - epsilon * z
            )
            assert found == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    ("std", "match"),
    [(-1.0, "std is"), (math.nan, "std is"), (math.inf, "std is"), (1e-7, "grid"), (1e7, "grid")],
)
def test_std_out_of_range(std: float, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        DiscreteGaussian().add(torch.zeros(2), std, SOURCE, "noise", 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e10])
def test_totals_out_of_range(value: float) -> None:
    total = torch.zeros(40_000)
    total[33_000] = value
    with pytest.raises(DataError, match="not finite or beyond"):
        DiscreteGaussian().add(total, 1.0, SOURCE, "noise", 0)


def test_settings_out_of_range() -> None:
    for step in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="grid step"):
            DiscreteGaussian(step=step)
    with pytest.raises(ConfigError, match="clip bound"):
        DiscreteGaussian().grid(0.0)
    with pytest.raises(ConfigError, match="exact or rounded"):
        DiscreteGaussian(sampler="fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="float16"):
        DiscreteGaussian().add(torch.zeros(2, dtype=torch.float16), 1.0, SOURCE, "noise", 0)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (16_385,)])
def test_shapes(shape: tuple[int, ...]) -> None:
    total = torch.zeros(shape)
    assert DiscreteGaussian().add(total, 1.0, SOURCE, "noise", 0).shape == shape
    assert DiscreteGaussian().sample(shape, 0.0, SOURCE, "noise", 0).shape == shape
