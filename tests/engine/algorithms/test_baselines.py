"""FedSGD, and the two baselines without federation."""

import numpy as np
import pytest
import torch

from mycelia.engine.algorithms import Centralised, FedAvg, FedSGD, LocalOnly
from mycelia.engine.errors import ConfigError
from mycelia.engine.local import LocalWork
from tests.engine.algorithms.harness import (
    BOWLS,
    Bowl,
    Federation,
    bowls,
    net,
    net_clients,
    optimum,
    same,
    total_of,
)

SIZES = (1, 3, 2)
CLIENTS = [Bowl(b.curvature, b.optimum, examples=n) for b, n in zip(BOWLS, SIZES, strict=True)]


def test_fedsgd_is_one_gradient_step_on_the_union() -> None:
    federation = bowls(FedSGD(), CLIENTS, steps=7, lr=0.1, batch_size=1)  # the work is prescribed
    start = federation.vector.copy()
    slopes = [n * b.curvature * (start - b.optimum) for b, n in zip(BOWLS, SIZES, strict=True)]
    np.testing.assert_allclose(federation.run(1), start - 0.1 * sum(slopes) / 6, rtol=0, atol=1e-9)


def test_fedsgd_is_fedavg_with_one_full_step() -> None:
    first = bowls(FedSGD(), CLIENTS, steps=9, batch_size=2).run(3)
    second = bowls(FedAvg(), CLIENTS, steps=1, batch_size=0).run(3)
    assert np.array_equal(first, second)


def test_fedsgd_work() -> None:
    assert FedSGD().work(LocalWork(epochs=5, batch_size=3, lr=0.2)) == LocalWork(
        epochs=5, steps=1, batch_size=0, lr=0.2
    )


def test_local_only_clients_find_their_own_optima() -> None:
    federation = bowls(LocalOnly(), steps=10, lr=0.1)
    start = federation.vector.copy()
    federation.run(30)
    assert np.array_equal(federation.vector, start)
    for client, bowl in enumerate(BOWLS):
        vector, _ = federation.personal(client)
        np.testing.assert_allclose(vector.numpy(), bowl.optimum, rtol=0, atol=1e-6)
    assert federation.personal(99)[0] is federation.state.vector


def test_local_only_clients_do_not_see_each_other() -> None:
    work, clients = LocalWork(batch_size=4), net_clients([8, 6, 4])
    together = Federation(LocalOnly(), net(), work, clients, plan="eager")
    alone = Federation(LocalOnly(), net(), work, clients, plan="eager")
    for _ in range(2):
        together.round()
        alone.round([1])
    assert same(together.own[1] or {}, alone.own[1] or {})


def test_local_only_keeps_buffers() -> None:
    federation = Federation(LocalOnly(), net(), LocalWork(batch_size=4), net_clients([8, 6]), plan="eager")
    federation.run(3)
    _, buffers = federation.personal(0)
    assert int(buffers["norm.num_batches_tracked"]) == 6
    assert buffers["norm.num_batches_tracked"].dtype is torch.int64
    assert int(federation.state.buffers["norm.num_batches_tracked"]) == 0


def test_centralised_finds_the_optimum_of_the_union() -> None:
    data = [bowl.data(0) for bowl in CLIENTS]
    union = type(data[0])(
        np.concatenate([d.inputs for d in data]), np.concatenate([d.targets for d in data]), np.arange(6), 0
    )
    federation = bowls(Centralised(), CLIENTS[:1], steps=20, lr=0.1)
    federation.clients = [union]
    np.testing.assert_allclose(federation.run(10), optimum(CLIENTS, [1.0, 3.0, 2.0]), rtol=0, atol=1e-6)


def test_centralised_refuses_several_clients() -> None:
    """Whoever ignores `pooled` would otherwise run FedAvg under another name."""
    federation = bowls(Centralised())
    with pytest.raises(ConfigError, match="3 clients"):
        federation.algorithm.merge(federation.program, federation.state, total_of(params=([0.0, 0.0], 3.0)))


def test_only_centralised_pools() -> None:
    assert Centralised.pooled
    assert not any(kind.pooled for kind in (FedAvg, FedSGD, LocalOnly))
