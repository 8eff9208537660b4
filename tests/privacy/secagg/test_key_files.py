"""Files with keys: whole or not at all, nothing overwritten, and read only where nobody else could."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mycelia.engine.errors import DataError
from mycelia.privacy.secagg.key_files import (
    PUBLIC,
    SECRET,
    FolderLock,
    new_folder,
    read_public,
    read_secret,
    write_file,
)


def crash(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_file(tmp_path: Path) -> None:
    for mode in (SECRET, PUBLIC):
        path = tmp_path / f"{mode:o}"
        write_file(path, b"first", mode)
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"first", mode)
        with pytest.raises(DataError, match="already"):
            write_file(path, b"second", mode)
        assert read_public(path) == b"first"
        write_file(path, b"second", mode, replace=True)
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"second", mode)
    with pytest.raises(DataError, match="cannot be written"):
        write_file(tmp_path / "no" / "file", b"", SECRET)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "old", b"first", SECRET)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", crash)
        for path, replace in ((tmp_path / "new", False), (tmp_path / "old", True)):
            with pytest.raises(DataError, match="No space left"):
                write_file(path, b"second", SECRET, replace=replace)
        with pytest.raises(DataError, match="No space left"):
            new_folder(tmp_path / "folder", {"a": (b"", SECRET)})
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_bytes() == b"first"


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o755)
    for path in (tmp_path / "empty", tmp_path / "a" / "b"):
        new_folder(path, {"key": (b"k", SECRET), "crt": (b"c", PUBLIC)})
        assert path.stat().st_mode & 0o777 == 0o700
        assert (read_secret(path / "key"), read_public(path / "crt")) == (b"k", b"c")
        with pytest.raises(DataError, match="already"):
            new_folder(path, {})
        with pytest.raises(DataError, match="already"):
            new_folder(path / "key", {})


def test_what_is_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_file(path, bytes(100), SECRET)
    for mode in (0o640, 0o620, 0o604, 0o602, 0o666):
        path.chmod(mode)
        with pytest.raises(DataError, match="chmod 600"):
            read_secret(path)
    path.chmod(0o400)
    assert read_secret(path, 100) == bytes(100)
    with pytest.raises(DataError, match="more than 99 bytes"):
        read_secret(path, 99)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for other in ("pipe", "."):
        with pytest.raises(DataError, match="ordinary"):
            read_secret(tmp_path / other)
    (tmp_path / "link").symlink_to(path)
    path.chmod(0o644)
    with pytest.raises(DataError, match="0644"):
        read_secret(tmp_path / "link")


def test_one_holds_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    new_folder(folder, {})
    lock = FolderLock.take(folder, "a test's")
    with pytest.raises(DataError, match="a folder that is a test's"):
        FolderLock.take(folder, "a test's")
    lock.release()
    lock.release()
    FolderLock.take(folder, "a test's").release()
    folder.chmod(0o720)
    with pytest.raises(DataError, match="chmod 700"):
        FolderLock.take(folder, "a test's")
    for path in (tmp_path / "no", folder / "lock"):
        with pytest.raises(DataError, match="cannot be used"):
            FolderLock.take(path, "a test's")
