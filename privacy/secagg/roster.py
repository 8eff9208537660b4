"""The roster: who takes part and with which key, in one document that the operator signs.

Clients pin the operator's key when they enrol and remember the highest epoch they have seen. The server only
hands the document on: what it says about a key counts for nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from typing import ClassVar, Final, Self

from mycelia.privacy.secagg.canonical import (
    HASH_BYTES,
    MAX_TEXT,
    SERVER,
    Reader,
    Reason,
    SecureSumError,
    struct,
)
from mycelia.privacy.secagg.keys import Identity, verify, verify_bytes
from mycelia.privacy.secagg.messages import KEY_BYTES, SIGNATURE_BYTES, Envelope

__all__ = ["MAX_ENTRIES", "MAX_ROSTER_BYTES", "ClientEntry", "Issuer", "Roster", "ServerEntry"]

MAX_ENTRIES: Final = 2**16
MAX_ROSTER_BYTES: Final = 2**26
_MAX_SERVERS: Final = 64
_MAX_GROUPS: Final = 64
_MAX_KEYS: Final = 2
"""Entries of one client: that of the keys it has, and that of the keys it changes to."""
_LAST: Final = 253_402_300_799  # the last second of the year 9999
_WHO: Final = "roster"


class Issuer(StrEnum):
    """Where a client was enrolled: with the operator, or with the server, which could then invent clients."""

    OFFLINE = "offline"
    ONLINE = "online"


@dataclass(frozen=True)
class ClientEntry:
    """One client.

    Attributes:
        client: its id, from 1, never given twice.
        identity_key: Ed25519 public key, 32 bytes.
        issuer: see `Issuer`.
        not_before: first second of validity, Unix time.
        not_after: last second of validity, Unix time.
        name: for people.
        tls_sha256: SHA-256 of its TLS public key, 32 bytes, or empty where there is no network.
        groups: names of groups it belongs to.
    """

    client: int
    identity_key: bytes
    issuer: Issuer
    not_before: int
    not_after: int
    name: str = ""
    tls_sha256: bytes = b""
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerEntry:
    """One server.

    Attributes:
        name: its name.
        identity_key: Ed25519 public key, 32 bytes.
        not_before: first second of validity, Unix time.
        not_after: last second of validity, Unix time.
        tls_sha256: SHA-256 of its TLS public key, 32 bytes, or empty where there is no network.
    """

    name: str
    identity_key: bytes
    not_before: int
    not_after: int
    tls_sha256: bytes = b""


@dataclass(frozen=True)
class Roster:
    """All clients and servers of one operator at one epoch.

    Attributes:
        epoch: grows by at least 1 with every change.
        expires: last second of validity, Unix time.
        clients: by increasing id; while the keys of a client are rotated it has two entries, the newer last.
        servers: none before the first is enrolled; then nobody speaks for the server.
        revoked: ids that are refused whether they have an entry or not, increasing.

    Raises:
        SecureSumError: `CONFIG` for a number out of range, an order not kept, a key that stands twice.
    """

    TAG: ClassVar[str] = "SA1/roster"
    _SIGNED_TAG: ClassVar[str] = "SA1/roster/signed"

    epoch: int
    expires: int
    clients: tuple[ClientEntry, ...]
    servers: tuple[ServerEntry, ...]
    revoked: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.epoch < 2**63:
            raise _refused(f"epoch {self.epoch}", "epochs count from 1")
        if not 0 <= self.expires <= _LAST:
            raise _refused(f"it expires at {self.expires}", "seconds since 1970, before the year 10000")
        if max(len(self.clients), len(self.revoked)) > MAX_ENTRIES:
            raise _refused(
                f"{len(self.clients)} clients, {len(self.revoked)} revoked", f"at most {MAX_ENTRIES} of each"
            )
        if len(self.servers) > _MAX_SERVERS:
            raise _refused(f"{len(self.servers)} servers", f"at most {_MAX_SERVERS}")
        _check_increasing("clients", [entry.client for entry in self.clients], most=_MAX_KEYS)
        _check_increasing("revoked", self.revoked)
        for entry in self.clients:
            _check_client(entry)
        everybody: tuple[ClientEntry | ServerEntry, ...] = (*self.clients, *self.servers)
        for holder in everybody:
            _check_entry(holder)
        _check_distinct("server name", [server.name for server in self.servers])
        _check_distinct("identity key", [entry.identity_key for entry in everybody])
        _check_distinct("TLS key", [entry.tls_sha256 for entry in everybody if entry.tls_sha256])

    def encode(self) -> bytes:
        """Canonical bytes, without the signature."""
        return struct(
            self.TAG,
            self.epoch,
            self.expires,
            [
                [
                    entry.client, entry.identity_key, entry.issuer, entry.not_before, entry.not_after,
                    entry.name, entry.tls_sha256, entry.groups,
                ]
                for entry in self.clients
            ],
            [
                [server.name, server.identity_key, server.not_before, server.not_after, server.tls_sha256]
                for server in self.servers
            ],
            self.revoked,
        )  # fmt: skip

    @cached_property
    def sha256(self) -> bytes:
        """SHA-256 of the canonical bytes, which a round's configuration names."""
        return hashlib.sha256(self.encode()).digest()

    def sign(self, operator: Identity) -> bytes:
        """The document: the roster and the operator's signature."""
        body = self.encode()
        return struct(self._SIGNED_TAG, body, operator.sign(_signed(body)))

    @classmethod
    def load(cls, document: bytes, operator_key: bytes, *, now: int, least_epoch: int = 1) -> Self:
        """Read and verify a document.

        Args:
            document: what `sign` gave, from whomever.
            operator_key: the pinned Ed25519 public key.
            now: Unix time in seconds.
            least_epoch: the highest epoch seen so far.

        Raises:
            SecureSumError: `BAD_SIGNATURE` if the operator did not sign it, or if it is expired or older than
                one seen before; `FRAME` or `CONFIG` if it is no roster.
        """
        outer = Reader(document, cls._SIGNED_TAG, MAX_ROSTER_BYTES)
        body, signature = outer.blob(MAX_ROSTER_BYTES), outer.blob(SIGNATURE_BYTES, exact=True)
        outer.end()
        if not verify_bytes(operator_key, signature, _signed(body)):
            raise SecureSumError(
                Reason.BAD_SIGNATURE,
                "the roster is not signed by the operator",
                rule="signed with the key that was pinned at enrolment",
                who=_WHO,
            )
        roster = cls._decode(body)
        if now > roster.expires:
            raise SecureSumError(
                Reason.BAD_SIGNATURE,
                f"the roster expired on {_date(roster.expires)}",
                rule="an expired roster is refused",
                fix="the operator signs a new epoch: mycelia enrol renew",
                who=_WHO,
            )
        if roster.epoch < least_epoch:
            raise SecureSumError(
                Reason.BAD_SIGNATURE,
                f"the roster has epoch {roster.epoch}",
                rule="not older than one seen before: a revocation could be hidden",
                who=_WHO,
                have=roster.epoch,
                need=least_epoch,
            )
        return roster

    @classmethod
    def _decode(cls, body: bytes) -> Self:
        reader = Reader(body, cls.TAG, MAX_ROSTER_BYTES)
        roster = cls(
            reader.integer(),
            reader.integer(),
            tuple([_read_client(reader) for _ in range(reader.count(MAX_ENTRIES, KEY_BYTES))]),
            tuple([_read_server(reader) for _ in range(reader.count(_MAX_SERVERS, KEY_BYTES))]),
            reader.integers(MAX_ENTRIES),
        )
        reader.end()
        return roster

    def entry(self, client: int, now: int) -> ClientEntry:
        """The entry of a client that may take part.

        Args:
            client: its id.
            now: Unix time in seconds.

        Raises:
            SecureSumError: `BAD_SIGNATURE` for an id that is unknown, revoked, or not valid now.
        """
        return self.entries(client, now)[-1]

    def entries(self, client: int, now: int) -> tuple[ClientEntry, ...]:
        """The entries of a client that may take part: two while its keys are rotated, the newer last.

        Args:
            client: its id.
            now: Unix time in seconds.

        Raises:
            SecureSumError: `BAD_SIGNATURE` for an id that is unknown, revoked, or not valid now.
        """
        entries = self.listed(client)
        if not entries or client in self._revoked:
            found = "the client is revoked" if client in self._revoked else "no such client"
            raise SecureSumError(
                Reason.BAD_SIGNATURE, found, rule="listed in the roster and not revoked", client=client
            )
        valid = tuple([entry for entry in entries if entry.not_before <= now <= entry.not_after])
        if not valid:
            entry = entries[-1]
            raise SecureSumError(
                Reason.BAD_SIGNATURE,
                f"its entry is valid from {_date(entry.not_before)} to {_date(entry.not_after)}",
                rule="an entry is valid between its dates",
                fix="mycelia enrol renew",
                client=client,
            )
        return valid

    def listed(self, client: int) -> tuple[ClientEntry, ...]:
        """The entries of a client, valid or not, the newer last; none for an id that nobody has."""
        return self._clients.get(client, ())

    def is_revoked(self, client: int) -> bool:
        """Whether an id is refused for ever."""
        return client in self._revoked

    def verify(self, envelope: Envelope, now: int) -> bytes:
        """Refuse an envelope that its sender did not sign, or that comes from nobody in the roster.

        Args:
            envelope: as received.
            now: Unix time in seconds.

        Returns:
            The Ed25519 public key that verified it.

        Raises:
            SecureSumError: `BAD_SIGNATURE`.
        """
        if envelope.sender != SERVER:
            key, *others = [entry.identity_key for entry in reversed(self.entries(envelope.sender, now))]
            for other in others:
                if verify_bytes(other, envelope.signature, envelope.signed):
                    return other
            verify(envelope, key)
            return key
        for server in self.servers:
            signed = verify_bytes(server.identity_key, envelope.signature, envelope.signed)
            if signed and server.not_before <= now <= server.not_after:
                return server.identity_key
        raise SecureSumError(
            Reason.BAD_SIGNATURE,
            f"no server's signature on a message {envelope.kind!r}",
            rule="signed by a server that the roster lists, between the dates of its entry",
            who="server",
        )

    @cached_property
    def _clients(self) -> dict[int, tuple[ClientEntry, ...]]:
        found: dict[int, tuple[ClientEntry, ...]] = {}
        for entry in self.clients:
            found[entry.client] = (*found.get(entry.client, ()), entry)
        return found

    @cached_property
    def _revoked(self) -> frozenset[int]:
        return frozenset(self.revoked)


def _signed(body: bytes) -> bytes:
    return struct("SA1/roster/sig", body)


def _read_client(reader: Reader) -> ClientEntry:
    if reader.count(8, 0) != 8:
        raise reader.error("a client without its 8 fields")
    return ClientEntry(
        reader.integer(),
        reader.blob(KEY_BYTES, exact=True),
        _read_issuer(reader),
        reader.integer(),
        reader.integer(),
        reader.text(),
        reader.blob(HASH_BYTES),
        tuple([reader.text() for _ in range(reader.count(_MAX_GROUPS, 0))]),
    )


def _read_issuer(reader: Reader) -> Issuer:
    try:
        return Issuer(reader.text())
    except ValueError as error:
        raise reader.error("an unknown issuer", rule=f"one of {', '.join(Issuer)}") from error


def _read_server(reader: Reader) -> ServerEntry:
    if reader.count(5, 0) != 5:
        raise reader.error("a server without its 5 fields")
    return ServerEntry(
        reader.text(),
        reader.blob(KEY_BYTES, exact=True),
        reader.integer(),
        reader.integer(),
        reader.blob(HASH_BYTES),
    )


def _check_client(entry: ClientEntry) -> None:
    if not isinstance(entry.issuer, Issuer):
        raise _refused(f"issuer {entry.issuer!r}", "an Issuer", entry)
    if len(entry.groups) > _MAX_GROUPS:
        raise _refused(f"{len(entry.groups)} groups", f"at most {_MAX_GROUPS}", entry)
    for group in entry.groups:
        _check_text(group, entry)


def _check_entry(entry: ClientEntry | ServerEntry) -> None:
    if len(entry.identity_key) != KEY_BYTES or len(entry.tls_sha256) not in (0, HASH_BYTES):
        raise _refused(
            f"keys of {len(entry.identity_key)} and {len(entry.tls_sha256)} bytes",
            "32 bytes each, or no TLS key",
            entry,
        )
    if not 0 <= entry.not_before <= entry.not_after <= _LAST:
        raise _refused(
            f"valid from {entry.not_before} to {entry.not_after}",
            "seconds since 1970, in order, before the year 10000",
            entry,
        )
    _check_text(entry.name, entry)


def _check_text(text: str, entry: ClientEntry | ServerEntry) -> None:
    if not text.isprintable() or len(text.encode()) > MAX_TEXT:
        raise _refused("a name that is too long or does not print", f"at most {MAX_TEXT} bytes", entry)


def _check_increasing(name: str, ids: Iterable[int], most: int = 1) -> None:
    last, times = SERVER, most
    for client in ids:
        times = times + 1 if client == last else 1
        if not last <= client < 2**64 or times > most:
            raise _refused(f"{name}: {client} after {last}", "ids count from 1 and increase")
        last = client


def _check_distinct(name: str, values: list[str] | list[bytes]) -> None:
    if len(set(values)) != len(values):
        raise _refused(f"a {name} stands twice", f"every {name} once")


def _refused(found: str, rule: str, entry: ClientEntry | ServerEntry | None = None) -> SecureSumError:
    client = entry.client if isinstance(entry, ClientEntry) else None
    who = f"server {entry.name!r}" if isinstance(entry, ServerEntry) else "" if entry else _WHO
    return SecureSumError(Reason.CONFIG, found, rule=rule, who=who, client=client)


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")
