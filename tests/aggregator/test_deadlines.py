"""One budget, every deadline."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycelia.aggregator.deadlines import Deadlines, derive
from mycelia.engine.errors import ConfigError

BUDGETS = st.floats(20, 1e7)


def ends(deadlines: Deadlines) -> tuple[float, ...]:
    return tuple(value for value in deadlines if isinstance(value, float))


def lengths(deadlines: Deadlines) -> list[float]:
    times = ends(deadlines)
    return [end - start for start, end in zip((0, *times), times, strict=False)]


def test_the_table_for_a_budget_of_600_s() -> None:
    # Select 10, configure 30, train what is left (10 + 30 + 500 + 30 + 30 = 600), merge 30, evaluate 30.
    assert lengths(derive(600)) == [10, 30, 0, 500, 0, 0, 30, 30]
    # Advertise 30, share 30, agree 20, unmask 20: 430 are left.
    assert lengths(derive(600, secure_sum=True)) == [10, 30, 30, 430, 20, 20, 30, 30]
    # Heartbeat 15, lost 45, stall 30, Hello 10, reconnect cap 60.
    assert derive(600).waits == derive(600, secure_sum=True).waits == (15, 45, 30, 10, 60)


def test_the_smallest_budget() -> None:
    assert lengths(derive(20)) == pytest.approx([20 / 60, 2, 0, 20 - 20 / 60 - 6, 0, 0, 2, 2])
    assert lengths(derive(20, secure_sum=True)) == pytest.approx(
        [20 / 60, 2, 2, 20 - 20 / 60 - 12, 2, 2, 2, 2]
    )
    assert derive(20).waits == (1, 3, 2, 2, 2)


def test_a_day() -> None:
    assert lengths(derive(86_400, secure_sum=True)) == [10, 30, 30, 86_400 - 230, 20, 20, 60, 60]
    assert derive(86_400).waits == (15, 45, 30, 10, 60)


@given(BUDGETS, st.booleans())
def test_one_budget_many_timeouts_add_up(budget: float, secure_sum: bool) -> None:
    deadlines = derive(budget, secure_sum=secure_sum)
    phases = lengths(deadlines)
    assert deadlines.evaluate == budget
    assert math.fsum(phases) == pytest.approx(budget)
    assert [phase > 0 for phase in phases] == [
        True,
        True,
        secure_sum,
        True,
        secure_sum,
        secure_sum,
        True,
        True,
    ]
    assert max(phases) == phases[3]  # training gets most
    waits = deadlines.waits
    assert waits.lost == 3 * waits.heartbeat
    assert max(waits) < budget


@given(BUDGETS, BUDGETS, st.booleans())
def test_more_time_makes_nothing_shorter(one: float, other: float, secure_sum: bool) -> None:
    less, more = (derive(budget, secure_sum=secure_sum) for budget in sorted((one, other)))
    for short, long in zip((*lengths(less), *less.waits), (*lengths(more), *more.waits), strict=True):
        assert short <= long + 1e-6


@pytest.mark.parametrize("budget", [19.9, 0, -1, math.nan, math.inf])
def test_a_budget_that_is_too_small(budget: float) -> None:
    with pytest.raises(ConfigError, match="20 s or more"):
        derive(budget)
