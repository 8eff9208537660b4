"""The numbers that some detectors and filters look at: a layer's output for many inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mycelia.attacks.detectors.base import as_rows
from mycelia.attacks.layers import layer_output
from mycelia.attacks.model import ModuleModel
from mycelia.engine.errors import DataError

__all__ = ["activations"]


def activations(model: nn.Module, layer: str, x: Any, *, batch: int = 256) -> Tensor:
    """The flattened output of a layer, of the model in evaluation mode; afterwards it is as it was.

    Args:
        model: has the layer.
        layer: see `layer_output`.
        x: inputs [n, …], floating point, a tensor or an array, n at least 1.
        batch: rows at a time, at least 1.

    Returns:
        [n, d], without a gradient.

    Raises:
        ConfigError: no such layer.
        DataError: no rows, or see `layer_output`.
    """
    rows = as_rows(x)
    if not len(rows):
        raise DataError("no rows", rule="at least one", who="x")
    with ModuleModel(model).quiet(), torch.no_grad():
        return torch.cat([layer_output(model, layer, some) for some in rows.split(batch)])
