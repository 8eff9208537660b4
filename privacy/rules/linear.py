"""Linear maps: y = x w^T + b over T positions of each example.

The gradient of one example is G = g^T a with a [T, d] and g [T, p]. Its norm comes from the factors: for
T = 1 it is |a| |g| (Goodfellow 2015, "Efficient per-example gradient computations"); for more positions
|G|^2 = <a a^T, g g^T> (Rochette et al. 2019), which costs T^2 (p + d) in place of T p d.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mycelia.engine.transforms.taps import Reads
from mycelia.privacy.rules.base import (
    Cost,
    Formed,
    Operator,
    Rule,
    Use,
    aligned,
    norm2,
    reduced,
)

__all__ = ["OPERATORS", "Bias", "Linear", "Stacked", "alone", "ghost_pays", "product_norm2", "rows"]

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
    return (torch.bmm(a, a.transpose(1, 2)) * torch.bmm(g, g.transpose(1, 2))).sum((1, 2))


class Linear:
    """The weight of a linear map: [p, d] for y = x w^T and y = w x, [d, p] for y = x w.

    A vector stands for a matrix with one row or column. Weights with more axes are matrices side by side,
    broadcast as `matmul` does; unless there is one alone, the gradient of each example is formed.

    Args:
        value: position of x.
        transposed: y = x w.
        left: y = w x, where the positions are columns.
    """

    def __init__(self, value: int = 0, *, transposed: bool = False, left: bool = False) -> None:
        self.value, self.transposed, self.left = value, transposed, left

    def factors(self, use: Use) -> tuple[Tensor, Tensor]:
        """The two sides [B, T, .] in the order of the weight's axes, for a weight that `alone` holds for."""
        a, g = use.read(self.value), use.grad
        if self.left:
            a, g = aligned(a, use.layout(self.value)).mT, aligned(g, use.tap.output).mT
        return (rows(a), rows(g)) if self.transposed else (rows(g), rows(a))

    def norm2(self, use: Use) -> Tensor:
        """Squared gradient norm of each example [B]."""
        cost = self.cost(use)
        if cost.form == "formed":
            parts = use.tiles(cost.entries * use.grad.element_size())
            return use.form(self.grad(part) for part in parts)
        if cost.form == "product":
            g, a = self.factors(use)
            return norm2(g) * norm2(a)
        parts = use.tiles(2 * cost.positions**2 * use.grad.element_size())
        return torch.cat([product_norm2(*self.factors(part)) for part in parts])

    def total(self, use: Use, factors: Tensor) -> Tensor:
        """Sum over the examples of factor [B] times gradient."""
        if use.formed is not None:
            return use.weighted_sum(factors)
        if not alone(use.shape):
            weighted = use.grad * factors.to(use.grad.dtype).reshape(-1, *[1] * (use.grad.dim() - 1))
            parts = replace(use, grad=weighted).tiles(self.cost(use).entries * use.grad.element_size())
            return torch.stack([self.grad(part).sum(0) for part in parts]).sum(0)
        g, a = self.factors(use)
        total = (g * factors.to(g.dtype)[:, None, None]).flatten(0, 1).t() @ a.flatten(0, 1)
        return total.reshape(use.shape)

    def grad(self, use: Use) -> Tensor:
        """The gradient of each example [B, *shape]."""
        if alone(use.shape):
            g, a = self.factors(use)
            return torch.bmm(g.transpose(1, 2), a).reshape(use.batch, *use.shape)
        a, g = aligned(use.read(self.value), use.layout(self.value)), aligned(use.grad, use.tap.output)
        if len(use.shape) == 1:
            g = g.unsqueeze(-2 if self.left else -1)
        a, g = (part.reshape(use.batch, *[1] * (max(a.dim(), g.dim()) - part.dim()), *part.shape[1:])
                for part in (a, g))  # fmt: skip
        each = g @ a.mT if self.left else a.mT @ g
        shape = use.shape if len(use.shape) > 1 else (1, *use.shape) if self.left else (*use.shape, 1)
        return reduced(each, shape).reshape(use.batch, *use.shape)

    def cost(self, use: Use) -> Cost:
        """T = 1 from the factors; else what is cheaper."""
        if not alone(use.shape):
            wide = len(use.shape) > 1
            outputs = use.shape[-2 if self.left else -1] if wide else 1
            return Cost("formed", use.grad[:1].numel() // outputs, torch.Size(use.shape).numel())
        g, a = self.factors(use)
        positions, entries = a.shape[1], g.shape[2] * a.shape[2]
        if positions == 1:
            return Cost("product", 1, entries)
        pays = ghost_pays(positions, g.shape[2], a.shape[2])
        return Cost("ghost" if pays else "formed", positions, entries)


class Stacked(Linear):
    """Linear maps with one weight as one of all their positions; the gradient and the value are its sides."""

    def factors(self, use: Use) -> tuple[Tensor, Tensor]:
        """The two sides."""
        return use.grad, use.values[0]


def alone(shape: tuple[int, ...]) -> bool:
    """Whether a weight is one matrix."""
    return len(shape) > 1 and torch.Size(shape[:-2]).numel() == 1


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
        if g.shape[1:] == use.shape:
            return g
        axis = self.axis if self.axis < 0 else self.axis + 1
        moved = g.movedim(axis, -1)
        each = moved.reshape(g.shape[0], -1, moved.shape[-1]).sum(1)
        return reduced(each.reshape(g.shape[0], *[1] * (len(use.shape) - 1), -1), use.shape)

    def cost(self, use: Use) -> Cost:
        """A sum over positions."""
        return Cost("formed", rows(use.grad).shape[1], torch.Size(use.shape).numel())


_bias: Rule = Bias()
_product = Operator(Reads((0, 1), (0, 1)), {0: Linear(1, left=True), 1: Linear(transposed=True)})
OPERATORS = {
    aten.linear.default: Operator(Reads((1, 2), (0,)), {1: Linear(), 2: _bias}),
    aten.matmul.default: _product,
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.addmm.default: Operator(
        Reads((0, 1, 2), (1, 2)), {0: _bias, 1: Linear(2, left=True), 2: Linear(1, transposed=True)}
    ),
}
