"""Requests, replies, certificates and Hello: signed by who must, bound to each other, strict about bytes."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.engine.errors import DataError
from mycelia.privacy.secagg.canonical import struct
from mycelia.privacy.secagg.certificates import (
    Certificate,
    IdentityProblem,
    IdentityReason,
    Operator,
    certificate_sha256,
    server_uri,
    tls_sha256,
)
from mycelia.privacy.secagg.enrolment import MAX_ENROLMENT, Reply, Request
from mycelia.privacy.secagg.hello import Hello
from mycelia.privacy.secagg.keys import Identity

NOW = 1_800_000_000
OPERATOR, OTHER = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
DEVICE, RENEWED = Identity(bytes([3]) * 32), Identity(bytes([4]) * 32)
TLS, TLS_2 = ec.derive_private_key(5, ec.SECP256R1()), ec.derive_private_key(6, ec.SECP256R1())
REQUEST = Request.make(TLS, DEVICE, "ward 7")
RENEWAL = Request.make(TLS_2, RENEWED, "", renews=7, before=DEVICE)


def certificate(
    uri: str = "mycelia:client/7",
    signer: Identity = OPERATOR,
    key: Any = TLS,
    *,
    ca: bool = False,
    uris: int = 1,
    days: int = 90,
) -> bytes:
    """Built here once more, so that what is read is not what was written by the same code."""
    name = x509.Name([])
    start = datetime.fromtimestamp(NOW, UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 77, start, start + timedelta(days=days))
    names = [x509.UniformResourceIdentifier(uri)] * uris + [x509.DNSName("a.example")]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca, None), critical=True)
    made = builder.sign(Ed25519PrivateKey.from_private_bytes(signer.private), None)
    return made.public_bytes(Encoding.DER)


GOOD = certificate()
REPLY = Reply(7, DEVICE.public, GOOD, 3).sign(OPERATOR)


def refused(reason: IdentityReason, call: Callable[[], object]) -> IdentityProblem:
    with pytest.raises(IdentityProblem) as caught:
        call()
    assert caught.value.reason == reason
    assert caught.value.rule
    return caught.value


# --- requests -------------------------------------------------------------------------------------


def test_requests_come_back() -> None:
    for request in (REQUEST, RENEWAL):
        assert Request.decode(request.encode()) == request
    spki = TLS.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert REQUEST.tls_sha256 == hashlib.sha256(spki).digest()
    asked = struct("SA1/enrol/asked", 0, REQUEST.certificate_request, DEVICE.public, "ward 7")
    assert REQUEST.encode() == struct("SA1/enrol/request", asked, DEVICE.sign(asked), b"")


def test_who_asks_holds_both_keys() -> None:
    """Another's certificate request or identity key in one's own request."""
    swapped = replace(REQUEST, certificate_request=RENEWAL.certificate_request)
    cases = [
        (IdentityReason.BAD_HELLO, swapped),
        (IdentityReason.BAD_HELLO, replace(REQUEST, identity_key=OTHER.public)),
        (IdentityReason.BAD_HELLO, replace(REQUEST, name="ward 8")),
        (IdentityReason.BAD_HELLO, replace(REQUEST, identity_key=b"")),
        (IdentityReason.FRAME, replace(REQUEST, renews=7)),
        (IdentityReason.FRAME, replace(REQUEST, renewal_signature=bytes(64))),
        (IdentityReason.FRAME, replace(RENEWAL, renews=0)),
        (IdentityReason.FRAME, replace(RENEWAL, name="x")),
        (IdentityReason.FRAME, replace(REQUEST, name="\x1b[2J")),
        (IdentityReason.FRAME, replace(REQUEST, name="é" * 129)),
    ]
    for reason, request in cases:
        refused(reason, request.check)
    csr = bytearray(REQUEST.certificate_request)
    csr[-1] ^= 1
    forged = struct("SA1/enrol/asked", 0, bytes(csr), DEVICE.public, "ward 7")
    whole = struct("SA1/enrol/request", forged, DEVICE.sign(forged), b"")
    problem = refused(IdentityReason.BAD_HELLO, lambda: Request.decode(whole))
    assert "TLS key" in str(problem)


def test_a_certificate_request_of_another_version() -> None:
    csr = REQUEST.certificate_request.replace(b"\x02\x01\x00", b"\x02\x01\x05", 1)
    asked = struct("SA1/enrol/asked", 0, csr, DEVICE.public, "")
    whole = struct("SA1/enrol/request", asked, DEVICE.sign(asked), b"")
    refused(IdentityReason.FRAME, lambda: Request.decode(whole))


@pytest.mark.parametrize("key", [ec.derive_private_key(9, ec.SECP384R1()), Ed25519PrivateKey.generate()])
def test_a_tls_key_is_p256(key: Any) -> None:
    algorithm = None if isinstance(key, Ed25519PrivateKey) else SHA256()
    csr = x509.CertificateSigningRequestBuilder(x509.Name([])).sign(key, algorithm)
    asked = struct("SA1/enrol/asked", 0, csr.public_bytes(Encoding.DER), DEVICE.public, "")
    whole = struct("SA1/enrol/request", asked, DEVICE.sign(asked), b"")
    refused(IdentityReason.FRAME, lambda: Request.decode(whole))


def test_only_the_old_key_renews() -> None:
    RENEWAL.check_renewal(DEVICE.public)
    refused(IdentityReason.BAD_HELLO, lambda: RENEWAL.check_renewal(RENEWED.public))
    stolen = Request.make(TLS_2, RENEWED, "", renews=7, before=RENEWED)
    refused(IdentityReason.BAD_HELLO, lambda: stolen.check_renewal(DEVICE.public))
    other = replace(RENEWAL, renews=8)
    refused(IdentityReason.BAD_HELLO, other.check)
    refused(IdentityReason.BAD_HELLO, lambda: other.check_renewal(DEVICE.public))


# --- replies and certificates ---------------------------------------------------------------------


def test_replies_are_the_operators() -> None:
    assert Reply.load(REPLY, OPERATOR.public) == Reply(7, DEVICE.public, GOOD, 3)
    refused(IdentityReason.BAD_HELLO, lambda: Reply.load(REPLY, OTHER.public))
    slipped = REPLY.replace(DEVICE.public, OTHER.public)
    refused(IdentityReason.BAD_HELLO, lambda: Reply.load(slipped, OPERATOR.public))


def test_what_a_certificate_says() -> None:
    found = Certificate.read(GOOD, OPERATOR.public)
    assert (found.kind, found.client, found.server, found.holder) == ("client", 7, "", "client 7")
    assert (found.not_before, found.not_after) == (NOW, NOW + 90 * 86_400)
    assert found.tls_sha256 == tls_sha256(TLS.public_key()) == REQUEST.tls_sha256
    assert certificate_sha256(GOOD) == x509.load_der_x509_certificate(GOOD).fingerprint(SHA256())
    server = Certificate.read(certificate("mycelia:server/agg-1"), OPERATOR.public)
    assert (server.kind, server.client, server.server) == ("server", 0, "agg-1")


@pytest.mark.parametrize(
    "changes",
    [
        {"signer": OTHER},
        {"uri": "mycelia:client/0"},
        {"uri": "mycelia:client/07"},
        {"uri": "mycelia:client/18446744073709551616"},
        {"uri": "mycelia:client/7 "},
        {"uri": "mycelia:client/7/8"},
        {"uri": "mycelia:server/"},
        {"uri": "https://mycelia:client/7"},
        {"uris": 0},
        {"uris": 2},
        {"ca": True},
        {"key": Ed25519PrivateKey.from_private_bytes(bytes(32))},
        {"key": ec.derive_private_key(9, ec.SECP384R1())},
    ],
    ids=lambda changes: " ".join(
        f"{name}={type(value).__name__ if name == 'key' else value}" for name, value in changes.items()
    ),
)
def test_a_certificate_of_another_kind(changes: dict[str, Any]) -> None:
    made = certificate(**changes)
    refused(IdentityReason.BAD_HELLO, lambda: Certificate.read(made, OPERATOR.public))


def test_dates_of_a_certificate() -> None:
    found = Certificate.read(GOOD, OPERATOR.public)
    for now in (found.not_before, found.not_after):
        found.check_dates(now, "do this")
    late = refused(IdentityReason.CERT_EXPIRED, lambda: found.check_dates(found.not_after + 1, "do this"))
    assert "2027-04-15 08:00:00 UTC" in str(late)
    assert late.fix == "do this"
    refused(IdentityReason.BAD_HELLO, lambda: found.check_dates(NOW - 1, "do this"))


def test_what_is_no_operator() -> None:
    leaf = x509.load_der_x509_certificate(GOOD).public_bytes(Encoding.PEM)
    for pem in (b"", b"x", leaf, leaf + leaf):
        with pytest.raises(DataError, match=r"operator\.pub"):
            Operator.read(pem)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "-a", "x" * 49, "é"])
def test_a_server_name_is_part_of_a_uri(name: str) -> None:
    with pytest.raises(DataError):
        server_uri(name)


def test_a_problem_survives_a_process() -> None:
    problem = IdentityProblem(IdentityReason.REVOKED, "found", rule="rule", fix="fix", who="client 7")
    again = copy.copy(problem)  # goes the way of pickle
    assert (str(again), again.reason, again.fix) == (str(problem), problem.reason, "fix")


# --- hello ----------------------------------------------------------------------------------------

HELLO = Hello("agg-1", bytes([1]) * 32, (1, 2), 7, bytes([2]) * 32, (2, 3), bytes([3]) * 32)


def test_hello_covers_all_of_it() -> None:
    signature = HELLO.sign(DEVICE)
    HELLO.verify(signature, DEVICE.public)
    others = [
        replace(HELLO, server="agg-2"),
        replace(HELLO, server_nonce=bytes(32)),  # a recorded Hello in another connection
        replace(HELLO, server_versions=(1, 1)),
        replace(HELLO, client=8),
        replace(HELLO, client_nonce=bytes(32)),
        replace(HELLO, client_versions=(1, 3)),
        replace(HELLO, certificate_sha256=bytes(32)),
    ]
    for other in others:
        refused(IdentityReason.BAD_HELLO, lambda other=other: other.verify(signature, DEVICE.public))
    refused(IdentityReason.BAD_HELLO, lambda: HELLO.verify(signature, OTHER.public))
    refused(IdentityReason.BAD_HELLO, lambda: HELLO.verify(signature[:-1], DEVICE.public))


@pytest.mark.parametrize(
    "change",
    [
        {"server_nonce": b""},
        {"client_nonce": bytes(33)},
        {"certificate_sha256": bytes(20)},
        {"client": 0},
        {"client": 2**64},
        {"client_versions": (0, 2**32)},
    ],
    ids=str,
)
def test_a_hello_of_another_shape(change: dict[str, Any]) -> None:
    refused(IdentityReason.BAD_HELLO, lambda: replace(HELLO, **change))


# --- damaged bytes --------------------------------------------------------------------------------


def decode(data: bytes, signed: bool) -> None:
    """What decodes encodes the same; anything else is the typed error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about serial numbers and encodings of certificates
        for read in (
            lambda: Request.decode(data).encode(),
            lambda: Reply.load(data, OPERATOR.public).sign(OPERATOR),
            lambda: Certificate.read(data, OPERATOR.public).der,
        ):
            try:
                again = read()
            except IdentityProblem:
                continue
            assert again == data
        if signed:  # a request whose certificate request is damaged and signed all the same
            body = struct("SA1/enrol/asked", 0, data[: 2**13], DEVICE.public, "")
            with contextlib.suppress(IdentityProblem):
                Request.decode(struct("SA1/enrol/request", body, DEVICE.sign(body), b""))


@settings(max_examples=200)
@given(st.data())
def test_damaged_messages(data: st.DataObject) -> None:
    whole = data.draw(
        st.sampled_from([REQUEST.encode(), RENEWAL.encode(), REPLY, GOOD, REQUEST.certificate_request])
    )
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 8)))
    decode(whole[:start] + data.draw(st.binary(max_size=8)) + whole[end:], signed=True)


@pytest.mark.parametrize("rounds", [1_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_many_damaged_messages(rounds: int) -> None:
    draw = random.Random(5)
    sources = [REQUEST.encode(), RENEWAL.encode(), REPLY, GOOD, REQUEST.certificate_request]
    for _ in range(rounds):
        data = bytearray(draw.choice(sources))
        place = draw.randrange(len(data))
        match draw.randrange(3):
            case 0:
                data[place] = draw.randrange(256)
            case 1:
                del data[place : place + draw.randint(1, 40)]
            case _:
                data[place : place + 4] = draw.choice([bytes(4), b"\xff" * 4, b"\0\0\xff\xff"])
        decode(bytes(data), signed=True)


def test_what_is_too_long() -> None:
    for size in (MAX_ENROLMENT + 1, 2**20):
        decode(bytes(size), signed=False)
