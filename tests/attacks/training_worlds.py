"""Small data and programs on which training defences are fast."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from mycelia.engine.capture import capture
from mycelia.engine.data import Examples
from mycelia.engine.losses import cross_entropy
from mycelia.engine.program import Program

__all__ = ["examples", "linear", "normalised"]

FEATURES, CLASSES = 4, 3


def examples(count: int, seed: int = 0) -> Examples:
    """Points of [0, 1]⁴ in three classes."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(CLASSES, size=count)
    inputs = np.clip(
        0.3 + 0.15 * rng.normal(size=(count, FEATURES)) + 0.4 * np.eye(CLASSES, FEATURES)[targets], 0, 1
    )
    return Examples(inputs.astype(np.float32), targets)


def linear(seed: int = 0) -> Program:
    """z = W x + b."""
    return _program(nn.Linear(FEATURES, CLASSES), seed)


def normalised(seed: int = 0) -> Program:
    """Batch statistics first: buffers that only training passes may move."""
    return _program(nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)), seed)


def _program(module: nn.Module, seed: int) -> Program:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    example = (torch.zeros(2, FEATURES), torch.zeros(2, dtype=torch.int64))
    return capture(module, cross_entropy, example, backend="eager")
