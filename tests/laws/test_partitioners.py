"""Laws of every partitioner; a new one joins by a row of the table."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.engine.data.examples import Examples
from mycelia.simulations.dealing import partition
from mycelia.simulations.draws import DRAWS
from mycelia.simulations.partition import Partition
from mycelia.simulations.partitioners import PARTITIONERS, build

OPTIONS: dict[str, dict[str, Any]] = {
    "cluster": {"clusters": 2},
    "contiguous": {},
    "dirichlet": {"alpha": 3.0},
    "iid": {},
    "natural": {},
    "noise": {"level": 0.5},
    "quantity": {},
    "shards": {"per_client": 2},
}
SIZED = sorted(set(OPTIONS) - {"quantity"})  # those that a number of examples per client applies to

RNG = np.random.default_rng(5)
N = 400
EXAMPLES = Examples(
    RNG.standard_normal((N, 3)).astype(np.float32), RNG.integers(0, 4, N), RNG.permutation(np.arange(N) % 8)
)


def held(made: Partition) -> list[list[int]]:
    return [made.indices(c).tolist() + made.test_indices(c).tolist() for c in range(made.clients)]


def test_the_table_is_complete() -> None:
    assert set(OPTIONS) == set(PARTITIONERS)
    assert {rule.draw for rule in PARTITIONERS.values()} == {"", *DRAWS}


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), fraction=st.sampled_from([0.0, 0.2, 0.5]))
def test_every_example_is_dealt_exactly_once_and_nobody_goes_without(
    name: str, seed: int, fraction: float
) -> None:
    made = partition(build(name, **OPTIONS[name]), EXAMPLES, 8, seed=seed, test_fraction=fraction)
    everything = sorted(index for client in held(made) for index in client)
    assert everything == list(range(N))
    assert made.sizes().tolist() == [len(made.indices(c)) for c in range(8)]
    assert made.sizes().min() >= 1
    for client in range(8):
        tests = made.test_indices(client)
        assert len(tests) == int(fraction * (len(tests) + len(made.indices(client))) + 1e-9)
        for indices in (made.indices(client), tests):
            assert (np.diff(indices) > 0).all()


@pytest.mark.parametrize("name", SIZED)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), n=st.integers(1, 25))
def test_a_number_of_examples_per_client(name: str, seed: int, n: int) -> None:
    made = partition(build(name, **OPTIONS[name]), EXAMPLES, 8, seed=seed, per_client=n)
    assert made.sizes().tolist() == [n] * 8
    everything = [index for client in held(made) for index in client]
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_a_function_of_the_seed(name: str) -> None:
    rule = build(name, **OPTIONS[name])
    made, again = (partition(rule, EXAMPLES, 8, seed=11, test_fraction=0.25) for _ in range(2))
    assert made.sha256 == again.sha256
    assert held(made) == held(again)
    other = partition(rule, EXAMPLES, 8, seed=12, test_fraction=0.25)
    assert other.sha256 != made.sha256


@pytest.mark.parametrize("name", OPTIONS)
def test_one_client_gets_everything(name: str) -> None:
    options = OPTIONS[name] | ({"clusters": 1} if name == "cluster" else {})
    single = Examples(EXAMPLES.inputs, EXAMPLES.targets, np.zeros(N, dtype=np.int64))
    made = partition(build(name, **options), single, 1, seed=0)
    assert made.indices(0).tolist() == list(range(N))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_global_generators_are_left_alone(name: str) -> None:
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    partition(build(name, **OPTIONS[name]), EXAMPLES, 8, seed=0)
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002


@pytest.mark.parametrize("name", [name for name, rule in PARTITIONERS.items() if rule.draw])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), n=st.integers(1, 100), client=st.integers(0, 999_999))
def test_overlapping_clients_draw_distinct_examples_of_their_own(
    name: str, seed: int, n: int, client: int
) -> None:
    rule = build(name, **OPTIONS[name])
    made = partition(rule, EXAMPLES, 1_000_000, seed=seed, per_client=n, overlap=True, test_fraction=0.3)
    mine = made.indices(client).tolist() + made.test_indices(client).tolist()
    assert len(set(mine)) == len(mine) == n
    assert set(mine) <= set(range(N))
    assert made.sizes()[client] == len(made.indices(client)) == n - int(0.3 * n + 1e-9)
    assert made.indices(client).tolist() == made.indices(client).tolist()
