"""Boards as a server fills them, and a reader without a browser."""

from __future__ import annotations

import asyncio
import http.client
import math
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from mycelia.aggregator.status import Board, StatusServer
from mycelia.aggregator.wire.problems import Problem, Reason

DAY: Final = 86_400
PATIENCE_S: Final = 120.0


class Clock:
    """Both clocks of a board, set by hand."""

    def __init__(self) -> None:
        self.wall, self.monotonic = 1_790_000_000.0, 5_000.0

    def board(self) -> Board:
        return Board(wall=lambda: self.wall, clock=lambda: self.monotonic)

    def forward(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


def run(work: Coroutine[Any, Any, None]) -> None:
    """A test in an event loop; one that hangs fails."""

    async def patiently() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await work

    asyncio.run(patiently())


@asynccontextmanager
async def serving(
    board: Board, listen: str = "127.0.0.1:0", token_file: Path | None = None
) -> AsyncIterator[int]:
    """A status server; gives its port."""
    server = StatusServer(board, listen, token_file)
    port = await server.start()
    try:
        yield port
    finally:
        await server.stop()


async def ask(
    port: int, path: str = "/", method: str = "GET", headers: Mapping[str, str] | None = None
) -> Answer:
    """One request."""

    def blocking() -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request(method, path, headers=dict(headers or {}))
            answer = connection.getresponse()
            said = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, said, answer.read())
        finally:
            connection.close()

    return await asyncio.to_thread(blocking)


def start(board: Board, run: str = "study-12", *, secure: bool = False, rounds: int = 200) -> None:
    """A run begins."""
    board.run_started(
        run,
        purpose="a study",
        algorithm="fedavg",
        model="ward.models:unet",
        rounds=rounds,
        cohort=4,
        secure=secure,
        privacy_unit="client",
    )


def play(board: Board, run: str, rounds: int, clients: list[int], *, fails: tuple[int, ...] = ()) -> None:
    """Some rounds, in each of which the last client drops out."""
    for number in range(1, rounds + 1):
        for phase in ("select", "configure", "train"):
            board.phase(run, number, 1, phase, None)
        board.asked(run, clients)
        for client in clients[:-1]:
            board.outcome(
                run, number, client, "ACCEPTED", "train", bytes_up=1000, bytes_down=2000, seconds=1.5
            )
        hint = "no chunk in 30 s; connect again"
        board.outcome(run, number, clients[-1], "DROPPED", "train", "STALL", hint, 10, 2000, 30.0)
        failed = number in fails
        board.round_ended(
            run,
            number,
            result="failed" if failed else "published",
            reason="QUORUM: 3 of 4 needed updates" if failed else "",
            seconds=3.0,
            survivors=0 if failed else len(clients) - 1,
            dropped={"train": 1},
            metrics={"loss": 2 / number},
            bytes_up=1000 * len(clients),
            bytes_down=2000 * len(clients),
        )
        if not failed:
            board.evaluation(run, number, {"accuracy": 1 - math.exp(-number / 5), "loss": 1 / number})


def full(board: Board, now: float) -> None:
    """Two runs, 150 devices, a failed round, everything that a page shows."""
    board.server("agg-1", "0.0.0.0:8443", "0.1.0", insecure=True)
    board.expiries([("operator", int(now + 700 * DAY)), ("client 17", int(now + 3 * DAY))])
    for client in range(1, 151):
        board.connected(client, f"ward {client}")
    start(board, "warm-up", rounds=3)
    play(board, "warm-up", 3, [1, 2, 3, 4])
    board.finished("warm-up", "9f" * 32, "/srv/runs/warm-up")
    start(board, "study-12", secure=True)
    play(board, "study-12", 12, list(range(50, 90)), fails=(7,))
    board.privacy("study-12", 1.25, 1e-6, 4.0, "client")
    board.disconnected(8, Problem(Reason.REVOKED, "its id is revoked in the roster of epoch 5"))
    board.refused("REVOKED")
    board.traffic(10_000_000, 20_000_000)
    board.spool(4096, 2)
