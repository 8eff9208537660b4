"""A model measured on examples."""

from __future__ import annotations

import torch

from mycelia.engine.data import Examples
from mycelia.engine.metrics import Metrics
from mycelia.engine.program import Program
from mycelia.engine.types import Tensors

__all__ = ["evaluate"]


def evaluate(
    program: Program,
    params: Tensors,
    buffers: Tensors,
    examples: Examples,
    metrics: Metrics,
    *,
    batch_size: int = 256,
) -> Metrics:
    """`metrics` with all `examples` added, in evaluation mode."""
    with torch.no_grad():
        for first in range(0, len(examples), batch_size):
            rows = slice(first, first + batch_size)
            # copied: torch refuses arrays that may not be written
            inputs, targets = (torch.from_numpy(a[rows].copy()) for a in (examples.inputs, examples.targets))
            result = program.forward(params, buffers, inputs, targets, training=False)
            metrics = metrics.update(result.outputs, result.losses, targets)
    return metrics
