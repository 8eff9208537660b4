"""ZOO: Carlini and Wagner's attack with differences of scores in place of gradients.

Chen, Zhang, Sharma, Yi, Hsieh: "ZOO: zeroth order optimization based black-box attacks to deep neural
networks without training substitute models", AISec 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.constants import Confident, Constants
from mycelia.attacks.evasion.decisions import portions
from mycelia.attacks.evasion.tanh_box import TanhBox
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["ZOO"]

_GAIN: Final = 1e-4  # relative fall of the objective without which a row stops
_BETA1, _BETA2, _TINY = 0.9, 0.999, 1e-8  # of Adam


@dataclass(frozen=True)
class ZOO(Attack):
    """The smallest ‖δ‖² + c · max(κ − margin, 0), by Adam on some coordinates at a time and scores alone.

    Algorithm 2 of the paper (ZOO-ADAM): each step draws coordinates and takes the slope of the margin along
    each from two queries, (f(x + h e_i) − f(x − h e_i)) / 2h (eq. 6); that of ‖δ‖² is known. Each coordinate
    has moments and a number of steps of its own. One more query sees where that has led. The box is the range
    of a tanh, and the constant c of each row is searched, as in `CarliniWagner`.

    Attributes:
        norm: "l2".
        steps: of each attempt, at least 1.
        searches: constants tried, at least 1.
        constant: the first one, above 0.
        coordinates: drawn in each step, without repetition, at least 1.
        learning_rate: of Adam, in raw input units in the middle of the box.
        difference: h, in raw input units, above 0; a probe stays in the box.
        kappa: margin in logits that counts as success, at least 0.
        early_abort: end attempts that stand still.
    """

    needs: ClassVar[str] = "score"
    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l2",)

    norm: Norm = "l2"
    steps: int = 3000
    searches: int = 9
    constant: float = 0.01
    coordinates: int = 128
    learning_rate: float = 0.01
    difference: float = 1e-4
    kappa: float = 0.0
    early_abort: bool = True

    def check(self) -> None:
        """See `Attack.check`."""
        counts = min(self.steps, self.searches, self.coordinates) >= 1
        sizes = min(self.constant, self.learning_rate, self.difference) > 0 and self.kappa >= 0
        if not (counts and sizes):
            raise ConfigError(
                f"steps {self.steps}, searches {self.searches}, coordinates {self.coordinates}, "
                f"constant {self.constant}, learning_rate {self.learning_rate}, "
                f"difference {self.difference}, kappa {self.kappa}",
                rule="counts at least 1; constant, rate and difference above 0, kappa at least 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        search.goal = Confident(search.goal, self.kappa)
        constants = Constants(search, self.constant)
        for attempt in range(self.searches):
            rows = search.active
            if not len(rows):
                return
            success = self._attempt(search, rows, constants.value[rows], attempt)
            constants.judge(rows, success)

    def _attempt(self, search: Search, rows: Tensor, constant: Tensor, attempt: int) -> Tensor:
        """Descend from the input with one constant per row; bool [k]: who reached the goal with it."""
        everyone, shape = rows, search.x.shape[1:]
        success = torch.zeros(len(search.x), dtype=torch.bool, device=rows.device)
        box, x, c = TanhBox(search, rows), search.x[rows], constant[:, None]
        inner = box.inner(x)
        size, dtype = x[:1].numel(), x.dtype
        many = min(self.coordinates, size)
        mean, square, turns = (inner.new_zeros(len(rows), size) for _ in range(3))
        lowest = torch.full_like(constant, torch.inf)
        # An attempt stands still if it does so over a tenth of its steps, or over all coordinates ten times.
        every = max(1, self.steps // 10, 10 * size // many)
        for step in range(self.steps):
            number = attempt * self.steps + step
            points, slope = box.outer(inner)
            keys = search.draws.of(rows).uniform("coordinates", (size,), step=number)
            at = keys.topk(many, dim=1, sorted=True).indices
            pairs = ((search.left(rows) - 1) // 2).clamp(min=0, max=many)
            rise = self._rise(search, points, rows, at, pairs, number)
            delta = (points - x).flatten(1).gather(1, at)
            descent = (2 * delta - c * rise) * slope.flatten(1).gather(1, at)
            asked = torch.arange(many, device=rows.device) < pairs[:, None]
            m, s, t = (each.gather(1, at) for each in (mean, square, turns))
            t = t + asked
            m = torch.where(asked, torch.lerp(descent, m, _BETA1), m)
            s = torch.where(asked, torch.lerp(descent.square(), s, _BETA2), s)
            mean, square, turns = (
                old.scatter(1, at, new) for old, new in ((mean, m), (square, s), (turns, t))
            )
            t = t.clamp(min=1)
            moved = (m / (1 - _BETA1**t)) / ((s / (1 - _BETA2**t)).sqrt() + _TINY)
            moved = torch.where(asked, self.learning_rate * moved, torch.zeros_like(moved))
            inner = inner.flatten(1).scatter_add(1, at, -moved).view(-1, *shape)
            points, _ = box.outer(inner)
            hinge, reached = search.look(points, rows, number, "hinge")
            success[rows] |= reached
            on = search.going_on(rows)
            if self.early_abort and (step + 1) % every == 0:
                value = (points - x).flatten(1).square().sum(1) + c[:, 0] * (self.kappa - hinge)
                on &= value <= (1 - _GAIN) * lowest
                lowest = torch.minimum(lowest, value.to(dtype))
            if not bool(on.all()):
                rows, x, c, lowest, inner = rows[on], x[on], c[on], lowest[on], inner[on]
                mean, square, turns = mean[on], square[on], turns[on]
                if not len(rows):
                    break
                box = TanhBox(search, rows)
        return success[everyone]

    def _rise(
        self, search: Search, points: Tensor, rows: Tensor, at: Tensor, pairs: Tensor, number: int
    ) -> Tensor:
        """The slope of the hinge along coordinates [k, many]; 0 for those that the budget is not for."""
        shape, size, most = points.shape[1:], points[0].numel(), at.shape[1]
        flat, found = points.flatten(1), torch.zeros_like(at, dtype=points.dtype)
        low, high = (bound[rows].flatten(1).gather(1, at) for bound in (search.low, search.high))
        here = flat.gather(1, at)
        # Not so small that it would be lost in the rounding of a coordinate.
        h = (torch.finfo(points.dtype).eps ** 0.5 * here.abs()).clamp(min=self.difference)
        ends = torch.stack([torch.minimum(here + h, high), torch.maximum(here - h, low)], 2)
        for part, first, many in portions(2 * pairs, size):
            probe = first + torch.arange(many, device=rows.device)
            column, side = (probe // 2).clamp(max=most - 1), probe % 2
            trial = flat[part][:, None].expand(-1, many, -1).clone()
            end = torch.where(side == 0, ends[part][:, column, 0], ends[part][:, column, 1])
            trial.scatter_(2, at[part][:, column, None], end[:, :, None])
            counts = (2 * pairs[part] - first).clamp(min=0, max=many)
            trial = trial.view(len(part), many, *shape)
            loss, _ = search.look_many(trial, rows[part], counts, number, "hinge")
            loss = torch.where(probe < 2 * pairs[part][:, None], loss, 0.0)
            found[part] = found[part].index_add(1, column, torch.where(side == 0, loss, -loss))
        return (found / (ends[:, :, 0] - ends[:, :, 1])).nan_to_num(0.0, 0.0, 0.0)
