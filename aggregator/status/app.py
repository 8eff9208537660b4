"""The routes of the status page."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mycelia.aggregator.status import metrics
from mycelia.aggregator.status.board import Board
from mycelia.aggregator.status.guard import Guard
from mycelia.aggregator.status.view import View
from mycelia.engine import plain_json

__all__ = ["MOST_STREAMS", "make_app"]

MOST_STREAMS: Final = 32
"""Live pages at a time."""
_PACE_S: Final = 0.5
"""The shortest time between two events of a stream, however much happens."""
_ALIVE_S: Final = 15.0
"""The longest time without a sign of life on a stream."""


def make_app(board: Board, closing: asyncio.Event, host: str, token: bytes | None) -> ASGIApp:
    """The page as an ASGI application.

    Args:
        board: that is shown.
        closing: is set when the server ends; streams end with it.
        host: name or address that is bound.
        token: that a reader must have; None for no token.
    """
    return Guard(_Pages(board, closing).app, host, token)


class _Pages:
    def __init__(self, board: Board, closing: asyncio.Event) -> None:
        self._board, self._closing = board, closing
        self._view, self._metrics = View(board), metrics.registry(board)
        self._streams = 0
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/status.css", self._css),
                Route("/status.js", self._js),
                Route("/events", self._events),
                Route("/api/status", self._json),
                Route("/metrics", self._exposition),
                Route("/healthz", self._health),
            ]
        )

    async def _page(self, request: Request) -> Response:
        number = _number(request)
        return Response(self._view.page(number), media_type="text/html") if number else _no_page()

    async def _css(self, _: Request) -> Response:
        return Response(self._view.files["status.css"], media_type="text/css")

    async def _js(self, _: Request) -> Response:
        return Response(self._view.files["status.js"], media_type="text/javascript")

    async def _json(self, request: Request) -> Response:
        number = _number(request)
        if not number:
            return _no_page()
        return Response(plain_json.dumps(self._board.snapshot(number)), media_type="application/json")

    async def _exposition(self, request: Request) -> Response:
        body, content_type = metrics.exposition(self._metrics, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def _health(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _events(self, request: Request) -> Response:
        number = _number(request)
        if not number:
            return _no_page()
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self._streams >= MOST_STREAMS:
            return PlainTextResponse("too many live pages\n", 503, {"retry-after": "5"})
        known = request.headers.get("last-event-id") or request.query_params.get("last", "")
        return _EventStream(self, number, self._view.after(known))

    async def stream(self, number: int, after: int, receive: Receive, send: Send) -> None:
        """Send events until the reader goes, or the server ends.

        Args:
            number: the page of devices.
            after: the version that the reader has; -1 for none.
            receive: says when it goes.
            send: to it.
        """
        self._streams += 1
        closing = asyncio.create_task(self._closing.wait())
        pump = asyncio.create_task(self._pump(number, after, closing, send))
        tasks: list[asyncio.Task[Any]] = [closing, pump, asyncio.create_task(_gone(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams -= 1
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(ended[1], Exception):
            raise ended[1]
        if self._closing.is_set():
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, number: int, after: int, closing: asyncio.Task[Any], send: Send) -> None:
        await send(_chunk("retry: 1000\n\n"))
        while True:
            rendered = self._view.parts(number)
            news, after = rendered.news(after), rendered.version
            if news:
                data = {
                    "now": self._board.now(),
                    "build": self._view.build,
                    "order": list(rendered.parts),
                    "parts": news,
                }
                await send(_chunk(f"id: {self._view.event_id(after)}\ndata: {plain_json.dumps(data)}\n\n"))
            await asyncio.wait([closing], timeout=_PACE_S)
            while await self._board.changed(after, _ALIVE_S) <= after:
                await send(_chunk(": nothing new\n\n"))


class _EventStream(Response):
    """An answer that goes on and on."""

    media_type = "text/event-stream"

    def __init__(self, pages: _Pages, number: int, after: int) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._pages, self._number, self._after = pages, number, after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._pages.stream(self._number, self._after, receive, send)


def _chunk(text: str) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _number(request: Request) -> int:
    """The page of devices that is asked for; 0 if it is no number."""
    said = request.query_params.get("page", "1")
    return int(said) if said.isascii() and said.isdigit() and len(said) <= 6 else 0


def _no_page() -> Response:
    return PlainTextResponse("page is a number from 1\n", 400)
