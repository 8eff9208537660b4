"""What a rule is: per-example norms and clipped sums of one use of one parameter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mycelia.engine.transforms.taps import Reads, Site, Tap

__all__ = ["Cost", "Formed", "Operator", "Room", "Rule", "Use", "selected", "weighted_sum"]


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
        formed: the per-example gradient [B, *shape], once formed and kept.
    """

    tap: Tap
    site: Site
    values: tuple[Tensor, ...]
    grad: Tensor
    shape: tuple[int, ...]
    room: Room
    formed: Tensor | None = field(default=None, repr=False)

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.grad.shape[0]

    @property
    def fits(self) -> bool:
        """Whether the per-example gradient may be kept."""
        return self._bytes() <= self.room.left

    def keep(self, formed: Tensor) -> None:
        """Keep the per-example gradient until the sum, if there is room."""
        if self.formed is None and self.fits:
            self.room.left -= self._bytes()
            self.formed = formed

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


def weighted_sum(grad: Tensor, factors: Tensor) -> Tensor:
    """The sum of factor [B] times gradient [B, *shape]."""
    return (factors.to(grad.dtype) @ grad.reshape(grad.shape[0], -1)).reshape(grad.shape[1:])


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
        return self._kept(use).flatten(1).square().sum(1)

    def total(self, use: Use, factors: Tensor) -> Tensor:
        """Sum over the examples of factor [B] times gradient."""
        return weighted_sum(self._kept(use), factors)

    def cost(self, use: Use) -> Cost:
        """Always formed."""
        return Cost("formed", 1, torch.Size(use.shape).numel())

    def _kept(self, use: Use) -> Tensor:
        grad = self.grad(use) if use.formed is None else use.formed
        use.keep(grad)
        return grad
