"""A device's stream on which frames come twice, or one after the next; each with a number of its own.

The network cannot do that: TCP keeps bytes in order, and TLS lets none be repeated. What a device or a server
says twice or too early comes from within, such as from a restart at the wrong moment, and has to be harmless.
"""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any, Final

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.client.link import Link

SHARE: Final = 0.3
"""Of the frames that come twice, and of those that change places."""
_STREAM: Final = {"hello", "pong", "bye", "challenge", "welcome", "ping", "goodbye"}
"""Of the stream itself; a second one is a breach, which other tests are about."""


class UnrulyLink(Link):
    """Some of its streams are unruly in both directions, the others are as they should be."""

    dice = random.Random(0)

    def __init__(self, call: Any, server: Any) -> None:
        super().__init__(call, server)
        self._unruly = self.dice.random() < 0.7
        self._read: list[pb.ServerFrame] = []
        self._held: pb.ClientFrame | None = None

    def _hit(self) -> bool:
        return self._unruly and self.dice.random() < SHARE

    async def read(self) -> pb.ServerFrame:
        if self._read:
            return self._read.pop(0)
        frame = await super().read()
        if frame.WhichOneof("body") in _STREAM:
            return frame
        if self._hit():
            self._read.append(frame)
        if self._hit():
            # It comes behind the next one, whatever that is, if there is one soon: a ping is.
            following = await super().read()
            self._read.append(frame)
            return following
        return frame

    async def write(self, *frames: pb.ClientFrame) -> bool:
        sent = [each for frame in frames for each in self._twisted(frame)]
        return await super().write(*sent) if sent else True

    def _twisted(self, frame: pb.ClientFrame) -> list[pb.ClientFrame]:
        """What is sent in its place."""
        if frame.WhichOneof("body") in _STREAM:
            return [frame]
        frames = [frame]
        if self._hit():
            frames.append(_copy(frame))
        if self._held is not None:
            frames.append(self._held)
            self._held = None
        elif self._hit() and frame.WhichOneof("body") in ("ready", "offer"):
            # What follows these is what they announce: a chunk, or the wish for one.
            self._held = _copy(frame)
            frames = frames[1:]
        return frames


def _copy(frame: pb.ClientFrame) -> pb.ClientFrame:
    other = pb.ClientFrame()
    other.CopyFrom(frame)
    return other


def unruly(link: ModuleType, transport: ModuleType, seed: int) -> None:
    """Streams of this process are unruly from now on."""
    UnrulyLink.dice = random.Random(seed)
    for module in (link, transport):
        module.Link = UnrulyLink  # type: ignore[attr-defined]
