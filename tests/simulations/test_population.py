"""Populations: lazy, however many clients there are."""

import tracemalloc

import numpy as np

from mycelia.aggregator.selectors import build as build_selector
from mycelia.engine.config import load_config
from mycelia.engine.data.examples import Examples
from mycelia.simulations.behaviour import Behaviour
from mycelia.simulations.dealing import partition
from mycelia.simulations.partitioners import build
from mycelia.simulations.population import Population

EXAMPLES = Examples(
    np.zeros((500, 2), np.float32), np.arange(500) % 5, np.repeat([f"u{i}" for i in range(10)], 50)
)


def test_ids_names_and_length() -> None:
    people = Population(partition(build("natural"), EXAMPLES, 10, seed=0))
    assert len(people) == 10
    assert list(people.ids) == list(range(10))
    assert people.name(3) == "u3"


def test_a_million_clients_are_set_up_and_drawn_from_in_little_memory() -> None:
    tracemalloc.start()
    made = partition(build("dirichlet"), EXAMPLES, 10**6, seed=0, per_client=20, overlap=True)
    people = Population(made)
    cohort = people.select(build_selector("uniform"), 50, round=3)
    held = [made.indices(int(client)) for client in cohort]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(cohort.tolist())) == 50
    assert all(len(indices) == 20 for indices in held)
    assert peak < 2 * 2**20  # far below one byte for each client of the 200 MB there may be


def test_selection_knows_sizes_and_availability() -> None:
    made = partition(build("quantity", law="power", exponent=3.0), EXAMPLES, 10, seed=0)
    people = Population(made, load_config(Behaviour, {"availability": 0.5}), seed=7)
    first = [people.select(build_selector("weighted"), 1, round=r)[0] for r in range(40)]
    assert np.bincount(first, minlength=10).argmax() == made.sizes().argmax()
    for r in range(20):
        reachable = np.flatnonzero(people.available(np.arange(10), round=r))
        drawn = people.select(build_selector("availability"), 10, round=r)
        assert sorted(drawn.tolist()) == reachable.tolist()
