"""Local privacy: the analytic Gaussian against another library, randomised response against its law."""

import math

import dp_accounting
import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mycelia.engine.errors import ConfigError, DataError
from mycelia.privacy.local import RandomizedResponse, analytic_gaussian
from mycelia.privacy.noise import NoiseSource

SOURCE = NoiseSource.seeded(19)


def delta(epsilon: float, multiplier: float) -> mpmath.mpf:
    """The exact δ with fifty digits."""
    with mpmath.workdps(50):
        z = mpmath.mpf(multiplier)
        return mpmath.ncdf(0.5 / z - epsilon * z) - mpmath.exp(epsilon) * mpmath.ncdf(-0.5 / z - epsilon * z)


@given(st.floats(0, 200), st.floats(-15, -0.01).map(lambda exponent: 10**exponent), st.floats(1e-3, 1e3))
def test_analytic_gaussian_is_exact(epsilon: float, target: float, sensitivity: float) -> None:
    multiplier = analytic_gaussian(epsilon, target, sensitivity) / sensitivity
    assert delta(epsilon, multiplier * (1 + 1e-9)) <= target
    assert delta(epsilon, multiplier * (1 - 1e-6)) > target


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_analytic_gaussian_beside_another_library(epsilon: float) -> None:
    expected = dp_accounting.get_sigma_gaussian(epsilon, 1e-6)
    assert analytic_gaussian(epsilon, 1e-6) == pytest.approx(expected, rel=1e-6)
    assert analytic_gaussian(epsilon, 1e-6, 2.5) == pytest.approx(2.5 * expected, rel=1e-6)


def test_analytic_gaussian_closed_forms() -> None:
    assert analytic_gaussian(1.0, 0.126936737506644) == pytest.approx(1.0, rel=1e-9)
    assert analytic_gaussian(0.0, 0.01) == pytest.approx(0.5 / stats.norm.ppf(0.505), rel=1e-9)
    assert analytic_gaussian(0.5, 1e-5) < math.sqrt(2 * math.log(1.25e5)) / 0.5  # the loose rule
    loose = math.sqrt(2 * math.log(1.25e1)) / 20
    assert analytic_gaussian(20, 0.1) > loose  # and beyond epsilon = 1 it is not even valid


@pytest.mark.parametrize(
    ("epsilon", "target", "sensitivity"),
    [(-1, 0.1, 1), (math.inf, 0.1, 1), (1, 0, 1), (1, 1, 1), (1, 0.1, 0), (math.nan, 0.1, 1)],
)
def test_analytic_gaussian_out_of_range(epsilon: float, target: float, sensitivity: float) -> None:
    with pytest.raises(ConfigError, match="analytic gaussian"):
        analytic_gaussian(epsilon, target, sensitivity)


@given(st.floats(1e-6, 700), st.integers(2, 10**6))
def test_randomized_response_keeps_to_epsilon(epsilon: float, categories: int) -> None:
    truthful = RandomizedResponse(epsilon, categories).truthful
    with mpmath.workdps(400):
        other = (1 - mpmath.mpf(truthful)) / (categories - 1)
        assert truthful <= mpmath.exp(epsilon) * other
        assert other <= mpmath.exp(epsilon) * truthful
        best = mpmath.exp(epsilon) / (mpmath.exp(epsilon) + categories - 1)
        assert truthful >= best - mpmath.mpf(2) ** -50  # and uses all of it


@pytest.mark.parametrize("categories", [2, 5])
def test_answers_follow_the_law(categories: int) -> None:
    response = RandomizedResponse(1.5, categories)
    values = torch.full((50_000,), 1)
    answers = response.respond(values, SOURCE, 0, "client")
    other = 1 / (math.exp(1.5) + categories - 1)
    expected = [other] * categories
    expected[1] = math.exp(1.5) * other
    counts = torch.bincount(answers, minlength=categories).numpy()
    assert stats.chisquare(counts, [50_000 * share for share in expected]).pvalue > 1e-3
    assert torch.equal(answers, response.respond(values, SOURCE, 0, "client"))


def test_estimates_are_unbiased_and_know_their_error() -> None:
    response = RandomizedResponse(1.0, 4)
    values = torch.tensor([0] * 500 + [1] * 300 + [2] * 200)
    truth = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    scores = []
    for run in range(400):
        found = response.estimate(response.respond(values, SOURCE, run))
        assert found.shares.sum() == pytest.approx(1.0)
        scores.append((found.shares - truth) / found.errors)
    score = torch.stack(scores)
    assert (score.mean(0).abs() < 4 / math.sqrt(400)).all()
    assert (score.std(0) - 1).abs().max() < 0.15


def test_shapes_and_dtypes() -> None:
    response = RandomizedResponse(3.0, 3)
    answers = response.respond(torch.zeros(2, 3, dtype=torch.int32), SOURCE, 0)
    assert answers.shape == (2, 3)
    assert answers.dtype is torch.int32


def test_randomized_response_refusals() -> None:
    with pytest.raises(ConfigError, match="epsilon"):
        RandomizedResponse(-1.0, 3)
    with pytest.raises(ConfigError, match="2 categories"):
        RandomizedResponse(1.0, 1)
    for epsilon, categories in ((0.0, 3), (1e-15, 2), (1e-9, 10**7)):
        with pytest.raises(ConfigError, match="epsilon is"):
            RandomizedResponse(epsilon, categories)
    for values in (torch.tensor([3]), torch.tensor([-1]), torch.tensor([0.5])):
        with pytest.raises(DataError, match="no category"):
            RandomizedResponse(1.0, 3).respond(values, SOURCE, 0)
    for answers in (torch.tensor([], dtype=torch.int64), torch.tensor([3])):
        with pytest.raises(DataError, match="at least one"):
            RandomizedResponse(1.0, 3).estimate(answers)
