"""Embedding tables: the gradient of an example has rows only for the ids that occur in it."""

from __future__ import annotations

import torch
from torch import Tensor

from mycelia.engine.transforms.taps import Reads
from mycelia.privacy.rules.base import Cost, Operator, Use

__all__ = ["OPERATORS", "Embedding"]

aten = torch.ops.aten


class Embedding:
    """A table [V, d]; the row of `padding_idx` has no gradient."""

    def norm2(self, use: Use) -> Tensor:
        """Squared gradient norm of each example [B]: rows of one id add up before they are squared."""
        ids, g = self.rows(use)
        batch, vocabulary = use.batch, use.shape[0]
        example = torch.arange(batch, device=ids.device)[:, None]
        keys, place = torch.unique(example * vocabulary + ids, return_inverse=True)
        sums = g.new_zeros((len(keys), g.shape[-1])).index_add_(0, place.flatten(), g.flatten(0, 1))
        return g.new_zeros(batch).index_add_(0, keys // vocabulary, sums.square().sum(1))

    def total(self, use: Use, factors: Tensor) -> Tensor:
        """Sum over the examples of factor [B] times gradient."""
        ids, g = self.rows(use)
        weighted = (g * factors.to(g.dtype)[:, None, None]).flatten(0, 1)
        return g.new_zeros(use.shape).index_add_(0, ids.flatten(), weighted)

    def grad(self, use: Use) -> Tensor:
        """The gradient of each example [B, V, d]."""
        ids, g = self.rows(use)
        return g.new_zeros((use.batch, *use.shape)).scatter_add_(
            1, ids[:, :, None].expand(-1, -1, g.shape[-1]), g
        )

    def cost(self, use: Use) -> Cost:
        """Rows of the ids that occur."""
        ids, g = self.rows(use)
        return Cost("product", ids.shape[1], ids.shape[1] * g.shape[-1])

    def rows(self, use: Use) -> tuple[Tensor, Tensor]:
        """(ids [B, T], g [B, T, d]) with the padding row's gradients zero."""
        ids = use.values[0].reshape(use.batch, -1)
        g = use.grad.reshape(use.batch, ids.shape[1], use.shape[1])
        padding = use.tap.args[2] if len(use.tap.args) > 2 else -1
        if padding is not None and padding >= 0:
            g = torch.where((ids == padding)[:, :, None], torch.zeros_like(g), g)
        return ids, g


OPERATORS = {aten.embedding.default: Operator(Reads((0,), (1,)), {0: Embedding()})}
