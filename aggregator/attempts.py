"""How often a round of secure sums is tried, with whom and until when: at most three times, in one budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.canonical import Reason, SecureSumError

__all__ = ["LEAST_SHARE", "MAX_ATTEMPTS", "RoundAttempts", "Suspects"]

MAX_ATTEMPTS: Final = 3
LEAST_SHARE: Final = 0.1
"""The share of a round's budget that another attempt needs: its phases shrink to that, and no further."""

_FINAL: Final = {
    Reason.CONFIG,
    Reason.OVERFLOW,
    Reason.WEAK_PARAMETERS,
    Reason.BUDGET,
    Reason.EMPTY_WEIGHT,
    Reason.JOURNAL,
}
"""Reasons that another attempt would meet again."""


class Suspects:
    """Whom a job goes on without, and who complained about whom; it outlives the rounds.

    Attributes:
        complaints: complainer to the owners it named, in order.
        excluded: clients that no later round asks.
    """

    def __init__(self) -> None:
        self.complaints: dict[int, list[int]] = {}
        self.excluded: set[int] = set()

    def note(self, error: SecureSumError) -> frozenset[int]:
        """Take in how an attempt ended; gives whom the round goes on without.

        A complaint cannot be proven: the owner is left out of the round's next attempt, both names are kept,
        and whoever complains a second time is left out of the job. An owner whose good shares rebuild
        something else than it announced is left out of the job at once.
        """
        owner, by = error.owner, error.client
        if error.reason == Reason.BAD_SHARE and owner is not None and by is not None:
            named = self.complaints.setdefault(by, [])
            named.append(owner)
            if len(named) > 1:
                self.excluded.add(by)
            return frozenset({owner} | ({by} & self.excluded))
        if error.reason in (Reason.SHARE_MISMATCH, Reason.SUM_OUT_OF_RANGE) and owner is not None:
            self.excluded.add(owner)
            return frozenset({owner})
        return frozenset()


class RoundAttempts:
    """The attempts of one round.

    Args:
        clients: who can be asked; those that the job excludes are not.
        n_min: the fewest a sum is opened for.
        budget: seconds for all attempts together.
        suspects: of the job.
        began: when the round did, in seconds on a clock that does not run backwards.
        limit: attempts, 1 to `MAX_ATTEMPTS`.

    Attributes:
        clients: who is asked in this attempt, increasing.
        number: of this attempt, from 0.

    Raises:
        ConfigError: a limit or a budget out of range.
    """

    def __init__(
        self,
        clients: Iterable[int],
        n_min: int,
        budget: float,
        suspects: Suspects,
        *,
        began: float = 0.0,
        limit: int = MAX_ATTEMPTS,
    ) -> None:
        if not 1 <= limit <= MAX_ATTEMPTS:
            raise ConfigError(f"{limit} attempts", rule=f"1 to {MAX_ATTEMPTS}", who="secure sum")
        if not budget > 0:
            raise ConfigError(f"a budget of {budget} s", rule="above 0", who="secure sum")
        self.clients = tuple(sorted(set(clients) - suspects.excluded))
        self.number = 0
        self._n_min, self._budget, self._limit = n_min, budget, limit
        self._suspects, self._began = suspects, began

    def left(self, now: float) -> float:
        """Seconds of the budget."""
        return self._budget - (now - self._began)

    def deadlines(self, phases: Iterable[float], now: float) -> tuple[float, ...]:
        """How long each phase of this attempt may take, so that all fit into what is left.

        Args:
            phases: how long they take in a round with its whole budget, seconds.
            now: when the attempt begins.
        """
        full = tuple(phases)
        factor = min(1.0, self.left(now) / sum(full))
        return tuple(seconds * factor for seconds in full)

    def go_on(self, error: SecureSumError, silent: Iterable[int], now: float) -> bool:
        """Whether there is another attempt, and if so begin it: without those who failed this one.

        A release is final: once clients were asked to open, their round has no other attempt.

        Args:
            error: why this one ended.
            silent: who did not answer.
            now: when it ended.
        """
        out = self._suspects.note(error) | frozenset(silent)
        left = tuple(client for client in self.clients if client not in out)
        over = error.reason in _FINAL or error.phase == "unmask" or self.number + 1 >= self._limit
        if over or len(left) < self._n_min or self.left(now) < LEAST_SHARE * self._budget:
            return False
        self.clients, self.number = left, self.number + 1
        return True
