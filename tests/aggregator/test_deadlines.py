"""One budget, every deadline."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycelia.aggregator.deadlines import derive
from mycelia.engine.errors import ConfigError


def test_the_table_for_a_budget_of_600_s() -> None:
    # Select 10, configure 30, train what is left (10 + 30 + 500 + 30 + 30 = 600), merge 30, evaluate 30.
    assert derive(600) == (10, 40, 540, 570, 600)


def test_the_smallest_budget() -> None:
    assert derive(20) == pytest.approx((20 / 60, 20 / 60 + 2, 16, 18, 20))


@given(st.floats(20, 1e7))
def test_the_phases_follow_each_other_and_add_up_to_the_budget(budget: float) -> None:
    ends = derive(budget)
    lengths = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    assert ends[-1] == budget
    assert min(lengths) > 0
    assert math.fsum(lengths) == pytest.approx(budget)
    assert max(lengths) == lengths[2]  # training gets most


@pytest.mark.parametrize("budget", [19.9, 0, -1, math.nan])
def test_a_budget_that_is_too_small(budget: float) -> None:
    with pytest.raises(ConfigError, match="20 s or more"):
        derive(budget)
