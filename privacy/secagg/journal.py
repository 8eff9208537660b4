"""The journal of a secure sum in a file: records are added at the end, and outlive the process.

A record has its length, a check of the length, its canonical bytes, and a hash that chains it to all before.
So a record that a crash cut short is known from one that was changed: the first was never acted upon and is
removed, the second ends the use of the file. Only the owner can read it, and one process at a time writes it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple, Self
from zlib import crc32

from mycelia.engine.durable import hold, sync_folder, write_whole
from mycelia.privacy.secagg.canonical import HASH_BYTES, MAX_TEXT, Reader, Reason, SecureSumError
from mycelia.privacy.secagg.events import Record

__all__ = ["Journal", "JournalHead", "damaged", "replace_file"]

_MAGIC: Final = b"SA1 journal v1\r\n"
_HEAD: Final = Struct(">II")  # the length of a record, and the CRC-32 of that length
_START: Final = sha256(_MAGIC).digest()
_OPEN: Final = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class JournalHead(NamedTuple):
    """Where a journal stands.

    Attributes:
        records: how many there are.
        chain: 32 bytes that depend on all of them.
    """

    records: int = 0
    chain: bytes = _START


class Journal:
    """An open journal; made by `create` or `open`.

    Attributes:
        path: its file.
        head: where it stands.
        previous: where it stood before the last record; at the beginning, the same.
    """

    def __init__(self, path: Path, file: int) -> None:
        self.path, self._file = path, file
        self.head = self.previous = JournalHead()
        self._size = 0

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new, empty journal.

        Raises:
            SecureSumError: `JOURNAL`: there is a file of that name, or it cannot be made.
        """
        try:
            file = os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise _unwritable(path, error) from error
        journal = cls(path, file)
        with journal._closed_on_error():
            _hold(file, path)
            journal._begin()
            sync_folder(path.parent)
        return journal

    @classmethod
    def open(cls, path: Path) -> tuple[Self, list[Record]]:
        """Go on with a journal; what a crash left of a record that was never finished is cut off.

        Returns:
            the journal, and its records in order.

        Raises:
            SecureSumError: `JOURNAL`: there is none, it is open to other users, another process has it, or a
                record was changed.
        """
        try:
            file = os.open(path, _OPEN)
        except OSError as error:
            raise _unwritable(path, error) from error
        journal = cls(path, file)
        with journal._closed_on_error():
            _check_private(file, path)
            _hold(file, path)
            return journal, journal._read()

    def append(self, record: Record) -> None:
        """Add a record; when this returns, it outlives the process and a power cut.

        Raises:
            SecureSumError: `JOURNAL`: it cannot be written. The file then ends with the record before, and
                takes no other one.
        """
        data = record.encode()
        size = len(data).to_bytes(4, "big")
        head = _HEAD.pack(len(data), crc32(size))
        chain = _chained(self.head.chain, data)
        try:
            written = self._write(head, data, chain)
            os.fsync(self._file)
        except OSError as error:
            self._give_up()
            raise _unwritable(self.path, error) from error
        self._size += written
        self.previous, self.head = self.head, JournalHead(self.head.records + 1, chain)

    def shorten(self, records: Iterable[Record]) -> None:
        """Put these records in the place of all there are, in one step.

        Raises:
            SecureSumError: `JOURNAL`: it cannot be written; the old records stand.
        """
        path = self.path.with_name(f".{self.path.name}.new")
        path.unlink(missing_ok=True)
        other = Journal.create(path)
        with other._closed_on_error():
            for record in records:
                other.append(record)
            try:
                os.replace(path, self.path)
                sync_folder(self.path.parent)
            except OSError as error:
                raise _unwritable(self.path, error) from error
        self.close()
        self._file, self._size = other._file, other._size
        self.head, self.previous = other.head, other.previous

    def close(self) -> None:
        """Let go of the file; closing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin(self) -> None:
        try:
            os.ftruncate(self._file, 0)
            self._size = self._write(_MAGIC)
            os.fsync(self._file)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def _write(self, *parts: bytes) -> int:
        if self._file < 0:
            raise OSError("it is closed")
        os.lseek(self._file, self._size, os.SEEK_SET)
        total = 0
        for part in parts:
            view = memoryview(part)
            total += len(view)
            while view:
                view = view[os.write(self._file, view) :]
        return total

    def _read(self) -> list[Record]:
        records: list[Record] = []
        with open(self._file, "rb", closefd=False) as file:
            magic = file.read(len(_MAGIC))
            if len(magic) < len(_MAGIC) and _MAGIC.startswith(magic):  # it was never finished
                self._begin()
                return records
            if magic != _MAGIC:
                raise damaged(self.path, "its first bytes are not those of a journal")
            whole = os.fstat(self._file).st_size
            self._size = len(_MAGIC)
            while (found := self._next(file.read, whole - self._size, len(records))) is not None:
                records.append(found)
        if self._size < whole:
            try:
                os.ftruncate(self._file, self._size)
                os.fsync(self._file)
            except OSError as error:
                raise _unwritable(self.path, error) from error
        return records

    def _next(self, read: Callable[[int], bytes], left: int, number: int) -> Record | None:
        """The next record, or None at the end of those that are complete."""
        head = read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        size, check = _HEAD.unpack(head)
        if crc32(head[:4]) != check:
            raise damaged(self.path, f"the length of record {number + 1} was changed")
        if left < _HEAD.size + size + HASH_BYTES:
            return None
        data, chain = read(size), read(HASH_BYTES)
        if chain != _chained(self.head.chain, data):
            raise damaged(self.path, f"record {number + 1} was changed")
        self._size += _HEAD.size + size + HASH_BYTES
        self.previous, self.head = self.head, JournalHead(number + 1, chain)
        return _decode(data)

    def _give_up(self) -> None:
        """After a failed write nobody knows what the disk holds: take it back, and add no more."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)
        self.close()

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file that only its owner can read, whole or not at all, and durably.

    Raises:
        SecureSumError: `JOURNAL`: it cannot be written.
    """
    try:
        write_whole(path, data)
    except OSError as error:
        raise _unwritable(path, error) from error


def damaged(path: Path, found: str) -> SecureSumError:
    """The error about a journal that cannot be trusted."""
    return SecureSumError(
        Reason.JOURNAL, found, rule="a journal is only ever added to, by one process", who=str(path)
    )


def _chained(before: bytes, data: bytes) -> bytes:
    digest = sha256(before)
    digest.update(len(data).to_bytes(4, "big"))
    digest.update(data)
    return digest.digest()


def _decode(data: bytes) -> Record:
    reader = Reader(data, "SA1/record", len(data), Reason.JOURNAL)
    kind, body = reader.blob(MAX_TEXT).decode("ascii", "replace"), reader.blob(len(data))
    reader.end()
    return Record(kind, body)


def _hold(file: int, path: Path) -> None:
    if not hold(file):
        raise damaged(path, "another process has it")


def _check_private(file: int, path: Path) -> None:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise damaged(path, "it is no ordinary file")
    if os.name == "posix" and status.st_mode & 0o077:
        raise SecureSumError(
            Reason.JOURNAL,
            f"its mode is {stat.S_IMODE(status.st_mode):04o}",
            rule="nobody but its owner can read or write a journal",
            fix=f"find out who could write it; then chmod 600 {path}",
            who=str(path),
        )


def _unwritable(path: Path, error: OSError) -> SecureSumError:
    return SecureSumError(
        Reason.JOURNAL,
        f"it cannot be used: {error.strerror or error}",
        rule="what a machine does next depends on what its journal says",
        who=str(path),
    )
