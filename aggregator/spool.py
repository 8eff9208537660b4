"""Where the payloads of devices are put together, until each has gone into the sum.

Payloads up to 1 MiB are assembled in memory, of which there is a fixed amount; larger ones, and those that
find it full, in files under a quota. Where there is no room, credit is withheld: the sender waits, and is
asked once there is.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.offers import MAX_PAYLOAD, Buffer, Manifest
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.sinks import FileSink, MemorySink
from mycelia.aggregator.wire.transfer import Incoming
from mycelia.engine.durable import hold
from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.canonical import struct

__all__ = ["COMING", "OPEN", "POOLED", "POOL_BYTES", "UNDER_WAY", "Reply", "Spool", "Spooled"]

POOLED: Final = 2**20
"""The largest payload that is put together in memory."""
POOL_BYTES: Final = 2**26
"""Memory for all of these, 64 MiB."""
COMING: Final = 2**23
"""Bytes of them that are asked for at a time, 8 MiB, or one: on its way each is in memory several times."""
OPEN: Final = 4
"""The most payloads that one client may have on their way."""
UNDER_WAY: Final = 20
"""Chunks that all senders of large payloads together may have under way, but for one each: what comes faster
than it is put together lies in memory."""

_SUFFIX: Final = ".part"
_LOCK: Final = ".lock"
_COUNTED_ONCE: Final = frozenset({pb.UPDATE, pb.MASKED})


class Spooled:
    """A payload that is complete, until `Spool.release`.

    Attributes:
        client: who sent it.
        manifest: what was offered.
    """

    def __init__(self, client: int, manifest: Manifest, sink: FileSink | MemorySink) -> None:
        self.client, self.manifest, self._sink = client, manifest, sink

    @contextlib.contextmanager
    def open(self) -> Iterator[Buffer]:
        """Its bytes: in memory, or mapped; views of them have to be gone at the end."""
        if isinstance(self._sink, MemorySink):
            yield self._sink.data
            return
        with self._sink.map() as data:
            yield data


class Reply(NamedTuple):
    """What a client is told next.

    Attributes:
        client: whom.
        want: what to ask for, if anything; with nothing missing: all of it is here.
        payload: what is complete now; whoever takes it gives it back with `Spool.release`.
        problem: why its stream ends, or its payload was dropped.
    """

    client: int
    want: pb.Want | None = None
    payload: Spooled | None = None
    problem: Problem | None = None


class _Key(NamedTuple):
    """One payload of one client."""

    client: int
    at: Position
    kind: int
    sha256: bytes

    @property
    def once(self) -> tuple[int, Position, int]:
        """Of which there is one payload."""
        return self.client, self.at, self.kind


@dataclass(eq=False)
class _Slot:
    """A payload on its way; without `incoming` it waits for room."""

    manifest: Manifest
    incoming: Incoming | None = None
    sink: FileSink | MemorySink | None = None
    spooled: Spooled | None = None
    coming: int = 0  # bytes that it has of `COMING`


class Spool:
    """All payloads that come in at one server.

    Args:
        folder: for the files, for this process alone; made, for its owner only, if it is not there.
        quota: bytes that the files may have.
        stall_s: seconds in which what was asked for has to come.
        pool: bytes of memory for small payloads.
        most: bytes that one payload may have.

    Attributes:
        pool_used: bytes of memory in use.
        disk_used: bytes of files, those left by an earlier process included.

    Raises:
        ConfigError: a quota below 0, a stall period that is not above 0, or another process has the folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        quota: int,
        stall_s: float,
        pool: int = POOL_BYTES,
        most: int = MAX_PAYLOAD,
    ) -> None:
        if quota < 0 or not 0 < stall_s < math.inf:
            raise ConfigError(
                f"quota {quota}, stall_s {stall_s}", rule="at least 0, and above 0", who="spool"
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _locked(folder / _LOCK)
        self._folder, self._quota, self._pool, self._most, self._stall = folder, quota, pool, most, stall_s
        self._slots: dict[_Key, _Slot] = {}
        self._of: dict[int, list[_Key]] = {}
        self._waiting: dict[_Key, None] = {}
        self._freed = False
        self._coming = 0
        self._look_again = math.inf  # when the disk may have room that it had not
        self._first: dict[tuple[int, Position, int], bytes] = {}
        self._taken: set[_Key] = set()
        self._over: dict[str, tuple[int, int]] = {}
        self._left = {path.name: path.stat().st_size for path in sorted(folder.glob(f"*{_SUFFIX}"))}
        self.pool_used, self.disk_used = 0, sum(self._left.values())

    @property
    def deadline(self) -> float:
        """When the next tick is due; minus infinity when one that waits may find room."""
        if self._freed and self._waiting:
            return -math.inf
        again = self._look_again if self._waiting else math.inf
        running = (slot.incoming for slot in self._slots.values() if slot.incoming is not None)
        return min((again, *(incoming.deadline for incoming in running)))

    @property
    def waiting(self) -> int:
        """Payloads for which there is no room yet."""
        return len(self._waiting)

    def offer(self, client: int, offer: pb.Offer, now: float, data: bytes = b"") -> Reply | None:
        """A client offers a payload, for the first time or again after a reconnect.

        Args:
            client: who.
            offer: of it.
            now: seconds.
            data: what came with the offer, if anything; of no use where there is no room.

        Returns:
            what to tell the client; None: there is no room, and `tick` will say when there is; the client is
            told `SPOOL_FULL` meanwhile.

        Raises:
            Problem: `EQUIVOCATION`: another update than the first of this client and position;
                `TOO_LARGE`: more than may ever be here; `BUSY`: more than `OPEN` payloads at a time;
                `FRAME`: see `Manifest`; `BAD_PAYLOAD`.
        """
        manifest = Manifest(offer, self._most)
        if manifest.at is None:
            raise Problem(
                Reason.FRAME, "a roster from a device", rule="it comes from the operator", who=_who(client)
            )
        key = _Key(client, manifest.at, manifest.kind, manifest.sha256)
        if manifest.kind in _COUNTED_ONCE and self._first.get(key.once, key.sha256) != key.sha256:
            raise Problem(
                Reason.EQUIVOCATION,
                "another update than the first one",
                rule="one update for each round and attempt; the first stands",
                who=_who(client),
            )
        if key in self._taken:
            return Reply(client, _all_here(manifest))
        if manifest.size > max(self._quota, min(self._pool, POOLED)):
            raise Problem(
                Reason.TOO_LARGE,
                f"a payload of {manifest.size} bytes",
                rule=f"spool_max is {self._quota}",
                fix="raise spool_max on the server",
                who=_who(client),
            )
        slot = self._slots.get(key)
        if slot is not None and slot.spooled is not None:
            return Reply(client, _all_here(manifest))
        if slot is not None and slot.manifest != manifest:
            self._close(slot)  # the same bytes in other chunks: what has come is looked at again
            slot = self._slots[key] = _Slot(manifest)
        if slot is None:
            slot = self._add(key, manifest)
        if slot.incoming is None:
            may_spill = next(iter(self._waiting), key) == key
            if not self._admit(key, slot, now, may_spill=may_spill):
                self._waiting[key] = None
                return Reply(client) if self._fits_pool(manifest.size) else None  # its turn comes soon
        return self._ask(key, slot, now, data)

    def chunk(self, client: int, chunk: pb.Chunk, now: float) -> Reply:
        """A chunk has come.

        Raises:
            Problem: `FRAME`: of a payload that is not on its way; and those of `Incoming.chunk`. After
                `BAD_PAYLOAD` the payload is forgotten.
        """
        at = Position.of(chunk.at)
        if (at.round, at.attempt) < self._over.get(at.run, (0, 0)):
            return Reply(client)  # it was on its way when the round ended
        same = (key for key in self._of.get(client, ()) if (key.at, key.sha256) == (at, chunk.sha256))
        key = next(same, None)
        slot = None if key is None else self._slots[key]
        if key is None or slot is None or slot.incoming is None:
            kinds = (_Key(client, at, kind, chunk.sha256) for kind in pb.Kind.values())
            if not self._taken.isdisjoint(kinds):  # a late duplicate
                return Reply(client)
            raise Problem(Reason.FRAME, "a chunk that nobody asked for", rule="offer first", who=_who(client))
        try:
            want = slot.incoming.chunk(chunk, now)
        except Problem as problem:
            if problem.reason is Reason.BAD_PAYLOAD:
                self._drop(key)
            if problem.reason is Reason.SPOOL_FULL:
                self._wait_for_disk(key, now)
            raise
        if want is not None:
            self._waiting.pop(key, None)
        return Reply(client, want, self._finished(key, slot))

    def tick(self, now: float) -> list[Reply]:
        """It is `now`.

        Returns:
            for clients that have stalled, the problem that ends their streams (what they sent is kept); and
            see `room`.
        """
        replies: list[Reply] = []
        for key, slot in self._slots.items():
            if slot.incoming is not None and slot.spooled is None:
                try:
                    slot.incoming.tick(now)
                except Problem as problem:
                    replies.append(Reply(key.client, problem=problem))
        return replies + self.room(now)

    def room(self, now: float) -> list[Reply]:
        """What to ask those for that had waited and find room, first come first served."""
        replies: list[Reply] = []
        self._freed, self._look_again = False, math.inf
        may_spill = True
        for key in list(self._waiting):
            slot = self._slots[key]
            if slot.incoming is None and not self._admit(key, slot, now, may_spill=may_spill):
                if self._fits_pool(slot.manifest.size):
                    break  # those before it are still on their way
                may_spill = False
                continue
            try:
                replies.append(self._ask(key, slot, now))
            except Problem as problem:
                if problem.reason is not Reason.SPOOL_FULL:  # it goes on waiting
                    replies.append(Reply(key.client, problem=problem))
        return replies

    def disconnect(self, client: int) -> None:
        """The stream of a client has ended; a payload in a file is kept, one in memory begins again."""
        for key in list(self._of.get(client, ())):
            slot = self._slots[key]
            if slot.spooled is not None:
                continue
            self._waiting.pop(key, None)
            if slot.incoming is not None:
                slot.incoming.pause()
            if slot.incoming is None or isinstance(slot.sink, MemorySink):
                self._drop(key)

    def release(self, spooled: Spooled) -> None:
        """A payload has gone into the sum, or was refused: it is deleted, and not taken again."""
        manifest = spooled.manifest
        if manifest.at is not None:
            key = _Key(spooled.client, manifest.at, manifest.kind, manifest.sha256)
            self._taken.add(key)
            self._drop(key)

    def forget(self, run: str, before: int, attempt: int = 0) -> None:
        """Rounds of a run below `before` are over, and the attempts below `attempt` of that one.

        Nothing of them is kept, nor known.
        """

        def over(at: Position) -> bool:
            return at.run == run and (at.round, at.attempt) < (before, attempt)

        self._over[run] = max(self._over.get(run, (0, 0)), (before, attempt))

        for key in [key for key in self._slots if over(key.at)]:
            self._drop(key)
        self._taken = {key for key in self._taken if not over(key.at)}
        self._first = {once: digest for once, digest in self._first.items() if not over(once[1])}

    def again(self, client: int, at: Position) -> None:
        """What was taken of a client at a position is to come once more."""
        self._taken = {key for key in self._taken if (key.client, key.at) != (client, at)}

    def restart(self, run: str) -> None:
        """This server begins with a run anew, from its log: all that came for it is offered again."""
        for key in [key for key in self._slots if key.at.run == run]:
            self._drop(key)
        self._over.pop(run, None)
        self._taken = {key for key in self._taken if key.at.run != run}
        self._first = {once: digest for once, digest in self._first.items() if once[1].run != run}

    def close(self) -> None:
        """Let go of the files; what is in them is found again by a spool of the same folder."""
        for slot in self._slots.values():
            self._close(slot)
        self._slots.clear()
        self._of.clear()
        self._waiting.clear()
        with contextlib.suppress(OSError):
            os.close(self._lock)
        self._lock = -1

    # Room

    def _add(self, key: _Key, manifest: Manifest) -> _Slot:
        keys = self._of.setdefault(key.client, [])
        if sum(self._slots[other].spooled is None for other in keys) >= OPEN:
            raise Problem(
                Reason.BUSY,
                "one more payload",
                rule=f"at most {OPEN} on their way from one client",
                who=_who(key.client),
            )
        keys.append(key)
        self._first[key.once] = key.sha256
        slot = self._slots[key] = _Slot(manifest)
        return slot

    def _admit(self, key: _Key, slot: _Slot, now: float, *, may_spill: bool) -> bool:
        """Give a payload its room, in memory or, if it may, in a file; whether there is any."""
        size = slot.manifest.size
        if self._fits_pool(size):
            if self._coming and self._coming + size > COMING:
                return False
            slot.sink, slot.coming = MemorySink(size), size
            self.pool_used += size
            self._coming += size
            slot.incoming = Incoming(slot.manifest, slot.sink, stall_s=self._stall)
            return True
        if not may_spill:
            return False
        path = self._folder / _name(key)
        known = self._left.pop(path.name, 0)
        self.disk_used -= known
        while self.disk_used + size > self._quota and self._left:
            name, freed = self._left.popitem()
            (self._folder / name).unlink(missing_ok=True)
            self.disk_used -= freed
        if self.disk_used + size <= self._quota:
            try:
                slot.sink = FileSink(path, size)
            except OSError:
                self._wait_for_disk(key, now)
        if slot.sink is None:
            if known:
                self._left[path.name] = known
                self.disk_used += known
            return False
        self.disk_used += size
        slot.incoming = Incoming(
            slot.manifest, slot.sink, stall_s=self._stall, recover=known == size, credit=self._credit
        )
        return True

    def _fits_pool(self, size: int) -> bool:
        return size <= POOLED and self.pool_used + size <= self._pool

    def _wait_for_disk(self, key: _Key, now: float) -> None:
        """Others than this process fill the disk, and nobody says when there is room again."""
        self._waiting[key] = None
        self._look_again = min(self._look_again, now + self._stall)

    def _came(self, slot: _Slot) -> None:
        """It is here, or does not come."""
        if slot.coming:
            self._coming -= slot.coming
            slot.coming, self._freed = 0, True

    def _credit(self) -> int:
        """Chunks that one of the large payloads may have under way."""
        running = sum(
            slot.incoming is not None and slot.spooled is None and isinstance(slot.sink, FileSink)
            for slot in self._slots.values()
        )
        return max(1, UNDER_WAY // max(1, running))

    def _drop(self, key: _Key) -> None:
        """Forget a payload, its bytes included."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        self._of[key.client].remove(key)
        if not self._of[key.client]:
            del self._of[key.client]
        self._waiting.pop(key, None)
        self._freed = True
        self._came(slot)
        if isinstance(slot.sink, MemorySink):
            self.pool_used -= slot.manifest.size
        elif slot.sink is not None:
            slot.sink.close()
            slot.sink.path.unlink(missing_ok=True)
            self.disk_used -= slot.manifest.size

    def _close(self, slot: _Slot) -> None:
        """Let go of a payload, and keep its file for later."""
        self._came(slot)
        if isinstance(slot.sink, MemorySink):
            self.pool_used -= slot.manifest.size
        elif slot.sink is not None:
            slot.sink.close()
            self._left[slot.sink.path.name] = slot.manifest.size

    def _ask(self, key: _Key, slot: _Slot, now: float, data: bytes = b"") -> Reply:
        if slot.incoming is None:
            raise Problem(Reason.BUG, "a payload without room is asked for", rule="room first")
        self._waiting.pop(key, None)
        slot.incoming.pause()
        try:
            want = slot.incoming.ask(now, data)
        except Problem as problem:
            if problem.reason is Reason.SPOOL_FULL:
                self._wait_for_disk(key, now)
            else:
                self._drop(key)
            raise
        return Reply(key.client, want, self._finished(key, slot))

    def _finished(self, key: _Key, slot: _Slot) -> Spooled | None:
        if slot.incoming is None or slot.sink is None or not slot.incoming.complete or slot.spooled:
            return None
        self._came(slot)
        if isinstance(slot.sink, FileSink):
            slot.sink.close()
        slot.spooled = Spooled(key.client, slot.manifest, slot.sink)
        return slot.spooled


def _all_here(manifest: Manifest) -> pb.Want:
    at = None if manifest.at is None else manifest.at.to_wire()
    return pb.Want(sha256=manifest.sha256, at=at)


def _name(key: _Key) -> str:
    parts = struct("FED1/spool", key.client, key.at.run, key.at.round, key.at.attempt, key.kind, key.sha256)
    return sha256(parts).hexdigest() + _SUFFIX


def _who(client: int) -> str:
    return f"client {client}"


def _locked(path: Path) -> int:
    """A file that is held until it is closed; where the system has no such lock, it is only open."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    if not hold(file):
        os.close(file)
        raise ConfigError(
            "another process has this folder",
            rule="a spool belongs to one process",
            fix="give each server a spool folder of its own",
            who=str(path.parent),
        )
    return file
