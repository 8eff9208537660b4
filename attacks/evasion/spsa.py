"""SPSA: gradients from losses at two points on either side, all coordinates moved at once.

Uesato, O'Donoghue, van den Oord, Kohli: "Adversarial risk and the dangers of evaluating against weak
attacks", ICML 2018, algorithm 1; the estimate is Spall's (1992).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.adam import Adam, check_betas
from mycelia.attacks.evasion.decisions import in_box, portions
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm, wide
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["SPSA"]


@dataclass(frozen=True)
class SPSA(Attack):
    """Projected steps of Adam's along gradients estimated from pairs x ± δ·v, v of random signs, by scores.

    Attributes:
        norm: of the ball.
        steps: at least 1; each takes 2 · pairs + 1 queries.
        pairs: of points for a gradient, at least 1.
        delta: how far they are from the point in each coordinate, in units of the input.
        step_size: length of a first step; None: eps / 3.
        beta1: of Adam.
        beta2: of Adam.
        loss: what is raised.
    """

    needs: ClassVar[str] = "score"
    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2")

    steps: int = 100
    pairs: int = 64
    delta: float = 0.01
    step_size: float | None = None
    beta1: float = 0.9
    beta2: float = 0.999
    loss: Loss = "margin"

    def check(self) -> None:
        """See `Attack.check`."""
        who = type(self).__name__
        lengths = self.delta > 0 and (self.step_size is None or self.step_size > 0)
        if min(self.steps, self.pairs) < 1 or not lengths:
            raise ConfigError(
                f"steps {self.steps}, pairs {self.pairs}, delta {self.delta}, step_size {self.step_size}",
                rule="counts of at least 1, lengths above 0",
                who=who,
            )
        check_betas(self.beta1, self.beta2, who)

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        rows = search.active
        points = search.x[rows]
        adam = Adam(points, self.beta1, self.beta2, search.norm)
        size = self.step_size or search.eps / 3
        search.look(points, rows, 0, self.loss)
        for step in range(1, self.steps + 1):
            on = search.going_on(rows)
            if not bool(on.all()):
                points, rows = points[on], rows[on]
                adam.keep(on)
            if not len(rows):
                return
            grad = self._estimate(search, points, rows, step)
            points = search.inside(points + size * adam.step(grad), rows)
            on = search.going_on(rows)
            if bool(on.any()):
                search.look(points[on], rows[on], step, self.loss)

    def _estimate(self, search: Search, points: Tensor, rows: Tensor, step: int) -> Tensor:
        """The mean of (loss(x + δv) − loss(x − δv)) / 2δ · v over pairs; as many of these as the budget has.

        The loss at the point itself is looked at last, so one query is spared for it.
        """
        size, shape = points[0].numel(), points.shape[1:]
        counts = ((search.left(rows) - 1) // 2).clamp(min=0, max=self.pairs)
        found = torch.zeros_like(points.flatten(1))
        for part, first, many in portions(counts, 2 * size):
            mine = rows[part]
            signs = search.draws.of(mine).signs(
                "pair", (many, size), step=step, restart=first, dtype=points.dtype
            )
            asked = (first + torch.arange(many, device=rows.device) < counts[part][:, None]).flatten()
            who = mine.repeat_interleave(many)[asked]
            centre = points[part].flatten(1).repeat_interleave(many, 0)[asked][:, None]
            move = self.delta * signs.view(-1, size)[asked]
            trial = (centre + torch.stack([move, -move], 1)).reshape(-1, *shape)
            whose = who.repeat_interleave(2)
            outputs = search.outputs(in_box(search, trial, whose), whose)
            losses = search.goal.of(whose).loss(outputs, self.loss).to(points.dtype).view(-1, 2)
            weight = torch.zeros(len(asked), dtype=points.dtype, device=points.device)
            weight[asked] = losses[:, 0] - losses[:, 1]
            found[part] += torch.einsum("kb,kbd->kd", weight.view(len(mine), many), signs)
        scale = (2 * self.delta * counts.clamp(min=1)).to(points.dtype)
        return found.view_as(points) / wide(scale, points)
