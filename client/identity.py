"""Who a device is: its keys, which it makes itself and never sends, its certificate, and the pinned operator.

The folder holds one generation of keys, or two while they are rotated: `tls-1.key`, `identity-1.key`, the
request about them, `request-1.bin`, and the certificate, `tls-1.crt`. What is in use, and the highest epoch
of a roster that was ever seen, stands in `state.json`, written in one step. One process uses the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.engine.errors import DataError
from mycelia.privacy.secagg.certificates import (
    UNREADABLE,
    Certificate,
    IdentityProblem,
    IdentityReason,
    Operator,
    certificate_sha256,
    tls_sha256,
)
from mycelia.privacy.secagg.enrolment import MAX_ENROLMENT, Reply, Request
from mycelia.privacy.secagg.hello import Hello, new_nonce
from mycelia.privacy.secagg.key_files import (
    PUBLIC,
    SECRET,
    FolderLock,
    new_folder,
    read_public,
    read_secret,
    write_file,
)
from mycelia.privacy.secagg.keys import Identity, Random
from mycelia.privacy.secagg.private_keys import (
    certificate_pem,
    identity_pem,
    new_tls_key,
    read_certificate,
    read_identity,
    read_tls_key,
    tls_pem,
)
from mycelia.privacy.secagg.roster import Roster

__all__ = ["DeviceIdentity", "DeviceKeys"]

_OPERATOR: Final = "operator.pub"
_STATE: Final = "state.json"
_KIND: Final = "a device's identity"
_RENEW: Final = "mycelia enrol request --renew --out {folder}"


@dataclass(frozen=True)
class DeviceKeys:
    """One generation of a device's keys, with the certificate for them.

    Attributes:
        generation: from 1.
        certificate: as the operator signed it.
        identity: the Ed25519 key pair.
        tls_key_pem: the TLS key for the TLS library, a secret.
        certificate_pem: the certificate for the TLS library.
    """

    generation: int
    certificate: Certificate
    identity: Identity = field(repr=False)
    tls_key_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)

    @property
    def renew_after(self) -> int:
        """When to renew: after two thirds of the validity, Unix time."""
        since, until = self.certificate.not_before, self.certificate.not_after
        return since + 2 * (until - since) // 3

    def say_hello(
        self, challenge: pb.Challenge, versions: tuple[int, int], nonce: Callable[[], bytes] = new_nonce
    ) -> pb.Hello:
        """The answer to a server's challenge, for the connection that shows this certificate.

        Args:
            challenge: as decoded.
            versions: first and last version of the protocol that this device speaks.
            nonce: makes 32 fresh bytes.

        Raises:
            IdentityProblem: `BAD_HELLO` for a challenge that is none.
        """
        client, mine = self.certificate.client, nonce()
        hello = Hello(
            challenge.server,
            challenge.nonce,
            (challenge.version_min, challenge.version_max),
            client,
            mine,
            versions,
            certificate_sha256(self.certificate.der),
        )
        return pb.Hello(
            client=client,
            version_min=versions[0],
            version_max=versions[1],
            nonce=mine,
            signature=hello.sign(self.identity),
        )


@dataclass(frozen=True)
class _State:
    """What is in use: the client's id, the generation of its keys, the one before or 0, the highest epoch."""

    client: int
    keys: int
    before: int
    epoch: int


class DeviceIdentity:
    """A device's folder, open and locked; made by `create` or `open`, let go by `close` or `with`.

    Attributes:
        folder: where it is.
        operator: pinned when the folder was made.
        keys: those with a certificate, the newest first; the older one stays until `settle`.
    """

    def __init__(self, folder: Path, lock: FolderLock) -> None:
        self.folder, self._lock = folder, lock
        self.operator = Operator.read(read_public(folder / _OPERATOR), str(folder / _OPERATOR))
        self._state = _read_state(folder / _STATE)
        self.keys = self._read_keys()

    @classmethod
    def create(cls, folder: Path, operator: bytes, name: str = "", random: Random = os.urandom) -> Self:
        """Make a folder with fresh keys, and a request about them.

        Args:
            folder: where; there may be an empty folder.
            operator: the file `operator.pub`, by a way that is trusted: it is pinned.
            name: for people.
            random: where the identity key comes from.

        Raises:
            DataError: no operator's certificate, there is something already, or it cannot be written.
            IdentityProblem: `FRAME` for a name that is too long or does not print.
        """
        pinned = Operator.read(operator)
        tls, identity = new_tls_key(), Identity.generate(random)
        request = Request.make(tls, identity, name)
        request.check()
        files = {
            _OPERATOR: (pinned.pem, PUBLIC),
            "tls-1.key": (tls_pem(tls), SECRET),
            "identity-1.key": (identity_pem(identity), SECRET),
            "request-1.bin": (request.encode(), PUBLIC),
        }
        new_folder(folder, files)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The folder as it was left.

        Raises:
            DataError: it is no identity folder, other users can read its keys or write to it, another process
                has it, or a file was damaged.
            IdentityProblem: `BAD_HELLO` for a certificate that is not the operator's.
        """
        if not (folder / _OPERATOR).exists() or not (folder / "request-1.bin").exists():
            raise DataError(
                "it is no identity folder",
                rule="a folder that mycelia enrol request made",
                fix=f"mycelia enrol request --operator operator.pub --out {folder}",
                who=str(folder),
            )
        lock = FolderLock.take(folder, _KIND)
        try:
            return cls(folder, lock)
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        """Let go of the folder; closing twice is harmless."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def client(self) -> int:
        """Its id, 0 as long as it is not enrolled."""
        return self._state.client

    @property
    def epoch(self) -> int:
        """The highest epoch of a roster that it has seen."""
        return self._state.epoch

    def check(self, now: int) -> DeviceKeys:
        """The keys to use, before a connection is tried.

        Args:
            now: Unix time in seconds.

        Raises:
            IdentityProblem: `NOT_ENROLLED` without a certificate; `CERT_EXPIRED` with the date and the
                command to run; `BAD_HELLO` before its first second.
        """
        if not self.keys:
            raise IdentityProblem(
                IdentityReason.NOT_ENROLLED,
                "it is not enrolled yet",
                rule="a certificate of the operator",
                fix=f"give {self._request_path(1)} to the operator, then: mycelia enrol accept --identity"
                f" {self.folder} reply.bin",
                who=str(self.folder),
            )
        newest = self.keys[0]
        fix = f"{_RENEW.format(folder=self.folder)}, and the operator: mycelia enrol renew --ca operator/"
        newest.certificate.check_dates(now, fix)
        return newest

    # --- asking -----------------------------------------------------------------------------------

    @property
    def pending(self) -> Path | None:
        """The file of the request that was not answered yet."""
        path = self._request_path(self._state.keys + 1)
        return path if path.exists() else None

    def request(self) -> Request:
        """The request that was not answered yet; it can be sent as often as needed.

        Raises:
            DataError: everything was answered, or the file was damaged.
        """
        if self.pending is None:
            raise DataError(
                f"it is enrolled as client {self.client}",
                rule="an id is asked for once",
                fix=f"to renew its keys: {_RENEW.format(folder=self.folder)}",
                who=str(self.folder),
            )
        return self._read_request(self.pending)

    def renew(self, random: Random = os.urandom) -> Request:
        """Make new keys and a request about them, signed with those in use; or the request that is pending.

        Args:
            random: where the identity key comes from.

        Raises:
            DataError: it is not enrolled, or a file cannot be written.
        """
        if not self.keys:
            raise DataError(
                "it is not enrolled yet",
                rule="a renewal is signed with the keys of before",
                fix="wait for the answer to the first request",
                who=str(self.folder),
            )
        if self.pending is None:
            number = self._state.keys + 1
            tls, identity = new_tls_key(), Identity.generate(random)
            request = Request.make(tls, identity, "", renews=self.client, before=self.keys[0].identity)
            write_file(self.folder / f"tls-{number}.key", tls_pem(tls), SECRET, replace=True)
            write_file(self.folder / f"identity-{number}.key", identity_pem(identity), SECRET, replace=True)
            request_path = self._request_path(number)
            write_file(request_path, request.encode(), PUBLIC, replace=True)  # the last: now it counts
        return self.request()

    def enrol_request(self, token: bytes) -> pb.EnrolRequest:
        """The pending request for the enrolment port of a server.

        Args:
            token: 32 bytes, a secret.

        Raises:
            DataError: see `request`.
        """
        request = self.request()
        return pb.EnrolRequest(
            token=token,
            request=request.certificate_request,
            identity_key=request.identity_key,
            proof=request.signature,
            name=request.name,
        )

    def renew_request(self, random: Random = os.urandom) -> pb.Renew:
        """A renewal for the stream to a server, see `renew`."""
        request = self.renew(random)
        return pb.Renew(
            request=request.certificate_request,
            identity_key=request.identity_key,
            signature=request.renewal_signature,
            proof=request.signature,
        )

    # --- being answered ---------------------------------------------------------------------------

    def accept_reply(self, data: bytes, now: int) -> DeviceKeys:
        """Take what the operator answered in a file; the same file may come again.

        Args:
            data: the file.
            now: Unix time in seconds.

        Raises:
            IdentityProblem: `FRAME` or `BAD_HELLO` if it is not the operator's answer to this device;
                `CERT_EXPIRED`.
            DataError: nothing was asked, or a file cannot be written.
        """
        reply = Reply.load(data, self.operator.key)
        return self._accept(reply.client, reply.certificate, reply.epoch, reply.identity_key, now)

    def accept_enrolled(self, reply: pb.EnrolReply, now: int) -> DeviceKeys:
        """Take what a server's enrolment port answered; of the operator it names, nothing is believed.

        Args:
            reply: as decoded.
            now: Unix time in seconds.

        Raises:
            IdentityProblem: see `accept_reply`; `NOT_ENROLLED` if the operator has still to issue.
            SecureSumError: the roster in it is not the operator's.
        """
        if not reply.client:
            raise IdentityProblem(
                IdentityReason.NOT_ENROLLED,
                "the operator has still to issue",
                fix="ask again later",
                who="enrolment",
            )
        return self._accept_from_server(reply, reply.client, now)

    def accept_renewed(self, reply: pb.Renewed, now: int) -> DeviceKeys:
        """Take what a server answered to a renewal.

        Args:
            reply: as decoded.
            now: Unix time in seconds.

        Raises:
            IdentityProblem: see `accept_reply`.
            SecureSumError: the roster in it is not the operator's.
        """
        return self._accept_from_server(reply, self.client, now)

    def settle(self, keys: DeviceKeys) -> None:
        """Forget older keys, once a server welcomed these.

        Args:
            keys: those that Hello was said with.
        """
        if len(self.keys) < 2 or keys.generation != self.keys[0].generation:
            return
        self._write_state(_State(self.client, self._state.keys, 0, self.epoch))
        old, self.keys = self.keys[1].generation, self.keys[:1]
        self._forget(old)

    def see_roster(self, document: bytes, now: int) -> Roster:
        """Verify a roster, and never take an older one again.

        Args:
            document: from whomever.
            now: Unix time in seconds.

        Raises:
            SecureSumError: `BAD_SIGNATURE` if the operator did not sign it, or it is expired or older than
                one seen before; `FRAME` or `CONFIG` if it is no roster.
            IdentityProblem: `REVOKED`, or `NOT_ENROLLED` if it does not list this device with its keys.
        """
        roster = Roster.load(document, self.operator.key, now=now, least_epoch=max(self.epoch, 1))
        if self.client and roster.epoch > self.epoch:
            state = self._state
            self._write_state(_State(state.client, state.keys, state.before, roster.epoch))
        if roster.is_revoked(self.client):
            raise IdentityProblem(
                IdentityReason.REVOKED,
                f"its id is revoked in the roster of epoch {roster.epoch}",
                rule="a revoked id never takes part again",
                fix="ask the operator",
                who=f"client {self.client}",
            )
        mine = {(keys.identity.public, keys.certificate.tls_sha256) for keys in self.keys}
        listed = {(entry.identity_key, entry.tls_sha256) for entry in roster.listed(self.client)}
        if self.client and not mine & listed:
            raise IdentityProblem(
                IdentityReason.NOT_ENROLLED,
                f"the roster of epoch {roster.epoch} does not list this device with its keys",
                rule="certificate, identity key and roster agree",
                fix="ask the operator whether this device was enrolled anew from another folder",
                who=f"client {self.client}",
            )
        return roster

    # --- inside -----------------------------------------------------------------------------------

    def _accept_from_server(self, reply: pb.EnrolReply | pb.Renewed, client: int, now: int) -> DeviceKeys:
        try:
            certificate, *_ = x509.load_pem_x509_certificates(reply.certificate)
        except UNREADABLE as error:
            raise IdentityProblem(
                IdentityReason.FRAME, "no certificate", rule="a chain in PEM", who="enrolment"
            ) from error
        key, epoch = None, self.epoch  # the number beside the roster is only the server's word
        if reply.roster:
            roster = Roster.load(reply.roster, self.operator.key, now=now, least_epoch=max(epoch, 1))
            key, epoch = roster.entry(client, now).identity_key, roster.epoch
        return self._accept(client, certificate.public_bytes(Encoding.DER), epoch, key, now)

    def _accept(
        self, client: int, certificate: bytes, epoch: int, identity_key: bytes | None, now: int
    ) -> DeviceKeys:
        given = Certificate.read(certificate, self.operator.key)
        held = self.keys[0] if self.keys else None
        if held and held.certificate.tls_sha256 == given.tls_sha256 and self.pending is None:
            return held  # the answer came twice
        if self.pending is None:
            raise DataError(
                "nothing was asked",
                rule="an answer follows a request",
                fix="mycelia enrol request",
                who=str(self.folder),
            )
        number = self._state.keys + 1
        tls = read_tls_key(self.folder / f"tls-{number}.key")
        identity = read_identity(self.folder / f"identity-{number}.key")
        agree = (
            given.client == client == (self.client or client)
            and given.tls_sha256 == tls_sha256(tls.public_key())
            and identity_key in (None, identity.public)
        )
        if not agree:
            raise IdentityProblem(
                IdentityReason.BAD_HELLO,
                f"the answer is for {given.holder} and other keys than this device asked about",
                rule="id, certificate and both keys are those of the request",
                fix=f"give {self.pending} to the operator, and take the answer to it",
                who=str(self.folder),
            )
        given.check_dates(now, "ask the operator for a new answer")
        write_file(self.folder / f"tls-{number}.crt", certificate_pem(certificate), PUBLIC, replace=True)
        oldest = self._state.before
        self._write_state(_State(client, number, self._state.keys, max(self.epoch, epoch, 1)))
        self._forget(oldest)
        self.keys = self._read_keys()
        return self.keys[0]

    def _forget(self, generation: int) -> None:
        names = [f"tls-{generation}.key", f"identity-{generation}.key", f"tls-{generation}.crt"]
        names += [f"request-{generation}.bin"] if generation > 1 else []  # the first tells what the folder is
        for name in names:
            with suppress(OSError):
                (self.folder / name).unlink()

    def _read_keys(self) -> tuple[DeviceKeys, ...]:
        numbers = [number for number in (self._state.keys, self._state.before) if number]
        return tuple([self._read_generation(number) for number in numbers])

    def _read_generation(self, number: int) -> DeviceKeys:
        tls = read_tls_key(self.folder / f"tls-{number}.key")
        path = self.folder / f"tls-{number}.crt"
        certificate = Certificate.read(read_certificate(path), self.operator.key)
        if certificate.client != self.client or certificate.tls_sha256 != tls_sha256(tls.public_key()):
            raise DataError(
                f"it is the certificate of {certificate.holder} with another key",
                rule="the files of an identity folder belong together",
                fix="put back the file that was there, or enrol anew into a new folder",
                who=str(path),
            )
        return DeviceKeys(
            number,
            certificate,
            read_identity(self.folder / f"identity-{number}.key"),
            tls_pem(tls),
            certificate_pem(certificate.der),
        )

    def _read_request(self, path: Path) -> Request:
        try:
            return Request.decode(read_public(path, MAX_ENROLMENT))
        except IdentityProblem as error:
            raise DataError(f"it was damaged ({error.found})", rule=error.rule, who=str(path)) from error

    def _request_path(self, number: int) -> Path:
        return self.folder / f"request-{number}.bin"

    def _write_state(self, state: _State) -> None:
        data = json.dumps({"version": 1, **vars(state)}, indent=1)
        write_file(self.folder / _STATE, data.encode() + b"\n", SECRET, replace=True)
        self._state = state


def _read_state(path: Path) -> _State:
    if not path.exists():
        return _State(0, 0, 0, 0)
    try:
        found = json.loads(read_secret(path).decode())
        if found.pop("version") != 1 or any(type(value) is not int for value in found.values()):
            raise ValueError("another version")
        state = _State(**found)
        if not (
            0 < state.client < 2**64
            and 0 < state.keys < 2**31
            and state.before in (0, state.keys - 1)
            and 0 < state.epoch < 2**63
        ):
            raise ValueError("a number out of range")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            "it was damaged",
            rule="only mycelia writes it: it says which rosters are too old",
            fix="put back the file that was there, or enrol anew into a new folder",
            who=str(path),
        ) from error
    return state
