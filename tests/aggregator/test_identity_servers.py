"""Keys of servers, and handshakes with them by OpenSSL and by gRPC."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from cryptography import x509

from mycelia.aggregator.identity import ServerKeys, check_client
from mycelia.aggregator.identity_authority import Authority
from mycelia.engine.errors import ConfigError, DataError
from mycelia.privacy.secagg.certificates import IdentityReason
from mycelia.privacy.secagg.private_keys import certificate_pem, read_certificate, tls_pem
from tests.aggregator.devices import device, refused

NOW = 1_800_000_000
DAY = 86_400


@pytest.fixture
def ca(tmp_path: Path) -> Iterator[Authority]:
    with Authority.create(tmp_path / "operator", NOW) as authority:
        yield authority


# --- servers --------------------------------------------------------------------------------------


def test_a_server(ca: Authority, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    entry = ca.add_server("agg-1", folder, NOW, dns=["a.example"], addresses=[ip_address("10.0.0.1")])
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "tls.key": 0o600, "identity.key": 0o600, "tls.crt": 0o644, "operator.pub": 0o644,
    }  # fmt: skip
    keys = ServerKeys.open(folder, NOW)
    assert keys.check(ca.roster, NOW) == entry == ca.roster.servers[0]
    assert keys.identity.public == entry.identity_key
    assert "PRIVATE" not in repr(keys)
    names = x509.load_pem_x509_certificate(keys.certificate_pem).extensions
    found = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.get_values_for_type(x509.DNSName) == ["a.example"]
    assert found.get_values_for_type(x509.IPAddress) == [ip_address("10.0.0.1")]
    refused(IdentityReason.NOT_ENROLLED, lambda: keys.check(replace(ca.roster, servers=()), NOW))
    other = replace(entry, identity_key=bytes(32))
    refused(IdentityReason.NOT_ENROLLED, lambda: keys.check(replace(ca.roster, servers=(other,)), NOW))
    refused(IdentityReason.CERT_EXPIRED, lambda: keys.check(ca.roster, entry.not_after + 1))
    problem = refused(IdentityReason.CERT_EXPIRED, lambda: ServerKeys.open(folder, entry.not_after + 1))
    assert "2027-04-15 08:00:00 UTC" in str(problem)
    assert "mycelia enrol renew" in problem.fix
    longer = ca.renew_server(read_certificate(folder / "tls.crt"), entry.not_after + 1)  # expired
    (folder / "tls.crt").write_bytes(certificate_pem(longer))
    again = ServerKeys.open(folder, entry.not_after + 1)
    assert again.check(ca.roster, entry.not_after + 1).not_after == entry.not_after + 1 + 90 * DAY
    found = x509.load_der_x509_certificate(longer).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert "a.example" in str(found.value)


def test_server_files_that_do_not_belong_together(ca: Authority, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    ca.add_server("agg-1", one, NOW, dns=["a.example"])
    ca.add_server("agg-2", two, NOW, dns=["a.example"])
    for name in ("tls.key", "tls.crt"):
        good = (one / name).read_bytes()
        (one / name).write_bytes((two / name).read_bytes())
        with pytest.raises(DataError, match="another key"):
            ServerKeys.open(one, NOW)
        (one / name).write_bytes(good)
    for name in ("tls.key", "identity.key"):
        (one / name).chmod(0o644)
        with pytest.raises(DataError, match="0644"):
            ServerKeys.open(one, NOW)
        (one / name).chmod(0o600)
    one.chmod(0o770)
    with pytest.raises(DataError, match="0770"):
        ServerKeys.open(one, NOW)
    one.chmod(0o700)
    (one / "tls.crt").unlink()
    with pytest.raises(DataError, match=r"tls\.crt: it cannot be read"):
        ServerKeys.open(one, NOW)
    os.mkfifo(one / "tls.crt")
    with pytest.raises(DataError, match="no ordinary file"):
        ServerKeys.open(one, NOW)


def test_a_server_that_cannot_be(ca: Authority, tmp_path: Path) -> None:
    ca.add_server("agg-1", tmp_path / "keys", NOW, dns=["a.example"])
    cases: list[tuple[str, dict[str, Any], type[Exception]]] = [
        ("agg-1", {"dns": ["a.example"]}, DataError),
        ("agg 2", {"dns": ["a.example"]}, DataError),
        ("agg-2", {}, ConfigError),
        ("agg-2", {"dns": ["*.example"]}, ConfigError),
        ("agg-2", {"dns": ["bücher.example"]}, ConfigError),
        ("agg-2", {"dns": ["a..example"]}, ConfigError),
        ("agg-2", {"dns": ["a.example"], "days": 4000}, ConfigError),
    ]
    for name, names, error in cases:
        with pytest.raises(error):
            ca.add_server(name, tmp_path / "other", NOW, **names)
    assert not (tmp_path / "other").exists()
    assert ca.roster.epoch == 2
    issued = ca.issue(device().request, NOW)
    refused(IdentityReason.NOT_ENROLLED, lambda: ca.renew_server(issued.certificate, NOW))


# --- handshakes -----------------------------------------------------------------------------------


class Parties(NamedTuple):
    """A server of an operator, and what devices show it, by name."""

    ca: Authority
    keys: Path
    devices: dict[str, tuple[bytes, bytes]]


@pytest.fixture
def parties(tmp_path: Path) -> Iterator[Parties]:
    now = int(time.time())
    with (
        Authority.create(tmp_path / "operator", now) as ca,
        Authority.create(tmp_path / "other", now) as other,
    ):
        ca.add_server("agg-1", tmp_path / "keys", now, dns=["localhost"])
        shown = {}
        for name, authority, then in (
            ("good", ca, now), ("revoked", ca, now), ("expired", ca, now - 91 * DAY), ("foreign", other, now),
        ):  # fmt: skip
            one = device()
            certificate = authority.issue(one.request, then).certificate
            shown[name] = (tls_pem(one.tls), certificate_pem(certificate))
        ca.revoke([2], now)
        yield Parties(ca, tmp_path / "keys", shown)


def handshake(
    parties: Parties, name: str, host: str, root: bytes, folder: Path
) -> tuple[str | None, Any, bytes]:
    """OpenSSL on both sides, without a socket: version, what the server knows of its client, and its DER."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.minimum_version = client.minimum_version = ssl.TLSVersion.TLSv1_3
    server.load_cert_chain(parties.keys / "tls.crt", parties.keys / "tls.key")
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_verify_locations(parties.ca.folder / "operator.pub")
    key, certificate = parties.devices[name]
    (folder / "client.pem").write_bytes(key + certificate)
    client.load_cert_chain(folder / "client.pem")
    client.load_verify_locations(cadata=root.decode())
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(up, down, server_side=True)
    theirs = client.wrap_bio(down, up, server_hostname=host)
    open_ends = [theirs, ours]
    for _ in range(10):
        for end in list(open_ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            open_ends.remove(end)
    assert not open_ends
    return ours.version(), ours.getpeercert(), ours.getpeercert(binary_form=True) or b""


def test_openssl_shakes_hands(parties: Parties, tmp_path: Path) -> None:
    root = parties.ca.operator.pem
    version, facts, der = handshake(parties, "good", "localhost", root, tmp_path)
    assert version == "TLSv1.3"
    assert facts["subjectAltName"] == (("URI", "mycelia:client/1"),)
    now = int(time.time())
    assert check_client(der, parties.ca.roster, parties.ca.operator.key, now).client == 1
    # a revoked certificate passes TLS, so the roster has to look
    _, _, der = handshake(parties, "revoked", "localhost", root, tmp_path)
    refused(
        IdentityReason.REVOKED, lambda: check_client(der, parties.ca.roster, parties.ca.operator.key, now)
    )
    with pytest.raises(ssl.SSLError, match=r"(?i)expired"):
        handshake(parties, "expired", "localhost", root, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(parties, "foreign", "localhost", root, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"(?i)hostname"):
        handshake(parties, "good", "elsewhere", root, tmp_path)
    with Authority.create(tmp_path / "third", now) as third:
        pem = third.operator.pem
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(parties, "good", "localhost", pem, tmp_path)


class Echo(grpc.GenericRpcHandler):
    """Answers with the certificate of whoever asks."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            return context.auth_context()["x509_pem_cert"][0]

        return grpc.unary_unary_rpc_method_handler(answer)


def test_grpc_shakes_hands(parties: Parties) -> None:
    keys = ServerKeys.open(parties.keys, int(time.time()))
    root = keys.operator.pem
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Echo(),))
    credentials = grpc.ssl_server_credentials([(keys.tls_key_pem, keys.certificate_pem)], root, True)
    port = server.add_secure_port("localhost:0", credentials)
    server.start()
    try:
        for name, (key, certificate) in parties.devices.items():
            with grpc.secure_channel(
                f"localhost:{port}", grpc.ssl_channel_credentials(root, key, certificate)
            ) as channel:
                call = channel.unary_unary("/a/b")
                if name in ("good", "revoked"):
                    shown = x509.load_pem_x509_certificate(call(b"", timeout=20))
                    assert shown == x509.load_pem_x509_certificate(certificate)
                else:
                    with pytest.raises(grpc.RpcError):
                        call(b"", timeout=20)
    finally:
        server.stop(None).wait(10)
