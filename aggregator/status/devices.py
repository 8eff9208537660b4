"""Devices as the board remembers them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["MOST_DEVICES", "PER_PAGE", "Device", "Devices"]

PER_PAGE: Final = 100
MOST_DEVICES: Final = 2**15
"""As many as a roster lists; beyond that those that are away longest are forgotten."""


@dataclass(slots=True)
class Device:
    """One device, as far as the server saw it since it started.

    Attributes:
        client: its id.
        name: for people, as the roster has it.
        connected: whether its stream is open.
        since: Unix time at which that began.
        run: that it was asked in last.
        round: of that run, from 1.
        status: a `Fate`; "asked" while it is under way; "" if it was never asked.
        phase: in which that was settled.
        bytes_up: from the device, in that round.
        bytes_down: to the device, in that round.
        seconds: from the task to the outcome.
        error: the last thing that went wrong with it.
        error_at: Unix time of that; 0 if there was none.
    """

    client: int
    name: str = ""
    connected: bool = False
    since: float = 0.0
    run: str = ""
    round: int = 0
    status: str = ""
    phase: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    error: str = ""
    error_at: float = 0.0


class Devices:
    """All of them, by id.

    Args:
        most: that are remembered.
    """

    def __init__(self, most: int = MOST_DEVICES) -> None:
        self._most = most
        self._all: dict[int, Device] = {}
        self._order: list[int] | None = None
        self.connected = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Device]:
        return iter(self._all.values())

    def get(self, client: int) -> Device:
        """A device, remembered from now on."""
        device = self._all.get(client)
        if device is None:
            if len(self._all) >= self._most:
                self._forget()
            device = self._all[client] = Device(client)
            self._order = None
        return device

    def here(self, client: int, name: str, now: float) -> None:
        """Its stream is open."""
        device = self.get(client)
        self.connected += not device.connected
        device.name, device.connected, device.since = name, True, now

    def away(self, client: int, now: float) -> Device:
        """Its stream has ended."""
        device = self.get(client)
        self.connected -= device.connected
        device.connected, device.since = False, now
        return device

    def page(self, number: int) -> dict[str, Any]:
        """A page of devices in the order of their ids; a number beyond the last page gives the last."""
        if self._order is None:
            self._order = sorted(self._all)
        pages = max(1, -(-len(self._order) // PER_PAGE))
        number = min(max(number, 1), pages)
        shown = self._order[(number - 1) * PER_PAGE : number * PER_PAGE]
        return {
            "total": len(self._all),
            "connected": self.connected,
            "page": number,
            "pages": pages,
            "rows": [asdict(self._all[client]) for client in shown],
        }

    def _forget(self) -> None:
        """One in eight goes, so that this is rarely done: those that are away, longest first."""
        oldest = sorted(self._all.values(), key=lambda device: (device.connected, device.since))
        for device in oldest[: max(1, self._most // 8)]:
            self.connected -= device.connected
            del self._all[device.client]
        self._order = None
