"""Checkpoints: a folder a step, complete or absent.

`step-00000012/` holds `tensors.safetensors` and `checkpoint.json` (step, meta and one SHA-256 over all). It
is written under a temporary name, flushed to the disk and renamed, so a crash or a full disk leaves the
checkpoint before it as it was. A step that is saved a second time goes to `step-00000012.1`: at no moment is
the only good copy away.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from mycelia.engine.durable import sync_folder
from mycelia.engine.errors import DataError, MyceliaError
from mycelia.engine.types import Tensors

__all__ = ["Checkpoint", "load_checkpoint", "read_checkpoint", "save_checkpoint"]

_VERSION = 1
_KEPT = 2
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_TEMPORARY = ".saving-"
_TENSORS, _HEADER = "tensors.safetensors", "checkpoint.json"
_BLOCK = 1 << 20
_LIBRARY_SAYS = re.compile(r"^.*I/O error: | \(os error \d+\)$")  # around the system's own words


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step`."""

    step: int
    tensors: Tensors
    meta: dict[str, Any]


def save_checkpoint(directory: Path, step: int, tensors: Tensors, meta: Mapping[str, Any]) -> Path:
    """Save the state after `step` and keep the two newest steps; the folder that holds it.

    `meta` is what JSON can say; floats come back to the bit. Raises `DataError` for a `meta` that JSON cannot
    say, and `MyceliaError` when the disk is full or not writable: earlier checkpoints are then as they were.
    """
    try:
        meta_text = json.dumps(meta, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the checkpoint's meta data cannot be written as JSON ({error})",
            rule="tensors go into `tensors`, everything else is numbers, strings, lists and tables",
            who=f"step {step}",
        ) from error
    try:
        return _write(directory, step, _unshared(tensors), meta_text)
    except (OSError, SafetensorError) as error:  # the library has an error of its own for a full disk
        reason = error.strerror if isinstance(error, OSError) else _LIBRARY_SAYS.sub("", str(error))
        raise MyceliaError(
            f"the checkpoint of step {step} cannot be written: {reason or error}",
            rule="a checkpoint is on the disk before the run goes on",
            fix="free space or repair the folder, then resume: earlier checkpoints are intact",
            who=str(directory),
        ) from error


def load_checkpoint(directory: Path, step: int | None = None) -> Checkpoint:
    """The newest checkpoint that is intact, or the one of `step`; a warning names each that is skipped.

    Raises `DataError` when there is none.
    """
    checkpoint, skipped = read_checkpoint(directory, step)
    for message in skipped:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return checkpoint


def read_checkpoint(directory: Path, step: int | None = None) -> tuple[Checkpoint, list[str]]:
    """As `load_checkpoint`; for each broken checkpoint that was skipped a message instead of a warning."""
    found = [(key, path) for key, path in _saved(directory) if step is None or key[0] == step]
    skipped: list[str] = []
    for (found_step, _), path in found:
        try:
            return _read(path, found_step), skipped
        except (DataError, OSError) as error:
            reason = error.found if isinstance(error, DataError) else str(error)
            skipped.append(f"checkpoint {path.name} is broken and was skipped: {reason}")
    wanted = "" if step is None else f" of step {step}"
    raise DataError(
        f"no intact checkpoint{wanted}" + "".join(f"; {message}" for message in skipped),
        rule="a run goes on from a checkpoint",
        fix="start the run again without --resume"
        if step is None
        else "name another step, or none for the newest",
        who=str(directory),
    )


def _write(directory: Path, step: int, tensors: Tensors, meta_text: str) -> Path:
    import safetensors.torch

    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(stale, ignore_errors=True)  # a save that was killed; a run has one writer
    temporary = directory / f"{_TEMPORARY}{step}"
    try:
        temporary.mkdir()
        safetensors.torch.save_file(tensors, temporary / _TENSORS)  # no copy of a model is made in memory
        digest = _digest(step, temporary / _TENSORS, meta_text)
        header = {"v": _VERSION, "step": step, "sha256": digest, "meta": json.loads(meta_text)}
        (temporary / _HEADER).write_text(json.dumps(header))
        for name in (_TENSORS, _HEADER):
            with (temporary / name).open("rb+") as file:
                os.fsync(file.fileno())
        sync_folder(temporary)
        attempt = max((key[1] + 1 for key, _ in _saved(directory) if key[0] == step), default=0)
        target = directory / (f"step-{step:08d}" + (f".{attempt}" if attempt else ""))
        temporary.rename(target)
        sync_folder(directory)
    except (OSError, SafetensorError):
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _prune(directory)
    return target


def _prune(directory: Path) -> None:
    kept: set[int] = set()
    for (step, _), path in _saved(directory):
        if step in kept or len(kept) == _KEPT:
            shutil.rmtree(path, ignore_errors=True)
        kept.add(step)


def _saved(directory: Path) -> list[tuple[tuple[int, int], Path]]:
    """((step, attempt), folder) of every checkpoint, newest first."""
    folders = directory.iterdir() if directory.is_dir() else ()
    matches = ((_NAME.fullmatch(path.name), path) for path in folders)
    found = [((int(match[1]), int(match[2] or 0)), path) for match, path in matches if match]
    return sorted(found, reverse=True)


def _read(path: Path, step: int) -> Checkpoint:
    import safetensors.torch

    try:
        header = json.loads((path / _HEADER).read_bytes())
        version, meta, digest = header["v"], header["meta"], header["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"checkpoint.json is malformed ({error})") from error
    if version != _VERSION:
        raise DataError(f"it has format version {version!r}, this version of Mycelia reads {_VERSION}")
    if (
        header.get("step") != step
        or _digest(step, path / _TENSORS, json.dumps(meta, sort_keys=True)) != digest
    ):
        raise DataError("its SHA-256 does not match")
    return Checkpoint(step, safetensors.torch.load_file(path / _TENSORS), meta)


def _digest(step: int, tensors: Path, meta_text: str) -> str:
    with tensors.open("rb") as file:
        digest = sha256(f"{_VERSION}\n{step}\n{os.fstat(file.fileno()).st_size}\n".encode())
        while block := file.read(_BLOCK):
            digest.update(block)
    digest.update(meta_text.encode())
    return digest.hexdigest()


def _unshared(tensors: Tensors) -> Tensors:
    """Contiguous CPU tensors of which no two share memory, as the file format wants them."""
    storages: set[int] = set()
    result: Tensors = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        pointer = plain.untyped_storage().data_ptr()
        result[name] = plain.clone() if pointer in storages else plain
        storages.add(pointer)
    return result
