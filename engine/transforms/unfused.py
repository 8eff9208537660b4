"""Operators that hide where a parameter meets the examples, as plain operators that show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mycelia.engine.recurrent import gru_cell, lstm_cell, relu_cell, tanh_cell

__all__ = ["UNFUSED"]

aten = torch.ops.aten


def _embedding_bag(
    weight: Tensor, ids: Tensor, offsets: Tensor, by_frequency: bool = False, mode: int = 0,
    sparse: bool = False, weights: Tensor | None = None, last_offset: bool = False,
    padding: int | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """A lookup for each id, and a sum over those of a bag; for "max", a lookup of single entries."""
    starts = offsets[:-1] if last_offset else offsets
    bags, width = starts.shape[0], weight.shape[1]
    keep = torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding
    # the bag of each id: the last one that starts at it or before
    bag = torch.searchsorted(starts, torch.arange(ids.shape[0], device=ids.device), right=True) - 1
    count = torch.zeros(bags, dtype=weight.dtype, device=ids.device).index_add(0, bag, keep.to(weight.dtype))
    if mode == 2:
        options = (False, 2, False, None, last_offset, padding)
        winners = aten.embedding_bag.padding_idx(weight.detach(), ids, offsets, *options)[3]
        entries = winners * width + torch.arange(width, device=ids.device)
        found = F.embedding(entries, weight.reshape(-1, 1)).squeeze(-1)
        return torch.where(count[:, None] > 0, found, 0.0), None, None, None
    rows = F.embedding(ids, weight)
    if padding is not None:
        rows = torch.where(keep[:, None], rows, 0.0)
    if weights is not None:
        rows = rows * weights[:, None]
    total = torch.zeros(bags, width, dtype=weight.dtype, device=ids.device).index_add(0, bag, rows)
    return total / count.clamp(min=1)[:, None] if mode == 1 else total, None, None, None


def _instance_norm(
    value: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None,
    from_input: bool, momentum: float, epsilon: float, cudnn: bool,
) -> Tensor:  # fmt: skip
    plain = aten.instance_norm.default(
        value, None, None, mean, variance, from_input, momentum, epsilon, cudnn
    )
    return _scaled(plain, weight, bias, value)


def _fixed_batch_norm(
    value: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor,
    momentum: float, epsilon: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Batch normalisation with the running averages, which belong to no example."""
    shape = [1, -1, *[1] * (value.dim() - 2)]
    plain = (value - mean.reshape(shape)) * (variance + epsilon).rsqrt().reshape(shape)
    return _scaled(plain, weight, bias, value), None, None


def _scaled(plain: Tensor, weight: Tensor | None, bias: Tensor | None, like: Tensor) -> Tensor:
    shape = [1, -1, *[1] * (plain.dim() - 2)]
    plain = plain if weight is None else plain * weight.reshape(shape)
    plain = plain if bias is None else plain + bias.reshape(shape)
    return plain.to(like.dtype)


def _weight_norm(direction: Tensor, length: Tensor, axis: int = 0) -> Tensor:
    """Salimans & Kingma (2016), equation 2; -1: the norm of the whole."""
    axes = [n for n in range(direction.dim()) if n != axis]
    norm: Tensor = torch.linalg.vector_norm(direction, 2, axes, keepdim=True)
    return direction * (length / norm)


def _repeat(value: Tensor, repeats: list[int]) -> Tensor:
    """Copies in an axis of their own, before the one they repeat."""
    shape = [1] * (len(repeats) - value.dim()) + list(value.shape)
    pairs = list(zip(repeats, shape, strict=True))
    single = value.reshape([size for _, length in pairs for size in (1, length)])
    copies = single.expand([size for pair in pairs for size in pair])
    return copies.reshape([count * length for count, length in pairs])


UNFUSED: Mapping[Any, Callable[..., Any]] = {
    aten.embedding_bag.default: _embedding_bag,
    aten.embedding_bag.padding_idx: _embedding_bag,
    aten.instance_norm.default: _instance_norm,
    aten._native_batch_norm_legit_no_training.default: _fixed_batch_norm,
    aten._weight_norm.default: _weight_norm,
    aten.repeat.default: _repeat,
    aten.lstm_cell.default: lstm_cell,
    aten.gru_cell.default: gru_cell,
    aten.rnn_tanh_cell.default: tanh_cell,
    aten.rnn_relu_cell.default: relu_cell,
    aten.einsum.default: aten.einsum.default,
}
"""The plain form of an operator, as a function of the same arguments; `einsum` is itself a composite one."""
