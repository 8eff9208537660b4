"""A genetic search.

Alzantot et al.: "GenAttack: practical black-box attacks with gradient-free optimization" (GECCO 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.losses import Loss
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["Genetic"]

_DECAY = 0.9  # of share and spread at a plateau


@dataclass(frozen=True)
class Genetic(Attack):
    """A population for each row: the best one stays, the others are crossed by fitness and mutated.

    Algorithm 1 of the paper. Crossover and mutation decide for every coordinate by itself. Where the best
    loss has not risen for `patience` generations, share and spread shrink (§4.3).

    Attributes:
        norm: "linf".
        population: at least 2.
        steps: generations, at least 1; each takes population − 1 queries.
        share: of the coordinates that a mutation changes, in (0, 1].
        spread: half-width of the uniform change, as a share of eps.
        least_share: share does not shrink below this.
        least_spread: spread does not shrink below this.
        patience: generations.
        temperature: of the selection, in standard deviations of the population's losses; small is greedy.
        loss: fitness.
    """

    needs: ClassVar[str] = "score"

    population: int = 10
    steps: int = 200
    share: float = 0.1
    spread: float = 0.5
    least_share: float = 0.01
    least_spread: float = 0.15
    patience: int = 20
    temperature: float = 0.3
    loss: Loss = "margin"

    def check(self) -> None:
        """See `Attack.check`."""
        if self.population < 2 or self.steps < 1 or self.patience < 1:
            raise ConfigError(
                f"population {self.population}, steps {self.steps}, patience {self.patience}",
                rule="a population of at least 2, the others at least 1",
                who=type(self).__name__,
            )
        shares = 0 <= self.least_share <= self.share <= 1 and 0 <= self.least_spread <= self.spread
        if not (shares and self.share > 0 and self.spread > 0 and self.temperature > 0):
            raise ConfigError(
                f"share {self.share} (least {self.least_share}), spread {self.spread} (least "
                f"{self.least_spread}), temperature {self.temperature}",
                rule="above 0, a share at most 1, the least at most the first",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        rows, n = search.active, self.population
        x = search.x[rows]
        shape = (n, *x.shape[1:])
        start = 2 * search.draws.of(rows).uniform("start", shape, dtype=x.dtype) - 1
        members = _clamped(search, x[:, None] + search.eps * start, rows)
        counts = search.left(rows).clamp(max=n)
        fitness, _ = search.look_many(members, rows, counts, 0, self.loss)
        top = fitness.amax(1)
        plateaus, stalled = torch.zeros_like(rows), torch.zeros_like(rows)
        for step in range(1, self.steps + 1):
            on = search.going_on(rows)
            rows, members, fitness = rows[on], members[on], fitness[on]
            top, plateaus, stalled = top[on], plateaus[on], stalled[on]
            if not len(rows):
                return
            children = self._children(search, members, fitness, rows, plateaus, step)
            counts = search.left(rows).clamp(max=n - 1)
            found, _ = search.look_many(children, rows, counts, step, self.loss)
            best = fitness.argmax(1)
            at = torch.arange(len(rows), device=rows.device)
            members = torch.cat([members[at, best][:, None], children], 1)
            fitness = torch.cat([fitness[at, best][:, None], found], 1)
            rose = fitness.amax(1) > top
            top = torch.maximum(top, fitness.amax(1))
            stalled = torch.where(rose, 0, stalled + 1)
            plateaus = plateaus + (stalled >= self.patience)
            stalled = torch.where(stalled >= self.patience, 0, stalled)

    def _children(
        self, search: Search, members: Tensor, fitness: Tensor, rows: Tensor, plateaus: Tensor, step: int
    ) -> Tensor:
        """The next generation but for its elite, [k, population − 1, …]."""
        k, n = fitness.shape
        draws, shape, dtype = search.draws.of(rows), (n - 1, *members.shape[2:]), members.dtype
        width = fitness.std(1, keepdim=True, correction=0).clamp(min=torch.finfo(dtype).tiny)
        chance = ((fitness - fitness.amax(1, keepdim=True)) / (self.temperature * width)).softmax(1)
        drawn = draws.uniform("parents", (2 * (n - 1),), step=step, dtype=dtype)
        parents = torch.searchsorted(chance.cumsum(1), drawn).clamp(max=n - 1).view(k, 2, n - 1)
        at = torch.arange(k, device=rows.device)[:, None]
        first, second = members[at, parents[:, 0]], members[at, parents[:, 1]]
        mine, other = chance.gather(1, parents[:, 0]), chance.gather(1, parents[:, 1])
        odds = (mine / (mine + other).clamp(min=torch.finfo(dtype).tiny)).view(
            k, n - 1, *[1] * (first.dim() - 2)
        )
        pick = draws.uniform("crossover", shape, step=step, dtype=dtype) < odds
        children = torch.where(pick, first, second)
        shrunk = (_DECAY ** plateaus.to(dtype)).view(k, *[1] * (first.dim() - 1))
        share = (self.share * shrunk).clamp(min=self.least_share)
        spread = (self.spread * shrunk).clamp(min=self.least_spread) * search.eps
        changed = draws.uniform("mutated", shape, step=step, dtype=dtype) < share
        move = spread * (2 * draws.uniform("mutation", shape, step=step, dtype=dtype) - 1)
        return _clamped(search, torch.where(changed, children + move, children), rows)


def _clamped(search: Search, members: Tensor, rows: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(members, search.low[rows][:, None]), search.high[rows][:, None])
