"""Closed forms on affine models."""

from __future__ import annotations

import torch
from torch import Tensor

from mycelia.attacks.norms import Norm
from tests.attacks.worlds import Affine

_ORDER = {"l1": torch.inf, "l2": 2, "linf": 1}


def distances(model: Affine, x: Tensor, y: Tensor, p: Norm, only: int | None = None) -> Tensor:
    """[n]: least over other classes of margin / dual norm of the difference of weights, in float64.

    With `only`, that of this class; infinite where it is the row's own.
    """
    weight, bias = model.linear.weight.detach().double(), model.linear.bias.detach().double()
    z = x.detach().double().flatten(1) @ weight.T + bias
    found = []
    for row, true in enumerate(y.tolist()):
        others = [k for k in range(len(weight)) if k != true and only in (None, k)]
        found.append(
            min(
                float(
                    (z[row, true] - z[row, k])
                    / torch.linalg.vector_norm(weight[true] - weight[k], ord=_ORDER[p])
                )
                for k in others
            )
            if others
            else torch.inf
        )
    return torch.tensor(found, dtype=torch.float64)
