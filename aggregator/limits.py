"""How much one device and one address may ask of the server: no I/O, the clock is an argument."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Final

from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.engine.errors import ConfigError

__all__ = ["Gate", "Limits", "Rates", "network"]

_REMEMBERED: Final = 2**16
"""Addresses, or devices, whose use is remembered; the one that came longest ago is forgotten first."""


@dataclass(frozen=True)
class Limits:
    """What is allowed; all above 0.

    Chunks that were asked for, and nothing else, are free: the credit for them is the limit.

    Attributes:
        streams: at a time, of all devices.
        handshakes: in any second, of all devices.
        address_streams: at a time, from one address.
        address_handshakes: a second, from one address; ten times as many at once.
        address_failures: Hellos a minute that fail, from one address; then no stream is opened for it.
        frames: a second, of one device; ten times as many at once.
        frame_bytes: a second, of one device; 16 times as many at once.
    """

    streams: int = 4096
    handshakes: float = 200.0
    address_streams: int = 1024
    address_handshakes: float = 50.0
    address_failures: float = 30.0
    frames: float = 100.0
    frame_bytes: float = 2.0**21

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{item.name} is {value}", rule="above 0", who="limits")


def network(peer: str) -> str:
    """What counts as one address: IPv6 by network of 64 bits, which one host has for itself.

    >>> network("ipv4:192.0.2.1:4711"), network("ipv6:%5B2001:db8::1%5D:4711")
    ('192.0.2.1', '2001:db8::/64')

    Args:
        peer: as gRPC names it.
    """
    host = peer.replace("%5B", "[").replace("%5D", "]").partition(":")[2].rpartition(":")[0].strip("[]")
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return peer
    if isinstance(found, ipaddress.IPv6Address):
        return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
    return str(found)


class _Buckets:
    """Token buckets, one for each key; a full one and one that is not there are the same."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left: OrderedDict[object, tuple[float, float]] = OrderedDict()

    def left(self, key: object, now: float) -> float:
        """What may be taken at once."""
        left, since = self._left.get(key, (self._burst, now))
        return min(self._burst, left + self._rate * max(0.0, now - since))

    def take(self, key: object, amount: float, now: float) -> bool:
        """Take it if it is there; whether it was."""
        left = self.left(key, now)
        if left < amount:
            return False
        self._left[key] = (left - amount, now)
        self._left.move_to_end(key)
        if len(self._left) > _REMEMBERED:
            self._left.popitem(last=False)
        return True


class Gate:
    """Who may open a stream, before anything of it is read."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: dict[str, int] = {}
        self._count = 0
        self._all = _Buckets(limits.handshakes / 2, max(1.0, limits.handshakes / 2))
        self._address = _Buckets(limits.address_handshakes, 10 * limits.address_handshakes)
        self._failures = _Buckets(limits.address_failures / 60, limits.address_failures)

    def enter(self, address: str, now: float) -> None:
        """A stream is opened; `leave` follows unless this raises.

        Args:
            address: where it comes from.
            now: seconds of a monotonic clock.

        Raises:
            Problem: `RATE`.
        """
        limits = self._limits
        mine = self._open.get(address, 0)
        if mine >= limits.address_streams:
            raise _rate(f"{mine} streams are open from this address", "address_streams", address)
        if self._failures.left(address, now) < 1:
            raise _rate("too many Hellos of this address have failed", "address_failures", address)
        if not self._address.take(address, 1, now):
            raise _rate("too many streams a second from this address", "address_handshakes", address)
        if self._count >= limits.streams:
            raise _rate(f"{limits.streams} streams are open", "streams", "server")
        if not self._all.take("", 1, now):
            raise _rate("too many devices connect at this moment", "handshakes", "server")
        self._open[address] = mine + 1
        self._count += 1

    def leave(self, address: str) -> None:
        """A stream has ended."""
        self._count -= 1
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def failed(self, address: str, now: float) -> None:
        """A Hello of this address was refused."""
        self._failures.take(address, 1, now)


class Rates:
    """What devices may send; a new stream of a device does not begin anew."""

    def __init__(self, limits: Limits) -> None:
        self._frames = _Buckets(limits.frames, 10 * limits.frames)
        self._bytes = _Buckets(limits.frame_bytes, 16 * limits.frame_bytes)

    def frame(self, client: int, size: int, now: float) -> None:
        """A frame has come.

        Args:
            client: from whom.
            size: its bytes.
            now: seconds of a monotonic clock.

        Raises:
            Problem: `RATE`.
        """
        if not self._frames.take(client, 1, now):
            raise _rate("too many frames", "frames", f"client {client}")
        if not self._bytes.take(client, size, now):
            raise _rate("too many bytes that nobody asked for", "frame_bytes", f"client {client}")


def _rate(found: str, limit: str, who: str) -> Problem:
    return Problem(Reason.RATE, found, rule=f"the server's limit `{limit}`", fix="try again later", who=who)
