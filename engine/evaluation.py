"""A model measured on examples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mycelia.engine.data import Examples
from mycelia.engine.metrics import Metrics
from mycelia.engine.program import Program
from mycelia.engine.types import Tensors

__all__ = ["CHUNK", "measure"]

CHUNK = 1000
"""Examples a call: enough to fill the kernels, few enough to share among workers."""


def measure(
    program: Program,
    vector: Tensor,
    buffers: Tensors,
    examples: Examples,
    classes: int | None,
    rows: npt.NDArray[np.int64] | None = None,
) -> Metrics:
    """Losses and right answers of a model.

    Args:
        program: the model and its loss.
        vector: parameters [d].
        buffers: float buffers and counters.
        examples: what it is measured on.
        classes: number of classes; None for regression.
        rows: which of the examples; None: all.
    """
    rows = np.arange(len(examples)) if rows is None else rows
    metrics = Metrics(classes=classes)
    params = program.unflatten(vector)
    with torch.no_grad():
        for first in range(0, len(rows), CHUNK):
            part = rows[first : first + CHUNK]
            inputs = torch.from_numpy(examples.inputs[part])
            targets = torch.from_numpy(examples.targets[part])
            forward = program.forward(params, buffers, inputs, targets, training=False)
            metrics = metrics.update(forward.outputs, forward.losses, targets)
    return metrics
