"""Cohorts from groups in turn: who is drawn when, amplified ε with banded noise, and what has no bound."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from mycelia.engine.errors import MyceliaError
from mycelia.engine.events import Event
from mycelia.privacy.ledger import Ledger
from mycelia.privacy.sampling import groups_of
from mycelia.simulations import simulate
from tests.simulations.private_runs import TROUBLE, accepted, check_repeats, readings, run, settings

pytestmark = pytest.mark.usefixtures("captured_once")

BAND = {"name": "banded", "bands": 3, "band": [1.0, 0.5, 0.375]}
COLUMN = math.sqrt(1 + 0.5**2 + 0.375**2)
CYCLIC: dict[str, Any] = {"selector": {"name": "cyclic-poisson", "groups": 4}, "cohort": 5, "rounds": 10}


def cycled(z: float, passes: int, delta: float = 1e-3) -> float:
    """ε of so many draws of a group at the rate 4 · 5/50, by an accountant that knows no groups."""
    event = dp.PoissonSampledDpEvent(0.4, dp.GaussianDpEvent(z))
    return float(PLDAccountant().compose(event, passes).get_epsilon(delta))


def tight(found: float | None, expected: float) -> bool:
    return found is not None and expected * (1 - 5e-4) <= found <= expected * 1.005 + 1e-3


def test_banded_noise_is_amplified(tmp_path: Path) -> None:
    """⌈T/b⌉ draws of a group, each at z over a column's length (Choquette-Choo et al. 2023, theorem 4)."""
    seen: list[Event] = []
    found = run(tmp_path / "run", seen, **CYCLIC, privacy={"noise_multiplier": 1.5, "factorisation": BAND})
    assert tight(found.epsilon, cycled(1.5 / COLUMN, 3))
    for round, epsilon in enumerate([event.epsilon for event in readings(seen)][:10], 1):
        assert tight(epsilon, cycled(1.5 / COLUMN, -(-round // 4)))
    assert found.privacy is not None
    facts = {name: found.privacy[name] for name in ("factorisation", "groups", "separation", "uses")}
    assert facts == {"factorisation": "banded", "groups": 4, "separation": None, "uses": None}
    (statement,) = found.privacy["statements"]
    assert (statement["amplified"], statement["relation"], statement["sampling"]) == (
        True, "add-remove", "cyclic-poisson",
    )  # fmt: skip
    assert any("each client stays in the group" in each for each in statement["assumptions"])


def test_without_a_factorisation_the_noise_is_independent(tmp_path: Path) -> None:
    found = run(tmp_path / "run", **CYCLIC, privacy={"noise_multiplier": 1.5})
    assert tight(found.epsilon, cycled(1.5, 3))


def test_a_fitted_band_reaches_the_budget(tmp_path: Path) -> None:
    """Left to itself the band is fitted to the rounds, and z calibrated to ⌈T/b⌉ draws."""
    privacy = {"factorisation": {"name": "banded", "bands": 4}, "epsilon": 3.0}
    found = run(tmp_path / "run", **CYCLIC, privacy=privacy)
    assert found.epsilon is not None
    assert 2.99 < found.epsilon <= 3.0
    (event,) = Ledger.load(tmp_path / "run" / "privacy.jsonl")
    assert (event.count, event.period, event.mechanism) == (10, 4, "gaussian")
    assert 1 < event.sensitivity < math.sqrt(4)
    assert tight(found.epsilon, cycled(event.noise_multiplier / event.sensitivity, 3))


def test_clients_come_in_the_rounds_of_their_group(tmp_path: Path) -> None:
    run(tmp_path / "run", **CYCLIC | {"rounds": 16}, privacy={"factorisation": BAND})
    rounds = accepted(tmp_path / "run")
    assert sum(map(len, rounds.values())) > 40
    for client, own in rounds.items():
        (group,) = groups_of(np.array([client]), 4)
        assert {(round - 1) % 4 for round in own} == {group}


def test_workers_and_stops_change_neither_model_nor_epsilon(tmp_path: Path) -> None:
    given = CYCLIC | {"rounds": 5} | TROUBLE
    check_repeats(tmp_path, **given, privacy={"factorisation": BAND})


def test_failed_rounds_leave_no_gap(tmp_path: Path) -> None:
    """A round that failed is in the ledger: left out, its group's draw would be counted anew behind it."""
    for privacy in ({"factorisation": BAND}, {}):
        path = tmp_path / str(len(privacy))
        trouble = {"behaviour": {"dropout": {"train": 0.4}}, "round": {"quorum": 0.7, "max_failed_rounds": 9}}
        found = run(path, **CYCLIC, **trouble, privacy=privacy | {"noise_multiplier": 1.5})
        assert 0 < found.failed_rounds < 10
        assert Ledger.load(path / "privacy.jsonl").steps == 10
        assert tight(found.epsilon, cycled(1.5 / (COLUMN if privacy else 1), 3))


def test_safe_noise_is_that_of_the_system(tmp_path: Path) -> None:
    found = run(tmp_path / "run", **CYCLIC, privacy={"factorisation": BAND, "noise_source": "os"})
    assert found.privacy is not None
    assert found.privacy["mechanism"] == "discrete-gaussian"
    (event,) = Ledger.load(tmp_path / "run" / "privacy.jsonl")
    assert event.mechanism == "discrete-gaussian"
    assert found.epsilon is not None
    assert found.epsilon <= 50.0


def test_a_selector_that_needs_correlated_noise_has_it_on_the_grid_too(tmp_path: Path) -> None:
    for name, privacy in (("a", {"mechanism": "discrete-gaussian"}), ("b", {"noise_source": "os"})):
        found = run(tmp_path / name, selector="availability", privacy=privacy)
        assert found.privacy is not None
        assert (found.privacy["mechanism"], found.privacy["factorisation"]) == ("discrete-gaussian", "blt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selector": "cyclic-poisson"}, "groups"),
        ({"selector": {"name": "cyclic-poisson", "groups": 0}}, "groups"),
        ({"selector": {"name": "cyclic-poisson", "groups": 11}}, "at most 10 bands"),
        ({"privacy": {"factorisation": "blt"}}, "CyclicPoisson with Banded"),
        ({"privacy": {"factorisation": {"name": "banded", "bands": 5}}}, "5 bands for 4 groups"),
        ({"privacy": {"factorisation": BAND, "clip": {"name": "quantile"}}}, "one size"),
        ({"privacy": {"participation": {"uses": 2}}}, "draws anybody in any round"),
        ({"round": {"over_select": 1.5}}, "must be 1"),
        ({"round": {"on_failure": "replace"}}, "must not be replace"),
    ],
    ids=str,
)
def test_what_has_no_bound_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(MyceliaError, match=message):
        simulate(settings(**CYCLIC | change), out=tmp_path / "run")
