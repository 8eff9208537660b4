"""Threads beside the one that keeps the connection: pings are answered however long training takes."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import torch

__all__ = ["Stopped", "Token", "Worker", "looked_at"]

_T = TypeVar("_T")
_LATEST_S: Final = 3.0


class Stopped(BaseException):
    """The device is told to end, or nobody wants the work any more; it ends between two steps.

    It is no error of whatever was running, and passes by those who look for one.
    """


class Token:
    """Names a job, so that it can be given up."""

    def __init__(self) -> None:
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Nobody wants it any more."""
        self._given_up.set()

    @property
    def given_up(self) -> bool:
        """Whether nobody wants it any more."""
        return self._given_up.is_set()


class Worker:
    """One thread with one job at a time, in the order given; PyTorch has one thread in it.

    It does not keep a process alive: what a user's own function does cannot be ended between two steps.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._token: Token | None = None
        self._thread = threading.Thread(target=self._work, name=f"mycelia {name}", daemon=True)
        self._thread.start()

    async def run(self, job: Callable[[], _T], token: Token | None = None) -> _T:
        """What a job returns or raises.

        Args:
            job: called in the thread.
            token: by which it can be given up.

        Raises:
            Stopped: it was given up, or `stop` was called.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        future.add_done_callback(looked_at)

        def settle(error: BaseException | None, value: Any) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        def call() -> None:
            error, value = None, None
            self._token = token
            try:
                self.check()
                value = job()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop has ended, and nobody waits any more
                loop.call_soon_threadsafe(settle, error, value)

        self._jobs.put(call)
        return await future

    def check(self) -> None:
        """To be called by a job between two steps.

        Raises:
            Stopped: it was given up, or `stop` was called.
        """
        if self._stopping.is_set() or (self._token is not None and self._token.given_up):
            raise Stopped

    async def stop(self) -> None:
        """End the job between two steps, and wait for that, but not longer than a device may take to end."""
        if self._stopping.is_set():  # it was waited for
            return
        self._stopping.set()
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, _LATEST_S)

    def _work(self) -> None:
        torch.set_num_threads(1)
        while (job := self._jobs.get()) is not None:
            job()


def looked_at(future: asyncio.Future[Any]) -> None:
    """An error that nobody waits for any more is none to complain about."""
    if not future.cancelled():
        future.exception()
