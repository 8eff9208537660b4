"""Uvicorn inside an event loop that is not its own, with few connections and none that says nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from socket import socket
from typing import Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from mycelia.aggregator.deadlines import SHUTDOWN_S

__all__ = ["MOST_CONNECTIONS", "Listener"]

MOST_CONNECTIONS: Final = 128
_HEAD_S: Final = 10.0
"""In which a request has to be there."""
_MOST_HEAD: Final = 2**14  # bytes of a request


class _Connection(H11Protocol):
    """One connection; what is beyond the limit, or stays without a request, is closed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self.loop.call_later(_HEAD_S, self._look)

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy or self.timeout_keep_alive_task is not None:  # then uvicorn closes it
            self.loop.call_later(_HEAD_S, self._look)
        else:
            self.transport.close()


class Listener(uvicorn.Server):
    """A server that takes over no signals, and says when it is ready.

    Args:
        app: that answers.

    Attributes:
        ready: is set when connections are taken.
    """

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Connection,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="error",  # what readers do wrong is no news
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=round(SHUTDOWN_S / 5),
                h11_max_incomplete_event_size=_MOST_HEAD,
            )
        )
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the program's, not the page's."""
        yield
