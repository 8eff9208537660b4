"""The messages of the secure sum, signed in envelopes, each with strict canonical bytes and a size limit.

A decoder takes what its encoder gives and nothing else, or raises `SecureSumError`; how much it takes follows
from the configuration of the round. The errors, the canonical bytes and that configuration belong to the
protocol as much as the messages do, so they can be imported from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, Self, TypeVar

from mycelia.privacy.secagg.canonical import (
    HASH_BYTES,
    HEAD_BYTES,
    INTEGER_BYTES,
    MAX_TEXT,
    PHASES,
    SERVER,
    Field,
    Reader,
    Reason,
    SecureSumError,
    digest,
    list_bytes,
    struct,
)
from mycelia.privacy.secagg.round_config import (
    MAX_COHORT,
    MAX_CONFIG_BYTES,
    MAX_SLOTS,
    Graph,
    Mechanism,
    NoiseBlock,
    RoundConfig,
    Seal,
    Threat,
    ThresholdRule,
)

__all__ = [
    "COMMITMENT_BYTES", "FIELD_BYTES", "HASH_BYTES", "KEY_BYTES", "MAX_COHORT", "MAX_CONFIG_BYTES",
    "MAX_SLOTS", "MAX_TEXT", "MESSAGES", "NONCE_BYTES", "PHASES", "SEALED_BYTES", "SERVER", "SHARE_BYTES",
    "SIGNATURE_BYTES", "TAG_BYTES", "Abort", "Advert", "Agree", "Complaint", "Config", "Deliver", "Done",
    "Envelope", "Graph", "Masked", "Mechanism", "Message", "NoiseBlock", "Open", "Reason", "Roll",
    "RoundConfig", "Seal", "SecureSumError", "Shares", "Survivors", "Threat", "ThresholdRule", "Unmask",
    "digest", "envelope_limit", "parse", "parse_config", "struct",
]  # fmt: skip

KEY_BYTES: Final = 32
COMMITMENT_BYTES: Final = 32
NONCE_BYTES: Final = 16
SIGNATURE_BYTES: Final = 64
SHARE_BYTES: Final = 36
TAG_BYTES: Final = 16
SEALED_BYTES: Final = 2 * SHARE_BYTES + 16
"""Both shares of one owner for one holder, sealed: of s, of b, and the 16 bytes of the cipher's tag."""
FIELD_BYTES: Final = SEALED_BYTES + 2 * TAG_BYTES
"""What a client sends for one neighbour: the sealed shares, the tag of the b share, that of the s share."""

_FIELD_25519: Final = 2**255 - 19


@dataclass(frozen=True)
class _Part:
    """How one field of a message is written: what it may hold follows from the configuration.

    Attributes:
        read: takes it from a reader, or raises.
        limit: the most bytes it takes.
        write: gives what `struct` encodes.
    """

    read: Callable[[Reader, RoundConfig], Any]
    limit: Callable[[RoundConfig], int]
    write: Callable[[Any], Field] = lambda value: value


def _blob(size: int) -> _Part:
    return _Part(lambda reader, _: reader.blob(size, exact=True), lambda _: HEAD_BYTES + size)


def _list(most: Callable[[RoundConfig], int], size: int) -> _Part:
    """At most so many fields of one size."""
    return _Part(
        lambda reader, config: reader.blobs(size, most(config)),
        lambda config: list_bytes(most(config), size),
    )


def _ids(most: Callable[[RoundConfig], int]) -> _Part:
    """At most so many ids of clients, increasing."""

    def read(reader: Reader, config: RoundConfig) -> tuple[int, ...]:
        ids = reader.integers(most(config))
        if any(low >= high for low, high in zip((SERVER, *ids), ids, strict=False)):
            raise reader.error("ids out of order", rule="ids count from 1 and increase")
        return ids

    return _Part(read, lambda config: list_bytes(most(config), 8))


def _cohort(config: RoundConfig) -> int:
    return config.n_max


def _neighbours(config: RoundConfig) -> int:
    return config.k


def _bitmap_bytes(config: RoundConfig) -> int:
    return (config.n_max + 7) // 8


def _read_client(reader: Reader, config: RoundConfig) -> int:
    client = reader.integer()
    if client == SERVER:
        raise reader.error("client 0", rule="clients count from 1")
    return client


def _read_reason(reader: Reader, config: RoundConfig) -> Reason:
    text = reader.text()
    if text not in Reason.__members__:
        raise reader.error("an unknown reason")
    return Reason[text]


def _read_phase(reader: Reader, config: RoundConfig) -> str:
    text = reader.text()
    if text not in ("", *PHASES):
        raise reader.error("an unknown phase", rule=f"one of {', '.join(PHASES)}, or none")
    return text


_HASH = _blob(HASH_BYTES)
_TEXT = _Part(lambda reader, _: reader.text(), lambda _: HEAD_BYTES + MAX_TEXT)
_REASON = _Part(_read_reason, lambda _: HEAD_BYTES + max(map(len, Reason)))
_PHASE = _Part(_read_phase, lambda _: HEAD_BYTES + max(map(len, PHASES)))
_NUMBER = _Part(lambda reader, _: reader.integer(), lambda _: INTEGER_BYTES)
_CLIENT = _Part(_read_client, lambda _: INTEGER_BYTES)
_BITMAP = _Part(
    lambda reader, config: reader.blob(_bitmap_bytes(config)),
    lambda config: HEAD_BYTES + _bitmap_bytes(config),
)
_PERHAPS = _Part(  # an integer or None
    lambda reader, _: next(iter(reader.integers(1)), None),
    lambda _: list_bytes(1, 8),
    lambda value: [] if value is None else [value],
)


@dataclass(frozen=True)
class Envelope:
    """A message on its way: who sent it, in which session, and the signature over all of that.

    Attributes:
        kind: one of `MESSAGES`.
        session_id: 32 bytes.
        sender: a client's id, or `SERVER`.
        body: the canonical bytes of the message.
        signature: 64 bytes of Ed25519 over `signed`.
    """

    TAG: ClassVar[str] = "SA1/envelope"

    kind: str
    session_id: bytes
    sender: int
    body: bytes = field(repr=False)
    signature: bytes = field(repr=False)

    @property
    def signed(self) -> bytes:
        """The bytes that the signature covers."""
        return struct("SA1/sig", self.kind, self.session_id, self.sender, self.body)

    def encode(self) -> bytes:
        """Canonical bytes, as they travel."""
        return struct(self.TAG, self.kind, self.session_id, self.sender, self.body, self.signature)

    @classmethod
    def decode(cls, data: bytes, limit: int) -> Self:
        """Read what `encode` wrote; neither the signature nor the body has been looked at.

        Args:
            data: what came.
            limit: the most bytes it may have, see `envelope_limit`.

        Raises:
            SecureSumError: `FRAME`.
        """
        reader = Reader(data, cls.TAG, limit)
        kind = reader.text()
        if kind not in MESSAGES:
            raise reader.error("an unknown kind of message")
        signature = SIGNATURE_BYTES
        envelope = cls(
            kind, reader.hash(), reader.integer(), reader.blob(limit), reader.blob(signature, exact=True)
        )
        reader.end()
        return envelope


@dataclass(frozen=True)
class Message:
    """One message: canonical bytes of its own, signed in an `Envelope`.

    Attributes:
        KIND: its name in the envelope.
        PHASE: the phase it belongs to, "" for any.
        SENDER: which side may send it, "" for either.
        PARTS: how its fields are written, in their order.
        REASON: the code of a body that does not decode.
    """

    KIND: ClassVar[str]
    PHASE: ClassVar[str]
    SENDER: ClassVar[Literal["server", "client", ""]]
    PARTS: ClassVar[tuple[_Part, ...]]
    REASON: ClassVar[Reason] = Reason.FRAME

    @classmethod
    def tag(cls) -> str:
        """The tag of its struct."""
        return f"SA1/msg/{cls.KIND}"

    def encode(self) -> bytes:
        """Canonical bytes."""
        parts = zip(self.PARTS, vars(self).values(), strict=True)
        return struct(self.tag(), *(part.write(value) for part, value in parts))

    @classmethod
    def decode(cls, data: bytes, config: RoundConfig) -> Self:
        """Read what `encode` wrote.

        Args:
            data: the body of an envelope.
            config: the session's configuration, from which the limits follow.

        Raises:
            SecureSumError: of code `REASON`.
        """
        reader = Reader(data, cls.tag(), cls.limit(config), cls.REASON)
        build: Callable[..., Self] = cls
        message = build(*(part.read(reader, config) for part in cls.PARTS))
        reader.end()
        message.check(config)
        return message

    @classmethod
    def limit(cls, config: RoundConfig) -> int:
        """The most bytes of one of them in a session."""
        return sum((part.limit(config) for part in cls.PARTS), HEAD_BYTES + len(cls.tag()))

    def check(self, config: RoundConfig) -> None:
        """Raise where fields that are well formed do not fit together or the configuration."""

    def refused(self, found: str, rule: str) -> SecureSumError:
        """The error of `check`."""
        return SecureSumError(self.REASON, found, rule=rule, who=self.tag())


@dataclass(frozen=True)
class Config(Message):
    """Server, advertise: what the round is.

    Attributes:
        round: its configuration; the body of this message is that one's encoding.
    """

    KIND = "config"
    PHASE = "advertise"
    SENDER = "server"
    REASON = Reason.CONFIG

    round: RoundConfig

    def encode(self) -> bytes:
        """Canonical bytes."""
        return self.round.encode()

    @classmethod
    def decode(cls, data: bytes, config: RoundConfig | None = None) -> Self:
        """Read what `encode` wrote; no other configuration is needed."""
        return cls(RoundConfig.decode(data))

    @classmethod
    def limit(cls, config: RoundConfig | None = None) -> int:
        """The most bytes of one."""
        return MAX_CONFIG_BYTES


@dataclass(frozen=True)
class Advert(Message):
    """Client, advertise: its public keys for the session. Every encoding has the same length.

    A key that is not below 2²⁵⁵ − 19 is refused, `BAD_KEY`: it is another way to write one that is.

    Attributes:
        session_id: 32 bytes.
        client: its id, from 1.
        channel_key: X25519 public key under which shares are sealed.
        mask_key: X25519 public key that masks come from.
        nonce: 16 bytes that the graph depends on.
    """

    KIND = "advert"
    PHASE = "advertise"
    SENDER = "client"
    PARTS = (_HASH, _CLIENT, _blob(KEY_BYTES), _blob(KEY_BYTES), _blob(NONCE_BYTES))

    session_id: bytes
    client: int
    channel_key: bytes
    mask_key: bytes
    nonce: bytes

    def check(self, config: RoundConfig) -> None:
        """See `Message.check`."""
        if any(int.from_bytes(key, "little") >= _FIELD_25519 for key in (self.channel_key, self.mask_key)):
            raise SecureSumError(
                Reason.BAD_KEY,
                "a public key that is not below the prime",
                rule="every key has one encoding",
                client=self.client,
            )


_SIGNED_ADVERT: Final = 4 + len("SA1/msg/advert") + 36 + 12 + 36 + 36 + 20 + SIGNATURE_BYTES


def _read_adverts(reader: Reader, config: RoundConfig) -> tuple[Envelope, ...]:
    adverts = []
    for item in reader.blobs(_SIGNED_ADVERT, config.k):
        body, signature = item[:-SIGNATURE_BYTES], item[-SIGNATURE_BYTES:]
        advert = Advert.decode(body, config)
        adverts.append(Envelope(Advert.KIND, advert.session_id, advert.client, body, signature))
    return tuple(adverts)


_ADVERTS = _Part(
    _read_adverts,
    lambda config: list_bytes(config.k, _SIGNED_ADVERT),
    lambda adverts: [advert.body + advert.signature for advert in adverts],
)


@dataclass(frozen=True)
class Roll(Message):
    """Server, share: the cohort U0, and the adverts of the receiver's neighbours.

    Attributes:
        ids: of all who advertised, increasing.
        nonces: theirs, in the same order.
        adverts: of the neighbours in the order of their ids, each signed by its sender.
    """

    KIND = "roll"
    PHASE = "share"
    SENDER = "server"
    REASON = Reason.BAD_ROLL
    PARTS = (_ids(_cohort), _list(_cohort, NONCE_BYTES), _ADVERTS)

    ids: tuple[int, ...]
    nonces: tuple[bytes, ...] = field(repr=False)
    adverts: tuple[Envelope, ...] = field(repr=False)

    def check(self, config: RoundConfig) -> None:
        """See `Message.check`."""
        _same_length(self, self.ids, self.nonces)


@dataclass(frozen=True)
class Shares(Message):
    """Client, share: both its secrets, shared among its neighbours.

    Attributes:
        u0: hash of the cohort it saw.
        commitment: to its self seed b.
        fields: 120 bytes for each neighbour, in the order of their ids: sealed shares (of s, then of b) 88,
            tag of the b share 16, tag of the s share 16.
    """

    KIND = "shares"
    PHASE = "share"
    SENDER = "client"
    PARTS = (_HASH, _HASH, _list(_neighbours, FIELD_BYTES))

    u0: bytes
    commitment: bytes
    fields: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True)
class Deliver(Message):
    """Server, masked: who shared, and what the receiver's neighbours among them shared with it.

    Attributes:
        u1: bitmap over the order of U0.
        owners: the receiver's neighbours in U1, increasing.
        fields: the 120 bytes of each, as in `Shares`.
    """

    KIND = "deliver"
    PHASE = "masked"
    SENDER = "server"
    REASON = Reason.BAD_ROLL
    PARTS = (_BITMAP, _ids(_neighbours), _list(_neighbours, FIELD_BYTES))

    u1: bytes
    owners: tuple[int, ...]
    fields: tuple[bytes, ...] = field(repr=False)

    def check(self, config: RoundConfig) -> None:
        """See `Message.check`."""
        _same_length(self, self.owners, self.fields)


@dataclass(frozen=True)
class Masked(Message):
    """Client, masked: the header of its masked vector, which follows in chunks.

    Attributes:
        u1: hash of the set it masked for.
        length: bytes of the packed vector, `RoundConfig.upload_bytes`.
        sha256: of the packed vector.
    """

    KIND = "masked"
    PHASE = "masked"
    SENDER = "client"
    REASON = Reason.BAD_UPLOAD
    PARTS = (_HASH, _NUMBER, _HASH)

    u1: bytes
    length: int
    sha256: bytes

    def check(self, config: RoundConfig) -> None:
        """See `Message.check`."""
        if self.length != config.upload_bytes:
            raise self.refused(f"an upload of {self.length} bytes", f"exactly {config.upload_bytes} bytes")


@dataclass(frozen=True)
class Complaint(Message):
    """Client, masked: what an owner shared with it does not open, or is no share; the client has stopped.

    Attributes:
        owner: whose shares they are.
    """

    KIND = "complaint"
    PHASE = "masked"
    SENDER = "client"
    PARTS = (_CLIENT,)

    owner: int


@dataclass(frozen=True)
class Survivors(Message):
    """Server, agree: whose vectors are in the sum.

    Attributes:
        u0: hash of the cohort.
        u1: hash of the set that masked.
        u2: bitmap over the order of U0.
    """

    KIND = "survivors"
    PHASE = "agree"
    SENDER = "server"
    PARTS = (_HASH, _HASH, _BITMAP)

    u0: bytes
    u1: bytes
    u2: bytes


@dataclass(frozen=True)
class Agree(Message):
    """Client, agree: the one view of the three sets that it opens for; the signature is the point of it.

    Attributes:
        u0: hash of the cohort.
        u1: hash of the set that masked.
        u2: hash of the survivors.
    """

    KIND = "agree"
    PHASE = "agree"
    SENDER = "client"
    PARTS = (_HASH, _HASH, _HASH)

    u0: bytes
    u1: bytes
    u2: bytes


@dataclass(frozen=True)
class Open(Message):
    """Server, unmask: proof that enough neighbours of the receiver agreed. It names no set.

    Attributes:
        signers: neighbours of the receiver, increasing.
        signatures: of the envelopes of their `Agree`, 64 bytes each.
    """

    KIND = "open"
    PHASE = "unmask"
    SENDER = "server"
    PARTS = (_ids(_neighbours), _list(_neighbours, SIGNATURE_BYTES))

    signers: tuple[int, ...]
    signatures: tuple[bytes, ...] = field(repr=False)

    def check(self, config: RoundConfig) -> None:
        """See `Message.check`."""
        _same_length(self, self.signers, self.signatures)


@dataclass(frozen=True)
class Unmask(Message):
    """Client, unmask: one share for each neighbour that masked, of b if it survived and of s if it did not.

    Attributes:
        b_shares: 36 bytes for each of its neighbours in U2, in the order of their ids.
        s_shares: 36 bytes for each of its neighbours in U1 and not in U2, in the order of their ids.
    """

    KIND = "unmask"
    PHASE = "unmask"
    SENDER = "client"
    PARTS = (_list(_neighbours, SHARE_BYTES), _list(_neighbours, SHARE_BYTES))

    b_shares: tuple[bytes, ...] = field(repr=False)
    s_shares: tuple[bytes, ...] = field(repr=False)

    def check(self, config: RoundConfig) -> None:
        """See `Message.check`."""
        count = len(self.b_shares) + len(self.s_shares)
        if count > config.k:
            raise self.refused(f"{count} shares", f"one for each of at most {config.k} neighbours")


@dataclass(frozen=True)
class Done(Message):
    """Server: the sum is opened, and the session is over.

    Attributes:
        transcript: `digest("SA1/done", session_id, U0, U1, U2 hashes, SHA-256 of the sum, |U2|)`.
    """

    KIND = "done"
    PHASE = "unmask"
    SENDER = "server"
    PARTS = (_HASH,)

    transcript: bytes


@dataclass(frozen=True)
class Abort(Message):
    """Either side, in any phase: it stops, and why. The numbers are those of `SecureSumError`.

    Attributes:
        reason: the code.
        phase: one of `PHASES`, or "".
        have: how many there were.
        need: how many there had to be.
        owner: whose secret or share it is about.
        client: who sent, held or complained.
        field: the setting that a policy refuses.
        asked: its value in the round.
        allowed: what the policy allows.
    """

    KIND = "abort"
    PHASE = ""
    SENDER = ""
    PARTS = (_REASON, _PHASE, _PERHAPS, _PERHAPS, _PERHAPS, _PERHAPS, _TEXT, _TEXT, _TEXT)

    reason: Reason
    phase: str = ""
    have: int | None = None
    need: int | None = None
    owner: int | None = None
    client: int | None = None
    field: str = ""
    asked: str = ""
    allowed: str = ""

    @classmethod
    def of(cls, error: SecureSumError) -> Self:
        """What to send about an error: its code and numbers, not its text."""
        numbers = (error.have, error.need, error.owner, error.client)
        texts = (error.field, error.asked, error.allowed)
        plain = ("".join(letter for letter in text if letter.isprintable()) for text in texts)
        short = (text.encode()[:MAX_TEXT].decode(errors="ignore") for text in plain)
        return cls(error.reason, error.phase, *numbers, *short)

    def error(self, sender: int) -> SecureSumError:
        """The error to raise where it was received."""
        return SecureSumError(found="the other side ended the session", who=_who(sender), **vars(self))

    def check(self, config: RoundConfig) -> None:
        """See `Message.check`."""
        if not (self.field + self.asked + self.allowed).isprintable():
            raise self.refused("text that does not print", "printable text, which may end up in a log")


MESSAGES: Final[Mapping[str, type[Message]]] = {
    kind.KIND: kind
    for kind in (
        Config, Advert, Roll, Shares, Deliver, Masked, Complaint, Survivors, Agree, Open, Unmask, Done, Abort,
    )
}  # fmt: skip
"""The messages by their kind, in the order of a round."""


_ENVELOPE_BYTES = (
    6 * HEAD_BYTES + len(Envelope.TAG) + max(map(len, MESSAGES)) + HASH_BYTES + 8 + SIGNATURE_BYTES
)


def envelope_limit(config: RoundConfig | None) -> int:
    """The most bytes of any envelope of a session; of the one that opens it, without a configuration."""
    kinds = [kind.limit(config) for kind in MESSAGES.values()] if config else [Config.limit()]
    return _ENVELOPE_BYTES + max(kinds)


M = TypeVar("M", bound=Message)


def parse(envelope: Envelope, config: RoundConfig, *expected: type[M]) -> M:
    """The message in an envelope of a session; the signature is the caller's to verify, before or after.

    Args:
        envelope: as received.
        config: the session's configuration.
        expected: the kinds that may come now.

    Raises:
        SecureSumError: `SESSION` for another session, `WRONG_PHASE` for another kind, `BAD_SIGNATURE` for a
            side that never sends it or an advert in another's name; else the `REASON` of the message.
    """
    who = _who(envelope.sender)
    if envelope.session_id != config.session_id:
        raise SecureSumError(Reason.SESSION, "a message of another session", who=who)
    found = MESSAGES[envelope.kind]
    kind = next((kind for kind in expected if kind is found), None)
    if kind is None:
        rule = f"now comes {' or '.join(kind.KIND for kind in expected)}"
        raise SecureSumError(Reason.WRONG_PHASE, f"a message {envelope.kind!r}", rule=rule, who=who)
    _check_side(kind, envelope)
    message = kind.decode(envelope.body, config)
    if isinstance(message, Advert) and (message.session_id, message.client) != (
        envelope.session_id,
        envelope.sender,
    ):
        raise SecureSumError(Reason.BAD_SIGNATURE, f"an advert of client {message.client}", who=who)
    return message


def parse_config(envelope: Envelope) -> RoundConfig:
    """The configuration in the envelope that opens a session; the signature is the caller's to verify.

    Raises:
        SecureSumError: `WRONG_PHASE` for another kind, `SESSION` if the session is not that configuration's,
            `BAD_SIGNATURE` if a client sent it, `CONFIG` or `WEAK_PARAMETERS`.
    """
    who = _who(envelope.sender)
    if envelope.kind != Config.KIND:
        raise SecureSumError(
            Reason.WRONG_PHASE, f"a message {envelope.kind!r}", rule=f"first comes {Config.KIND}", who=who
        )
    _check_side(Config, envelope)
    config = RoundConfig.decode(envelope.body)
    if config.session_id != envelope.session_id:
        raise SecureSumError(
            Reason.SESSION, "a session id of another configuration", rule="the hash of the one sent", who=who
        )
    return config


def _check_side(kind: type[Message], envelope: Envelope) -> None:
    side = "server" if envelope.sender == SERVER else "client"
    if kind.SENDER not in ("", side):
        raise SecureSumError(
            Reason.BAD_SIGNATURE,
            f"a message {kind.KIND!r} from a {side}",
            rule=f"it comes from the {kind.SENDER}",
            who=_who(envelope.sender),
        )


def _who(sender: int) -> str:
    return "server" if sender == SERVER else f"client {sender}"


def _same_length(message: Message, names: Sequence[object], items: Sequence[object]) -> None:
    if len(names) != len(items):
        raise message.refused(f"{len(names)} ids and {len(items)} items", "one item for each id")
