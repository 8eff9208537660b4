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
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from mycelia.privacy.secagg import graph as graphs
from mycelia.privacy.secagg import keys, masks, messages, shamir
from mycelia.privacy.secagg.canonical import Reader
from mycelia.privacy.secagg.encoding import Decoded, Encoding
from mycelia.privacy.secagg.events import (
    CHUNK_BYTES,
    Abort,
    Charge,
    ChargeRefused,
    ChunkReceived,
    Close,
    Effect,
    Event,
    Finish,
    Persist,
    Received,
    Record,
    Refuse,
    Release,
    Send,
    Tick,
)
from mycelia.privacy.secagg.keys import AgreementKey, Identity, Random, ShareKind
from mycelia.privacy.secagg.masks import Words
from mycelia.privacy.secagg.messages import (
    HASH_BYTES,
    MAX_COHORT,
    MAX_CONFIG_BYTES,
    PHASES,
    SEALED_BYTES,
    SERVER,
    TAG_BYTES,
    Advert,
    Agree,
    Complaint,
    Config,
    Deliver,
    Done,
    Envelope,
    Masked,
    Message,
    Open,
    Reason,
    Roll,
    RoundConfig,
    SecureSumError,
    Shares,
    Survivors,
    Unmask,
)
from mycelia.privacy.secagg.roster import Roster

__all__ = ["SecureSumServer", "ServerResult", "status_code"]

SNAPSHOT_EVERY: Final = 64
"""Uploads folded between two snapshots of the masked sum, at most."""

_CONFIG_TAG: Final = "SA1/journal/config"
_U0_TAG: Final = "SA1/journal/u0"
_RECEIPT_TAG: Final = "SA1/journal/receipt"
_LEAST_CHUNK = 2**12  # bytes on average, or the chunks of an upload take more memory than it does
_SMALL = 2**10  # bytes of a record of a few fields
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

    decoded: Decoded
    survivors: tuple[int, ...]
    transcript: bytes
    faults: tuple[SecureSumError, ...]


@lru_cache(maxsize=1)
def _roll_head(ids: tuple[int, ...], nonces: tuple[bytes, ...]) -> bytes:
    return messages.struct(Roll.tag(), ids, nonces)


class _Roll(Roll):
    """A roll; what all of a session have in common is encoded once."""

    def encode(self) -> bytes:
        """Canonical bytes."""
        adverts = messages.struct("", [advert.body + advert.signature for advert in self.adverts])
        return _roll_head(self.ids, self.nonces) + adverts[len(messages.struct("")) :]


class _Refused(Exception):
    """A message that changes nothing."""

    def __init__(self, error: SecureSumError, client: int) -> None:
        super().__init__(error)
        self.error, self.client = error, client


class _Dealt(NamedTuple):
    """What one client shared."""

    commitment: bytes
    fields: tuple[bytes, ...]


@dataclass(eq=False)
class _Upload:
    """A masked vector on its way."""

    sha256: bytes
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    chunks: list[bytes | memoryview] = field(default_factory=list)
    size: int = 0


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

    Attributes:
        faults: messages that were refused, and clients that left; the first 1000.

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
    ) -> None:
        self.config, self.candidates = config, tuple(sorted(set(candidates)))
        if not config.n_min <= len(self.candidates) <= config.n_max or roster.sha256 != config.roster_sha256:
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
        self._ids: tuple[int, ...] = ()
        self._nonces: tuple[bytes, ...] = ()
        self._t = 0
        self._u0 = self._u1_hash = self._u2_hash = b""
        self._near: dict[int, tuple[int, ...]] = {}
        self._places: dict[int, dict[int, int]] = {}
        self._dealt: dict[int, _Dealt] = {}
        self._u1: frozenset[int] = frozenset()
        self._u2: frozenset[int] = frozenset()
        self._u1_bits = self._u2_bits = b""
        self._receipts: dict[int, bytes] = {}
        self._uploads: dict[int, _Upload] = {}
        self._folded: set[int] = set()
        self._unsaved = 0
        self._total: Words = np.zeros(config.length, masks.word_type(config.bits))
        self._agreed: dict[int, Envelope] = {}
        self._openers: tuple[int, ...] = ()
        self._charged = False
        self._pending: set[int] = set()
        self._common: bytes | None = None
        self._short = 0
        self._shares: dict[int, dict[int, bytes]] = {}
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
            records: of the journal, at least the first.
            size: as before, like all of the rest.
            identity: the server's key.
            roster: the one that the configuration names.
            unix_time: seconds.
            random: random bytes.

        Raises:
            SecureSumError: `JOURNAL`: records that no session leaves.
        """
        if not records or records[0].kind != "CONFIG":
            raise _damaged("no configuration")
        reader = Reader(records[0].body, _CONFIG_TAG, 2**20, Reason.JOURNAL)
        body, candidates = reader.blob(MAX_CONFIG_BYTES), reader.integers(MAX_COHORT)
        reader.end()
        try:
            config = RoundConfig.decode(body)
        except SecureSumError as error:
            raise _damaged("a configuration that is none") from error
        server = cls(config, size, candidates, identity, roster, unix_time=unix_time, random=random)
        server._phase, server._restarted = "advertise", True
        for record in records[1:]:
            try:
                server._replay(record)
            except (KeyError, ValueError, SecureSumError) as error:
                raise _damaged(f"a record {record.kind} that does not fit") from error
        return server

    @property
    def phase(self) -> str:
        """Before the first tick "idle", then one of the five phases, then "done"."""
        return self._phase

    @property
    def deadline(self) -> float | None:
        """When the phase closes; None before the first tick and at the end."""
        return self._deadline

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
            body = messages.struct(_CONFIG_TAG, self.config.encode(), self.candidates)
            return [Persist(Record("CONFIG", body)), *self._enter("advertise")]
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
            self._short, self._shares = len(self._u1), {owner: {} for owner in self._u1}
            release = Release(
                self.config.session_id, self.config.job, self.config.round, self.config.attempt, len(self._u2)
            )
            effects = [Charge(release)]
            if not self._charged:
                effects.append(Persist(Record("CHARGED", self._u2_hash)))
        return [
            *effects,
            *(self._ask(client) for client in sorted(self._pending)),
            *self._close_if_complete(),
        ]

    def _expected(self) -> set[int]:
        """Who has yet to answer in this phase, gone or not."""
        match self._phase:
            case "advertise":
                return set(self._known).difference(self._adverts)
            case "share":
                return set(self._ids).difference(self._dealt)
            case "masked":
                return set(self._u1 - self._folded)
            case "agree":
                return set(self._u2).difference(self._agreed)
            case _:
                return set(self._openers)

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
                everyone: Message = Config(self.config)
                if self._phase == "agree":
                    everyone = Survivors(self._u0, self._u1_hash, self._u2_bits)
                self._common = self._send(SERVER, everyone).data
            return Send(client, self._common)
        match self._phase:
            case "share":
                adverts = tuple(self._adverts[other][0] for other in self._near[client])
                message: Message = _Roll(self._ids, self._nonces, adverts)
            case "masked":
                owners = tuple(owner for owner in self._near[client] if owner in self._u1)
                fields = tuple(self._dealt[owner].fields[self._places[owner][client] - 1] for owner in owners)
                message = Deliver(self._u1_bits, owners, fields)
            case _:
                signers = self._signers(client)
                message = Open(signers, tuple(self._agreed[signer].signature for signer in signers))
        return self._send(client, message)

    def _send(self, client: int, message: Message) -> Send:
        return Send(client, keys.sign(message, self.config.session_id, SERVER, self._identity).encode())

    def _signers(self, client: int) -> tuple[int, ...]:
        """Neighbours whose signatures a client is shown."""
        return tuple(other for other in self._near[client] if other in self._agreed)[: self._t]

    # --- what comes ---

    def _take(self, sender: int, data: bytes) -> list[Effect]:
        envelope, message = self._read(sender, data)
        match message:
            case None:
                return self._answer_again(sender, envelope.kind)
            case messages.Abort():
                return self._leave(sender, message.error(sender))
            case Complaint(owner):
                self._expect_member(sender, self._u1)
                self._expect_member(sender, self._places.get(owner, ()))
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
        if kind == Masked.KIND and self._phase == "masked" and client not in self._folded:
            self._uploads[client] = _Upload(self._receipts[client])  # it sends all of it again
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
        self._uploads.pop(client, None)
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
        self._expect_member(client, self._ids)
        if shares.u0 != self._u0 or len(shares.fields) != len(self._near[client]):
            raise self._refused(Reason.SPLIT_VIEW, "shares for another cohort", "that of the roll", client)
        self._dealt[client] = _Dealt(shares.commitment, shares.fields)
        return [Persist(Record("SHARES", envelope.encode()))]

    def _take_header(self, client: int, header: Masked) -> list[Effect]:
        self._expect_member(client, self._u1)
        if header.u1 != self._u1_hash:
            raise self._refused(Reason.SPLIT_VIEW, "a vector for another set", "that of U1", client)
        if self._receipts.get(client, header.sha256) != header.sha256:
            raise self._refused(Reason.EQUIVOCATION, "another vector", "the first one counts", client)
        self._receipts[client] = header.sha256
        self._uploads[client] = _Upload(header.sha256)
        return []

    def _take_chunk(self, client: int, number: int, data: bytes | memoryview) -> list[Effect]:
        upload = self._uploads.get(client)
        if upload is None and self._phase == "masked" and client in self._folded:
            return []  # the same upload again
        if upload is None:
            late = self._phase in ("agree", "unmask", "done")
            reason = Reason.LATE if late else Reason.BAD_UPLOAD
            raise self._refused(reason, "a chunk of no open upload", "the header comes first", client)
        if (
            number != len(upload.chunks)
            or not 0 < len(data) <= CHUNK_BYTES
            or upload.size + len(data) > self.config.upload_bytes
            or number > 1 + self.config.upload_bytes // _LEAST_CHUNK
        ):
            del self._uploads[client]
            raise self._refused(
                Reason.BAD_UPLOAD,
                f"chunk {number} of {len(data)} bytes after {upload.size}",
                f"in order, of at most {CHUNK_BYTES} bytes, {self.config.upload_bytes} in all",
                client,
            )
        upload.digest.update(data)
        upload.chunks.append(data)
        upload.size += len(data)
        if upload.size < self.config.upload_bytes:
            return []
        del self._uploads[client]
        if upload.digest.digest() != upload.sha256:
            raise self._refused(Reason.BAD_UPLOAD, "another hash", "that of the header", client)
        try:
            self._fold(upload.chunks)
        except SecureSumError as error:
            raise _Refused(error, client) from error
        self._folded.add(client)
        self._pending.discard(client)
        self._unsaved += 1
        effects: list[Effect] = [
            Persist(Record("RECEIPT", messages.struct(_RECEIPT_TAG, client, upload.sha256)))
        ]
        if self._unsaved >= SNAPSHOT_EVERY:
            effects.append(self._snapshot())
        return [*effects, *self._close_if_complete()]

    def _fold(self, chunks: Sequence[bytes | memoryview]) -> None:
        """Add a complete upload to the sum; the last chunk first, since padding can only be wrong there."""
        bits = self.config.bits
        if any(len(chunk) % bits for chunk in chunks[:-1]):
            masks.add_packed(self._total, b"".join(chunks), bits)
            return
        starts = np.cumsum([0, *(len(chunk) * 8 // bits for chunk in chunks[:-1])]).tolist()
        ends = [*starts[1:], self.config.length]
        for chunk, start, end in reversed(list(zip(chunks, starts, ends, strict=True))):
            masks.add_packed(self._total[start:end], chunk, bits)

    def _take_agreement(self, envelope: Envelope, agree: Agree) -> list[Effect]:
        client = envelope.sender
        self._expect_member(client, self._u2)
        if (agree.u0, agree.u1, agree.u2) != (self._u0, self._u1_hash, self._u2_hash):
            raise self._refused(
                Reason.INCONSISTENT_SURVIVORS, "other sets than were sent", "the same", client
            )
        self._agreed[client] = envelope
        return [Persist(Record("AGREE", envelope.encode()))]

    def _take_unmask(self, client: int, unmask: Unmask) -> list[Effect]:
        self._expect_member(client, self._openers)
        alive = [owner for owner in self._near[client] if owner in self._u2]
        silent = [owner for owner in self._near[client] if owner in self._u1 and owner not in self._u2]
        if (len(unmask.b_shares), len(unmask.s_shares)) != (len(alive), len(silent)):
            raise self._refused(
                Reason.SHARE_MISMATCH,
                f"{len(unmask.b_shares)} and {len(unmask.s_shares)} shares",
                f"{len(alive)} and {len(silent)}",
                client,
            )
        effects: list[Effect] = []
        session_id, t = self.config.session_id, self._t
        for kind, owners, sent in (
            (ShareKind.B, alive, unmask.b_shares),
            (ShareKind.S, silent, unmask.s_shares),
        ):
            start = SEALED_BYTES + TAG_BYTES * kind
            for owner, share in zip(owners, sent, strict=True):
                holder = self._places[owner][client]
                dealt = self._dealt[owner].fields[holder - 1][start : start + TAG_BYTES]
                if keys.share_tag(session_id, owner, holder, kind, share) == dealt:
                    shares = self._shares[owner]
                    shares[holder] = share
                    self._short -= len(shares) == t
                    continue
                error = self._error(Reason.SHARE_MISMATCH, "a share of another tag", "as dealt", client)
                error.owner = owner
                effects += self._refuse(client, error)
        if self._short == 0:
            self._pending.clear()
        return effects

    def _expect_member(self, client: int, expected: Iterable[int]) -> None:
        if client not in expected:
            raise self._refused(Reason.WRONG_PHASE, "a client that is not asked", "who was", client)

    # --- the freezes ---

    def _freeze_cohort(self) -> list[Effect]:
        ids = sorted(set(self._adverts) - self._gone)
        self._expect("advertise", len(ids))
        self._set_cohort(tuple(ids))
        if self._t > len(self._near[ids[0]]):
            raise SecureSumError(
                Reason.COHORT_TOO_SMALL,
                f"{len(ids)} clients have fewer neighbours than shares are needed",
                phase="advertise",
                have=len(self._near[ids[0]]),
                need=self._t,
            )
        return [Persist(Record("U0", messages.struct(_U0_TAG, ids))), *self._enter("share")]

    def _set_cohort(self, ids: tuple[int, ...]) -> None:
        config = self.config
        nonces = tuple(self._adverts[client][1].nonce for client in ids)
        self._ids, self._nonces, self._t = ids, nonces, config.threshold(len(ids))
        self._u0 = keys.u0_hash(config.session_id, ids, nonces)
        graph = graphs.neighbours(ids, nonces, config.session_id, config.k, config.graph)
        table = graph.table().tolist()
        self._near = {
            client: tuple(ids[place] for place in row) for client, row in zip(ids, table, strict=True)
        }
        self._places = {
            client: {other: place for place, other in enumerate(near, 1)}
            for client, near in self._near.items()
        }

    def _freeze_sharers(self) -> list[Effect]:
        chosen = set(self._dealt) - self._gone
        while weak := {c for c in chosen if sum(other in chosen for other in self._near[c]) < self._t}:
            chosen -= weak
        self._expect("share", len(chosen))
        self._set_sharers(keys.bitmap(chosen, self._ids))
        return [Persist(Record("U1", self._u1_bits)), *self._enter("masked")]

    def _set_sharers(self, bits: bytes) -> None:
        self._u1 = frozenset(keys.members(bits, self._ids))
        self._u1_bits, self._u1_hash = bits, keys.u1_hash(self.config.session_id, bits)

    def _freeze_survivors(self) -> list[Effect]:
        unfinished = sorted(self._uploads)
        self._uploads.clear()
        late: list[Effect] = []
        for client in unfinished:
            error = self._error(
                Reason.LATE, "an unfinished upload", "complete before the phase closes", client
            )
            late += self._refuse(client, error)
        self._expect("masked", len(self._folded))
        for owner in sorted(self._u1):
            self._expect_shares(owner, [other for other in self._near[owner] if other in self._folded])
        effects = [*late, self._snapshot()] if self._unsaved else late
        self._set_survivors(keys.bitmap(self._folded, self._ids))
        entered = self._enter("agree")
        missed = [self._ask(client) for client in sorted(self._u1 - self._u2 - self._gone)]
        return [*effects, Persist(Record("U2", self._u2_bits)), *missed, *entered]

    def _set_survivors(self, bits: bytes) -> None:
        self._u2 = frozenset(keys.members(bits, self._ids))
        self._u2_bits, self._u2_hash = bits, keys.u2_hash(self.config.session_id, bits)

    def _prepare_opening(self) -> list[Effect]:
        self._openers = self._find_openers()
        holders = set(self._openers)
        for owner in sorted(self._u1):
            self._expect_shares(owner, [other for other in self._near[owner] if other in holders])
        return self._enter("unmask")

    def _find_openers(self) -> tuple[int, ...]:
        """Who can be asked for shares: it agreed, and so did t of its neighbours."""
        return tuple(client for client in sorted(self._agreed) if len(self._signers(client)) == self._t)

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

    def _expect_shares(self, owner: int, holders: Sequence[int]) -> None:
        if len(holders) < self._t:
            raise SecureSumError(
                Reason.UNMASK_SHORT,
                "too few are left who hold its shares",
                rule=f"t = {self._t} of them",
                phase=self._phase,
                owner=owner,
                have=len(holders),
                need=self._t,
            )

    def _snapshot(self) -> Persist:
        self._unsaved = 0
        body = keys.bitmap(self._folded, self._ids) + masks.pack(self._total, self.config.bits)
        return Persist(Record("SNAPSHOT", body))

    # --- the opening ---

    def _open_sum(self) -> list[Effect]:
        for owner in sorted(self._u1):
            self._expect_shares(owner, list(self._shares[owner]))
        self._remove_masks(self._rebuild())
        decoded = self._encoding.decode(self._total, len(self._u2))
        survivors = tuple(sorted(self._u2))
        packed = masks.pack(self._total, self.config.bits)
        transcript = keys.transcript(
            self.config.session_id,
            self._u0,
            self._u1_hash,
            self._u2_hash,
            hashlib.sha256(packed).digest(),
            len(survivors),
        )
        self._settle(ServerResult(decoded, survivors, transcript, tuple(self.faults)))
        return [Persist(Record("RESULT", transcript + packed)), *self._outcome]

    def _rebuild(self) -> dict[int, bytes]:
        """Of each owner b or s, from exactly t shares, and checked against what the owner announced."""
        owners = sorted(self._u1)
        chosen = [sorted(self._shares[owner])[: self._t] for owner in owners]
        joined = b"".join(
            self._shares[owner][holder] for owner, row in zip(owners, chosen, strict=True) for holder in row
        )
        shares = np.frombuffer(joined, ">u4").astype(np.uint32).reshape(len(owners), self._t, shamir.LIMBS)
        holders = np.array(chosen, np.int64)
        try:
            rebuilt = [secret.tobytes() for secret in shamir.combine(shares, holders, owners)]
        except SecureSumError as error:
            raise self._misdealt(error.owner) from error
        for owner, secret in zip(owners, rebuilt, strict=True):
            if owner in self._u2:
                fits = keys.commitment(self.config.session_id, owner, secret) == self._dealt[owner].commitment
            else:
                fits = AgreementKey(secret).public == self._adverts[owner][1].mask_key
            if not fits:
                raise self._misdealt(owner)
        return dict(zip(owners, rebuilt, strict=True))

    def _misdealt(self, owner: int | None) -> SecureSumError:
        return SecureSumError(
            Reason.SHARE_MISMATCH,
            "the secret is not the one its owner announced",
            rule="shares with good tags rebuild the secret that was committed to",
            phase="unmask",
            owner=owner,
        )

    def _remove_masks(self, secrets: Mapping[int, bytes]) -> None:
        session_id, bits = self.config.session_id, self.config.bits
        streams, signs = [], []
        for owner, secret in secrets.items():
            if owner in self._u2:
                streams.append(keys.kdf(secret, session_id, "sa1/self", owner, owner))
                signs.append(-1)
                continue
            key = AgreementKey(secret)
            for other in self._near[owner]:
                if other in self._u2:  # its vector has + towards the larger id
                    agreed = key.agree(self._adverts[other][1].mask_key, other)
                    streams.append(keys.kdf(agreed, session_id, "sa1/pair", owner, other))
                    signs.append(-1 if owner > other else 1)
        masks.add_streams(self._total, streams, signs, bits)

    # --- the journal ---

    def _replay(self, record: Record) -> None:
        kind, body = record.kind, record.body
        allowed = {
            "advertise": ("ADVERT", "U0"),
            "share": ("SHARES", "U1"),
            "masked": ("RECEIPT", "SNAPSHOT", "U2"),
            "agree": ("AGREE", "CHARGED"),
            "unmask": ("CHARGED", "RESULT"),
        }
        if kind not in (*allowed.get(self._phase, ()), "FAILED") or self._phase == "done":
            raise _damaged(f"a record {kind} in {self._phase}")
        match kind:
            case "ADVERT" | "SHARES" | "AGREE":
                self._replay_envelope(body)
            case "U0":
                reader = Reader(body, _U0_TAG, self._limit, Reason.JOURNAL)
                self._set_cohort(reader.integers(self.config.n_max))
                reader.end()
                self._phase = "share"
            case "U1":
                self._set_sharers(body)
                self._phase = "masked"
            case "RECEIPT":
                reader = Reader(body, _RECEIPT_TAG, _SMALL, Reason.JOURNAL)
                client = reader.integer()
                self._receipts[client] = reader.hash()
                reader.end()
            case "SNAPSHOT":
                size = (len(self._ids) + 7) // 8
                self._folded = set(keys.members(body[:size], self._ids))
                self._total = self._unpacked(body[size:])
            case "U2":
                self._set_survivors(body)
                if self._u2 != self._folded:
                    raise _damaged("survivors whose sum is not there")
                self._phase = "agree"
            case "CHARGED":
                self._openers, self._charged, self._phase = self._find_openers(), True, "unmask"
            case "RESULT":
                decoded = self._encoding.decode(self._unpacked(body[HASH_BYTES:]), len(self._u2))
                self._settle(ServerResult(decoded, tuple(sorted(self._u2)), body[:HASH_BYTES], ()))
            case _:
                self._give_up(messages.Abort.decode(body, self.config).error(SERVER))

    def _unpacked(self, packed: bytes) -> Words:
        try:
            return masks.unpack(packed, self.config.length, self.config.bits)
        except SecureSumError as error:
            raise _damaged("a sum of another size") from error

    def _replay_envelope(self, body: bytes) -> None:
        envelope = Envelope.decode(body, self._limit)
        message = messages.parse(envelope, self.config, messages.MESSAGES[envelope.kind])
        self._received[envelope.sender, envelope.kind] = hashlib.sha256(body).digest()
        match message:
            case Advert():
                self._keep_advert(envelope, message)
            case Shares():
                self._dealt[envelope.sender] = _Dealt(message.commitment, message.fields)
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
        told = [Send(client, note) for client in self.candidates if client not in self._gone]
        self._end((*told, Abort(error)))

    def _end(self, outcome: tuple[Effect, ...]) -> None:
        """Forget keys, shares and sums; what is left can be told again."""
        self._outcome, self._phase, self._deadline = outcome, "done", None
        for kept in (self._shares, self._dealt, self._uploads, self._adverts, self._agreed):
            kept.clear()
        self._total = np.zeros(0, self._total.dtype)

    def _error(self, reason: Reason, found: str, rule: str, client: int) -> SecureSumError:
        phase = self._phase if self._phase in PHASES else ""
        return SecureSumError(reason, found, rule=rule, phase=phase, client=client)

    def _refused(self, reason: Reason, found: str, rule: str, client: int) -> _Refused:
        return _Refused(self._error(reason, found, rule, client), client)

    def _note(self, error: SecureSumError) -> None:
        if len(self.faults) < _KEPT_FAULTS:
            self.faults.append(error)

    def _refuse(self, client: int, error: SecureSumError) -> list[Effect]:
        if error.client is None:
            error.client = client
        if not error.phase and self._phase in PHASES:
            error.phase = self._phase
        self._note(error)
        return [Refuse(client, error)]


def _damaged(found: str) -> SecureSumError:
    return SecureSumError(Reason.JOURNAL, found, rule="the records of one session, in order", who="journal")


_STATUS: Final[Mapping[Reason, str]] = {
    Reason.BAD_SIGNATURE: "PERMISSION_DENIED",
    Reason.REPLAY: "FAILED_PRECONDITION",
    Reason.ALREADY_RELEASED: "FAILED_PRECONDITION",
    Reason.MODEL_MISMATCH: "FAILED_PRECONDITION",
    Reason.POLICY: "FAILED_PRECONDITION",
    Reason.WRONG_PHASE: "FAILED_PRECONDITION",
    Reason.JOURNAL: "FAILED_PRECONDITION",
    Reason.SPLIT_VIEW: "ABORTED",
    Reason.BAD_SHARE: "ABORTED",
    Reason.INCONSISTENT_SURVIVORS: "ABORTED",
    Reason.COHORT_TOO_SMALL: "ABORTED",
    Reason.UNMASK_SHORT: "ABORTED",
    Reason.EMPTY_WEIGHT: "ABORTED",
    Reason.LATE: "DEADLINE_EXCEEDED",
    Reason.EQUIVOCATION: "ALREADY_EXISTS",
    Reason.SESSION: "NOT_FOUND",
    Reason.SUM_OUT_OF_RANGE: "DATA_LOSS",
    Reason.BUDGET: "RESOURCE_EXHAUSTED",
}


def status_code(error: SecureSumError) -> str:
    """The gRPC status that goes with an error; INVALID_ARGUMENT for what is wrong in itself."""
    if error.reason == Reason.SHARE_MISMATCH and error.client is None:
        return "DATA_LOSS"  # the owner's fault: nobody can open the sum
    return _STATUS.get(error.reason, "INVALID_ARGUMENT")
