"""Papernot et al.: "The limitations of deep learning in adversarial settings" (EuroS&P 2016), JSMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.nn import functional

from mycelia.attacks.base import Attack
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["JSMA", "best_pair"]

_PAIRS: Final = 2**22  # how many pairs of coordinates are compared at a time


@dataclass(frozen=True)
class JSMA(Attack):
    """Two coordinates at a time: the pair of the saliency map, raising what is wanted and lowering all else.

    A coordinate may rise or fall, and keeps its direction once it has one. Untargeted, the sum of the other
    classes is to rise and the true class to fall.

    Attributes:
        norm: "l0".
        theta: change of a coordinate in one step, raw input units, above 0; None: all the way to its bound.
        share: of the coordinates that may change, in (0, 1]; never more than eps where there is one.
        steps: at most; None: as many as it takes to change that share once.
    """

    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l0",)

    norm: Norm = "l0"
    theta: float | None = None
    share: float = 0.1
    steps: int | None = None

    def check(self) -> None:
        """See `Attack.check`."""
        theta, steps = 1.0 if self.theta is None else self.theta, 1 if self.steps is None else self.steps
        if not theta > 0 or not 0 < self.share <= 1 or steps < 1:
            raise ConfigError(
                f"theta {self.theta}, share {self.share}, steps {self.steps}",
                rule="above 0, in (0, 1], at least 1",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        if self.theta is None and not bool((torch.isfinite(search.low) & torch.isfinite(search.high)).all()):
            raise ConfigError(
                "no theta and no bounds",
                rule="without a theta a coordinate goes to its bound",
                fix="theta=0.1, in input units",
                who=type(self).__name__,
            )
        rows = search.active
        wanted = functional.one_hot(search.goal.labels.to(search.x.device), search.classes)
        wanted = wanted.to(search.clean.dtype)
        if search.goal.targeted:
            weights = torch.stack([wanted, wanted - 1], 1)  # the target up, the sum of the others down
        else:
            weights = torch.stack([-wanted, 1 - wanted], 1)
        d = search.x[0].numel() if len(rows) else 0
        most = min(search.eps, max(2, int(self.share * d)))
        steps = self.steps if self.steps is not None else int(most + 1) // 2
        points = search.x[rows].flatten(1)
        low, high = search.low.flatten(1), search.high.flatten(1)
        way = torch.zeros_like(points)  # −1 or 1 once a coordinate has moved
        for step in range(steps):
            slopes, _ = search.slopes(points.view_as(search.x[rows]), rows, step, weights[rows])
            a, b = slopes.flatten(2).unbind(1)
            changed = (way != 0).sum(1, keepdim=True)
            on = search.going_on(rows) & ~search.broken[rows] & (changed[:, 0] < most)
            rows, points, a, b, way, changed = (v[on] for v in (rows, points, a, b, way, changed))
            if not len(rows):
                return
            up = (points < high[rows]) & (way >= 0)
            down = (points > low[rows]) & (way <= 0)
            pair, count = best_pair(torch.cat([a, -a], 1), torch.cat([b, -b], 1), torch.cat([up, down], 1))
            sign = torch.zeros_like(points)
            for k in (0, 1):
                new = (way.gather(1, pair[:, k : k + 1] % d) == 0)[:, 0]
                fits = (count > k) & (~new | ((sign != 0).sum(1) + changed[:, 0] < most))
                to = torch.where(pair[:, k] < d, 1.0, -1.0).to(points.dtype) * fits
                sign.scatter_add_(1, pair[:, k : k + 1] % d, to[:, None])
            moved = self._moved(points, sign, low[rows], high[rows])
            stuck = (sign == 0).all(1)
            points, way = moved, torch.where(way == 0, sign, way)
            if bool(stuck.any()):
                rows, points, way = rows[~stuck], points[~stuck], way[~stuck]
                if not len(rows):
                    return
        search.look(points.view_as(search.x[rows]), rows, steps)

    def _moved(self, points: Tensor, sign: Tensor, low: Tensor, high: Tensor) -> Tensor:
        if self.theta is None:
            return torch.where(sign > 0, high, torch.where(sign < 0, low, points))
        return torch.minimum(torch.maximum(points + self.theta * sign, low), high)


def best_pair(a: Tensor, b: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """The coordinates p, q of largest (a_p + a_q)(b_p + b_q), both sums above 0, without a map of all pairs.

    A coordinate that another one beats in both a and b need be in no best pair unless the other one is its
    partner. So both are among the coordinates that none beats, or that none does but those.

    Args:
        a: [n, d]
        b: [n, d]
        allowed: bool [n, d].

    Returns:
        pairs, int64 [n, 2]; and how many of the two count, [n]: where no pair has two positive sums, 1 stands
        for the coordinate of largest a + b, if that is above 0; else 0.
    """
    lowest = torch.finfo(a.dtype).min
    order = b.masked_fill(~allowed, lowest).argsort(dim=1, descending=True, stable=True)
    first = a.masked_fill(~allowed, lowest).gather(1, order)
    order = order.gather(1, first.argsort(dim=1, descending=True, stable=True))
    height, free = b.gather(1, order), allowed.gather(1, order)
    front = _unbeaten(height, free)
    front = front | _unbeaten(height, free & ~front)
    count = int(front.sum(1).max())
    places = order.gather(1, front.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count])
    real = front.sum(1, keepdim=True) > torch.arange(count, device=a.device)
    mine_a, mine_b = a.gather(1, places), b.gather(1, places)
    value = torch.zeros(len(a), dtype=a.dtype, device=a.device)
    pair = places.new_zeros(len(a), 2)
    size = max(1, _PAIRS // max(1, len(a) * count))
    for start in range(0, count, size):  # O(n · count²) in all, _PAIRS at a time
        some = slice(start, start + size)
        one, two = mine_a[:, some, None] + mine_a[:, None], mine_b[:, some, None] + mine_b[:, None]
        both = real[:, some, None] & real[:, None] & (one > 0) & (two > 0)
        index = torch.arange(count, device=a.device)
        both = both & (index[some, None] < index)
        products = torch.where(both, one * two, torch.zeros_like(one)).flatten(1)
        top, at = products.max(1)
        better = top > value
        value = torch.where(better, top, value)
        found = torch.stack([places.gather(1, (start + at // count)[:, None])[:, 0],
                             places.gather(1, (at % count)[:, None])[:, 0]], 1)  # fmt: skip
        pair = torch.where(better[:, None], found, pair)
    gain, alone = torch.where(allowed, a + b, lowest).max(1)
    none = value == 0
    pair = torch.where(none[:, None], torch.stack([alone, alone], 1), pair)
    return pair, torch.where(none, (gain > 0).to(torch.int64), 2)


def _unbeaten(height: Tensor, free: Tensor) -> Tensor:
    """Bool [n, d], of coordinates sorted by the other measure: higher than all free ones before."""
    masked = torch.where(free, height, -torch.inf)
    before = masked.cummax(1).values.roll(1, 1)
    before[:, 0] = -torch.inf
    return free & (masked > before)
