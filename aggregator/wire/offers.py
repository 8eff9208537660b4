"""What one side offers: a payload with its hashes, and on the other side what its offer says, checked."""

from __future__ import annotations

import mmap
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final, Self

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import MAX_CHUNK, MAX_LIST, FrameError, Problem, Reason
from mycelia.aggregator.wire.position import Position
from mycelia.engine.errors import ConfigError

__all__ = ["LEAST_CHUNK", "MAX_PAYLOAD", "Buffer", "Manifest", "Payload"]

LEAST_CHUNK: Final = 2**16
"""Bytes of the smallest chunks that a receiver takes of a payload of several: eight in a stall period of 30 s
are just above `LEAST_RATE`, so a sender that delivers all it was asked for keeps up on any line."""
MAX_PAYLOAD: Final = 2**34
"""Bytes of a payload by default, 16 GiB."""

_HASH_BYTES: Final = 32

Buffer = bytes | bytearray | memoryview | mmap.mmap
"""Bytes that lie in memory or in a mapped file."""


class Payload:
    """Bytes to be sent, and their hashes; one may be sent to many.

    Args:
        data: the bytes, at least one.
        chunk_size: bytes of each chunk but the last, up to `MAX_CHUNK`. Smaller ones suit slow lines, down to
            `LEAST_CHUNK`.
        whole: the hash of all, where it is known already.

    Attributes:
        data: as given.
        size: bytes.
        chunk_size: as given.
        sha256: of all bytes.
        chunk_sha256: of each chunk.

    Raises:
        ConfigError: no bytes, a chunk size out of range, or more chunks than an offer can list.
    """

    def __init__(self, data: Buffer, *, chunk_size: int = MAX_CHUNK, whole: bytes | None = None) -> None:
        self.data, self.size, self.chunk_size = data, len(data), chunk_size
        if not 1 <= chunk_size <= MAX_CHUNK or not 1 <= self.size <= chunk_size * MAX_LIST:
            raise ConfigError(
                f"{self.size} bytes in chunks of {chunk_size}",
                rule=f"1 to {MAX_LIST} chunks of 1 to {MAX_CHUNK} bytes",
                who="payload",
            )
        digest = sha256()
        hashes = []
        with memoryview(data) as view:
            for start in range(0, self.size, chunk_size):
                with view[start : start + chunk_size] as chunk:
                    hashes.append(sha256(chunk).digest())
                    if whole is None:
                        digest.update(chunk)
        self.sha256 = digest.digest() if whole is None else whole
        self.chunk_sha256 = tuple(hashes)

    @classmethod
    def open(cls, path: Path, *, chunk_size: int = MAX_CHUNK) -> Self:
        """A file, mapped and not read into memory.

        Raises:
            ConfigError: an empty file, see above.
            OSError: it cannot be read.
        """
        with path.open("rb") as file:
            if not path.stat().st_size:
                return cls(b"", chunk_size=chunk_size)
            return cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), chunk_size=chunk_size)

    def chunk(self, index: int) -> bytes:
        """The bytes of a chunk."""
        start = index * self.chunk_size
        return bytes(self.data[start : start + self.chunk_size])

    def offer(
        self,
        kind: pb.Kind,
        at: Position | None,
        *,
        schema_sha256: bytes = b"",
        header: bytes = b"",
        signature: bytes = b"",
    ) -> pb.Offer:
        """The offer of it.

        Args:
            kind: what it is.
            at: the work it belongs to; None for a roster.
            schema_sha256: of the Schema, for tensors.
            header: canonical bytes, of an update its `UpdateHeader`.
            signature: over the header.
        """
        return pb.Offer(
            sha256=self.sha256,
            size=self.size,
            chunk_size=self.chunk_size,
            chunk_sha256=self.chunk_sha256,
            kind=kind,
            schema_sha256=schema_sha256,
            at=None if at is None else at.to_wire(),
            header=header,
            signature=signature,
        )

    def close(self) -> None:
        """Let go of the mapping; harmless while somebody still reads a part of it, which then closes it."""
        if isinstance(self.data, mmap.mmap):
            with suppress(BufferError):
                self.data.close()


class Manifest:
    """What an offer says about its payload, checked.

    Args:
        offer: as it came.
        most: bytes that a payload may have.
        least_chunk: bytes that the chunks of a payload of several must have.

    Attributes:
        sha256: of the payload.
        size: bytes.
        chunk_size: bytes of each chunk but the last.
        count: chunks.
        kind: what it is.
        at: the work it belongs to; None for a roster.

    Raises:
        Problem: `TOO_LARGE` above `most`; `FRAME` for a list of chunks that does not fit the size, a chunk
            that is too large or too small, or a payload of no work that is no roster.
    """

    def __init__(self, offer: pb.Offer, most: int = MAX_PAYLOAD, *, least_chunk: int = LEAST_CHUNK) -> None:
        self.sha256, self.size, self.chunk_size = offer.sha256, offer.size, offer.chunk_size
        self.kind, self.count = offer.kind, len(offer.chunk_sha256)
        self.at = Position.of(offer.at) if offer.HasField("at") else None
        if self.size > most:
            raise Problem(
                Reason.TOO_LARGE,
                f"a payload of {self.size} bytes",
                rule=f"at most {most}",
                fix="raise max_payload on the server",
                who="offer",
            )
        chunks = -(-self.size // max(1, self.chunk_size))
        least = 1 if chunks == 1 else least_chunk
        if not (self.size and least <= self.chunk_size <= MAX_CHUNK and self.count == chunks):
            raise FrameError(
                Reason.FRAME,
                f"{self.count} chunks of {self.chunk_size} bytes for {self.size}",
                rule=f"every chunk of {least} to {MAX_CHUNK} bytes has its hash",
                who="offer",
            )
        if (self.at is None) != (self.kind == pb.ROSTER):
            raise FrameError(
                Reason.FRAME, "an offer of no work", rule="all but a roster belong to work", who="offer"
            )
        self._hashes = b"".join(offer.chunk_sha256)

    def chunk_bytes(self, index: int) -> int:
        """Bytes of a chunk."""
        return min(self.chunk_size, self.size - index * self.chunk_size)

    def fits(self, index: int, data: Buffer) -> bool:
        """Whether these are the bytes of a chunk."""
        if len(data) != self.chunk_bytes(index):
            return False
        return sha256(data).digest() == self._hashes[index * _HASH_BYTES : (index + 1) * _HASH_BYTES]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return self.sha256, self.size, self.chunk_size, self.kind, self.at, self._hashes
