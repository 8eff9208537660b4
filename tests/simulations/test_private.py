"""Private federations: the same ε as the accountant's, the same model after a stop, and no way around."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.engine.events import Event, Privacy, Round
from mycelia.privacy.accounting import epsilon
from mycelia.privacy.ledger import Ledger
from mycelia.privacy.sampling import FixedSize, Poisson
from mycelia.simulations import SimulationResult, resume, simulate

PRIVACY = {"unit": "client", "epsilon": 50.0, "delta": 1e-3, "clip": {"name": "abadi", "bound": 0.5}}


def settings(privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "model": {"name": "mlp", "hidden": [8]},
        "data": "digits",
        "algorithm": {"name": "fedavg", "weighting": "uniform"},
        "selector": "poisson",
        "rounds": 5,
        "cohort": 10,
        "population": {"clients": 50},
        "partition": "iid",
        "local": {"epochs": 1, "batch_size": 10, "lr": 0.1},
        "backend": "inline",
        "plan": "interpreter",
        "evaluation": {"every": 0, "clients": 0},
        "privacy": PRIVACY | {"noise_multiplier": 0.8} | (privacy or {}),
    } | changes


def run(tmp_path: Path, name: str = "run", **given: Any) -> SimulationResult:
    return simulate(settings(**given), out=tmp_path / name)


def test_epsilon_is_the_accountants(tmp_path: Path) -> None:
    found = run(tmp_path)
    expected = epsilon(Poisson(0.2), 0.8, 5, 1e-3, unit="client")
    assert found.epsilon == expected.epsilon
    assert found.delta == 1e-3
    statement = Ledger.load(tmp_path / "run" / "privacy.jsonl").statement(1e-3)
    assert statement.epsilon == found.epsilon
    assert "client" in str(statement)


def test_the_report_says_what_epsilon_depends_on(tmp_path: Path) -> None:
    seen: list[Event] = []
    simulate(settings(), out=tmp_path / "run", listeners=[seen.append])
    readings = [event for event in seen if isinstance(event, Privacy)]
    assert [event.round for event in readings] == [1, 2, 3, 4, 5, 5]
    assert all(a.epsilon < b.epsilon for a, b in pairwise(readings[:5]))
    assert all(event.values["next"] > event.epsilon for event in readings)
    for part in ("per client", "add-remove", "pld", "poisson", "0.2", "0.8", "not for release"):
        assert part in readings[-1].statement


def test_a_fixed_cohort_is_accounted_as_one(tmp_path: Path) -> None:
    found = run(tmp_path, selector="uniform")
    assert found.epsilon == epsilon(FixedSize(10, 50), 0.8, 5, 1e-3, unit="client").epsilon


def test_noise_is_calibrated_to_the_budget(tmp_path: Path) -> None:
    found = run(tmp_path, privacy={"noise_multiplier": None, "epsilon": 3.0})
    assert found.epsilon is not None
    assert 2.99 < found.epsilon <= 3.0
    assert found.rounds == 5
    assert found.stopped_by == ""


def test_the_budget_stops_the_run(tmp_path: Path) -> None:
    most = next(k for k in range(1, 100) if epsilon(Poisson(0.2), 0.8, k, 1e-3).epsilon > 5.0) - 1
    assert 0 < most < 30
    found = run(tmp_path, privacy={"epsilon": 5.0}, rounds=30)
    assert found.rounds == most
    assert found.stopped_by == "budget"
    assert found.epsilon is not None
    assert found.epsilon <= 5.0


def test_workers_give_the_model_of_inline(tmp_path: Path) -> None:
    hashes = {
        run(tmp_path, f"run-{number}", backend=backend).model_sha256
        for number, backend in enumerate(["inline", {"name": "workers", "workers": 2}])
    }
    assert len(hashes) == 1


def test_clip_and_noise_change_the_model(tmp_path: Path) -> None:
    hashes = [
        run(tmp_path, "a").model_sha256,
        run(tmp_path, "b", privacy={"noise_multiplier": 0.9}).model_sha256,
        run(tmp_path, "c", privacy={"clip": {"name": "abadi", "bound": 0.1}}).model_sha256,
        run(tmp_path, "d", seed=1).model_sha256,
    ]
    assert len(set(hashes)) == 4


class Stop:
    """A listener that interrupts behind a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, event: Event) -> None:
        if isinstance(event, Round) and event.round == self.after:
            raise KeyboardInterrupt


def test_stopping_and_resuming_changes_neither_model_nor_epsilon(tmp_path: Path) -> None:
    """The round that was released before its checkpoint came is done again, and counts once."""
    whole = run(tmp_path, "whole")
    with pytest.raises(KeyboardInterrupt):
        simulate(settings(), out=tmp_path / "stopped", listeners=[Stop(3)])
    assert Ledger.load(tmp_path / "stopped" / "privacy.jsonl").steps == 3
    found = resume(tmp_path / "stopped")
    assert found.model_sha256 == whole.model_sha256
    assert found.epsilon == whole.epsilon
    assert Ledger.load(tmp_path / "stopped" / "privacy.jsonl").steps == 5


@pytest.mark.parametrize("damage", ["shorten", "edit", "remove"])
def test_a_ledger_that_does_not_match_stops_the_resume(tmp_path: Path, damage: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        simulate(settings(), out=tmp_path / "run", listeners=[Stop(3)])
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
    found = simulate(
        settings(cohort=1, rounds=8, population={"clients": 50}),
        out=tmp_path / "run",
        listeners=[seen.append],
    )
    asked = [event.counts["asked"] for event in seen if isinstance(event, Round)]
    assert 0 in asked
    assert found.failed_rounds == 0
    assert Ledger.load(tmp_path / "run" / "privacy.jsonl").steps == 8


def test_a_seeded_source_is_said_to_be_one(tmp_path: Path) -> None:
    run(tmp_path, "seeded")
    assert "not for release" in (tmp_path / "seeded" / "privacy.jsonl").read_text()
    run(tmp_path, "system", privacy={"noise_source": "os"})
    key = tmp_path / "system" / "noise.key"
    assert key.stat().st_mode & 0o777 == 0o600
    header = json.loads((tmp_path / "system" / "privacy.jsonl").read_text().splitlines()[0])
    assert "not for release" not in header["noise_source"]
    assert json.loads(key.read_text())["key"] not in (tmp_path / "system" / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"privacy": {"unit": "example"}}, "privacy.unit"),
        ({"privacy": {"unit": "household"}}, "privacy.unit"),
        ({"privacy": {"epsilon": 0.0}}, "privacy.epsilon"),
        ({"privacy": {"delta": 1.0}}, "privacy.delta"),
        ({"privacy": {"noise_multiplier": 0.0}}, "noise_multiplier"),
        ({"privacy": {"clip": {"name": "abadi", "bound": -1.0}}}, "clip"),
        ({"privacy": {"clip": {"name": "abady", "bound": 1.0}}}, "abadi"),
        ({"privacy": {"clip": {"name": "quantile"}}}, "fixed bound"),
        ({"privacy": {"mechanism": "laplace"}}, "mechanism"),
        ({"privacy": {"sampler": "poisson"}}, "sampler"),
        ({"selector": "weighted"}, "poisson or uniform"),
        ({"round": {"over_select": 1.5}}, "over_select"),
        ({"round": {"on_failure": "replace"}}, "on_failure"),
        ({"round": {"stragglers": "next_round"}}, "stragglers"),
        ({"update": {"max_weight": 7.0}}, "max_weight"),
        ({"algorithm": "fedavg"}, "weighting"),
        ({"algorithm": "centralised"}, "linear"),
    ],
    ids=str,
)
def test_what_has_no_bound_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(MyceliaError, match=message):
        simulate(settings(**change), out=tmp_path / "run")


@pytest.mark.parametrize("missing", ["unit", "epsilon", "delta", "clip"])
def test_half_a_block_is_refused(missing: str, tmp_path: Path) -> None:
    block = {key: value for key, value in PRIVACY.items() if key != missing}
    with pytest.raises(ConfigError, match=rf"privacy\.{missing}: missing"):
        simulate(settings() | {"privacy": block}, out=tmp_path / "run")


def test_without_a_block_nothing_is_claimed(tmp_path: Path) -> None:
    found = simulate({k: v for k, v in settings().items() if k != "privacy"}, out=tmp_path / "run")
    assert found.epsilon is None
    assert found.delta is None
    assert not (tmp_path / "run" / "privacy.jsonl").exists()
