"""NES: natural evolution strategies for gradients that are not given.

Ilyas, Engstrom, Athalye, Lin: "Black-box adversarial attacks with limited queries and information" (ICML
2018).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.decisions import in_box, portions, start_points
from mycelia.attacks.evasion.steps import direction
from mycelia.attacks.goals import Goal, predicted
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm, norm, project, wide
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["NES"]

Mode = Literal["query-limited", "partial", "label"]
_SHORTENED = 8  # times a step is halved before the radius is let shrink more slowly


@dataclass(frozen=True)
class NES(Attack):
    """Projected steps along a gradient estimated from antithetic pairs of points, by scores or labels.

    "query-limited" (§2.2): all scores are seen. "partial" (§2.3): those of the `top` best classes only.
    "label" (§2.4): no scores; the loss is the share of noisy copies of a point with the wanted label. In
    "label", and in "partial" with a target, the walk begins at a point outside the ball where the target is
    seen (the goal is reached), and the radius shrinks to eps as long as that stays so (Algorithm 1).

    Attributes:
        norm: of the ball.
        mode: which of the three.
        steps: at least 1; each takes 2 · pairs + 1 queries ("label": 2 · pairs · copies + 1), and a few more
            where the radius shrinks.
        pairs: of points for a gradient.
        sigma: of the normal noise, in units of the input.
        step_size: None: eps/10, and in proportion to the radius while that is larger.
        momentum: share of the last gradient that is kept, in [0, 1).
        loss: what is raised in "query-limited".
        top: scores that are seen in "partial".
        copies: noisy copies of a point in "label".
        spread: half-width of their uniform noise, in units of the input.
        tries: draws of a start point per row, where one is needed; a row without one has FAILED.
        pool: inputs [p, …] to start from; see `HopSkipJump`. Not compared.
    """

    needs: ClassVar[str] = "score or label"
    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2")

    mode: Mode = "query-limited"
    steps: int = 100
    pairs: int = 25
    sigma: float = 1e-3
    step_size: float | None = None
    momentum: float = 0.5
    loss: Loss = "margin"
    top: int = 1
    copies: int = 10
    spread: float = 1e-2
    tries: int = 100
    pool: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def needed(self) -> str:
        """See `Attack.needed`."""
        return "label" if self.mode == "label" else "score"

    def check(self) -> None:
        """See `Attack.check`."""
        who = type(self).__name__
        if self.mode not in get_args(Mode):
            raise ConfigError(f"mode {self.mode!r}", rule=f"one of {', '.join(get_args(Mode))}", who=who)
        sizes = self.sigma > 0 and self.spread > 0 and (self.step_size is None or self.step_size > 0)
        if min(self.steps, self.pairs, self.top, self.copies) < 1 or self.tries < 0 or not sizes:
            raise ConfigError(
                f"steps {self.steps}, pairs {self.pairs}, top {self.top}, copies {self.copies}, "
                f"tries {self.tries}, sigma {self.sigma}, spread {self.spread}, step_size {self.step_size}",
                rule="counts of at least 1 (tries: 0), lengths above 0",
                who=who,
            )
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum {self.momentum}", rule="in [0, 1)", who=who)

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        if self.mode == "label" or (self.mode == "partial" and search.goal.targeted):
            self._shrinking(search)
        else:
            self._inside(search)

    # --- from the input, inside the ball ------------------------------------------------------------

    def _inside(self, search: Search) -> None:
        rows = search.active
        points, past = search.x[rows], torch.zeros_like(search.x[rows])
        size = self.step_size or search.eps / 10
        loss = self._seen if self.mode == "partial" else self.loss
        search.look(points, rows, 0, loss)
        for step in range(1, self.steps + 1):
            on = search.going_on(rows)
            points, rows, past = points[on], rows[on], past[on]
            if not len(rows):
                return
            past = self._estimate(search, points, rows, past, step, 1)
            points = search.inside(points + size * direction(past, search.norm), rows)
            on = search.going_on(rows)
            if bool(on.any()):
                search.look(points[on], rows[on], step, loss)

    # --- from a success outside it ------------------------------------------------------------------

    def _shrinking(self, search: Search) -> None:
        rows = search.active
        search.look(search.x[rows], rows, 0)
        points, rows = start_points(search, search.active, self.tries, self.pool, self._shown)
        radius = norm(points - search.x[rows], search.norm)
        shrink = radius / 4
        past = torch.zeros_like(points)
        for step in range(1, self.steps + 1):
            on = search.going_on(rows)
            points, rows, past, radius, shrink = (each[on] for each in (points, rows, past, radius, shrink))
            if not len(rows):
                return
            past = self._estimate(search, points, rows, past, step, 1)
            smaller = (radius - shrink).clamp(min=search.eps)
            moved, good = self._shorter(search, points, rows, past, smaller, step)
            points, radius = moved, torch.where(good, smaller, radius)
            shrink = torch.where(good, (shrink * 1.5).minimum(radius / 2), shrink / 2)

    def _shorter(
        self, search: Search, points: Tensor, rows: Tensor, past: Tensor, radius: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """A step into the smaller ball after which the target is still seen, and whether there was one."""
        size = self.step_size or search.eps / 10
        length = torch.full_like(radius, size) if self.step_size else (radius / 10).clamp(min=size)
        found, good = points.clone(), torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        ahead = direction(past, search.norm)
        for _ in range(_SHORTENED):
            todo = (~good & search.going_on(rows)).nonzero()[:, 0]
            if not len(todo):
                break
            mine = rows[todo]
            trial = points[todo] + wide(length[todo], points) * ahead[todo]
            trial = self._drawn_in(search, trial, mine, radius[todo])
            hit = self._checked(search, trial, mine, radius[todo], step)
            found[todo[hit]] = trial[hit]
            good[todo[hit]] = True
            length = length / 2
        return found, good

    def _drawn_in(self, search: Search, points: Tensor, rows: Tensor, radius: Tensor) -> Tensor:
        """The nearest points of box and ball, each row with a radius of its own."""
        x, (low, high) = search.x[rows], search.box
        delta = project(points - x, search.norm, radius, low[rows] - x, high[rows] - x)
        points = in_box(search, x + delta, rows)
        there = radius <= search.eps
        return torch.where(wide(there, x), search.inside(points, rows), points)

    def _checked(self, search: Search, points: Tensor, rows: Tensor, radius: Tensor, step: int) -> Tensor:
        """Whether the target is seen; what lies in the ball of radius eps is remembered."""
        hit = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        there = (radius <= search.eps) & search.going_on(rows)
        beyond = (radius > search.eps) & search.going_on(rows)
        if bool(there.any()):
            kept: list[Tensor] = []

            def loss(outputs: Tensor, labels: Tensor) -> Tensor:
                kept.append(outputs)
                return self._seen(outputs, labels)

            _, hit[there] = search.look(points[there], rows[there], step, loss)
            if self.mode == "partial":
                hit[there] = self._shown(kept[0], search.goal.of(rows[there]))
        if bool(beyond.any()):
            mine = rows[beyond]
            hit[beyond] = self._shown(search.outputs(points[beyond], mine), search.goal.of(mine))
        return hit

    # --- what is seen ---------------------------------------------------------------------------------

    def _shown(self, outputs: Tensor, goal: Goal) -> Tensor:
        """Whether the goal is reached, [k]; in "partial", the target is among the scores that are seen."""
        if self.mode == "label" or outputs.dim() == 1:
            return goal.reached(predicted(outputs))
        best = outputs.topk(min(self.top, outputs.shape[1]), 1).indices
        return (best == goal.labels[:, None]).any(1)

    def _seen(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """−log of the probability of a class; of the smallest one that is seen where that is not."""
        scores = outputs.log_softmax(1)
        best = scores.topk(min(self.top, scores.shape[1]), 1)
        mine = scores.gather(1, labels[:, None])[:, 0]
        seen = (best.indices == labels[:, None]).any(1)
        return -torch.where(seen, mine, best.values[:, -1])

    def _losses(self, search: Search, outputs: Tensor, rows: Tensor) -> Tensor:
        goal = search.goal.of(rows)
        if self.mode == "label":
            return goal.reached(predicted(outputs)).to(search.x.dtype)
        loss: Loss = self._seen if self.mode == "partial" else self.loss
        return goal.loss(outputs, loss).to(search.x.dtype)

    def _estimate(
        self, search: Search, points: Tensor, rows: Tensor, past: Tensor, step: int, spare: int
    ) -> Tensor:
        """Momentum, and Σ (loss(x + σu) − loss(x − σu)) u over pairs; as many of these as the budget has."""
        size, shape = points[0].numel(), points.shape[1:]
        copies = self.copies if self.mode == "label" else 1
        counts = ((search.left(rows) - spare) // (2 * copies)).clamp(min=0, max=self.pairs)
        found = torch.zeros_like(points.flatten(1))
        for part, first, many in portions(counts, size * 2 * copies):
            mine = rows[part]
            draws, names = search.draws.of(mine), {"step": step, "restart": first}
            noise = draws.normal("pair", (many, size), dtype=points.dtype, **names)
            flat = (first + torch.arange(many, device=rows.device) < counts[part][:, None]).flatten()
            who = mine.repeat_interleave(many)[flat]
            centre = points[part].repeat_interleave(many, 0)[flat].flatten(1)[:, None, None]
            move = self.sigma * noise.view(-1, size)[flat]
            trial = centre + torch.stack([move, -move], 1)[:, :, None]  # [pairs, side, copy, size]
            if self.mode == "label":
                blur = draws.uniform("blur", (many, 2, copies, size), dtype=points.dtype, **names)
                trial = trial + self.spread * (2 * blur.view(-1, 2, copies, size)[flat] - 1)
            whose = who.repeat_interleave(2 * copies)
            trial = in_box(search, trial.reshape(-1, *shape), whose)
            losses = self._losses(search, search.outputs(trial, whose), whose).view(-1, 2, copies).sum(2)
            weight = torch.zeros(len(flat), dtype=points.dtype, device=points.device)
            weight[flat] = losses[:, 0] - losses[:, 1]
            found[part] += torch.einsum("kb,kbd->kd", weight.view(len(mine), many), noise)
        scale = wide((2 * self.sigma * copies * counts.clamp(min=1)).to(points.dtype), points)
        fresh = found.view_as(points) / scale
        none = wide(counts == 0, points)
        return torch.where(none, past, self.momentum * past + (1 - self.momentum) * fresh)
