"""Budgets stop at the last update they can pay for; monitors read what is in force."""

from __future__ import annotations

from dataclasses import replace

import dp_accounting as dp
import numpy as np
import pytest

from mycelia.engine.errors import BudgetExceeded, ConfigError
from mycelia.engine.events import Privacy
from mycelia.privacy.accounting import epsilon, state
from mycelia.privacy.budget import Budget, RdpMonitor, ZcdpMonitor
from mycelia.privacy.events import Event
from mycelia.privacy.ledger import Ledger
from mycelia.privacy.sampling import FullBatch, Poisson, Sampler, ShuffledEpochs
from mycelia.privacy.schedules import ExpDecay, NoiseSchedule


def one(step: int, z: float = 1.0, q: float = 0.02) -> Event:
    return Poisson(q).events(z, 1, first_step=step)[0]


def spend(budget: Budget, sampler: Sampler, z: float | NoiseSchedule, most: int = 5000) -> int:
    """Train until the budget refuses; the number of updates."""
    for step in range(most):
        now = z(step) if callable(z) else z
        try:
            budget.release(sampler.events(now, 1, first_step=step)[0])
        except BudgetExceeded:
            return step
    return most


def test_so_many_pass_and_one_more_does_not() -> None:
    budget = Budget(2.0, 1e-5)
    expected = budget.remaining(one(0))
    assert spend(budget, Poisson(0.02), 1.0) == expected == budget.ledger.steps
    assert budget.stopped_by == "budget"
    assert epsilon(Poisson(0.02), 1.0, expected, 1e-5).epsilon <= 2.0
    assert epsilon(Poisson(0.02), 1.0, expected + 1, 1e-5).epsilon > 2.0
    assert budget.spent == epsilon(Poisson(0.02), 1.0, expected, 1e-5).epsilon


def test_exact_against_the_closed_form() -> None:
    budget = Budget(3.0, 1e-6)
    event = FullBatch().events(20.0, 1)[0]
    steps = int((20 / dp.get_sigma_gaussian(3.0, 1e-6)) ** 2)
    assert budget.remaining(event) == steps
    budget.release(replace(event, count=steps))
    with pytest.raises(BudgetExceeded, match="0 more updates"):
        budget.allow(replace(event, step=steps))


def test_change_of_event() -> None:
    budget = Budget(2.0, 1e-5)
    for step in range(50):
        budget.release(one(step))
    left = budget.remaining(one(50, z=2.0))
    assert left > budget.remaining(one(50))
    for step in range(50, 60):
        budget.release(one(step, z=2.0))
    assert budget.remaining(one(60, z=2.0)) == left - 10
    # What others wrote into the ledger is seen.
    budget.ledger.record(one(60))
    assert budget.remaining(one(61, z=2.0)) < left - 10


def test_a_moving_clip_bound_is_one_event() -> None:
    """z is relative to the bound, so what was counted goes on to hold when the bound moves."""
    budget = Budget(2.0, 1e-5)
    left = budget.remaining(one(0))
    for step in range(5):
        budget.release(replace(one(step), clip=1.0 / (1 + step)))
    ahead = budget._ahead
    assert budget.remaining(one(5)) == left - 5
    assert budget._ahead is ahead


def test_a_release_done_again_is_free() -> None:
    """The last update that was affordable can be made again after a stop, and no other."""
    budget = Budget(2.0, 1e-5)
    last = budget.remaining(one(0))
    for step in range(last):
        budget.release(one(step), f"sum {step}", "stream")
    budget.release(one(last - 1), f"sum {last - 1}", "stream")
    assert budget.ledger.steps == last
    with pytest.raises(BudgetExceeded):
        budget.release(one(last), f"sum {last}", "stream")


def test_planned_schedule() -> None:
    shape = ExpDecay(2.0, 0.01)
    plan = Poisson(0.05).events(shape, 200)
    budget = Budget(2.0, 1e-5)
    left = budget.remaining(plan)
    assert 0 < left < 200
    assert state(plan[:left], 1e-5).epsilon <= 2.0 < state(plan[: left + 1], 1e-5).epsilon
    for event in plan[:left]:
        budget.release(event)
    with pytest.raises(BudgetExceeded):
        budget.release(plan[left])
    assert Budget(1e6, 1e-5).remaining(plan) == 200
    assert Budget(1.0, 1e-5).remaining([]) == 0


def test_epochs_are_whole() -> None:
    sampler = ShuffledEpochs(1, 10)
    budget = Budget(5.0, 1e-5, relation="zero-out")
    expected = budget.remaining(sampler.events(4.0, 1)[0])
    assert expected % 10 == 0
    assert spend(budget, sampler, 4.0) == expected


def test_nothing_overspends() -> None:
    budget = Budget(0.5, 1e-5)
    with pytest.raises(BudgetExceeded, match="per example"):
        budget.release(FullBatch().events(0.0, 1)[0])
    assert budget.ledger.steps == 0
    assert budget.spent == 0


def test_wrong_unit_or_relation() -> None:
    budget = Budget(1.0, 1e-5)
    with pytest.raises(ConfigError, match="unit"):
        budget.allow(Poisson(0.1).events(1.0, 1, unit="client")[0])
    with pytest.raises(ConfigError, match="relation"):
        budget.allow(ShuffledEpochs(1, 10).events(1.0, 1)[0])
    ledger = Ledger()
    ledger.record(one(0))
    with pytest.raises(ConfigError, match="two budgets"):
        Budget(1.0, 1e-5, unit="client", ledger=ledger)


@pytest.mark.parametrize(
    "arguments",
    [
        (0.0, 1e-5),
        (float("inf"), 1e-5),
        (1.0, 0.0),
        (1.0, 1.0),
        (1.0, 1e-5, "person"),
        (1.0, 1e-5, "user", "x"),
    ],
)
def test_refused_settings(arguments: tuple[float, float, str, str]) -> None:
    with pytest.raises(ConfigError):
        Budget(*arguments)


def test_no_warn_and_go_on() -> None:
    assert Budget(1.0, 1e-5, on_exceed="raise").on_exceed == "raise"
    with pytest.raises(ConfigError, match="stop, raise"):
        Budget(1.0, 1e-5, on_exceed="warn")


def test_gauge() -> None:
    budget = Budget(2.0, 1e-5)
    for step in range(20):
        budget.release(one(step))
    found = budget.gauge(one(20), step=20)
    assert isinstance(found, Privacy)
    assert found.epsilon == budget.spent
    assert found.values["next"] == epsilon(Poisson(0.02), 1.0, 21, 1e-5).epsilon
    assert found.values["remaining"] == budget.remaining(one(20))
    assert (found.level, found.step) == ("example", 20)


def test_monitor_epochs_within_budget() -> None:
    ledger = Ledger()
    budget = Budget(2.0, 1e-5, ledger=ledger, accountant="rdp")
    monitor = RdpMonitor(ledger, 1e-5, every=10)
    readings = 0
    for step in range(25):
        ledger.record(one(step, z=1.0 if step < 5 else 1.5))
        readings += monitor() is not None
    assert readings == 2
    assert [(each.step, each.window) for each in monitor.readings] == [(10, 10), (20, 10)]
    expected = state(ledger.events, 1e-5, accountant="rdp").epsilon
    monitor.every = 5
    reading = monitor()
    assert reading is not None
    assert reading.statement.epsilon == expected
    assert reading.statement.accountant == "rdp"
    # It goes by the noise in force, and gives the largest number of epochs.
    epochs = monitor.suggest_max_epochs(budget, 30)

    def after(count: int) -> float:
        more = Poisson(0.02).events(1.5, count, first_step=25)
        return state([*ledger, *more], 1e-5, accountant="rdp").epsilon

    assert after(epochs * 30) <= 2.0 < after((epochs + 1) * 30)
    assert monitor.suggest_max_epochs(budget, 30, one(25, z=3.0)) > epochs


def test_zcdp_is_not_amplified() -> None:
    ledger = Ledger()
    monitor = ZcdpMonitor(ledger, 1e-5)
    zs = np.linspace(1.0, 2.0, 7)
    for step, z in enumerate(zs):
        ledger.record(one(step, float(z)))
    reading = monitor()
    assert reading is not None
    assert reading.rho == pytest.approx(np.sum(1 / (2 * zs**2)))
    assert "unamplified bound" in str(reading)
    assert reading.statement.accountant == "pld"


def test_monitor_refusals() -> None:
    ledger = Ledger()
    with pytest.raises(ConfigError, match="every"):
        RdpMonitor(ledger, 1e-5, every=0)
    with pytest.raises(ConfigError, match="nothing was released"):
        RdpMonitor(ledger, 1e-5).suggest_max_epochs(Budget(1.0, 1e-5, ledger=ledger), 10)
    with pytest.raises(ConfigError, match="another ledger"):
        RdpMonitor(ledger, 1e-5).suggest_max_epochs(Budget(1.0, 1e-5), 10, one(0))
