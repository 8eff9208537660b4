"""Private federations: the same ε as the accountant's, the same model after a stop, and no way around."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.engine.events import Event, Round
from mycelia.privacy.accounting import epsilon
from mycelia.privacy.ledger import Ledger
from mycelia.privacy.sampling import FixedSize, Poisson
from mycelia.simulations import resume, simulate
from mycelia.simulations.behaviour import Behaviour
from tests.simulations.private_runs import (
    PRIVACY,
    TROUBLE,
    check_repeats,
    readings,
    run,
    settings,
    stopped,
)

pytestmark = pytest.mark.usefixtures("captured_once")

Z = {"noise_multiplier": 0.8}


def ledger(path: Path) -> Ledger:
    return Ledger.load(path / "privacy.jsonl")


def test_epsilon_is_the_accountants(tmp_path: Path) -> None:
    seen: list[Event] = []
    found = run(tmp_path / "run", seen, privacy=Z)
    expected = epsilon(Poisson(0.2), 0.8, 5, 1e-3, unit="client")
    assert (found.epsilon, found.delta) == (expected.epsilon, 1e-3)
    assert ledger(tmp_path / "run").statement(1e-3).epsilon == found.epsilon
    told = readings(seen)
    assert [event.round for event in told] == [1, 2, 3, 4, 5, 5]
    assert all(a.epsilon < b.epsilon for a, b in pairwise(told[:5]))
    assert all(event.values["next"] > event.epsilon for event in told)
    for part in ("per client", "add-remove", "pld", "poisson", "0.2", "0.8", "not for release"):
        assert part in told[-1].statement
    assert found.privacy is not None
    (statement,) = found.privacy["statements"]
    assert (statement["epsilon"], statement["unit"]) == (found.epsilon, "client")
    assert (found.privacy["model"], found.privacy["clients"]) == ("central", None)
    assert told[-1].facts == found.privacy


def test_a_fixed_cohort_is_accounted_as_one(tmp_path: Path) -> None:
    found = run(tmp_path / "run", selector="uniform", privacy=Z)
    expected = epsilon(FixedSize(10, 50), 0.8, 5, 1e-3, unit="client")
    assert (found.epsilon, expected.relation) == (expected.epsilon, "replace-one")


def test_noise_is_calibrated_to_the_budget(tmp_path: Path) -> None:
    found = run(tmp_path / "run", privacy={"epsilon": 3.0})
    assert found.epsilon is not None
    assert 2.99 < found.epsilon <= 3.0
    assert (found.rounds, found.stopped_by) == (5, "")


def test_the_budget_stops_the_run(tmp_path: Path) -> None:
    most = next(k for k in range(1, 100) if epsilon(Poisson(0.2), 0.8, k, 1e-3).epsilon > 5.0) - 1
    assert 0 < most < 30
    found = run(tmp_path / "run", privacy=Z | {"epsilon": 5.0}, rounds=30)
    assert (found.rounds, found.stopped_by) == (most, "budget")
    assert found.epsilon is not None
    assert found.epsilon <= 5.0


def test_clip_and_noise_change_the_model(tmp_path: Path) -> None:
    hashes = [
        run(tmp_path / "a", privacy=Z).model_sha256,
        run(tmp_path / "b", privacy={"noise_multiplier": 0.9}).model_sha256,
        run(tmp_path / "c", privacy=Z | {"clip": {"name": "abadi", "bound": 0.1}}).model_sha256,
    ]
    assert len(set(hashes)) == 3


def test_a_stop_changes_neither_model_nor_epsilon(tmp_path: Path) -> None:
    """The round that was released before its checkpoint came is done again, and counts once."""
    found = check_repeats(tmp_path, workers=False, privacy=Z)
    assert found.epsilon == epsilon(Poisson(0.2), 0.8, 5, 1e-3, unit="client").epsilon
    assert ledger(tmp_path / "stopped").steps == 5


def test_a_round_done_again_with_another_sum_is_refused(tmp_path: Path) -> None:
    """Two sums with the same noise would tell their difference."""
    stopped(tmp_path / "run", 3, privacy=Z)
    before = ledger(tmp_path / "run").steps
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace("lr = 0.1", "lr = 0.2"))
    events = tmp_path / "run" / "events.jsonl"  # somebody who goes around the check of the settings
    events.write_text(events.read_text().replace('"lr":0.1', '"lr":0.2'))
    with pytest.raises(DataError, match="released before"):
        resume(tmp_path / "run")
    assert ledger(tmp_path / "run").steps == before


@pytest.mark.parametrize("damage", ["shorten", "edit", "remove"])
def test_a_ledger_that_does_not_match_stops_the_resume(tmp_path: Path, damage: str) -> None:
    stopped(tmp_path / "run", 3, privacy=Z)
    path = tmp_path / "run" / "privacy.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if damage == "shorten":
        path.write_text("".join(lines[:2]))
    elif damage == "edit":
        path.write_text("".join([lines[0], lines[1].replace("0.8", "8.0"), *lines[2:]]))
    else:
        path.unlink()
    with pytest.raises(DataError, match="ledger"):
        resume(tmp_path / "run")


def test_empty_cohorts_are_noised_and_counted(tmp_path: Path) -> None:
    seen: list[Event] = []
    found = run(tmp_path / "run", seen, privacy=Z, rounds=8, cohort=1)
    asked = [event.counts["asked"] for event in seen if isinstance(event, Round)]
    assert 0 in asked
    assert found.failed_rounds == 0
    assert ledger(tmp_path / "run").steps == 8


def test_drop_outs_and_stragglers_cost_nothing_more(tmp_path: Path) -> None:
    seen: list[Event] = []
    found = run(tmp_path / "run", seen, privacy=Z, **TROUBLE)
    counts = [event.counts for event in seen if isinstance(event, Round)]
    assert sum(count["survivors"] for count in counts) < sum(count["asked"] for count in counts)
    assert found.epsilon == epsilon(Poisson(0.2), 0.8, 5, 1e-3, unit="client").epsilon
    assert found.failed_rounds == 0


def test_no_client_decides_over_anothers_dropping_out() -> None:
    """Under a secret draw a share of the cohort becomes a coin for each: as many fall out in the mean."""
    behaviour = Behaviour.model_validate({"dropout": 0.3}).independent()
    everybody = np.arange(30_000)
    stages = behaviour.fates(0, everybody, round=1).stage
    assert np.bincount(stages, minlength=4) / len(stages) == pytest.approx([0.7, 0.1, 0.1, 0.1], abs=0.01)
    some = everybody[::7]
    assert np.array_equal(behaviour.fates(0, some, round=1).stage, stages[some])
    gone = Behaviour.model_validate({"dropout": 1.0}).independent()
    assert gone.fates(0, everybody, round=1).stage.all()


def test_a_seeded_source_is_said_to_be_one(tmp_path: Path) -> None:
    seeded = run(tmp_path / "seeded", privacy=Z)
    assert "not for release" in (tmp_path / "seeded" / "privacy.jsonl").read_text()
    system = run(tmp_path / "system", privacy=Z | {"noise_source": "os"})
    key = tmp_path / "system" / "noise.key"
    assert key.stat().st_mode & 0o777 == 0o600
    header = json.loads((tmp_path / "system" / "privacy.jsonl").read_text().splitlines()[0])
    assert "not for release" not in header["noise_source"]
    assert json.loads(key.read_text())["key"] not in (tmp_path / "system" / "events.jsonl").read_text()
    assert seeded.privacy is not None
    assert system.privacy is not None
    assert (seeded.privacy["mechanism"], system.privacy["mechanism"]) == ("gaussian", "discrete-gaussian")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"privacy": {"unit": "household"}}, "privacy.unit"),
        ({"privacy": {"epsilon": 0.0}}, "privacy.epsilon"),
        ({"privacy": {"delta": 1.0}}, "privacy.delta"),
        ({"privacy": {"noise_multiplier": 0.0}}, "noise_multiplier"),
        ({"privacy": {"noise_multiplier": 0.01}}, "gives the first round"),
        ({"privacy": {"clip": {"name": "abadi", "bound": -1.0}}}, "clip"),
        ({"privacy": {"clip": {"name": "abady", "bound": 1.0}}}, "abadi"),
        ({"privacy": {"clip": {"name": "per-layer", "bound": 1.0, "groups": [["a"]]}}}, "as a whole"),
        ({"privacy": {"clip": {"name": "quantile"}, "noise_multiplier": 2.0}}, "sigma_b"),
        ({"privacy": {"clip": {"name": "quantile", "target": 2.0}}}, "target"),
        ({"privacy": {"mechanism": "laplace"}}, "mechanism"),
        ({"privacy": {"model": "shuffled"}}, "privacy.model"),
        ({"privacy": {"sampling_rate": 0.1}}, "sampling_rate"),
        ({"privacy": {"participation": {"uses": 2}}}, "draws anybody in any round"),
        ({"privacy": {"participation": {"use": 2}}}, "did you mean 'uses'"),
        ({"round": {"over_select": 1.5}}, "over_select"),
        ({"round": {"on_failure": "replace"}}, "on_failure"),
        ({"round": {"stragglers": "next_round"}}, "stragglers"),
        ({"selector": "uniform", "round": {"stragglers": "next_round"}}, "one update a round"),
        ({"update": {"max_weight": 7.0}}, "max_weight"),
    ],
    ids=str,
)
def test_what_has_no_bound_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(MyceliaError, match=message):
        simulate(settings(**change), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("missing", ["unit", "epsilon", "delta", "clip"])
def test_half_a_block_is_refused(missing: str, tmp_path: Path) -> None:
    block = {key: value for key, value in PRIVACY.items() if key != missing}
    with pytest.raises(ConfigError, match=rf"privacy\.{missing}: missing"):
        simulate(settings() | {"privacy": block}, out=tmp_path / "run")


def test_without_a_block_nothing_is_claimed(tmp_path: Path) -> None:
    found = simulate({k: v for k, v in settings().items() if k != "privacy"}, out=tmp_path / "run")
    assert (found.epsilon, found.delta, found.privacy) == (None, None, None)
    assert not (tmp_path / "run" / "privacy.jsonl").exists()
