"""Random noise: the weakest baseline, and a lower bound on what any attack should find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.norms import NORMS, Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["RandomNoise"]


@dataclass(frozen=True)
class RandomNoise(Attack):
    """Points drawn uniformly from the ball, each brought into the box; a row leaves at its first success.

    Labels will do; scores, where there are some, tell which point comes nearest to a success.

    l0: ⌊eps⌋ coordinates drawn without replacement get values drawn uniformly between their bounds, which
    have to be finite.

    Attributes:
        norm: of the ball.
        draws: points for each row.
    """

    needs: ClassVar[str] = "label"
    norms: ClassVar[tuple[Norm, ...]] = NORMS

    draws: int = 10_000

    def check(self) -> None:
        """See `Attack.check`."""
        if self.draws < 1:
            raise ConfigError(f"draws {self.draws}", rule="at least 1", who=type(self).__name__)

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        if search.norm == "l0" and not bool(torch.isfinite(search.high - search.low).all()):
            raise ConfigError(
                "l0 noise without bounds",
                rule="values are drawn between finite bounds",
                who=type(self).__name__,
            )
        for step in range(self.draws):
            rows = search.active
            if not len(rows):
                return
            search.look(_drawn(search, rows, step), rows, step)


def _drawn(search: Search, rows: Tensor, step: int) -> Tensor:
    x, draws = search.x[rows], search.draws.of(rows)
    if search.norm != "l0":
        unit = draws.in_ball("noise", search.norm, x, step=step)
        return search.inside(x + search.eps * unit, rows)
    order = draws.uniform("places", x[0].shape, step=step).flatten(1).argsort(1)
    chosen = torch.zeros_like(order, dtype=torch.bool)
    chosen.scatter_(1, order[:, : int(min(search.eps, order.shape[1]))], value=True)
    low, high = search.low[rows], search.high[rows]
    values = low + (high - low) * draws.uniform("values", x[0].shape, step=step, dtype=x.dtype)
    return torch.where(chosen.view_as(x), torch.minimum(torch.maximum(values, low), high), x)
