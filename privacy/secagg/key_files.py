"""Keys, certificates and small documents in files: written whole or not at all, read where they are safe.

What is secret has mode 0600 and lies in a folder that nobody else can write; anything else is refused, as
nobody can tell any more who has the key.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final, Self

from mycelia.engine.durable import hold, sync_folder, write_whole
from mycelia.engine.errors import DataError

__all__ = [
    "PUBLIC",
    "SECRET",
    "FolderLock",
    "check_folder",
    "new_folder",
    "read_public",
    "read_secret",
    "write_file",
]

SECRET: Final = 0o600
"""The mode of a file that only its owner reads."""
PUBLIC: Final = 0o644
"""The mode of a file for everybody."""
_MAX_SECRET: Final = 2**16
_LOCK: Final = "lock"


def read_secret(path: Path, limit: int = _MAX_SECRET) -> bytes:
    """A file that only its owner can read.

    Raises:
        DataError: it is missing, open to other users, no ordinary file, or longer than `limit` bytes.
    """
    with _open(path) as file:
        mode = os.fstat(file.fileno()).st_mode
        if os.name == "posix" and mode & 0o077:
            raise DataError(
                f"its mode is {stat.S_IMODE(mode):04o}",
                rule="nobody but its owner can read or write a file with a secret",
                fix=f"find out who could read it; then chmod 600 {path}, or make a new one",
                who=str(path),
            )
        return _read(file, path, limit)


def read_public(path: Path, limit: int = _MAX_SECRET) -> bytes:
    """A file for everybody.

    Raises:
        DataError: it is missing, no ordinary file, or longer than `limit` bytes.
    """
    with _open(path) as file:
        return _read(file, path, limit)


def write_file(path: Path, data: bytes, mode: int, *, replace: bool = False) -> None:
    """Write a file whole or not at all, and durably.

    Args:
        path: where.
        data: its content.
        mode: `SECRET` or `PUBLIC`.
        replace: put it in the place of a file that is there.

    Raises:
        DataError: there is a file and it is not to be replaced, or it cannot be written.
    """
    try:
        if not replace:  # takes the name, so that of two who write it one fails
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, SECRET))
        try:
            write_whole(path, data, mode=mode)
        except BaseException:
            if not replace:
                path.unlink(missing_ok=True)
            raise
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:
        raise _failed("written", path, error) from error


def new_folder(path: Path, files: Mapping[str, tuple[bytes, int]]) -> None:
    """Make a folder of mode 0700 with these files, whole or not at all, and durably.

    Args:
        path: where; there may be an empty folder.
        files: content and mode by name.

    Raises:
        DataError: there is something already, or it cannot be written.
    """
    path = Path(os.path.abspath(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise _exists(path)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))  # mode 0700
        try:
            for name, (data, mode) in files.items():
                write_whole(temporary / name, data, mode=mode)
            temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise _failed("written", path, error) from error


def check_folder(folder: Path, kind: str) -> None:
    """Refuse a folder in which somebody else could put other keys.

    Args:
        folder: which.
        kind: what it is, for the errors.

    Raises:
        DataError: there is none, or others can write to it.
    """
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        raise _unusable(folder, kind, error.strerror or str(error)) from error
    if not stat.S_ISDIR(mode):
        raise _unusable(folder, kind, "it is no folder")
    if os.name == "posix" and mode & 0o022:
        raise DataError(
            f"its mode is {stat.S_IMODE(mode):04o}",
            rule="nobody but its owner can write to a folder with keys",
            fix=f"find out who could change it; then chmod 700 {folder}",
            who=str(folder),
        )


class FolderLock:
    """Keeps a folder with keys to one process, from `take` until `release` or the end of the process."""

    def __init__(self, file: int) -> None:
        self._file = file

    @classmethod
    def take(cls, folder: Path, kind: str) -> Self:
        """Lock a folder.

        Args:
            folder: which; nobody but its owner may write there.
            kind: what it is, for the errors.

        Raises:
            DataError: there is none, others can write to it, or another process has it.
        """
        check_folder(folder, kind)
        try:
            file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), SECRET)
        except OSError as error:
            raise _unusable(folder, kind, error.strerror or str(error)) from error
        if not hold(file):
            os.close(file)
            raise DataError(
                "another process is using it",
                rule=f"one process at a time uses a folder that is {kind}",
                fix="wait for it or stop it",
                who=str(folder),
            )
        return cls(file)

    def release(self) -> None:
        """Let go; releasing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _open(path: Path) -> BinaryIO:
    try:
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)  # waits for no pipe
        file = os.open(path, flags)
    except OSError as error:
        raise _failed("read", path, error) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise DataError("it is no ordinary file", rule="keys and documents are ordinary files", who=str(path))
    return os.fdopen(file, "rb")


def _read(file: BinaryIO, path: Path, limit: int) -> bytes:
    try:
        data = file.read(limit + 1)
    except OSError as error:
        raise _failed("read", path, error) from error
    if len(data) > limit:
        raise DataError(f"it has more than {limit} bytes", rule="the file that was named", who=str(path))
    return data


def _unusable(folder: Path, kind: str, why: str) -> DataError:
    return DataError(
        f"it cannot be used: {why}", rule=f"a folder that is {kind}", fix="look at the path", who=str(folder)
    )


def _exists(path: Path) -> DataError:
    return DataError(
        "there is something already",
        rule="keys and documents are never overwritten",
        fix="name another place, or move what is there away",
        who=str(path),
    )


def _failed(what: str, path: Path, error: OSError) -> DataError:
    return DataError(
        f"it cannot be {what}: {error.strerror or error}",
        rule=f"a file or folder that can be {what}",
        fix="look at the path and at the rights of its folder",
        who=str(path),
    )
