"""FedProx: the proximal step in closed form, and the moves of an adaptive mu."""

from itertools import pairwise

import numpy as np
import pytest

from mycelia.engine.algorithms import FedAvg, FedProx
from mycelia.engine.errors import ConfigError
from tests.engine.algorithms.harness import BOWLS, bowls, quadratic, total_of, weighted


@pytest.mark.parametrize("mu", [0.3, 2.0])
@pytest.mark.parametrize("plan", ["eager", "interpreter"])
def test_one_round_in_closed_form(mu: float, plan: str) -> None:
    federation = bowls(FedProx(mu=mu), steps=4, lr=0.1, plan=plan)
    start = federation.vector.copy()
    ends = [start + bowl.pull(4, 0.1, mu) * (bowl.optimum - start) for bowl in BOWLS]
    np.testing.assert_allclose(federation.run(1), weighted(ends, [1.0] * 3), rtol=0, atol=1e-9)


def test_holds_clients_near_the_server() -> None:
    def drift(mu: float) -> float:
        federation = bowls(FedProx(mu=mu), steps=20, lr=0.05)
        return max(
            float((federation.update(client)[0].terms["params"].values - federation.state.vector).norm())
            for client in federation.clients
        )

    drifts = [drift(mu) for mu in (0.0, 0.1, 1.0, 10.0)]
    assert all(first > second for first, second in pairwise(drifts))


def test_mu_zero_adds_nothing_to_the_step() -> None:
    program = quadratic()
    assert FedProx(mu=0.0).adjust(program) is None
    assert FedProx(mu=0.0).step_extra(program) == {}
    first, second = (bowls(algorithm, steps=3).run(2) for algorithm in (FedProx(mu=0.0), FedAvg()))
    assert np.array_equal(first, second)


def test_adaptive_with_mu_zero_starts_as_fedavg() -> None:
    first, second = (bowls(a, steps=3).run(1) for a in (FedProx(mu=0.0, adaptive=True), FedAvg()))
    np.testing.assert_allclose(first, second, rtol=1e-15)


FALL = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([5.0], 1.0),  # nothing to compare the first with
        ([5.0, 6.0], 1.1),
        ([5.0, 6.0, 7.0], 1.2),
        (FALL[:5], 1.0),  # four falls
        (FALL, 0.9),  # five
        ([*FALL, 3.5, 3.0, 2.5, 2.0], 0.9),
        ([*FALL, 3.5, 3.0, 2.5, 2.0, 1.0], 0.8),  # five more
        ([*FALL[:5], 5.5, 5.0, 4.5, 4.0, 3.5], 1.1),  # a rise starts the count anew
        ([*FALL[:5], 5.0, 4.0], 1.0),  # so does standing still, without moving mu
        ([-1.0, -2.0, -1.5], 1.1),  # losses may be negative
    ],
)
def test_adaptive_mu(losses: list[float], expected: float) -> None:
    """Li et al. 2020, section 5.3.2: +0.1 when the loss rises, -0.1 after five falls in a row."""
    algorithm, program = FedProx(mu=1.0, adaptive=True), quadratic()
    state = algorithm.start(program)
    for loss in losses:
        state = algorithm.merge(program, state, total_of(params=([0.0, 0.0], 2.0), loss=([loss], 9.0)))
    assert float(state.extra["mu"]) == pytest.approx(expected)
    assert algorithm.message_extra(state)["mu"] is state.extra["mu"]


def test_adaptive_mu_stays_above_zero() -> None:
    algorithm, program = FedProx(mu=0.05, adaptive=True, patience=1), quadratic()
    state = algorithm.start(program)
    for loss in (3.0, 2.0, 1.0):
        state = algorithm.merge(program, state, total_of(params=([0.0, 0.0], 1.0), loss=([loss], 1.0)))
    assert float(state.extra["mu"]) == 0.0


def test_clients_use_the_mu_of_the_message() -> None:
    federation = bowls(FedProx(mu=0.5, adaptive=True, mu_step=1.5), steps=4, lr=0.1)
    federation.round()
    federation.state.extra["mu"].fill_(2.0)
    start = federation.vector.copy()
    update, _ = federation.update(federation.clients[0])
    expected = start + BOWLS[0].pull(4, 0.1, 2.0) * (BOWLS[0].optimum - start)
    np.testing.assert_allclose(update.terms["params"].values.numpy(), expected, rtol=0, atol=1e-9)


def test_the_loss_counts_examples_whatever_the_weighting() -> None:
    federation = bowls(FedProx(adaptive=True, weighting="uniform"), steps=1)
    update, _ = federation.update(federation.clients[1])
    bowl, w = BOWLS[1], federation.vector
    expected = float((bowl.curvature * (w - bowl.optimum) ** 2).sum() / 2)
    assert float(update.terms["loss"].values) == pytest.approx(expected)
    assert update.terms["loss"].weight == 1.0


@pytest.mark.parametrize(
    ("option", "value"),
    [("mu", -0.1), ("mu", float("nan")), ("mu", "big"), ("server_lr", 0.0), ("weighting", "none"),
     ("adaptive", "yes"), ("mu_step", 0.0), ("patience", 0), ("patience", 2.5)],
)  # fmt: skip
def test_options_out_of_range(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        FedProx(**{option: value})  # type: ignore[arg-type]
