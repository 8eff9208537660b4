"""Why a server cannot be reached, in plain words: gRPC says little more than "unavailable"."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Final

from mycelia.client.backoff import Then, TransportError
from mycelia.privacy.secagg.certificates import Certificate, IdentityProblem, Operator, date

__all__ = ["diagnose"]

_PROBE_S: Final = 5.0
_DISTURBED: Final = ("ALERT", "MAC", "DECRYPTION", "SIGNATURE")  # whoever says or does that speaks TLS
_EXPIRED, _NOT_YET, _HOSTNAME, _ADDRESS = 10, 9, 62, 64  # X509_V_ERR_…


async def diagnose(host: str, port: int, operator: Operator, *, insecure: bool, said: str) -> TransportError:
    """Look once more what answers there.

    Args:
        host: name or address.
        port: of it.
        operator: pinned.
        insecure: whether it should be plain text.
        said: what gRPC said.

    Returns:
        what to tell, and what to do.
    """
    who = f"server {host}:{port}"
    try:
        async with asyncio.timeout(_PROBE_S):
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError as error:
                return _unreachable(error, host, port, who)
            await _closed(writer)
            return await _look(host, port, operator, insecure=insecure, said=said, who=who)
    except TimeoutError:
        return TransportError(
            Then.RETRY,
            "it does not answer",
            rule=f"something at {host} listens on port {port}",
            fix="look at the network, the firewall between, and the address in server = […]",
            who=who,
        )


async def _look(
    host: str, port: int, operator: Operator, *, insecure: bool, said: str, who: str
) -> TransportError:
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    try:
        certificate = await _handshake(host, port, trusting)
    except OSError as error:  # ssl.SSLError is one
        if insecure or _broke(error):
            return _ended(said, who)
        return TransportError(
            Then.OPERATOR,
            "it does not speak TLS",
            rule="the server speaks TLS 1.3 on this port",
            fix="look at the port in server = […]: 8443 unless the server says otherwise. A server that was"
            " started with --insecure wants --insecure here, too",
            who=who,
        )
    if insecure:
        return TransportError(
            Then.OPERATOR,
            "it speaks TLS, and this device was started with --insecure",
            rule="both sides, or none",
            fix="start this device without --insecure",
            who=who,
        )
    strict = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    strict.load_verify_locations(cadata=operator.pem.decode())
    try:
        await _handshake(host, port, strict)
    except ssl.SSLCertVerificationError as error:
        return _bad_certificate(error, certificate, operator, host, who)
    except OSError:
        pass
    return _ended(said, who)


def _broke(error: OSError) -> bool:
    """Whether the connection ended, or was disturbed: then nothing is known of who is at the other end."""
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return True
    return any(word in (error.reason or "") for word in _DISTURBED)


async def _handshake(host: str, port: int, context: ssl.SSLContext) -> bytes:
    """Connect with TLS; the server's certificate, in DER."""
    _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=host)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    await _closed(writer)
    return shown or b""


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):  # the other side was faster
        await writer.wait_closed()


def _unreachable(error: OSError, host: str, port: int, who: str) -> TransportError:
    if isinstance(error, socket.gaierror):
        unknown = error.errno == socket.EAI_NONAME
        return TransportError(
            Then.OPERATOR if unknown else Then.RETRY,
            f"nobody knows the name {host!r}",
            rule="the name or the address of a server",
            fix="look at the spelling in server = […], and whether this machine is online",
            who=who,
        )
    refused = isinstance(error, ConnectionRefusedError)
    found = (
        f"nothing listens on port {port} of {host}" if refused else f"it cannot be reached ({error.strerror})"
    )
    return TransportError(
        Then.RETRY,
        found,
        rule="a server is running there",
        fix="is mycelia serve running? are address and port those that it prints?",
        who=who,
    )


def _bad_certificate(
    error: ssl.SSLCertVerificationError, der: bytes, operator: Operator, host: str, who: str
) -> TransportError:
    try:
        shown = Certificate.read(der, operator.key)
    except IdentityProblem:
        return TransportError(
            Then.OPERATOR,
            "its certificate is not signed by the operator of this device",
            rule="signed with the operator's key that was pinned at enrolment",
            fix="is the address that of this federation's server? if so, ask the operator",
            who=who,
        )
    if error.verify_code == _EXPIRED:
        return TransportError(
            Then.OPERATOR,
            f"its certificate expired on {date(shown.not_after)}",
            rule="expired certificates are refused",
            fix="for the operator: mycelia enrol renew --ca operator/ --server tls.crt",
            who=who,
        )
    if error.verify_code == _NOT_YET:
        return TransportError(
            Then.OPERATOR,
            f"its certificate is valid from {date(shown.not_before)}",
            rule="a certificate is valid between its dates",
            fix="set the clock of this machine",
            who=who,
        )
    if error.verify_code in (_HOSTNAME, _ADDRESS):
        return TransportError(
            Then.OPERATOR,
            f"its certificate ({shown.holder}) is not for the name {host}",
            rule="the name in server = […] is one that the server was enrolled with",
            fix="connect by that name; or enrol the server with --dns or --ip for this one",
            who=who,
        )
    return TransportError(
        Then.OPERATOR,
        f"its certificate is refused: {error.verify_message}",
        rule="a certificate of the operator",
        fix="ask the operator",
        who=who,
    )


def _ended(said: str, who: str) -> TransportError:
    return TransportError(
        Then.RETRY,
        f"the connection broke ({said})",
        rule="the server takes this device's certificate, and is not too busy",
        fix="the server's log says more if this stays",
        who=who,
    )
