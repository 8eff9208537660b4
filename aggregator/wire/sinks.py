"""Where a payload is put together: memory for a small one, a file for any other."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

from mycelia.aggregator.wire.offers import Buffer

__all__ = ["FileSink", "MemorySink"]


class MemorySink:
    """A payload in memory.

    Args:
        size: bytes of it.

    Attributes:
        data: the bytes.
    """

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)

    def write(self, offset: int, data: bytes) -> None:
        """See `Sink`."""
        if offset + len(data) > len(self.data):
            raise OSError("beyond the end of the payload")
        self.data[offset : offset + len(data)] = data

    def read(self, offset: int, size: int) -> Buffer:
        """See `Sink`."""
        return memoryview(self.data)[offset : offset + size]


class FileSink:
    """A payload in a file that only its owner can read; what is in it already stays.

    Args:
        path: the file; made if it is not there, and brought to the size of the payload.
        size: bytes of the payload.

    Attributes:
        path: as given.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self._size = path, size
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o600)
        try:
            os.ftruncate(self._file, size)
        except OSError:
            self.close()
            raise

    def write(self, offset: int, data: bytes) -> None:
        """See `Sink`."""
        if offset + len(data) > self._size:
            raise OSError("beyond the end of the payload")
        with memoryview(data) as view:
            done = 0
            while done < len(data):
                done += os.pwrite(self._file, view[done:], offset + done)

    def read(self, offset: int, size: int) -> Buffer:
        """See `Sink`."""
        return os.pread(self._file, size, offset)

    def map(self) -> mmap.mmap:
        """The bytes, mapped and not read into memory, also after `close`; the caller closes the mapping."""
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), self._size, access=mmap.ACCESS_READ)

    def close(self) -> None:
        """Let go of the file, which stays; closing twice is harmless."""
        with suppress(OSError):
            os.close(self._file)
        self._file = -1
