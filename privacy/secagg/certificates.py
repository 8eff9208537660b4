"""Certificates of a federation, as both ends read them: who is named, with which key, and until when.

The operator's Ed25519 key signs the roster and, as an authority of X.509 (RFC 5280), the certificates that
TLS shows. A leaf has an ECDSA P-256 key, since TLS libraries take no Ed25519 leaves, and names its holder in
a URI beside the names of its host: `mycelia:client/7` or `mycelia:server/agg-1`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final, Literal, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from mycelia.engine.errors import DataError, ProtocolError

__all__ = [
    "DAY", "MAX_CERTIFICATE", "UNREADABLE", "WARN_DAYS", "Certificate", "IdentityProblem", "IdentityReason",
    "Operator", "certificate_sha256", "client_uri", "date", "expired", "is_p256", "server_uri", "tls_sha256",
    "urgency",
]  # fmt: skip

MAX_CERTIFICATE: Final = 2**13
"""Bytes of a certificate or a certificate request, in DER."""
WARN_DAYS: Final = (30, 7)
"""How long before its end a key is warned of, for the first and the last time."""
DAY: Final = 86_400

UNREADABLE: Final = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""What the library raises about bytes that are no certificate, request or key."""

_CLIENT: Final = re.compile(r"mycelia:client/([1-9][0-9]{0,19})")
_SERVER: Final = re.compile(r"mycelia:server/([A-Za-z0-9][A-Za-z0-9._-]{0,47})")


class IdentityReason(StrEnum):
    """Why a device or a request of it is refused; the words are those that travel."""

    BAD_HELLO = "BAD_HELLO"
    CERT_EXPIRED = "CERT_EXPIRED"
    NOT_ENROLLED = "NOT_ENROLLED"
    REVOKED = "REVOKED"
    BAD_TOKEN = "BAD_TOKEN"
    RATE = "RATE"
    FRAME = "FRAME"


class IdentityProblem(ProtocolError):
    """Somebody is not who they say, or may not take part.

    Args:
        reason: the code that travels and that callers branch on.
        found: what was found, as a sentence.
        rule: the rule it breaks.
        fix: what the reader can do about it.
        who: whom it concerns.

    Attributes:
        reason: as given.
    """

    def __init__(
        self, reason: IdentityReason, found: str, *, rule: str = "", fix: str = "", who: str = ""
    ) -> None:
        self.reason = reason
        self._sentence = found
        super().__init__(f"{reason}: {found}", rule=rule, fix=fix, who=who)

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild across process boundaries with the same parts."""
        return (_rebuild, (self.reason, self._sentence, self.rule, self.fix, self.who))


def _rebuild(reason: IdentityReason, found: str, rule: str, fix: str, who: str) -> IdentityProblem:
    return IdentityProblem(reason, found, rule=rule, fix=fix, who=who)


@dataclass(frozen=True)
class Operator:
    """What is pinned of an operator, read from `operator.pub`.

    Attributes:
        key: Ed25519 public key, 32 bytes, that signs rosters and certificates.
        not_after: last second of its validity, Unix time.
        pem: its certificate, which TLS takes as the root.
    """

    key: bytes
    not_after: int
    pem: bytes = field(repr=False)

    @classmethod
    def read(cls, pem: bytes, who: str = "operator") -> Self:
        """Read an operator's certificate.

        Args:
            pem: the file `operator.pub`.
            who: its name, for the errors.

        Raises:
            DataError: it is no certificate of an operator.
        """
        try:
            (certificate,) = x509.load_pem_x509_certificates(pem)
            key = certificate.public_key()
            basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
            if not isinstance(key, Ed25519PublicKey) or not basic.ca:
                raise ValueError("its key is no operator's")
            key.verify(certificate.signature, certificate.tbs_certificate_bytes)
        except (*UNREADABLE, x509.ExtensionNotFound, InvalidSignature) as error:
            raise DataError(
                "it is no operator's certificate",
                rule="the file operator.pub of the operator's folder, in PEM",
                who=who,
            ) from error
        return cls(
            key.public_bytes_raw(),
            int(certificate.not_valid_after_utc.timestamp()),
            certificate.public_bytes(Encoding.PEM),
        )


@dataclass(frozen=True)
class Certificate:
    """What the operator says in a certificate.

    Attributes:
        kind: whose it is.
        client: the client's id, 0 for a server.
        server: the server's name, "" for a client.
        tls_sha256: SHA-256 of its TLS public key, as in the roster.
        not_before: first second of validity, Unix time.
        not_after: last second of validity, Unix time.
        der: its bytes.
    """

    kind: Literal["client", "server"]
    client: int
    server: str
    tls_sha256: bytes
    not_before: int
    not_after: int
    der: bytes = field(repr=False)

    @classmethod
    def read(cls, der: bytes, operator_key: bytes) -> Self:
        """Read a certificate that the operator signed; its dates are not looked at.

        Args:
            der: what came.
            operator_key: the pinned Ed25519 public key.

        Raises:
            IdentityProblem: `BAD_HELLO` if it is none, is not the operator's, or names nobody.
        """
        if len(der) > MAX_CERTIFICATE:
            raise _bad(f"a certificate of {len(der)} bytes", f"at most {MAX_CERTIFICATE}")
        try:
            certificate = x509.load_der_x509_certificate(der)
            signature, signed = certificate.signature, certificate.tbs_certificate_bytes
            Ed25519PublicKey.from_public_bytes(operator_key).verify(signature, signed)
        except (*UNREADABLE, InvalidSignature) as error:
            raise _bad(
                "the certificate is not signed by the operator",
                "signed with the operator's key that was pinned at enrolment",
                "enrol with this operator, or give its operator.pub",
            ) from error
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
            basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
            client, server = _CLIENT.fullmatch(uri), _SERVER.fullmatch(uri)
            number = int(client[1]) if client else 0
            public = certificate.public_key()
            if basic.ca or not (server or 0 < number < 2**64) or not is_p256(public):
                raise ValueError("a certificate of another kind")
        except (*UNREADABLE, x509.ExtensionNotFound) as error:
            raise _bad(
                "the certificate names no client and no server",
                "one URI mycelia:client/<id> or mycelia:server/<name>",
            ) from error
        return cls(
            "server" if server else "client",
            number,
            server[1] if server else "",
            tls_sha256(public),
            int(certificate.not_valid_before_utc.timestamp()),
            int(certificate.not_valid_after_utc.timestamp()),
            der,
        )

    def check_dates(self, now: int, fix: str) -> None:
        """Refuse a certificate outside its dates.

        Args:
            now: Unix time in seconds.
            fix: the command to run once it is expired.

        Raises:
            IdentityProblem: `CERT_EXPIRED` with the date and the command; `BAD_HELLO` before its first
                second.
        """
        if now > self.not_after:
            raise expired(f"the certificate expired on {date(self.not_after)}", fix, self.holder)
        if now < self.not_before:
            raise IdentityProblem(
                IdentityReason.BAD_HELLO,
                f"the certificate is valid from {date(self.not_before)}, and it is {date(now)} here",
                rule="a certificate is valid between its dates",
                fix="set the clock of this machine",
                who=self.holder,
            )

    @property
    def holder(self) -> str:
        """Whose it is, for people."""
        return f"client {self.client}" if self.client else f"server {self.server}"


def expired(found: str, fix: str, who: str) -> IdentityProblem:
    """The error about a date that is over."""
    return IdentityProblem(
        IdentityReason.CERT_EXPIRED, found, rule="expired keys are refused", fix=fix, who=who
    )


def client_uri(client: int) -> str:
    """The name of a client in its certificate."""
    return f"mycelia:client/{client}"


def server_uri(name: str) -> str:
    """The name of a server in its certificate.

    Raises:
        DataError: a name that is no part of a URI.
    """
    if not _SERVER.fullmatch(uri := f"mycelia:server/{name}"):
        raise DataError(
            f"the name {name!r}", rule="1 to 48 letters, digits, dots, dashes or underlines", who="server"
        )
    return uri


def is_p256(key: object) -> bool:
    """Whether a public key is one of ECDSA on P-256."""
    return isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1)


def tls_sha256(key: object) -> bytes:
    """What the roster holds of a TLS key: SHA-256 of its SubjectPublicKeyInfo.

    Raises:
        TypeError: no key of ECDSA.
    """
    if not isinstance(key, EllipticCurvePublicKey):
        raise TypeError(f"a key of type {type(key).__name__}")
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def certificate_sha256(der: bytes) -> bytes:
    """The fingerprint of a certificate, 32 bytes, that a Hello signs."""
    return hashlib.sha256(der).digest()


def urgency(not_after: int, now: int) -> Literal["", "soon", "urgent", "expired"]:
    """How near an end is: within 30 days, within 7, over.

    >>> [urgency(40 * 86_400, day * 86_400) for day in (9, 10, 33, 41)]
    ['', 'soon', 'urgent', 'expired']

    Args:
        not_after: last second of validity, Unix time.
        now: Unix time in seconds.
    """
    left = not_after - now
    if left < 0:
        return "expired"
    first, last = (days * DAY for days in WARN_DAYS)
    return "urgent" if left <= last else "soon" if left <= first else ""


def date(seconds: int) -> str:
    """A moment for people, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _bad(found: str, rule: str, fix: str = "") -> IdentityProblem:
    return IdentityProblem(IdentityReason.BAD_HELLO, found, rule=rule, fix=fix, who="certificate")
