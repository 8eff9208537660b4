"""What is checked of an update before it counts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycelia.aggregator.updates import Expected, UpdateMeta, check_update

EXPECTED = Expected(round=3, attempt=2, schema="abc", max_weight=50.0, max_examples=100, max_steps=10)
GOOD = UpdateMeta(client=7, round=3, attempt=2, schema="abc", weight=50.0, examples=100, steps=10)


def test_a_good_update() -> None:
    assert check_update(GOOD, EXPECTED) is None
    assert check_update(GOOD._replace(weight=5e-324, examples=0, steps=0), EXPECTED) is None


@pytest.mark.parametrize(
    ("change", "reason", "hint"),
    [
        ({"round": 2}, "stale_round", "round 2, this is 3"),
        ({"round": 4}, "future_round", "round 4, this is 3"),
        ({"attempt": 1}, "stale_attempt", "attempt 1, this is 2"),
        ({"attempt": 3}, "future_attempt", "attempt 3, this is 2"),
        ({"schema": "abd"}, "schema", "abd"),
        ({"schema": ""}, "schema", "abc"),
        ({"non_finite": "fc.weight"}, "not_finite", "fc.weight holds NaN"),
        ({"weight": 0.0}, "weight", "(0, 50]"),
        ({"weight": -1.0}, "weight", "-1.0"),
        ({"weight": 50.1}, "weight", "50.1"),
        ({"weight": math.nan}, "weight", "nan"),
        ({"weight": math.inf}, "weight", "inf"),
        ({"examples": 101}, "cumulative", "101 examples in a round of at most 100"),
        ({"examples": -1}, "cumulative", "-1 examples"),
        ({"steps": 11}, "cumulative", "11 steps"),
    ],
)
def test_a_rule_that_is_broken_is_named(change: dict, reason: str, hint: str) -> None:
    refusal = check_update(GOOD._replace(**change), EXPECTED)
    assert refusal is not None
    assert refusal.reason == reason
    assert hint in refusal.hint


def test_an_unknown_number_of_examples_is_not_checked() -> None:
    assert check_update(GOOD._replace(examples=10**9), EXPECTED._replace(max_examples=0)) is None


def test_an_unbounded_cap_does_not_let_infinity_through() -> None:
    refusal = check_update(GOOD._replace(weight=math.inf), EXPECTED._replace(max_weight=math.inf))
    assert refusal is not None
    assert refusal.reason == "weight"


@given(st.floats())
def test_only_finite_positive_weights_up_to_the_cap_pass(weight: float) -> None:
    passes = check_update(GOOD._replace(weight=weight), EXPECTED) is None
    assert passes == (math.isfinite(weight) and 0 < weight <= 50)
