"""The two private keys of a device or a server, and its certificate, in PEM files (RFC 7468, PKCS #8)."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from mycelia.engine.errors import DataError
from mycelia.privacy.secagg.certificates import UNREADABLE, is_p256
from mycelia.privacy.secagg.key_files import read_public, read_secret
from mycelia.privacy.secagg.keys import Identity

__all__ = [
    "certificate_pem", "identity_pem", "new_tls_key", "read_certificate", "read_identity", "read_tls_key",
    "tls_pem",
]  # fmt: skip


def new_tls_key() -> EllipticCurvePrivateKey:
    """A fresh TLS key, ECDSA on P-256."""
    return generate_private_key(SECP256R1())


def tls_pem(key: EllipticCurvePrivateKey) -> bytes:
    """A TLS key as TLS libraries read it, a secret."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def identity_pem(identity: Identity) -> bytes:
    """An identity key, a secret."""
    key = Ed25519PrivateKey.from_private_bytes(identity.private)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def certificate_pem(der: bytes) -> bytes:
    """A certificate as TLS libraries read it."""
    return x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM)


def read_tls_key(path: Path) -> EllipticCurvePrivateKey:
    """A TLS key.

    Raises:
        DataError: the file is missing, open to other users, or holds another key.
    """
    key = _read_key(path)
    if not isinstance(key, EllipticCurvePrivateKey) or not is_p256(key.public_key()):
        raise _wrong(path, "a private key of ECDSA on P-256 in PEM, not encrypted")
    return key


def read_identity(path: Path) -> Identity:
    """An identity key.

    Raises:
        DataError: the file is missing, open to other users, or holds another key.
    """
    key = _read_key(path)
    if not isinstance(key, Ed25519PrivateKey):
        raise _wrong(path, "a private key of Ed25519 in PEM, not encrypted")
    return Identity(key.private_bytes_raw())


def read_certificate(path: Path) -> bytes:
    """A certificate, in DER; nothing in it has been verified.

    Raises:
        DataError: the file is missing, or holds anything but one certificate.
    """
    data = read_public(path)
    try:
        (certificate,) = x509.load_pem_x509_certificates(data)
    except UNREADABLE as error:
        raise _wrong(path, "one certificate in PEM") from error
    return certificate.public_bytes(Encoding.DER)


def _read_key(path: Path) -> object:
    data = read_secret(path)
    try:
        return load_pem_private_key(data, None)
    except UNREADABLE:
        return None  # the error of the library could show what it read


def _wrong(path: Path, rule: str) -> DataError:
    return DataError("it holds something else", rule=rule, who=str(path))
