"""The operator's folder and what it signs: ids, certificates, rotation, and whom a server lets in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mycelia.aggregator.identity import admit, check_client, expiries, replaced_keys
from mycelia.aggregator.identity_authority import Authority
from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.privacy.secagg.canonical import SecureSumError
from mycelia.privacy.secagg.certificates import IdentityReason, certificate_sha256
from mycelia.privacy.secagg.enrolment import Reply, Request
from mycelia.privacy.secagg.hello import Hello
from mycelia.privacy.secagg.keys import Identity
from mycelia.privacy.secagg.private_keys import new_tls_key, read_certificate
from mycelia.privacy.secagg.roster import Issuer, Roster
from tests.aggregator.devices import device, refused, renewed

NOW = 1_800_000_000
DAY = 86_400


@pytest.fixture
def ca(tmp_path: Path) -> Iterator[Authority]:
    with Authority.create(tmp_path / "operator", NOW) as authority:
        yield authority


def check(ca: Authority, certificate: bytes, now: int = NOW, **changes: Any) -> Any:
    return check_client(certificate, ca.roster, ca.operator.key, now, **changes)


# --- the folder -----------------------------------------------------------------------------------


def test_a_new_operator(tmp_path: Path) -> None:
    with Authority.create(tmp_path / "deep" / "operator", NOW) as ca:
        folder = ca.folder
        assert (ca.roster.epoch, ca.roster.clients, ca.roster.servers) == (1, (), ())
        document = (folder / "roster.bin").read_bytes()
        assert Roster.load(document, ca.operator.key, now=NOW) == ca.roster
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {
        "operator.key": 0o600, "tokens.json": 0o600, "lock": 0o600,
        "operator.pub": 0o644, "roster.bin": 0o644,
    }  # fmt: skip
    assert [path.name for path in folder.parent.iterdir()] == ["operator"]


def test_nothing_is_overwritten(ca: Authority, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in ca.folder.iterdir()}
    with pytest.raises(DataError, match="already"):
        Authority.create(ca.folder, NOW)
    assert {path.name: path.read_bytes() for path in ca.folder.iterdir()} == before
    ca.add_server("a", tmp_path / "keys", NOW, dns=["a.example"])
    epoch = ca.roster.epoch
    with pytest.raises(DataError, match="already"):
        ca.add_server("b", tmp_path / "keys", NOW, dns=["a.example"])
    assert ca.roster.epoch == epoch


@pytest.mark.parametrize("name", ["operator.key", "tokens.json"])
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_an_open_secret_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    Authority.create(tmp_path / "operator", NOW).close()
    (tmp_path / "operator" / name).chmod(mode)
    with (
        pytest.raises(DataError, match=f"{name}: its mode is {mode:04o}"),
        Authority.open(tmp_path / "operator") as ca,
    ):
        ca.tokens.unused(NOW)


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    Authority.create(tmp_path / "operator", NOW).close()
    (tmp_path / "operator").chmod(0o777)
    with pytest.raises(DataError, match="0777"):
        Authority.open(tmp_path / "operator")


def test_one_process_has_the_folder(ca: Authority) -> None:
    with pytest.raises(DataError, match="another process"):
        Authority.open(ca.folder)
    ca.close()
    Authority.open(ca.folder).close()


def test_what_is_no_operators_folder(ca: Authority, tmp_path: Path) -> None:
    ca.close()
    for path in (tmp_path / "no", tmp_path, ca.folder / "roster.bin"):
        with pytest.raises(DataError, match="no operator's folder"):
            Authority.open(path)
    other = Authority.create(tmp_path / "other", NOW)
    other.close()
    damage: dict[str, bytes] = {
        "operator.key": b"-----BEGIN PRIVATE KEY-----\n",
        "operator.pub": (other.folder / "operator.pub").read_bytes(),
        "roster.bin": (other.folder / "roster.bin").read_bytes(),
    }
    for name, data in damage.items():
        path = ca.folder / name
        good = path.read_bytes()
        for wrong in (data, good[:-1][: len(good) // 2], b""):
            path.write_bytes(wrong)
            with pytest.raises(MyceliaError) as caught:
                Authority.open(ca.folder)
            assert isinstance(caught.value, DataError | SecureSumError)
        path.write_bytes(good)
    (ca.folder / "tokens.json").write_bytes(b'{"version": 1, "tokens": [{}]}')
    with Authority.open(ca.folder) as again, pytest.raises(DataError, match="damaged"):
        again.tokens.use(bytes(32), b"", NOW)


# --- devices --------------------------------------------------------------------------------------


def test_a_device_is_enrolled(ca: Authority) -> None:
    one, two = device("ward 1"), device("ward 2")
    issued = ca.issue(one.request, NOW, groups=["a"])
    assert issued.entry == ca.roster.clients[0] == check(ca, issued.certificate)
    assert (issued.entry.client, issued.entry.name, issued.entry.groups) == (1, "ward 1", ("a",))
    assert issued.entry.issuer is Issuer.OFFLINE
    assert issued.entry.not_after == NOW + 90 * DAY
    assert ca.issue(two.request, NOW, name="other", issuer=Issuer.ONLINE).entry.client == 2
    assert (ca.roster.clients[1].name, ca.roster.clients[1].issuer) == ("other", "online")
    assert ca.roster.epoch == 3
    reply = Reply.load(ca.reply(issued), ca.operator.key)
    assert reply == Reply(1, one.identity.public, issued.certificate, 3)
    ca.close()
    with Authority.open(ca.folder) as again:  # it is all on the disk
        assert again.roster == ca.roster
        assert check(again, issued.certificate).client == 1


def test_the_same_request_has_the_same_answer(ca: Authority) -> None:
    one = device()
    first, second = ca.issue(one.request, NOW), ca.issue(one.request, NOW + 5)
    assert first.entry == second.entry
    assert ca.roster.epoch == 2
    assert check(ca, second.certificate) == first.entry


def test_no_key_stands_twice(ca: Authority) -> None:
    one = device()
    ca.issue(one.request, NOW)
    for tls, identity in ((one.tls, Identity.generate()), (new_tls_key(), one.identity)):
        again = Request.make(tls, identity, "")
        refused(IdentityReason.BAD_HELLO, lambda again=again: ca.issue(again, NOW))
    assert len(ca.roster.clients) == 1


def test_an_unchecked_request_is_checked(ca: Authority) -> None:
    one = device()
    forged = replace(one.request, identity_key=Identity.generate().public)
    refused(IdentityReason.BAD_HELLO, lambda: ca.issue(forged, NOW))
    refused(IdentityReason.FRAME, lambda: ca.issue(renewed(1, one.identity).request, NOW))
    refused(IdentityReason.FRAME, lambda: ca.renew(one.request, NOW))


def test_ids_are_never_given_again(ca: Authority) -> None:
    devices = [device() for _ in range(3)]
    issued = [ca.issue(one.request, NOW) for one in devices]
    assert ca.revoke([3, 1], NOW) == (1, 3)
    epoch = ca.roster.epoch
    assert ca.revoke([1], NOW) == ()
    assert ca.roster.epoch == epoch
    assert ca.issue(device().request, NOW).entry.client == 4
    for place in (0, 2):
        problem = refused(IdentityReason.REVOKED, lambda place=place: check(ca, issued[place].certificate))
        assert f"client {place + 1}" in str(problem)
        refused(IdentityReason.REVOKED, lambda place=place: ca.issue(devices[place].request, NOW))
    again = renewed(1, devices[0].identity)
    refused(IdentityReason.REVOKED, lambda: ca.renew(again.request, NOW))
    assert check(ca, issued[1].certificate).client == 2
    with pytest.raises(DataError, match="5, 6"):
        ca.revoke([2, 5, 6], NOW)
    assert check(ca, issued[1].certificate).client == 2  # nothing was revoked


def test_validity_ends_with_the_operator(ca: Authority) -> None:
    late = ca.operator.not_after - 10 * DAY
    for days in (0, -1, 11):
        with pytest.raises(ConfigError, match="days"):
            ca.issue(device().request, late, days=days)
    assert ca.issue(device().request, late, days=10).entry.not_after == ca.operator.not_after
    assert ca.roster.expires == ca.operator.not_after


def test_what_ends_when(ca: Authority, tmp_path: Path) -> None:
    one, two = device(), device()
    ca.issue(one.request, NOW, days=20)
    ca.issue(two.request, NOW, days=30)
    ca.add_server("agg-1", tmp_path / "keys", NOW, dns=["a.example"], days=40)
    ca.renew(renewed(1, one.identity).request, NOW, days=50)
    ca.revoke([2], NOW)
    assert expiries(ca.roster, ca.operator) == [
        ("server", "agg-1", NOW + 40 * DAY),
        ("client", "1", NOW + 50 * DAY),
        ("roster", "6", NOW + 90 * DAY),
        ("operator", "", NOW + 3650 * DAY),
    ]


# --- certificate, roster and Hello agree ----------------------------------------------------------


def test_expired_certificate_message(ca: Authority) -> None:
    one = device()
    issued = ca.issue(one.request, NOW)
    ca.refresh(NOW + 60 * DAY)
    end = issued.entry.not_after
    assert check(ca, issued.certificate, end).client == 1
    problem = refused(IdentityReason.CERT_EXPIRED, lambda: check(ca, issued.certificate, end + 1))
    assert "2027-04-15 08:00:00 UTC" in str(problem)
    assert "mycelia enrol renew" in problem.fix
    refused(IdentityReason.BAD_HELLO, lambda: check(ca, issued.certificate, NOW - 2 * 3600))


def test_who_is_not_in_the_roster(ca: Authority, tmp_path: Path) -> None:
    before = ca.roster
    issued = ca.issue(device().request, NOW)
    key = ca.operator.key
    refused(IdentityReason.NOT_ENROLLED, lambda: check_client(issued.certificate, before, key, NOW))
    late = ca.roster.expires + 1
    longer = ca.issue(device().request, NOW, days=200)
    stale = replace(ca.roster, expires=NOW + 90 * DAY)
    problem = refused(IdentityReason.NOT_ENROLLED, lambda: check_client(longer.certificate, stale, key, late))
    assert "roster of epoch" in str(problem)
    with Authority.create(tmp_path / "other", NOW) as other:  # the same id under another operator
        foreign = other.issue(device().request, NOW)
        refused(IdentityReason.BAD_HELLO, lambda: check(ca, foreign.certificate))
        refused(IdentityReason.BAD_HELLO, lambda: check_client(issued.certificate, other.roster, key, NOW))
    ca.add_server("agg-1", tmp_path / "keys", NOW, dns=["a.example"])
    server = read_certificate(tmp_path / "keys" / "tls.crt")
    refused(IdentityReason.BAD_HELLO, lambda: check(ca, server))
    refused(IdentityReason.BAD_HELLO, lambda: check(ca, b"no certificate"))
    shorter = replace(ca.roster.clients[0], not_after=NOW)
    listed = replace(ca.roster, clients=(shorter,))
    refused(IdentityReason.CERT_EXPIRED, lambda: check_client(issued.certificate, listed, key, NOW + 1))


def hello(client: int, certificate: bytes) -> Hello:
    return Hello(
        "agg-1", bytes([1]) * 32, (1, 1), client, bytes([2]) * 32, (1, 1), certificate_sha256(certificate)
    )


def test_hello_is_let_in(ca: Authority) -> None:
    one, two = device(), device()
    mine, other = ca.issue(one.request, NOW), ca.issue(two.request, NOW)
    good = hello(1, mine.certificate)

    def say(said: Hello, signature: bytes, certificate: bytes = mine.certificate) -> Any:
        return admit(said, signature, certificate, ca.roster, ca.operator.key, NOW)

    assert say(good, good.sign(one.identity)) == mine.entry
    cases = [
        (good, good.sign(two.identity), mine.certificate),  # another's identity key
        (good, good.sign(one.identity), other.certificate),  # in another's connection
        (hello(2, mine.certificate), hello(2, mine.certificate).sign(one.identity), mine.certificate),
        (hello(1, other.certificate), hello(1, other.certificate).sign(one.identity), mine.certificate),
        (replace(good, server_nonce=bytes(32)), good.sign(one.identity), mine.certificate),  # recorded
        (replace(good, server="agg-2"), good.sign(one.identity), mine.certificate),
    ]
    for said, signature, certificate in cases:
        refused(
            IdentityReason.BAD_HELLO,
            lambda said=said, signature=signature, certificate=certificate: say(said, signature, certificate),
        )


# --- rotation -------------------------------------------------------------------------------------


def test_old_and_new_are_valid_until_the_first_hello(ca: Authority) -> None:
    old = device("ward 1")
    before = ca.issue(old.request, NOW, groups=["a"])
    new = renewed(1, old.identity)
    after = ca.renew(new.request, NOW + 60 * DAY)
    assert (after.entry.client, after.entry.name, after.entry.groups) == (1, "ward 1", ("a",))
    assert ca.renew(new.request, NOW + 61 * DAY).entry == after.entry  # the answer was lost
    now = NOW + 62 * DAY
    assert check(ca, before.certificate, now) == before.entry
    assert check(ca, after.certificate, now) == after.entry
    assert replaced_keys(ca.roster, before.entry) == ()
    gone = replaced_keys(ca.roster, after.entry)
    assert gone == (old.identity.public,)
    refused(IdentityReason.BAD_HELLO, lambda: check(ca, before.certificate, now, replaced=gone))
    assert check(ca, after.certificate, now, replaced=gone) == after.entry
    assert not ca.settle(1, old.identity.public, now)
    assert ca.settle(1, new.identity.public, now)
    assert ca.roster.clients == (after.entry,)
    assert not ca.settle(1, new.identity.public, now)
    refused(IdentityReason.BAD_HELLO, lambda: check(ca, before.certificate, now))


def test_who_may_renew(ca: Authority) -> None:
    one, two = device(), device()
    ca.issue(one.request, NOW)
    ca.issue(two.request, NOW)
    refused(IdentityReason.BAD_HELLO, lambda: ca.renew(renewed(1, two.identity).request, NOW))
    refused(IdentityReason.NOT_ENROLLED, lambda: ca.renew(renewed(9, one.identity).request, NOW))
    new = renewed(1, one.identity)
    ca.renew(new.request, NOW)
    # once there are newer keys, the old ones, which may be stolen, ask for no others
    refused(IdentityReason.BAD_HELLO, lambda: ca.renew(renewed(1, one.identity).request, NOW))
    newest = renewed(1, new.identity)
    ca.renew(newest.request, NOW)
    keys = [entry.identity_key for entry in ca.roster.clients if entry.client == 1]
    assert keys == [new.identity.public, newest.identity.public]
    assert [entry.client for entry in ca.roster.clients] == [1, 1, 2]


def test_expired_keys_are_renewed_by_the_operator_only(ca: Authority) -> None:
    one = device()
    ca.issue(one.request, NOW)
    late = NOW + 100 * DAY
    new = renewed(1, one.identity)
    problem = refused(IdentityReason.CERT_EXPIRED, lambda: ca.renew(new.request, late, issuer=Issuer.ONLINE))
    assert "2027-04-15" in str(problem)
    after = ca.renew(new.request, late)
    assert ca.roster.clients == (after.entry,)  # nothing that expired stands beside it
    assert check(ca, after.certificate, late) == after.entry


def test_epochs_grow_by_one(ca: Authority) -> None:
    epochs = [ca.roster.epoch]
    one = device()
    for change in (
        lambda: ca.issue(one.request, NOW),
        lambda: ca.renew(renewed(1, one.identity).request, NOW),
        lambda: ca.revoke([1], NOW),
        lambda: ca.refresh(NOW + DAY),
    ):
        change()
        epochs.append(ca.roster.epoch)
    assert epochs == [1, 2, 3, 4, 5]
    assert ca.roster.expires == NOW + 91 * DAY
