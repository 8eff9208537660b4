"""Where a run runs, for lineage."""

from __future__ import annotations

import getpass
import json
import mmap
import platform
import socket
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from mycelia.engine.environment import code_version, describe, memory


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=A", "-c", "user.email=a@b.c", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_versions_and_machine_are_said_and_nothing_that_names_a_person(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2-hunter2")
    said = describe()
    assert said["versions"]["torch"] == version("torch")
    assert said["versions"]["python"] == platform.python_version()
    assert said["machine"]["cores"] >= 1
    assert said["machine"]["memory_bytes"] > 2**28
    text = json.dumps(said)
    assert "hunter2" not in text
    assert socket.gethostname() not in text or len(socket.gethostname()) < 4
    assert f"/{getpass.getuser()}/" not in text


def test_the_code_version_is_the_commit_and_whether_files_differ(tmp_path: Path) -> None:
    assert code_version(tmp_path) == ""
    assert code_version(tmp_path / "gone") == ""
    git(tmp_path, "init", "-q")
    assert code_version(tmp_path) == ""
    (tmp_path / "train.py").write_text("lr = 1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert code_version(tmp_path) == commit
    (tmp_path / "train.py").write_text("lr = 2")
    assert code_version(tmp_path) == f"{commit}-dirty"


def test_without_git_the_code_version_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_version(Path(__file__).parent) == ""


def test_memory_is_that_of_this_process() -> None:
    before = memory()
    block = mmap.mmap(-1, 64_000_000)  # straight from the system: a heap may hold freed memory
    for page in range(0, len(block), 4096):
        block[page] = 1
    after = memory()
    assert after.now - before.now > 50_000_000
    assert after.peak >= after.now - 1_000_000
    block.close()
