"""SCAFFOLD: control variates in closed form, the share of the population, and partial participation."""

import numpy as np
import pytest
import torch

from mycelia.engine.algorithms import FedAvg, Scaffold
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
    quadratic,
    total_of,
)


def test_control_variate_of_option_two() -> None:
    """c_i <- c_i - c + (x - y) / (K lr), from c = c_i = 0 in the first round."""
    federation = bowls(Scaffold(), steps=4, lr=0.1)
    start = federation.vector.copy()
    federation.round()
    for number, bowl in enumerate(BOWLS):
        expected = -bowl.pull(4, 0.1) * (bowl.optimum - start) / (4 * 0.1)
        own = federation.own[number]
        assert own is not None
        np.testing.assert_allclose(own["control"].numpy(), expected, rtol=1e-12)
    mean = np.mean([federation.own[n]["control"].numpy() for n in range(3)], axis=0)  # type: ignore[index]
    np.testing.assert_allclose(federation.state.extra["control"].numpy(), mean, rtol=0, atol=1e-9)


def test_control_variate_of_option_one() -> None:
    """c_i <- the gradient at the server's model, h (x - t)."""
    federation = bowls(Scaffold(option="I"), steps=4, lr=0.1)
    federation.round()
    start = federation.vector.copy()
    federation.round()
    for number, bowl in enumerate(BOWLS):
        own = federation.own[number]
        assert own is not None
        np.testing.assert_allclose(
            own["control"].numpy(), bowl.curvature * (start - bowl.optimum), rtol=1e-12
        )


def test_second_round_in_closed_form() -> None:
    """Corrected steps descend h (w - t) + c - c_i, a quadratic with a moved optimum."""
    federation = bowls(Scaffold(), steps=4, lr=0.1)
    federation.round()
    start, control = federation.vector.copy(), federation.state.extra["control"].numpy().copy()
    ends = []
    for number, bowl in enumerate(BOWLS):
        own = federation.own[number]
        assert own is not None
        moved = Bowl(bowl.curvature, bowl.optimum - (control - own["control"].numpy()) / bowl.curvature)
        ends.append(start + moved.pull(4, 0.1) * (moved.optimum - start))
    federation.round()
    np.testing.assert_allclose(federation.vector, np.mean(ends, axis=0), rtol=0, atol=1e-9)


def test_a_client_seen_for_the_first_time_follows_the_servers_control() -> None:
    """Its own is zero: steps descend h (w - t) + c, and c_i becomes -c + (x - y) / (K lr)."""
    federation = bowls(Scaffold(), steps=4, lr=0.1)
    federation.round([0, 1])
    start, control = federation.vector.copy(), federation.state.extra["control"].numpy().copy()
    update, own = federation.update(federation.clients[2])
    moved = BOWLS[2].optimum - control / BOWLS[2].curvature
    step = BOWLS[2].pull(4, 0.1) * (moved - start)
    np.testing.assert_allclose(update.terms["params"].values.numpy(), start + step, rtol=0, atol=1e-12)
    assert own is not None
    np.testing.assert_allclose(own["control"].numpy(), -control - step / (4 * 0.1), rtol=1e-12)
    assert update.terms["control"].minus is None


@pytest.mark.parametrize("option", ["I", "II"])
def test_equal_clients_are_fedavg(option: str) -> None:
    alike = [BOWLS[0]] * 3
    first, second = (bowls(a, alike, steps=5, lr=0.1).run(4) for a in (Scaffold(option=option), FedAvg()))
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-8)


@pytest.mark.parametrize("count", [1, 3, 10])
def test_server_control_moves_by_the_share_of_the_population(count: int) -> None:
    algorithm, program = Scaffold(server_lr=0.5).bind(population=10), quadratic()
    state = algorithm.start(program)
    total = total_of(params=([2.0, 4.0], float(count)), control=([1.0, -3.0], float(count)))
    merged = algorithm.merge(program, state, type(total)(total.sums, total.weights, count))
    expected = torch.tensor([1.0, -3.0], dtype=torch.float64) * count / 10
    torch.testing.assert_close(merged.extra["control"], expected)
    torch.testing.assert_close(merged.vector, state.vector + torch.tensor([1.0, 2.0], dtype=torch.float64))


def test_partial_participation_reaches_the_optimum() -> None:
    federation = bowls(Scaffold(), steps=3, lr=0.1)
    draw = np.random.default_rng(1)
    for _ in range(150):
        federation.round(sorted(draw.choice(3, size=2, replace=False)))
    np.testing.assert_allclose(federation.vector, optimum(BOWLS), rtol=0, atol=1e-5)


def test_weighted_by_examples_finds_the_weighted_optimum() -> None:
    clients = [Bowl(b.curvature, b.optimum, examples=n) for b, n in zip(BOWLS, (1, 3, 2), strict=True)]
    federation = bowls(Scaffold(weighting="examples"), clients, steps=3, lr=0.1)
    np.testing.assert_allclose(federation.run(60), optimum(clients, [1.0, 3.0, 2.0]), rtol=0, atol=1e-5)
    uniform = bowls(Scaffold(), clients, steps=3, lr=0.1).run(60)
    np.testing.assert_allclose(uniform, optimum(clients), rtol=0, atol=1e-5)


def test_population_is_filled_in_once() -> None:
    bare = Scaffold()
    assert bare.bind(population=7) == Scaffold(population=7)
    assert bare == Scaffold()
    assert Scaffold(population=9).bind(population=7).population == 9


@pytest.mark.parametrize(("population", "count"), [(0, 1), (2, 3)])
def test_impossible_population(population: int, count: int) -> None:
    algorithm, program = Scaffold(population=population), quadratic()
    total = total_of(params=([0.0, 0.0], 1.0), control=([0.0, 0.0], 1.0))
    with pytest.raises(ConfigError, match="population"):
        algorithm.merge(program, algorithm.start(program), type(total)(total.sums, total.weights, count))


def test_controls_of_half_models_are_float32() -> None:
    program = quadratic(2, torch.bfloat16, "eager")
    algorithm = Scaffold()
    assert algorithm.server_extra(program)["control"].dtype is torch.float32
    assert {t.dtype for t in algorithm.step_extra(program).values()} == {torch.float32}


def test_no_needless_copies() -> None:
    """The update holds the trainer's vector, the message's, and the new and the old state: no other [d]."""
    federation = bowls(Scaffold(), steps=2)
    federation.round()
    client, message = federation.clients[0], federation.message()
    old = federation.own[0]
    update, new = federation.algorithm.local(federation.trainer, message, client, old)
    assert old is not None
    assert new is not None
    assert update.terms["params"].values is federation.trainer.vector
    assert update.terms["params"].minus is message.vector
    assert update.terms["control"].values is new["control"]
    assert update.terms["control"].minus is old["control"]


def test_buffers_are_averaged() -> None:
    federation = Federation(Scaffold(), net(), LocalWork(batch_size=4), net_clients([8, 6]), plan="eager")
    federation.run(2)
    assert int(federation.state.buffers["norm.num_batches_tracked"]) == 4


@pytest.mark.parametrize(
    ("option", "value"),
    [("option", "III"), ("option", 2), ("server_lr", -1.0), ("weighting", ""), ("population", -1),
     ("population", 1.5)],
)  # fmt: skip
def test_options_out_of_range(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        Scaffold(**{option: value})  # type: ignore[arg-type]
