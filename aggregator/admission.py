"""Who may be connected: what a Hello, its connection's certificate and the newest roster say together."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mycelia.aggregator.identity import ServerKeys, admit, check_client, replaced_keys
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.channel import NO_CERTIFICATE
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.versions import VERSIONS, common_version
from mycelia.privacy.secagg.canonical import SecureSumError
from mycelia.privacy.secagg.certificates import (
    Certificate,
    IdentityProblem,
    IdentityReason,
    certificate_sha256,
    date,
    expired,
)
from mycelia.privacy.secagg.hello import Hello, new_nonce
from mycelia.privacy.secagg.roster import ClientEntry, Roster

__all__ = ["Admission", "Admitted", "told"]

_TLS: Final = "TLSv1.3"


@dataclass(frozen=True)
class Admitted:
    """A device that may be connected.

    Attributes:
        entry: of the roster.
        certificate: as it shows it, in DER; empty without TLS.
        not_after: last second that certificate and entry are valid, Unix time.
        version: of the protocol, that both sides speak.
    """

    entry: ClientEntry
    certificate: bytes
    not_after: int
    version: int


class Admission:
    """Decides about devices by the newest roster.

    Args:
        keys: of this server.
        document: the roster.
        insecure: without TLS, where a device shows no certificate.
        wall: Unix time in seconds.

    Attributes:
        roster: verified.
        document: the same, as the operator signed it.

    Raises:
        SecureSumError: the roster is not the operator's, or expired.
        IdentityProblem: the roster does not list this server.
    """

    def __init__(
        self, keys: ServerKeys, document: bytes, *, insecure: bool, wall: Callable[[], float]
    ) -> None:
        self._keys, self._insecure, self._wall = keys, insecure, wall
        self.roster, self.document = self._load(document, 1), document
        keys.check(self.roster, self._now())
        self._replaced: set[bytes] = set()

    def renew(self, document: bytes) -> None:
        """Take a new roster.

        Raises:
            SecureSumError: not the operator's, expired, or older than the one here; that one stays.
        """
        self.roster, self.document = self._load(document, self.roster.epoch), document

    def challenge(self) -> pb.Challenge:
        """What a new stream begins with."""
        first, last = VERSIONS
        return pb.Challenge(nonce=new_nonce(), server=self._keys.name, version_min=first, version_max=last)

    def admit(self, challenge: pb.Challenge, said: pb.Hello, certificate: str, tls: str) -> Admitted:
        """Let a device in, or not.

        Args:
            challenge: of this stream.
            said: the answer.
            certificate: that the device shows in this connection, in PEM; "" for none.
            tls: version of TLS; "" for none.

        Raises:
            Problem: `VERSION`, `BAD_HELLO`, `NOT_ENROLLED`, `REVOKED`, `CERT_EXPIRED`.
        """
        version = common_version((said.version_min, said.version_max))
        try:
            entry, der, not_after = self._entry(challenge, said, certificate, tls)
        except IdentityProblem as error:
            raise told(error) from error
        self._replaced.update(replaced_keys(self.roster, entry))
        return Admitted(entry, der, not_after, version)

    def refusal(self, admitted: Admitted) -> Problem | None:
        """Why a device that was let in may not be connected any more; None if it may."""
        now, client = self._now(), admitted.entry.client
        listed = any(
            entry.identity_key == admitted.entry.identity_key for entry in self.roster.listed(client)
        )
        ends = min(admitted.not_after, self.roster.expires)
        if listed and not self.roster.is_revoked(client) and now <= ends:
            return None
        try:
            if admitted.certificate:
                key = self._keys.operator.key
                check_client(admitted.certificate, self.roster, key, now, self._replaced)
            else:
                self._check_plaintext(client)
                self.roster.entry(client, now)
        except IdentityProblem as error:
            return told(error)
        except SecureSumError as error:
            return Problem(Reason.NOT_ENROLLED, error.found, rule=error.rule, who=f"client {client}")
        return None

    def _entry(
        self, challenge: pb.Challenge, said: pb.Hello, certificate: str, tls: str
    ) -> tuple[ClientEntry, bytes, int]:
        der = ssl.PEM_cert_to_DER_cert(certificate) if certificate else b""
        if not self._insecure and (not der or tls != _TLS):
            raise IdentityProblem(
                IdentityReason.BAD_HELLO,
                f"a connection over {tls or 'an unknown version of TLS'}",
                rule="TLS 1.3, and a certificate of the device",
                fix="use a TLS library that speaks TLS 1.3",
                who=f"client {said.client}",
            )
        hello = Hello(
            challenge.server,
            challenge.nonce,
            (challenge.version_min, challenge.version_max),
            said.client,
            said.nonce,
            (said.version_min, said.version_max),
            certificate_sha256(der) if der else NO_CERTIFICATE,
        )
        if not der:
            entry = self._plaintext_entry(hello, said.signature)
            return entry, b"", entry.not_after
        key = self._keys.operator.key
        entry = admit(hello, said.signature, der, self.roster, key, self._now(), self._replaced)
        return entry, der, min(entry.not_after, Certificate.read(der, key).not_after)

    def _plaintext_entry(self, hello: Hello, signature: bytes) -> ClientEntry:
        """Without TLS nobody shows a certificate: the identity key decides alone."""
        self._check_plaintext(hello.client)
        problem: IdentityProblem | None = None
        for entry in reversed(self.roster.listed(hello.client)):
            if entry.identity_key in self._replaced:
                continue
            try:
                hello.verify(signature, entry.identity_key)
            except IdentityProblem as error:
                problem = problem or error
                continue
            if not entry.not_before <= self._now() <= entry.not_after:
                raise expired(
                    f"its entry in the roster expired on {date(entry.not_after)}",
                    "on the device: mycelia enrol request --renew --out identity/",
                    f"client {hello.client}",
                )
            return entry
        raise problem or IdentityProblem(
            IdentityReason.NOT_ENROLLED,
            f"the roster of epoch {self.roster.epoch} does not list it",
            rule="listed in the operator's roster",
            fix="give the server the newest roster.bin, or enrol the device: mycelia enrol request",
            who=f"client {hello.client}",
        )

    def _check_plaintext(self, client: int) -> None:
        who, roster = f"client {client}", self.roster
        if roster.is_revoked(client):
            raise IdentityProblem(
                IdentityReason.REVOKED,
                f"its id is revoked in the roster of epoch {roster.epoch}",
                rule="a revoked id never takes part again",
                who=who,
            )
        if self._now() > roster.expires:
            raise IdentityProblem(
                IdentityReason.NOT_ENROLLED,
                f"the roster of epoch {roster.epoch} expired on {date(roster.expires)}",
                rule="an expired roster lists nobody",
                fix="mycelia enrol renew --ca operator/, then give the server the new roster.bin",
                who=who,
            )

    def _load(self, document: bytes, least_epoch: int) -> Roster:
        return Roster.load(document, self._keys.operator.key, now=self._now(), least_epoch=least_epoch)

    def _now(self) -> int:
        return int(self._wall())


def told(error: IdentityProblem) -> Problem:
    """A problem with an identity, as it travels."""
    sentence = error.found.removeprefix(f"{error.reason}: ")
    return Problem(Reason(error.reason.value), sentence, rule=error.rule, fix=error.fix, who=error.who)
