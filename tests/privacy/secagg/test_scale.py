"""A thousand clients in one process, and 25 million coordinates under a ceiling of memory."""

import subprocess
import sys

import numpy as np
import pytest

from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.messages import Reason
from mycelia.simulations.secure_sums import SecureSumResult
from tests.privacy.secagg.sums import run_sum

LONG = """
import resource, sys
import numpy as np
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.simulations import secure_sum

size = int(sys.argv[1])
settings = SecureSumConfig(n_min=3, corrupt=0, dropout=0.25, bits=32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
vectors = np.empty((4, size), np.int8)
for row, vector in enumerate(vectors):
    vector[:] = row - 1
found = secure_sum(vectors, config=settings, drops={2: "masked"})
assert found.exact and found.survivors == (1, 3, 4)
assert found.total.min() == found.total.max() == -1 + 1 + 2
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("size", [2**20, pytest.param(25_000_000, marks=pytest.mark.slow)])
def test_memory_is_a_few_vectors(size: int) -> None:
    """Of words of 4 bytes: three uploads that clients keep, the sums, and what is decoded of them."""
    done = subprocess.run(
        [sys.executable, "-c", LONG, str(size)], capture_output=True, text=True, check=True, timeout=800
    )
    vector = 4 * size
    assert 1024 * int(done.stdout) < 15 * vector + 32 * 2**20, int(done.stdout) / (vector / 1024)


@pytest.mark.slow
def test_a_thousand_clients_in_one_process() -> None:
    n = 1000
    vectors = np.random.default_rng(0).integers(-9, 10, (n, 64))
    rng = np.random.default_rng(1)
    places = ["share", "masked", "masked:late", "agree", "unmask"]
    gone = rng.choice(np.arange(1, n + 1), 50, replace=False)
    drops = {int(client): str(rng.choice(places)) for client in gone}
    settings = SecureSumConfig(corrupt=0.05, dropout=0.05)
    found = run_sum(vectors=vectors, config=settings, drops=drops, order=5, crash={"server": "SNAPSHOT"})
    assert isinstance(found, SecureSumResult)
    assert found.exact
    assert np.array_equal(found.total, vectors[[client - 1 for client in found.survivors]].sum(axis=0))
    lost = {client for client, phase in drops.items() if phase not in ("agree", "unmask")}
    assert set(found.survivors) == set(range(1, n + 1)) - lost
    assert {fault.reason for fault in found.faults} <= {Reason.LATE}
    assert all(not (b >= 78 and s >= 78) for b, s in found.released.values())
