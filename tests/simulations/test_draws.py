"""One client's draw from pools of classes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from mycelia.simulations.draws import DRAWS, apportion, dirichlet, fill, iid, pools_by_label

LABELS = np.array([2, 0, 2, 2, 0, 4])


def test_pools_by_label_are_sorted_and_may_be_empty() -> None:
    assert [pool.tolist() for pool in pools_by_label(LABELS)] == [[1, 4], [], [0, 2, 3], [], [5]]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=10).filter(any), st.integers(0, 1000))
def test_apportioning_is_exact_and_within_one_of_the_quota(weights: list[int], total: int) -> None:
    shares = apportion(np.array(weights), total)
    assert shares.sum() == total
    assert np.abs(shares - np.array(weights) * total / sum(weights)).max() < 1


@given(
    left=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any),
    seed=st.integers(0, 100),
    data=st.data(),
)
def test_filling_gives_the_number_asked_and_never_more_than_there_is(
    left: list[int], seed: int, data: st.DataObject
) -> None:
    n = data.draw(st.integers(0, sum(left)))
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(len(left), 0.05))
    counts = fill(rng, shares, n, np.array(left))
    assert counts.sum() == n
    assert (counts >= 0).all()
    assert (counts <= left).all()


def test_filling_from_pools_whose_shares_are_all_zero() -> None:
    counts = fill(np.random.default_rng(0), np.array([1.0, 0.0, 0.0]), 9, np.array([4, 3, 3]))
    assert counts.sum() == 9
    assert counts[0] == 4


@pytest.mark.parametrize("name", DRAWS)
@given(seed=st.integers(0, 1000), n=st.integers(1, 6))
def test_examples_are_distinct(name: str, seed: int, n: int) -> None:
    options = {"alpha": 0.1} if name == "dirichlet" else {}
    drawn = DRAWS[name](np.random.default_rng(seed), pools_by_label(LABELS), n, **options)
    assert len(set(drawn.tolist())) == n
    assert set(drawn.tolist()) <= set(range(6))


def test_iid_is_uniform() -> None:
    rng, pools = np.random.default_rng(0), pools_by_label(LABELS)
    drawn = np.concatenate([iid(rng, pools, 2) for _ in range(3000)])
    assert chisquare(np.bincount(drawn, minlength=6)).pvalue > 1e-4


def test_dirichlet_goes_from_one_class_to_equal_classes() -> None:
    pools = [np.arange(100) + 100 * label for label in range(5)]
    rng = np.random.default_rng(0)
    one = [len(set(dirichlet(rng, pools, 20, alpha=1e-3) // 100)) for _ in range(50)]
    assert np.mean(one) < 1.3
    even = np.concatenate([dirichlet(rng, pools, 50, alpha=1e6) // 100 for _ in range(50)])
    assert chisquare(np.bincount(even, minlength=5)).pvalue > 1e-4
