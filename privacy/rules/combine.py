"""Several uses of one parameter: how their norms and sums come together.

| uses | norm |
|---|---|
| one, or several of disjoint parts of the parameter | their own, added |
| linear maps of the same view | one linear map over all positions: the cross terms come for free |
| what is computed from the parameter | the gradient of each example, pulled back through that computation |
| embedding and linear head of one table | both, and twice their inner product, without a [V, d] tensor |
| anything else | the gradient of each example is formed and added up |
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mycelia.engine.transforms.taps import Site
from mycelia.privacy.rules.base import Rule, Use, norm2, selected, weighted_sum
from mycelia.privacy.rules.embedding import Embedding
from mycelia.privacy.rules.linear import Linear, Stacked, alone

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
            if not self._fits():
                return torch.cat([norm2(self._grad(part)) for part in self._tiles()])
            self.formed = self._grad(self.uses)
            self.uses = []  # nothing else of them is needed
            return norm2(self.formed)
        square = torch.stack([rule.norm2(use) for use, rule in self.uses]).sum(0)
        if self.way == "tied":
            return square + 2 * _cross(self.uses)
        for use, _ in self.uses:
            use.release()
        return square

    def total(self, factors: Tensor) -> Tensor:
        """Sum over the examples of factor [B] times gradient."""
        if self.formed is not None:
            return weighted_sum(self.formed, factors)
        parts = [self._back(use, rule.total(use, factors)) for use, rule in self.uses]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    def select(self, keep: Tensor) -> None:
        """Make the rows of the examples that are not kept zero, whatever they hold."""
        if self.formed is not None:
            self.formed = selected(self.formed, keep)
        for use, _ in self.uses:
            use.select(keep)

    def describe(self) -> str:
        """One line for `explain`."""
        parts = []
        for use, rule in self.uses:
            cost = rule.cost(use)
            parts.append(f"{use.tap.target} {cost.form}, T = {cost.positions}, {cost.entries} entries")
        return f"{self.way}: " + "; ".join(parts)

    def _grad(self, uses: Sequence[tuple[Use, Rule]]) -> Tensor:
        """The gradient of each example in the parameter's own shape [B, ...]."""
        parts = []
        for use, rule in uses:
            grad = rule.grad(use)
            parts.append(self._each_back(use, grad) if use.site.views else grad)
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    def _fits(self) -> bool:
        """Whether the gradient of each example may be kept; then the room is taken."""
        use, _ = self.uses[0]
        wanted = use.batch * self._each()
        if wanted > use.room.left:
            return False
        use.room.left -= wanted
        return True

    def _each(self) -> int:
        return self.value.numel() * self.uses[0][0].grad.element_size()

    def _tiles(self) -> Iterator[list[tuple[Use, Rule]]]:
        """The uses of a few examples at a time."""
        parts = zip(*(use.tiles(self._each()) for use, _ in self.uses), strict=True)
        for part in parts:
            yield [(use, rule) for use, (_, rule) in zip(part, self.uses, strict=True)]

    def _each_back(self, use: Use, grad: Tensor) -> Tensor:
        """`_back` of each example's gradient."""
        with warnings.catch_warnings():  # what has no batching rule is slow, and right
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            each: Tensor = torch.func.vmap(lambda part: self._back(use, part))(grad)
        return each

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
    way = "alone"
    if len(uses) > 1 and _stackable(uses):
        way, uses = "stacked", [_stacked(uses)]
    if any(use.site.computed for use, _ in uses):
        return Combined(name, value, uses, "formed")
    if len(uses) == 1:
        return Combined(name, value, uses, way)
    plain = not any(use.site.views for use, _ in uses)
    if plain and len(uses) == 2 and {_family(use, rule) for use, rule in uses} == {Linear, Embedding}:
        return Combined(name, value, uses, "tied")
    apart = _disjoint(value.shape, tuple(use.site for use, _ in uses))
    return Combined(name, value, uses, "disjoint" if apart else "formed")


def _family(use: Use, rule: Rule) -> type | None:
    """What `_cross` knows of."""
    if isinstance(rule, Linear):
        return Linear if alone(use.shape) and not rule.transposed else None
    return Embedding if isinstance(rule, Embedding) else None


def _stackable(uses: list[tuple[Use, Rule]]) -> bool:
    """Whether all are linear maps with the same matrix."""
    linear = all(isinstance(rule, Linear) and alone(use.shape) for use, rule in uses)
    return linear and len({use.site.views for use, _ in uses}) == 1


def _stacked(uses: list[tuple[Use, Rule]]) -> tuple[Use, Rule]:
    """Linear maps with one weight as one map of all their positions."""
    sides = [rule.factors(use) for use, rule in uses if isinstance(rule, Linear)]
    first, second = (torch.cat(side, 1) for side in zip(*sides, strict=True))
    return replace(uses[0][0], values=(second,), grad=first), Stacked()


@functools.lru_cache
def _disjoint(shape: torch.Size, sites: tuple[Site, ...]) -> bool:
    """Whether sites read different entries of a parameter of this shape; asked again in every step."""
    numbers = torch.arange(shape.numel()).reshape(shape)
    read = torch.cat([site.view(numbers).flatten() for site in sites])
    return len(torch.unique(read)) == len(read)


def _cross(uses: list[tuple[Use, Rule]]) -> Tensor:
    """Inner product of the gradients of an embedding and of a linear head with the same table [B]."""
    lookup, embedding = next((use, rule) for use, rule in uses if isinstance(rule, Embedding))
    head, linear = next((use, rule) for use, rule in uses if isinstance(rule, Linear))
    ids, g = embedding.rows(lookup)  # [B, S], [B, S, d]
    outward, a = linear.factors(head)  # [B, T, V], [B, T, d]
    reached = torch.gather(outward, 2, ids[:, None, :].expand(-1, outward.shape[1], -1))  # [B, T, S]
    return (reached * torch.bmm(a, g.transpose(1, 2))).sum((1, 2))
