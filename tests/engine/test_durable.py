"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mycelia.engine import durable
from mycelia.engine.durable import hold, write_whole


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_whole(path, b"one")
    write_whole(path, b"another", mode=0o640)
    assert path.read_bytes() == b"another"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_owner_reads_it_by_default(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_whole(path, b"secret")
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_was_there_stays_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    write_whole(path, b"one")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"another")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_one_process_holds_a_file_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    code = (
        "import os, sys; from mycelia.engine.durable import hold;"
        "sys.exit(0 if hold(os.open(sys.argv[1], os.O_RDWR)) else 7)"
    )

    def other() -> int:
        return subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode

    file = os.open(path, os.O_RDWR)
    assert hold(file)
    assert other() == 7
    os.close(file)
    assert other() == 0
