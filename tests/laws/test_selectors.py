"""Laws of every selector; a new one joins by a row of the table."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycelia.aggregator.selectors import SELECTORS, build

OPTIONS: dict[str, dict[str, Any]] = {
    "availability": {},
    "cyclic-poisson": {"groups": 1},
    "poisson": {},
    "uniform": {},
    "weighted": {},
}


def test_the_table_is_complete() -> None:
    assert set(OPTIONS) == set(SELECTORS)


def known(ids: Any) -> dict[str, Any]:
    return {"weights": np.arange(1.0, len(ids) + 1), "available": lambda some: np.ones(len(some), dtype=bool)}


@pytest.mark.parametrize("name", OPTIONS)
@given(
    n=st.integers(1, 40), k=st.integers(1, 50), round=st.integers(0, 10**6), seed=st.integers(0, 2**63 - 1)
)
def test_distinct_ids_of_the_population_as_many_as_asked(
    name: str, n: int, k: int, round: int, seed: int
) -> None:
    selector, ids = build(name, **OPTIONS[name]), range(3, 3 + n)
    k = k if selector.fixed_size else min(k, n)
    drawn = selector.select(ids, k, round=round, seed=seed, **known(ids))
    assert len(set(drawn.tolist())) == len(drawn)
    assert set(drawn.tolist()) <= set(ids)
    if selector.fixed_size:
        assert len(drawn) == min(k, n)
    again = selector.select(np.arange(3, 3 + n), k, round=round, seed=seed, **known(ids))
    assert drawn.tolist() == again.tolist()  # however the ids are held, and however often one asks


@pytest.mark.parametrize("name", OPTIONS)
def test_rounds_and_seeds_differ(name: str) -> None:
    selector, ids = build(name, **OPTIONS[name]), range(1000)
    draws = {
        (r, s): tuple(selector.select(ids, 50, round=r, seed=s, **known(ids)))
        for r in range(4)
        for s in range(4)
    }
    assert len(set(draws.values())) == len(draws)


@pytest.mark.parametrize("name", OPTIONS)
def test_ids_may_be_names(name: str) -> None:
    ids = np.array(["ann", "bob", "cy"])
    assert set(build(name, **OPTIONS[name]).select(ids, 3, round=0, seed=0, **known(ids))) == {
        "ann",
        "bob",
        "cy",
    }


@pytest.mark.parametrize("name", OPTIONS)
def test_nobody_to_choose_from(name: str) -> None:
    selector, ids = build(name, **OPTIONS[name]), range(0)
    k = 1 if selector.fixed_size else 0
    assert len(selector.select(ids, k, round=0, seed=0, **known(ids))) == 0


@pytest.mark.parametrize("name", OPTIONS)
def test_the_global_generators_are_left_alone(name: str) -> None:
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    build(name, **OPTIONS[name]).select(range(50), 5, round=0, seed=0, **known(range(50)))
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002
