"""Imported by the process that workers of tests are forked from."""

from __future__ import annotations

import multiprocessing
import os
from typing import Final

import mycelia.simulations.backends.workers  # noqa: F401 - imported once for all of them

_parent: Final = os.getppid


def _asked() -> int:
    """A worker stops when the process that asked for it has gone, which is not the one it was forked from."""
    asking = multiprocessing.parent_process()
    if asking is None or asking.pid is None:
        return _parent()
    return asking.pid if asking.is_alive() else 0


os.getppid = _asked
