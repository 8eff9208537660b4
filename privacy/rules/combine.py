"""Several uses of one parameter: how their norms and sums come together.

| uses | norm |
|---|---|
| one, or several of disjoint parts of the parameter | their own, added |
| linear maps of the same view | one linear map over all positions: the cross terms come for free |
| embedding and linear head of one table | both, and twice their inner product, without a [V, d] tensor |
| anything else | the gradient of each example is formed and added up |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mycelia.privacy.rules.base import Rule, Use, selected, weighted_sum
from mycelia.privacy.rules.embedding import Embedding
from mycelia.privacy.rules.linear import Linear, rows

__all__ = ["Combined", "combine"]


@dataclass
class Combined:
    """All uses of one parameter.

    Attributes:
        parameter: its name.
        value: the parameter itself, for its shape.
        uses: with their rules.
        way: "alone", "disjoint", "stacked", "tied" (embedding and head) or "formed".
    """

    parameter: str
    value: Tensor
    uses: list[tuple[Use, Rule]]
    way: str
    formed: Tensor | None = None

    def norm2(self) -> Tensor:
        """Squared gradient norm of each example [B]."""
        if self.way == "formed":
            self.formed = self._grad()
            return self.formed.flatten(1).square().sum(1)
        square = torch.stack([rule.norm2(use) for use, rule in self.uses]).sum(0)
        return square + 2 * _cross(self.uses) if self.way == "tied" else square

    def total(self, factors: Tensor) -> Tensor:
        """Sum over the examples of factor [B] times gradient."""
        if self.way == "formed":
            grad = self._grad() if self.formed is None else self.formed
            return weighted_sum(grad, factors)
        parts = [self._back(use, rule.total(use, factors)) for use, rule in self.uses]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    def select(self, keep: Tensor) -> None:
        """Make the rows of the examples that are not kept zero, whatever they hold."""
        self.formed = None
        for use, _ in self.uses:
            use.formed = None
            use.values = tuple(selected(value, keep) for value in use.values)
            use.grad = selected(use.grad, keep)

    def describe(self) -> str:
        """One line for `explain`."""
        parts = []
        for use, rule in self.uses:
            cost = rule.cost(use)
            parts.append(f"{use.tap.target} {cost.form}, T = {cost.positions}, {cost.entries} entries")
        return f"{self.way}: " + "; ".join(parts)

    def _grad(self) -> Tensor:
        """The gradient of each example in the parameter's own shape [B, ...]."""
        total: Tensor | None = None
        for use, rule in self.uses:
            grad = rule.grad(use)
            if use.site.views:
                grad = torch.func.vmap(lambda part, use=use: self._back(use, part))(grad)
            total = grad if total is None else total + grad
        if total is None:
            return self.value.new_zeros((0, *self.value.shape))
        return total

    def _back(self, use: Use, grad: Tensor) -> Tensor:
        """A gradient of what the operator read as one of the parameter."""
        if not use.site.views:
            return grad
        pull: Any = torch.func.vjp(use.site.view, self.value)[1]
        result: Tensor = pull(grad.reshape(use.shape))[0]
        return result


def combine(uses: Sequence[tuple[Use, Rule, Tensor]]) -> list[Combined]:
    """Group uses by parameter and choose the way of each group."""
    groups: dict[str, list[tuple[Use, Rule]]] = {}
    values: dict[str, Tensor] = {}
    for use, rule, value in uses:
        groups.setdefault(use.site.parameter, []).append((use, rule))
        values[use.site.parameter] = value
    return [_combined(name, values[name], group) for name, group in groups.items()]


def _combined(name: str, value: Tensor, uses: list[tuple[Use, Rule]]) -> Combined:
    if len(uses) == 1:
        return Combined(name, value, uses, "alone")
    linear = [rule for _, rule in uses if isinstance(rule, Linear)]
    same_view = len({use.site.views for use, _ in uses}) == 1
    if len(linear) == len(uses) and same_view and len({rule.transposed for rule in linear}) == 1:
        return Combined(name, value, [_stacked(uses)], "stacked")
    pair = {type(rule) for _, rule in uses} == {Linear, Embedding} and len(uses) == 2
    if pair and not any(use.site.views for use, _ in uses) and not linear[0].transposed:
        return Combined(name, value, uses, "tied")
    return Combined(name, value, uses, "disjoint" if _disjoint(value, uses) else "formed")


def _stacked(uses: list[tuple[Use, Rule]]) -> tuple[Use, Rule]:
    """Linear maps with one weight as one map of all their positions."""
    first, rule = uses[0]
    places = [r.value if isinstance(r, Linear) else 0 for _, r in uses]
    value = torch.cat([rows(use.values[place]) for (use, _), place in zip(uses, places, strict=True)], 1)
    grad = torch.cat([rows(use.grad) for use, _ in uses], 1)
    return replace(first, values=(value,), grad=grad), rule


def _disjoint(value: Tensor, uses: list[tuple[Use, Rule]]) -> bool:
    """Whether the uses read different entries of the parameter."""
    numbers = torch.arange(value.numel()).reshape(value.shape)
    read = torch.cat([use.site.view(numbers).flatten() for use, _ in uses])
    return len(torch.unique(read)) == len(read)


def _cross(uses: list[tuple[Use, Rule]]) -> Tensor:
    """Inner product of the gradients of an embedding and of a linear head with the same table [B]."""
    lookup, embedding = next((use, rule) for use, rule in uses if isinstance(rule, Embedding))
    head, linear = next((use, rule) for use, rule in uses if isinstance(rule, Linear))
    ids, g = embedding.rows(lookup)  # [B, S], [B, S, d]
    outward, a = linear.factors(head)  # [B, T, V], [B, T, d]
    reached = torch.gather(outward, 2, ids[:, None, :].expand(-1, outward.shape[1], -1))  # [B, T, S]
    return (reached * torch.bmm(a, g.transpose(1, 2))).sum((1, 2))
