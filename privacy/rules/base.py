"""What a rule is: per-example norms and clipped sums of one use of one parameter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from mycelia.engine.transforms.batch_layouts import BatchLayout
from mycelia.engine.transforms.taps import Reads, Site, Tap

__all__ = [
    "Cost",
    "Formed",
    "Operator",
    "Room",
    "Rule",
    "Use",
    "aligned",
    "norm2",
    "reduced",
    "selected",
    "weighted_sum",
]

_TILE = 1 << 22  # bytes that are formed at a time where nothing is kept


@dataclass
class Room:
    """Bytes that per-example gradients may still take, for all uses of a pass together."""

    left: int


@dataclass
class Use:
    """One use of one parameter in one pass.

    Attributes:
        tap: the operator.
        site: the parameter, and the argument it is read as.
        values: what the operator read of the examples, each [B, ...].
        grad: the gradient of its result [B, ...].
        shape: shape of the argument.
        room: what is left for per-example gradients that are kept until the sum.
        formed: the gradients of the examples, once formed and kept: a few [n, *shape] at a time, in order.
    """

    tap: Tap
    site: Site
    values: tuple[Tensor, ...]
    grad: Tensor
    shape: tuple[int, ...]
    room: Room
    formed: Sequence[Tensor] | None = field(default=None, repr=False)

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.grad.shape[0]

    @property
    def fits(self) -> bool:
        """Whether the per-example gradient may be kept."""
        return self._bytes() <= self.room.left

    def form(self, parts: Iterable[Tensor]) -> Tensor:
        """Squared norms [B] of gradients that are formed a few [n, *shape] at a time.

        They are kept until the sum if there is room, as they come: joined they would be in memory twice.
        """
        if not self.fits:
            return torch.cat([norm2(part) for part in parts])
        self.room.left -= self._bytes()
        self.formed, squares = [], []
        for part in parts:
            self.formed.append(part)
            squares.append(norm2(part))  # while the part is in the cache
        return torch.cat(squares)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """The sum of factor [B] times the gradients that were kept."""
        parts = self.formed or []
        each = factors.split([len(part) for part in parts])
        sums = [weighted_sum(part, own) for part, own in zip(parts, each, strict=True)]
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)

    def release(self) -> None:
        """Let go of what the per-example gradient was made of, once that is kept."""
        if self.formed is not None:
            self.values, self.grad = (), self.grad.new_empty(self.batch, 0)

    def select(self, keep: Tensor) -> None:
        """Make the rows of the examples that are not kept zero, whatever they hold."""
        if self.formed is not None:
            each = keep.split([len(part) for part in self.formed])
            self.formed = [selected(part, own) for part, own in zip(self.formed, each, strict=True)]
        else:
            self.values = tuple(selected(value, keep) for value in self.values)
            self.grad = selected(self.grad, keep)

    def read(self, place: int) -> Tensor:
        """What the operator reads at a position of its arguments [B, ...]."""
        return self.values[self.tap.inputs.index(place)]

    def layout(self, place: int) -> BatchLayout:
        """Where the examples lay in what `read` gives."""
        return self.tap.layouts[self.tap.inputs.index(place)]

    def tiles(self, each: int) -> Iterator[Use]:
        """A few examples at a time; `each`: bytes that one of them will take."""
        step = max(1, _TILE // max(1, each))
        for first in range(0, max(1, self.batch), step):
            rows = slice(first, first + step)
            values = tuple(value[rows] for value in self.values)
            yield replace(self, values=values, grad=self.grad[rows], formed=None)

    def _bytes(self) -> int:
        return self.batch * torch.Size(self.shape).numel() * self.grad.element_size()


@dataclass(frozen=True)
class Cost:
    """How a rule works for given shapes, for `explain`.

    Attributes:
        form: "product" (norms of the factors), "ghost" (inner products over positions) or "formed".
        positions: T.
        entries: p x d, per-example gradient entries.
    """

    form: str
    positions: int
    entries: int


class Rule(Protocol):
    """How an operator's argument gives norms and sums without the gradient of each example."""

    def norm2(self, use: Use) -> Tensor:
        """Squared gradient norm of each example [B]."""
        ...

    def total(self, use: Use, factors: Tensor) -> Tensor:
        """Sum over the examples of factor [B] times gradient, of the argument's shape."""
        ...

    def grad(self, use: Use) -> Tensor:
        """The gradient of each example [B, *shape]."""
        ...

    def cost(self, use: Use) -> Cost:
        """How the rule works for these shapes."""
        ...


@dataclass(frozen=True)
class Operator:
    """An operator with rules.

    Attributes:
        reads: the positions of its parameters and of its inputs.
        rules: the rule of each parameter's position.
    """

    reads: Reads
    rules: Mapping[int, Rule]


def norm2(rows: Tensor) -> Tensor:
    """Squared L2 norm of each row of [B, ...]: one pass, nothing of the rows' size is written."""
    squared: Tensor = torch.linalg.vector_norm(rows.flatten(1), dim=1).square()
    return squared


def weighted_sum(grad: Tensor, factors: Tensor) -> Tensor:
    """The sum of factor [B] times gradient [B, *shape]."""
    return (factors.to(grad.dtype) @ grad.reshape(grad.shape[0], -1)).reshape(grad.shape[1:])


def aligned(tensor: Tensor, layout: BatchLayout) -> Tensor:
    """A tensor [B, ...] that `BatchLayout.front` gave as it was, for one example: [B, *shape].

    The axis where the examples lay is as long as what one of them had of it.
    """
    batch, *shape = tensor.shape
    axis, own = layout.axis, layout.outer * layout.inner
    behind = shape[axis + (layout.outer > 1) + (layout.inner > 1) :]
    return tensor.reshape(batch, *shape[:axis], own, *behind)


def reduced(each: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The gradient [B, *shape] of what was broadcast to each example's part [B, ...]."""
    missing = each.dim() - 1 - len(shape)
    if missing:
        each = each.sum(tuple(range(1, 1 + missing)))
    wide = [axis + 1 for axis, size in enumerate(shape) if size == 1 and each.shape[axis + 1] > 1]
    return each.sum(wide, keepdim=True) if wide else each


def selected(rows: Tensor, keep: Tensor) -> Tensor:
    """Zeros in the rows that are not kept [B], by selection: what they hold does not matter, NaN included."""
    return torch.where(keep.reshape(-1, *[1] * (rows.dim() - 1)), rows, torch.zeros_like(rows))


class Formed(ABC):
    """A rule that forms the gradient of each example; subclasses give `grad`."""

    @abstractmethod
    def grad(self, use: Use) -> Tensor:
        """The gradient of each example [B, *shape]."""

    def norm2(self, use: Use) -> Tensor:
        """Squared gradient norm of each example [B]."""
        return use.form([self.grad(use)])

    def total(self, use: Use, factors: Tensor) -> Tensor:
        """Sum over the examples of factor [B] times gradient."""
        return weighted_sum(self.grad(use), factors) if use.formed is None else use.weighted_sum(factors)

    def cost(self, use: Use) -> Cost:
        """Always formed."""
        return Cost("formed", 1, torch.Size(use.shape).numel())
