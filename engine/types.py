"""Type aliases shared by the engine."""

from __future__ import annotations

import torch

__all__ = ["Tensors"]

Tensors = dict[str, torch.Tensor]
