"""Attacks by differential evolution: on the values of a few pixels, and on all values a little.

Su, Vargas, Sakurai: "One pixel attack for fooling deep neural networks", IEEE Transactions on Evolutionary
Computation 23 (2019); Kotyal, Vargas: "Adversarial robustness assessment: why in evaluation both L0 and L∞
attacks are necessary", PLOS ONE 17 (2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.evolution import Base, evolve
from mycelia.attacks.evasion.grid import Grid
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.attacks.windows import Layout, check_layout
from mycelia.engine.errors import ConfigError

__all__ = ["OnePixel", "Threshold"]

_LEAST = 4  # members: a child needs three others than its parent


@dataclass(frozen=True)
class OnePixel(Attack):
    """Places and values of a few pixels, found by differential evolution.

    A member has for each pixel a place, drawn uniformly at first, and a value of each channel, drawn from a
    normal law around the middle of the box whose standard deviation is half its width (§III-C of Su et al.).
    eps counts coordinates, of which a pixel has one for each channel: it is the limit where there are more
    pixels than it allows, of one pixel, too, whose largest changes are then kept. Bounds have to be finite.

    Attributes:
        norm: "l0".
        pixels: changed together, at least 1.
        population: members, one query each in every generation, at least 4.
        steps: generations after the first population, at least 1.
        factor: of the difference of two members, above 0.
        base: "random": a child differs from a third member by that (the paper's); "best": from the best one.
        layout: where the channels are; see `Grid`.
        loss: fitness; "ce" lowers the probability of the true class, or raises that of the target.
    """

    needs: ClassVar[str] = "score"
    norms: ClassVar[tuple[Norm, ...]] = ("l0",)

    norm: Norm = "l0"
    pixels: int = 1
    population: int = 400
    steps: int = 100
    factor: float = 0.5
    base: Base = "random"
    layout: Layout = "nchw"
    loss: Loss = "ce"

    def check(self) -> None:
        """See `Attack.check`."""
        if self.pixels < 1:
            raise ConfigError(f"pixels {self.pixels}", rule="at least 1", who=type(self).__name__)
        _check(self.population, self.steps, self.factor, self.base, type(self).__name__)
        check_layout(self.layout, type(self).__name__)

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        low, high = search.box
        if not bool(torch.isfinite(high - low).all()):
            raise ConfigError(
                "bounds that are infinite", rule="a pixel takes any value of the box", who=type(self).__name__
            )
        grid = Grid(search.x, self.layout)
        pixels = max(1, min(self.pixels, math.ceil(search.eps / grid.channels)))
        cut = pixels * grid.channels > search.eps
        parts = 2 + grid.channels

        def start(rows: Tensor) -> Tensor:
            draws, shape, dtype = search.draws.of(rows), (self.population, pixels), search.x.dtype
            place = draws.uniform("place", (*shape, 2), dtype=dtype)
            value = 0.5 + 0.5 * draws.normal("value", (*shape, grid.channels), dtype=dtype)
            return torch.cat([place, value.clamp(0, 1)], 3).flatten(2)

        def points(genes: Tensor, rows: Tensor) -> Tensor:
            k, n = genes.shape[:2]
            genes = genes.view(k, n, pixels, parts)
            x, least, most = (grid.of(each[rows]).flatten(2)[:, None] for each in (search.x, low, high))
            found = x.expand(-1, n, -1, -1).clone()
            least, most = least.expand_as(found), most.expand_as(found)
            for pixel in range(pixels):  # of two at one place the last one counts
                row = (genes[:, :, pixel, 0] * grid.height).long().clamp(max=grid.height - 1)
                column = (genes[:, :, pixel, 1] * grid.width).long().clamp(max=grid.width - 1)
                at = (row * grid.width + column)[:, :, None, None].expand(-1, -1, grid.channels, -1)
                share = genes[:, :, pixel, 2:, None]
                bottom, top = least.gather(3, at), most.gather(3, at)
                value = torch.minimum(torch.maximum(bottom + share * (top - bottom), bottom), top)
                found.scatter_(3, at, value)
            flat = grid.back(found.flatten(0, 1))
            if cut:
                flat = search.inside(flat, rows.repeat_interleave(n))
            return flat.view(k, n, *flat.shape[1:])

        evolve(search, start, points, steps=self.steps, factor=self.factor, base=self.base, loss=self.loss)


@dataclass(frozen=True)
class Threshold(Attack):
    """The same evolution over all coordinates, each of which may change by eps (Kotyal, Vargas).

    Of so many coordinates a random base and a small factor lose most of the way: here children start from the
    best member.

    Attributes:
        norm: "linf".
        population: members, one query each in every generation, at least 4.
        steps: generations after the first population, at least 1.
        factor: of the difference of two members, above 0.
        base: "best" or "random"; see `OnePixel`.
        loss: fitness; "ce" lowers the probability of the true class, or raises that of the target.
    """

    needs: ClassVar[str] = "score"

    population: int = 400
    steps: int = 100
    factor: float = 0.8
    base: Base = "best"
    loss: Loss = "ce"

    def check(self) -> None:
        """See `Attack.check`."""
        _check(self.population, self.steps, self.factor, self.base, type(self).__name__)

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        size = search.x[:1].numel()

        def start(rows: Tensor) -> Tensor:
            return search.draws.of(rows).uniform("start", (self.population, size), dtype=search.x.dtype)

        def points(genes: Tensor, rows: Tensor) -> Tensor:
            shares = genes.view(*genes.shape[:2], *search.x.shape[1:])
            low, high = (bound[rows][:, None] for bound in (search.low, search.high))
            return torch.minimum(torch.maximum(low + shares * (high - low), low), high)

        evolve(search, start, points, steps=self.steps, factor=self.factor, base=self.base, loss=self.loss)


def _check(population: int, steps: int, factor: float, base: str, who: str) -> None:
    if population < _LEAST or steps < 1 or not factor > 0:
        raise ConfigError(
            f"population {population}, steps {steps}, factor {factor}",
            rule=f"a population of at least {_LEAST}, steps at least 1, factor above 0",
            who=who,
        )
    if base not in get_args(Base):
        raise ConfigError(f"base {base!r}", rule=f"one of {', '.join(get_args(Base))}", who=f"{who}.base")
