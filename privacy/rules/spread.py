"""Parameters expanded to one copy an example: position tables, class tokens, scales and shifts."""

from __future__ import annotations

import torch
from torch import Tensor

from mycelia.engine.transforms.taps import Reads
from mycelia.privacy.rules.base import Formed, Operator, Use, aligned, reduced

__all__ = ["OPERATORS"]


class _Expanded(Formed):
    """The copies' gradients are the examples'; copies within an example add up."""

    def grad(self, use: Use) -> Tensor:
        return reduced(aligned(use.grad, use.tap.output), use.shape)


OPERATORS = {torch.ops.aten.expand.default: Operator(Reads((0,), ()), {0: _Expanded()})}
