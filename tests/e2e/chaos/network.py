"""A bad network: TCP connections that are slow, break, and change what they carry."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from tests.aggregator.connections import Proxy

SHARE: Final = 0.3
"""Of the connections that are slow, that break, and that change a bit; each drawn by itself."""
_SLOW_S: Final = 0.15
_FIRST_BYTES: Final = 400  # so that some break in the handshake of TLS
_MOST_BYTES: Final = 30_000
_APART: Final = 3
"""Connections between two that change a bit. A device whose connection fails looks what answers there, over
up to three others; a certificate that is damaged then is a matter for its operator, and not tried again."""


class BadNetwork(Proxy):
    """Draws for each connection what is wrong with it.

    Args:
        port: of the server.
        dice: decides.

    Attributes:
        bad: whether anything goes wrong from now on.
        broken: connections that were cut.
        changed: bits that were flipped.
        slow: pieces that were held back.
    """

    def __init__(self, port: int, dice: random.Random) -> None:
        super().__init__(port)
        self._dice, self.bad = dice, True
        self.broken = self.changed = self.slow = 0
        self._may_change = 0  # from this connection on

    def _moment(self) -> int:
        return int(self._dice.triangular(_FIRST_BYTES, _MOST_BYTES, _FIRST_BYTES))

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool) -> None:
        dice, carried = self._dice, 0
        # each direction of a connection for itself
        slow = dice.random() < SHARE
        cut = self._moment() if dice.random() < SHARE / 2 else None
        flip = self._moment() if dice.random() < SHARE / 2 and self.connections >= self._may_change else None
        while data := await reader.read(2**14):
            if self.bad and slow:
                self.slow += 1
                await asyncio.sleep(dice.uniform(0, _SLOW_S))
            before, carried = carried, carried + len(data)
            if self.bad and flip is not None and before <= flip < carried:
                changed = bytearray(data)
                changed[flip - before] ^= 1 << dice.randrange(8)
                data = bytes(changed)
                self.changed += 1
                self._may_change = self.connections + _APART + 1
            if self.bad and cut is not None and before <= cut < carried:
                writer.write(data[: cut - before])
                self.broken += 1
                break
            writer.write(data)
            await writer.drain()
            if up:
                self.up += len(data)
            else:
                self.down += len(data)
        writer.transport.abort()
