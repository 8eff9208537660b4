"""Budgets that stop training at the last update they can pay for, and monitors that say what is spent."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from mycelia.engine.errors import BudgetExceeded, ConfigError
from mycelia.engine.events import Privacy
from mycelia.privacy.accounting import ACCOUNTANTS, Statement, compose, spent
from mycelia.privacy.calibrate import MOST_STEPS, largest
from mycelia.privacy.events import RELATIONS, UNITS, Event, choose
from mycelia.privacy.ledger import Ledger

__all__ = ["Budget", "RdpMonitor", "Reading", "ZcdpMonitor"]


class _Ahead:
    """The updates to come that were counted: one event, of any length, or the events of a plan.

    Args:
        events: what is to come.
        single: whether it is one event to repeat.
        left: updates that the budget allows.

    Attributes:
        left: updates that are left.
    """

    def __init__(self, events: tuple[Event, ...], single: bool, left: int) -> None:
        self.events, self.single, self.left = events, single, left
        self._ends = list(accumulate(event.count for event in events))
        self._done = 0

    def next_is(self, event: Event) -> bool:
        """Whether these updates come next."""
        if self.single:
            first = self.events[0]
            # A sampler with a period counts steps in a row as one pass; others do not look at the number.
            return _alike(event, first) and (event.period == 1 or event.step == first.step + self._done)
        place = bisect_right(self._ends, self._done)
        if place == len(self._ends) or self._done + event.count > self._ends[place]:
            return False
        planned = self.events[place]
        step = planned.step + self._done - (self._ends[place] - planned.count)
        return _alike(event, planned) and event.step == step

    def pass_over(self, count: int) -> None:
        """These updates were released."""
        self._done += count
        self.left -= count


class Budget:
    """The most that may be spent on one ledger's data.

    `allow` is asked before every release. How many updates are left is solved once, for the event that is
    asked for or for a planned schedule, and then counted down, so that asking costs no time.

    Args:
        epsilon: the most ε, above 0.
        delta: δ, in (0, 1).
        unit: whom it protects: "example", "user" or "client".
        relation: the neighbours: "add-remove", "replace-one" or "zero-out".
        ledger: what was spent; an empty one in memory by default.
        accountant: "auto", "pld" or "rdp".
        on_exceed: what a training loop does when `allow` refuses: "stop" in good order, or "raise".

    Attributes:
        ledger: what was spent.
        stopped_by: "budget" once a release was refused, else "".

    Raises:
        ConfigError: a value is out of range, or the ledger is about another unit or relation.
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        unit: str = "example",
        relation: str = "add-remove",
        *,
        ledger: Ledger | None = None,
        accountant: str = "auto",
        on_exceed: str = "stop",
    ) -> None:
        if not 0 < epsilon < math.inf:
            raise ConfigError(f"epsilon is {epsilon}", rule="above 0 and finite", who="budget")
        if not 0 < delta < 1:
            raise ConfigError(f"delta is {delta}", rule="above 0 and below 1", who="budget")
        self.epsilon, self.delta = epsilon, delta
        self.unit, self.relation = choose("unit", unit, UNITS), choose("relation", relation, RELATIONS)
        self.accountant = choose("accountant", accountant, ACCOUNTANTS)
        self.on_exceed = choose("on_exceed", on_exceed, ("stop", "raise"))
        self.ledger = Ledger() if ledger is None else ledger
        self.stopped_by = ""
        self._ahead: _Ahead | None = None
        self._steps = self.ledger.steps
        self._allowed: Event | None = None
        self._spent: tuple[int, int, float] | None = None
        self._checked: Event | None = None
        for event in self.ledger:
            self._check(event)

    @property
    def spent(self) -> float:
        """ε spent so far."""
        now = (len(self.ledger), self.ledger.steps)
        if self._spent is None or self._spent[:2] != now:
            self._spent = (*now, spent(compose(self.ledger), self.delta, self.accountant))
        return self._spent[2]

    def remaining(self, event: Event | Sequence[Event]) -> int:
        """How many more updates there are: so many are allowed, one more is refused.

        Args:
            event: the update to repeat; or a plan, the events of a schedule in order.

        Returns:
            The number of updates, at most 10,000,000 for an event and the whole plan for a plan.

        Raises:
            ConfigError: an event is about another unit or relation, or has no bound.
        """
        if isinstance(event, Event):
            return self._find(event).left
        plan = tuple(event)
        for each in plan:
            self._check(each)
        self._settle()
        if self._ahead is None or self._ahead.events != plan:
            self._ahead = self._solve(plan, single=False)
        return self._ahead.left

    def allow(self, event: Event) -> None:
        """Pass if the budget can pay for this release; it is not recorded yet.

        Raises:
            BudgetExceeded: it cannot; nothing may be released.
            ConfigError: it is about another unit or relation than the budget, or has no bound.
        """
        left = self._find(event).left
        if event.count <= left:
            self._allowed = event
            return
        self.stopped_by = "budget"
        raise BudgetExceeded(
            f"{left} more updates of this kind are left, and {event.count} are asked for "
            f"(ε {self.spent:.6g} of {self.epsilon:g} at δ = {self.delta:g} is spent)",
            rule=f"at most ε = {self.epsilon:g} per {self.unit} ({self.relation})",
            fix="stop here; the model stands as it is after the last update",
            who="budget",
        )

    def release(self, event: Event, release: str = "", stream: str = "") -> None:
        """Ask for a release and write it down; call it right before the release.

        One that is in the ledger already costs nothing when it is done again.

        Args:
            event: what is about to be released.
            release: see `Ledger.record`.
            stream: see `Ledger.record`.

        Raises:
            BudgetExceeded: the budget cannot pay for it; nothing is written.
            MyceliaError: the ledger cannot be written, or its stream was used for other inputs.
        """
        if not self.ledger.holds(event, release, stream):
            self.allow(event)
        self.ledger.record(event, release, stream)

    def gauge(self, event: Event, step: int | None = None) -> Privacy:
        """The run event that a view shows: what is spent, what is left, and ε after the next update.

        Computes two figures; call it as often as a view needs it.

        Args:
            event: the update that comes next.
            step: the training step.
        """
        after = spent(compose([*self.ledger, replace(event, count=1)]), self.delta, self.accountant)
        values = {"remaining": float(self.remaining(event)), "next": after, "budget": self.epsilon}
        return Privacy(epsilon=self.spent, delta=self.delta, level=self.unit, step=step, values=values)

    def _find(self, event: Event) -> _Ahead:
        """What was counted for this update, or is now."""
        self._check(event)
        self._settle()
        if self._ahead is None or not self._ahead.next_is(event):
            self._ahead = self._solve((event,), single=True)
        return self._ahead

    def _settle(self) -> None:
        """Take in what was recorded since; anything but what was allowed makes the count void."""
        if self.ledger.steps == self._steps:
            return
        allowed, last = self._allowed, self.ledger.last
        expected = (
            allowed is not None
            and last is not None
            and self.ledger.steps == self._steps + allowed.count
            and _alike(last, allowed)
            and last.step + last.count == allowed.step + allowed.count
        )
        if expected and allowed is not None and self._ahead is not None:
            self._ahead.pass_over(allowed.count)
        else:
            self._ahead = None
        self._steps, self._allowed = self.ledger.steps, None

    def _solve(self, events: tuple[Event, ...], *, single: bool) -> _Ahead:
        before = self.ledger.events

        def after(count: int) -> float:
            coming = [replace(events[0], count=count)] if single else _first(events, count)
            return spent(compose([*before, *coming]), self.delta, self.accountant)

        most = MOST_STEPS if single else sum(each.count for each in events)
        return _Ahead(events, single, largest(after, self.epsilon, most) if most else 0)

    def _check(self, event: Event) -> None:
        if event is self._checked:
            return
        for name in ("unit", "relation"):
            if getattr(event, name) != getattr(self, name):
                raise ConfigError(
                    f"a release with the {name} {getattr(event, name)!r}, and a budget for "
                    f"{getattr(self, name)!r}",
                    rule="a budget is about one unit and one relation",
                    fix=f"say {name}={getattr(event, name)!r} in the budget, or keep two budgets",
                    who="budget",
                )
        self._checked = event


@dataclass(frozen=True)
class Reading:
    """What a monitor says.

    Attributes:
        step: updates in the ledger.
        window: updates since the reading before.
        statement: ε and all that belongs to it.
        rho: ρ of zero-concentrated privacy as if nothing were sampled, Σ 1/(2z²); None for `RdpMonitor`.
    """

    step: int
    window: int
    statement: Statement
    rho: float | None = None

    def __str__(self) -> str:
        rho = "" if self.rho is None else f"ρ ≤ {self.rho:.6g} (unamplified bound); "
        return f"step {self.step} (last {self.window}): {rho}{self.statement}"


class _Monitor:
    """A callback that reads a ledger.

    Args:
        ledger: what is released, with the noise in force at each update.
        delta: δ, in (0, 1).
        every: updates from one reading to the next, at least 1.

    Attributes:
        readings: all that were taken.
    """

    _accountant = "auto"

    def __init__(self, ledger: Ledger, delta: float, every: int = 1) -> None:
        if every < 1:
            raise ConfigError(f"every is {every}", rule="at least 1", who=type(self).__name__)
        self.ledger, self.delta, self.every = ledger, delta, every
        self.readings: list[Reading] = []
        self._read = 0

    def __call__(self) -> Reading | None:
        """Call it after each update; a reading whenever `every` of them have passed since the last one."""
        window = self.ledger.steps - self._read
        if window < self.every:
            return None
        self._read = self.ledger.steps
        statement = self.ledger.statement(self.delta, self._accountant)
        self.readings.append(Reading(self.ledger.steps, window, statement, self._rho()))
        return self.readings[-1]

    def suggest_max_epochs(self, budget: Budget, steps_per_epoch: int, event: Event | None = None) -> int:
        """The largest number of further epochs within the budget.

        Args:
            budget: over the same ledger.
            steps_per_epoch: updates in an epoch, at least 1.
            event: the update that is to come; like the last one by default.

        Raises:
            ConfigError: the budget is over another ledger, or there is no update to go by.
        """
        if steps_per_epoch < 1:
            raise ConfigError(f"steps_per_epoch is {steps_per_epoch}", rule="at least 1", who="monitor")
        if budget.ledger is not self.ledger:
            raise ConfigError(
                "the budget is over another ledger",
                rule="spent and left are of the same data",
                fix="make the budget with ledger=monitor.ledger",
                who="monitor",
            )
        last = self.ledger.last
        if event is None:
            if last is None:
                raise ConfigError(
                    "nothing was released yet",
                    rule="epochs are of updates with known noise and sampling",
                    fix="pass the event of an update",
                    who="monitor",
                )
            event = replace(last, step=last.step + last.count, count=1)
        return budget.remaining(event) // steps_per_epoch

    def _rho(self) -> float | None:
        return None


class RdpMonitor(_Monitor):
    """Reads ε by Rényi divergences."""

    _accountant = "rdp"


class ZcdpMonitor(_Monitor):
    """Reads ρ of zero-concentrated privacy, beside ε.

    Zero-concentrated privacy is not amplified by sampling (Bun & Steinke, TCC 2016), so ρ is that of the same
    updates over all examples: an upper bound, and labelled so.
    """

    def _rho(self) -> float:
        total = 0.0
        for event in self.ledger:
            if event.mechanism not in ("gaussian", "discrete-gaussian"):
                return math.inf
            z = event.noise_multiplier / (event.max_examples * event.reach)
            total += event.count / (2 * z * z) if z else math.inf
        return total


def _alike(event: Event, other: Event) -> bool:
    """Whether two events cost the same: z is relative to the clip bound, so that bound does not matter."""
    first, second = (replace(each, step=0, count=1, clip=None) for each in (event, other))
    return event is other or first == second


def _first(ahead: Sequence[Event], count: int) -> list[Event]:
    """The first `count` updates of a plan."""
    taken = []
    for event in ahead:
        if count <= 0:
            break
        taken.append(event if event.count <= count else replace(event, count=count))
        count -= event.count
    return taken
