"""The server of the secure sum, as a state machine without I/O: events go in, effects come out.

    advertise → share → masked → agree → unmask → done

Clients may vanish in any phase, and some may send anything. A message that is not the one awaited changes
nothing; a round that cannot be opened exactly is aborted with the reason. What a restart needs is in the
journal before anything that depends on it is sent: before the survivors are frozen the session goes on,
afterwards that one set of survivors is opened or none.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mycelia.aggregator import questions
from mycelia.aggregator import records as journal
from mycelia.aggregator.cohort import Cohort
from mycelia.aggregator.masked_sum import MaskedSum
from mycelia.aggregator.unmasking import Dealt, Unmasking
from mycelia.privacy.secagg import keys, masks, messages
from mycelia.privacy.secagg.encoding import Decoded, Encoding
from mycelia.privacy.secagg.events import (
    Abort,
    Charge,
    ChargeRefused,
    ChunkReceived,
    Close,
    Effect,
    Event,
    Finish,
    Left,
    Persist,
    Received,
    Record,
    Refuse,
    Release,
    Send,
    Tick,
)
from mycelia.privacy.secagg.keys import AgreementKey, Identity, Random
from mycelia.privacy.secagg.messages import (
    PHASES,
    SERVER,
    Advert,
    Agree,
    Complaint,
    Config,
    Done,
    Envelope,
    Masked,
    Message,
    Reason,
    RoundConfig,
    SecureSumError,
    Shares,
    Unmask,
)
from mycelia.privacy.secagg.roster import Roster

__all__ = ["SecureSumServer", "ServerResult"]

SNAPSHOT_EVERY: Final = 64
"""Uploads folded between two snapshots of the masked sum, at most."""

_KEPT_FAULTS = 1000  # a client that repeats itself must not fill the memory
_AWAITED: Final[Mapping[str, type[Message]]] = {
    "advertise": Advert,
    "share": Shares,
    "masked": Masked,
    "agree": Agree,
    "unmask": Unmask,
}


@dataclass(frozen=True, eq=False)
class ServerResult:
    """An opened sum.

    Attributes:
        decoded: the sum, its weight and its slots.
        survivors: who is in it, increasing.
        transcript: hash of the session as signed in `Done`.
        faults: messages refused on the way.
    """

    decoded: Decoded = field(repr=False)
    survivors: tuple[int, ...]
    transcript: bytes
    faults: tuple[SecureSumError, ...]


class _Refused(Exception):
    """A message that changes nothing."""

    def __init__(self, error: SecureSumError, client: int) -> None:
        super().__init__(error)
        self.error, self.client = error, client


class SecureSumServer:
    """The server in one session.

    Args:
        config: of the round.
        size: coordinates of a vector, before padding.
        candidates: who is asked, at most n_max.
        identity: the server's key.
        roster: the one that the configuration names.
        unix_time: seconds, for the dates of the roster's entries.
        random: random bytes for the key that tests the clients' keys.
        over: whether the session has ended, so that the roster decides nothing any more.

    Attributes:
        faults: messages that were refused, and clients that left; the first 1000.
        silent: whose answer the session waited for when it ended.

    Raises:
        SecureSumError: `CONFIG`: other candidates or another roster; `OVERFLOW`: the sum could wrap.
    """

    def __init__(
        self,
        config: RoundConfig,
        size: int,
        candidates: Iterable[int],
        identity: Identity,
        roster: Roster,
        *,
        unix_time: int,
        random: Random = os.urandom,
        over: bool = False,
    ) -> None:
        self.config, self.candidates = config, tuple(sorted(set(candidates)))
        another = roster.sha256 != config.roster_sha256 and not over
        if not config.n_min <= len(self.candidates) <= config.n_max or another:
            raise SecureSumError(
                Reason.CONFIG,
                f"{len(self.candidates)} candidates",
                rule=f"{config.n_min} to {config.n_max}, and the roster that the configuration names",
                who="configuration",
            )
        self._known, self._limit = frozenset(self.candidates), messages.envelope_limit(config)
        self._identity, self._roster, self._unix_time = identity, roster, unix_time
        self._encoding = Encoding(config, size)
        self._probe = AgreementKey.generate(random)
        self.faults: list[SecureSumError] = []
        self._phase, self._restarted = "idle", False
        self._now = 0.0
        self._deadline: float | None = None
        self._gone: set[int] = set()
        self._received: dict[tuple[int, str], bytes] = {}
        self._adverts: dict[int, tuple[Envelope, Advert]] = {}
        self._public: set[bytes] = set()
        self._cohort: Cohort
        self._dealt: dict[int, Dealt] = {}
        self._sum = MaskedSum(config)
        self._agreed: dict[int, Envelope] = {}
        self._openers: tuple[int, ...] = ()
        self._charged = False
        self._pending: set[int] = set()
        self._common: bytes | None = None
        self._opening: Unmasking | None = None
        self.silent: frozenset[int] = frozenset()
        self._outcome: tuple[Effect, ...] = ()

    @classmethod
    def restore(
        cls,
        records: Sequence[Record],
        size: int,
        identity: Identity,
        roster: Roster,
        *,
        unix_time: int,
        random: Random = os.urandom,
    ) -> SecureSumServer:
        """The server after a restart; its first tick goes on with the phase the journal ends in.

        Args:
            records: of the journal, at least the first; of one that ended, first and last will do.
            size: as before, like all of the rest.
            identity: the server's key.
            roster: the one that the configuration names.
            unix_time: seconds.
            random: random bytes.

        Raises:
            SecureSumError: `JOURNAL`: records that no session leaves.
        """
        config, candidates = journal.read_config(records)
        over = records[-1].kind in ("RESULT", "FAILED")
        server = cls(
            config, size, candidates, identity, roster, unix_time=unix_time, random=random, over=over
        )
        server._phase, server._restarted = "advertise", True
        for record in records[1:]:
            try:
                server._replay(record)
            except (KeyError, ValueError, SecureSumError) as error:
                raise journal.damaged(f"a record {record.kind} that does not fit") from error
        return server

    @property
    def phase(self) -> str:
        """Before the first tick "idle", then one of the five phases, then "done"."""
        return self._phase

    @property
    def deadline(self) -> float | None:
        """When the phase closes; None before the first tick and at the end."""
        return self._deadline

    @property
    def waits_for(self) -> frozenset[int]:
        """Whose answer the open phase needs."""
        return frozenset(self._pending)

    @property
    def folded(self) -> frozenset[int]:
        """Whose vector is in the sum."""
        return frozenset(self._sum.folded)

    def snapshot(self) -> list[Effect]:
        """Before the server stops: what is in the masked sum, so that it need not be sent again."""
        return [self._snapshot()] if self._phase == "masked" and self._sum.unsaved else []

    def expects_upload(self, client: int) -> bool:
        """Whether the header of a client's vector has come, and the vector has not."""
        return self._sum.expects(client)

    def handle(self, event: Event) -> list[Effect]:
        """Take an event and say what to do about it."""
        try:
            match event:
                case Received(sender, data):
                    return self._take(sender, data)
                case ChunkReceived(sender, number, data):
                    return self._take_chunk(sender, number, data)
                case Tick(now):
                    return self._tick(now)
                case Close(phase):
                    due = phase == self._phase and phase in PHASES and not self._restarted
                    return self._close() if due else []
                case ChargeRefused(found):
                    if self._phase != "unmask":
                        return []
                    raise SecureSumError(
                        Reason.BUDGET, found, rule="a release is paid for first", phase="unmask"
                    )
                case Left(sender, found):
                    open_ = self._phase in PHASES and sender in self._known - self._gone
                    left = self._error(
                        Reason.POLICY, found, "a client takes part as long as it likes", sender
                    )
                    return self._leave(sender, left) if open_ else []
                case _:
                    return []  # updates are a client's
        except _Refused as refused:
            return self._refuse(refused.client, refused.error)
        except SecureSumError as error:
            return self._fail(error)

    # --- time ---

    def _tick(self, now: float) -> list[Effect]:
        self._now = max(now, self._now)
        if self._phase == "idle":
            return [Persist(journal.of_config(self.config, self.candidates)), *self._enter("advertise")]
        if self._restarted:
            self._restarted = False
            return list(self._outcome) if self._phase == "done" else self._enter(self._phase)
        if self._deadline is not None and self._now >= self._deadline:
            return self._close()
        return []

    def _enter(self, phase: str) -> list[Effect]:
        """Begin a phase, or go on with it after a restart: ask all who have not answered."""
        self._phase = phase
        self._deadline = self._now + self.config.deadlines_ms[PHASES.index(phase)] / 1000
        self._common = None
        self._pending = self._expected() - self._gone
        effects: list[Effect] = []
        if phase == "unmask":
            mask_keys = {client: advert.mask_key for client, (_, advert) in self._adverts.items()}
            self._opening = Unmasking(self.config, self._cohort, self._dealt, mask_keys)
            config, cohort = self.config, self._cohort
            release = Release(
                config.session_id, config.job, config.round, config.attempt, len(cohort.survivors)
            )
            effects = [Charge(release)]
            if not self._charged:
                effects.append(Persist(Record("CHARGED", cohort.u2)))
        return [
            *effects,
            *self._tell_left_out(),
            *(self._ask(client) for client in sorted(self._pending)),
            *self._close_if_complete(),
        ]

    def _expected(self) -> set[int]:
        """Who has yet to answer in this phase, gone or not."""
        match self._phase:
            case "advertise":
                return set(self._known).difference(self._adverts)
            case "share":
                return set(self._cohort.ids).difference(self._dealt)
            case "masked":
                return set(self._cohort.sharers - self._sum.folded)
            case "agree":
                return set(self._cohort.survivors).difference(self._agreed)
            case _:
                return set(self._openers)

    def _left_out(self) -> set[int]:
        """Who is not in the set that the session goes on with, and is asked nothing any more."""
        match self._phase:
            case "idle" | "advertise":
                return set()
            case "share":
                return set(self._known).difference(self._cohort.ids)
            case _:
                return set(self._known - self._cohort.sharers)

    def _tell_left_out(self) -> list[Effect]:
        """Clients that the last freeze left out need not wait for the end."""
        if self._phase == "share":
            late = self._left_out()
        elif self._phase == "masked":
            late = set(self._cohort.ids) - self._cohort.sharers
        else:
            return []
        return [
            self._send(client, questions.farewell(self._cohort, self._phase, self._dealt, client))
            for client in sorted(late - self._gone)
        ]

    def _close_if_complete(self) -> list[Effect]:
        return self._close() if self._phase != "done" and not self._pending else []

    def _close(self) -> list[Effect]:
        match self._phase:
            case "advertise":
                return self._freeze_cohort()
            case "share":
                return self._freeze_sharers()
            case "masked":
                return self._freeze_survivors()
            case "agree":
                return self._prepare_opening()
            case _:
                return self._open_sum()

    # --- what is sent ---

    def _ask(self, client: int) -> Send:
        """The message that opens this phase for a client, always the same bytes."""
        if self._phase in ("advertise", "agree"):  # all are asked the same
            if self._common is None:
                agree = self._phase == "agree"
                everyone = questions.survivors(self._cohort) if agree else Config(self.config)
                self._common = self._send(SERVER, everyone).data
            return Send(client, self._common)
        match self._phase:
            case "share":
                message: Message = questions.roll(self._cohort, self._adverts, client)
            case "masked":
                message = questions.deliver(self._cohort, self._dealt, client)
            case _:
                message = questions.opening(self._cohort, self._agreed, client)
        return self._send(client, message)

    def _send(self, client: int, message: Message) -> Send:
        return Send(client, keys.sign(message, self.config.session_id, SERVER, self._identity).encode())

    # --- what comes ---

    def _take(self, sender: int, data: bytes) -> list[Effect]:
        envelope, message = self._read(sender, data)
        match message:
            case None:
                return self._answer_again(sender, envelope.kind)
            case messages.Abort():
                return self._leave(sender, message.error(sender))
            case Complaint(owner):
                self._expect_member(sender, self._cohort.sharers)
                self._expect_member(sender, self._cohort.places.get(owner, ()))
                raise SecureSumError(
                    Reason.BAD_SHARE,
                    "shares did not open",
                    rule="shares are sealed as the protocol says",
                    phase=self._phase,
                    owner=owner,
                    client=sender,
                )
            case Advert():
                effects = self._take_advert(envelope, message)
            case Shares():
                effects = self._take_shares(envelope, message)
            case Masked():
                effects = self._take_header(sender, message)
            case Agree():
                effects = self._take_agreement(envelope, message)
            case Unmask():
                effects = self._take_unmask(sender, message)
            case _:
                raise self._refused(Reason.WRONG_PHASE, f"a message {envelope.kind!r}", "", sender)
        self._received[sender, envelope.kind] = hashlib.sha256(data).digest()
        if not isinstance(message, Masked):
            self._pending.discard(sender)
        return [*effects, *self._close_if_complete()]

    def _read(self, sender: int, data: bytes) -> tuple[Envelope, Message | None]:
        """The message, or None for one that came before; all that holds for any message is checked."""
        config = self.config
        try:
            envelope = Envelope.decode(data, self._limit)
            if envelope.sender != sender or sender not in self._known:
                raise self._error(Reason.BAD_SIGNATURE, "a message in another's name", "one's own id", sender)
            closed = self._phase in ("idle", "done") or self._restarted or sender in self._gone
            if envelope.session_id != config.session_id or closed:
                if envelope.session_id == config.session_id and self._is_spare(envelope.kind, sender, data):
                    return envelope, None
                raise self._error(Reason.SESSION, "a session that is not open", "the one that is", sender)
            before = self._received.get((sender, envelope.kind))
            if before is not None and before == hashlib.sha256(data).digest():
                return envelope, None
            kind = messages.MESSAGES[envelope.kind]
            turn: list[type[Message]] = [_AWAITED[self._phase], messages.Abort]
            if self._phase == "masked":
                turn.append(Complaint)
            if before is None and kind not in turn:
                late = kind is Masked and self._phase in ("agree", "unmask")
                raise self._error(
                    Reason.LATE if late else Reason.WRONG_PHASE,
                    f"a message {envelope.kind!r}",
                    f"now comes {_AWAITED[self._phase].KIND}",
                    sender,
                )
            self._roster.verify(envelope, self._unix_time)
            if before is not None:
                raise self._error(
                    Reason.EQUIVOCATION, f"a second message {envelope.kind!r}", "the first one counts", sender
                )
            return envelope, messages.parse(envelope, config, kind)
        except SecureSumError as error:
            raise _Refused(error, sender) from error

    def _is_spare(self, kind: str, sender: int, data: bytes) -> bool:
        """Whether a message at the end is no fault: it came before, enough shares had come, or a farewell."""
        if self._phase != "done":
            return False
        if kind == Unmask.KIND and isinstance(self._outcome[-1], Finish):
            return True
        same = self._received.get((sender, kind)) == hashlib.sha256(data).digest()
        return same or kind == messages.Abort.KIND

    def _answer_again(self, client: int, kind: str) -> list[Effect]:
        """What follows from a message that came before: the question of the next phase, if it is open."""
        if self._phase == "done":
            if self._received.get((client, kind)) is None:
                return []  # it is told already
            return [effect for effect in self._outcome if isinstance(effect, Send) and effect.to == client]
        if kind == Masked.KIND and self._phase == "masked" and client not in self._sum.folded:
            self._sum.begin_again(client)
            return []
        following = {
            "share": Advert.KIND, "masked": Shares.KIND, "agree": Masked.KIND, "unmask": Agree.KIND
        }  # fmt: skip
        asked = following.get(self._phase) == kind and client in self._pending
        return [self._ask(client)] if asked else []

    def _leave(self, client: int, error: SecureSumError) -> list[Effect]:
        """A client says that it stops."""
        if error.client is None:
            error.client = client
        self._note(error)
        self._gone.add(client)
        self._pending.discard(client)
        self._sum.drop(client)
        return self._close_if_complete()

    def _take_advert(self, envelope: Envelope, advert: Advert) -> list[Effect]:
        public = {advert.channel_key, advert.mask_key}
        try:
            if len(public) < 2 or public & self._public:
                raise self._error(Reason.BAD_KEY, "a key twice", "all keys are distinct", advert.client)
            for key in public:
                self._probe.agree(key, advert.client)
        except SecureSumError as error:
            raise _Refused(error, advert.client) from error
        self._keep_advert(envelope, advert)
        return [Persist(Record("ADVERT", envelope.encode()))]

    def _keep_advert(self, envelope: Envelope, advert: Advert) -> None:
        self._public |= {advert.channel_key, advert.mask_key}
        self._adverts[advert.client] = (envelope, advert)

    def _take_shares(self, envelope: Envelope, shares: Shares) -> list[Effect]:
        client = envelope.sender
        self._expect_member(client, self._cohort.ids)
        if shares.u0 != self._cohort.u0 or len(shares.fields) != len(self._cohort.near[client]):
            raise self._refused(Reason.SPLIT_VIEW, "shares for another cohort", "that of the roll", client)
        self._dealt[client] = Dealt(shares.commitment, shares.fields)
        return [Persist(Record("SHARES", envelope.encode()))]

    def _take_header(self, client: int, header: Masked) -> list[Effect]:
        self._expect_member(client, self._cohort.sharers)
        if header.u1 != self._cohort.u1:
            raise self._refused(Reason.SPLIT_VIEW, "a vector for another set", "that of U1", client)
        try:
            self._sum.announce(client, header)
        except SecureSumError as error:
            raise _Refused(error, client) from error
        return []

    def _take_chunk(self, client: int, number: int, data: bytes | memoryview) -> list[Effect]:
        if not self._sum.expects(client):
            if self._phase == "masked" and client in self._sum.folded:
                return []  # the same upload again
            late = self._phase in ("agree", "unmask", "done")
            reason = Reason.LATE if late else Reason.BAD_UPLOAD
            raise self._refused(reason, "a chunk of no open upload", "the header comes first", client)
        try:
            complete = self._sum.take(client, number, data)
        except SecureSumError as error:
            raise _Refused(error, client) from error
        if not complete:
            return []
        self._pending.discard(client)
        effects: list[Effect] = [Persist(journal.of_receipt(client, self._sum.receipts[client]))]
        if self._sum.unsaved >= SNAPSHOT_EVERY:
            effects.append(self._snapshot())
        return [*effects, *self._close_if_complete()]

    def _take_agreement(self, envelope: Envelope, agree: Agree) -> list[Effect]:
        client, cohort = envelope.sender, self._cohort
        self._expect_member(client, cohort.survivors)
        if (agree.u0, agree.u1, agree.u2) != (cohort.u0, cohort.u1, cohort.u2):
            raise self._refused(
                Reason.INCONSISTENT_SURVIVORS, "other sets than were sent", "the same", client
            )
        self._agreed[client] = envelope
        return [Persist(Record("AGREE", envelope.encode()))]

    def _take_unmask(self, client: int, unmask: Unmask) -> list[Effect]:
        self._expect_member(client, self._openers)
        opening = self._opened()
        effects: list[Effect] = []
        try:
            for owner in opening.take(client, unmask):
                error = self._error(Reason.SHARE_MISMATCH, "a share of another tag", "as dealt", client)
                error.owner = owner
                effects += self._refuse(client, error)
        except SecureSumError as error:
            raise _Refused(error, client) from error
        if opening.short == 0:
            self._pending.clear()
        return effects

    def _expect_member(self, client: int, expected: Iterable[int]) -> None:
        if client not in expected:
            raise self._refused(Reason.WRONG_PHASE, "a client that is not asked", "who was", client)

    # --- the freezes ---

    def _freeze_cohort(self) -> list[Effect]:
        ids = sorted(set(self._adverts) - self._gone)
        self._expect("advertise", len(ids))
        near, t = self.config.degree(len(ids)), self.config.threshold(len(ids))
        if t > near:
            raise SecureSumError(
                Reason.COHORT_TOO_SMALL,
                f"{len(ids)} clients have fewer neighbours than shares are needed",
                phase="advertise",
                have=near,
                need=t,
            )
        self._set_cohort(tuple(ids))
        return [Persist(journal.of_cohort(ids)), *self._enter("share")]

    def _set_cohort(self, ids: tuple[int, ...]) -> None:
        self._cohort = Cohort(self.config, ids, tuple(self._adverts[client][1].nonce for client in ids))

    def _freeze_sharers(self) -> list[Effect]:
        cohort = self._cohort
        shared = set(self._dealt) - self._gone
        chosen = cohort.strong(shared)
        self._expect("share", len(chosen))
        cohort.set_sharers(cohort.bits(chosen))
        for client in sorted(shared - chosen):
            error = self._error(Reason.UNMASK_SHORT, "too few of its neighbours shared", "t of them", client)
            self._note(error)
        return [Persist(Record("U1", cohort.sharer_bits)), *self._enter("masked")]

    def _freeze_survivors(self) -> list[Effect]:
        cohort, late = self._cohort, list[Effect]()
        for client in self._sum.drop_unfinished():
            error = self._error(
                Reason.LATE, "an unfinished upload", "complete before the phase closes", client
            )
            late += self._refuse(client, error)
        self._expect("masked", len(self._sum.folded))
        for owner in sorted(cohort.sharers):
            self._expect_shares(owner, sum(other in self._sum.folded for other in cohort.near[owner]))
        effects = [*late, self._snapshot()] if self._sum.unsaved else late
        cohort.set_survivors(cohort.bits(self._sum.folded))
        entered = self._enter("agree")
        missed = [self._ask(client) for client in sorted(cohort.sharers - cohort.survivors - self._gone)]
        return [*effects, Persist(Record("U2", cohort.survivor_bits)), *missed, *entered]

    def _prepare_opening(self) -> list[Effect]:
        self._openers = self._find_openers()
        holders = set(self._openers)
        for owner in sorted(self._cohort.sharers):
            self._expect_shares(owner, sum(other in holders for other in self._cohort.near[owner]))
        return self._enter("unmask")

    def _find_openers(self) -> tuple[int, ...]:
        """Who can be asked for shares: it agreed, and so did t of its neighbours."""
        cohort, agreed = self._cohort, self._agreed
        return tuple(
            client for client in sorted(agreed) if len(questions.signers(cohort, agreed, client)) == cohort.t
        )

    def _expect(self, phase: str, have: int) -> None:
        if have < self.config.n_min:
            raise SecureSumError(
                Reason.COHORT_TOO_SMALL,
                f"{have} clients are left",
                rule=f"at least n_min = {self.config.n_min}",
                phase=phase,
                have=have,
                need=self.config.n_min,
            )

    def _expect_shares(self, owner: int, have: int) -> None:
        if have < self._cohort.t:
            raise SecureSumError(
                Reason.UNMASK_SHORT,
                "too few are left who hold its shares",
                rule=f"t = {self._cohort.t} of them",
                phase=self._phase,
                owner=owner,
                have=have,
                need=self._cohort.t,
            )

    def _snapshot(self) -> Persist:
        return Persist(Record("SNAPSHOT", self._sum.snapshot(self._cohort.ids)))

    # --- the opening ---

    def _opened(self) -> Unmasking:
        if self._opening is None:
            raise SecureSumError(Reason.WRONG_PHASE, "nothing is to be opened", phase=self._phase)
        return self._opening

    def _open_sum(self) -> list[Effect]:
        opening, cohort = self._opened(), self._cohort
        for owner in sorted(cohort.sharers):
            self._expect_shares(owner, opening.count(owner))
        total = self._sum.total
        opening.open(total)
        survivors = tuple(sorted(cohort.survivors))
        decoded = self._encoding.decode(total, len(survivors))
        packed = masks.pack(total, self.config.bits)
        transcript = keys.transcript(
            self.config.session_id,
            cohort.u0,
            cohort.u1,
            cohort.u2,
            hashlib.sha256(packed).digest(),
            len(survivors),
        )
        self._settle(ServerResult(decoded, survivors, transcript, tuple(self.faults)))
        return [Persist(journal.of_result(transcript, survivors, packed)), *self._outcome]

    # --- the journal ---

    def _replay(self, record: Record) -> None:
        kind, body = record.kind, record.body
        allowed = {
            "advertise": ("ADVERT", "U0", *([] if self._adverts else ["RESULT"])),
            "share": ("SHARES", "U1"),
            "masked": ("RECEIPT", "SNAPSHOT", "U2"),
            "agree": ("AGREE", "CHARGED"),
            "unmask": ("CHARGED", "RESULT"),
        }
        if kind not in (*allowed.get(self._phase, ()), "FAILED") or self._phase == "done":
            raise journal.damaged(f"a record {kind} in {self._phase}")
        match kind:
            case "ADVERT" | "SHARES" | "AGREE":
                self._replay_envelope(body)
            case "U0":
                self._set_cohort(journal.read_cohort(body))
                self._phase = "share"
            case "U1":
                self._cohort.set_sharers(body)
                self._phase = "masked"
            case "RECEIPT":
                client, sha256 = journal.read_receipt(body)
                self._sum.receipts[client] = sha256
            case "SNAPSHOT":
                self._sum.load(body, self._cohort.ids)
            case "U2":
                self._cohort.set_survivors(body)
                if self._cohort.survivors != self._sum.folded:
                    raise journal.damaged("survivors whose sum is not there")
                self._phase = "agree"
            case "CHARGED":
                self._openers, self._charged, self._phase = self._find_openers(), True, "unmask"
            case "RESULT":
                self._replay_result(body)
            case _:
                self._give_up(messages.Abort.decode(body, self.config).error(SERVER))

    def _replay_result(self, body: bytes) -> None:
        transcript, survivors, packed = journal.read_result(body, self.config)
        if not self._known.issuperset(survivors):
            raise journal.damaged("survivors who were never asked")
        total = masks.unpack(packed, self.config.length, self.config.bits)
        self._settle(ServerResult(self._encoding.decode(total, len(survivors)), survivors, transcript, ()))

    def _replay_envelope(self, body: bytes) -> None:
        envelope = Envelope.decode(body, self._limit)
        message = messages.parse(envelope, self.config, messages.MESSAGES[envelope.kind])
        self._received[envelope.sender, envelope.kind] = hashlib.sha256(body).digest()
        match message:
            case Advert():
                self._keep_advert(envelope, message)
            case Shares():
                self._dealt[envelope.sender] = Dealt(message.commitment, message.fields)
            case _:
                self._agreed[envelope.sender] = envelope

    # --- the end ---

    def _settle(self, result: ServerResult) -> None:
        done = keys.sign(Done(result.transcript), self.config.session_id, SERVER, self._identity).encode()
        told = [Send(client, done) for client in result.survivors if client not in self._gone]
        self._end((*told, Finish(result)))

    def _fail(self, error: SecureSumError) -> list[Effect]:
        """No sum: tell all who wait."""
        if not error.phase and self._phase in PHASES:
            error.phase = self._phase
        self._give_up(error)
        return [Persist(Record("FAILED", messages.Abort.of(error).encode())), *self._outcome]

    def _give_up(self, error: SecureSumError) -> None:
        note = self._send(SERVER, messages.Abort.of(error)).data
        over = self._gone | self._left_out()
        told = [Send(client, note) for client in self.candidates if client not in over]
        self._end((*told, Abort(error.without_frames())))

    def _end(self, outcome: tuple[Effect, ...]) -> None:
        """Forget keys, shares and sums; what is left can be told again."""
        self.silent = frozenset(self._pending)
        self._outcome, self._phase, self._deadline = outcome, "done", None
        for kept in (self._dealt, self._adverts, self._agreed):
            kept.clear()
        self._sum.erase()
        self._opening = None

    def _error(self, reason: Reason, found: str, rule: str, client: int) -> SecureSumError:
        phase = self._phase if self._phase in PHASES else ""
        return SecureSumError(reason, found, rule=rule, phase=phase, client=client)

    def _refused(self, reason: Reason, found: str, rule: str, client: int) -> _Refused:
        return _Refused(self._error(reason, found, rule, client), client)

    def _note(self, error: SecureSumError) -> None:
        if len(self.faults) < _KEPT_FAULTS:
            self.faults.append(error.without_frames())

    def _refuse(self, client: int, error: SecureSumError) -> list[Effect]:
        if error.client is None:
            error.client = client
        if not error.phase and self._phase in PHASES:
            error.phase = self._phase
        self._note(error)
        return [Refuse(client, error.without_frames())]
