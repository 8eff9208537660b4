"""Where a run runs: machine, versions and code version, for lineage.

Says nothing of the user, the host's name or the environment variables, since reports are passed on.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["Memory", "code_version", "describe", "memory", "resident"]

_LIBRARIES = ("mycelia", "torch", "numpy", "scipy", "scikit-learn", "safetensors", "pyarrow")


def describe() -> dict[str, Any]:
    """Versions, machine and code version as a nested table of strings and numbers; imports no library."""
    return {
        "versions": {"python": platform.python_version()} | _versions(),
        "machine": {
            "system": platform.system(),
            "release": platform.release(),
            "architecture": platform.machine(),
            "cpu": _cpu(),
            "cores": _cores(),
            "memory_bytes": _total_memory(),
        },
        "code": {"mycelia": _own_code(), "project": code_version(Path.cwd())},
    }


def code_version(folder: Path) -> str:
    """The Git commit that `folder` is at, with "-dirty" when files differ from it; empty outside Git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _own_code() -> str:
    """Mycelia's commit when it runs from a checkout; an installed copy is named by its version alone."""
    folder = Path(__file__).resolve().parent
    return "" if "site-packages" in folder.parts else code_version(folder)


@dataclass(frozen=True)
class Memory:
    """Resident memory of this process in bytes, now and at most; 0 where the system does not say."""

    now: int
    peak: int


def memory() -> Memory:
    """The memory of this process."""
    try:
        import resource
    except ImportError:
        return Memory(0, 0)
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return Memory(resident("self"), peak)


def resident(process: int | str) -> int:
    """Resident memory of a process in bytes, 0 where the system does not say."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _total_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0
