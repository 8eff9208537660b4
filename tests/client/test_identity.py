"""A device's folder: its own keys, one process, one operator, and no roster older than one that was seen."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import decode_enrol_request, encode
from mycelia.client import identity as module
from mycelia.client.identity import DeviceIdentity
from mycelia.engine.errors import DataError, MyceliaError
from mycelia.privacy.secagg.canonical import Reason, SecureSumError
from mycelia.privacy.secagg.certificates import IdentityProblem, IdentityReason, certificate_sha256
from mycelia.privacy.secagg.enrolment import Reply, Request
from mycelia.privacy.secagg.hello import Hello
from mycelia.privacy.secagg.keys import Identity
from mycelia.privacy.secagg.private_keys import certificate_pem
from mycelia.privacy.secagg.roster import ClientEntry, Issuer, Roster

NOW = 1_800_000_000
DAY = 86_400


class Operator:
    """Signs what an operator signs, with certificates that are made here once more."""

    def __init__(self, seed: int = 1) -> None:
        self.identity = Identity(bytes([seed]) * 32)
        self.key = Ed25519PrivateKey.from_private_bytes(self.identity.private)
        self.pem = self.certificate(self.key.public_key(), None)

    def certificate(self, public: object, client: int | None, days: int = 90) -> bytes:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an operator")])
        start = datetime.fromtimestamp(NOW, UTC)
        builder = x509.CertificateBuilder(name, name, public, 77, start, start + timedelta(days=days))  # type: ignore[arg-type]
        builder = builder.add_extension(x509.BasicConstraints(client is None, None), critical=True)
        if client is not None:
            uri = x509.UniformResourceIdentifier(f"mycelia:client/{client}")
            builder = builder.add_extension(x509.SubjectAlternativeName([uri]), critical=False)
        made = builder.sign(self.key, None)
        return made.public_bytes(Encoding.PEM if client is None else Encoding.DER)

    def reply(self, request: Request, client: int = 7, epoch: int = 3, days: int = 90) -> bytes:
        der = self.certificate(request.tls_key, client, days)
        return Reply(client, request.identity_key, der, epoch).sign(self.identity)

    def roster(self, *requests: Request, epoch: int = 3, revoked: tuple[int, ...] = ()) -> bytes:
        entries = [
            ClientEntry(7, asked.identity_key, Issuer.OFFLINE, NOW, NOW + DAY, "", asked.tls_sha256)
            for asked in requests
        ]
        return Roster(epoch, NOW + DAY, tuple(entries), (), revoked).sign(self.identity)


OPERATOR, OTHER = Operator(), Operator(2)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[DeviceIdentity]:
    with DeviceIdentity.create(tmp_path / "identity", OPERATOR.pem, "ward 7") as made:
        yield made


@pytest.fixture
def enrolled(device: DeviceIdentity) -> DeviceIdentity:
    device.accept_reply(OPERATOR.reply(device.request()), NOW)
    return device


def refused(reason: IdentityReason, call: Callable[[], object]) -> IdentityProblem:
    with pytest.raises(IdentityProblem) as caught:
        call()
    assert caught.value.reason == reason
    return caught.value


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- the folder -----------------------------------------------------------------------------------


def test_a_new_folder(device: DeviceIdentity) -> None:
    assert device.folder.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in device.folder.iterdir()}
    assert modes == {
        "tls-1.key": 0o600, "identity-1.key": 0o600, "lock": 0o600,
        "operator.pub": 0o644, "request-1.bin": 0o644,
    }  # fmt: skip
    request = device.request()
    assert (request.renews, request.name) == (0, "ward 7")
    private = [(device.folder / name).read_text() for name in ("tls-1.key", "identity-1.key")]
    secret = ["".join(text.splitlines()[1:-1]) for text in private]
    assert all(part not in str(request.encode()) + repr(request) for part in secret)
    problem = refused(IdentityReason.NOT_ENROLLED, lambda: device.check(NOW))
    assert "request-1.bin" in problem.fix


def test_nothing_is_overwritten(enrolled: DeviceIdentity) -> None:
    before = files(enrolled.folder)
    with pytest.raises(DataError, match="already"):
        DeviceIdentity.create(enrolled.folder, OPERATOR.pem)
    with pytest.raises(DataError, match="enrolled as client 7"):
        enrolled.request()
    assert files(enrolled.folder) == before


def test_two_processes_cannot_share_it(device: DeviceIdentity) -> None:
    program = (
        "import sys; from pathlib import Path; from mycelia.client.identity import DeviceIdentity;"
        "DeviceIdentity.open(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, str(device.folder)]
    other = subprocess.run(command, capture_output=True, text=True, check=False)
    assert other.returncode == 1
    assert "another process is using it" in other.stderr
    device.close()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["tls-1.key", "identity-1.key", "state.json"])
def test_an_open_secret_is_refused(enrolled: DeviceIdentity, name: str) -> None:
    enrolled.close()
    (enrolled.folder / name).chmod(0o644)
    with pytest.raises(DataError, match=f"{name}: its mode is 0644"):
        DeviceIdentity.open(enrolled.folder)
    (enrolled.folder / name).chmod(0o600)
    DeviceIdentity.open(enrolled.folder).close()  # and a refusal keeps no lock
    enrolled.folder.chmod(0o770)
    with pytest.raises(DataError, match="0770"):
        DeviceIdentity.open(enrolled.folder)


def test_damaged_files(enrolled: DeviceIdentity, tmp_path: Path) -> None:
    enrolled.close()
    with DeviceIdentity.create(tmp_path / "other", OTHER.pem) as other:
        other.accept_reply(OTHER.reply(other.request(), client=7), NOW)
    foreign = files(other.folder)
    for name in ("tls-1.key", "identity-1.key", "tls-1.crt", "operator.pub", "state.json"):
        good = (enrolled.folder / name).read_bytes()
        wrongs = [b"", good[: len(good) // 2], b"\xff" * 99]
        if name in ("tls-1.key", "tls-1.crt", "operator.pub"):
            wrongs.append(foreign[name])
        for wrong in wrongs:
            (enrolled.folder / name).write_bytes(wrong)
            with pytest.raises(MyceliaError):
                DeviceIdentity.open(enrolled.folder)
        (enrolled.folder / name).write_bytes(good)
    DeviceIdentity.open(enrolled.folder).close()
    for path in (tmp_path / "no", tmp_path, enrolled.folder / "state.json"):
        with pytest.raises(DataError, match="no identity folder"):
            DeviceIdentity.open(path)


@pytest.mark.parametrize(
    "state",
    [
        [], 1, {}, {"version": 2}, {"version": 1, "client": 7, "keys": 1, "before": 0},
        {"version": 1, "client": 0, "keys": 1, "before": 0, "epoch": 3},
        {"version": 1, "client": 7, "keys": True, "before": 0, "epoch": 3},
        {"version": 1, "client": 7, "keys": 3, "before": 1, "epoch": 3},
        {"version": 1, "client": 7, "keys": 1, "before": 0, "epoch": 0},
        {"version": 1, "client": 7, "keys": 1, "before": 0, "epoch": 3.5},
        {"version": 1, "client": 7, "keys": 1, "before": 0, "epoch": 3, "more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_state(enrolled: DeviceIdentity, state: object) -> None:
    enrolled.close()
    (enrolled.folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="damaged"):
        DeviceIdentity.open(enrolled.folder)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(st.binary(max_size=80), st.text('{}[]":,0123456789 versionclientkeysbeforeepoch', max_size=80))
)
def test_any_state(tmp_path: Path, data: bytes | str) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    path.chmod(0o600)
    try:
        state = module._read_state(path)
    except DataError:
        return
    assert state.client > 0
    assert state.epoch > 0


# --- being answered -------------------------------------------------------------------------------


def test_it_is_enrolled(enrolled: DeviceIdentity) -> None:
    (keys,) = enrolled.keys
    assert (enrolled.client, enrolled.epoch, enrolled.pending) == (7, 3, None)
    assert enrolled.check(NOW) is keys
    assert (keys.certificate.client, keys.renew_after) == (7, NOW + 60 * DAY)
    assert "PRIVATE" not in repr(keys)
    enrolled.close()
    with DeviceIdentity.open(enrolled.folder) as again:
        assert again.keys[0].certificate == keys.certificate
        assert again.keys[0].identity.public == keys.identity.public
        assert (again.client, again.epoch) == (7, 3)


def test_the_same_answer_twice(device: DeviceIdentity) -> None:
    reply = OPERATOR.reply(device.request())
    first = device.accept_reply(reply, NOW)
    before = files(device.folder)
    assert device.accept_reply(reply, NOW) is first
    assert files(device.folder) == before


def test_answers_that_are_not_for_it(device: DeviceIdentity, tmp_path: Path) -> None:
    before = files(device.folder)
    asked = device.request()
    with DeviceIdentity.create(tmp_path / "other", OPERATOR.pem) as other:
        theirs = other.request()
    mixed = OPERATOR.certificate(asked.tls_key, 7)
    answers = [
        (IdentityReason.BAD_HELLO, OTHER.reply(asked)),
        (IdentityReason.BAD_HELLO, OPERATOR.reply(theirs)),
        (IdentityReason.BAD_HELLO, Reply(7, theirs.identity_key, mixed, 3).sign(OPERATOR.identity)),
        (IdentityReason.BAD_HELLO, Reply(8, asked.identity_key, mixed, 3).sign(OPERATOR.identity)),
        (
            IdentityReason.BAD_HELLO,
            Reply(7, asked.identity_key, OTHER.certificate(asked.tls_key, 7), 3).sign(OPERATOR.identity),
        ),
        (IdentityReason.FRAME, b""),
        (IdentityReason.FRAME, asked.encode()),
    ]
    for reason, reply in answers:
        refused(reason, lambda reply=reply: device.accept_reply(reply, NOW))
    late = refused(
        IdentityReason.CERT_EXPIRED, lambda: device.accept_reply(OPERATOR.reply(asked), NOW + 91 * DAY)
    )
    assert "2027-04-15" in str(late)
    assert files(device.folder) == before


def test_expired_names_the_date_and_the_command(enrolled: DeviceIdentity) -> None:
    problem = refused(IdentityReason.CERT_EXPIRED, lambda: enrolled.check(NOW + 90 * DAY + 1))
    assert "2027-04-15 08:00:00 UTC" in str(problem)
    assert "mycelia enrol request --renew" in problem.fix


def test_a_crash_before_it_is_settled(device: DeviceIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate is on the disk and the state is not: the answer is taken again."""
    reply = OPERATOR.reply(device.request())

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeviceIdentity, "_write_state", crash)
        with pytest.raises(KeyboardInterrupt):
            device.accept_reply(reply, NOW)
    device.close()
    with DeviceIdentity.open(device.folder) as again:
        assert (again.client, again.keys) == (0, ())
        assert again.accept_reply(reply, NOW).certificate.client == 7


# --- over the network -----------------------------------------------------------------------------


def test_enrolment_over_the_network(device: DeviceIdentity) -> None:
    asked = decode_enrol_request(encode(device.enrol_request(bytes(32))))
    request = Request(0, asked.request, asked.identity_key, asked.name, asked.proof, b"")
    request.check()
    assert request == device.request()
    refused(IdentityReason.NOT_ENROLLED, lambda: device.accept_enrolled(pb.EnrolReply(), NOW))
    certificate = certificate_pem(OPERATOR.certificate(request.tls_key, 7))
    other = replace(request, identity_key=OTHER.identity.public)
    reply = pb.EnrolReply(client=7, certificate=certificate, authority=OTHER.pem, roster_epoch=2**63)
    for wrong, error in (
        (pb.EnrolReply(client=7, certificate=b"x"), IdentityProblem),
        (pb.EnrolReply(client=8, certificate=certificate), IdentityProblem),
        (pb.EnrolReply(client=7, certificate=certificate, roster=OTHER.roster(request)), SecureSumError),
        (pb.EnrolReply(client=7, certificate=certificate, roster=OPERATOR.roster(other)), IdentityProblem),
        (pb.EnrolReply(client=7, certificate=certificate, roster=OPERATOR.roster()), SecureSumError),
    ):
        with pytest.raises(error):
            device.accept_enrolled(wrong, NOW)
    reply.roster = OPERATOR.roster(request, epoch=5)
    device.accept_enrolled(reply, NOW)
    assert (device.client, device.epoch) == (7, 5)  # the number beside the roster is nobody's signature
    device.close()
    DeviceIdentity.open(device.folder).close()


def test_hello_to_a_server(enrolled: DeviceIdentity) -> None:
    (keys,) = enrolled.keys
    challenge = pb.Challenge(nonce=bytes([9]) * 32, server="agg-1", version_min=1, version_max=4)
    said = keys.say_hello(challenge, (2, 3))
    fingerprint = certificate_sha256(keys.certificate.der)
    heard = Hello(
        "agg-1",
        bytes([9]) * 32,
        (1, 4),
        said.client,
        said.nonce,
        (said.version_min, said.version_max),
        fingerprint,
    )
    heard.verify(said.signature, keys.identity.public)
    assert (said.client, said.version_min, said.version_max) == (7, 2, 3)
    assert said.nonce != keys.say_hello(challenge, (2, 3)).nonce
    with pytest.raises(IdentityProblem):
        replace(heard, server_nonce=bytes(32)).verify(said.signature, keys.identity.public)
    refused(IdentityReason.BAD_HELLO, lambda: keys.say_hello(pb.Challenge(server="agg-1"), (2, 3)))


# --- rotation -------------------------------------------------------------------------------------


def test_rotation(enrolled: DeviceIdentity) -> None:
    old = enrolled.keys[0]
    asked = enrolled.renew()
    assert enrolled.renew() == asked  # no second pair before the first is answered
    asked.check()
    asked.check_renewal(old.identity.public)
    assert (asked.renews, asked.name) == (7, "")
    assert asked.identity_key != old.identity.public
    assert asked.tls_sha256 != old.certificate.tls_sha256
    sent = enrolled.renew_request()
    assert Request(7, sent.request, sent.identity_key, "", sent.proof, sent.signature) == asked
    enrolled.close()
    with DeviceIdentity.open(enrolled.folder) as device:
        assert device.renew() == asked
        refused(IdentityReason.BAD_HELLO, lambda: device.accept_reply(OPERATOR.reply(asked, client=8), NOW))
        new = device.accept_reply(OPERATOR.reply(asked, epoch=4), NOW)
        assert [keys.generation for keys in device.keys] == [2, 1]
        assert device.check(NOW) is new is device.keys[0]
        assert device.epoch == 4
        device.settle(device.keys[1])  # welcomed with the old keys: nothing is settled
        assert len(device.keys) == 2
        device.settle(new)
        assert device.keys == (new,)
        device.settle(new)
        names = set(files(device.folder))
        assert {"tls-1.key", "identity-1.key", "tls-1.crt"}.isdisjoint(names)
        device.accept_reply(OPERATOR.reply(device.renew(), epoch=5), NOW)
    with DeviceIdentity.open(enrolled.folder) as device:
        assert [keys.generation for keys in device.keys] == [3, 2]
        assert device.client == 7


def test_a_renewal_over_the_stream(enrolled: DeviceIdentity) -> None:
    old, asked = enrolled.keys[0], enrolled.renew()
    before = replace(asked, identity_key=old.identity.public)
    certificate = certificate_pem(OPERATOR.certificate(asked.tls_key, 7))
    reply = pb.Renewed(certificate=certificate, roster_epoch=4, roster=OPERATOR.roster(asked, epoch=2))
    with pytest.raises(SecureSumError) as caught:  # older than one seen
        enrolled.accept_renewed(reply, NOW)
    assert caught.value.reason is Reason.BAD_SIGNATURE
    reply.roster = OPERATOR.roster(before, epoch=4)
    refused(IdentityReason.BAD_HELLO, lambda: enrolled.accept_renewed(reply, NOW))
    reply.roster = OPERATOR.roster(asked, epoch=4)
    assert enrolled.accept_renewed(reply, NOW).generation == 2


def test_a_crash_while_renewing(enrolled: DeviceIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys without their request were shown to nobody; the next try makes others."""
    write = module.write_file

    def crash(path: Path, *arguments: object, **options: object) -> None:
        if path.name.startswith("request"):
            raise KeyboardInterrupt
        write(path, *arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_file", crash)
        with pytest.raises(KeyboardInterrupt):
            enrolled.renew()
    assert enrolled.pending is None
    enrolled.accept_reply(OPERATOR.reply(enrolled.renew()), NOW)
    assert enrolled.check(NOW).generation == 2


def test_keys_that_nobody_welcomed_are_forgotten_in_the_end(enrolled: DeviceIdentity) -> None:
    for epoch in (4, 5):
        enrolled.accept_reply(OPERATOR.reply(enrolled.renew(), epoch=epoch), NOW)
    assert [keys.generation for keys in enrolled.keys] == [3, 2]
    names = {path.name for path in enrolled.folder.glob("*.key")}
    assert names == {f"{kind}-{number}.key" for kind in ("tls", "identity") for number in (2, 3)}


def test_who_cannot_renew(device: DeviceIdentity) -> None:
    with pytest.raises(DataError, match="not enrolled"):
        device.renew()


# --- rosters --------------------------------------------------------------------------------------


def test_no_roster_older_than_one_seen(device: DeviceIdentity) -> None:
    asked = device.request()
    device.accept_reply(OPERATOR.reply(asked), NOW)
    assert device.see_roster(OPERATOR.roster(asked, epoch=9), NOW).epoch == 9
    device.close()
    with DeviceIdentity.open(device.folder) as again:
        assert again.epoch == 9
        for document in (
            OPERATOR.roster(asked, epoch=8),
            OTHER.roster(asked, epoch=10),
            OPERATOR.roster(asked, epoch=10)[:-1],
        ):
            with pytest.raises(SecureSumError):
                again.see_roster(document, NOW)
        with pytest.raises(SecureSumError, match="expired"):
            again.see_roster(OPERATOR.roster(asked, epoch=10), NOW + DAY + 1)
        assert again.epoch == 9
        again.see_roster(OPERATOR.roster(asked, epoch=9), NOW)


def test_a_roster_without_this_device(device: DeviceIdentity) -> None:
    asked = device.request()
    device.accept_reply(OPERATOR.reply(asked), NOW)
    tls = ec.derive_private_key(random.Random(1).randrange(1, 2**200), ec.SECP256R1())
    stranger = Request.make(tls, Identity(bytes([8]) * 32), "")
    refused(IdentityReason.NOT_ENROLLED, lambda: device.see_roster(OPERATOR.roster(stranger, epoch=4), NOW))
    refused(
        IdentityReason.REVOKED, lambda: device.see_roster(OPERATOR.roster(asked, epoch=5, revoked=(7,)), NOW)
    )
    assert device.epoch == 5  # a revocation that was seen cannot be hidden again


def test_either_generation_may_be_listed(enrolled: DeviceIdentity) -> None:
    """The server's copy of the roster may be behind, or ahead."""
    old = Request.decode((enrolled.folder / "request-1.bin").read_bytes())
    new = enrolled.renew()
    enrolled.accept_reply(OPERATOR.reply(new), NOW)
    for listed in ((old,), (old, new), (new,)):
        enrolled.see_roster(OPERATOR.roster(*listed), NOW)
