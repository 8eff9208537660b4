"""Keep freed memory in the process: a heap that shrinks and grows pays for its pages in every step."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_heap"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LIMIT = 1 << 30


def keep_heap() -> bool:
    """Tell glibc to keep blocks up to 1 GiB on the heap; False where the C library has no such setting.

    Meant for processes that train in a loop and whose memory is reused from step to step.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LIMIT)) and bool(mallopt(_M_TRIM_THRESHOLD, _LIMIT))
