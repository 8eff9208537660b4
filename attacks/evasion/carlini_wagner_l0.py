"""Carlini, Wagner: "Towards evaluating the robustness of neural networks" (S&P 2017), in l0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.adam import Adam
from mycelia.attacks.evasion.constants import Confident
from mycelia.attacks.evasion.tanh_box import TanhBox
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["CarliniWagnerL0"]

_GAIN: Final = 1e-3  # relative fall of the objective without which an attempt ends


@dataclass(frozen=True)
class CarliniWagnerL0(Attack):
    """The l2 attack on ever fewer coordinates: those that matter least are frozen at the input (§VI-B).

    An attempt is descent on ‖δ‖² + c · max(κ − margin, 0) over the free coordinates, by Adam, until it
    succeeds. Then coordinates are frozen in the order of gradient · δ, what each has gained, the smallest
    first; the next attempt begins at the success without them. Where an attempt fails the constant c rises;
    at its largest, half as many are frozen. One that cannot be frozen alone stays free (in the paper the
    attack ends there), until that is so of all. Each row has a constant and a set of its own.

    Attributes:
        norm: "l0".
        steps: of each attempt, at least 1.
        rounds: attempts, at least 1.
        share: of the free coordinates that are frozen at once, at most; in (0, 1). At least one is.
        constant: the first one, above 0.
        largest: constant above which an attempt counts as failed, at least the first one.
        learning_rate: of Adam, in raw input units in the middle of the box, above 0.
        kappa: margin in logits that counts as success, at least 0.
    """

    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l0",)

    norm: Norm = "l0"
    steps: int = 100
    rounds: int = 100
    share: float = 0.2
    constant: float = 1e-1
    largest: float = 1e2
    learning_rate: float = 0.03
    kappa: float = 0.0

    def check(self) -> None:
        """See `Attack.check`."""
        counts = self.steps >= 1 and self.rounds >= 1 and 0 < self.share < 1
        if not (counts and 0 < self.constant <= self.largest and self.learning_rate > 0 and self.kappa >= 0):
            raise ConfigError(
                f"steps {self.steps}, rounds {self.rounds}, share {self.share}, constant {self.constant}, "
                f"largest {self.largest}, learning_rate {self.learning_rate}, kappa {self.kappa}",
                rule="counts at least 1; share in (0, 1); constants and rate above 0, the largest last; "
                "kappa at least 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        search.goal = Confident(search.goal, self.kappa)
        rows = search.active
        free = _Free(search)
        constant = torch.full_like(free.gain[:, 0], self.constant)
        for attempt in range(self.rounds):
            rows = rows[search.going_on(rows)]
            if not len(rows):
                return
            success = self._attempt(search, rows, free, constant[rows], attempt * self.steps)
            harder = ~success & (constant[rows] < self.largest)
            constant[rows] = torch.where(
                harder, (constant[rows] * 10).clamp(max=self.largest), constant[rows]
            )
            rows = free.judge(rows, success, harder, self.share)

    def _attempt(self, search: Search, rows: Tensor, free: _Free, constant: Tensor, first: int) -> Tensor:
        """Descend over the coordinates on trial with one constant per row; bool [k]: who succeeded."""
        everyone = rows
        success = torch.zeros(len(search.x), dtype=torch.bool, device=rows.device)
        wide = (-1, *[1] * (search.x.dim() - 1))
        x, c, moves = search.x[rows], constant.view(wide), free.trial[rows].view(-1, *search.x.shape[1:])
        box = TanhBox(search, rows)
        inner = box.inner(torch.where(moves, free.points[rows], x))
        adam = Adam(inner)
        lowest = torch.full_like(constant, torch.inf)
        every = max(1, self.steps // 5)
        for step in range(self.steps):
            points, slope = box.outer(inner)
            points = torch.where(moves, points, x)
            grad, margin, outputs = search.gradient(points, rows, first + step, "margin")
            reached = search.goal.of(rows).reached(outputs)
            success[rows] |= reached
            delta = points - x
            free.found(rows[reached], points[reached], (grad * delta)[reached])
            hinge = (self.kappa - margin).clamp(min=0)
            descent = (2 * delta - c * (hinge > 0).view(wide) * grad) * slope
            inner = inner - self.learning_rate * adam.step(descent)
            on = search.going_on(rows) & ~reached
            if (step + 1) % every == 0:
                value = delta.square().flatten(1).sum(1) + c.flatten() * hinge
                on &= value <= (1 - _GAIN) * lowest
                lowest = torch.minimum(lowest, value)
            if not bool(on.all()):
                rows, x, c, moves, lowest, inner = rows[on], x[on], c[on], moves[on], lowest[on], inner[on]
                adam.keep(on)
                if not len(rows):
                    break
                box = TanhBox(search, rows)
        return success[everyone]


class _Free:
    """Of each row: which coordinates have been enough, which are on trial, and the last success.

    Args:
        search: of all rows, m of them, of d coordinates.

    Attributes:
        trial: bool [m, d]
        points: the last success, as x; the input without one.
        gain: of each coordinate there, [m, d].
    """

    def __init__(self, search: Search) -> None:
        self.points = search.x.clone()
        self.gain = torch.zeros_like(search.x.flatten(1))
        self.trial = torch.ones_like(self.gain, dtype=torch.bool)
        self._x = search.x
        self._enough, self._needed = self.trial.clone(), ~self.trial
        self._known = torch.zeros(len(self.gain), dtype=torch.bool, device=search.x.device)
        self._frozen = self.gain.new_full((len(self.gain),), torch.inf)  # at once, at most

    def found(self, rows: Tensor, points: Tensor, gain: Tensor) -> None:
        """Take in successes, [k, …], and what each of their coordinates has gained."""
        self.points[rows], self.gain[rows] = points, gain.flatten(1)

    def judge(self, rows: Tensor, success: Tensor, harder: Tensor, share: float) -> Tensor:
        """Choose the coordinates of the next attempt; which rows have one.

        Args:
            rows: indices [k].
            success: bool [k]
            harder: bool [k], the same coordinates again.
            share: of the free coordinates that are frozen at once, at most.
        """
        done = rows[success]
        self._known[done] = True
        moved = (self.points[done] != self._x[done]).flatten(1)
        self._enough[done] = self.trial[done] & moved
        failed = ~success & ~harder
        alone = rows[failed & (self._frozen[rows] == 1)]
        self._needed[alone] |= self._enough[alone] & ~self.trial[alone]
        open_ = self._enough & ~self._needed
        count = open_[rows].sum(1).to(self._frozen.dtype)
        tried = torch.minimum(self._frozen[rows], (share * count).floor().clamp(min=1))
        self._frozen[rows] = torch.where(failed, (tried / 2).floor().clamp(min=1), tried)
        ends = (failed & ~self._known[rows]) | (~harder & (count == 0))
        again = rows[~harder & ~ends]
        gain = torch.where(open_[again], self.gain[again], torch.inf)
        rank = gain.argsort(dim=1, stable=True).argsort(dim=1)
        self.trial[again] = self._enough[again] & (rank >= self._frozen[again][:, None])
        return rows[~ends]
