"""Every federated algorithm under [privacy] keeps the laws of sensitivity and noise, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mycelia.engine.algorithms import ALGORITHMS, Algorithm, build
from mycelia.engine.errors import ConfigError
from mycelia.engine.run import Run
from mycelia.engine.sums import ExactSum, SumFormat, Total
from mycelia.privacy.clip import Abadi, Sensitivity
from mycelia.privacy.federated import ClipUpdate, ServerNoise, rounding_slack
from mycelia.privacy.noise.gaussian import Gaussian
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.pipeline import Sent
from mycelia.simulations import simulate
from tests.engine.algorithms.harness import BOWLS, Federation, bowls, same, tensors_of
from tests.simulations.private_runs import run, settings

pytestmark = pytest.mark.usefixtures("captured_once")

UNIFORM: dict[str, Any] = {"weighting": "uniform"}
COVERED = ("fedavg", "fedsgd", "fedavgm", "fedprox", "fedadam", "fedyogi", "fedadagrad", "scaffold")
REFUSED = {
    "fednova": "number of steps, which is private",
    "local-only": "nothing that is trained is released",
    "centralised": "clipped one by one",
}
BOUND = 0.2


def made(name: str) -> Algorithm:
    return build(name, **UNIFORM)


def clipped_total(federation: Federation, cohort: list[int]) -> Total:
    """The exact sum of clipped updates from the current state; clients keep no new state."""
    form = SumFormat.plan(federation.algorithm.terms(federation.program), 1.0, 10)
    running, clip = ExactSum(form), ClipUpdate(Abadi(BOUND))
    for client in cohort:
        update, _ = federation.update(federation.clients[client])
        running.add(clip.device(update, Sent(client, 0, {})))
    return ExactSum.total(form, [running.accumulator], running.count)


def test_every_algorithm_is_looked_at() -> None:
    assert {*COVERED, *REFUSED, "fedbn"} == set(ALGORITHMS)


@pytest.mark.parametrize("name", COVERED)
def test_one_client_moves_the_sum_by_at_most_the_bound(name: str) -> None:
    """All terms together, at the start and after rounds that left states at clients and server."""
    federation = bowls(made(name), steps=4)
    for _ in range(2):
        whole, part = clipped_total(federation, [0, 1, 2]), clipped_total(federation, [0, 2])
        moved = torch.cat([whole.sums[term] - part.sums[term] for term in sorted(whole.sums)]).norm()
        form = SumFormat.plan(federation.algorithm.terms(federation.program), 1.0, 10)
        assert float(moved) <= rounding_slack(Sensitivity(BOUND), form).total
        assert float(moved) > 0.99 * BOUND  # the updates are longer than the bound
        federation.round()


@pytest.mark.parametrize("name", COVERED)
def test_a_total_of_nobody_moves_the_model_like_any_other(name: str) -> None:
    """Whether anybody came is not to be seen: the merge takes a noised sum as it takes every sum."""
    federation = bowls(made(name), steps=4)
    federation.round()
    noise = ServerNoise(Gaussian(), NoiseSource.seeded(1), 1.0, Sensitivity(BOUND), 2.0)
    empty, _ = noise.server(clipped_total(federation, []), {}, 0)
    merged = federation.algorithm.merge(federation.program, federation.state, empty)
    assert not torch.equal(merged.vector, federation.state.vector)
    some, _ = noise.server(clipped_total(federation, [1]), {}, 0)
    assert (some.count, some.weights) == (empty.count, empty.weights)


@pytest.mark.parametrize("name", COVERED)
def test_noiseless_and_within_the_bound_it_is_the_plain_algorithm(name: str) -> None:
    """A bound nobody reaches, no noise, and as many clients as the public number: the same model."""
    plain, private = (bowls(made(name), steps=4) for _ in range(2))
    noise = ServerNoise(Gaussian(), NoiseSource.seeded(1), 0.0, Sensitivity(1e6), float(len(BOWLS)))
    plain.round()
    clip, running = ClipUpdate(Abadi(1e6)), ExactSum(private.form)
    for client in private.clients:
        update, _ = private.update(client)
        running.add(clip.device(update, Sent(client.client, 0, {})))
    total, _ = noise.server(ExactSum.total(private.form, [running.accumulator], running.count), {}, 0)
    merged = private.algorithm.merge(private.program, private.state, total)
    assert same(tensors_of(merged), tensors_of(plain.state))


@pytest.mark.parametrize("name", COVERED)
@pytest.mark.parametrize("unit", ["client", "example"])
def test_it_runs_privately(name: str, unit: str, tmp_path: Path) -> None:
    found = run(
        tmp_path / "run", selector="uniform", algorithm={"name": name} | UNIFORM, rounds=2,
        privacy={"unit": unit, "noise_multiplier": 1.0},
    )  # fmt: skip
    assert found.failed_rounds == 0
    assert found.epsilon is not None
    assert 0 < found.epsilon <= 50


def test_normalisation_that_stays_with_the_client_is_not_released(tmp_path: Path) -> None:
    given = {"model": "tests.simulations.plugins:normed", "selector": "uniform", "rounds": 2}
    found = run(tmp_path / "run", algorithm={"name": "fedbn"} | UNIFORM, **given)
    assert found.failed_rounds == 0
    with pytest.raises(ConfigError, match="running statistics"):
        run(tmp_path / "sent", algorithm={"name": "fedavg"} | UNIFORM, **given)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_bound_covers_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        simulate(settings(algorithm=name), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("unit", "algorithm", "message"),
    [
        ("client", "fedavg", 'set weighting = "uniform"'),
        ("client", {"name": "fedprox", "adaptive": True} | UNIFORM, "training loss"),
        ("example", "fedavg", 'set weighting = "uniform"'),
        ("example", {"name": "fedprox", "adaptive": True} | UNIFORM, "training loss"),
        ("example", {"name": "scaffold", "option": "I"}, "neither clipped nor noised"),
        ("example", "local-only", "training loss"),
        ("example", {"name": "tests.simulations.plugins:Counting"} | UNIFORM, "client half could send"),
    ],
    ids=str,
)
def test_options_that_release_more_are_refused(
    unit: str, algorithm: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(settings({"unit": unit}, selector="uniform", algorithm=algorithm), out=tmp_path / "run")


def test_equal_steps_make_fednova_fedavg_where_examples_are_private(tmp_path: Path) -> None:
    """Every client takes as many steps, so its normalisation changes nothing but the rounding."""
    vectors = []
    for name in ("fedavg", "fednova"):
        path = tmp_path / name
        run(
            path,
            selector="uniform",
            algorithm={"name": name} | UNIFORM,
            rounds=2,
            privacy={"unit": "example"},
        )
        vectors.append(Run.open(path).load_checkpoint().tensors["vector"].numpy())
    np.testing.assert_allclose(vectors[0], vectors[1], rtol=1e-5, atol=1e-6)


def test_all_data_in_one_place_is_one_client_with_a_budget(tmp_path: Path) -> None:
    privacy = {"unit": "example", "epsilon": 3.0}
    found = run(tmp_path / "run", selector="uniform", algorithm="centralised", rounds=2, privacy=privacy)
    assert found.epsilon is not None
    assert 2.99 < found.epsilon <= 3.0
    assert found.privacy is not None
    assert found.privacy["clients"]["clients"] == 1
