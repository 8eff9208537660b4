"""A client of the secure sum, as a state machine without I/O: events go in, effects come out.

    advertise → share → masked → agree → unmask

The server may lie. Whatever it says is checked before anything is answered, and the shares of a client's
neighbours leave only after enough of them have signed the one set of survivors that this client signed.
Secrets live in memory alone, so a client that is restarted in the middle of a session is a dropout.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mycelia.client import history
from mycelia.client.history import ClientHistory
from mycelia.client.policy import ClientPolicy
from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg import graph as graphs
from mycelia.privacy.secagg import keys, masks, messages, shamir
from mycelia.privacy.secagg.config import check_round
from mycelia.privacy.secagg.encoding import Encoding
from mycelia.privacy.secagg.events import (
    CHUNK_BYTES,
    Abort,
    Charge,
    ChargeRefused,
    Effect,
    Event,
    Finish,
    LocalUpdate,
    Persist,
    Received,
    Refuse,
    Release,
    Send,
    SendStream,
    Tick,
)
from mycelia.privacy.secagg.keys import AgreementKey, Identity, Random, Sealer, ShareKind
from mycelia.privacy.secagg.messages import (
    KEY_BYTES,
    NONCE_BYTES,
    SEALED_BYTES,
    SERVER,
    SHARE_BYTES,
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

if TYPE_CHECKING:
    from mycelia.privacy.noise import NoiseSource

__all__ = ["SecureSumClient", "Task"]


class Task(NamedTuple):
    """What this client has received to work on, as it computed it itself.

    Attributes:
        model_sha256: of the bytes of the model.
        schema_sha256: of its layout.
        task_sha256: of the algorithm and its local settings.
        size: coordinates of an update.
    """

    model_sha256: bytes
    schema_sha256: bytes
    task_sha256: bytes
    size: int


@dataclass(frozen=True)
class _Channel:
    """The two keys between this client and a neighbour: one for each direction."""

    out: Sealer
    back: Sealer

    @classmethod
    def between(cls, agreed: bytes, config: RoundConfig, client: int, neighbour: int) -> _Channel:
        """From what the two agreed on."""
        return cls(
            Sealer(keys.channel_key(agreed, config.session_id, client, neighbour), config.seal),
            Sealer(keys.channel_key(agreed, config.session_id, neighbour, client), config.seal),
        )


class _Held(NamedTuple):
    """The shares of one owner."""

    b: bytes
    s: bytes

    def __repr__(self) -> str:
        return "_Held(…)"


class _Answered(NamedTuple):
    """A message of the server, and what it was answered with."""

    received: bytes
    effects: tuple[Send | SendStream, ...]


@dataclass(eq=False, repr=False)
class _Session:
    """What a client knows while the session lasts; it is forgotten as a whole.

    Attributes:
        config: of the round.
        encoding: of its vector.
        channel: the key pair that shares are sealed under.
        mask: the key pair that pair masks come from.
        seed: of its own mask.
        advert: as sent.
        holders: its own index, from 1, among the holders of each neighbour's shares.
        ids: the cohort.
        neighbours: its own, increasing.
        t: the threshold in this cohort.
        u0: hash of the cohort.
        sealing: keys shared with each neighbour.
        pairs: mask keys shared with each neighbour.
        held: the shares of its neighbours.
        u1: those who shared.
        u1_hash: hash of these.
        upload: the masked vector as sent.
        u2: the survivors it signed.
        u2_hash: hash of these.
    """

    config: RoundConfig
    encoding: Encoding
    channel: AgreementKey
    mask: AgreementKey
    seed: bytes
    advert: Advert
    holders: dict[int, int] = field(default_factory=dict)
    ids: tuple[int, ...] = ()
    neighbours: tuple[int, ...] = ()
    t: int = 0
    u0: bytes = b""
    sealing: dict[int, _Channel] = field(default_factory=dict)
    pairs: dict[int, bytes] = field(default_factory=dict)
    held: dict[int, _Held] = field(default_factory=dict)
    u1: frozenset[int] = frozenset()
    u1_hash: bytes = b""
    upload: SendStream | None = None
    u2: frozenset[int] = frozenset()
    u2_hash: bytes = b""


class _Refused(Exception):
    """A message that changes nothing."""

    def __init__(self, error: SecureSumError) -> None:
        super().__init__(error)
        self.error = error


class SecureSumClient:
    """One client in one session.

    Args:
        client: its id.
        identity: its long-term key.
        roster: verified, current and not older than any it has seen.
        task: what it received with the configuration.
        unix_time: seconds, for the dates of the roster's entries.
        rounding: the named stream of the encoding's random rounding.
        policy: what it takes part in.
        past: what its journal says; None if the journal is missing.
        noise: the secret of its noise, for rounds with noise.
        random: random bytes for keys and shares.
    """

    def __init__(
        self,
        client: int,
        identity: Identity,
        roster: Roster,
        task: Task,
        *,
        unix_time: int,
        rounding: np.random.Generator,
        policy: ClientPolicy | None = None,
        past: ClientHistory | None,
        noise: NoiseSource | None = None,
        random: Random = os.urandom,
    ) -> None:
        self.client = client
        self._identity, self._roster, self._task = identity, roster, task
        self._policy, self._past, self._unix_time = policy or ClientPolicy(), past, unix_time
        self._rounding, self._noise, self._random = rounding, noise, random
        self._expects: type[Message] | None = Config
        self._config: RoundConfig | None = None
        self._session: _Session | None = None
        self._answered: dict[str, _Answered] = {}
        self._update: LocalUpdate | None = None
        self._now: float | None = None
        self._deadline: float | None = None

    @property
    def phase(self) -> str:
        """The phase of the message it waits for; "done" at the end."""
        return "done" if self._expects is None else self._expects.PHASE

    @property
    def deadline(self) -> float | None:
        """When it gives up; None while no session has begun."""
        return self._deadline

    def handle(self, event: Event) -> list[Effect]:
        """Take an event and say what to do about it."""
        try:
            match event:
                case Received(sender, data):
                    return self._received(sender, data)
                case LocalUpdate():
                    return self._contribute(event)
                case Tick(now):
                    return self._tick(now)
                case ChargeRefused(found):
                    if self._expects is None:
                        return []
                    raise SecureSumError(
                        Reason.BUDGET, found, rule="a release is paid for first", client=self.client
                    )
                case _:
                    return []  # chunks and closing are the server's
        except _Refused as refused:
            return [Refuse(SERVER, refused.error.without_frames())]
        except SecureSumError as error:
            return self._stop(error)
        except ConfigError as error:
            return self._stop(SecureSumError(Reason.CONFIG, error.found, rule=error.rule, fix=error.fix))

    # --- what holds for every message ---

    def _received(self, sender: int, data: bytes) -> list[Effect]:
        """Check who it is from and that it is its turn; without that nothing changes."""
        session, config = self._session, self._config
        try:
            if sender != SERVER:
                raise SecureSumError(
                    Reason.BAD_SIGNATURE, f"a message from {sender}", rule="only the server's"
                )
            envelope = Envelope.decode(data, messages.envelope_limit(config))
            if self._expects is None or (config and envelope.session_id != config.session_id):
                raise SecureSumError(Reason.SESSION, "a message of another session", client=self.client)
            if session is not None:
                self._verify_server(envelope)
            answered = self._answered.get(envelope.kind)
            same = hashlib.sha256(envelope.signed).digest()  # another server of the run may say it again
            if answered is not None and answered.received == same:
                return list(answered.effects)
            turn = {self._expects.KIND, *([messages.Abort.KIND] if session else [])}
            if answered is None and envelope.kind not in turn:
                raise SecureSumError(
                    Reason.WRONG_PHASE,
                    f"a message {envelope.kind!r}",
                    rule=f"now comes {self._expects.KIND}",
                    client=self.client,
                    phase=self.phase,
                )
        except SecureSumError as error:
            raise _Refused(error) from error
        if answered is not None:
            raise SecureSumError(
                Reason.EQUIVOCATION,
                f"a second message {envelope.kind!r}, and another one",
                rule="the server says everything once",
                phase=messages.MESSAGES[envelope.kind].PHASE,
                client=self.client,
            )
        effects = self._join(envelope) if session is None else self._follow(envelope, session)
        if self._expects is not None:
            again = tuple(effect for effect in effects if isinstance(effect, Send | SendStream))
            self._answered[envelope.kind] = _Answered(same, again)
        return effects

    def _follow(self, envelope: Envelope, session: _Session) -> list[Effect]:
        kind = messages.MESSAGES[envelope.kind]
        message = messages.parse(envelope, session.config, kind)
        match message:
            case Roll():
                return self._share(message, session)
            case Deliver():
                return self._open_shares(message, session)
            case Survivors():
                return self._agree(message, session)
            case Open():
                return self._release(message, session)
            case Done(transcript):
                self._erase()
                return [Finish(transcript)]
            case messages.Abort():
                error = message.error(SERVER)
                self._erase()
                return [Abort(error)]
            case _:
                raise SecureSumError(Reason.WRONG_PHASE, f"a message {envelope.kind!r}", client=self.client)

    def _verify_server(self, envelope: Envelope) -> None:
        self._roster.verify(envelope, self._unix_time)

    def _send(self, message: Message, config: RoundConfig) -> Send:
        return Send(SERVER, keys.sign(message, config.session_id, self.client, self._identity).encode())

    # --- advertise ---

    def _join(self, envelope: Envelope) -> list[Effect]:
        self._verify_server(envelope)
        config = messages.parse_config(envelope)
        if config.roster_sha256 != self._roster.sha256:
            raise SecureSumError(
                Reason.BAD_SIGNATURE,
                "another roster",
                rule="server and client have the same",
                client=self.client,
            )
        self._config = config
        self._roster.entry(self.client, self._unix_time)
        self._check_history(config)
        for name in ("model_sha256", "schema_sha256", "task_sha256"):
            if getattr(config, name) != getattr(self._task, name):
                raise SecureSumError(
                    Reason.MODEL_MISMATCH,
                    f"{name} is not that of what was received",
                    rule="all clients of a session work on the same",
                    client=self.client,
                    field=name,
                )
        encoding = check_round(config, self._task.size, corrupt_ppm=self._policy.corrupt_ppm, recovery=False)
        self._policy.check(config, self.client)
        channel, mask = AgreementKey.generate(self._random), AgreementKey.generate(self._random)
        nonce, seed = self._random(NONCE_BYTES), self._random(KEY_BYTES)
        advert = Advert(config.session_id, self.client, channel.public, mask.public, nonce)
        self._session = _Session(config, encoding, channel, mask, seed, advert)
        if self._now is not None:
            self._deadline = self._now + sum(config.deadlines_ms) / 1000
        self._expects = Roll
        joined = history.joined(config, self._roster.epoch)
        return [Persist(joined), self._send(advert, config)]

    def _check_history(self, config: RoundConfig) -> None:
        if self._past is None:
            raise SecureSumError(
                Reason.JOURNAL,
                "there is no journal",
                rule="without it nothing says which rounds were released",
                fix="enrol anew, then begin a new journal",
                client=self.client,
            )
        self._past.check(config, self._roster.epoch, self.client)

    # --- share ---

    def _share(self, roll: Roll, session: _Session) -> list[Effect]:
        config, own, ids = session.config, session.advert, roll.ids
        if not config.n_min <= len(ids) <= config.n_max:
            raise self._bad_roll(f"{len(ids)} clients", f"{config.n_min} to {config.n_max}")
        for client in ids:
            self._expect_listed(client)
        nonces = dict(zip(ids, roll.nonces, strict=True))
        if nonces.get(self.client) != own.nonce:
            raise self._bad_roll("this client's own entry is not in it", "as it was advertised")
        graphs.check(
            len(ids),
            config.degree(len(ids)),
            config.threshold(len(ids)),
            threat=config.threat,
            corrupt_ppm=max(config.corrupt_ppm, self._policy.corrupt_ppm),
            dropout_ppm=config.dropout_ppm,
            recovery=False,
        )
        graph = graphs.neighbours(ids, roll.nonces, config.session_id, config.k, config.graph)
        session.u0, session.ids = keys.u0_hash(config.session_id, ids, roll.nonces), ids
        table, place = graph.table(), ids.index(self.client)
        near = table[place]
        session.neighbours = tuple(ids[other] for other in near.tolist())
        holders = 1 + (table[near] < place).sum(axis=1)
        session.holders = dict(zip(session.neighbours, holders.tolist(), strict=True))
        session.t = config.threshold(len(ids))
        if tuple(advert.sender for advert in roll.adverts) != session.neighbours:
            raise self._bad_roll("adverts of others than its neighbours", "of exactly these, in order of ids")
        adverts = [self._read_advert(advert, session, nonces) for advert in roll.adverts]
        public = [key for advert in (own, *adverts) for key in (advert.channel_key, advert.mask_key)]
        if len(set(public)) != len(public):
            twice = next(a for a in adverts if public.count(a.channel_key) + public.count(a.mask_key) > 2)
            raise SecureSumError(
                Reason.BAD_KEY,
                "a key twice",
                rule="all keys are distinct",
                phase="share",
                client=twice.client,
            )
        for advert in adverts:
            agreed = session.channel.agree(advert.channel_key, advert.client)
            session.sealing[advert.client] = _Channel.between(agreed, config, self.client, advert.client)
            session.pairs[advert.client] = keys.kdf(
                session.mask.agree(advert.mask_key, advert.client),
                config.session_id,
                "sa1/pair",
                self.client,
                advert.client,
            )
        self._expects = Deliver
        fields = self._seal_shares(session)
        commitment = keys.commitment(config.session_id, self.client, session.seed)
        return [self._send(Shares(session.u0, commitment, fields), config)]

    def _expect_listed(self, client: int) -> None:
        try:
            self._roster.entry(client, self._unix_time)
        except SecureSumError as error:
            if client in self._roster.revoked or any(
                entry.client == client for entry in self._roster.clients
            ):
                raise
            raise self._bad_roll(f"client {client} is not in the roster", "all are enrolled") from error

    def _read_advert(self, envelope: Envelope, session: _Session, nonces: dict[int, bytes]) -> Advert:
        if envelope.session_id != session.config.session_id:
            raise SecureSumError(
                Reason.SPLIT_VIEW,
                "a neighbour advertised in another session",
                rule="all clients were sent the same configuration",
                phase="share",
                client=envelope.sender,
            )
        self._roster.verify(envelope, self._unix_time)
        advert = Advert.decode(envelope.body, session.config)
        if advert.nonce != nonces[advert.client]:
            raise self._bad_roll(f"another nonce of client {advert.client}", "as it was advertised")
        return advert

    def _seal_shares(self, session: _Session) -> tuple[bytes, ...]:
        config, k = session.config, len(session.neighbours)
        secrets = np.frombuffer(session.mask.private + session.seed, np.uint8).reshape(2, KEY_BYTES)
        shares = shamir.encode_shares(shamir.split(secrets, k, session.t, self._random).transpose(1, 0, 2))
        fields = []
        for place, neighbour in enumerate(session.neighbours):
            both = shares[2 * SHARE_BYTES * place : 2 * SHARE_BYTES * (place + 1)]
            s_share, b_share = both[:SHARE_BYTES], both[SHARE_BYTES:]
            context = keys.share_context(
                config.session_id, session.u0, self.client, neighbour, place + 1, k, session.t
            )
            sealed = session.sealing[neighbour].out.seal(both, context)
            named = (config.session_id, self.client, place + 1)
            fields.append(
                sealed
                + keys.share_tag(*named, ShareKind.B, b_share)
                + keys.share_tag(*named, ShareKind.S, s_share)
            )
        return tuple(fields)

    # --- masked ---

    def _open_shares(self, deliver: Deliver, session: _Session) -> list[Effect]:
        config = session.config
        u1 = frozenset(keys.members(deliver.u1, session.ids))
        owners = tuple(owner for owner in session.neighbours if owner in u1)
        if self.client not in u1:
            raise self._bad_roll("this client is not among those that shared", "it has shared")
        if len(u1) < config.n_min:
            raise self._bad_roll(f"{len(u1)} clients shared", f"at least {config.n_min}")
        if len(owners) < session.t:
            raise self._bad_roll(f"{len(owners)} of its neighbours shared", f"at least {session.t}")
        if deliver.owners != owners:
            raise self._bad_roll("shares of others than its neighbours", "of exactly those who shared")
        for owner, sealed in zip(owners, deliver.fields, strict=True):
            try:
                session.held[owner] = self._open_share(owner, sealed, session)
            except SecureSumError as error:
                complaint = self._send(Complaint(owner), config)
                bad = SecureSumError(
                    Reason.BAD_SHARE,
                    error.found,
                    rule=error.rule,
                    phase="masked",
                    owner=owner,
                    client=self.client,
                )
                return [complaint, *self._stop(bad, tell=False)]
        session.sealing.clear()
        session.u1, session.u1_hash = u1, keys.u1_hash(config.session_id, deliver.u1)
        session.pairs = {owner: session.pairs[owner] for owner in owners}
        self._expects = Survivors
        update, self._update = self._update, None
        return [] if update is None else self._mask(update, session)

    def _open_share(self, owner: int, data: bytes, session: _Session) -> _Held:
        config = session.config
        holder = session.holders[owner]
        context = keys.share_context(
            config.session_id, session.u0, owner, self.client, holder, len(session.neighbours), session.t
        )
        both = session.sealing[owner].back.open_(data[:SEALED_BYTES], context, owner)
        shamir.decode_shares(both)
        held = _Held(b=both[SHARE_BYTES:], s=both[:SHARE_BYTES])
        tags = data[SEALED_BYTES : SEALED_BYTES + TAG_BYTES], data[SEALED_BYTES + TAG_BYTES :]
        named = (config.session_id, owner, holder)
        if tags != (
            keys.share_tag(*named, ShareKind.B, held.b),
            keys.share_tag(*named, ShareKind.S, held.s),
        ):
            raise SecureSumError(
                Reason.BAD_SHARE, "a tag of another share", rule="tags are of the shares sealed"
            )
        return held

    def _contribute(self, update: LocalUpdate) -> list[Effect]:
        """Keep the update until it is known for whom to mask."""
        session = self._session
        if session is not None and self._expects is Survivors and session.upload is None:
            return self._mask(update, session)
        if self._expects in (Config, Roll, Deliver):
            self._update = update
        return []

    def _mask(self, update: LocalUpdate, session: _Session) -> list[Effect]:
        config = session.config
        words = session.encoding.encode(
            update.vector,
            update.weight,
            update.slots,
            client=self.client,
            rounding=self._rounding,
            noise=self._noise,
        )
        own = keys.kdf(session.seed, config.session_id, "sa1/self", self.client, self.client)
        signs = [1, *(1 if other > self.client else -1 for other in session.pairs)]
        masks.add_streams(words, [own, *session.pairs.values()], signs, config.bits)
        session.pairs = {}
        packed = masks.pack(words, config.bits)
        header = Masked(session.u1_hash, len(packed), hashlib.sha256(packed).digest())
        view = memoryview(packed)
        size = CHUNK_BYTES - CHUNK_BYTES % config.bits  # whole elements, which can be added as they are
        session.upload = SendStream(
            SERVER,
            self._send(header, config).data,
            tuple(view[start : start + size] for start in range(0, len(packed), size)),
        )
        deliver = self._answered.get(Deliver.KIND)
        if deliver is not None:
            self._answered[Deliver.KIND] = deliver._replace(effects=(session.upload,))
        return [session.upload]

    # --- agree ---

    def _agree(self, survivors: Survivors, session: _Session) -> list[Effect]:
        config = session.config
        if (survivors.u0, survivors.u1) != (session.u0, session.u1_hash):
            raise self._split_view("other sets than this client knows", "all see the same cohort")
        u2 = frozenset(keys.members(survivors.u2, session.ids))
        if self.client not in u2 or session.upload is None:
            raise SecureSumError(
                Reason.LATE,
                "the sum is without this client",
                rule="an upload is complete before the phase closes",
                phase="agree",
                client=self.client,
            )
        alive = sum(neighbour in u2 for neighbour in session.neighbours)
        if not u2 <= session.u1:
            raise self._split_view("survivors that had not shared", "survivors are among those who shared")
        if len(u2) < config.n_min:
            raise self._split_view(f"{len(u2)} survivors", f"at least {config.n_min}")
        if alive < session.t:
            raise self._split_view(f"{alive} of its neighbours survived", f"at least {session.t}")
        session.u2, session.u2_hash = u2, keys.u2_hash(config.session_id, survivors.u2)
        self._expects = Open
        message = Agree(session.u0, session.u1_hash, session.u2_hash)
        return [Persist(history.agreed(config, session.u2_hash)), self._send(message, config)]

    # --- unmask ---

    def _release(self, opening: Open, session: _Session) -> list[Effect]:
        config = session.config
        agreement = Agree(session.u0, session.u1_hash, session.u2_hash).encode()
        if len(opening.signers) < session.t:
            raise self._inconsistent(f"{len(opening.signers)} agree", f"at least {session.t} neighbours")
        for signer, signature in zip(opening.signers, opening.signatures, strict=True):
            if signer not in session.u2 or signer not in session.neighbours:
                raise self._inconsistent(f"client {signer} agrees", "a neighbour that survived")
            signed = Envelope(Agree.KIND, config.session_id, signer, agreement, signature)
            try:
                self._roster.verify(signed, self._unix_time)
            except SecureSumError as error:
                raise self._inconsistent(f"client {signer} has not signed these sets", error.rule) from error
        owners = [owner for owner in session.neighbours if owner in session.u1]
        response = Unmask(
            tuple(session.held[owner].b for owner in owners if owner in session.u2),
            tuple(session.held[owner].s for owner in owners if owner not in session.u2),
        )
        self._expects = Done
        sent = self._send(response, config)
        release = Release(config.session_id, config.job, config.round, config.attempt, len(session.u2))
        session.held.clear()
        return [Persist(history.released(config, sent.data)), Charge(release), sent]

    # --- the end ---

    def _tick(self, now: float) -> list[Effect]:
        self._now = now if self._now is None else max(now, self._now)
        if self._session is None or self._expects is None:
            return []
        if self._deadline is None:
            self._deadline = self._now + sum(self._session.config.deadlines_ms) / 1000
        if self._now < self._deadline:
            return []
        raise SecureSumError(
            Reason.LATE, f"no {self._expects.KIND!r} came", rule="a session ends by its deadlines",
            phase=self.phase, client=self.client,
        )  # fmt: skip

    def _stop(self, error: SecureSumError, *, tell: bool = True) -> list[Effect]:
        """Leave, and tell the server why if it is known to be one."""
        config, phase = self._config, self.phase
        self._erase()
        error.without_frames().phase = error.phase or phase
        if error.client not in (None, self.client):  # it is about another, and it is this one that leaves
            error.owner = error.client
        error.client = self.client
        if config is None or not tell:
            return [Abort(error)]
        return [self._send(messages.Abort.of(error), config), Abort(error)]

    def _erase(self) -> None:
        """Forget keys, seeds, shares, masks and the upload."""
        self._session, self._update, self._expects, self._deadline = None, None, None, None
        self._answered.clear()

    def _bad_roll(self, found: str, rule: str) -> SecureSumError:
        return SecureSumError(Reason.BAD_ROLL, found, rule=rule, phase=self.phase, client=self.client)

    def _split_view(self, found: str, rule: str) -> SecureSumError:
        return SecureSumError(Reason.SPLIT_VIEW, found, rule=rule, phase=self.phase, client=self.client)

    def _inconsistent(self, found: str, rule: str) -> SecureSumError:
        return SecureSumError(
            Reason.INCONSISTENT_SURVIVORS, found, rule=rule, phase=self.phase, client=self.client
        )
