"""Makes the certificates that an operator signs: its own, a server's and a device's (RFC 5280)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv6Address

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mycelia.privacy.secagg.certificates import client_uri, server_uri
from mycelia.privacy.secagg.keys import Identity

__all__ = ["client_certificate", "operator_certificate", "server_certificate"]

_SIGNS_CERTIFICATES = x509.KeyUsage(
    digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
    key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
)  # fmt: skip
_SIGNS_HANDSHAKES = x509.KeyUsage(
    digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
    key_agreement=False, key_cert_sign=False, crl_sign=False, encipher_only=False, decipher_only=False,
)  # fmt: skip


def operator_certificate(operator: Identity, not_before: int, not_after: int) -> bytes:
    """The operator's own certificate, the root of all others, in PEM.

    Args:
        operator: its key pair.
        not_before: first second of validity, Unix time.
        not_after: last second of validity, Unix time.
    """
    key = Ed25519PrivateKey.from_private_bytes(operator.private)
    builder = _builder(operator, key.public_key(), _operator_name(operator), not_before, not_after)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return _sign(builder.add_extension(_SIGNS_CERTIFICATES, critical=True), operator).public_bytes(
        Encoding.PEM
    )


def client_certificate(
    operator: Identity, client: int, tls: EllipticCurvePublicKey, not_before: int, not_after: int
) -> bytes:
    """A device's certificate, in DER.

    Args:
        operator: signs it.
        client: the device's id.
        tls: its TLS key, P-256.
        not_before: first second of validity, Unix time.
        not_after: last second of validity, Unix time.
    """
    names = [x509.UniformResourceIdentifier(client_uri(client))]
    usage = ExtendedKeyUsageOID.CLIENT_AUTH
    return _leaf(operator, tls, f"client {client}", names, usage, not_before, not_after)


def server_certificate(
    operator: Identity,
    name: str,
    tls: EllipticCurvePublicKey,
    dns: Iterable[str],
    addresses: Iterable[IPv4Address | IPv6Address],
    not_before: int,
    not_after: int,
) -> bytes:
    """A server's certificate, in DER.

    Args:
        operator: signs it.
        name: of the server, in its URI.
        tls: its TLS key, P-256.
        dns: host names, ASCII.
        addresses: IP addresses.
        not_before: first second of validity, Unix time.
        not_after: last second of validity, Unix time.
    """
    names = [
        *map(x509.DNSName, dns),
        *map(x509.IPAddress, addresses),
        x509.UniformResourceIdentifier(server_uri(name)),
    ]
    usage = ExtendedKeyUsageOID.SERVER_AUTH
    return _leaf(operator, tls, f"server {name}", names, usage, not_before, not_after)


def _leaf(
    operator: Identity,
    tls: EllipticCurvePublicKey,
    subject: str,
    names: Sequence[x509.GeneralName],
    usage: x509.ObjectIdentifier,
    not_before: int,
    not_after: int,
) -> bytes:
    builder = _builder(operator, tls, _name(subject), not_before, not_after)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(_SIGNS_HANDSHAKES, critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    public = Ed25519PublicKey.from_public_bytes(operator.public)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(public)
    return _sign(builder.add_extension(identifier, critical=False), operator).public_bytes(Encoding.DER)


def _builder(
    operator: Identity,
    public: EllipticCurvePublicKey | Ed25519PublicKey,
    subject: x509.Name,
    not_before: int,
    not_after: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(_operator_name(operator))
        .subject_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.fromtimestamp(not_before, UTC))
        .not_valid_after(datetime.fromtimestamp(not_after, UTC))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _sign(builder: x509.CertificateBuilder, operator: Identity) -> x509.Certificate:
    return builder.sign(Ed25519PrivateKey.from_private_bytes(operator.private), None)


def _operator_name(operator: Identity) -> x509.Name:
    """Different for each operator, so that a library looks for no signature of one under another."""
    return _name(f"Mycelia operator {operator.public[:8].hex()}")


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
