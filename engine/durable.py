"""Files that are there whole or not at all, also after a power cut, and that one process holds at a time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

__all__ = ["hold", "sync_folder", "write_whole"]


def write_whole(path: Path, content: bytes | Iterable[bytes | memoryview], *, mode: int = 0o600) -> None:
    """Write a file under its name only once all of it is on the disk; one that is there is replaced.

    Args:
        path: in a folder that exists.
        content: all of it, in one piece or in several.
        mode: who may read and write it; the default is its owner alone.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            if os.name == "posix":
                os.fchmod(descriptor, mode)
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put a folder's own entries on the disk: a new name is there only when its folder is.

    Windows keeps them without, and cannot open a folder.
    """
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hold(file: int) -> bool:
    """Hold an open file until it is closed; false if another process has it.

    Where the system has no such lock, as on some network file systems, it goes on without.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
