"""A payload's way from one side to the other in chunks, without I/O: it can stop anywhere and go on later.

    sender                          receiver
    Offer: hash of every chunk  →
                                ←   Want: what it lacks, at most 8 chunks at a time
    Chunk …                     →   each is checked as it comes
                                ←   Want … ; at the end one without anything missing

A `Want` names the chunks to send now, so it is a request, a place to go on from, and credit in one. After a
reconnect the sender offers again and only chunks that the receiver lacks travel. Neither side holds more than
a chunk in memory; times are seconds on any clock that does not run backwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Final, Protocol

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import MAX_INLINE, FrameError, Problem, Reason
from mycelia.aggregator.wire.offers import Buffer, Manifest, Payload
from mycelia.aggregator.wire.position import Position

__all__ = ["CREDIT", "LEAST_RATE", "MAX_REASKS", "Buffer", "Incoming", "Outgoing", "Sink", "ranges"]

CREDIT: Final = 8
"""The most chunks that were asked for and have not come."""
MAX_REASKS: Final = 3
"""How often a chunk that came damaged is asked for again."""
LEAST_RATE: Final = 2**14
"""Bytes a second, averaged over a stall period, below which a sender has stalled."""


class Sink(Protocol):
    """Where a payload is put together: a file, or memory of the payload's size."""

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes in their place. Raises `OSError` when they do not fit."""

    def read(self, offset: int, size: int) -> Buffer:
        """Bytes that were written, or any bytes where none were."""


class Outgoing:
    """The sending side of one transfer. It waits for credit as long as there is a stream.

    Args:
        payload: what is sent.
        offer: of it, from `Payload.offer`.

    Attributes:
        offer: as given; sent first, and again after a reconnect (`restart`).
        done: whether the receiver has said that it holds all of it.
    """

    def __init__(self, payload: Payload, offer: pb.Offer) -> None:
        self.offer, self.done = offer, False
        self._payload = payload
        self._count = len(payload.chunk_sha256)
        self._asked: deque[int] = deque()
        self._sent = bytearray(self._count)

    def __len__(self) -> int:
        """Chunks that the receiver has asked for and that were not sent yet."""
        return len(self._asked)

    @property
    def small(self) -> bytes:
        """The payload, if it goes along with its offer: then it is so small that asking would cost more."""
        return self._payload.chunk(0) if self._count == 1 and self._payload.size <= MAX_INLINE else b""

    def restart(self) -> pb.Offer:
        """The offer to make on a new stream; what was asked for on the old one is void."""
        self._asked.clear()
        self._sent = bytearray(self._count)
        return self.offer

    def want(self, want: pb.Want) -> None:
        """Take what the receiver asks for.

        Raises:
            FrameError: of another payload, chunks that do not exist, more than `CREDIT` at a time, or one
                chunk more often than a damaged one is asked for.
        """
        if want.sha256 != self.offer.sha256 or want.at != self.offer.at:
            raise _broken("a want of another payload", "of the one that was offered")
        if not want.missing:
            self.done = True
            self._asked.clear()
            return
        if sum(part.count for part in want.missing) + len(self._asked) > CREDIT:
            raise _broken(f"a want beyond {CREDIT} chunks", f"at most {CREDIT} at a time")
        self.done = False
        for part in want.missing:
            if part.first + part.count > self._count:
                raise _broken(f"a want of chunk {part.first + part.count - 1}", f"below {self._count}")
            for index in range(part.first, part.first + part.count):
                self._sent[index] += 1
                if self._sent[index] > 1 + MAX_REASKS:
                    raise _broken(f"chunk {index} for the fifth time", f"{MAX_REASKS} times again")
                self._asked.append(index)

    def next(self) -> pb.Chunk | None:
        """The next chunk to send; None until more is asked for. Other frames may go between two chunks."""
        if not self._asked:
            return None
        index = self._asked.popleft()
        at = self.offer.at if self.offer.HasField("at") else None
        return pb.Chunk(sha256=self.offer.sha256, index=index, data=self._payload.chunk(index), at=at)


class Incoming:
    """The receiving side of one transfer.

    Nothing is asked for until `ask`, and nothing again after `pause`: credit is withheld, not data dropped.

    Args:
        manifest: of the offer.
        sink: where the payload is put together.
        stall_s: seconds in which what was asked for has to come.
        recover: look in the sink for chunks that are there already, as after a restart.
        credit: how many chunks may be under way now, from 1; asked each time. By default `CREDIT`, and never
            more.

    Attributes:
        manifest: as given.
        complete: whether all is there and its hash is right.
        received: bytes of the chunks that were kept.
    """

    def __init__(
        self,
        manifest: Manifest,
        sink: Sink,
        *,
        stall_s: float,
        recover: bool = False,
        credit: Callable[[], int] = lambda: CREDIT,
    ) -> None:
        self.manifest, self.complete, self.received = manifest, False, 0
        self._sink, self._stall, self._credit = sink, stall_s, credit
        self._held = bytearray(manifest.count)
        self._missing = manifest.count
        self._bad = bytearray(manifest.count)
        self._outstanding: set[int] = set()
        self._next = self._hashed = 0
        self._digest = sha256()
        self._again: deque[int] = deque()
        self._until = float("inf")
        self._due: set[int] = set()
        self._came, self._behind = 0, 0.0
        if recover:
            self._recover()

    @property
    def deadline(self) -> float:
        """When the next tick is due; infinite while nothing is asked for."""
        return self._until

    @property
    def held(self) -> list[pb.Range]:
        """The chunks that are here."""
        return list(ranges(index for index, here in enumerate(self._held) if here))

    def ask(self, now: float, data: bytes = b"") -> pb.Want | None:
        """What is wanted now: chunks up to the credit, or nothing at all when everything is here.

        Args:
            now: seconds.
            data: what came with the offer, if anything: the only chunk.

        Returns:
            None when enough is on its way already.

        Raises:
            FrameError: data, and there are more chunks.
            Problem: `BAD_PAYLOAD`: everything is here, and the whole is not what was offered; see `chunk`.
        """
        if data and self.manifest.count > 1:
            raise _broken(f"data with an offer of {self.manifest.count} chunks", "that of a single one")
        if data and self._missing and self.manifest.fits(0, data):  # else it is asked for
            self._store(0, data)
        if not self._missing:
            self._finish()
            return self._want([])
        credit = min(CREDIT, self._credit())
        if 2 * len(self._outstanding) > credit:
            return None
        asked: list[int] = []
        while len(self._outstanding) < credit and (index := self._pick()) is not None:
            self._outstanding.add(index)
            asked.append(index)
        if not asked:
            return None
        if self._until == float("inf"):
            self._watch(now)
        return self._want(asked)

    def pause(self) -> None:
        """What was asked for no longer comes: the stream has ended, or there is no room."""
        self._again.extend(sorted(self._outstanding))
        self._outstanding.clear()
        self._until, self._behind = float("inf"), 0.0

    def chunk(self, chunk: pb.Chunk, now: float) -> pb.Want | None:
        """Take a chunk; what to ask for next.

        Returns:
            None when enough is on its way; a want of nothing when this was the last one.

        Raises:
            FrameError: of another payload, or never asked for.
            Problem: `BAD_PAYLOAD`: it came damaged once too often, or the whole is not what was offered;
                `SPOOL_FULL`: the sink has no room for it, and nothing more is asked for.
        """
        index = chunk.index
        at = Position.of(chunk.at) if chunk.HasField("at") else None
        if chunk.sha256 != self.manifest.sha256 or at != self.manifest.at:
            raise _broken("a chunk of another payload", "of the one that was offered")
        if index >= self.manifest.count:
            raise _broken(f"chunk {index} of {self.manifest.count}", "chunks count from 0")
        if self._held[index]:  # it came twice
            return None
        if index not in self._outstanding and index not in self._again:  # those were asked for before a pause
            raise _broken(f"chunk {index} that was not asked for", "nothing is sent without credit")
        self._outstanding.discard(index)
        data = chunk.data  # protobuf makes a copy for each look
        if not self.manifest.fits(index, data):
            self._damaged(index)
            return self.ask(now)
        self._store(index, data)
        self._due.discard(index)
        if not self._due:  # the sender keeps up, however small its chunks are
            self._behind = 0.0
            if self._outstanding:
                self._watch(now)
            else:
                self._until = float("inf")
        return self.ask(now)

    def tick(self, now: float) -> None:
        """It is `now`.

        Raises:
            Problem: `STALL`: what was asked for has not come in time.
        """
        if now < self._until:
            return
        self._behind = max(0.0, self._behind + LEAST_RATE * self._stall - self._came)
        if self._came == 0 or self._behind > self.manifest.chunk_size:  # the one that is half here
            self.pause()
            raise Problem(
                Reason.STALL,
                f"{self._came} bytes in {self._stall:g} s",
                rule=f"a chunk in this time, and {LEAST_RATE} bytes a second",
                fix="connect again: what has come is kept; smaller chunks suit slow lines",
                who=str(self.manifest.at or "roster"),
            )
        self._watch(now)

    def _watch(self, now: float) -> None:
        """A new stall period begins; what is due is what is outstanding now."""
        self._until = now + self._stall
        self._due = set(self._outstanding)
        self._came = 0

    def _pick(self) -> int | None:
        while self._again:
            index = self._again.popleft()
            if not self._held[index] and index not in self._outstanding:
                return index
        while self._next < self.manifest.count:
            index = self._next
            self._next += 1
            if not self._held[index]:
                return index
        return None

    def _store(self, index: int, data: bytes) -> None:
        try:
            self._sink.write(index * self.manifest.chunk_size, data)
        except OSError as error:
            self._outstanding.add(index)
            self.pause()
            raise Problem(
                Reason.SPOOL_FULL,
                f"no room for a chunk: {error.strerror or error}",
                rule="a payload is kept until it is complete",
                fix="free space; the transfer goes on where it stopped",
                who=str(self.manifest.at or "roster"),
            ) from error
        self._keep(index)
        self._came += len(data)
        if index == self._hashed:
            self._digest.update(data)
            self._hashed += 1
        self._hash_on(2)  # two a chunk catch up before the end, and none of them waits long

    def _keep(self, index: int) -> None:
        self._held[index] = 1
        self._missing -= 1
        self.received += self.manifest.chunk_bytes(index)

    def _hash_on(self, most: int) -> None:
        """Bring the hash of the whole nearer to the first chunk that is not here, by so many chunks."""
        for index in range(self._hashed, min(self._hashed + most, self.manifest.count)):
            if not self._held[index]:
                return
            size = self.manifest.chunk_bytes(index)
            self._digest.update(self._sink.read(index * self.manifest.chunk_size, size))
            self._hashed += 1

    def _damaged(self, index: int) -> None:
        self._bad[index] += 1
        self._again.appendleft(index)
        if self._bad[index] > MAX_REASKS:
            self.pause()
            raise Problem(
                Reason.BAD_PAYLOAD,
                f"chunk {index} came damaged {self._bad[index]} times",
                rule="every chunk has the hash that was offered",
                fix="do not send the same bytes again; look at the disk and memory of the sender",
                who=str(self.manifest.at or "roster"),
            )

    def _recover(self) -> None:
        for index in range(self.manifest.count):
            size = self.manifest.chunk_bytes(index)
            if self.manifest.fits(index, self._sink.read(index * self.manifest.chunk_size, size)):
                self._keep(index)

    def _finish(self) -> None:
        if self.complete:
            return
        self._until = float("inf")
        self._hash_on(self.manifest.count)
        if self._digest.digest() != self.manifest.sha256:
            raise Problem(
                Reason.BAD_PAYLOAD,
                "every chunk is right and the whole is not",
                rule="the hash of the whole is that of the offer",
                fix="offer what the hashes were made from",
                who=str(self.manifest.at or "roster"),
            )
        self.complete = True

    def _want(self, indices: list[int]) -> pb.Want:
        at = None if self.manifest.at is None else self.manifest.at.to_wire()
        return pb.Want(sha256=self.manifest.sha256, missing=ranges(sorted(indices)), at=at)


def ranges(indices: Iterator[int] | list[int]) -> Iterator[pb.Range]:
    """Increasing numbers as ranges.

    >>> [(part.first, part.count) for part in ranges([0, 1, 2, 5])]
    [(0, 3), (5, 1)]
    """
    first = count = 0
    for index in indices:
        if count and index == first + count:
            count += 1
            continue
        if count:
            yield pb.Range(first=first, count=count)
        first, count = index, 1
    if count:
        yield pb.Range(first=first, count=count)


def _broken(found: str, rule: str) -> FrameError:
    return FrameError(Reason.FRAME, found, rule=rule, who="transfer")
