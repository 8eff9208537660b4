"""What a round asks of its driver, and what it reports at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from mycelia.aggregator.updates import ClientId, Reason
from mycelia.engine.errors import RoundAborted

__all__ = [
    "Abort",
    "AbortReason",
    "Accept",
    "Configure",
    "Effect",
    "Evaluate",
    "Finish",
    "Merge",
    "Outcome",
    "Persist",
    "Phase",
    "Reject",
    "Status",
]

Phase = Literal["select", "configure", "train", "merge", "evaluate", "done"]
Status = Literal["accepted", "failed", "late", "duplicate", "stale", "rejected", "dropped", "unused"]
AbortReason = Literal[
    "below_quorum",
    "no_survivors",
    "all_failed",
    "zero_weight",
    "budget_over",
    "client_failed",
    "merge_failed",
    "secure_sum",
    "cancelled",
]

_LISTED_CAUSES = 20


class Outcome(NamedTuple):
    """What became of a client, or of a message that was refused."""

    client: ClientId
    attempt: int
    status: Status
    phase: Phase
    cause: str = ""
    hint: str = ""


class Configure(NamedTuple):
    """Ask these clients to train; the update must name this round and attempt."""

    round: int
    attempt: int
    clients: tuple[ClientId, ...]


class Accept(NamedTuple):
    """Add the update to the sum; on a server, make that durable before it is acknowledged."""

    client: ClientId
    attempt: int
    staleness: int
    """Rounds that passed since the model was sent: 1 for a straggler of the round before."""


class Reject(NamedTuple):
    """Tell the client that its update does not count, and why."""

    client: ClientId
    round: int
    attempt: int
    reason: Reason
    hint: str


class Persist(NamedTuple):
    """Write this record before carrying out the effects that follow."""

    record: Literal["issued", "frozen", "finished", "failed"]
    clients: tuple[ClientId, ...]


class Merge(NamedTuple):
    """The sum is final: merge it, then call `merged`. After an empty Poisson draw there is nothing to add."""

    survivors: tuple[ClientId, ...]


class Evaluate(NamedTuple):
    """Measure the merged model, then call `evaluated`."""


class Finish(NamedTuple):
    """The round is over and its model stands."""

    survivors: tuple[ClientId, ...]
    outcomes: tuple[Outcome, ...]
    refused: tuple[Outcome, ...]
    """Messages that changed nothing: duplicates, late and stale updates."""
    carried: Mapping[ClientId, int]
    """Stragglers whose update the next round takes, and their attempt (`carried` of `Round`)."""
    evaluated: bool


class Abort(NamedTuple):
    """The round failed; the model stays as it was."""

    round: int
    reason: AbortReason
    phase: Phase
    have: int
    need: int
    outcomes: tuple[Outcome, ...]
    refused: tuple[Outcome, ...]
    cause: str = ""

    def error(self) -> RoundAborted:
        """The exception to raise, with each distinct cause and the clients it befell."""
        rule, fix = _ADVICE[self.reason]
        found = f"{self.reason.replace('_', ' ')}: {self.have} of {self.need} needed updates"
        causes: dict[tuple[str, str, str, str], list[str]] = {}
        for outcome in self.outcomes:
            if outcome.status not in {"accepted", "unused"}:
                key = (outcome.status, outcome.phase, outcome.cause, outcome.hint)
                causes.setdefault(key, []).append(str(outcome.client))
        lines = [self.cause] if self.cause else []
        for (status, phase, cause, hint), clients in list(causes.items())[:_LISTED_CAUSES]:
            names = ", ".join(clients[:10]) + (f" and {len(clients) - 10} more" if len(clients) > 10 else "")
            lines.append(f"client {names}, {status} in {phase}: {'; '.join(filter(None, (cause, hint)))}")
        if len(causes) > _LISTED_CAUSES:
            lines.append(f"and {len(causes) - _LISTED_CAUSES} other causes")
        who = f"round {self.round}, {self.phase}"
        return RoundAborted("\n    ".join([found, *lines]), rule=rule, fix=fix, who=who)


Effect = Configure | Accept | Reject | Persist | Merge | Evaluate | Finish | Abort

_ADVICE: Mapping[AbortReason, tuple[str, str]] = {
    "below_quorum": ("a round needs its quorum of updates", "lower round.quorum, or raise round.over_select"),
    "no_survivors": (
        "a round needs at least one update",
        "look at the causes; for late clients raise round.budget_s",
    ),
    "all_failed": ("a round in which every client fails is a failed round", "look at the causes"),
    "zero_weight": ("weights are finite, positive and at most update.max_weight", "look at the causes"),
    "budget_over": ("a round ends within round.budget_s", "raise round.budget_s"),
    "client_failed": ("round.on_failure = 'abort' lets no client fail", "use drop, retry or replace"),
    "merge_failed": ("a model that is not sound is never published", "look at the cause"),
    "secure_sum": (
        "a secure sum opens for enough clients, whole, or not at all",
        "look at the cause; lower round.quorum, or raise secure_sum.dropout",
    ),
    "cancelled": ("", ""),
}
