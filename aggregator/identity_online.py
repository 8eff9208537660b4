"""What a server answers that holds the operator's folder: enrolment by token, and renewals on the stream."""

from __future__ import annotations

from pathlib import Path

from mycelia.aggregator.identity_authority import CERTIFICATE_DAYS, Authority
from mycelia.aggregator.identity_tokens import TokenTries
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import MAX_CHUNK
from mycelia.privacy.secagg.enrolment import Request
from mycelia.privacy.secagg.private_keys import certificate_pem
from mycelia.privacy.secagg.roster import Issuer

__all__ = ["issue_by_token", "renew_on_stream"]


def issue_by_token(
    folder: Path,
    asked: pb.EnrolRequest,
    *,
    tries: TokenTries,
    address: str,
    now: int,
    clock: float,
    days: int = CERTIFICATE_DAYS,
) -> pb.EnrolReply:
    """Answer what came to the enrolment port; the entry says that the server made it.

    Args:
        folder: the operator's, which the server then holds.
        asked: as decoded, within its limits.
        tries: shared by all that come to this port.
        address: where it comes from.
        now: Unix time in seconds.
        clock: seconds of a monotonic clock.
        days: validity of the certificate.

    Raises:
        IdentityProblem: `RATE`, `FRAME`, `BAD_TOKEN`, `BAD_HELLO` or `REVOKED`.
        DataError: the folder cannot be used, or another process is using it.
    """
    tries.check(address, clock)
    request = Request(0, asked.request, asked.identity_key, asked.name, asked.proof, b"")
    request.check()  # a request that is none uses no token up
    with Authority.open(folder) as authority:
        authority.tokens.use(asked.token, request.encode(), now)
        entry, certificate = authority.issue(request, now, issuer=Issuer.ONLINE, days=days)
        roster, document = authority.roster, authority.document
        return pb.EnrolReply(
            client=entry.client,
            certificate=certificate_pem(certificate),
            authority=authority.operator.pem,
            roster_epoch=roster.epoch,
            roster_sha256=roster.sha256,
            roster=document if len(document) <= MAX_CHUNK else b"",
        )


def renew_on_stream(
    folder: Path, client: int, asked: pb.Renew, *, now: int, days: int = CERTIFICATE_DAYS
) -> pb.Renewed:
    """Answer a renewal on the stream of a device; the entry says that the server made it.

    Args:
        folder: the operator's, which the server then holds.
        client: whose stream it is.
        asked: as decoded, within its limits.
        now: Unix time in seconds.
        days: validity of the certificate.

    Raises:
        IdentityProblem: see `Authority.renew`.
        DataError: the folder cannot be used, or another process is using it.
    """
    request = Request(client, asked.request, asked.identity_key, "", asked.proof, asked.signature)
    with Authority.open(folder) as authority:
        _, certificate = authority.renew(request, now, issuer=Issuer.ONLINE, days=days)
        roster, document = authority.roster, authority.document
        return pb.Renewed(
            certificate=certificate_pem(certificate),
            roster_epoch=roster.epoch,
            roster_sha256=roster.sha256,
            roster=document if len(document) <= MAX_CHUNK else b"",
        )
