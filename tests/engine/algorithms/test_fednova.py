"""FedNova: unequal steps do not move the fixed point away from the optimum."""

import numpy as np
import pytest

from mycelia.engine.algorithms import Algorithm, FedAvg, FedNova
from mycelia.engine.errors import ConfigError
from tests.engine.algorithms.harness import BOWLS, Array, Bowl, bowls, optimum, weighted

# batch size 1: as many steps as examples
EXAMPLES = (2, 9, 20)
CLIENTS = [Bowl(b.curvature, b.optimum, examples=n) for b, n in zip(BOWLS, EXAMPLES, strict=True)]


def points(lr: float, weights: tuple[float, ...]) -> tuple[Array, Array]:
    """Fixed points of FedAvg, Σ w a t / Σ w a, and of FedNova, with a / K in place of a."""
    pulls = [bowl.pull(n, lr) for bowl, n in zip(CLIENTS, EXAMPLES, strict=True)]
    found = []
    for power in (0, 1):
        shares = [w * pull / n**power for w, pull, n in zip(weights, pulls, EXAMPLES, strict=True)]
        found.append(weighted([bowl.optimum for bowl in CLIENTS], shares))
    return found[0], found[1]


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize(("make", "which"), [(FedAvg, 0), (FedNova, 1)])
def test_fixed_point_in_closed_form(make: type[FedAvg | FedNova], which: int, weighting: str) -> None:
    weights = tuple(map(float, EXAMPLES)) if weighting == "examples" else (1.0, 1.0, 1.0)
    found = bowls(make(weighting=weighting), CLIENTS, lr=0.05, batch_size=1).run(40)
    np.testing.assert_allclose(found, points(0.05, weights)[which], rtol=0, atol=1e-6)


def test_objective_inconsistency_is_gone() -> None:
    """Wang et al. 2020, theorem 1: as lr -> 0 FedAvg ends at weights p_i τ_i, FedNova at p_i."""
    lr, shares = 1e-6, (1.0, 1.0, 1.0)
    fedavg, fednova = points(lr, shares)
    np.testing.assert_allclose(fednova, optimum(CLIENTS), atol=1e-4)
    np.testing.assert_allclose(fedavg, optimum(CLIENTS, list(map(float, EXAMPLES))), atol=1e-4)
    assert np.abs(fedavg - fednova).max() > 0.3
    for algorithm, point in ((FedAvg(weighting="uniform"), fedavg), (FedNova(weighting="uniform"), fednova)):
        assert isinstance(algorithm, Algorithm)
        federation = bowls(algorithm, CLIENTS, lr=lr, batch_size=1)
        federation.state.vector.copy_(federation.state.vector.new_tensor(point))
        np.testing.assert_allclose(federation.run(1), point, rtol=0, atol=1e-10)  # stands still there


def test_one_round_is_the_papers_rule() -> None:
    """x + τ_eff Σ p Δ / τ with τ_eff = Σ p τ."""
    federation = bowls(FedNova(server_lr=0.5), CLIENTS, lr=0.05, batch_size=1)
    start = federation.vector.copy()
    share = np.array(EXAMPLES) / sum(EXAMPLES)
    deltas = [b.pull(n, 0.05) * (b.optimum - start) for b, n in zip(CLIENTS, EXAMPLES, strict=True)]
    direction = sum(p * d / n for p, d, n in zip(share, deltas, EXAMPLES, strict=True))
    expected = start + 0.5 * float(share @ np.array(EXAMPLES)) * direction
    np.testing.assert_allclose(federation.run(1), expected, rtol=0, atol=1e-9)


def test_the_first_term_carries_the_clients_weight() -> None:
    federation = bowls(FedNova(), CLIENTS, batch_size=1)
    update, _ = federation.update(federation.clients[1])
    assert next(iter(update.terms.values())).weight == 9.0
    assert float(update.terms["steps"].values) == 9.0
    assert update.terms["params"].weight == 1.0
    assert update.terms["params"].values is federation.trainer.vector


@pytest.mark.parametrize(("option", "value"), [("server_lr", 0), ("weighting", "steps")])
def test_options_out_of_range(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        FedNova(**{option: value})  # type: ignore[arg-type]
