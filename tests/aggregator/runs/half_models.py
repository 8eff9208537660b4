"""A model in half precision that begins with zeros."""

from __future__ import annotations

import torch
from torch import nn


def half(input_shape: tuple[int, ...], classes: int | None) -> nn.Module:
    model = nn.Linear(input_shape[0], classes or 1).half()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
    return model
