"""Layer, RMS and group norm: y = x_hat * gamma + beta, where x_hat belongs to one example."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mycelia.engine.transforms.taps import Reads
from mycelia.privacy.rules.base import Formed, Operator, Use, aligned

__all__ = ["OPERATORS"]

aten = torch.ops.aten


class _Scale(Formed):
    """The scale of a norm over the last axes."""

    def grad(self, use: Use) -> Tensor:
        return _over_positions(use.grad * self.normalised(use), use)

    def normalised(self, use: Use) -> Tensor:
        epsilon = _argument(use, 4, 1e-5)
        return F.layer_norm(use.values[0], use.tap.args[1], None, None, epsilon)


class _RootMeanSquareScale(_Scale):
    def normalised(self, use: Use) -> Tensor:
        return F.rms_norm(use.values[0], use.tap.args[1], None, _argument(use, 3, None))


class _Shift(Formed):
    def grad(self, use: Use) -> Tensor:
        return _over_positions(use.grad, use)


class _GroupScale(Formed):
    def grad(self, use: Use) -> Tensor:
        value = aligned(use.values[0], use.tap.layouts[0])  # [B, rows, C, ...]
        normalised = F.group_norm(value.flatten(0, 1), use.tap.args[1], None, None, _argument(use, 4, 1e-5))
        return _over_channels(aligned(use.grad, use.tap.output) * normalised.reshape(value.shape))


class _GroupShift(Formed):
    def grad(self, use: Use) -> Tensor:
        return _over_channels(aligned(use.grad, use.tap.output))


def _over_positions(product: Tensor, use: Use) -> Tensor:
    return product.reshape(use.batch, -1, *use.shape).sum(1)


def _over_channels(product: Tensor) -> Tensor:
    """[B, rows, C, ...] as [B, C]."""
    return product.reshape(*product.shape[:3], -1).sum((1, 3))


def _argument(use: Use, place: int, default: Any) -> Any:
    return use.tap.args[place] if len(use.tap.args) > place else default


OPERATORS = {
    aten.layer_norm.default: Operator(Reads((2, 3), (0,)), {2: _Scale(), 3: _Shift()}),
    aten.rms_norm.default: Operator(Reads((2,), (0,)), {2: _RootMeanSquareScale()}),
    aten.group_norm.default: Operator(Reads((2, 3), (0,)), {2: _GroupScale(), 3: _GroupShift()}),
}
