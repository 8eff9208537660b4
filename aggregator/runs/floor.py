"""Who is here, and what each device is busy with; the runs of a server share it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Floor"]


class Floor:
    """The devices that are connected.

    Attributes:
        here: ids of those that are welcome now.
    """

    def __init__(self) -> None:
        self.here: set[int] = set()
        self._busy: dict[int, str] = {}
        self._moved = asyncio.Event()

    def came(self, client: int) -> None:
        """A device is here."""
        self.here.add(client)
        self._moved.set()

    def left(self, client: int) -> None:
        """A device has gone; what it was busy with goes on."""
        self.here.discard(client)
        self._moved.set()

    def take(self, client: int, run: str) -> None:
        """A device works for a run from now on."""
        self._busy[client] = run

    def free(self, client: int, run: str) -> None:
        """A device has done its work for a run."""
        if self._busy.get(client) == run:
            del self._busy[client]
            self._moved.set()

    def free_all(self, run: str) -> None:
        """Nobody works for a run any more."""
        self._busy = {client: other for client, other in self._busy.items() if other != run}
        self._moved.set()

    def idle(self, run: str) -> set[int]:
        """Those who are here and work for no other run."""
        return {client for client in self.here if self._busy.get(client, run) == run}

    async def wait_until(self, holds: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait for a condition that depends on who is here.

        Args:
            holds: the condition.
            seconds: after which it is given up; None: never.

        Returns:
            whether it holds.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not holds():
                    self._moved.clear()
                    await self._moved.wait()
        return holds()

    def stir(self) -> None:
        """Whoever waits looks again."""
        self._moved.set()
