"""The binary tree: noise on the sums of blocks of 1, 2, 4, … steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.privacy.factorisation.base import Draw, Error, Plan, Strategy, Workload, answer_variances

__all__ = ["Tree"]


@dataclass(frozen=True)
class Tree(Strategy):
    """Binary tree aggregation (Dwork et al., STOC 2010; Chan et al., TISSEC 2011) with Honaker's estimates.

    Every block of 2^l steps that is complete gets noise of its own. The estimate of a block's sum combines
    that with the estimates of its halves, weighted by their variances (Honaker 2015, "from below"; Kairouz
    et al., ICML 2021, appendix B), and a prefix is the sum of the blocks in its binary expansion.
    """

    name: ClassVar[str] = "tree"

    def sensitivity(self, participation: Plan) -> float:
        """floor(log2 n) + 1 blocks hold a step; for several uses an upper bound.

        On each level a block holds at most ceil(size / separation) of one participant's steps and counts by
        their square, so the worst case is as many full blocks as there are uses for, level by level.
        """
        uses, total = participation.possible, 0
        for level in range(participation.steps.bit_length()):
            held = min(uses, -(-(2**level) // participation.separation))
            total += uses // held * held**2 + (uses % held) ** 2
        return math.sqrt(total)

    def error(self, workload: Workload) -> Error:
        """Variance of the answers; with momentum or learning rates in the order of n² steps and memory."""
        if workload.momentum == 0 and not workload.rates:
            levels = _variances(workload.steps.bit_length())
            variances = torch.tensor(
                [
                    sum(levels[level] for level in range(step.bit_length()) if step >> level & 1)
                    for step in range(1, workload.steps + 1)
                ],
                dtype=torch.float64,
            )
        else:
            variances = answer_variances(self._rows(workload.steps), workload)
        return Error(float(variances.max()), float(variances.mean()))

    def slots(self, steps: int) -> int:
        """The estimates of the complete blocks, one a level, and the noise of the last prefix."""
        return steps.bit_length() + 1

    def advance(self, step: int, slots: Tensor, draw: Draw) -> Tensor:
        """Noise of the prefix that ends here, less that of the last."""
        estimate = draw(step, "")
        level = 0
        while step >> level & 1:  # two blocks of this level are complete, so one of the next is
            own = _variances(level + 2)[-1]
            estimate = own * draw(step, f"block {level + 1}") + (1 - own) * (slots[level] + estimate)
            slots[level] = 0
            level += 1
        slots[level] = estimate
        prefix = slots[:-1].sum(0)
        noise = prefix - slots[-1]
        slots[-1] = prefix
        return noise

    def _rows(self, steps: int) -> Tensor:
        """The noise of every step in terms of its independent draws, float64 [steps, 2 * steps]."""
        names: dict[tuple[int, str], int] = {}

        def draw(step: int, label: str) -> Tensor:
            row = torch.zeros(2 * steps, dtype=torch.float64)
            row[names.setdefault((step, label), len(names))] = 1
            return row

        slots = torch.zeros(self.slots(steps), 2 * steps, dtype=torch.float64)
        return torch.stack([self.advance(step, slots, draw) for step in range(steps)])


def _variances(levels: int) -> list[float]:
    """Variance of a block's estimate by level: own noise of variance 1 beside two halves."""
    result = [1.0]
    while len(result) < levels:
        result.append(1 / (1 + 1 / (2 * result[-1])))
    return result
