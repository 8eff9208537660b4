"""Files named by the hash of their bytes: models, snapshots, sums. They are there whole, or not at all."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import mkstemp
from typing import Final

from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.offers import Buffer
from mycelia.engine.durable import sync_folder

__all__ = ["Blob", "Blobs"]

_TEMPORARY: Final = ".writing-"
_NAME: Final = re.compile(r"[0-9a-f]{64}")
_BLOCK: Final = 2**20


@dataclass(frozen=True)
class Blob:
    """Bytes that the store has.

    Attributes:
        sha256: their hash, 32 bytes.
        size: how many, at least 1.
        path: the file; nobody changes it.
    """

    sha256: bytes
    size: int
    path: Path

    @property
    def name(self) -> str:
        """The hash in hexadecimal digits."""
        return self.sha256.hex()

    @contextlib.contextmanager
    def open(self) -> Iterator[mmap.mmap]:
        """The bytes, mapped and not read into memory; views of them have to be gone at the end."""
        with self.map() as data:
            yield data

    def map(self) -> mmap.mmap:
        """The bytes, mapped; whoever calls closes the mapping."""
        try:
            with self.path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise _corrupt(self.path, f"it cannot be read: {error}") from error


class Blobs:
    """A folder of blobs, for one server or shared by several.

    Args:
        folder: made, for its owner only, if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sound: dict[bytes, tuple[int, int, int]] = {}

    def put(self, parts: Iterable[Buffer]) -> Blob:
        """Store bytes; when this returns, they outlive the process and a power cut.

        The same bytes a second time are the same blob.

        Args:
            parts: in order, at least one byte in all; they are written as they come.

        Raises:
            Problem: `STORE`: they cannot be written. What was there before is as it was.
            ValueError: no bytes.
        """
        digest, size = sha256(), 0
        try:
            handle, temporary = _begun(self.folder)
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        try:
            with open(handle, "wb") as file:
                for part in parts:
                    digest.update(part)
                    size += file.write(part)
                if not size:
                    raise ValueError("a blob without bytes")
                file.flush()
                os.fsync(file.fileno())
            path = self.folder / digest.hexdigest()
            temporary.replace(path)
            sync_folder(self.folder)
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        finally:
            temporary.unlink(missing_ok=True)
        self._sound[digest.digest()] = _stamp(path)
        return Blob(digest.digest(), size, path)

    def get(self, sha256: bytes) -> Blob:
        """A blob whose bytes are as they were stored.

        They are hashed unless that was done before and the file is the same since.

        Raises:
            Problem: `STORE_CORRUPT`: it is missing or damaged; the message names the file.
        """
        path = self.folder / sha256.hex()
        try:
            stamp = _stamp(path)
        except FileNotFoundError as error:
            raise _corrupt(path, "it is missing") from error
        blob = Blob(sha256, stamp[0], path)
        if self._sound.get(sha256) != stamp:
            if not blob.size or _digest(blob) != sha256:
                raise _corrupt(path, "its bytes are not those that were stored")
            self._sound[sha256] = stamp
        return blob

    def __contains__(self, sha256: bytes) -> bool:
        return (self.folder / sha256.hex()).exists()

    def discard(self, sha256: bytes) -> None:
        """Remove a blob that nothing refers to any more; harmless if it is not there."""
        (self.folder / sha256.hex()).unlink(missing_ok=True)
        self._sound.pop(sha256, None)

    def sweep(self, keep: Collection[bytes], *, grace_s: float = 0.0) -> list[str]:
        """Remove blobs that nothing refers to, and what a crash left of one; for the start of a server.

        Args:
            keep: hashes of the blobs that stay.
            grace_s: blobs younger than this stay too: where servers share the folder, one may have stored
                what it has not yet referred to. A file that another process is writing stays in any case.

        Returns:
            names of the files that were removed.
        """
        kept = {sha256.hex() for sha256 in keep}
        youngest = time.time() - grace_s
        removed = []
        for path in sorted(self.folder.iterdir()):
            if path.name in kept:
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.name.startswith(_TEMPORARY):
                    gone = _removed_orphan(path)
                else:
                    gone = bool(_NAME.fullmatch(path.name)) and path.stat().st_mtime <= youngest
                    if gone:
                        path.unlink()
                if gone:
                    removed.append(path.name)
        self._sound = {sha256: stamp for sha256, stamp in self._sound.items() if sha256.hex() not in removed}
        return removed


def _stamp(path: Path) -> tuple[int, int, int]:
    """What changes when a file does: size, time of the last change, and which file it is."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _digest(blob: Blob) -> bytes:
    digest = sha256()
    with blob.open() as data, memoryview(data) as view:
        for start in range(0, blob.size, _BLOCK):
            with view[start : start + _BLOCK] as block:
                digest.update(block)
    return digest.digest()


def _begun(folder: Path) -> tuple[int, Path]:
    """A temporary file that is held while it is written, so that no sweep takes it for an orphan.

    A sweep may come between its making and its lock; then it is gone, and another one is made.
    """
    while True:
        handle, name = mkstemp(prefix=_TEMPORARY, dir=folder)
        if _lock(handle) and os.fstat(handle).st_nlink:
            return handle, Path(name)
        os.close(handle)


def _removed_orphan(path: Path) -> bool:
    """Remove a temporary file unless somebody writes it; whether it was removed."""
    handle = os.open(path, os.O_RDWR)
    try:
        if not _lock(handle, wait=False):
            return False
        path.unlink()
        return True
    finally:
        os.close(handle)


def _lock(handle: int, *, wait: bool = True) -> bool:
    """Hold an open file; Windows does so itself, and refuses to remove it."""
    if os.name != "nt":
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _corrupt(path: Path, found: str) -> Problem:
    return Problem(
        Reason.STORE_CORRUPT,
        f"blob {path.name}: {found}",
        rule="a blob is there whole and unchanged",
        fix="restore the file from a copy, or start the run again",
        who=str(path),
        hint="the server's store is damaged",
    )


def _unwritable(folder: Path, error: OSError) -> Problem:
    return Problem(
        Reason.STORE,
        f"a blob cannot be written: {error.strerror or error}",
        rule="a blob is on the disk before anything refers to it",
        fix="free space or repair the folder: what was there is intact",
        who=str(folder),
        hint="the server's store is away",
    )
