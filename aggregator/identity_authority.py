"""The operator's folder: the key that signs the roster and all certificates, and what is done with it.

    operator.key   the operator's Ed25519 key, a secret
    operator.pub   its certificate, which every device and server pins
    roster.bin     the roster of the newest epoch, for the servers
    tokens.json    hashes of one-time tokens

Whoever holds the folder decides who takes part. Where a server enrols by token, it holds the folder; entries
it makes say `online`, and only keeping the folder away from every server makes `offline` worth something.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final, NamedTuple, Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from mycelia.aggregator.identity import IDENTITY_KEY, OPERATOR, TLS_CERTIFICATE, TLS_KEY
from mycelia.aggregator.identity_certificates import (
    client_certificate,
    operator_certificate,
    server_certificate,
)
from mycelia.aggregator.identity_tokens import TokenFile
from mycelia.engine.errors import ConfigError, DataError
from mycelia.privacy.secagg.certificates import (
    DAY,
    Certificate,
    IdentityProblem,
    IdentityReason,
    Operator,
    date,
    expired,
    server_uri,
    tls_sha256,
)
from mycelia.privacy.secagg.enrolment import Reply, Request
from mycelia.privacy.secagg.key_files import PUBLIC, SECRET, FolderLock, new_folder, read_public, write_file
from mycelia.privacy.secagg.keys import Identity, Random
from mycelia.privacy.secagg.private_keys import (
    certificate_pem,
    identity_pem,
    new_tls_key,
    read_identity,
    tls_pem,
)
from mycelia.privacy.secagg.roster import MAX_ROSTER_BYTES, ClientEntry, Issuer, Roster, ServerEntry

__all__ = ["CERTIFICATE_DAYS", "OPERATOR_DAYS", "ROSTER", "ROSTER_DAYS", "TOKENS", "Authority", "Issued"]

CERTIFICATE_DAYS: Final = 90
"""How long a certificate and its entry are valid, unless said otherwise."""
OPERATOR_DAYS: Final = 3650
"""How long an operator's key is valid."""
ROSTER_DAYS: Final = 90
"""How long a roster is valid; every new epoch begins anew."""
ROSTER: Final = "roster.bin"
"""The file in the folder that servers get a copy of."""
TOKENS: Final = "tokens.json"
_SKEW: Final = 3600  # certificates begin an hour ago, for clocks that are behind
_KEY: Final = "operator.key"
_KIND: Final = "an operator's"
_HOST: Final = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)


class Issued(NamedTuple):
    """What a device gets.

    Attributes:
        entry: in the roster.
        certificate: in DER.
    """

    entry: ClientEntry
    certificate: bytes


class Authority:
    """An operator's folder, open and locked; made by `create` or `open`, and let go by `close` or `with`.

    Every change of the roster is a new epoch, on the disk before the method returns.

    Attributes:
        folder: where it is.
        operator: what devices pin.
        roster: of the newest epoch.
        tokens: one-time tokens.
    """

    def __init__(
        self, folder: Path, lock: FolderLock, key: Identity, operator: Operator, roster: Roster
    ) -> None:
        self.folder, self._lock, self._key, self.operator, self.roster = folder, lock, key, operator, roster
        self.tokens = TokenFile(folder / TOKENS)

    @property
    def roster_path(self) -> Path:
        """The file that servers get a copy of."""
        return self.folder / ROSTER

    @property
    def document(self) -> bytes:
        """The roster with its signature, as servers and devices get it."""
        return self.roster.sign(self._key)

    @classmethod
    def create(cls, folder: Path, now: int, random: Random = os.urandom) -> Self:
        """A new operator with a roster of epoch 1, which lists nobody.

        Args:
            folder: where; there may be an empty folder.
            now: Unix time in seconds.
            random: where the key comes from.

        Raises:
            DataError: there is something already, or it cannot be written.
        """
        key = Identity.generate(random)
        pem = operator_certificate(key, now - _SKEW, now + OPERATOR_DAYS * DAY)
        roster = Roster(1, now + ROSTER_DAYS * DAY, (), ())
        files = {
            _KEY: (identity_pem(key), SECRET),
            OPERATOR: (pem, PUBLIC),
            ROSTER: (roster.sign(key), PUBLIC),
            TOKENS: (TokenFile.EMPTY, SECRET),
        }
        new_folder(folder, files)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The folder as it was left.

        Raises:
            DataError: it is no operator's folder, other users can read its key or write to it, another
                process has it, or its files do not belong together.
            SecureSumError: the roster was damaged.
        """
        if not (folder / _KEY).exists():
            raise DataError(
                "it is no operator's folder",
                rule=f"a folder with {_KEY}, {OPERATOR} and {ROSTER}",
                fix=f"mycelia enrol init --ca {folder}",
                who=str(folder),
            )
        lock = FolderLock.take(folder, _KIND)
        try:
            key = read_identity(folder / _KEY)
            operator = Operator.read(read_public(folder / OPERATOR), str(folder / OPERATOR))
            if operator.key != key.public:
                raise DataError(
                    f"{OPERATOR} is that of another operator than {_KEY}",
                    rule="the files of an operator's folder belong together",
                    fix="put back the file that was there",
                    who=str(folder),
                )
            document = read_public(folder / ROSTER, MAX_ROSTER_BYTES)
            roster = Roster.load(document, key.public, now=0)  # an expired one is what `refresh` is for
        except BaseException:
            lock.release()
            raise
        return cls(folder, lock, key, operator, roster)

    def close(self) -> None:
        """Let go of the folder; closing twice is harmless."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- servers ----------------------------------------------------------------------------------

    def add_server(
        self,
        name: str,
        out: Path,
        now: int,
        *,
        dns: Sequence[str] = (),
        addresses: Sequence[IPv4Address | IPv6Address] = (),
        days: int = CERTIFICATE_DAYS,
    ) -> ServerEntry:
        """Make the keys of a server, and list it.

        Args:
            name: of the server, in messages and its certificate.
            out: a new folder for its keys.
            now: Unix time in seconds.
            dns: host names that devices reach it by.
            addresses: IP addresses that devices reach it by.
            days: validity.

        Raises:
            ConfigError: no name to reach it by, or one that is none; a validity out of range.
            DataError: the name is taken or no part of a URI, or the folder is there already.
        """
        server_uri(name)
        if any(server.name == name for server in self.roster.servers):
            raise DataError(
                "a server of this name is enrolled",
                rule="every server has its own name",
                fix="name it otherwise; to make its certificate last longer: mycelia enrol renew --server",
                who=f"server {name}",
            )
        if not dns and not addresses:
            raise ConfigError(
                "a server without a host name or an address",
                rule="devices check the name they connect to",
                fix="give --dns or --ip",
                who=f"server {name}",
            )
        for host in dns:
            if not _HOST.fullmatch(host):
                raise ConfigError(
                    f"the host name {host!r}",
                    rule="letters, digits, dots and dashes, no wildcard; others in their xn-- form",
                    who="--dns",
                )
        tls, identity = new_tls_key(), Identity.generate()
        since, until = self._validity(now, days)
        public = tls.public_key()
        der = server_certificate(self._key, name, public, dns, addresses, since, until)
        entry = ServerEntry(name, identity.public, since, until, tls_sha256(public))
        following = self._next(now, servers=(*self.roster.servers, entry))
        files = {
            TLS_KEY: (tls_pem(tls), SECRET),
            TLS_CERTIFICATE: (certificate_pem(der), PUBLIC),
            IDENTITY_KEY: (identity_pem(identity), SECRET),
            OPERATOR: (self.operator.pem, PUBLIC),
        }
        new_folder(out, files)
        self._publish(following)
        return entry

    def renew_server(self, certificate: bytes, now: int, days: int = CERTIFICATE_DAYS) -> bytes:
        """A longer certificate for the same keys and names, expired or not.

        Args:
            certificate: the one it has, in DER.
            now: Unix time in seconds.
            days: validity from now.

        Returns:
            the new one, in DER.

        Raises:
            IdentityProblem: `BAD_HELLO` if it is not this operator's; `NOT_ENROLLED` if the roster does not
                list it.
        """
        held = Certificate.read(certificate, self.operator.key)
        entry = next((server for server in self.roster.servers if server.name == held.server), None)
        if entry is None or entry.tls_sha256 != held.tls_sha256:
            raise IdentityProblem(
                IdentityReason.NOT_ENROLLED,
                "the roster lists no server with this certificate",
                rule="the file tls.crt of a server's folder",
                fix="mycelia enrol list shows the servers; mycelia enrol server makes one",
                who=held.holder,
            )
        since, until = self._validity(now, days)
        parsed = x509.load_der_x509_certificate(certificate)
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        public = parsed.public_key()
        if not isinstance(public, EllipticCurvePublicKey):
            raise TypeError("the certificate was checked to have a P-256 key")
        dns = names.get_values_for_type(x509.DNSName)
        addresses = [
            address
            for address in names.get_values_for_type(x509.IPAddress)
            if isinstance(address, IPv4Address | IPv6Address)
        ]
        der = server_certificate(self._key, held.server, public, dns, addresses, since, until)
        longer = replace(entry, not_before=min(since, entry.not_before), not_after=until)
        servers = tuple(longer if server is entry else server for server in self.roster.servers)
        self._publish(self._next(now, servers=servers))
        return der

    # --- devices ----------------------------------------------------------------------------------

    def issue(
        self,
        request: Request,
        now: int,
        *,
        issuer: Issuer = Issuer.OFFLINE,
        name: str | None = None,
        groups: Sequence[str] = (),
        days: int = CERTIFICATE_DAYS,
    ) -> Issued:
        """Enrol the device that asks, under an id that nobody had; asked again, the answer is the same.

        Args:
            request: of the device.
            now: Unix time in seconds.
            issuer: who decides.
            name: for people, in place of the one that the device asks for.
            groups: that it belongs to.
            days: validity.

        Raises:
            IdentityProblem: `FRAME` or `BAD_HELLO` for the request; `REVOKED` if its keys are.
        """
        request.check()
        if request.renews:
            raise IdentityProblem(
                IdentityReason.FRAME,
                "it is a renewal",
                rule="issue is for devices without an id",
                fix="mycelia enrol renew",
                who=f"client {request.renews}",
            )
        known = self._known(request)
        if known is not None:
            return self._issued(known, request)
        ids = [entry.client for entry in self.roster.clients[-1:]] + list(self.roster.revoked[-1:])
        since, until = self._validity(now, days)
        entry = ClientEntry(
            max(ids, default=0) + 1,
            request.identity_key,
            issuer,
            since,
            until,
            request.name if name is None else name,
            request.tls_sha256,
            tuple(groups),
        )
        self._publish(self._next(now, clients=(*self.roster.clients, entry)))
        return self._issued(entry, request)

    def renew(
        self, request: Request, now: int, *, issuer: Issuer = Issuer.OFFLINE, days: int = CERTIFICATE_DAYS
    ) -> Issued:
        """List the new keys of a device beside those it has; asked again, the answer is the same.

        Args:
            request: signed with the identity key of before.
            now: Unix time in seconds.
            issuer: who decides; a server renews no keys that have expired.
            days: validity from now.

        Raises:
            IdentityProblem: `FRAME` or `BAD_HELLO` for the request; `NOT_ENROLLED`; `REVOKED`;
                `CERT_EXPIRED`.
        """
        request.check()
        who = f"client {request.renews}"
        if not request.renews:
            raise IdentityProblem(
                IdentityReason.FRAME,
                "it is no renewal",
                rule="a renewal is signed with the keys of before",
                fix="mycelia enrol issue, for a new device",
                who="enrolment",
            )
        self._check_not_revoked(request.renews)
        entries = self.roster.listed(request.renews)
        if not entries:
            raise IdentityProblem(
                IdentityReason.NOT_ENROLLED, "no such client", rule="enrolled with this operator", who=who
            )
        known = self._known(request)
        if known is not None:
            return self._issued(known, request)
        newest = entries[-1]
        request.check_renewal(newest.identity_key)
        if issuer is Issuer.ONLINE and now > newest.not_after:
            raise expired(
                f"its keys expired on {date(newest.not_after)}",
                "mycelia enrol renew --ca operator/ request.bin, where the operator's key lies",
                who,
            )
        since, until = self._validity(now, days)
        entry = replace(
            newest,
            identity_key=request.identity_key,
            issuer=issuer,
            not_before=since,
            not_after=until,
            tls_sha256=request.tls_sha256,
        )
        clients = [
            other for other in self.roster.clients if other.client != request.renews or other is newest
        ]
        clients.insert(clients.index(newest) + 1, entry)
        self._publish(self._next(now, clients=clients))
        return self._issued(entry, request)

    def reply(self, issued: Issued) -> bytes:
        """What `issue` and `renew` gave as a file for the device, signed."""
        entry, certificate = issued
        return Reply(entry.client, entry.identity_key, certificate, self.roster.epoch).sign(self._key)

    def settle(self, client: int, identity_key: bytes, now: int) -> bool:
        """Drop the older keys of a device that said Hello with these.

        Args:
            client: its id.
            identity_key: of the entry that it was let in by.
            now: Unix time in seconds.

        Returns:
            whether there were any, and so a new epoch.
        """
        keys = [entry.identity_key for entry in self.roster.listed(client)]
        older = keys[: keys.index(identity_key)] if identity_key in keys else []
        if older:
            clients = [entry for entry in self.roster.clients if entry.identity_key not in older]
            self._publish(self._next(now, clients=clients))
        return bool(older)

    def revoke(self, ids: Collection[int], now: int) -> tuple[int, ...]:
        """Refuse clients for ever, from a new epoch on.

        Args:
            ids: of the clients.
            now: Unix time in seconds.

        Returns:
            those that were not revoked before; with none, there is no new epoch.

        Raises:
            DataError: an id that nobody had; then nothing is revoked.
        """
        given = {entry.client for entry in self.roster.clients}
        unknown = sorted(set(ids) - given - set(self.roster.revoked))
        if unknown:
            raise DataError(
                f"no client has the id {', '.join(map(str, unknown))}",
                rule="an id that was given to a client",
                fix="mycelia enrol list shows them",
                who=str(self.folder),
            )
        new = tuple(sorted(set(ids) - set(self.roster.revoked)))
        if new:
            self._publish(self._next(now, revoked=sorted((*self.roster.revoked, *new))))
        return new

    def refresh(self, now: int) -> None:
        """Sign a new epoch, which lasts longer."""
        self._publish(self._next(now))

    # --- inside -----------------------------------------------------------------------------------

    def _known(self, request: Request) -> ClientEntry | None:
        """The entry of the very keys that are asked about."""
        tls = request.tls_sha256
        for entry in self.roster.clients:
            same = (entry.identity_key == request.identity_key) + (entry.tls_sha256 == tls)
            if not same:
                continue
            self._check_not_revoked(entry.client)
            if same == 1 or (request.renews and request.renews != entry.client):
                raise IdentityProblem(
                    IdentityReason.BAD_HELLO,
                    "one of the keys is enrolled already",
                    rule="every key is new, and belongs to one client",
                    fix="make a new identity folder: mycelia enrol request",
                    who="enrolment",
                )
            return entry
        return None

    def _check_not_revoked(self, client: int) -> None:
        if self.roster.is_revoked(client):
            raise IdentityProblem(
                IdentityReason.REVOKED,
                "its id is revoked",
                rule="a revoked id, and its keys, never take part again",
                fix="a device that is to come back makes a new identity folder: mycelia enrol request",
                who=f"client {client}",
            )

    def _issued(self, entry: ClientEntry, request: Request) -> Issued:
        der = client_certificate(self._key, entry.client, request.tls_key, entry.not_before, entry.not_after)
        return Issued(entry, der)

    def _validity(self, now: int, days: int) -> tuple[int, int]:
        until = now + days * DAY
        if days < 1 or until > self.operator.not_after:
            raise ConfigError(
                f"a validity of {days} days",
                rule=f"at least one, and not beyond the operator's key: {date(self.operator.not_after)}",
                fix="give fewer --days; near its end, make a new operator: mycelia enrol init",
                who="--days",
            )
        return now - _SKEW, until

    def _next(
        self,
        now: int,
        *,
        clients: Iterable[ClientEntry] | None = None,
        servers: tuple[ServerEntry, ...] | None = None,
        revoked: Iterable[int] | None = None,
    ) -> Roster:
        """The next epoch, in which keys that have expired no longer stand beside those that replaced them."""
        listed = list(self.roster.clients if clients is None else clients)
        newest = {entry.client: entry for entry in listed}
        return Roster(
            self.roster.epoch + 1,
            min(now + ROSTER_DAYS * DAY, self.operator.not_after),
            tuple(entry for entry in listed if entry is newest[entry.client] or entry.not_after >= now),
            self.roster.servers if servers is None else servers,
            self.roster.revoked if revoked is None else tuple(revoked),
        )

    def _publish(self, roster: Roster) -> None:
        write_file(self.roster_path, roster.sign(self._key), PUBLIC, replace=True)
        self.roster = roster
