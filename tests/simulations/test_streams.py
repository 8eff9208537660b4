"""Random numbers named by client."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest, pearsonr

from mycelia.engine.rng import derive
from mycelia.simulations.streams import normals, uniforms

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """Reference in plain integers: the n-th output of the published generator from its n-th state."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_published_generator() -> None:
    # First outputs for seed 1234567, from the reference C code (prng.di.unimi.it/splitmix64.c).
    gamma = 0x9E3779B97F4A7C15
    assert [splitmix64(1234567 + n * gamma) for n in (1, 2)] == [6457827717110365317, 3203168211198807973]


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**62), st.integers(0, 1000))
def test_equals_the_reference(seed: int, client: int, round: int) -> None:
    (number,) = uniforms(seed, "x", np.array([client]), round=round)
    state = derive(seed, "x", round=round) + (client + 1) * 0x9E3779B97F4A7C15
    assert number == ((splitmix64(state) >> 12) + 0.5) * 2.0**-52
    assert 0 < number < 1


def test_a_number_depends_on_its_own_client_only() -> None:
    clients = np.array([5, 1, 9, 3])
    together = uniforms(7, "x", clients, round=2)
    alone = [uniforms(7, "x", np.array([c]), round=2)[0] for c in clients]
    assert together.tolist() == alone


def test_distribution_and_independence() -> None:
    clients = np.arange(20_000)
    streams = [
        uniforms(0, "a", clients),
        uniforms(0, "a", clients, round=1),
        uniforms(0, "b", clients),
        uniforms(1, "a", clients),
    ]
    for stream in streams:
        assert kstest(stream, "uniform").pvalue > 1e-4
    for other in streams[1:]:
        assert abs(pearsonr(streams[0], other).statistic) < 0.04
    assert abs(pearsonr(streams[0][:-1], streams[0][1:]).statistic) < 0.04
    assert kstest(normals(0, "a", clients), "norm").pvalue > 1e-4


def test_no_clients() -> None:
    assert uniforms(0, "x", np.array([], dtype=np.int64)).shape == (0,)
