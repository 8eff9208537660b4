"""Fast adaptive boundary: FAB and FAB-T.

Croce, Hein: "Minimally distorted adversarial examples with a fast adaptive boundary attack", ICML 2020.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.norms import Norm, filled, norm, wide
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["FAB", "FABT", "onto_boundary"]

_DUAL: Final[dict[Norm, Norm]] = {"linf": "l1", "l2": "l2", "l1": "linf"}
_OVERSHOOT: Final = 1.05  # η of the paper: a little beyond the linearised boundary
_PULL: Final = 0.1  # α_max: at most so much of the step is towards the projection of the input itself
_BACK: Final = 0.9  # β: what is left of a change after a backward step
_AT_ONCE: Final = 10  # classes that share a forward pass: gradients of all would not fit where there are many
_LINE: Final = 5  # looks of the final search
_LEAST: Final = 0.02  # of an interval: a secant that always ends at the same side still makes it shorter


@dataclass(frozen=True)
class FAB(Attack):
    """The smallest change, by steps onto the boundary of the model taken as linear.

    Each step goes to the nearest point of box ∩ {linearised boundary}, seen from the iterate and, with weight
    α, from the input; a success is followed by a step back towards the input (Algorithm 1). The boundary is
    that of the class whose linear boundary is nearest. It takes a gradient for every other class in every
    step, ten from one forward pass; `FABT` takes one. With a `Targeted` goal there is one boundary, of the
    target and the best other class.

    Attributes:
        norm: of the change.
        steps: of each run.
        restarts: runs; all but the first begin at a random point, half as far as the nearest success or eps.
    """

    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2", "l1")

    steps: int = 100
    restarts: int = 1

    def check(self) -> None:
        """See `Attack.check`."""
        if self.steps < 1 or self.restarts < 1:
            raise ConfigError(
                f"steps {self.steps}, restarts {self.restarts}",
                rule="at least 1 each",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        for run, rivals in enumerate(self._rivals(search)):
            for restart in range(self.restarts):
                rows = search.active
                self._descend(search, rows, rivals, restart, run * self.restarts + restart)
        _line_search(search, self._runs(search) * self.restarts * (self.steps + 1))

    def _runs(self, search: Search) -> int:
        return 1

    def _rivals(self, search: Search) -> Iterator[Tensor | None]:
        """For each run int64 [m, k], the classes whose boundaries count; None: the goal's own margin."""
        if search.goal.targeted:
            yield None
        else:
            yield _others(search)

    def _descend(
        self, search: Search, rows: Tensor, rivals: Tensor | None, restart: int, number: int
    ) -> None:
        count = 1 if rivals is None else math.ceil(rivals.shape[1] / _AT_ONCE)
        points = search.x[rows]
        first = number * (self.steps + 1)
        for step in range(self.steps):
            # Rows that cannot pay for all of their boundaries stop.
            on = search.going_on(rows) & (search.left(rows) >= count)
            rows, points = rows[on], points[on]
            if not len(rows):
                return
            grad, value = _boundary(
                search, points, rows, None if rivals is None else rivals[rows], first + step
            )
            if step == 0 and restart:
                points = self._start(search, rows, grad, value, restart, number)
                continue
            points, moved = _step(search, points, rows, grad, value)
            # Where there is no slope there is no boundary: nothing would ever change again.
            on = moved & search.going_on(rows)
            rows, points = rows[on], points[on]
            if not len(rows):
                return
            _, reached = search.look(points, rows, first + step + 1)
            x = search.x[rows]
            points = torch.where(wide(reached, x), x + _BACK * (points - x), points)

    def _start(
        self, search: Search, rows: Tensor, grad: Tensor, value: Tensor, restart: int, number: int
    ) -> Tensor:
        """A random point, half as far as the nearest success, eps, or, with neither, the linear boundary."""
        x = search.x[rows]
        known = torch.where(search.broken[rows], norm(search.best[rows] - x, search.norm), torch.inf)
        radius = known.clamp(max=search.eps)
        steep = norm(grad, _DUAL[search.norm])
        linear = torch.where(steep > 0, value.abs() / steep.clamp(min=torch.finfo(steep.dtype).tiny), 0.0)
        radius = torch.where(torch.isfinite(radius), radius, linear)
        unit = search.draws.of(rows).in_ball(f"start/{number}", search.norm, x, restart=restart)
        return _boxed(search, x + wide(radius / 2, x) * unit, rows)


@dataclass(frozen=True)
class FABT(FAB):
    """The same towards one class after another: one gradient a step, whatever the number of classes.

    With a `Targeted` goal there is nothing to choose: it is `FAB`.

    Attributes:
        targets: how many classes, those with the largest clean logits first; at most all others.
    """

    targets: int = 9

    def check(self) -> None:
        """See `Attack.check`."""
        super().check()
        if self.targets < 1:
            raise ConfigError(f"targets {self.targets}", rule="at least 1", who=type(self).__name__)

    def _runs(self, search: Search) -> int:
        return 1 if search.goal.targeted else min(self.targets, search.classes - 1)

    def _rivals(self, search: Search) -> Iterator[Tensor | None]:
        if search.goal.targeted:
            yield None
            return
        order = _others(search)
        for place in range(self._runs(search)):
            yield order[:, place : place + 1]


def onto_boundary(grad: Tensor, p: Norm, gain: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """The smallest change in a box that adds `gain` to a linear function: Σ grad·δ = gain.

    The change is a function of one number per row, found exactly among its breakpoints: linf moves
    every coordinate by t, l2 by s·|grad|, each as far as its room, and l1 fills the rooms of the largest
    gradients first. Where the box does not reach that far: its corner that comes nearest.

    Args:
        grad: [n, …]
        p: "linf", "l2" or "l1".
        gain: [n], of either sign.
        lower: broadcasts to grad, at most 0.
        upper: broadcasts to grad, at least 0.

    Returns:
        [n, …]; 0 where the gradient is.
    """
    flat = grad.flatten(1) * gain.sign()[:, None]
    scale = flat.abs().amax(1).clamp(min=torch.finfo(flat.dtype).tiny)  # squares of small slopes would vanish
    flat, gain = flat / scale[:, None], gain / scale
    low, high = (bound.to(grad).expand_as(grad).flatten(1) for bound in (lower, upper))
    slope, wanted = flat.abs(), gain.abs()[:, None]
    room = torch.where(slope > 0, torch.where(flat > 0, high, -low), 0.0)
    if p == "l1":
        order = slope.argsort(dim=1, descending=True, stable=True)
        steep, space = slope.gather(1, order), room.gather(1, order)
        yields = torch.where(steep > 0, steep * space, 0.0)
        before = torch.cat([torch.zeros_like(wanted), yields.cumsum(1)[:, :-1]], 1)
        lacking = (wanted - before).clamp(min=0)
        part = torch.minimum(
            space, torch.where(steep > 0, lacking / steep.clamp(min=torch.finfo(flat.dtype).tiny), 0.0)
        )
        size = torch.zeros_like(slope).scatter(1, order, part)
    else:
        # δ = min(t · rate, room): below t = room/rate a coordinate adds slope · rate for each unit of t.
        rate = slope if p == "l2" else (slope > 0).to(flat.dtype)
        ends = torch.where(slope > 0, room / rate, torch.inf)
        stops = torch.where(torch.isfinite(ends), slope * room, 0.0)
        t = filled(ends, slope * rate, stops, wanted[:, 0])[:, None]
        size = torch.minimum(room, torch.where(slope > 0, t * rate, 0.0))
    return (flat.sign() * size).view_as(grad)


def _others(search: Search) -> Tensor:
    """int64 [m, classes − 1]: all classes but the true one, the likeliest first."""
    scores = search.clean.scatter(1, search.goal.labels[:, None], -torch.inf)
    return scores.argsort(dim=1, descending=True, stable=True)[:, :-1]


def _boundary(
    search: Search, points: Tensor, rows: Tensor, rivals: Tensor | None, step: int
) -> tuple[Tensor, Tensor]:
    """Slope [k, …] and height [k] of the function of which the nearest linear boundary is the zero set."""
    if rivals is None:
        grad, value, _ = search.gradient(points, rows, step, "margin")
        return grad, value.to(points.dtype)
    grad, value = torch.zeros_like(points), points.new_zeros(len(points))
    nearest = torch.full_like(value, torch.inf)
    labels = search.goal.of(rows).labels[:, None]
    for some in rivals.split(_AT_ONCE, 1):
        # z_rival − z_y, which is 0 on the boundary of these two.
        weights = torch.zeros(*some.shape, search.classes, dtype=points.dtype, device=points.device)
        weights.scatter_(2, some[..., None], 1.0).scatter_(2, labels[..., None].expand(*some.shape, 1), -1.0)
        slopes, outputs = search.slopes(points, rows, step, weights)
        heights = (outputs.gather(1, some) - outputs.gather(1, labels)).to(points.dtype)
        steep = norm(slopes.flatten(0, 1), _DUAL[search.norm]).view(some.shape)
        away = heights.abs() / steep.clamp(min=torch.finfo(steep.dtype).tiny)
        distance, which = torch.where(steep > 0, away, torch.inf).min(1)
        row = torch.arange(len(rows), device=rows.device)
        closer = distance < nearest
        grad = torch.where(wide(closer, grad), slopes[row, which], grad)
        value = torch.where(closer, heights[row, which], value)
        nearest = torch.where(closer, distance, nearest)
    return grad, value


def _step(search: Search, points: Tensor, rows: Tensor, grad: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The next iterate, and which rows have a boundary to go to."""
    x, low, high = search.x[rows], search.low[rows], search.high[rows]
    there = value + (grad * (x - points)).flatten(1).sum(1)  # the linear function at the input
    from_point = onto_boundary(grad, search.norm, -value, low - points, high - points)
    from_input = onto_boundary(grad, search.norm, -there, low - x, high - x)
    far, near = norm(from_point, search.norm), norm(from_input, search.norm)
    pull = torch.where(far + near > 0, far / (far + near).clamp(min=torch.finfo(x.dtype).tiny), 0.0)
    alpha = wide(pull.clamp(max=_PULL), x)
    moved = (1 - alpha) * (points + _OVERSHOOT * from_point) + alpha * (x + _OVERSHOOT * from_input)
    return torch.minimum(torch.maximum(moved, low), high), (grad.flatten(1) != 0).any(1)


def _line_search(search: Search, step: int) -> None:
    """Nearer along the line from the input to the nearest success: secants of the margin, kept honest."""
    rows = search.active[search.broken[search.active]]
    if not len(rows):
        return
    x, end = search.x[rows], search.best[rows]
    goal = search.goal.of(rows)
    below = goal.loss(search.clean[rows], "margin").to(x.dtype)
    above = search.look(end, rows, step)[0].to(x.dtype)
    inner, outer = torch.zeros_like(below), torch.ones_like(below)
    for look in range(1, _LINE):
        on = search.going_on(rows)
        if not bool(on.all()):
            rows, x, end, below, above = rows[on], x[on], end[on], below[on], above[on]
            inner, outer = inner[on], outer[on]
        if not len(rows):
            return
        rise = (above - below).clamp(min=torch.finfo(x.dtype).tiny)
        at = inner + (-below / rise).clamp(_LEAST, 1 - _LEAST) * (outer - inner)
        values, reached = search.look(_boxed(search, x + wide(at, x) * (end - x), rows), rows, step + look)
        values = values.to(x.dtype)
        inner, below = torch.where(reached, inner, at), torch.where(reached, below, values)
        outer, above = torch.where(reached, at, outer), torch.where(reached, values, above)


def _boxed(search: Search, points: Tensor, rows: Tensor) -> Tensor:
    """Inside the bounds; a ball is nothing to an attack that looks for the smallest change."""
    return torch.minimum(torch.maximum(points, search.low[rows]), search.high[rows])
