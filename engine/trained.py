"""The model that a run has trained: as its configuration says, with the weights of its newest checkpoint."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.checkpoint import Checkpoint
from mycelia.engine.config import Named
from mycelia.engine.data import Dataset, load
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.losses import get
from mycelia.engine.models import build
from mycelia.engine.run import CHECKPOINTS, Run
from mycelia.engine.schema import model_sha256
from mycelia.engine.types import Tensors

__all__ = ["Trained", "of_run", "of_weights"]

_PARAMETER, _BUFFER = "parameter/", "buffer/"


@dataclass(frozen=True, eq=False)
class Trained:
    """A model with its weights, in evaluation mode.

    Attributes:
        module: the model.
        name: as the configuration has it.
        sha256: of its tensors, as results say it.
        data: what it was trained on; None: not known.
        dataset: the data that its shape is from.
        run_dir: of the run; "": it comes from none.
        step: of the checkpoint: a step, or a round of a federation.
    """

    module: nn.Module
    name: str
    sha256: str
    dataset: Dataset
    data: Named | None = None
    run_dir: str = ""
    step: int = 0


def of_run(path: Path, dataset: Dataset | None = None) -> Trained:
    """The model of a run folder, of `mycelia train` or of a federation.

    Args:
        path: the folder.
        dataset: with inputs and classes of the model's shape; None: what the run was trained on.

    Raises:
        ConfigError: no run, or a configuration that names no model.
        DataError: no intact checkpoint, or one of another model.
    """
    run = Run.open(path)
    table = _table(run)
    model = _named(table, "model", run)
    data = _named(table, "data", run) if "data" in table else None
    if model is None:
        raise ConfigError(
            "the run's configuration names no model", rule="model = … in config.toml", who=str(run.path)
        )
    if dataset is None:
        if data is None or data.name == "none":
            raise ConfigError(
                "the run's configuration names no data",
                rule="inputs and classes of a model are those of its data",
                fix="name the data",
                who=str(run.path),
            )
        dataset = load(data.name, **data.options)
    module = build(
        model.name, dataset.input_shape, dataset.classes, seed=int(table.get("seed", 0)), **model.options
    )
    if not (run.path / CHECKPOINTS).is_dir():
        raise DataError("the run has no checkpoint", rule="its model is in the newest one", who=str(run.path))
    checkpoint = run.load_checkpoint()
    weights = _weights(checkpoint, module, dataset, str(table.get("loss") or ""))
    sha256 = _fill(module, weights, str(run.path))
    return Trained(module, model.name, sha256, dataset, data, str(run.path), checkpoint.step)


def of_weights(model: Named, weights: Path, dataset: Dataset) -> Trained:
    """A model by its name, or `package.module:function`, with weights from a file.

    Args:
        model: as in a configuration.
        weights: a safetensors file with the names of the model's `state_dict`.
        dataset: with inputs and classes of the model's shape.

    Raises:
        ConfigError: an unknown model.
        DataError: a file that is none, or of another model.
    """
    module = build(model.name, dataset.input_shape, dataset.classes, **model.options)
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"the weights cannot be read: {error}", rule="a safetensors file", who=str(weights)
        ) from error
    return Trained(module, model.name, _fill(module, tensors, str(weights)), dataset)


def _table(run: Run) -> Mapping[str, Any]:
    try:
        return tomllib.loads(run.config_toml)
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"config.toml cannot be read ({error})", who=str(run.path)) from error


def _named(table: Mapping[str, Any], key: str, run: Run) -> Named | None:
    try:
        return Named.model_validate(table[key]) if key in table else None
    except ValidationError as error:
        raise DataError(f"config.toml: {key} is {table[key]!r}", who=str(run.path)) from error


def _weights(checkpoint: Checkpoint, module: nn.Module, dataset: Dataset, loss: str) -> Tensors:
    """By the names of the model: as training keeps them, or from the vector of a federation."""
    tensors = checkpoint.tensors
    buffers = {
        name.removeprefix(_BUFFER): tensor for name, tensor in tensors.items() if name.startswith(_BUFFER)
    }
    if "vector" not in tensors:
        return buffers | {
            name.removeprefix(_PARAMETER): tensor
            for name, tensor in tensors.items()
            if name.startswith(_PARAMETER)
        }
    inputs, targets = (
        torch.from_numpy(array[:2].copy()) for array in (dataset.train.inputs, dataset.train.targets)
    )
    usual = "mse" if dataset.classes is None else "cross-entropy"
    program = capture(module, get(usual if loss in ("", "auto") else loss), (inputs, targets))
    if checkpoint.meta.get("schema", program.schema.sha256) != program.schema.sha256:
        raise _other()
    return buffers | program.unflatten(tensors["vector"]) | program.frozen


def _fill(module: nn.Module, weights: Tensors, who: str) -> str:
    """Put them in, and say their hash."""
    wanted: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    kept = set(module.state_dict())
    for name, tensor in wanted.items():
        found = weights.get(name)
        if found is None and name not in kept:
            continue  # not part of what is saved
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            raise _other(name, who, found, tensor)
    if unknown := sorted(weights.keys() - wanted.keys() - kept):
        raise DataError(f"the model has no tensor {unknown[0]!r}", rule="weights of this model", who=who)
    with torch.no_grad():
        for name, tensor in wanted.items():
            if name in weights:
                tensor.copy_(weights[name])
    module.eval()
    return model_sha256({name: weights[name] for name in wanted if name in weights})


def _other(
    name: str = "", who: str = "", found: Tensor | None = None, wanted: Tensor | None = None
) -> DataError:
    if wanted is None:
        what = "the checkpoint is of another model"
    elif found is None:
        what = f"there is no tensor {name!r}"
    else:
        mine = f"{list(wanted.shape)} {wanted.dtype}"
        what = f"{name!r} is {list(found.shape)} {found.dtype}, the model's {mine}"
    return DataError(
        what,
        rule="the weights are those of the model that the configuration names",
        fix="the model's code and the data are as when it was trained",
        who=who or "checkpoint",
    )
