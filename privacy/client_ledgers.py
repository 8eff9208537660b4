"""The ledgers of a federation whose clients add the noise themselves: one file for each client."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote

from mycelia.engine.errors import BudgetExceeded, DataError
from mycelia.privacy.accounting import UNSTATED
from mycelia.privacy.events import Event
from mycelia.privacy.ledger import Ledger

__all__ = ["FOLDER", "ClientLedgers"]

FOLDER = "ledgers"
"""Their folder's name in a run folder."""

_STREAM = "client"


@dataclass(frozen=True)
class ClientLedgers:
    """What each client has released, by client; files are made as clients take part.

    Attributes:
        folder: where they lie.
        noise_source: where noise and draws come from, as every statement says it.
    """

    folder: Path
    noise_source: str = UNSTATED

    def record(self, client: int | str, event: Event, release: str, uses: int) -> None:
        """Write down what a client is about to send; what it sends again counts once.

        Args:
            client: who sends.
            event: what it releases, as one round's worth.
            release: hash of the numbers.
            uses: most rounds that its budget pays for.

        Raises:
            BudgetExceeded: the budget is spent; nothing is written and nothing may be sent.
            DataError: the step was released before with other numbers, or the ledger is damaged.
            MyceliaError: it cannot be written.
        """
        path = self.path(client)
        ledger = Ledger.load(path, write=True) if path.exists() else self._begin(path)
        try:
            if ledger.holds(event, release, _STREAM):
                return
            if ledger.steps >= uses * event.count:
                raise BudgetExceeded(
                    f"the budget of client {client} has paid for {uses} rounds",
                    rule="a client whose budget is spent takes no more part",
                    fix="leave it out of the cohort",
                    who="client ledger",
                )
            ledger.record(event, release, _STREAM)
        finally:
            ledger.close()

    def read(self, client: int | str) -> Ledger | None:
        """A client's ledger; None where it has sent nothing.

        Raises:
            DataError: it is damaged.
        """
        path = self.path(client)
        return Ledger.load(path) if path.exists() else None

    def clients(self) -> list[str]:
        """The clients that have a ledger."""
        return sorted(unquote(path.stem) for path in self.folder.glob("*.jsonl"))

    def check(self, rounds: Iterable[tuple[int | str, int]], event: Event) -> None:
        """Refuse to go on where a ledger holds less than is known to have been released.

        Args:
            rounds: clients, and how many rounds each took part in.
            event: what a round releases.

        Raises:
            DataError: a ledger is missing, shortened or edited, or is about something else.
        """
        for client, count in rounds:
            ledger = self.read(client)
            if ledger is None or ledger.steps < count * event.count:
                raise DataError(
                    f"{0 if ledger is None else ledger.steps} releases, and there were {count * event.count}",
                    rule="a run goes on only with the whole ledgers that it wrote",
                    fix="restore the file from a backup; without it, what was spent is not known",
                    who=str(self.path(client)),
                )
            for found in ledger:
                if replace(found, step=0, count=1) != replace(event, step=0, count=1):
                    raise DataError(
                        f"a release of another kind at step {found.step}",
                        rule="all rounds of a client are of one kind",
                        fix="restore the file from a backup",
                        who=str(self.path(client)),
                    )

    def path(self, client: int | str) -> Path:
        """The file of a client, there or not."""
        return self.folder / f"{quote(str(client), safe='')}.jsonl"

    def _begin(self, path: Path) -> Ledger:
        """A new ledger, there whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".part")
        scratch.unlink(missing_ok=True)  # of a client that was killed
        ledger = Ledger.create(scratch, self.noise_source)
        os.replace(scratch, path)
        return ledger
