"""Measures of imbalance against their closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycelia.simulations.imbalance import effective_classes, gini, total_variation


def test_gini_of_equal_sizes_and_of_one_owner() -> None:
    assert gini(np.full(7, 3)) == pytest.approx(0)
    assert gini(np.array([0, 0, 0, 9])) == pytest.approx(3 / 4)
    assert gini(np.array([1, 3])) == pytest.approx(1 / 4)
    assert gini(np.zeros(3)) == 0


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20).filter(any))
def test_gini_is_the_mean_absolute_difference_over_twice_the_mean(sizes: list[int]) -> None:
    x = np.array(sizes, dtype=float)
    expected = np.abs(x[:, None] - x).mean() / (2 * x.mean())
    assert gini(x) == pytest.approx(expected, abs=1e-12)


def test_total_variation() -> None:
    counts = np.array([[5, 5], [10, 0], [0, 10], [0, 0]])
    assert total_variation(counts) == pytest.approx([0, 0.5, 0.5, 0])
    lone = np.eye(4, dtype=int)
    assert total_variation(lone) == pytest.approx(np.full(4, 3 / 4))


def test_effective_classes() -> None:
    counts = np.array([[7, 0, 0, 0], [2, 2, 0, 0], [1, 1, 1, 1], [3, 1, 0, 0]])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert effective_classes(counts) == pytest.approx([1, 2, 4, math.exp(entropy)])
