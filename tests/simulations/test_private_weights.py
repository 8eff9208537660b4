"""Clients that count by a capped public number of examples: sums, noise, denominator, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mycelia.engine.errors import MyceliaError
from mycelia.engine.events import Event, Partition
from mycelia.engine.run import Run
from mycelia.privacy.accounting import epsilon
from mycelia.privacy.sampling import Poisson
from mycelia.simulations import simulate
from tests.simulations.private_runs import check_repeats, run, settings

pytestmark = pytest.mark.usefixtures("captured_once")

MOST = 20
WEIGHTED: dict[str, Any] = {
    "algorithm": {"name": "fedavg", "weighting": "examples"},
    "partition": {"name": "quantity", "sigma": 1.0},
}
PUBLIC: dict[str, Any] = {"weight_max": MOST, "public_sizes": True}


def vector(path: Path) -> torch.Tensor:
    return Run.open(path).load_checkpoint().tensors["vector"].double()


def sizes(seen: list[Event]) -> np.ndarray:
    (event,) = [each for each in seen if isinstance(each, Partition)]
    return np.array(event.sizes)


def test_everybody_with_hardly_any_noise_is_the_weighted_mean(tmp_path: Path) -> None:
    """With all clients, room for every norm and weight, it is FedAvg by numbers of examples."""
    given = WEIGHTED | {"rounds": 1, "cohort": 50, "selector": "uniform"}
    most = {"weight_max": 400, "public_sizes": True, "clip": {"name": "abadi", "bound": 10.0}}
    little = {"noise_multiplier": 1e-5, "epsilon": 1e12}
    seen: list[Event] = []
    run(tmp_path / "private", seen, **given, privacy=most | little)
    assert sizes(seen).max() < 400
    plain = settings(**given)
    del plain["privacy"]
    simulate(plain, out=tmp_path / "plain")
    # z w_max C over the examples of all is below 4e-5
    assert (vector(tmp_path / "private") - vector(tmp_path / "plain")).abs().max() < 4e-4
    uniform = settings(**given | {"algorithm": {"name": "fedavg", "weighting": "uniform"}})
    del uniform["privacy"]
    simulate(uniform, out=tmp_path / "uniform")
    assert (vector(tmp_path / "uniform") - vector(tmp_path / "plain")).abs().max() > 5e-3


@pytest.mark.parametrize("selector", ["poisson", "availability"])
def test_noise_and_denominator_know_the_cap(tmp_path: Path, selector: str) -> None:
    """Two runs that differ in z alone by 1 differ by noise of w_max C over q N w̄, whoever came."""
    vectors, seen = [], []
    correlated = {"factorisation": "blt"} if selector == "availability" else {}
    for number, z in enumerate((2.0, 3.0)):
        privacy = PUBLIC | correlated | {"noise_multiplier": z, "epsilon": 1e6}
        seen = []
        run(tmp_path / str(number), seen, **WEIGHTED, selector=selector, rounds=1, privacy=privacy)
        vectors.append(vector(tmp_path / str(number)))
    mean = np.minimum(sizes(seen), MOST).mean()
    assert 1 < mean < MOST
    noise = vectors[1] - vectors[0]
    assert float(noise.std()) == pytest.approx(MOST * 0.5 / (10 * mean), rel=0.1)


def test_an_adaptive_bound_is_multiplied_by_the_cap(tmp_path: Path) -> None:
    """1/z² = 1/z_Δ² + 1/(2 σ_b)², so two runs differ by w_max C (z_Δ' - z_Δ) over q N w̄."""
    vectors, seen = [], []
    clip = {"name": "quantile", "bound": 0.5, "sigma_b": 4.0}
    zs = (2.0, 3.0)
    for number, z in enumerate(zs):
        privacy = PUBLIC | {"noise_multiplier": z, "epsilon": 1e6, "clip": clip}
        seen = []
        run(tmp_path / str(number), seen, **WEIGHTED, rounds=1, privacy=privacy)
        vectors.append(vector(tmp_path / str(number)))
    alone = [(z**-2 - 8.0**-2) ** -0.5 for z in zs]
    mean = np.minimum(sizes(seen), MOST).mean()
    expected = MOST * 0.5 * (alone[1] - alone[0]) / (10 * mean)
    assert float((vectors[1] - vectors[0]).std()) == pytest.approx(expected, rel=0.1)


def test_it_costs_as_much_and_says_so(tmp_path: Path) -> None:
    """z is relative to what one client can move the sum by, so ε is that of weight 1."""
    found = run(tmp_path / "run", **WEIGHTED, privacy=PUBLIC | {"noise_multiplier": 0.8})
    assert found.epsilon == epsilon(Poisson(0.2), 0.8, 5, 1e-3, unit="client").epsilon
    assert found.privacy is not None
    assert found.privacy["weight_max"] == MOST
    (statement,) = found.privacy["statements"]
    assert any("examples each client has is public" in each and "times 20" in each
               for each in statement["assumptions"])  # fmt: skip


def test_workers_and_stops_change_neither_model_nor_epsilon(tmp_path: Path) -> None:
    check_repeats(tmp_path, **WEIGHTED, privacy=PUBLIC, plan="interpreter")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"privacy": {"weight_max": 20}}, "which is private; say public_sizes = true"),
        ({"privacy": {"public_sizes": True}}, "set weight_max"),
        ({"privacy": PUBLIC | {"weight_max": 0}}, "weight_max"),
        ({"privacy": {}}, "algorithm.weighting = 'examples'"),
        (
            {"privacy": PUBLIC, "algorithm": {"name": "fedavg", "weighting": "uniform"}},
            "every client has weight",
        ),
        ({"privacy": PUBLIC | {"unit": "example"}}, "weight_max"),
        ({"privacy": PUBLIC | {"model": "local"}}, "weight_max"),
        ({"privacy": PUBLIC, "update": {"max_weight": 30.0}}, "contradicts privacy.weight_max"),
        ({"privacy": PUBLIC, "algorithm": {"name": "fednova"}}, "number of steps"),
    ],
    ids=str,
)
def test_weights_without_a_bound_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(MyceliaError, match=message):
        simulate(settings(**WEIGHTED | change), out=tmp_path / "run")
