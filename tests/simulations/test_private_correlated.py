"""Correlated noise (DP-FTRL): who may come and when, one release for the whole run, no noise beyond it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant

from mycelia.engine.errors import DataError, MyceliaError
from mycelia.engine.events import Event, Round
from mycelia.engine.run import Run
from mycelia.privacy.factorisation import BLT, Banded, Plan, Tree, optimise, sensitivity
from mycelia.privacy.ledger import Ledger
from mycelia.simulations import resume, simulate
from tests.simulations.private_runs import (
    TROUBLE,
    accepted,
    check_repeats,
    readings,
    run,
    settings,
    stopped,
)

pytestmark = pytest.mark.usefixtures("captured_once")

FEW: dict[str, Any] = {"separation": 3, "uses": 2}


def ledger(path: Path) -> Ledger:
    return Ledger.load(path / "privacy.jsonl")


def one_release(z: float, delta: float = 1e-3) -> float:
    """ε of one Gaussian release, by an accountant that has never heard of matrices."""
    return float(PLDAccountant().compose(GaussianDpEvent(z)).get_epsilon(delta))


def test_availability_alone_means_correlated_noise(tmp_path: Path) -> None:
    """Half of what the population allows as separation, a BLT fitted to it, and one release at z / sens."""
    seen: list[Event] = []
    found = run(tmp_path / "run", seen, selector="availability", privacy={"noise_multiplier": 2.0})
    plan = Plan(5, uses=5, separation=50 // (2 * 10))
    fitted = optimise(BLT(4), plan)
    assert found.epsilon == pytest.approx(one_release(2.0 / sensitivity(fitted, plan)), rel=1e-3)
    assert found.privacy is not None
    assert (found.privacy["factorisation"], found.privacy["separation"], found.privacy["uses"]) == (
        "blt",
        2,
        3,
    )
    (statement,) = found.privacy["statements"]
    assert (statement["relation"], statement["amplified"], statement["steps"]) == ("zero-out", False, 5)
    spent = [event.epsilon for event in readings(seen)]
    assert len(set(spent)) == 1  # all of it with the first round
    assert [event.values["remaining"] for event in readings(seen)] == [4, 3, 2, 1, 0, 0]


@pytest.mark.parametrize(
    "factorisation", ["tree", "sqrt-toeplitz", "identity", {"name": "banded", "bands": 3}], ids=str
)
def test_any_factorisation_is_one_release(tmp_path: Path, factorisation: Any) -> None:
    privacy = {"factorisation": factorisation, "participation": FEW, "epsilon": 4.0}
    found = run(tmp_path / "run", selector="uniform", privacy=privacy, rounds=6)
    assert found.epsilon is not None
    assert 3.99 < found.epsilon <= 4.0
    (event,) = ledger(tmp_path / "run")
    plan = Plan(6, uses=2, separation=3)
    if factorisation == "tree":
        assert event.sensitivity == sensitivity(Tree(), plan)
    if isinstance(factorisation, dict):
        assert event.sensitivity == pytest.approx(sensitivity(optimise(Banded(3), plan), plan))
    assert found.epsilon == pytest.approx(one_release(event.noise_multiplier / event.sensitivity), rel=1e-3)
    assert (event.count, event.period, event.uses) == (6, 3, 2)


@pytest.mark.parametrize("selector", ["uniform", "availability", "weighted"])
def test_nobody_comes_too_often_or_too_soon(tmp_path: Path, selector: str) -> None:
    """Whoever asks, and however many are asked in vain."""
    trouble = TROUBLE | {"round": {"quorum": 0.1, "over_select": 1.5, "on_failure": "replace"}}
    privacy = {"factorisation": "blt", "participation": FEW}
    run(tmp_path / "run", selector=selector, privacy=privacy, rounds=9, cohort=9, **trouble)
    rounds = accepted(tmp_path / "run")
    assert max(len(own) for own in rounds.values()) == 2
    assert min(b - a for own in rounds.values() for a, b in pairwise(own)) >= 3
    assert sum(len(own) for own in rounds.values()) > 30


def test_workers_and_stops_change_neither_model_nor_epsilon(tmp_path: Path) -> None:
    privacy = {"factorisation": "blt", "participation": FEW}
    check_repeats(tmp_path, selector="availability", privacy=privacy, **TROUBLE)
    assert ledger(tmp_path / "stopped").steps == 5


def test_a_checkpoint_holds_who_came_and_no_noise(tmp_path: Path) -> None:
    run(tmp_path / "run", selector="availability", privacy={"participation": FEW})
    checkpoint = Run.open(tmp_path / "run").load_checkpoint()
    assert set(checkpoint.tensors) == {"vector", "participation"}
    came = {who: (last + 1, used) for who, last, used in checkpoint.tensors["participation"].tolist()}
    assert came == {who: (own[-1], len(own)) for who, own in accepted(tmp_path / "run").items()}


def test_failed_rounds_have_their_rows_and_cost_nothing_more(tmp_path: Path) -> None:
    """Rows that belong to failed rounds are left out; the others are still one release."""
    seen: list[Event] = []
    trouble = {"behaviour": {"dropout": {"train": 0.3}}, "round": {"quorum": 0.7, "max_failed_rounds": 9}}
    given: dict[str, Any] = {"privacy": {"participation": {"separation": 2}}, "rounds": 8, **trouble}
    found = run(tmp_path / "run", seen, selector="availability", **given)
    assert 0 < found.failed_rounds < 8
    assert ledger(tmp_path / "run").steps == 8
    assert len({event.epsilon for event in readings(seen)}) == 1
    survivors = [event.counts["survivors"] for event in seen if isinstance(event, Round)]
    failed = 1 + survivors.index(0)
    assert failed > 1
    stopped(tmp_path / "stopped", failed, selector="availability", **given)
    resumed = resume(tmp_path / "stopped")
    assert (resumed.model_sha256, resumed.epsilon) == (found.model_sha256, found.epsilon)


@pytest.mark.parametrize("mechanism", ["gaussian", "discrete-gaussian"])
def test_the_noise_of_a_run_can_be_made_again_from_its_names(tmp_path: Path, mechanism: str) -> None:
    """Two runs that differ in their noise multiplier alone differ by a multiple of the same rows."""
    vectors = []
    for number, z in enumerate((1.0, 2.0, 3.0)):
        given: dict[str, Any] = {
            "noise_multiplier": z, "factorisation": "blt", "epsilon": 1e6, "mechanism": mechanism,
        }  # fmt: skip
        run(tmp_path / str(number), selector="uniform", privacy=given, rounds=1, cohort=5)
        vectors.append(Run.open(tmp_path / str(number)).load_checkpoint().tensors["vector"].double().numpy())
    first, second = vectors[1] - vectors[0], vectors[2] - vectors[1]
    np.testing.assert_allclose(first, second, atol=1e-6)
    assert first.std() == pytest.approx(1.0 * 0.5 / 5, rel=0.1)  # z C over the public cohort


def test_a_ledger_that_was_cut_stops_the_resume(tmp_path: Path) -> None:
    stopped(tmp_path / "run", 3, selector="availability")
    path = tmp_path / "run" / "privacy.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(DataError, match="ledger"):
        resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selector": "poisson", "privacy": {"factorisation": "blt"}}, "must not be poisson"),
        ({"selector": {"name": "weighted", "weights": [1.0] * 50}}, "come and go"),
        ({"privacy": {"clip": {"name": "quantile"}}}, "one size for the whole run"),
        (
            {"selector": "uniform", "privacy": {"factorisation": "blt", "clip": {"name": "quantile"}}},
            "one size",
        ),
        ({"privacy": {"factorisation": "bltt"}}, "did you mean 'blt'"),
        ({"privacy": {"factorisation": {"name": "blt", "bufers": 3}}}, "did you mean 'buffers'"),
        ({"privacy": {"factorisation": {"name": "banded", "bands": 0}}}, "bands"),
        ({"privacy": {"participation": {"separation": 6}}}, "use separation = 5 or less"),
        ({"privacy": {"participation": {"separation": -1}}}, "separation"),
        ({"privacy": {"participation": {"uses": 1}}, "rounds": 6}, "participation.uses to 2 or more"),
        ({"privacy": {"noise_multiplier": 0.1, "epsilon": 2.0}}, "gives the run"),
        ({"round": {"stragglers": "next_round"}}, "one update a round"),
        ({"selector": "tests.simulations.plugins:beyond"}, "the id"),
        ({"selector": "tests.simulations.plugins:stubborn"}, "too lately or too often"),
    ],
    ids=str,
)
def test_what_has_no_bound_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(MyceliaError, match=message):
        simulate(settings(**{"selector": "availability"} | change), out=tmp_path / "run")
