"""The boundaries between the true class and others, taken as linear at a point, and the nearest of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mycelia.attacks.evasion.halfspace import smallest_step
from mycelia.attacks.norms import Norm, wide
from mycelia.attacks.search import Search

__all__ = ["Rivals", "over_nearest"]


class Rivals:
    """For each row the classes with its best logits at the input, but for the true one.

    Args:
        search: of all rows, m of them; the goal is untargeted.
        candidates: classes considered, the true one among them, at least 2.

    Attributes:
        weights: of the logits in the difference of each rival and the true class, [m, c, classes].
        margins: by which each rival lies behind at the input, [m, c].
    """

    def __init__(self, search: Search, candidates: int) -> None:
        y = search.goal.labels.to(search.x.device)
        ranked = search.clean.scatter(1, y[:, None], -torch.inf)
        others = ranked.topk(min(candidates, search.classes) - 1, 1).indices
        weights = functional.one_hot(others, search.classes) - functional.one_hot(y, search.classes)[:, None]
        self.weights = weights.to(search.clean.dtype)
        self.margins = self.behind(search.clean, slice(None)).to(search.x.dtype)

    def behind(self, outputs: Tensor, rows: Tensor | slice) -> Tensor:
        """By how much each rival lies behind the true class, [k, c].

        Args:
            outputs: logits [k, classes].
            rows: indices [k].
        """
        return -(outputs[:, None] * self.weights[rows]).sum(2)


def over_nearest(
    search: Search, rows: Tensor, points: Tensor, slopes: Tensor, rises: Tensor, p: Norm
) -> Tensor:
    """On the nearest boundary; if none is in reach, towards the one that the box lets come nearest.

    Args:
        search: of all rows.
        rows: indices [k].
        points: [k, …]
        slopes: of each rival's lead there, [k, c, …].
        rises: by which each has to rise, [k, c].
        p: norm by which steps are compared, "l2" or "linf".

    Returns:
        points inside the box, [k, …].
    """
    lower, upper = search.low[rows] - points, search.high[rows] - points
    nearest, found = torch.full_like(rises[:, 0], torch.inf), torch.zeros_like(points)
    reach = torch.full_like(nearest, -torch.inf)
    for k in range(rises.shape[1]):
        delta, size = smallest_step(slopes[:, k], rises[:, k], p, lower, upper)
        size = torch.where(rises[:, k] > 0, size, torch.inf)
        share = (slopes[:, k] * delta).flatten(1).sum(1) / rises[:, k].clamp(min=1e-30)
        better = (size < nearest) | ((nearest == torch.inf) & (size == torch.inf) & (share > reach))
        nearest = torch.where(better, size, nearest)
        reach = torch.where(better, share, reach)
        found = torch.where(wide(better, points), delta, found)
    moved = points + found
    return torch.minimum(torch.maximum(moved, search.low[rows]), search.high[rows])
