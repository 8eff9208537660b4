"""In which order a round's records can come, and what a server does after a restart; without I/O."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from mycelia.aggregator.log_records import (
    Accepted,
    Charged,
    Entry,
    Failed,
    Frozen,
    Issued,
    Machine,
    Merged,
    Open,
    Published,
    Snapshot,
)
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.engine.errors import ProtocolError
from mycelia.privacy.secagg.events import Record

__all__ = ["HEARTBEATS", "Action", "Order", "Recovery", "State", "budget_left", "recover"]

HEARTBEATS: Final = 3
"""A restarted round has this many heartbeats left at least, so that its devices can come back."""

State = Literal["closed", "open", "issued", "collecting", "session", "frozen", "charged", "merged"]
Action = Literal["next", "ask", "collect", "session", "finish", "publish"]

_ACTIONS: Final[Mapping[State, Action]] = {
    "closed": "next",
    "open": "ask",
    "issued": "ask",
    "collecting": "collect",
    "session": "session",
    "frozen": "finish",
    "charged": "finish",
    "merged": "publish",
}


class Order:
    """Where a log stands; `take` refuses a record that cannot come next.

    Attributes:
        state: of the newest round; "closed" before the first.
        opened: the newest round.
        issued: its clients, and the attempt each was last asked in.
        accepted: those whose update counts, with its hash.
        snapshot: its newest snapshot.
        frozen: its survivors, once they are fixed.
        merged: its model.
        published: the run's model, as far as the records tell.
        attempt: the highest the round has used.
        session: attempt of the secure sum that was begun last.
    """

    def __init__(self) -> None:
        self.state: State = "closed"
        self.opened: Open | None = None
        self.published: Merged | None = None
        self._failed = False
        self._begin({}, 0)

    def _begin(self, issued: dict[int, int], attempt: int) -> None:
        self.issued, self.attempt = issued, attempt
        self.accepted: dict[int, bytes] = {}
        self.snapshot: Snapshot | None = None
        self.frozen: Frozen | None = None
        self.merged: Merged | None = None
        self.session: int | None = None
        self._machine = ""  # kind of the newest record of the secure sum

    @property
    def failed(self) -> bool:
        """Whether the newest round ended without a model."""
        return self._failed

    def copy(self) -> Self:
        """Another one that stands at the same place."""
        other = copy.copy(self)
        other.issued, other.accepted = dict(self.issued), dict(self.accepted)
        return other

    @property
    def charged(self) -> bool:
        """Whether the release of the open round is in the ledger; a secure sum knows by itself."""
        private = self.opened is not None and self.opened.private and not self.opened.secure
        return private and self.state in ("charged", "merged")

    def take(self, entry: Entry) -> bool:
        """The next record.

        Returns:
            False if it says what was said before, and is not to be written again: an update that came twice.

        Raises:
            ProtocolError: it cannot come here; nothing has changed.
            Problem: `EQUIVOCATION`: a second, different update of a client; the first stands.
        """
        match entry:
            case Open():
                self._open(entry)
            case Issued():
                self._issue(entry)
            case Accepted():
                return self._accept(entry)
            case Snapshot():
                self._fold(entry)
            case Frozen():
                self._freeze(entry)
            case Charged():
                self._need(
                    self.state == "frozen" and self._now.private, entry, "after FROZEN, of a private round"
                )
                self.state = "charged"
            case Merged():
                self._merge(entry)
            case Published():
                self._need(self.state == "merged", entry, "after MERGED")
                self.state, self.published = "closed", self.merged
            case Failed():
                self._need(
                    self.state not in ("closed", "merged"), entry, "in a round whose model is not merged"
                )
                self.state, self._failed = "closed", True
            case Machine():
                self._step(entry)
        return True

    @property
    def _now(self) -> Open:
        if self.opened is None:
            raise ProtocolError("no round is open", rule="OPEN comes first", who="round log")
        return self.opened

    def _open(self, entry: Open) -> None:
        last = self.opened
        self._need(self.state == "closed", entry, "when no round is open")
        follows = last is None or entry.round == last.round + 1
        again = (
            last is not None and self._failed and entry.round == last.round and entry.attempt > self.attempt
        )
        rule = "with the next round, or a higher attempt of one that failed"
        self._need(follows or again, entry, rule)
        self._need(
            not (entry.carried and entry.secure), entry, "without stragglers of before, if it is secure"
        )
        carried = dict(entry.carried)
        self._need(
            len(carried) == len(entry.carried) and carried.keys().isdisjoint(entry.clients),
            entry,
            "with each client once, drawn or carried over",
        )
        self.opened, self.state, self._failed = entry, "open", False
        self._begin(carried, entry.attempt)

    def _issue(self, entry: Issued) -> None:
        retry = self.state == "session" and self._machine == "FAILED"
        self._need(
            self.state in ("open", "issued", "collecting") or retry, entry, "before the round is frozen"
        )
        known = set(self._now.clients)
        self._need(known.issuperset(entry.clients), entry, "for clients that the round was opened with")
        self._need(
            entry.attempt >= self._now.attempt, entry, "with the attempt of the round, or a higher one"
        )
        self._need(not retry or entry.attempt > self.attempt, entry, "with a new attempt after a failed sum")
        for client in entry.clients:
            before = self.issued.get(client, -1)
            self._need(before < entry.attempt, entry, "for clients not asked in this attempt before")
            self._need(client not in self.accepted, entry, "for clients whose update is not there")
        self.issued.update(dict.fromkeys(entry.clients, entry.attempt))
        self.attempt = max(self.attempt, entry.attempt)
        if self.state == "open" or retry:
            self.state, self._machine = "issued", ""

    def _accept(self, entry: Accepted) -> bool:
        first = self.accepted.get(entry.client)
        asked = self.issued.get(entry.client) == entry.attempt
        if first is not None and asked:
            if first == entry.sha256:
                return False
            raise Problem(
                Reason.EQUIVOCATION,
                f"client {entry.client} sent a second, different update",
                rule="the first update of a client in an attempt stands",
                who=f"client {entry.client}",
                phase="train",
            )
        self._need(self.state in ("open", "issued", "collecting"), entry, "before the round is frozen")
        self._need(not self._now.secure, entry, "where the sum is not a secure one")
        self._need(asked and first is None, entry, "from a client that was asked in this attempt")
        self.accepted[entry.client] = entry.sha256
        self.state = "collecting"
        return True

    def _fold(self, entry: Snapshot) -> None:
        self._need(self.state == "collecting", entry, "between ACCEPTED and FROZEN")
        self._need(bool(entry.clients), entry, "of some clients")
        self._need(self.accepted.keys() >= set(entry.clients), entry, "of clients whose update was accepted")
        before = set(self.snapshot.clients) if self.snapshot else set()
        self._need(before <= set(entry.clients), entry, "of all clients of the snapshot before")
        self.snapshot = entry

    def _freeze(self, entry: Frozen) -> None:
        self._need(self.state in ("open", "issued", "collecting"), entry, "once in a round")
        self._need(not self._now.secure, entry, "where the sum is not a secure one")
        there = self.snapshot or Snapshot((), b"")
        same = (entry.clients, entry.sha256 or b"") == (there.clients, there.sha256)
        self._need(same, entry, "of the clients in the newest snapshot, and of no others")
        self.frozen, self.state = entry, "frozen"

    def _merge(self, entry: Merged) -> None:
        if self._now.secure:
            fine = self.state == "session" and self._machine == "RESULT"
            self._need(fine, entry, "after the RESULT of the secure sum")
        else:
            wanted: State = "charged" if self._now.private else "frozen"
            self._need(self.state == wanted, entry, f"after {wanted.upper()}")
        self.merged, self.state = entry, "merged"

    def _step(self, entry: Machine) -> None:
        self._need(
            self._now.secure and self.state in ("issued", "session"),
            entry,
            "after ISSUED, if the sum is secure",
        )
        begins = entry.kind == "CONFIG"
        over = self._machine in ("", "FAILED")
        self._need(begins == over, entry, "from CONFIG to RESULT or FAILED")
        self._need(self._machine != "RESULT", entry, "before RESULT")
        attempt = self.attempt if begins else self.session
        self._need(entry.attempt == attempt, entry, "in the attempt that was issued")
        self._need(not begins or self.session != attempt, entry, "with one session in an attempt")
        self._machine, self.session, self.state = entry.kind, attempt, "session"

    def _need(self, fine: bool, entry: Entry, rule: str) -> None:
        if not fine:
            name = entry.kind if isinstance(entry, Machine) else entry.KIND
            where = f"round {self.opened.round}" if self.opened else "before the first round"
            raise ProtocolError(
                f"{name} comes where the log stands at {self.state!r}",
                rule=f"{name} comes {rule}",
                who=f"round log, {where}",
            )


@dataclass(frozen=True)
class Recovery:
    """What to do after a restart.

    Attributes:
        action: "next": begin the next round; "ask": push the tasks of `issued` again, or ask `opened.clients`
            if nobody was asked; "collect": go on from the snapshot, and ask those in `missing` for the same
            bytes again; "session": give `session` to the machine of the secure sum; "finish": merge the sum
            of `survivors` and of no others, and charge it unless `charged`; "publish": check the hash of
            `merged` and publish it.
        opened: the round it is about; with "next", the last one.
        issued: clients, and the attempt each was last asked in.
        accepted: clients whose update was accepted, and its hash.
        snapshot: the newest, if there is one.
        missing: clients whose update was accepted and is not in the snapshot, increasing.
        survivors: whom the round was frozen with, or None.
        charged: whether the release is in the ledger.
        merged: the new model, if there is one.
        published: the run's model, if the records have one.
        session_attempt: of the secure sum.
        session: its records, from CONFIG on.
        budget_s: seconds that are left of the round's budget; 0 with "next".
        attempt: the highest that the round has used.
    """

    action: Action
    opened: Open | None = None
    issued: Mapping[int, int] = field(default_factory=dict)
    accepted: Mapping[int, bytes] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    missing: tuple[int, ...] = ()
    survivors: tuple[int, ...] | None = None
    charged: bool = False
    merged: Merged | None = None
    published: Merged | None = None
    session_attempt: int | None = None
    session: tuple[Record, ...] = ()
    budget_s: float = 0.0
    attempt: int = 0


def recover(entries: Iterable[Entry], now: float, heartbeat_s: float) -> Recovery:
    """What a server does after a restart.

    Args:
        entries: all records of a log, or those from an OPEN on.
        now: Unix time.
        heartbeat_s: time between two heartbeats, in seconds.

    Raises:
        ProtocolError: the records cannot follow each other.
        Problem: `EQUIVOCATION`, likewise.
    """
    order, session = Order(), list[Record]()
    for entry in entries:
        if not order.take(entry):
            raise ProtocolError("an update was accepted twice", rule="each is written once", who="round log")
        if isinstance(entry, Open | Issued):
            session.clear()
        elif isinstance(entry, Machine):
            session.append(entry.record)
    over = order.state == "closed"
    folded = order.snapshot.clients if order.snapshot else ()
    return Recovery(
        action=_ACTIONS[order.state],
        opened=order.opened,
        issued=order.issued,
        accepted=order.accepted,
        snapshot=order.snapshot,
        missing=tuple(sorted(order.accepted.keys() - set(folded))),
        survivors=order.frozen.clients if order.frozen else None,
        charged=order.charged,
        merged=order.merged,
        published=order.published,
        session_attempt=order.session,
        session=tuple(session),
        budget_s=0.0 if over or order.opened is None else budget_left(order.opened, now, heartbeat_s),
        attempt=order.attempt,
    )


def budget_left(opened: Open, now: float, heartbeat_s: float) -> float:
    """Seconds that a restarted round still has.

    Time passed while the server was away. A clock that was set back would give more than there was, so it
    gives all of it; and there is always time for `HEARTBEATS` heartbeats.
    """
    left = opened.budget_s - (now - opened.opened_at)
    return min(max(left, HEARTBEATS * heartbeat_s), max(opened.budget_s, HEARTBEATS * heartbeat_s))
