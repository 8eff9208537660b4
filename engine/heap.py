"""How the process keeps memory that was freed."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_heap", "share_heap"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LIMIT = 1 << 30


def keep_heap() -> bool:
    """Tell glibc to keep blocks up to 1 GiB on the heap; False where the C library has no such setting.

    Meant for processes that train in a loop and whose memory is reused from step to step: a heap that shrinks
    and grows pays for its pages in every step.
    """
    return _set(_M_MMAP_THRESHOLD, _LIMIT) and _set(_M_TRIM_THRESHOLD, _LIMIT)


def share_heap() -> bool:
    """Tell glibc to have one heap for all threads; False where the C library has no such setting.

    Meant for processes whose threads hand large blocks to one another, as a server's do: each thread's own
    heap would grow to the most that it ever held. It is for threads that do not exist yet.
    """
    return _set(_M_ARENA_MAX, 1)


def _set(parameter: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(parameter, value))
