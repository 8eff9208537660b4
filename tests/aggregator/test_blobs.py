"""Blobs: there whole and unchanged, or an error that names the file."""

import fcntl
import os
import random
import subprocess
import sys
import tracemalloc
from hashlib import sha256
from pathlib import Path

import pytest

from mycelia.aggregator.blobs import Blob, Blobs
from mycelia.aggregator.wire.frames import Problem, Reason
from tests.small_disk import fill, small_disk

DATA = b"a model"
HASH = sha256(DATA).digest()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def corrupt(blobs: Blobs, digest: bytes, match: str) -> None:
    with pytest.raises(Problem, match=match) as caught:
        blobs.get(digest)
    assert caught.value.reason is Reason.STORE_CORRUPT
    assert digest.hex() in str(caught.value)
    assert str(blobs.folder) not in caught.value.hint  # what the other side is told names no file


def test_what_is_put_is_there(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs")
    blob = blobs.put([b"a ", memoryview(b"mod"), bytearray(b"el")])
    assert blob == blobs.get(HASH) == Blobs(tmp_path / "blobs").get(HASH)
    assert (blob.sha256, blob.size, blob.name) == (HASH, 7, HASH.hex())
    with blob.open() as data:
        assert bytes(data) == DATA
    assert HASH in blobs
    assert files(blobs.folder) == [HASH.hex()]
    assert (tmp_path / "blobs").stat().st_mode & 0o777 == 0o700
    assert blob.path.stat().st_mode & 0o777 == 0o600


def test_the_same_bytes_are_the_same_blob(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    assert blobs.put([DATA]) == blobs.put([DATA[:3], DATA[3:]])
    assert files(tmp_path) == [HASH.hex()]


def test_a_blob_has_bytes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without bytes"):
        Blobs(tmp_path).put([])
    assert files(tmp_path) == []


def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def parts() -> object:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Blobs(tmp_path).put(parts())  # type: ignore[arg-type]
    assert files(tmp_path) == []


@pytest.mark.parametrize("damage", [b"a modem", b"a mode", b"a model!", b""])
def test_a_damaged_blob_is_named(tmp_path: Path, damage: bytes) -> None:
    blobs = Blobs(tmp_path)
    blob = blobs.put([DATA])
    blobs.get(HASH)
    blob.path.write_bytes(damage)
    corrupt(blobs, HASH, "not those that were stored")
    corrupt(Blobs(tmp_path), HASH, "not those that were stored")
    assert blobs.put([DATA]) == blobs.get(HASH)  # the right bytes repair it


def test_a_missing_blob_is_named(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    corrupt(blobs, HASH, "missing")
    assert HASH not in blobs
    with pytest.raises(Problem, match="STORE_CORRUPT"):
        Blob(HASH, 7, tmp_path / "none").map()


def test_durable_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(file: int) -> None:
        steps.append("folder" if os.path.isdir(f"/proc/self/fd/{file}") else "file")
        fsync(file)

    def note_replace(self: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    Blobs(tmp_path).put([DATA])
    assert steps == ["file", "rename", "folder"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        blobs = Blobs(disk / "blobs")
        blobs.put([DATA])
        fill(disk, leave=20_000)
        with pytest.raises(Problem, match="cannot be written") as caught:
            blobs.put([random.Random(1).randbytes(10_000) for _ in range(10)])
        assert caught.value.reason is Reason.STORE
        assert files(blobs.folder) == [HASH.hex()]
        with blobs.get(HASH).open() as data:
            assert bytes(data) == DATA


# --- orphans ---


def test_orphans_are_swept(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    kept, orphan = blobs.put([DATA]), blobs.put([b"another"])
    (tmp_path / ".writing-abc").write_bytes(b"half of someth")
    (tmp_path / "README").write_bytes(b"not ours")
    assert sorted(blobs.sweep([kept.sha256])) == sorted([".writing-abc", orphan.name])
    assert files(tmp_path) == sorted(["README", kept.name])
    corrupt(blobs, orphan.sha256, "missing")


def test_what_another_process_writes_stays(tmp_path: Path) -> None:
    path = tmp_path / ".writing-abc"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code = "import sys, pathlib; from mycelia.aggregator.blobs import Blobs; "
        code += "print(Blobs(pathlib.Path(sys.argv[1])).sweep([]))"
        swept = subprocess.run(
            [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True, timeout=120
        )
        assert swept.stdout.strip() == "[]"
    assert Blobs(tmp_path).sweep([]) == [".writing-abc"]


def test_young_blobs_stay_where_servers_share(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    young, old = blobs.put([DATA]), blobs.put([b"another"])
    os.utime(old.path, (1, 1))
    assert blobs.sweep([], grace_s=3600) == [old.name]
    assert blobs.sweep([]) == [young.name]


@pytest.mark.parametrize("rounds", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_any_moment(tmp_path: Path, rounds: int) -> None:
    """Whatever the moment, every blob that is there is whole, and the rest is swept."""
    code = """
import pathlib, sys, itertools
from mycelia.aggregator.blobs import Blobs
blobs = Blobs(pathlib.Path(sys.argv[1]))
print("begun", flush=True)
for number in itertools.count():
    blobs.put(bytes([number % 256]) * 4096 for _ in range(64))
"""
    draw = random.Random(1)
    for _ in range(rounds):
        process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(draw.random() / 10)
        process.kill()
        process.wait()
        process.stdout.close()
        names = [name for name in files(tmp_path) if not name.startswith(".")]
        blobs = Blobs(tmp_path)
        for name in names:
            blobs.get(bytes.fromhex(name))
        blobs.sweep([bytes.fromhex(name) for name in names])
        assert files(tmp_path) == names


def test_memory_does_not_depend_on_the_size(tmp_path: Path) -> None:
    part = bytes(2**20)
    tracemalloc.start()
    blob = Blobs(tmp_path).put(part for _ in range(40))
    Blobs(tmp_path).get(blob.sha256)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 2**20
