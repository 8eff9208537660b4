"""Parameters expanded to one copy an example: position tables, class tokens, scales and shifts."""

from __future__ import annotations

import torch
from torch import Tensor

from mycelia.engine.transforms.taps import Reads
from mycelia.privacy.rules.base import Formed, Operator, Use

__all__ = ["OPERATORS"]


class _Expanded(Formed):
    """The copies' gradients are the examples'; copies within an example add up."""

    def grad(self, use: Use) -> Tensor:
        layout, g = use.tap.output, use.grad
        # an axis of one where the examples were, so that the shapes line up from the end
        each = g.unsqueeze(1).movedim(1, layout.axis + 1)
        missing = each.dim() - 1 - len(use.shape)
        each = each.reshape(use.batch, -1, *each.shape[1 + missing :]).sum(1) if missing else each
        kept = [axis + 1 for axis, size in enumerate(use.shape) if size == 1 and each.shape[axis + 1] > 1]
        return each.sum(kept, keepdim=True) if kept else each


OPERATORS = {torch.ops.aten.expand.default: Operator(Reads((0,), ()), {0: _Expanded()})}
