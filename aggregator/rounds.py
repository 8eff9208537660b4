"""The round as a state machine without I/O: events and times go in, effects come out.

    select → configure → train → merge → evaluate

The driver (simulator, service or test) carries out the effects and owns the clock; times are seconds on any
clock that does not run backwards. An event at or after a deadline is late, whether or not a tick came first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from mycelia.aggregator.config import RoundConfig
from mycelia.aggregator.deadlines import Deadlines, derive
from mycelia.aggregator.effects import (
    Abort,
    AbortReason,
    Accept,
    Configure,
    Effect,
    Evaluate,
    Finish,
    Merge,
    Outcome,
    Persist,
    Phase,
    Reject,
    Status,
)
from mycelia.aggregator.updates import ClientId, Expected, Reason, Refusal, UpdateMeta, check_update
from mycelia.engine.errors import ProtocolError

__all__ = ["Round", "asked_for", "candidates_for", "most_updates", "quorum_for"]

_KEPT_REFUSALS = 1000  # a client that repeats itself must not fill the memory
_ROUNDING = 1e-9  # 1.1 × 10 is a little more than 11 in floating point


def asked_for(k: int, config: RoundConfig) -> int:
    """How many clients are asked so that k answer: k × over_select, rounded up."""
    return math.ceil(k * config.over_select - _ROUNDING)


def candidates_for(k: int, config: RoundConfig) -> int:
    """How many clients to draw for a round: those asked, and those who may replace them."""
    return asked_for(k, config) * (config.max_attempts if config.on_failure == "replace" else 1)


def quorum_for(k: int, config: RoundConfig) -> int:
    """The fewest updates that make a round of k: the quorum's share of k, rounded up, at least 1."""
    return max(1, math.ceil(k * config.quorum - _ROUNDING)) if k else 0


def most_updates(k: int, clients: int, config: RoundConfig, fixed_size: bool) -> int:
    """The most updates in one sum of rounds of k.

    Args:
        k: clients of a round.
        clients: how many there are.
        config: of the rounds.
        fixed_size: whether the selector draws k; under Poisson a round may, however unlikely, draw everybody.
    """
    asked = asked_for(k, config) if fixed_size else clients
    return asked * 2 if config.stragglers == "next_round" else asked


class _Slot:
    """A client that was asked; pending until it has an outcome."""

    __slots__ = ("attempt", "outcome", "place", "ready", "round")

    def __init__(self, round: int, attempt: int, place: int, ready: bool) -> None:
        self.round = round  # of the model it trains on
        self.attempt = attempt
        self.place = place  # how many clients or attempts its place in the cohort has seen
        self.ready = ready
        self.outcome: Outcome | None = None


class Round:
    """One round.

    Args:
        expected: round, first attempt, schema and caps of the updates.
        candidates: distinct clients in the order of the draw, `candidates_for(k)` of them or fewer; those
            beyond the number asked may replace one that fails.
        k: updates wanted; the round closes with the k-th. Under Poisson, the number drawn.
        config: budget and policies.
        evaluate: whether this round is evaluated.
        carried: stragglers of the round before and the attempt they were asked in; they count as asked.
        deadlines: of its phases; None: those of the budget.
    """

    def __init__(
        self,
        expected: Expected,
        candidates: Sequence[ClientId],
        k: int,
        config: RoundConfig,
        *,
        evaluate: bool = True,
        carried: Mapping[ClientId, int] | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self._expected, self._k, self._config, self._evaluate = expected, k, config, evaluate
        self._deadlines = deadlines or derive(config.budget_s)
        self._need = quorum_for(k, config)
        self._slots: dict[ClientId, _Slot] = {
            client: _Slot(expected.round - 1, attempt, 1, True) for client, attempt in (carried or {}).items()
        }
        self._candidates = [client for client in candidates if client not in self._slots]
        self._next_candidate = 0
        self._accepted = self._pending = self._unready = 0
        self._refused: list[Outcome] = []
        self._survivors: tuple[ClientId, ...] = ()
        self._carried: dict[ClientId, int] = {}
        self._phase: Phase = "select"
        self._began = self._now = self._next = -math.inf
        self.result: Finish | Abort | None = None

    @property
    def phase(self) -> Phase:
        """Where the round is."""
        if self._phase == "configure" and self._unready == 0:
            return "train"
        return self._phase

    @property
    def needed(self) -> int:
        """How many more updates it would accept."""
        return self._k - self._accepted if self._phase in {"configure", "train"} else 0

    @property
    def deadline(self) -> float:
        """When the next tick is due; infinite once the round is over."""
        return math.inf if self._phase == "done" else self._began + self._next

    @property
    def configure_deadline(self) -> float:
        """When those that have not answered are given up."""
        return self._began + self._deadlines.configure

    @property
    def train_deadline(self) -> float:
        """When the collecting ends."""
        return self._began + self._deadlines.train

    # Events

    def start(self, now: float) -> list[Effect]:
        """Asks the clients. Fewer candidates than the quorum: the round aborts at once."""
        if self._phase != "select" or self._began != -math.inf:
            raise ProtocolError("the round has already begun", rule="a Round is started once")
        self._began, self._now, self._next = now, 0.0, self._deadlines.configure
        self._pending = len(self._slots)
        asked = self._candidates[: max(0, asked_for(self._k, self._config) - self._pending)]
        self._next_candidate = len(asked)
        if len(asked) + self._pending < self._need:
            return self._abort("below_quorum", have=len(asked) + self._pending)
        self._phase = "configure"
        effects = self._ask(asked, self._expected.attempt, place=1) if asked else []
        return effects if self._pending and self._k else effects + self._close("complete")

    def resume(
        self,
        began: float,
        now: float,
        issued: Mapping[int, int],
        accepted: Iterable[int],
    ) -> list[Effect]:
        """Goes on with a round after a restart, in the place of `start`; nobody is asked anew.

        Those who were asked have had their time to say that they are ready.

        Args:
            began: when the round began; it may lie later than it did, to leave time for coming back.
            now: the time.
            issued: clients that were asked, and the attempt each was last asked in.
            accepted: those whose update is in the sum.
        """
        if self._phase != "select" or self._began != -math.inf:
            raise ProtocolError("the round has already begun", rule="a Round is started once")
        self._began, self._now, self._next = began, max(0.0, now - began), self._deadlines.train
        self._phase = "train"
        first = self._expected.attempt
        for client, attempt in issued.items():
            self._slots[client] = _Slot(self._expected.round, attempt, 1 + max(0, attempt - first), True)
        for client in accepted:
            slot = self._slots[client]
            slot.outcome = Outcome(client, slot.attempt, "accepted", "train")
        self._accepted = sum(slot.outcome is not None for slot in self._slots.values())
        self._pending = len(self._slots) - self._accepted
        asked = [place for place, client in enumerate(self._candidates) if client in self._slots]
        self._next_candidate = max(asked, default=-1) + 1
        over = self._accepted >= self._k or not self._pending
        return self._close("complete") if over else self._advance(now)

    def awaits(self, client: ClientId, attempt: int) -> bool:
        """Whether a sound update of this client and attempt would be accepted now."""
        slot = self._slots.get(client)
        return (
            self._phase in {"configure", "train"}
            and slot is not None
            and slot.outcome is None
            and slot.attempt == attempt
        )

    @property
    def pending(self) -> dict[ClientId, int]:
        """Clients that were asked and have no outcome yet, and the attempt each was asked in."""
        return {client: slot.attempt for client, slot in self._slots.items() if slot.outcome is None}

    def ready(self, clients: Iterable[ClientId], now: float) -> list[Effect]:
        """The clients hold the task and train. An update says so too."""
        effects = self._advance(now)
        for client in clients:
            slot = self._slots.get(client)
            if slot is not None and slot.outcome is None:
                self._mark_ready(slot)
        return effects

    def update(self, meta: UpdateMeta, now: float) -> list[Effect]:
        """An update has arrived in full."""
        effects = self._advance(now)
        slot = self._slots.get(meta.client)
        if slot is None:
            stale = meta.round < self._expected.round
            reason: Reason = "stale_round" if stale else "not_asked"
            effects.append(self._refuse(meta, Refusal(reason, "wait to be asked")))
            return effects
        expected = self._expected
        if slot.round != expected.round or slot.attempt != expected.attempt:
            expected = expected._replace(round=slot.round, attempt=slot.attempt)
        refusal = check_update(meta, expected)
        if slot.outcome is not None:
            if refusal is None or refusal.reason not in _MISPLACED:
                refusal = _AGAIN if slot.outcome.status == "accepted" else _LATE
            effects.append(self._refuse(meta, refusal))
        elif refusal is None:
            if not slot.ready:
                self._mark_ready(slot)
            slot.outcome = Outcome(meta.client, slot.attempt, "accepted", "train")
            self._accepted += 1
            self._pending -= 1
            effects.append(Accept(meta.client, slot.attempt, self._expected.round - slot.round))
            if self._accepted == self._k or self._pending == 0:
                effects += self._close("complete")
        elif refusal.reason in _MISPLACED:
            effects.append(self._refuse(meta, refusal))  # the update asked for may still come
        else:
            self._mark_ready(slot)
            effects.append(Reject(meta.client, meta.round, meta.attempt, *refusal))
            effects += self._fail(meta.client, slot, "rejected", "train", *refusal)
        return effects

    def failed(
        self,
        client: ClientId,
        attempt: int,
        cause: str,
        now: float,
        *,
        phase: Phase = "train",
        hint: str = "",
    ) -> list[Effect]:
        """The client reports that it failed; `cause` may hold a traceback."""
        return self._lost(client, attempt, "failed", phase, cause, hint, now)

    def dropped(
        self,
        client: ClientId,
        attempt: int,
        cause: str,
        now: float,
        *,
        phase: Phase = "train",
        hint: str = "",
    ) -> list[Effect]:
        """The client has gone without a word."""
        return self._lost(client, attempt, "dropped", phase, cause, hint, now)

    def rejected(
        self, client: ClientId, attempt: int, cause: str, now: float, *, hint: str = ""
    ) -> list[Effect]:
        """The update has arrived and could not be added to the sum, which is as it was."""
        return self._lost(client, attempt, "rejected", "train", cause, hint, now)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        return self._advance(now)

    def merged(self, now: float) -> list[Effect]:
        """The merged model is durable."""
        effects = self._advance(now)
        if self._phase == "merge":
            if not self._evaluate:
                return effects + self._finish(evaluated=False)
            self._phase, self._next = "evaluate", self._deadlines.evaluate
            effects.append(Evaluate())
        return effects

    def merge_failed(self, cause: str, now: float, *, reason: AbortReason = "merge_failed") -> list[Effect]:
        """The sum cannot become a model: zero weight, or a value that is not finite."""
        effects = self._advance(now)
        return effects + self._abort(reason, cause) if self._phase == "merge" else effects

    def evaluated(self, now: float) -> list[Effect]:
        """The evaluation is done."""
        effects = self._advance(now)
        return effects + self._finish(evaluated=True) if self._phase == "evaluate" else effects

    def cancel(self, cause: str, now: float) -> list[Effect]:
        """The run stops. A model that is already merged stands."""
        effects = self._advance(now)
        if self._phase == "evaluate":
            return effects + self._finish(evaluated=False)
        return effects if self._phase == "done" else effects + self._abort("cancelled", cause)

    # Rules

    def _advance(self, now: float) -> list[Effect]:
        """Fires the deadlines that have passed."""
        if self._began == -math.inf:
            raise ProtocolError("the round has not begun", rule="start comes first")
        self._now = max(self._now, now - self._began)
        effects: list[Effect] = []
        while self._now >= self._next and self._phase != "done":
            if self._phase == "configure":
                self._phase, self._next = "train", self._deadlines.train
                for client, slot in list(self._slots.items()):
                    if slot.outcome is None and not slot.ready and self._phase == "train":
                        effects += self._fail(client, slot, *_NO_ANSWER)
            elif self._phase == "train":
                effects += self._close("deadline")
            elif self._phase == "merge":
                effects += self._abort("budget_over", "the merge was not done in time")
            else:
                effects += self._finish(evaluated=False)
        return effects

    def _ask(self, clients: list[ClientId], attempt: int, place: int) -> list[Effect]:
        for client in clients:
            self._slots[client] = _Slot(self._expected.round, attempt, place, False)
        self._pending += len(clients)
        self._unready += len(clients)
        asked = tuple(clients)
        return [Persist("issued", asked), Configure(self._expected.round, attempt, asked)]

    def _mark_ready(self, slot: _Slot) -> None:
        if not slot.ready:
            slot.ready = True
            self._unready -= 1

    def _lost(
        self, client: ClientId, attempt: int, status: Status, phase: Phase, cause: str, hint: str, now: float
    ) -> list[Effect]:
        effects = self._advance(now)
        slot = self._slots.get(client)
        if slot is not None and slot.outcome is None and slot.attempt == attempt:
            effects += self._fail(client, slot, status, phase, cause, hint)
        return effects

    def _fail(
        self, client: ClientId, slot: _Slot, status: Status, phase: Phase, cause: str, hint: str
    ) -> list[Effect]:
        """Settles a failure by the policy: ask again, ask another, do without, or give up."""
        policy = self._config.on_failure
        self._mark_ready(slot)
        self._pending -= 1
        used_up = slot.place >= self._config.max_attempts or slot.round != self._expected.round
        # A rejected update would come out the same again, and a silent device has had all the time there is.
        if policy == "retry" and not used_up and status != "rejected" and cause != _NO_ANSWER[2]:
            return self._ask([client], slot.attempt + 1, slot.place + 1)
        kept = ""
        if policy == "replace":
            if self._phase != "configure":
                kept = "not replaced: too late in the round"
            elif used_up:
                kept = "not replaced: attempts are used up"
            elif self._next_candidate == len(self._candidates):
                kept = "not replaced: no client is left"
        slot.outcome = Outcome(
            client, slot.attempt, status, phase, cause, "; ".join(filter(None, (hint, kept)))
        )
        if policy == "abort":
            return self._abort("client_failed")
        if policy == "replace" and not kept:
            self._next_candidate += 1
            spare = self._candidates[self._next_candidate - 1]
            return self._ask([spare], self._expected.attempt, slot.place + 1)
        return [] if self._pending else self._close("complete")

    def _refuse(self, meta: UpdateMeta, refusal: Refusal) -> Reject:
        if len(self._refused) < _KEPT_REFUSALS:
            status = _STATUS.get(refusal.reason, "stale")
            self._refused.append(Outcome(meta.client, meta.attempt, status, self.phase, *refusal))
        return Reject(meta.client, meta.round, meta.attempt, *refusal)

    def _close(self, why: Literal["complete", "deadline"]) -> list[Effect]:
        """Ends the collecting: those still out are stragglers, or were not needed after all."""
        carry = self._config.stragglers == "next_round"
        if self._pending:
            out = [(client, slot) for client, slot in self._slots.items() if slot.outcome is None]
            status: Status = "unused" if why == "complete" and not carry else "late"
            cause = "the cohort was complete" if why == "complete" else "no update before the deadline"
            for client, slot in out:
                phase: Phase = "train" if slot.ready else "configure"
                goes_on = carry and slot.round == self._expected.round
                hint = "its update goes to the next round" if goes_on else ""
                slot.outcome = Outcome(client, slot.attempt, status, phase, cause, hint)
                if goes_on:
                    self._carried[client] = slot.attempt
            self._pending = 0
        if self._accepted < self._need:
            return self._abort(self._why_short())
        if self._now >= self._deadlines.merge:
            return self._abort("budget_over", "no time was left to merge")
        self._phase, self._next = "merge", self._deadlines.merge
        accepted = [
            c for c, slot in self._slots.items() if slot.outcome and slot.outcome.status == "accepted"
        ]
        self._survivors = tuple(sorted(accepted))
        return [Persist("frozen", self._survivors), Merge(self._survivors)]

    def _why_short(self) -> AbortReason:
        if self._accepted:
            return "below_quorum"
        outcomes = self._outcomes()
        if all(outcome.status == "rejected" and outcome.cause.lower() == "weight" for outcome in outcomes):
            return "zero_weight"
        return "all_failed" if all(o.status in {"failed", "rejected"} for o in outcomes) else "no_survivors"

    def _outcomes(self) -> tuple[Outcome, ...]:
        settled = [slot.outcome for slot in self._slots.values() if slot.outcome is not None]
        return tuple(sorted(settled))

    def _finish(self, *, evaluated: bool) -> list[Effect]:
        self._phase = "done"
        refused = tuple(self._refused)
        self.result = Finish(self._survivors, self._outcomes(), refused, self._carried, evaluated)
        return [Persist("finished", self._survivors), self.result]

    def _abort(self, reason: AbortReason, cause: str = "", *, have: int | None = None) -> list[Effect]:
        phase = self.phase
        self._phase = "done"
        for client, slot in self._slots.items():
            if slot.outcome is None:
                slot.outcome = Outcome(client, slot.attempt, "unused", phase, "the round was aborted")
        self._pending = 0
        have = self._accepted if have is None else have
        outcomes, refused = self._outcomes(), tuple(self._refused)
        self.result = Abort(self._expected.round, reason, phase, have, self._need, outcomes, refused, cause)
        return [Persist("failed", ()), self.result]


_MISPLACED = {"stale_round", "future_round", "stale_attempt", "future_attempt"}
_AGAIN = Refusal("duplicate", "the first one counts")
_LATE = Refusal("late", "the round did not wait for it")
_NO_ANSWER: tuple[Status, Phase, str, str] = (
    "dropped",
    "configure",
    "no answer before the deadline",
    "is the device switched on and connected?",
)
_STATUS: Mapping[Reason, Status] = {"duplicate": "duplicate", "late": "late", "not_asked": "rejected"}
