"""Who a server is, and whom it lets in: what a device's certificate, Hello and the roster must agree on."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self

from mycelia.engine.errors import DataError
from mycelia.privacy.secagg.certificates import (
    Certificate,
    IdentityProblem,
    IdentityReason,
    Operator,
    certificate_sha256,
    date,
    expired,
    tls_sha256,
)
from mycelia.privacy.secagg.hello import Hello
from mycelia.privacy.secagg.key_files import check_folder, read_public
from mycelia.privacy.secagg.keys import Identity
from mycelia.privacy.secagg.private_keys import (
    certificate_pem,
    read_certificate,
    read_identity,
    read_tls_key,
    tls_pem,
)
from mycelia.privacy.secagg.roster import ClientEntry, Roster, ServerEntry

__all__ = ["Expiry", "ServerKeys", "admit", "check_client", "expiries", "replaced_keys"]

TLS_KEY: Final = "tls.key"
TLS_CERTIFICATE: Final = "tls.crt"
IDENTITY_KEY: Final = "identity.key"
OPERATOR: Final = "operator.pub"


@dataclass(frozen=True)
class ServerKeys:
    """What a server needs to be itself, read from the folder that `mycelia enrol server` made.

    Attributes:
        name: in its certificate and its entry.
        certificate: as the operator signed it.
        operator: pinned.
        identity: its Ed25519 key pair, which signs the server's messages.
        tls_key_pem: its TLS key for the TLS library, a secret.
        certificate_pem: its certificate for the TLS library.
    """

    name: str
    certificate: Certificate
    operator: Operator
    identity: Identity = field(repr=False)
    tls_key_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)

    @classmethod
    def open(cls, folder: Path, now: int | None) -> Self:
        """Read and check the folder.

        Args:
            folder: with the keys.
            now: Unix time in seconds; None to read an expired one.

        Raises:
            DataError: others can write to the folder; a file is missing, open to other users or of another
                kind; or the files do not belong together.
            IdentityProblem: `CERT_EXPIRED` with the date and the command; `BAD_HELLO` for a certificate that
                is not the operator's, or not valid yet.
        """
        check_folder(folder, "a server's")
        operator = Operator.read(read_public(folder / OPERATOR), str(folder / OPERATOR))
        tls, identity = read_tls_key(folder / TLS_KEY), read_identity(folder / IDENTITY_KEY)
        certificate = Certificate.read(read_certificate(folder / TLS_CERTIFICATE), operator.key)
        if not certificate.server or certificate.tls_sha256 != tls_sha256(tls.public_key()):
            raise DataError(
                f"its certificate is that of {certificate.holder} with another key",
                rule="the certificate is a server's, for the TLS key beside it",
                fix="mycelia enrol server makes a folder whose files belong together",
                who=str(folder),
            )
        if now is not None:
            fix = f"mycelia enrol renew --ca operator/ --server {folder / TLS_CERTIFICATE} --out new.crt"
            certificate.check_dates(now, fix)
        return cls(
            certificate.server,
            certificate,
            operator,
            identity,
            tls_pem(tls),
            certificate_pem(certificate.der),
        )

    def check(self, roster: Roster, now: int) -> ServerEntry:
        """The server's own entry, so that it does not start where every device would refuse it.

        Args:
            roster: verified.
            now: Unix time in seconds.

        Raises:
            IdentityProblem: `NOT_ENROLLED` if there is none with these keys; `CERT_EXPIRED`.
        """
        for entry in roster.servers:
            if entry.name == self.name:
                break
        else:
            raise self._not_listed(f"the roster of epoch {roster.epoch} does not list it")
        if (entry.identity_key, entry.tls_sha256) != (self.identity.public, self.certificate.tls_sha256):
            raise self._not_listed(f"the roster of epoch {roster.epoch} lists it with other keys")
        if now > entry.not_after:
            raise expired(
                f"its entry in the roster expired on {date(entry.not_after)}",
                "mycelia enrol renew --ca operator/ --server tls.crt, and the new roster.bin for the server",
                f"server {self.name}",
            )
        return entry

    def _not_listed(self, found: str) -> IdentityProblem:
        return IdentityProblem(
            IdentityReason.NOT_ENROLLED,
            found,
            rule="devices believe a server that the roster lists",
            fix="give the server the newest roster.bin of the operator who made its keys",
            who=f"server {self.name}",
        )


def check_client(
    certificate: bytes,
    roster: Roster,
    operator_key: bytes,
    now: int,
    replaced: Collection[bytes] = (),
) -> ClientEntry:
    """The entry of the device that shows a certificate.

    TLS has looked at the signature and the dates already; here they are looked at again, and the roster
    decides. Also called before each task, because a revocation comes while streams are open.

    Args:
        certificate: as the device shows it, in DER.
        roster: the newest, verified.
        operator_key: the pinned Ed25519 public key.
        now: Unix time in seconds.
        replaced: identity keys whose device has said Hello with newer ones, see `replaced_keys`.

    Raises:
        IdentityProblem: `NOT_ENROLLED`, `REVOKED`, `CERT_EXPIRED` with the date and the command to run, or
            `BAD_HELLO` where certificate and roster do not agree.
    """
    shown = Certificate.read(certificate, operator_key)
    if not shown.client:
        raise _bad("the certificate is that of a server", "a device shows its own", shown.holder)
    if roster.is_revoked(shown.client):
        raise IdentityProblem(
            IdentityReason.REVOKED,
            f"its id is revoked in the roster of epoch {roster.epoch}",
            rule="a revoked id never takes part again",
            fix="ask the operator; a device that is to come back enrols anew and gets another id",
            who=shown.holder,
        )
    renewal = (
        "on the device: mycelia enrol request --renew --out identity/; for the operator: mycelia enrol renew"
        f" --ca operator/ request.bin (client {shown.client})"
    )
    shown.check_dates(now, renewal)
    if now > roster.expires:
        raise IdentityProblem(
            IdentityReason.NOT_ENROLLED,
            f"the roster of epoch {roster.epoch} expired on {date(roster.expires)}",
            rule="an expired roster lists nobody",
            fix="mycelia enrol renew --ca operator/, then give the server the new roster.bin",
            who="roster",
        )
    entries = roster.listed(shown.client)
    if not entries:
        raise IdentityProblem(
            IdentityReason.NOT_ENROLLED,
            f"the roster of epoch {roster.epoch} does not list it",
            rule="listed in the operator's roster",
            fix="give the server the newest roster.bin, or enrol the device: mycelia enrol request",
            who=shown.holder,
        )
    for entry in entries:
        if hmac.compare_digest(entry.tls_sha256, shown.tls_sha256):
            break
    else:
        raise _bad(
            f"the roster of epoch {roster.epoch} has another TLS key for it",
            "certificate and roster agree on the TLS key",
            shown.holder,
            "give the server the newest roster.bin; if the device was enrolled anew, use its new folder",
        )
    if entry.identity_key in replaced:
        raise _bad(
            "these keys were replaced",
            "old keys end with the first Hello with the new ones",
            shown.holder,
            "use the renewed keys of this identity folder",
        )
    if not entry.not_before <= now <= entry.not_after:
        raise expired(f"its entry in the roster expired on {date(entry.not_after)}", renewal, shown.holder)
    return entry


def admit(
    hello: Hello,
    signature: bytes,
    certificate: bytes,
    roster: Roster,
    operator_key: bytes,
    now: int,
    replaced: Collection[bytes] = (),
) -> ClientEntry:
    """The entry of the device that says Hello, if certificate, Hello and roster agree.

    Args:
        hello: put together from the server's own name and nonce, and what the device sent.
        signature: as the device sent it.
        certificate: as the device shows it in this connection, in DER.
        roster: the newest, verified.
        operator_key: the pinned Ed25519 public key.
        now: Unix time in seconds.
        replaced: see `check_client`.

    Raises:
        IdentityProblem: as `check_client`; `BAD_HELLO` for another id, fingerprint or signature.
    """
    entry = check_client(certificate, roster, operator_key, now, replaced)
    if hello.client != entry.client:
        raise _bad(
            f"Hello says client {hello.client}",
            "Hello and certificate name the same client",
            f"client {entry.client}",
        )
    if not hmac.compare_digest(hello.certificate_sha256, certificate_sha256(certificate)):
        raise _bad(
            "Hello is about another certificate", "the one of this connection", f"client {entry.client}"
        )
    hello.verify(signature, entry.identity_key)
    return entry


def replaced_keys(roster: Roster, entry: ClientEntry) -> tuple[bytes, ...]:
    """The older identity keys of a device that said Hello with these; from now on they are refused.

    Args:
        roster: the newest, verified.
        entry: what `admit` gave.
    """
    keys = [other.identity_key for other in roster.listed(entry.client)]
    return tuple(keys[: keys.index(entry.identity_key)])


class Expiry(NamedTuple):
    """When something ends.

    Attributes:
        kind: what it is.
        name: of the server, the client's id, or the roster's epoch; "" for the operator's key.
        not_after: last second of validity, Unix time.
    """

    kind: Literal["operator", "roster", "server", "client"]
    name: str
    not_after: int


def expiries(roster: Roster, operator: Operator) -> list[Expiry]:
    """What ends when, soonest first; of a client whose keys are rotated the newer ones.

    How near an end is says `mycelia.privacy.secagg.certificates.urgency`.

    Args:
        roster: verified.
        operator: pinned.
    """
    newest = {entry.client: entry for entry in roster.clients if not roster.is_revoked(entry.client)}
    ends = [
        Expiry("operator", "", operator.not_after),
        Expiry("roster", str(roster.epoch), roster.expires),
        *(Expiry("server", server.name, server.not_after) for server in roster.servers),
        *(Expiry("client", str(client), entry.not_after) for client, entry in newest.items()),
    ]
    return sorted(ends, key=lambda end: end.not_after)


def _bad(found: str, rule: str, who: str, fix: str = "") -> IdentityProblem:
    return IdentityProblem(IdentityReason.BAD_HELLO, found, rule=rule, fix=fix, who=who)
