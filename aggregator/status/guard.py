"""Who may read the page: the right host name, a method that only reads, and the token where there is one."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mycelia.aggregator.wire.channel import is_loopback
from mycelia.engine.errors import DataError
from mycelia.privacy.secagg.key_files import read_secret

__all__ = ["SAFE_HEADERS", "Guard", "read_token"]

_MIN_TOKEN: Final = 16
SAFE_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Sent with every answer."""
_HEADERS: Final = [(name.encode(), value.encode()) for name, value in SAFE_HEADERS.items()]


def read_token(path: Path) -> bytes:
    """The token that readers must have.

    Args:
        path: a file of mode 0600 with the token; spaces and line ends around it do not count.

    Raises:
        DataError: the file is missing or open to others, or what is in it is no token.
    """
    token = read_secret(path).strip()
    if len(token) < _MIN_TOKEN or not token.isascii() or not token.decode("ascii").isprintable():
        raise DataError(
            "no token for the status page is in it",
            rule=f"{_MIN_TOKEN} printable ASCII characters or more",
            fix=f"(umask 077; openssl rand -hex 32 > {path})",
            who=str(path),
        )
    return token


class Guard:
    """Stands before everything else.

    Args:
        app: what is guarded.
        host: name or address that is bound.
        token: that a reader must have; None for no token.
    """

    def __init__(self, app: ASGIApp, host: str, token: bytes | None) -> None:
        self._app, self._token = app, token
        self._anywhere = host in ("0.0.0.0", "::")
        self._names = {host.lower()}
        if is_loopback(host):
            self._names |= {"127.0.0.1", "::1", "localhost"}
        elif self._anywhere:
            self._names |= {socket.gethostname().lower(), "localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers itself, or lets the request through."""
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *_HEADERS]}
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not self._is_mine(hosts[0].decode("latin-1")):
            # A page of another site whose name was pointed here must not read this one.
            return PlainTextResponse("this server has another name\n", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("read-only\n", 405, {"allow": "GET, HEAD"})
        if self._token is not None and not self._has_token(scope["headers"]):
            ask = {"www-authenticate": 'Basic realm="Mycelia", charset="UTF-8"'}
            return PlainTextResponse("the token is the password; the user name does not matter\n", 401, ask)
        return None

    def _is_mine(self, host: str) -> bool:
        """Whatever the port: a tunnel has another one."""
        bare = host.lower()
        if bare.startswith("["):
            bare = bare[1:].partition("]")[0]
        elif bare.count(":") <= 1:
            bare = bare.partition(":")[0]
        if bare in self._names:
            return True
        if not self._anywhere:
            return False
        try:
            ipaddress.ip_address(bare)
        except ValueError:
            return False
        return True  # nobody can point an address elsewhere

    def _has_token(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1 or self._token is None:
            return False
        scheme, _, said = given[0].partition(b" ")
        said = said.strip()
        if scheme.lower() == b"basic":
            try:
                said = base64.b64decode(said, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(said, self._token)
