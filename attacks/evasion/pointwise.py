"""Few changed coordinates by labels alone: salt and pepper, and a pointwise way back.

The latter from Schott, Rauber, Bethge, Brendel: "Towards the first adversarially robust neural network
model on MNIST" (ICLR 2019).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.decisions import ask, start_points
from mycelia.attacks.norms import Norm, wide
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["Pointwise", "SaltAndPepper"]


@dataclass(frozen=True)
class SaltAndPepper(Attack):
    """Ever more coordinates at a bound until the goal is reached; then again with fewer.

    Attributes:
        norm: of which the nearest success is kept.
        steps: draws per row, one query each, at least 1.
        ladder: draws from no coordinate to as many as are allowed, at least 1. That is all of them at first,
            and after a success no more than it took.
    """

    needs: ClassVar[str] = "label"
    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l2", "l1", "l0")

    norm: Norm = "l2"
    steps: int = 1000
    ladder: int = 50

    def check(self) -> None:
        """See `Attack.check`."""
        if self.steps < 1 or self.ladder < 1:
            raise ConfigError(
                f"steps {self.steps}, ladder {self.ladder}", rule="at least 1 each", who=type(self).__name__
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        _bounded(search, type(self).__name__)
        rows = search.active
        most = torch.ones(len(search.x), dtype=torch.float64, device=rows.device)
        share = most / self.ladder
        for step in range(self.steps):
            rows = rows[search.going_on(rows)]
            if not len(rows):
                return
            hit = ask(search, _salted(search, rows, share[rows], step), rows, step)
            most[rows] = torch.where(hit, share[rows], most[rows])
            risen = share[rows] + most[rows] / self.ladder
            # A success, or the top of the ladder: begin again half way up.
            again = hit | (risen > most[rows] * (1 + 1e-9))
            share[rows] = torch.where(again, most[rows] / 2, risen)


@dataclass(frozen=True)
class Pointwise(Attack):
    """From a success back to the input: coordinates are reset while the goal stays reached.

    In groups that are halved until they are single coordinates; single ones are tried again until a pass
    resets none. l1 and l2: then each coordinate that is left is moved towards its input by bisection.

    Attributes:
        norm: what is made small.
        groups: into which an input is cut at first; as many as it has coordinates: single ones from the
            beginning, as in the paper.
        passes: over single coordinates, at least 1.
        halvings: of each coordinate's change for l1 and l2; 0: none.
        starts: start points per row, each taken back; at least 1.
        tries: draws of a start point per row; a row without one has FAILED.
        pool: inputs [p, …] to start from; see `HopSkipJump`. Not compared.
    """

    needs: ClassVar[str] = "label"
    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l2", "l1", "l0")

    norm: Norm = "l2"
    groups: int = 8
    passes: int = 10
    halvings: int = 5
    starts: int = 10
    tries: int = 100
    pool: Tensor | None = field(default=None, compare=False, repr=False)

    def check(self) -> None:
        """See `Attack.check`."""
        if min(self.groups, self.passes, self.starts) < 1 or min(self.halvings, self.tries) < 0:
            raise ConfigError(
                f"groups {self.groups}, passes {self.passes}, starts {self.starts}, "
                f"halvings {self.halvings}, tries {self.tries}",
                rule="groups, passes and starts at least 1, the others at least 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        rows = search.active
        for start in range(self.starts):
            rows = rows[search.going_on(rows)]
            pool = self.pool if not start else None
            found, mine = start_points(search, rows, self.tries, pool, salt=True, restart=start)
            if len(mine):
                self._back(search, found.flatten(1).clone(), mine, start * (self.passes + 64))

    def _back(self, search: Search, points: Tensor, rows: Tensor, number: int) -> None:
        """From points [k, d] to the inputs, as near as single coordinates go; passes are numbered."""
        last = number + self.passes + 63  # whichever rows need fewer passes: their draws are by number
        size = max(1, points.shape[1] // self.groups)
        while size > 1:
            number += 1
            self._reset(search, points, rows, size, number)
            size = (size + 1) // 2
        open_ = torch.arange(len(rows), device=rows.device)
        for _ in range(self.passes):
            number += 1
            mine = points[open_]
            better = self._reset(search, mine, rows[open_], 1, number)
            points[open_] = mine
            open_ = open_[better & search.going_on(rows[open_])]
            if not len(open_):
                break
        if self.norm != "l0" and self.halvings:
            self._closer(search, points, rows, last)

    def _reset(self, search: Search, points: Tensor, rows: Tensor, size: int, number: int) -> Tensor:
        """Change points [k, d] in place, by groups of so many coordinates; whether some were reset, [k]."""
        x = search.x[rows].flatten(1)
        order, changed = _order(search, points, x, rows, number)
        place = order.argsort(dim=1)  # of each coordinate in its row's order
        better = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        for first in range(0, int(changed.max()), size):
            todo = ((changed > first) & search.going_on(rows)).nonzero()[:, 0]
            if not len(todo):
                break
            chosen = (place[todo] >= first) & (place[todo] < first + size)
            trial = torch.where(chosen, x[todo], points[todo])
            # What equals the input has been reached by no change at all, and is not asked.
            left = (trial != x[todo]).any(1)
            todo, trial = todo[left], trial[left]
            hit = ask(search, trial.view(-1, *search.x.shape[1:]), rows[todo], number)
            points[todo[hit]] = trial[hit]
            better[todo[hit]] = True
        return better

    def _closer(self, search: Search, points: Tensor, rows: Tensor, number: int) -> None:
        x = search.x[rows].flatten(1)
        order, changed = _order(search, points, x, rows, number)
        for turn in range(int(changed.max())):
            at = order[:, turn : turn + 1]
            near, far = x.gather(1, at), points.gather(1, at)
            for _ in range(self.halvings):
                todo = ((changed > turn) & search.going_on(rows)).nonzero()[:, 0]
                if not len(todo):
                    break
                middle = (near + far) / 2
                trial = points[todo].scatter(1, at[todo], middle[todo])
                hit = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
                hit[todo] = ask(search, trial.view(-1, *search.x.shape[1:]), rows[todo], number)
                points[todo] = torch.where(hit[todo, None], trial, points[todo])
                near, far = torch.where(hit[:, None], near, middle), torch.where(hit[:, None], middle, far)


def _order(search: Search, points: Tensor, x: Tensor, rows: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """A random order of each row's changed coordinates, the others after them; how many there are."""
    keys = search.draws.of(rows).uniform("order", (x.shape[1],), step=number)
    changed = points != x
    return torch.where(changed, keys, torch.inf).argsort(dim=1, stable=True), changed.sum(1)


def _salted(search: Search, rows: Tensor, share: Tensor, step: int) -> Tensor:
    x, draws, shape = search.x[rows], search.draws.of(rows), search.x.shape[1:]
    low, high = (bound[rows] for bound in search.box)
    ends = torch.where(draws.signs("end", shape, step=step) > 0, high, low)
    return torch.where(draws.uniform("salt", shape, step=step) < wide(share, x), ends, x)


def _bounded(search: Search, who: str) -> None:
    if not all(bool(torch.isfinite(bound).all()) for bound in search.box):
        raise ConfigError(
            "bounds that are infinite", rule="salt is the highest value and pepper the lowest", who=who
        )
