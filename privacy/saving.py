"""The checkpoint of a private loop on disk: what may be published in one folder, secrets in another.

`step-00000012/` is a checkpoint of `mycelia.engine.checkpoint`: model and optimiser, and as JSON the
settings, the clip bound and the ledger's head. `secret/`, which only its owner may read, has the key of noise
and draws, and what factorised noise remembers. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from mycelia.engine.checkpoint import load_checkpoint, save_checkpoint
from mycelia.engine.durable import write_whole
from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.engine.types import Tensors
from mycelia.privacy.factorisation import NoiseState
from mycelia.privacy.noise.source import NoiseSource

__all__ = ["SECRET", "Saved", "claim", "read", "write"]

SECRET = "secret"
"""The subfolder that is never published."""

_KEY = "noise.key"
_KEPT = 2


@dataclass(frozen=True)
class Saved:
    """One checkpoint.

    Attributes:
        state: where the run stands, as `PrivateTraining.state_dict` has it.
        run: the settings it was made with.
        model: tensors by name.
        optimizer: the optimiser's own `state_dict`.
        extra: what the loop keeps.
        source: the secret.
        memory: of factorised noise; None without one, or where it has to be made again.
    """

    state: dict[str, Any]
    run: dict[str, Any]
    model: Tensors
    optimizer: dict[str, Any]
    extra: dict[str, Any]
    source: NoiseSource
    memory: NoiseState | None


def claim(folder: Path, source: NoiseSource, *, own: bool, coming: str = "") -> None:
    """Make the folder, and put the secret there.

    Args:
        folder: of the run.
        source: the secret.
        own: whether this run has written there before, or was loaded from there.
        coming: name of a file that the run is about to make there.

    Raises:
        ConfigError: it has another run.
        MyceliaError: it cannot be written.
    """
    key = folder / SECRET / _KEY
    if not own and (key.exists() or (coming and (folder / coming).exists())):
        raise ConfigError(
            "the folder has a run already",
            rule="a folder holds one run, with one secret and one ledger",
            fix="call train.load(folder) first to go on with that one, or name another folder",
            who=str(folder),
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        key.parent.mkdir(mode=0o700, exist_ok=True)
        if not key.exists() or NoiseSource.load(key) != source:
            source.save(key)
    except OSError as error:
        raise _unwritable(folder, error) from error


def write(folder: Path, saved: Saved) -> None:
    """Write a checkpoint into a folder that was claimed; the two newest are kept.

    Raises:
        DataError: a value that is no number, string, tensor or collection of these.
        MyceliaError: it cannot be written; earlier checkpoints are as they were.
    """
    step = int(saved.state["steps"])
    tensors: Tensors = {f"model/{name}": tensor for name, tensor in saved.model.items()}
    meta: dict[str, Any] = {
        "state": saved.state,
        "run": saved.run,
        "optimizer": _plain(saved.optimizer, "optimizer", tensors),
        "extra": _plain(saved.extra, "extra", tensors),
        "memory": None if saved.memory is None else _write_memory(folder / SECRET, saved.memory),
    }
    save_checkpoint(folder, step, tensors, meta)
    for old in sorted((folder / SECRET).glob("noise-*.safetensors"))[:-_KEPT]:
        old.unlink(missing_ok=True)


def read(folder: Path) -> Saved:
    """The newest checkpoint that is intact.

    Raises:
        DataError: there is none, or no key.
        ConfigError: others than the owner may read the key.
    """
    try:
        found = load_checkpoint(folder)
    except DataError as error:
        fix = "name the folder that train.save wrote, or begin a new run in another one"
        raise DataError(error.found, rule=error.rule, fix=fix, who=str(folder)) from error
    source = NoiseSource.load(folder / SECRET / _KEY)
    meta, tensors = found.meta, found.tensors
    try:
        return Saved(
            meta["state"],
            meta["run"],
            {n.removeprefix("model/"): tensor for n, tensor in tensors.items() if n.startswith("model/")},
            _rich(meta["optimizer"], tensors),
            _rich(meta["extra"], tensors),
            source,
            _read_memory(folder / SECRET, found.step, meta["memory"]),
        )
    except KeyError as error:
        raise DataError(
            f"the checkpoint of step {found.step} has no {error}",
            rule="it was written by PrivateTraining.save",
            who=str(folder),
        ) from error


def _memory_path(secret: Path, step: int) -> Path:
    return secret / f"noise-{step:08d}.safetensors"


def _write_memory(secret: Path, memory: NoiseState) -> str:
    """Keep the memory, for its owner alone; its hash."""
    import safetensors.torch

    content = safetensors.torch.save({n: slots.contiguous() for n, slots in memory.slots.items()})
    path = _memory_path(secret, memory.step)
    try:
        write_whole(path, content)
    except OSError as error:
        raise _unwritable(secret, error) from error
    return sha256(content).hexdigest()


def _read_memory(secret: Path, step: int, digest: str | None) -> NoiseState | None:
    """What was kept, or None where it is gone or changed: the key can make it again."""
    import safetensors.torch

    try:
        content = _memory_path(secret, step).read_bytes()
    except OSError:
        return None
    if sha256(content).hexdigest() != digest:
        return None
    return NoiseState(step, safetensors.torch.load(content))


def _plain(value: object, name: str, tensors: Tensors) -> Any:
    """A value as JSON can say it, with its tensors put aside by name."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return {"items": [[key, _plain(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    raise DataError(
        f"{name} is a {type(value).__name__}",
        rule="checkpoints hold numbers, strings, tensors and collections of these, and no code",
        fix="keep it as one of those",
        who="checkpoint",
    )


def _rich(value: Any, tensors: Tensors) -> Any:
    """The inverse of `_plain`."""
    if isinstance(value, list):
        return [_rich(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(_rich(item, tensors) for item in value["tuple"])
    return {key: _rich(item, tensors) for key, item in value["items"]}


def _unwritable(folder: Path, error: OSError) -> MyceliaError:
    return MyceliaError(
        f"the checkpoint cannot be written: {error.strerror or error}",
        rule="a checkpoint is on the disk before the run goes on",
        fix="free space or see to the rights of the folder: earlier checkpoints are intact",
        who=str(folder),
    )
