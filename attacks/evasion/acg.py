"""ACG: steps along conjugate gradients, of lengths chosen as APGD chooses them.

Yamamura et al.: "Diversified adversarial attacks based on conjugate gradient method", ICML 2022, algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Final

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.apgd import checkpoints
from mycelia.attacks.evasion.steps import direction, random_start
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm, wide
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["ACG", "hestenes_stiefel"]

_ROUNDINGS: Final = 100  # that count as none


def hestenes_stiefel(grad: Tensor, before: Tensor, along: Tensor) -> Tensor:
    """How much of the last direction goes into the next one of an ascent.

    β = −⟨g, y⟩ / ⟨s, y⟩ with y = g_before − g (Hestenes, Stiefel 1952, with the signs of an ascent). The next
    direction is at right angles to y; so where steps go to and fro over one edge of a piecewise linear model,
    ⟨s, y⟩ is 0 but for rounding, and β would be anything.

    Args:
        grad: g, [n, …].
        before: the gradient at the last point.
        along: s, the direction that was taken from there.

    Returns:
        float64 [n]; 0 where the gradient has not changed, or only at right angles to s.
    """
    least = _ROUNDINGS * torch.finfo(grad.dtype).eps
    grad, before, along = (each.flatten(1).double() for each in (grad, before, along))
    change = before - grad
    down = (along * change).sum(1)
    none = down.abs() <= least * along.norm(dim=1) * change.norm(dim=1)
    return torch.where(none, 0.0, -(grad * change).sum(1) / torch.where(none, 1.0, down))


def _next(grad: Tensor, before: Tensor, along: Tensor) -> Tensor:
    """The next direction, g + βs or g where nothing is left of that, with a largest coordinate of 1.

    βs does not depend on the scale of s, which would go on growing.
    """
    least = _ROUNDINGS * torch.finfo(grad.dtype).eps
    new = grad.flatten(1).double()
    found = new + hestenes_stiefel(grad, before, along)[:, None] * along.flatten(1).double()
    nothing = found.norm(dim=1) <= least * new.norm(dim=1)
    found = torch.where(nothing[:, None], new, found)
    largest = found.abs().amax(1, keepdim=True)
    return (found / torch.where(largest > 0, largest, 1.0)).to(grad.dtype).view_as(grad)


@dataclass(frozen=True)
class ACG(Attack):
    """Conjugate gradient ascent: other points than those of steepest steps, so other successes.

    Attributes:
        norm: of the ball.
        loss: what is raised.
        steps: of each run, at least 1.
        restarts: runs from other starts, for rows that still hold.
        rho: where no larger share of the steps since the last check rose, the length is halved.
        eot: passes over which a gradient is averaged, for models that are random.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2")

    loss: Loss = "margin"
    steps: int = 100
    restarts: int = 1
    rho: float = 0.75
    eot: int = 1

    def check(self) -> None:
        """See `Attack.check`."""
        if min(self.steps, self.restarts, self.eot) < 1 or not 0 <= self.rho <= 1:
            raise ConfigError(
                f"steps {self.steps}, restarts {self.restarts}, rho {self.rho}, eot {self.eot}",
                rule="at least 1 each, rho in [0, 1]",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        for run in range(self.restarts):
            rows = search.active
            if not len(rows):
                return
            self._run(search, rows, run)

    def _run(self, search: Search, rows: Tensor, run: int) -> None:
        at = run * (self.steps + 1)
        points = random_start(search, rows, run)
        grad, loss, _ = search.gradient(points, rows, at, self.loss)
        state = _State(
            rows, points, grad, loss, grad, torch.full_like(loss, 2 * search.eps), points, grad, loss,
            grad, grad, torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool), loss,
        )  # fmt: skip
        checks, last = checkpoints(self.steps), 0
        for step in range(1, self.steps + 1):
            state.keep(search.going_on(state.rows))
            rows = state.rows
            if not len(rows):
                return
            moved = state.points + wide(state.size, points) * direction(state.along, search.norm)
            moved = search.inside(moved, rows)
            if step == self.steps and self.eot == 1:  # nothing follows that needs a gradient
                search.look(moved, rows, at + step, self.loss)
                return
            grad, loss, _ = search.gradient(moved, rows, at + step, self.loss)
            before = state.moved(moved, grad, loss)
            if step in checks:
                before = state.checked_at(step - last, self.rho, before)
                last = step
            state.along = _next(state.grad, *before)


@dataclass
class _State:
    """Rows on their way.

    Attributes:
        rows: their indices.
        points: where they are.
        grad: there.
        loss: there.
        along: direction of the next step.
        size: its length.
        best: point of highest loss in this run.
        best_grad: there.
        best_loss: there.
        from_grad: gradient at the point before the best one.
        from_along: direction that led from there to the best one.
        rose: how many steps raised the loss since the last check.
        reduced: whether the length was halved there.
        checked: the best loss there.
    """

    rows: Tensor
    points: Tensor
    grad: Tensor
    loss: Tensor
    along: Tensor
    size: Tensor
    best: Tensor
    best_grad: Tensor
    best_loss: Tensor
    from_grad: Tensor
    from_along: Tensor
    rose: Tensor
    reduced: Tensor
    checked: Tensor

    def keep(self, on: Tensor) -> None:
        """Only some rows go on."""
        if not bool(on.all()):
            for each in fields(self):
                setattr(self, each.name, getattr(self, each.name)[on])

    def moved(self, points: Tensor, grad: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        """They are elsewhere now; gives the gradient before, and the direction that was taken."""
        before = self.grad, self.along
        better = loss > self.best_loss
        this = wide(better, points)
        self.best = torch.where(this, points, self.best)
        self.best_grad = torch.where(this, grad, self.best_grad)
        self.best_loss = torch.where(better, loss, self.best_loss)
        self.from_grad = torch.where(this, before[0], self.from_grad)
        self.from_along = torch.where(this, before[1], self.from_along)
        self.rose += loss > self.loss
        self.points, self.grad, self.loss = points, grad, loss
        return before

    def checked_at(self, steps: int, rho: float, before: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Halve the length where it has not helped, and go back to the best point with all that led there."""
        stale = ~self.reduced & (self.checked >= self.best_loss)
        cut = (self.rose <= rho * steps) | stale
        self.size = torch.where(cut, self.size / 2, self.size)
        self.reduced, self.checked, self.rose = cut, self.best_loss, torch.zeros_like(self.rose)
        back = wide(cut, self.points)
        self.points, self.grad = (
            torch.where(back, best, here)
            for best, here in ((self.best, self.points), (self.best_grad, self.grad))
        )
        self.loss = torch.where(cut, self.best_loss, self.loss)
        return torch.where(back, self.from_grad, before[0]), torch.where(back, self.from_along, before[1])
