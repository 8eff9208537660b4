"""What goes out on a stream next: messages in their order, and between them chunks of payloads."""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import FrameError, Problem, Reason
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.transfer import Outgoing

__all__ = ["MAX_QUEUED", "MAX_QUEUED_BYTES", "TOGETHER", "Outbox"]

MAX_QUEUED: Final = 1024
"""Messages that may wait for the other side to read."""
MAX_QUEUED_BYTES: Final = 2**25
"""Bytes of these, 32 MiB."""
TOGETHER: Final = 2**16
"""Bytes up to which messages share one of gRPC's."""

_REMEMBERED: Final = 64  # payloads of which a want that comes too late is no mistake

_Frame = TypeVar("_Frame", pb.ClientFrame, pb.ServerFrame)
_Key = tuple[bytes, bytes]


class Outbox(Generic[_Frame]):
    """Everything that waits to be sent on one stream.

    Chunks are made when there is nothing else to say, one at a time and in turn for each payload, so memory
    is bounded and a ping never waits for more than one chunk.

    Args:
        frame: the type of frames.
    """

    def __init__(self, frame: type[_Frame]) -> None:
        self._frame: type[_Frame] = frame
        self._messages: deque[tuple[_Frame, int]] = deque()
        self._bytes = 0
        self._transfers: dict[_Key, Outgoing] = {}
        self._turn: deque[_Key] = deque()
        self._offered: deque[_Key] = deque(maxlen=_REMEMBERED)

    def __len__(self) -> int:
        """Messages that wait."""
        return len(self._messages)

    def put(self, frame: _Frame, *, first: bool = False) -> None:
        """Send a message.

        Args:
            frame: without its number.
            first: before all others.

        Raises:
            Problem: `STALL`: too much waits already.
        """
        size = frame.ByteSize()
        full = len(self._messages) >= MAX_QUEUED or self._bytes + size > MAX_QUEUED_BYTES
        if full and self._messages:
            raise Problem(
                Reason.STALL,
                f"{len(self._messages)} messages of {self._bytes} bytes wait to be read",
                rule=f"at most {MAX_QUEUED}, {MAX_QUEUED_BYTES} bytes",
                fix="connect again, and read what comes",
                who="stream",
            )
        self._bytes += size
        if first:
            self._messages.appendleft((frame, size))
        else:
            self._messages.append((frame, size))

    def offer(self, outgoing: Outgoing) -> None:
        """Send a payload; one that is on its way already begins again.

        Raises:
            Problem: see `put`.
        """
        key = _key(outgoing.offer)
        outgoing.restart()
        self.put(self._frame(offer=outgoing.offer))
        self._transfers[key] = outgoing
        self._offered.append(key)
        if key not in self._turn:
            self._turn.append(key)

    def want(self, want: pb.Want) -> Outgoing | None:
        """Take what the other side asks for.

        Returns:
            the transfer that is done by this; None if none is.

        Raises:
            FrameError: of a payload that was never offered, and see `Outgoing.want`.
        """
        key = _key(want)
        outgoing = self._transfers.get(key)
        if outgoing is None:
            if key not in self._offered:
                raise FrameError(Reason.FRAME, "a want of no payload", rule="of one that was offered")
            return None  # it was withdrawn, or is done
        outgoing.want(want)
        if not outgoing.done:
            return None
        self._drop(key)
        return outgoing

    def withdraw(self, at: Position) -> None:
        """The payloads of a piece of work are of no use any more."""
        said = at.to_wire()
        for key in [key for key, outgoing in self._transfers.items() if outgoing.offer.at == said]:
            self._drop(key)

    def next(self) -> list[_Frame]:
        """What to send now, together and without numbers; nothing until there is more."""
        frames: list[_Frame] = []
        room = TOGETHER
        while self._messages and (not frames or self._messages[0][1] <= room):
            frame, size = self._messages.popleft()
            self._bytes -= size
            room -= size
            frames.append(self._with_data(frame) if frame.HasField("offer") else frame)
        if frames:
            return frames
        for _ in range(len(self._turn)):
            self._turn.rotate(-1)
            chunk = self._transfers[self._turn[-1]].next()
            if chunk is not None:
                return [self._frame(chunk=chunk)]
        return []

    def _with_data(self, frame: _Frame) -> _Frame:
        """An offer with the payload that it takes along, if that is small; made when it is sent."""
        outgoing = self._transfers.get(_key(frame.offer))
        if outgoing is not None:
            frame.offer.data = outgoing.small
        return frame

    def _drop(self, key: _Key) -> None:
        del self._transfers[key]
        self._turn.remove(key)


def _key(message: pb.Offer | pb.Want) -> _Key:
    at = message.at.SerializeToString(deterministic=True) if message.HasField("at") else b""
    return message.sha256, at
