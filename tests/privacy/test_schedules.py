"""Noise schedules against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mycelia.engine.errors import ConfigError
from mycelia.privacy.ledger import Ledger
from mycelia.privacy.sampling import Poisson
from mycelia.privacy.schedules import Constant, ExpDecay, StepDecay, TimeDecay, parse


def test_formulas() -> None:
    for t in (0, 1, 9, 10, 137):
        assert Constant(1.5)(t) == 1.5
        assert TimeDecay(2.0, 0.1)(t) == pytest.approx(2 / (1 + 0.1 * t))
        assert StepDecay(2.0, 0.25, 10)(t) == pytest.approx(2 * 0.75 ** (t // 10))
        assert ExpDecay(2.0, 0.03)(t) == pytest.approx(2 * math.exp(-0.03 * t))


@pytest.mark.parametrize("schedule", [Constant(2.0), TimeDecay(2.0), StepDecay(2.0, 0.1, 3), ExpDecay(2.0)])
def test_laws(schedule: Constant) -> None:
    whole = schedule(np.arange(20))
    assert whole.shape == (20,)
    assert whole.tolist() == [schedule(t) for t in range(20)]
    assert isinstance(schedule(3), float)
    assert np.all(np.diff(whole) <= 0)
    np.testing.assert_allclose(schedule.scaled(3.0)(np.arange(20)), 3 * whole)


def test_schedule_single_source() -> None:
    """Whoever leaves the decay out gets the same one, and the ledger has each step's own noise."""
    assert parse("exp", 2.0) == ExpDecay(2.0)
    assert parse("time", 2.0) == TimeDecay(2.0)
    assert parse("step", 2.0) == StepDecay(2.0)
    assert parse("step:0.5", 2.0) == StepDecay(2.0, 0.5)
    assert parse("step:0.5:7", 2.0) == StepDecay(2.0, 0.5, 7)
    assert parse("exp:0.2", 2.0) == ExpDecay(2.0, 0.2)
    schedule, ledger = ExpDecay(2.0, 0.2), Ledger()
    for step in range(5):
        ledger.record(Poisson(0.1).events(schedule(step), 1, first_step=step)[0])
    assert list(ledger) == Poisson(0.1).events(schedule, 5)


@pytest.mark.parametrize(
    "text", ["cosine:1", "exp:x", "exp:1:2", "exp:-1", "step:1", "step:0.1:0", "step:0.1:1.5", "time:", ""]
)
def test_refusals(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text, 1.0)


def test_range() -> None:
    for bad in (-1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="first value"):
            ExpDecay(bad)
