"""Linear maps: y = x w^T + b over T positions of each example.

The gradient of one example is G = g^T a with a [T, d] and g [T, p]. Its norm comes from the factors: for
T = 1 it is |a| |g| (Goodfellow 2015, "Efficient per-example gradient computations"); for more positions
|G|^2 = <a a^T, g g^T> (Rochette et al. 2019), which costs T^2 (p + d) in place of T p d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mycelia.engine.transforms.taps import Reads
from mycelia.privacy.rules.base import Cost, Formed, Operator, Rule, Use, weighted_sum

__all__ = ["OPERATORS", "Bias", "Linear", "ghost_pays", "product_norm2", "rows"]

aten = torch.ops.aten


def rows(tensor: Tensor) -> Tensor:
    """A tensor [B, ..., d] as [B, T, d]."""
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


def ghost_pays(positions: int, outputs: int, inputs: int) -> bool:
    """Whether inner products over positions cost less than the gradient of each example."""
    entries = outputs * inputs
    return positions * (outputs + inputs) <= entries and 2 * positions**2 <= entries


def product_norm2(a: Tensor, g: Tensor) -> Tensor:
    """Squared norm of g^T a for each example, from a [B, T, d] and g [B, T, p], without forming it."""
    if a.shape[1] == 1:
        return a.square().sum((1, 2)) * g.square().sum((1, 2))
    return (torch.bmm(a, a.transpose(1, 2)) * torch.bmm(g, g.transpose(1, 2))).sum((1, 2))


class Linear:
    """The weight [p, d] of a linear map, or [d, p] where it is stored transposed."""

    def __init__(self, value: int = 0, *, transposed: bool = False) -> None:
        self.value, self.transposed = value, transposed

    def factors(self, use: Use) -> tuple[Tensor, Tensor]:
        """(g, a): the two sides [B, T, .] in the order of the weight's axes."""
        a, g = rows(use.values[self.value]), rows(use.grad)
        return (a, g) if self.transposed else (g, a)

    def norm2(self, use: Use) -> Tensor:
        """Squared gradient norm of each example [B]."""
        if self.cost(use).form == "formed":
            formed = self.grad(use)
            use.keep(formed)
            return formed.square().sum((1, 2))
        g, a = self.factors(use)
        return product_norm2(a, g)

    def total(self, use: Use, factors: Tensor) -> Tensor:
        """Sum over the examples of factor [B] times gradient."""
        if use.formed is not None:
            return weighted_sum(use.formed, factors)
        g, a = self.factors(use)
        return (g * factors.to(g.dtype)[:, None, None]).flatten(0, 1).t() @ a.flatten(0, 1)

    def grad(self, use: Use) -> Tensor:
        """The gradient of each example [B, *shape]."""
        g, a = self.factors(use)
        return torch.bmm(g.transpose(1, 2), a)

    def cost(self, use: Use) -> Cost:
        """T = 1 from the factors; else what is cheaper."""
        g, a = self.factors(use)
        positions, entries = a.shape[1], g.shape[2] * a.shape[2]
        if positions == 1:
            return Cost("product", 1, entries)
        pays = ghost_pays(positions, g.shape[2], a.shape[2])
        return Cost("ghost" if pays else "formed", positions, entries)


class Bias(Formed):
    """A bias [p]: its gradient is the sum of g over the positions, and so is its norm's.

    Args:
        axis: axis of the bias in the result without the examples, from the front or the end.
    """

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def grad(self, use: Use) -> Tensor:
        """The gradient of each example [B, p]."""
        g = use.grad
        axis = self.axis if self.axis < 0 else self.axis + 1
        moved = g.movedim(axis, -1)
        return moved.reshape(g.shape[0], -1, moved.shape[-1]).sum(1)

    def cost(self, use: Use) -> Cost:
        """A sum over positions."""
        return Cost("formed", rows(use.grad).shape[1], use.shape[0])


_bias: Rule = Bias()
OPERATORS = {
    aten.linear.default: Operator(Reads((1, 2), (0,)), {1: Linear(), 2: _bias}),
    aten.matmul.default: Operator(Reads((1,), (0,)), {1: Linear(transposed=True)}),
    aten.mm.default: Operator(Reads((1,), (0,)), {1: Linear(transposed=True)}),
    aten.addmm.default: Operator(Reads((0, 2), (1,)), {0: _bias, 2: Linear(transposed=True)}),
}
