"""A file system of 256 kB, for tests of a full disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """Mount it at `path`; a test that may not mount is skipped."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", path],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill(path: Path, leave: int = 0) -> Path:
    """Fill the disk with one file and leave so many bytes; the file."""
    ballast = path / "ballast"
    free = os.statvfs(path).f_bavail * os.statvfs(path).f_bsize
    ballast.write_bytes(b"x" * max(0, free - leave))
    return ballast
