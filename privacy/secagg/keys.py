"""Keys of the secure sum: who speaks, what two clients agree on, how shares are sealed, and what is hashed.

X25519 (RFC 7748) for agreement, HKDF-SHA256 (RFC 5869) for every key made from it, AES-256-GCM (SP 800-38D)
or ChaCha20-Poly1305 (RFC 8439) for sealing, Ed25519 (RFC 8032) for signatures, all from `cryptography`. Keys
of a session are bound to it, have one use each, and never leave memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from hashlib import sha256
from struct import Struct
from typing import Final, Literal

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mycelia.privacy.secagg.messages import (
    HASH_BYTES,
    KEY_BYTES,
    SERVER,
    TAG_BYTES,
    Envelope,
    Message,
    Reason,
    Seal,
    SecureSumError,
    digest,
    struct,
)

__all__ = [
    "AgreementKey", "Identity", "Label", "Random", "Sealer", "ShareKind", "bitmap", "channel_key",
    "commitment", "kdf", "members", "share_context", "share_tag", "sign", "transcript", "u0_hash", "u1_hash",
    "u2_hash", "verify", "verify_bytes",
]  # fmt: skip

Random = Callable[[int], bytes]
"""So many bytes from a cryptographic source, like `os.urandom`."""

Label = Literal["sa1/chan-lo-hi", "sa1/chan-hi-lo", "sa1/pair", "sa1/self", "sa1/graph", "sa1/rot"]
"""What a key is for; no key has two uses."""

_INFO: Final[Mapping[str, bytes]] = {
    label: label.encode() + b"\0"
    for label in ("sa1/chan-lo-hi", "sa1/chan-hi-lo", "sa1/pair", "sa1/self", "sa1/graph", "sa1/rot")
}
_SHA256: Final = SHA256()
_PAIR: Final = Struct(">QQ")
_ZERO_NONCE: Final = bytes(12)
_CIPHERS: Final[Mapping[int, type[AESGCM] | type[ChaCha20Poly1305]]] = {
    Seal.AES_GCM: AESGCM,
    Seal.CHACHA20_POLY1305: ChaCha20Poly1305,
}


class ShareKind(IntEnum):
    """Which secret of its owner a share is of: the self seed, or the mask key."""

    B = 0
    S = 1


# --- identity -------------------------------------------------------------------------------------


class Identity:
    """An Ed25519 key pair that signs: a client's, the server's, or the operator's.

    Args:
        private: 32 bytes, a secret.

    Attributes:
        private: as given, for whoever stores it.
        public: 32 bytes.
    """

    __slots__ = ("_key", "private", "public")

    def __init__(self, private: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private)
        self.private = private
        self.public = self._key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls, random: Random = os.urandom) -> Identity:
        """A fresh key pair."""
        return cls(random(KEY_BYTES))

    def sign(self, data: bytes) -> bytes:
        """A signature, 64 bytes, always the same over the same data."""
        return self._key.sign(data)

    def __repr__(self) -> str:
        return f"Identity(public={self.public.hex()})"


def verify_bytes(public: bytes, signature: bytes, data: bytes) -> bool:
    """Whether a signature over these bytes is that of a public key; a malformed key has no signatures."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def sign(message: Message, session_id: bytes, sender: int, identity: Identity) -> Envelope:
    """A message in a signed envelope."""
    unsigned = Envelope(message.KIND, session_id, sender, message.encode(), b"")
    signature = identity.sign(unsigned.signed)
    return Envelope(unsigned.kind, session_id, sender, unsigned.body, signature)


def verify(envelope: Envelope, public: bytes) -> None:
    """Refuse an envelope that its sender did not sign.

    Args:
        envelope: as received.
        public: the sender's Ed25519 key, as the roster has it.

    Raises:
        SecureSumError: `BAD_SIGNATURE`.
    """
    if not verify_bytes(public, envelope.signature, envelope.signed):
        sender = envelope.sender
        raise SecureSumError(
            Reason.BAD_SIGNATURE,
            f"the signature of a message {envelope.kind!r} does not verify",
            rule="signed with the sender's key in the roster",
            who="server" if sender == SERVER else "",
            client=sender if sender != SERVER else None,
        )


# --- agreement and derived keys -------------------------------------------------------------------


class AgreementKey:
    """An X25519 key pair, made for one session and one use.

    Args:
        private: 32 bytes, a secret.

    Attributes:
        private: as given; that of the mask key is what gets shared.
        public: 32 bytes.
    """

    __slots__ = ("_key", "private", "public")

    def __init__(self, private: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(private)
        self.private = private
        self.public = self._key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls, random: Random = os.urandom) -> AgreementKey:
        """A fresh key pair."""
        return cls(random(KEY_BYTES))

    def agree(self, public: bytes, client: int | None = None) -> bytes:
        """What both ends of a pair compute, 32 bytes: not yet a key, see `kdf`.

        Args:
            public: the other end's key.
            client: whose it is, for the error.

        Raises:
            SecureSumError: `BAD_KEY` for a key of low order, with which everybody agrees on zero.
        """
        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise SecureSumError(
                Reason.BAD_KEY,
                "a public key that gives no secret",
                rule="32 bytes, and not a point of low order",
                client=client,
            ) from error

    def __repr__(self) -> str:
        return f"AgreementKey(public={self.public.hex()})"


def kdf(ikm: bytes, session_id: bytes, label: Label, i: int, j: int) -> bytes:
    """A key, 32 bytes: HKDF-SHA256 with the session as salt and label ‖ 0 ‖ lesser ‖ greater id as info.

    Args:
        ikm: what it is derived from, a secret (public for `sa1/graph` and `sa1/rot`).
        session_id: 32 bytes.
        label: what it is for.
        i: a client, 0 for a key of no client.
        j: the other client, or the same.

    Raises:
        KeyError: an unknown label.
    """
    info = _INFO[label] + (_PAIR.pack(i, j) if i <= j else _PAIR.pack(j, i))
    return HKDF(_SHA256, KEY_BYTES, session_id, info).derive(ikm)


def channel_key(ikm: bytes, session_id: bytes, sender: int, receiver: int) -> bytes:
    """The key for the one message from a client to another; the way back has its own."""
    label: Label = "sa1/chan-lo-hi" if sender < receiver else "sa1/chan-hi-lo"
    return kdf(ikm, session_id, label, sender, receiver)


# --- sealing --------------------------------------------------------------------------------------


class Sealer:
    """Seals one message under a key of its own, or opens it; the nonce can therefore be zero.

    Args:
        key: 32 bytes from `channel_key`.
        seal: which cipher, see `Seal`.

    Raises:
        ValueError: a key of another length, or an unknown cipher.
    """

    __slots__ = ("_cipher", "_used")

    def __init__(self, key: bytes, seal: int = Seal.AES_GCM) -> None:
        if len(key) != KEY_BYTES or seal not in _CIPHERS:
            raise ValueError(f"a key of {len(key)} bytes for cipher {seal}")
        self._cipher = _CIPHERS[seal](key)
        self._used = False

    def seal(self, plain: bytes, context: bytes) -> bytes:
        """The message sealed: encrypted, and 16 bytes that show it and its context unchanged.

        Args:
            plain: the message.
            context: what it belongs to, see `share_context`.

        Raises:
            RuntimeError: a second message under this key; both would be given away.
        """
        if self._used:
            raise RuntimeError("a second message under one key")
        self._used = True
        return self._cipher.encrypt(_ZERO_NONCE, plain, context)

    def open_(self, sealed: bytes, context: bytes, owner: int | None = None) -> bytes:
        """The message.

        Args:
            sealed: what `seal` gave.
            context: the same as there.
            owner: who sealed it, for the error.

        Raises:
            SecureSumError: `BAD_SHARE` if anything was changed.
        """
        try:
            return self._cipher.decrypt(_ZERO_NONCE, sealed, context)
        except InvalidTag as error:
            raise SecureSumError(
                Reason.BAD_SHARE,
                "sealed shares do not open",
                rule="sealed for this client, cohort and session",
                owner=owner,
            ) from error


# Built by hand where there is one for each neighbour: what all have in common is not encoded anew.
_CONTEXT: Final = struct("SA1/share") + HASH_BYTES.to_bytes(4, "big")
_CONTEXT_U0: Final = HASH_BYTES.to_bytes(4, "big")
_CONTEXT_END: Final = Struct(">IQIQIQIQIQ")
_TAG: Final = struct("SA1/tag") + HASH_BYTES.to_bytes(4, "big")
_TAG_END: Final = Struct(">IQIQIQI")


def share_context(
    session_id: bytes, u0: bytes, sender: int, receiver: int, holder: int, k: int, t: int
) -> bytes:
    """What sealed shares are bound to: `struct("SA1/share", …)` of the arguments.

    Args:
        session_id: 32 bytes.
        u0: hash of the cohort as the sealing or opening side saw it.
        sender: who sealed.
        receiver: who opens.
        holder: the receiver's index among the sender's neighbours, from 1.
        k: neighbours of each client.
        t: the threshold.
    """
    end = _CONTEXT_END.pack(8, sender, 8, receiver, 8, holder, 8, k, 8, t)
    return _CONTEXT + session_id + _CONTEXT_U0 + u0 + end


def share_tag(session_id: bytes, owner: int, holder: int, kind: int, share: bytes) -> bytes:
    """What a share is recognised by, 16 bytes: the start of `digest("SA1/tag", …)` of the arguments.

    Args:
        session_id: 32 bytes.
        owner: whose secret it is a share of.
        holder: the holder's index among the owner's neighbours, from 1.
        kind: see `ShareKind`.
        share: 36 bytes.
    """
    middle = _TAG_END.pack(8, owner, 8, holder, 8, kind, len(share))
    return sha256(_TAG + session_id + middle + share).digest()[:TAG_BYTES]


def commitment(session_id: bytes, owner: int, b: bytes) -> bytes:
    """What a client says about its self seed b beforehand, 32 bytes; the seed's 256 bits hide it."""
    return digest("SA1/com", session_id, owner, b)


# --- sets of clients ------------------------------------------------------------------------------


def u0_hash(session_id: bytes, ids: Sequence[int], nonces: Sequence[bytes]) -> bytes:
    """Hash of the cohort: ids, increasing, and their nonces."""
    return digest("SA1/U0", session_id, ids, nonces)


def u1_hash(session_id: bytes, members_bitmap: bytes) -> bytes:
    """Hash of the set that shared, from its bitmap over U0."""
    return digest("SA1/U1", session_id, members_bitmap)


def u2_hash(session_id: bytes, members_bitmap: bytes) -> bytes:
    """Hash of the survivors, from their bitmap over U0."""
    return digest("SA1/U2", session_id, members_bitmap)


def transcript(
    session_id: bytes, u0: bytes, u1: bytes, u2: bytes, total_sha256: bytes, survivors: int
) -> bytes:
    """Hash of a session that came to its end: the three sets, the sum, and how many are in it."""
    return digest("SA1/done", session_id, u0, u1, u2, total_sha256, survivors)


def bitmap(chosen: Iterable[int], ids: Sequence[int]) -> bytes:
    """A set as bits over the order of the cohort, lowest bit first.

    Args:
        chosen: the members.
        ids: of the cohort, increasing.

    Raises:
        ValueError: a member that is not in the cohort.
    """
    wanted = set(chosen)
    bits = np.array([client in wanted for client in ids], dtype=bool)
    if bits.sum() != len(wanted):
        raise ValueError(f"{sorted(wanted.difference(ids))} are not in the cohort")
    return np.packbits(bits, bitorder="little").tobytes()


def members(bits: bytes, ids: Sequence[int]) -> tuple[int, ...]:
    """The set that a bitmap stands for, increasing.

    Args:
        bits: the bitmap.
        ids: of the cohort, increasing.

    Raises:
        SecureSumError: `BAD_ROLL` if it has another length, or a bit set after the last client.
    """
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    if len(bits) != (len(ids) + 7) // 8 or flags[len(ids) :].any():
        raise SecureSumError(
            Reason.BAD_ROLL,
            f"a bitmap of {len(bits)} bytes for {len(ids)} clients",
            rule="one bit for each client of the cohort, and zeros up to a whole byte",
        )
    return tuple(ids[place] for place in np.flatnonzero(flags).tolist())
