"""Enrolment by token: once, in time, five tries a minute; and renewals that a server answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mycelia.aggregator import identity_authority
from mycelia.aggregator.identity_authority import Authority
from mycelia.aggregator.identity_online import issue_by_token, renew_on_stream
from mycelia.aggregator.identity_tokens import TokenFile, TokenTries
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import decode_enrol_reply, decode_enrol_request, encode
from mycelia.engine.errors import DataError
from mycelia.privacy.secagg.certificates import IdentityProblem, IdentityReason
from mycelia.privacy.secagg.roster import Issuer, Roster
from tests.aggregator.devices import Device, device, refused, renewed

NOW = 1_800_000_000
DAY = 86_400


@pytest.fixture
def ca(tmp_path: Path) -> Iterator[Authority]:
    with Authority.create(tmp_path / "operator", NOW) as authority:
        yield authority


# --- tokens ---------------------------------------------------------------------------------------


def by_token(one: Device, token: str, name: str = "") -> pb.EnrolRequest:
    asked = one.request
    message = pb.EnrolRequest(
        token=bytes.fromhex(token),
        request=asked.certificate_request,
        identity_key=asked.identity_key,
        proof=asked.signature,
        name=name,
    )
    return decode_enrol_request(encode(message))


def use(folder: Path, asked: pb.EnrolRequest, now: int = NOW) -> pb.EnrolReply:
    return decode_enrol_reply(encode(issue_by_token(folder, asked, now=now)))


def test_a_token_enrols_one_device(ca: Authority) -> None:
    first, second = ca.tokens.make(2, NOW + DAY, NOW)
    assert len({first, second}) == 2
    assert len(bytes.fromhex(first)) == 32
    kept = (ca.folder / "tokens.json").read_text()
    assert first not in kept
    assert sha256(bytes.fromhex(first)).hexdigest() in kept
    ca.close()
    one, two = device(), device()
    reply = use(ca.folder, by_token(one, first))
    with Authority.open(ca.folder) as again:
        assert again.tokens.unused(NOW) == 1
        assert again.tokens.unused(NOW + DAY + 1) == 0
        assert (again.tokens.good_until(NOW), again.tokens.good_until(NOW + DAY + 1)) == (NOW + DAY, 0)
        assert reply.authority == again.operator.pem
        roster = Roster.load(reply.roster, again.operator.key, now=NOW)
        assert (reply.client, reply.roster_epoch, reply.roster_sha256) == (1, 2, roster.sha256)
        certificate = x509.load_pem_x509_certificate(reply.certificate)
        assert certificate.public_key() == one.tls.public_key()
        assert roster.clients[0].issuer is Issuer.ONLINE
    refused(IdentityReason.BAD_TOKEN, lambda: use(ca.folder, by_token(two, first)))
    assert use(ca.folder, by_token(one, first), NOW + 2 * DAY).client == 1  # the answer was lost
    late = refused(IdentityReason.BAD_TOKEN, lambda: use(ca.folder, by_token(two, second), NOW + DAY + 1))
    assert "2027-01-16 08:00:00 UTC" in str(late)
    refused(IdentityReason.BAD_TOKEN, lambda: use(ca.folder, by_token(two, "00" * 32)))
    assert use(ca.folder, by_token(two, second)).client == 2


def test_a_bad_request_uses_no_token_up(ca: Authority) -> None:
    (token,) = ca.tokens.make(1, NOW + DAY, NOW)
    ca.close()
    one = device()
    refused(IdentityReason.BAD_HELLO, lambda: use(ca.folder, by_token(one, token, name="not signed")))
    assert use(ca.folder, by_token(one, token)).client == 1


def test_a_crash_between_token_and_roster(ca: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    (token,) = ca.tokens.make(1, NOW + DAY, NOW)
    ca.close()
    one, two = device(), device()

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(identity_authority, "write_file", crash)
        with pytest.raises(KeyboardInterrupt):
            use(ca.folder, by_token(one, token))
    refused(IdentityReason.BAD_TOKEN, lambda: use(ca.folder, by_token(two, token)))
    assert use(ca.folder, by_token(one, token)).client == 1


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=60), st.text('{}[]":,01 versiontokenssha256expiresused_by', max_size=90)))
def test_any_token_file(tmp_path: Path, data: bytes | str) -> None:
    path = tmp_path / "tokens.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    path.chmod(0o600)
    with contextlib.suppress(DataError):
        assert TokenFile(path).unused(NOW) == 0


@pytest.mark.parametrize(
    "token",
    [
        "x",
        {"sha256": "00", "expires": 1},
        {"sha256": "00" * 32, "expires": "1"},
        {"sha256": 1, "expires": 1},
        {"sha256": "00" * 32, "expires": 1, "used_by": 2},
        {"sha256": "00" * 32, "expires": 1, "more": ""},
    ],
    ids=str,
)
def test_a_damaged_token(tmp_path: Path, token: object) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({"version": 1, "tokens": [token]}))
    path.chmod(0o600)
    with pytest.raises(DataError, match="damaged"):
        TokenFile(path).use(bytes(32), b"", NOW)


def test_how_many_tokens(ca: Authority) -> None:
    for count in (0, 10_001):
        with pytest.raises(DataError):
            ca.tokens.make(count, NOW + DAY, NOW)
    assert len(set(ca.tokens.make(100, NOW + DAY, NOW))) == 100


def test_tries_of_an_address() -> None:
    tries = TokenTries()
    for clock in (0.0, 1.0, 2.0, 3.0, 4.0):
        tries.check("10.0.0.1", clock)
    for clock in (4.0, 59.9):
        refused(IdentityReason.RATE, lambda clock=clock: tries.check("10.0.0.1", clock))
    tries.check("10.0.0.2", 59.9)
    tries.check("10.0.0.1", 60.0)  # the first was a minute ago
    refused(IdentityReason.RATE, lambda: tries.check("10.0.0.1", 60.5))
    tries.check("10.0.0.1", 61.0)


def test_no_five_tries_in_any_minute() -> None:
    """Against the definition, over a long random history."""
    tries, allowed = TokenTries(), []
    clock = 0.0
    for step in range(2_000):
        clock += (step * 7919 % 31) / 2
        recent = [other for other in allowed if clock - other < 60]
        try:
            tries.check("a", clock)
        except IdentityProblem:
            assert len(recent) == 5
        else:
            assert len(recent) < 5
            allowed.append(clock)


def test_addresses_that_are_one() -> None:
    tries = TokenTries(most=1)
    for first, same in (
        ("2001:db8::1", "2001:db8::ffff:2"),
        ("10.0.0.1", "::ffff:10.0.0.1"),
        ("fe80::1%eth0", "fe80::2%eth1"),
        ("unix:", "unix:"),
        ("ipv4:10.0.0.7:50000", "ipv4:10.0.0.7:50001"),
        ("ipv4:10.0.0.8:50000", "10.0.0.8"),
        ("ipv6:[2001:db8:0:7::1]:50000", "ipv6:%5B2001:db8:0:7::2%5D:50001"),
        ("[2001:db8:0:8::1]:50000", "2001:db8:0:8::"),
    ):
        tries.check(first, 0.0)
        refused(IdentityReason.RATE, lambda same=same: tries.check(same, 1.0))
    tries.check("2001:db8:0:1::1", 1.0)


def test_many_addresses_cost_no_memory() -> None:
    tries = TokenTries(addresses=3)
    for number in range(3):
        tries.check(f"10.0.0.{number}", float(number))
    refused(IdentityReason.RATE, lambda: tries.check("10.0.0.9", 59.0))
    tries.check("10.0.0.1", 59.0)  # one that is known goes on
    tries.check("10.0.0.9", 60.0)  # the oldest was forgotten


def test_a_renewal_on_the_stream(ca: Authority) -> None:
    one = device()
    ca.issue(one.request, NOW)
    ca.close()
    new = renewed(1, one.identity).request
    asked = pb.Renew(
        request=new.certificate_request,
        identity_key=new.identity_key,
        signature=new.renewal_signature,
        proof=new.signature,
    )
    refused(IdentityReason.BAD_HELLO, lambda: renew_on_stream(ca.folder, 2, asked, now=NOW))
    reply = renew_on_stream(ca.folder, 1, asked, now=NOW)
    roster = Roster.load(reply.roster, ca.operator.key, now=NOW)
    assert roster.epoch == reply.roster_epoch == 3
    assert [entry.issuer for entry in roster.clients] == ["offline", "online"]
