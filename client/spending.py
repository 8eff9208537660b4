"""The privacy that this device spends of its own data: written down, and refused, before anything leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from mycelia.client.device_journal import DeviceJournal, Spent
from mycelia.engine.errors import DataError
from mycelia.engine.sums import Update
from mycelia.privacy.accounting import compose, spent
from mycelia.privacy.client_ledgers import ClientLedgers
from mycelia.privacy.client_plans import ClientPlan
from mycelia.privacy.federated import RecordRelease
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.pipeline import Sent, Stage

__all__ = ["Allow", "OwnRelease", "noise_source", "record_of"]

Allow = Callable[[Spent], None]
"""Raises `BudgetExceeded` if the owner does not allow that so much is spent in all."""


@dataclass(frozen=True)
class OwnRelease(Stage):
    """Asks the owner's budget, then writes an update down in this device's ledger before it leaves.

    Attributes:
        record: writes it down, within the budget of the run.
        data: what the data set is called.
        run: whose update it is.
        delta: of the run.
        allow: the owner's budget.
        journal: keeps what is spent by data set.
    """

    place: ClassVar[str] = "record"

    record: RecordRelease
    data: str
    run: str
    delta: float
    allow: Allow
    journal: DeviceJournal

    def device(self, update: Update, sent: Sent) -> Update:
        """The update, which is in the ledger now.

        Raises:
            BudgetExceeded: the run's budget or the owner's cannot pay for it.
            DataError: the round was released before with other numbers, or the ledger is shorter than it was.
        """
        ledger = self.record.ledgers.read(sent.client)
        before = [] if ledger is None else list(ledger)
        event = replace(self.record.event, step=sent.round * self.record.event.count)
        known = any(each.step <= event.step < each.step + each.count for each in before)
        epsilon = spent(compose([*before, *([] if known else [event])]), self.delta)
        was = [each.epsilon for each in self.journal.spent(self.data) if each.run == self.run]
        if was and epsilon < was[0]:
            raise DataError(
                f"it comes to ε {epsilon:.4g}, and there was {was[0]:.4g}",
                rule="a device goes on only with the whole ledgers that it wrote",
                fix="restore the file from a backup; without it, what was spent is not known",
                who=str(self.record.ledgers.path(sent.client)),
            )
        after = Spent(self.data, self.run, epsilon, self.delta)
        self.allow(after)
        self.journal.spend(after)
        return self.record.device(update, sent)


def record_of(
    folder: Path, data: str, run: str, allow: Allow, journal: DeviceJournal
) -> Callable[[ClientPlan, NoiseSource], Stage]:
    """What makes the stage of a run whose noise this device adds; see `Local.record`.

    Args:
        folder: of the run on this device.
        data: what the data set is called.
        run: its name.
        allow: the owner's budget.
        journal: of this device.
    """

    def record(plan: ClientPlan, source: NoiseSource) -> Stage:
        ledgers: ClientLedgers = plan.ledgers(folder, source)
        own = RecordRelease(ledgers, plan.event, plan.limits.uses)
        return OwnRelease(own, data, run, plan.config.delta, allow, journal)

    return record


def noise_source(kind: str, seed: int, key: Path) -> NoiseSource:
    """Where noise and secret draws of this device come from: the system, unless a run is to be repeatable.

    Args:
        kind: "os" or "seeded", as the run says.
        seed: of the run.
        key: file with this device's key, made at the first time.

    Raises:
        ConfigError: others than the owner may read the key.
        DataError: it was damaged.
    """
    if kind == "seeded":
        return NoiseSource.seeded(seed)
    if not key.exists():
        NoiseSource.os().save(key)
    return NoiseSource.load(key)
