"""Square attack: random search by squares, from scores only.

Andriushchenko, Croce, Flammarion, Hein: "Square attack: a query-efficient black-box adversarial attack via
random search", ECCV 2020. Its l1 form is that of Croce, Hein: "Mind the box", ICML 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.grid import Grid
from mycelia.attacks.norms import Norm, norm
from mycelia.attacks.search import Search
from mycelia.attacks.windows import Layout, check_layout
from mycelia.engine.errors import ConfigError

__all__ = ["Square", "share_of_pixels"]

_HALVED_AT: Final = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # of 10,000 steps
_TILES: Final = 5  # along each axis of the start of l2 and l1
_L1_EXCESS: Final = 3.0  # times the mass of a new l1 change, before the projection
_BLOCK: Final = 64  # steps for which random numbers are drawn at once


@dataclass(frozen=True)
class Square(Attack):
    """A square of the image is changed at random, which is kept if the margin rises. It asks for no gradient.

    linf: every pixel of the change is at ±eps; the start is vertical stripes. l2 and l1: mass is moved from
    one window to another, in the form of two bumps of opposite sign; the start is a grid of such bumps
    (Algorithms 2 and 3 of the paper). In l1 a window first gets more mass than the ball has, and the
    projection on ball ∩ box then takes the small changes away: what is best there is sparse. Windows, signs
    and decisions are those of a row alone.

    A flat input [n, d] is taken as an image of one row: its squares are stretches of coordinates of the same
    share. Of more axes than two the one after n ("nchw") or the last ("nhwc") is the channels; what lies
    beyond two further axes is taken together with the second.

    Attributes:
        norm: of the ball.
        steps: proposals of each restart, of which the start is the first.
        restarts: from other starts, for rows that still hold.
        p_init: share of the pixels that the first squares cover; see `share_of_pixels`.
        layout: where the channels are; a flat input has none.
    """

    needs: ClassVar[str] = "score"
    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2", "l1")

    steps: int = 5000
    restarts: int = 1
    p_init: float = 0.8
    layout: Layout = "nchw"

    def check(self) -> None:
        """See `Attack.check`."""
        if self.steps < 1 or self.restarts < 1 or not 0 < self.p_init <= 1:
            raise ConfigError(
                f"steps {self.steps}, restarts {self.restarts}, p_init {self.p_init}",
                rule="at least 1, at least 1, in (0, 1]",
                who=type(self).__name__,
            )
        check_layout(self.layout, type(self).__name__)

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        view = _Pixels(search.x, self.layout)
        for restart in range(self.restarts):
            rows = search.active
            if not len(rows):
                return
            self._climb(search, view, rows, restart)

    def _climb(self, search: Search, view: _Pixels, rows: Tensor, restart: int) -> None:
        start = _stripes if search.norm == "linf" else _bumps
        best = start(search, view, rows, restart)
        first = restart * self.steps
        value, _ = search.look(view.back(best), rows, first)
        numbers, drawn = torch.empty(0), -1
        for step in range(1, self.steps):
            on = search.going_on(rows)
            if not bool(on.all()):
                rows, best, value, numbers = (
                    rows[on],
                    best[on],
                    value[on],
                    numbers[on] if drawn >= 0 else numbers,
                )
                if not len(rows):
                    return
            if step // _BLOCK != drawn:
                drawn = step // _BLOCK
                numbers = search.draws.of(rows).uniform(
                    "squares", (_BLOCK, 5 + view.channels), step=drawn, restart=restart
                )
            share = share_of_pixels(step, self.steps, self.p_init)
            given = numbers[:, step % _BLOCK]
            propose = _square if search.norm == "linf" else _moved_mass
            proposal = propose(search, view, rows, best, share, given)
            found, _ = search.look(view.back(proposal), rows, first + step)
            better = found > value
            value = torch.where(better, found, value)
            best = torch.where(better[:, None, None], proposal, best)


def share_of_pixels(step: int, steps: int, p_init: float) -> float:
    """The paper's schedule, stretched to the number of steps: halved at 10, 50, 200, 500, … 8,000 of 10,000.

    >>> [share_of_pixels(step, 10_000, 0.8) for step in (10, 11, 200, 9_000)]
    [0.8, 0.4, 0.2, 0.0015625]

    Args:
        step: from 0.
        steps: in all.
        p_init: at the beginning.
    """
    place = step * 10_000 // steps
    return math.ldexp(p_init, -sum(place > at for at in _HALVED_AT))


class _Pixels(Grid):
    """Inputs as [n, channels, height·width], and back; see `Grid`."""

    def __init__(self, x: Tensor, layout: Layout) -> None:
        super().__init__(x, layout)
        self._shapes: dict[tuple[int, int], Tensor] = {}

    def of(self, x: Tensor) -> Tensor:
        """Inputs as [n, channels, height·width]."""
        return super().of(x).flatten(2)

    def shapes(self, size: tuple[int, int], like: Tensor) -> Tensor:
        """See `_shapes`; a search has few sizes and many steps."""
        if size not in self._shapes:
            self._shapes[size] = _shapes(size, like)
        return self._shapes[size]

    def window(self, share: float, *, odd: bool = False) -> tuple[int, int]:
        """Height and width of a square of so many pixels; of a rectangle, where the image is too narrow."""
        area = share * self.height * self.width
        side = max(round(math.sqrt(area)), 3 if odd else 1)
        if odd and side % 2 == 0:
            side += 1
        if side <= min(self.height, self.width):
            return side, side
        if self.height <= self.width:
            return self.height, min(self.width, max(round(area / self.height), side if odd else 1))
        return min(self.height, max(round(area / self.width), side if odd else 1)), self.width

    def places(self, size: tuple[int, int], down: Tensor, across: Tensor) -> Tensor:
        """int64 [n, 1, pixels of a window], with the corner at these shares of the room that there is."""
        top = (down * (self.height - size[0] + 1)).long()
        left = (across * (self.width - size[1] + 1)).long()
        i = top[:, None] + torch.arange(size[0], device=down.device)
        j = left[:, None] + torch.arange(size[1], device=down.device)
        return (i[:, :, None] * self.width + j[:, None, :]).flatten(1)[:, None]


def _stripes(search: Search, view: _Pixels, rows: Tensor, restart: int) -> Tensor:
    """Every column of every channel at one of the two ends."""
    signs = search.draws.of(rows).signs("stripes", (view.channels, 1, view.width), restart=restart)
    up = (signs > 0).expand(-1, -1, view.height, -1).flatten(2)
    return torch.where(up, view.of(search.high[rows]), view.of(search.low[rows]))


def _square(search: Search, view: _Pixels, rows: Tensor, best: Tensor, share: float, given: Tensor) -> Tensor:
    """One square of each channel at one of the two ends."""
    places = view.places(view.window(share), given[:, 0], given[:, 1]).expand(-1, view.channels, -1)
    ends = torch.where(
        given[:, 5:, None] > 0.5,
        view.of(search.high[rows]).gather(2, places),
        view.of(search.low[rows]).gather(2, places),
    )
    return best.scatter(2, places, ends)


def _bumps(search: Search, view: _Pixels, rows: Tensor, restart: int) -> Tensor:
    """A grid of bumps over the image, each channel of each with its own sign."""
    x = search.x[rows]
    size = max(view.height // _TILES, 1), max(view.width // _TILES, 1)
    tall, wide = min(_TILES, view.height), min(_TILES, view.width)
    top, left = (view.height - tall * size[0]) // 2, (view.width - wide * size[1]) // 2
    draws = search.draws.of(rows)
    signs = draws.signs("bumps", (view.channels, tall * wide), restart=restart, dtype=x.dtype)
    turned = draws.uniform("turns", (tall * wide,), restart=restart) > 0.5
    shapes = view.shapes(size, x)
    tiles = torch.where(turned[:, None, :, None, None], shapes[1], shapes[0]) * signs[..., None, None]
    grid = tiles.view(len(rows), view.channels, tall, wide, *size).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    delta = x.new_zeros(len(rows), view.channels, view.height, view.width)
    delta[:, :, top : top + tall * size[0], left : left + wide * size[1]] = grid
    if search.norm == "l1":
        delta = delta * (_L1_EXCESS * search.eps / norm(delta, "l1").view(-1, 1, 1, 1))
    return _filled(search, view, rows, delta.flatten(2))


def _moved_mass(
    search: Search, view: _Pixels, rows: Tensor, best: Tensor, share: float, given: Tensor
) -> Tensor:
    """The change in two windows, and what is unused of eps, becomes a new change in the first of them."""
    x = view.of(search.x[rows])
    delta = best - x
    size = view.window(share, odd=True)
    power = 2 if search.norm == "l2" else 1
    shape = view.shapes(size, x)[(given[:, 4] > 0.5).long()].flatten(1)[:, None]
    signs = torch.where(given[:, 5:, None] > 0.5, 1.0, -1.0).to(x.dtype)
    into = view.places(size, given[:, 0], given[:, 1]).expand(-1, view.channels, -1)
    source = view.places(size, given[:, 2], given[:, 3]).expand(-1, view.channels, -1)
    old = delta.gather(2, into)
    rest = delta.scatter(2, source, 0.0).scatter(2, into, 0.0)

    def mass(values: Tensor) -> Tensor:
        return (values.square() if power == 2 else values.abs()).sum(2, keepdim=True)

    tiny = torch.finfo(x.dtype).tiny
    whole = mass(delta)
    unused = (search.eps**power - whole.sum(1, keepdim=True)).clamp(min=0) / view.channels
    free = (whole - mass(rest)).clamp(min=0) + unused
    new = shape * signs + old / mass(old).pow(1 / power).clamp(min=tiny)
    new = new * (free / mass(new).clamp(min=tiny)).pow(1 / power)
    if search.norm == "l1":
        new = new * _L1_EXCESS
    return _filled(search, view, rows, rest.scatter(2, into, new))


def _filled(search: Search, view: _Pixels, rows: Tensor, delta: Tensor) -> Tensor:
    """A change brought to the edge of the ball and into the box."""
    x = search.x[rows]
    change = view.back(delta)
    length = norm(change, search.norm).view(-1, *[1] * (x.dim() - 1))
    length = torch.where(length > 0, length, torch.ones_like(length))
    if search.norm == "l1":  # too long already, or made so
        return view.of(search.inside(x + change * (search.eps / length).clamp(min=1.0), rows))
    points = x + change * (search.eps / length)  # inside the ball as it is: the box alone is left
    return view.of(torch.minimum(torch.maximum(points, search.low[rows]), search.high[rows]))


def _shapes(size: tuple[int, int], like: Tensor) -> Tensor:
    """[2, height, width]: two bumps of opposite sign, one above the other, and side by side; l2 norm 1 each.

    A bump falls by steps from its middle: Σ_{k ≥ m} 1/(k + 1)² at distance m, in the maximum of both axes.
    """
    height, width = size
    if height == width == 1:
        return torch.ones(2, 1, 1, dtype=like.dtype, device=like.device)
    found = []
    for down in (True, False):
        if (height if down else width) < 2:
            down = not down  # noqa: PLW2901 - the other way
        sign = torch.ones(size, dtype=like.dtype, device=like.device)
        if down:
            half = height // 2
            parts = [_bump((half, width), like), _bump((height - half, width), like)]
            sign[half:] = -1
            bumps = torch.cat(parts, 0)
        else:
            half = width // 2
            parts = [_bump((height, half), like), _bump((height, width - half), like)]
            sign[:, half:] = -1
            bumps = torch.cat(parts, 1)
        shape = bumps * sign
        found.append(shape / torch.linalg.vector_norm(shape))
    return torch.stack(found)


def _bump(size: tuple[int, int], like: Tensor) -> Tensor:
    height, width = size
    i = (torch.arange(height, device=like.device) - height // 2).abs()
    j = (torch.arange(width, device=like.device) - width // 2).abs()
    distance = torch.maximum(i[:, None], j[None, :])
    most = max(height, width) // 2 + 1
    steps = 1 / (torch.arange(most, dtype=like.dtype, device=like.device) + 1).square()
    tails = steps.flip(0).cumsum(0).flip(0)
    return tails[distance.clamp(max=most - 1)]
