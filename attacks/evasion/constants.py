"""The constant that weighs success against size of the change: one for each row, searched up and down."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mycelia.attacks.goals import Goal
from mycelia.attacks.losses import Loss
from mycelia.attacks.search import Search

__all__ = ["Confident", "Constants"]


class Constants:
    """Constants of some rows, each between one that was too small and one that was enough.

    Until both are known a constant grows or falls tenfold; then it is their geometric mean, since what is
    looked for is an order of magnitude first.

    Args:
        search: of all rows.
        first: constant to begin with, above 0.

    Attributes:
        value: [m], for the next attempt.
    """

    def __init__(self, search: Search, first: float) -> None:
        self.value = torch.full((len(search.x),), first, dtype=search.x.dtype, device=search.x.device)
        self._least = torch.zeros_like(self.value)
        self._most = torch.full_like(self.value, torch.inf)

    def judge(self, rows: Tensor, success: Tensor) -> None:
        """Take in whether the attempt at its own constant, and no earlier one, succeeded.

        Args:
            rows: indices [k].
            success: bool [k].
        """
        value = self.value[rows]
        least = torch.where(success, self._least[rows], torch.maximum(self._least[rows], value))
        most = torch.where(success, torch.minimum(self._most[rows], value), self._most[rows])
        inner = (least * most).sqrt()
        following = torch.where(least == 0, value / 10, torch.where(most == torch.inf, value * 10, inner))
        self._least[rows], self._most[rows], self.value[rows] = least, most, following

    def tight(self, rows: Tensor, ratio: float) -> Tensor:
        """Bool [k]: where the two that enclose the constant are within this ratio of each other."""
        return self._most[rows] <= ratio * self._least[rows]


@dataclass(frozen=True, eq=False)
class Confident(Goal):
    """A goal that counts as reached only where the margin is at least kappa.

    Attributes:
        goal: what is wanted.
        kappa: margin in logits, at least 0.
    """

    goal: Goal
    kappa: float

    @property
    def targeted(self) -> bool:  # type: ignore[override]
        """See `Goal.targeted`."""
        return self.goal.targeted

    @property
    def labels(self) -> Tensor:
        """See `Goal.labels`."""
        return self.goal.labels

    def of(self, rows: Tensor) -> Confident:
        """See `Goal.of`."""
        return Confident(self.goal.of(rows), self.kappa)

    def loss(self, outputs: Tensor, loss: Loss = "ce") -> Tensor:
        """See `Goal.loss`; "hinge" is the margin up to kappa, beyond which nothing is gained.

        (Carlini, Wagner: "Towards evaluating the robustness of neural networks", S&P 2017, f_6, sign turned.)
        """
        if loss == "hinge":
            return self.goal.loss(outputs, "margin").clamp(max=self.kappa)
        return self.goal.loss(outputs, loss)

    def reached(self, outputs: Tensor) -> Tensor:
        """See `Goal.reached`."""
        reached = self.goal.reached(outputs)
        if self.kappa == 0:
            return reached
        return reached & (self.goal.loss(outputs, "margin") >= self.kappa)
