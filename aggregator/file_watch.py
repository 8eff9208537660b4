"""Says when files were replaced: the kernel tells where it can (inotify), elsewhere they are looked at."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

__all__ = ["LOOK_S", "FileWatch"]

LOOK_S: Final = 2.0
"""Seconds between two looks where the kernel tells nothing."""

_MOVED_TO, _CLOSE_WRITE, _DELETE, _MOVED_FROM = 0x80, 0x8, 0x200, 0x40
_READ: Final = 2**16


class FileWatch:
    """Watches files by their folders, so that one which is replaced or not there yet counts as well.

    Args:
        paths: of the files; their folders exist.
        changed: is called in the event loop, once or more for each change.
        kernel: whether to ask the kernel; False looks every `LOOK_S` seconds.
    """

    def __init__(self, paths: Iterable[Path], changed: Callable[[], None], *, kernel: bool = True) -> None:
        self._paths = [Path(os.path.abspath(path)) for path in paths]
        self._changed, self._kernel = changed, kernel
        self._file = -1
        self._timer: asyncio.TimerHandle | None = None
        self._seen = self._look()

    def start(self) -> None:
        """Begin, inside a running event loop."""
        if self._kernel:
            self._file = _inotify({path.parent for path in self._paths})
        if self._file >= 0:
            asyncio.get_running_loop().add_reader(self._file, self._told)
        else:
            self._look_again()
        if self._look() != self._seen:  # between the making and the start
            self._notice()

    def stop(self) -> None:
        """End; stopping twice is harmless."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._file >= 0:
            asyncio.get_running_loop().remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _told(self) -> None:
        try:
            while os.read(self._file, _READ):
                pass
        except BlockingIOError:
            pass
        if self._look() != self._seen:
            self._notice()

    def _look_again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)
        if self._look() != self._seen:
            self._notice()

    def _notice(self) -> None:
        self._seen = self._look()
        self._changed()

    def _look(self) -> list[tuple[int, int, int, int]]:
        return [_state(path) for path in self._paths]


def _state(path: Path) -> tuple[int, int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0, 0)
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def _inotify(folders: Iterable[Path]) -> int:
    """A descriptor that is readable when something in the folders has changed; -1 if there is none."""
    if not sys.platform.startswith("linux"):
        return -1
    try:
        library = ctypes.CDLL(None, use_errno=True)
        file: int = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, AttributeError):  # a library of C without it
        return -1
    if file < 0:
        return -1
    for folder in folders:
        wanted = _MOVED_TO | _MOVED_FROM | _CLOSE_WRITE | _DELETE
        if library.inotify_add_watch(file, os.fsencode(folder), ctypes.c_uint32(wanted)) < 0:
            found = ctypes.get_errno()
            os.close(file)
            if found in (errno.ENOSPC, errno.ENOMEM):  # no watches are left on this machine
                return -1
            raise OSError(found, os.strerror(found), str(folder))
    return file
