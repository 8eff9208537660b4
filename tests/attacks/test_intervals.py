"""Intervals beside those of scipy, and their edges."""

import pytest
from scipy.stats import binomtest

from mycelia.attacks.intervals import clopper_pearson, wilson
from mycelia.engine.errors import ConfigError

CASES = [(k, n) for n in (1, 2, 7, 40, 1000) for k in {0, 1, n // 3, n - 1, n}]


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
@pytest.mark.parametrize(("k", "n"), CASES)
def test_both_are_those_of_scipy(k: int, n: int, confidence: float) -> None:
    two = binomtest(k, n)
    exact = two.proportion_ci(confidence, method="exact")
    score = two.proportion_ci(confidence, method="wilson")
    assert clopper_pearson(k, n, confidence) == pytest.approx((exact.low, exact.high), abs=1e-10)
    assert wilson(k, n, confidence) == pytest.approx((score.low, score.high), abs=1e-10)


@pytest.mark.parametrize(("k", "n"), CASES)
def test_one_sided_bounds_are_those_of_scipy(k: int, n: int) -> None:
    lower = binomtest(k, n, alternative="greater").proportion_ci(0.999, method="exact")
    upper = binomtest(k, n, alternative="less").proportion_ci(0.999, method="exact")
    assert clopper_pearson(k, n, 0.999, "lower") == pytest.approx((lower.low, 1.0), abs=1e-10)
    assert clopper_pearson(k, n, 0.999, "upper") == pytest.approx((0.0, upper.high), abs=1e-10)


def test_all_agree() -> None:
    """With all n successes the exact lower bound is alpha^(1/n)."""
    assert clopper_pearson(100, 100, 0.999, "lower")[0] == pytest.approx(0.001 ** (1 / 100), rel=1e-9)


def test_what_is_refused() -> None:
    for call in (
        lambda: wilson(0, 0), lambda: wilson(3, 2), lambda: wilson(-1, 2), lambda: wilson(1, 2, 1.0),
        lambda: clopper_pearson(1, 2, 0.0), lambda: clopper_pearson(1, 2, side="both"),  # type: ignore[arg-type]
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            call()
