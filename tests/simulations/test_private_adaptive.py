"""A clip bound that follows the clients' updates: public, recorded, resumed, and paid for."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from mycelia.engine.events import Event
from mycelia.privacy.accounting import epsilon
from mycelia.privacy.ledger import Ledger
from mycelia.privacy.sampling import Poisson
from tests.simulations.private_runs import check_repeats, readings, run

pytestmark = pytest.mark.usefixtures("captured_once")

ADAPTIVE = {"clip": {"name": "quantile", "bound": 0.1, "rate": 0.5}, "noise_multiplier": 0.8}


def ledger(path: Path) -> Ledger:
    return Ledger.load(path / "privacy.jsonl")


def test_an_adaptive_bound_is_public_recorded_and_resumed(tmp_path: Path) -> None:
    found = check_repeats(tmp_path, privacy=ADAPTIVE)
    assert found.epsilon == epsilon(Poisson(0.2), 0.8, 5, 1e-3, unit="client").epsilon  # z is the total
    bounds = [event.clip for event in ledger(tmp_path / "whole")]
    assert bounds[0] == 0.1
    assert len({*bounds}) == 5
    assert all(event.noise_multiplier == 0.8 for event in ledger(tmp_path / "whole"))
    assert found.privacy is not None
    assert found.privacy["clip"] == "quantile"
    assert found.privacy["bound"] not in bounds  # that of the next round
    steps = [math.log(b / a) for a, b in pairwise([bound or 0.0 for bound in bounds])]
    assert all(0 < abs(step) < 0.5 * 3 for step in steps)  # rate × a share and its noise


def test_events_say_the_bound_of_their_round(tmp_path: Path) -> None:
    seen: list[Event] = []
    run(tmp_path / "run", seen, privacy=ADAPTIVE)
    bounds = [event.clip for event in ledger(tmp_path / "run")]
    assert [event.values["clip"] for event in readings(seen)[:5]] == bounds


def test_the_bound_goes_to_where_the_updates_are(tmp_path: Path) -> None:
    """From far below and far above the norms it comes towards them."""
    ends = []
    for bound in (1e-3, 100.0):
        clip = {"name": "quantile", "bound": bound, "rate": 1.0, "sigma_b": 2.0}
        found = run(tmp_path / f"{bound}", privacy={"clip": clip, "noise_multiplier": 0.8}, rounds=8)
        assert found.privacy is not None
        ends.append(found.privacy["bound"])
    assert ends[0] > 0.01
    assert ends[1] < 10.0
