"""What a device asks for when it enrols or renews its keys, and what it is given.

A request carries public keys only, and shows that the device holds the private ones: the certificate request
is signed with the TLS key, the request with the identity key, and a renewal with the identity key of before,
too. The answer binds id, certificate and identity key together under the operator's signature. Both are
small, so they travel in one message, or in a file by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final, Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from mycelia.privacy.secagg.canonical import MAX_TEXT, Reader, SecureSumError, struct
from mycelia.privacy.secagg.certificates import (
    MAX_CERTIFICATE,
    UNREADABLE,
    IdentityProblem,
    IdentityReason,
    is_p256,
    tls_sha256,
)
from mycelia.privacy.secagg.keys import Identity, verify_bytes
from mycelia.privacy.secagg.messages import KEY_BYTES, SIGNATURE_BYTES

__all__ = ["MAX_ENROLMENT", "Reply", "Request"]

_MAX_BODY: Final = MAX_CERTIFICATE + MAX_TEXT + 256
MAX_ENROLMENT: Final = _MAX_BODY + 512
"""Bytes of any of these messages."""


@dataclass(frozen=True)
class Request:
    """A device's request for a certificate and an entry in the roster.

    Attributes:
        renews: the client's id if it has keys already, else 0.
        certificate_request: PKCS #10 (RFC 2986) in DER, signed with the TLS key; its names are not looked at.
        identity_key: Ed25519 public key, 32 bytes.
        name: for people; the operator may give another. Empty if it renews: a name stays.
        signature: over all of that, by the identity key.
        renewal_signature: over all of that, by the identity key of before; empty unless it renews.
    """

    TAG: ClassVar[str] = "SA1/enrol/request"
    _BODY_TAG: ClassVar[str] = "SA1/enrol/asked"

    renews: int
    certificate_request: bytes = field(repr=False)
    identity_key: bytes
    name: str
    signature: bytes = field(repr=False)
    renewal_signature: bytes = field(repr=False)

    @classmethod
    def make(
        cls,
        tls: EllipticCurvePrivateKey,
        identity: Identity,
        name: str,
        *,
        renews: int = 0,
        before: Identity | None = None,
    ) -> Self:
        """Sign a request.

        Args:
            tls: the new TLS key, P-256.
            identity: the new identity key.
            name: for people, empty if it renews.
            renews: the client's id if it has keys already.
            before: its identity key of before.
        """
        wanted = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(tls, SHA256())
        der = wanted.public_bytes(Encoding.DER)
        body = struct(cls._BODY_TAG, renews, der, identity.public, name)
        return cls(
            renews, der, identity.public, name, identity.sign(body), before.sign(body) if before else b""
        )

    @property
    def signed(self) -> bytes:
        """The bytes that the signatures cover."""
        return struct(self._BODY_TAG, self.renews, self.certificate_request, self.identity_key, self.name)

    def encode(self) -> bytes:
        """Canonical bytes."""
        return struct(self.TAG, self.signed, self.signature, self.renewal_signature)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read a request and `check` it.

        Raises:
            IdentityProblem: `FRAME` if it is none; `BAD_HELLO` if a signature does not verify.
        """
        try:
            outer = Reader(data, cls.TAG, MAX_ENROLMENT)
            body = outer.blob(_MAX_BODY)
            signature, renewal = outer.blob(SIGNATURE_BYTES, exact=True), outer.blob(SIGNATURE_BYTES)
            outer.end()
            reader = Reader(body, cls._BODY_TAG, _MAX_BODY)
            renews, der = reader.integer(), reader.blob(MAX_CERTIFICATE)
            key, name = reader.blob(KEY_BYTES, exact=True), reader.text()
            reader.end()
        except SecureSumError as error:
            raise _frame("request", error) from error
        request = cls(renews, der, key, name, signature, renewal)
        request.check()
        return request

    def check(self) -> None:
        """Refuse a request whose device does not hold the keys in it.

        Whether it may renew is for `check_renewal`.

        Raises:
            IdentityProblem: `FRAME` for a field out of range, `BAD_HELLO` if a signature does not verify.
        """
        if not self.name.isprintable() or len(self.name.encode()) > MAX_TEXT:
            raise _refused("a name that is too long or does not print", f"at most {MAX_TEXT} bytes")
        if not 0 <= self.renews < 2**64 or len(self.certificate_request) > MAX_CERTIFICATE:
            raise _refused("an id or a certificate request out of range", f"at most {MAX_CERTIFICATE} bytes")
        if len(self.renewal_signature) != (SIGNATURE_BYTES if self.renews else 0) or (
            self.renews and self.name
        ):
            raise _refused("a renewal without its signature", "signed with the key of before, and no name")
        if not verify_bytes(self.identity_key, self.signature, self.signed):
            raise _bad("the signature of the identity key does not verify")
        _ = self.tls_key  # refuses one that is none

    @property
    def tls_key(self) -> EllipticCurvePublicKey:
        """The TLS public key that is asked about.

        Raises:
            IdentityProblem: `FRAME` if there is none of ECDSA P-256; `BAD_HELLO` if its private key did not
                sign.
        """
        try:
            wanted = x509.load_der_x509_csr(self.certificate_request)
            key, good = wanted.public_key(), wanted.is_signature_valid
        except UNREADABLE as error:
            raise _refused("no certificate request", "PKCS #10 in DER") from error
        if not isinstance(key, EllipticCurvePublicKey) or not is_p256(key):
            raise _refused("a TLS key of another kind", "ECDSA on P-256, which every TLS library takes")
        if not good:
            raise _bad("the signature of the TLS key does not verify")
        return key

    @property
    def tls_sha256(self) -> bytes:
        """What the roster will hold of the TLS key, 32 bytes."""
        return tls_sha256(self.tls_key)

    def check_renewal(self, identity_key: bytes) -> None:
        """Refuse a renewal that the holder of the keys of before did not sign.

        Args:
            identity_key: the key of before, as the roster has it.

        Raises:
            IdentityProblem: `BAD_HELLO`.
        """
        if not verify_bytes(identity_key, self.renewal_signature, self.signed):
            raise IdentityProblem(
                IdentityReason.BAD_HELLO,
                "the renewal is not signed with the identity key of before",
                rule="who holds the old key may change to a new one, and nobody else",
                fix="ask from the identity folder that this client uses; if it is lost: mycelia enrol revoke,"
                " and enrol anew",
                who=f"client {self.renews}",
            )


@dataclass(frozen=True)
class Reply:
    """What an enrolled device is given.

    Attributes:
        client: its id.
        identity_key: the key that was asked about, 32 bytes.
        certificate: for its TLS key, in DER.
        epoch: of the roster that lists it first, from 1.
    """

    TAG: ClassVar[str] = "SA1/enrol/reply"
    _BODY_TAG: ClassVar[str] = "SA1/enrol/given"

    client: int
    identity_key: bytes
    certificate: bytes = field(repr=False)
    epoch: int

    def sign(self, operator: Identity) -> bytes:
        """Canonical bytes with the operator's signature."""
        body = struct(self._BODY_TAG, self.client, self.identity_key, self.certificate, self.epoch)
        return struct(self.TAG, body, operator.sign(body))

    @classmethod
    def load(cls, data: bytes, operator_key: bytes) -> Self:
        """Read and verify what `sign` gave.

        Args:
            data: what came.
            operator_key: the pinned Ed25519 public key.

        Raises:
            IdentityProblem: `FRAME` if it is none; `BAD_HELLO` if the operator did not sign it.
        """
        try:
            outer = Reader(data, cls.TAG, MAX_ENROLMENT)
            body, signature = outer.blob(_MAX_BODY), outer.blob(SIGNATURE_BYTES, exact=True)
            outer.end()
            if not verify_bytes(operator_key, signature, body):
                raise IdentityProblem(
                    IdentityReason.BAD_HELLO,
                    "the reply is not signed by the operator",
                    rule="signed with the operator's key that was pinned",
                    fix="ask the operator whose operator.pub this device has",
                    who="enrolment",
                )
            reader = Reader(body, cls._BODY_TAG, _MAX_BODY)
            found = cls(
                reader.integer(),
                reader.blob(KEY_BYTES, exact=True),
                reader.blob(MAX_CERTIFICATE),
                reader.integer(),
            )
            reader.end()
        except SecureSumError as error:
            raise _frame("reply", error) from error
        return found


def _frame(what: str, error: SecureSumError) -> IdentityProblem:
    return IdentityProblem(
        IdentityReason.FRAME, f"it is no enrolment {what} ({error.found})", rule=error.rule, who="enrolment"
    )


def _refused(found: str, rule: str) -> IdentityProblem:
    return IdentityProblem(IdentityReason.FRAME, found, rule=rule, who="enrolment")


def _bad(found: str) -> IdentityProblem:
    return IdentityProblem(
        IdentityReason.BAD_HELLO, found, rule="who asks holds both private keys", who="enrolment"
    )
