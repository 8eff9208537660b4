"""The ratio of moment estimates that Adam, AdamW, Yogi and LAMB share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.engine.schedules import check_number
from mycelia.engine.types import Tensors

__all__ = ["Moments"]


@dataclass(frozen=True)
class Moments:
    """Options of the Adam family, checked.

    Attributes:
        who: name of the optimiser, for messages.
        betas: decay of the first and of the second moment, each in [0, 1).
        eps: added to the root, at least 0.
        eps_root: added under the root, at least 0.
        initial_accumulator_value: second moment before the first update, at least 0.
        bias_correction: divide the moments by 1 - beta**t, t = 1 at the first update.
    """

    who: str
    betas: Sequence[float]
    eps: float
    eps_root: float
    initial_accumulator_value: float
    bias_correction: bool

    def __post_init__(self) -> None:
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise ConfigError(f"betas is {self.betas!r}", rule="betas is a pair of numbers", who=self.who)
        for index in (0, 1):
            check_number(self.who, f"betas[{index}]", self.betas[index], below=1)
        check_number(self.who, "eps", self.eps)
        check_number(self.who, "eps_root", self.eps_root)
        check_number(self.who, "initial_accumulator_value", self.initial_accumulator_value)

    @property
    def slots(self) -> dict[str, float]:
        """State per parameter and where it starts."""
        return {"m": 0.0, "v": self.initial_accumulator_value}

    def first(self, m: Tensor, grad: Tensor, into: Tensors) -> Tensor:
        """The new first moment, beta1 m + (1 - beta1) g."""
        return torch.lerp(m, grad, 1 - self.betas[0], out=into.get("m"))

    def second(self, v: Tensor, grad: Tensor, into: Tensors) -> Tensor:
        """The new second moment, beta2 v + (1 - beta2) g²."""
        out = into.get("v")
        return torch.addcmul(
            torch.mul(v, self.betas[1], out=out), grad, grad, value=1 - self.betas[1], out=out
        )

    def ratio(self, count: Tensor) -> Callable[[Tensor, Tensor, Tensors], Tensor]:
        """The function (m, v, into) -> m̂ / (sqrt(v̂ + eps_root) + eps) of update number `count`."""
        first, second = (1 - beta**count if self.bias_correction else 1.0 for beta in self.betas)
        # The corrections are scalars, so they go where they cost least: m / (a sqrt(v + floor) + b).
        floor, a, b = self.eps_root * second, first / second**0.5, self.eps * first

        def ratio(m: Tensor, v: Tensor, into: Tensors) -> Tensor:
            root = torch.sqrt(v + floor if self.eps_root else v)
            divisor = (root * a).add_(b) if self.bias_correction else root + b
            return torch.div(m, divisor, out=divisor if into else None)

        return ratio
