"""The status page's own small server, beside the one for devices."""

from __future__ import annotations

import asyncio
import logging
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mycelia.aggregator.status.board import Board
from mycelia.aggregator.wire.channel import is_loopback, split_address
from mycelia.engine.errors import ConfigError

if TYPE_CHECKING:
    from mycelia.aggregator.status.connections import Listener

__all__ = ["StatusServer", "available"]

_log = logging.getLogger(__name__)
_NEEDS: Final = ("starlette", "uvicorn", "prometheus_client")


def available() -> bool:
    """Whether the packages of the extra `status` are installed."""
    return all(find_spec(name) is not None for name in _NEEDS)


class StatusServer:
    """A board over HTTP, for reading only: `/`, `/events`, `/api/status`, `/metrics`, `/healthz`.

    Args:
        board: that is shown.
        listen: `host:port`; port 0 takes a free one.
        token_file: with the token that readers need, mode 0600; they send it as `Authorization: Bearer`, or
            as the password that a browser asks for. Needed for an address that is not a loopback one.

    Raises:
        ConfigError: the extra `status` is not installed; the address is none; it is not a loopback one, and
            there is no token.
        DataError: the token file is missing, open to others, or holds no token.
    """

    def __init__(self, board: Board, listen: str = "127.0.0.1:8445", token_file: Path | None = None) -> None:
        if not available():
            raise ConfigError(
                "the status page needs starlette, uvicorn and prometheus-client",
                rule="they come with the extra `status`",
                fix="pip install 'mycelia[status]', or leave the status page out",
                who="status",
            )
        from mycelia.aggregator.status.guard import read_token

        self._board, self._listen = board, listen
        self._host, self._port = split_address(listen)
        if token_file is None and not is_loopback(self._host):
            raise ConfigError(
                f"{listen} can be reached from other machines, and anybody could read the page",
                rule="an address that is not a loopback one needs a token",
                fix="give --status-token-file, or listen on 127.0.0.1 and come through ssh -L",
                who="status.listen",
            )
        self._token = None if token_file is None else read_token(token_file)
        self._closing = asyncio.Event()
        self._listener: Listener | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Take connections.

        Returns:
            The port.

        Raises:
            ConfigError: the address cannot be bound.
        """
        from mycelia.aggregator.status.app import make_app
        from mycelia.aggregator.status.connections import Listener

        app = make_app(self._board, self._closing, self._host, self._token)
        bound = self._bind()
        if not is_loopback(self._host):
            _log.warning("the status page at %s has no TLS: put it behind a proxy that has", self._listen)
        self._listener = Listener(app)
        self._serving = asyncio.create_task(self._listener.serve([bound]))
        ready = asyncio.create_task(self._listener.ready.wait())
        await asyncio.wait([self._serving, ready], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._serving.done():
            bound.close()
            self._serving.result()
        return int(bound.getsockname()[1])

    async def stop(self) -> None:
        """End; live pages come again when the server does."""
        self._closing.set()
        if self._listener is None or self._serving is None:
            return
        self._listener.should_exit = True
        await asyncio.wait([self._serving])

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            return socket.create_server((self._host, self._port), family=family)
        except OSError as error:
            raise ConfigError(
                f"{self._listen} cannot be bound: {error.strerror or error}",
                rule="an address of this machine, and a port that nobody uses",
                fix="end the other process, or let the status page listen on another port",
                who="status.listen",
            ) from error
