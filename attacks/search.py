"""Rows under attack, and what has been found of them.

An attack moves points about; everything it has evaluated goes through `Search`, which remembers for each row
the nearest success and the point of highest loss. So no attack can lose a success that it has seen, count a
point outside the ball, or report its last iterate where an earlier one was better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import torch
from torch import Tensor

from mycelia.attacks.draws import Draws
from mycelia.attacks.goals import Goal
from mycelia.attacks.losses import Loss
from mycelia.attacks.model import Model
from mycelia.attacks.norms import Norm, norm, project, wide

__all__ = ["SLACK", "Keep", "Search", "change", "towards"]

Keep = Literal["closest", "loss"]
SLACK: Final = 1e-6  # relative: of a norm beyond eps, and of an input beyond its bounds

_TOGETHER: Final = 2**18  # numbers that go through the model in one pass of `look_many`: layers fit a cache
_ROWS: Final = 32  # and at least so many rows


class Search:
    """Some rows under attack.

    Attributes:
        x: inputs, [m, …].
        goal: of these rows.
        norm: of the ball, or of what is made small.
        eps: radius; infinite where any change will do.
        low: smallest values, as x.
        high: largest values, as x.
        box: the bounds alone, smallest and largest values; `low` and `high` of a "fixed" linf attack are the
            ball's, too.
        draws: random numbers of these rows.
        classes: of the model; 0 where it gives labels only.
        clean: its outputs at x.
        best: for each row the nearest success, or where there is none the point of highest loss.
        broken: bool [m].
    """

    def __init__(
        self,
        model: Model,
        x: Tensor,
        goal: Goal,
        p: Norm,
        eps: float,
        bounds: tuple[Tensor, Tensor],
        draws: Draws,
        clean: Tensor,
        *,
        kind: str,
        keep: Keep,
        most: int | None,
        eot: int = 1,
    ) -> None:
        m = len(x)
        self.x, self.goal, self.norm, self.eps, self.draws, self.clean = x, goal, p, eps, draws, clean
        self.classes = clean.shape[1] if clean.dim() == 2 else 0
        self.low, self.high = (bound.expand_as(x) for bound in bounds)
        self.box = self.low, self.high
        if kind == "fixed" and p == "linf":  # iterates inside these are inside the ball after rounding, too
            self.low = torch.maximum(self.low, _inwards(x, -eps))
            self.high = torch.minimum(self.high, _inwards(x, eps))
        self.lower, self.upper = self.low - x, self.high - x
        self._model, self._kind, self._keep, self._most, self._eot = model, kind, keep, most, eot
        self.best = x.clone()
        self.broken = torch.zeros(m, dtype=torch.bool, device=x.device)
        self.failed: dict[int, str] = {}
        self._out = torch.zeros_like(self.broken)
        self._distance = torch.full((m,), torch.inf, dtype=torch.float64, device=x.device)
        self._loss = torch.full((m,), -torch.inf, dtype=torch.float64, device=x.device)
        self.best_loss = torch.full((m,), torch.nan, dtype=torch.float64, device=x.device)
        self.best_step = torch.full((m,), -1, dtype=torch.int64, device=x.device)
        self.queries = torch.zeros(m, dtype=torch.int64, device=x.device)
        self.gradients = torch.zeros(m, dtype=torch.int64, device=x.device)

    @property
    def closest(self) -> bool:
        """Whether the closest success is wanted, not the highest loss."""
        return self._keep == "closest"

    # --- which rows -------------------------------------------------------------------------------

    @property
    def active(self) -> Tensor:
        """Indices of the rows to go on with: not out of budget, not failed, and not done."""
        rows = torch.arange(len(self.x), device=self.x.device)
        return rows[self.going_on(rows)]

    def going_on(self, rows: Tensor) -> Tensor:
        """Which of these rows are still active, bool [k]."""
        done = self._out[rows]
        if self._kind == "fixed" and self._keep == "closest":
            done = done | self.broken[rows]
        if self._most is not None:
            done = done | (self.queries[rows] >= self._most)
        return ~done

    def fail(self, rows: Tensor, reason: str) -> None:
        """These cannot be attacked; what was found so far counts all the same."""
        self._out[rows] = True
        for row in rows.tolist():
            self.failed.setdefault(row, reason)

    def left(self, rows: Tensor) -> Tensor:
        """Queries that each row may still make; a large number where there is no limit."""
        if self._most is None:
            return torch.full_like(rows, 2**62)
        return (self._most - self.queries[rows]).clamp(min=0)

    # --- what a model says ------------------------------------------------------------------------

    def look(self, points: Tensor, rows: Tensor, step: int, loss: Loss = "margin") -> tuple[Tensor, Tensor]:
        """Evaluate points, one for each of these rows, and remember what is good.

        Args:
            points: [k, …]
            rows: indices [k].
            step: for `best_step`.
            loss: by which points without success are compared; "margin" for decision-based attacks has no
                meaning where there are labels only, and is −distance there.

        Returns:
            loss [k] and whether the goal is reached [k].
        """
        outputs = self._model(points)
        self.queries[rows] += 1
        goal = self.goal.of(rows)
        reached = goal.reached(outputs)
        if outputs.dim() == 2:
            losses = goal.loss(outputs, loss)
        else:
            losses = torch.where(reached, 1.0, -1.0).to(points.dtype)
        self._remember(points, rows, losses, reached, step)
        return losses, reached

    def look_many(
        self, points: Tensor, rows: Tensor, counts: Tensor, step: int, loss: Loss = "margin"
    ) -> tuple[Tensor, Tensor]:
        """Evaluate several points of each of these rows, and remember the best of each row.

        Args:
            points: [k, b, …], inside ball and box.
            rows: indices [k], each once.
            counts: how many of its points a row evaluates, [k]; the others have a loss of −inf.
            step: for `best_step`.
            loss: of scores.

        Returns:
            loss [k, b] and whether the goal is reached [k, b].
        """
        k, b = points.shape[:2]
        asked = torch.arange(b, device=rows.device) < counts[:, None]
        losses = torch.full((k, b), -torch.inf, dtype=points.dtype, device=points.device)
        reached = torch.zeros_like(asked)
        places = asked.flatten().nonzero()[:, 0]
        together = max(_ROWS, _TOGETHER // max(1, self.x[:1].numel()))
        for some in places.split(together) if len(places) else ():
            who = rows[some // b]
            outputs, goal = self.outputs(points.flatten(0, 1)[some], who), self.goal.of(who)
            losses.view(-1)[some] = _known(goal.loss(outputs, loss)).to(losses.dtype)
            reached.view(-1)[some] = goal.reached(outputs)
        near = norm(change(points, self.x[rows][:, None]).flatten(0, 1), self.norm).view(k, b)
        best = losses.argmax(1)
        if self._keep == "closest":
            best = torch.where(reached.any(1), torch.where(reached, near, torch.inf).argmin(1), best)
        some = (counts > 0).nonzero()[:, 0]
        if len(some):
            best = best[some]
            self._remember(points[some, best], rows[some], losses[some, best], reached[some, best], step)
        return losses, reached

    def outputs(self, points: Tensor, rows: Tensor) -> Tensor:
        """Logits or labels at points that are no candidates; they are counted and not remembered.

        Args:
            points: [k, …]
            rows: indices [k]; a row may come several times.
        """
        self.queries.index_add_(0, rows, torch.ones_like(rows))
        return self._model(points)

    def gradient(
        self,
        points: Tensor,
        rows: Tensor,
        step: int,
        loss: Loss | Callable[[Tensor, Goal], Tensor] = "ce",
        *,
        candidates: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, raised towards the goal, and its gradient; the points are remembered like any other.

        Args:
            points: [k, …]
            rows: indices [k].
            step: for `best_step`.
            loss: see `Goal.loss`.
            candidates: whether the points may be what is returned.

        Returns:
            gradient [k, …] (0 where it is not finite: these rows failed), loss [k], outputs [k, classes].
        """
        goal = self.goal.of(rows)
        found, losses, outputs = self._model.gradient(points, lambda z: goal.loss(z, loss))  # type: ignore[arg-type]
        if self._eot > 1:  # expectation over the transformations of a random model
            for _ in range(self._eot - 1):
                more, others, again = self._model.gradient(points, lambda z: goal.loss(z, loss))  # type: ignore[arg-type]
                found, losses, outputs = found + more, losses + others, outputs + again
            found, losses, outputs = found / self._eot, losses / self._eot, outputs / self._eot
        self.queries[rows] += self._eot
        self.gradients[rows] += self._eot
        if candidates:
            self._remember(points, rows, losses, goal.reached(outputs), step)
        total = found.flatten(1).sum(1) + losses  # one pass: not finite if anything is not
        if not bool(torch.isfinite(total).all()):
            bad = ~(torch.isfinite(found.flatten(1)).all(1) & torch.isfinite(losses))
            found = torch.where(wide(bad, found), torch.zeros_like(found), found)
            self.fail(rows[bad], "a gradient that is not finite")
        return found, losses, outputs

    def slopes(self, points: Tensor, rows: Tensor, step: int, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of several sums of logits from one forward pass; the points are remembered, too.

        Args:
            points: [k, …]
            rows: indices [k].
            step: for `best_step`.
            weights: [k, c, classes], of the logits in each of c sums.

        Returns:
            gradients [k, c, …] (0 where one is not finite: these rows have failed), outputs [k, classes].
        """
        count = weights.shape[1]
        with torch.enable_grad():
            leaf = points.detach().requires_grad_()
            traced = self._model.traced(leaf)
            found = torch.stack(
                [
                    torch.autograd.grad((traced * weights[:, k]).sum(), leaf, retain_graph=k + 1 < count)[0]
                    for k in range(count)
                ],
                1,
            )
        outputs = traced.detach()
        self.queries[rows] += 1
        self.gradients[rows] += count
        goal = self.goal.of(rows)
        self._remember(points, rows, goal.loss(outputs, "margin"), goal.reached(outputs), step)
        sound = torch.isfinite(found.flatten(1).sum(1) + outputs.sum(1))  # one pass, as above
        if not bool(sound.all()):
            sound = torch.isfinite(found.flatten(1)).all(1) & torch.isfinite(outputs).all(1)
            found = torch.where(wide(sound, found), found, torch.zeros_like(found))
            self.fail(rows[~sound], "a gradient that is not finite")
        return found, outputs

    def inside(self, points: Tensor, rows: Tensor) -> Tensor:
        """The nearest points of ball and box."""
        if self.norm == "linf":
            return torch.minimum(torch.maximum(points, self.low[rows]), self.high[rows])
        x = self.x[rows]
        if self.eps == torch.inf:
            return torch.minimum(torch.maximum(points, self.low[rows]), self.high[rows])
        if x.element_size() == 2:  # a sum of halves may be rounded out of the ball
            lower, upper = (bound[rows].float() - x.float() for bound in (self.low, self.high))
            delta = project(points.float() - x.float(), self.norm, self.eps, lower, upper)
            return towards(x, x.float() + delta)
        delta = project(points - x, self.norm, self.eps, self.lower[rows], self.upper[rows])
        return torch.minimum(torch.maximum(x + delta, self.low[rows]), self.high[rows])

    def _remember(self, points: Tensor, rows: Tensor, losses: Tensor, reached: Tensor, step: int) -> None:
        distance = norm(change(points, self.x[rows]), self.norm)
        fixed = self._kind == "fixed"
        fits = distance <= self.eps * (1 + SLACK)
        if self.norm != "linf":  # linf iterates are clamped
            low, high = self.low[rows], self.high[rows]
            fits &= ((points >= low) & (points <= high)).flatten(1).all(1)
        values = _known(losses.double())
        success = reached & (fits | (not fixed))
        before, known = self.broken[rows], self._distance[rows]
        if self._keep == "loss":
            better = (values > self._loss[rows]) & fits
        else:
            closer = success & (distance < known)
            tie = success & before & (distance == known)
            if bool(tie.any()):  # fewer or smaller changes that the norm does not see
                which = rows[tie]
                found, held = (change(each, self.x[which]) for each in (points[tie], self.best[which]))
                closer[tie] = norm(found, "l2") < norm(held, "l2")
            higher = ~success & ~before & (fits | (not fixed)) & (values > self._loss[rows])
            better = closer | higher
        if bool(better.any()):
            chosen = rows[better]
            self.best[chosen] = points[better].to(self.best.dtype)
            self.best_loss[chosen] = losses.double()[better]
            self.best_step[chosen] = step
            self._distance[chosen] = torch.where(success[better], distance[better], self._distance[chosen])
        self._loss[rows] = torch.where(
            fits | (not fixed), torch.maximum(self._loss[rows], values), self._loss[rows]
        )
        if self._keep == "loss":
            self.broken[rows] = torch.where(better, success, before)
        else:
            self.broken[rows] = before | success


def _known(losses: Tensor) -> Tensor:
    """One that is not a number is lower than any other: it neither wins a comparison nor hides what comes."""
    return torch.where(losses.isnan(), -torch.inf, losses)


def change(points: Tensor, x: Tensor) -> Tensor:
    """The difference in double precision; that of halves is taken there: their own is rounded too much."""
    return points.double() - x.double() if x.element_size() == 2 else (points - x).double()


def _inwards(x: Tensor, by: float) -> Tensor:
    """The sum in the precision of x, on the near side."""
    if x.element_size() == 2:
        return towards(x, x.double() + by)
    moved = x + by
    beyond = (moved.double() - x.double()).abs() > abs(by)
    return torch.where(beyond, torch.nextafter(moved, x), moved)


def towards(x: Tensor, wanted: Tensor) -> Tensor:
    """Values of 16 bits as near as can be to those that are wanted, and no further from x than they."""
    near = wanted.to(x.dtype)
    beyond = (near.double() - x.double()).abs() > (wanted.double() - x.double()).abs()
    bits = near.view(torch.int16).int()
    up = x.double() > near.double()
    # Bits of floats count up with their size; from zero the next is the smallest one of either sign.
    step = torch.where((near > 0) == up, 1, -1)
    after = torch.where(near == 0, torch.where(up, 1, 1 - 2**15), bits + step)
    return torch.where(beyond, after.to(torch.int16).view(x.dtype), near)
