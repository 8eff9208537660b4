"""SimBA (Guo, Gardner, You, Wilson, Weinberger: "Simple black-box adversarial attacks", ICML 2019)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.grid import Grid, cosines, kept_frequencies
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm, wide
from mycelia.attacks.search import Search
from mycelia.attacks.windows import Layout, check_layout
from mycelia.engine.errors import ConfigError

__all__ = ["Basis", "SimBA"]

Basis = Literal["pixel", "dct"]


@dataclass(frozen=True)
class SimBA(Attack):
    """A step along one vector of an orthonormal basis, forwards or else backwards, kept if the loss rises.

    Algorithm 1 of the paper, whose change has an l2 norm of at most √steps · step_size; here it is also kept
    inside the ball, by projection. Vectors come in random order, none twice until all have been tried. Those
    of the cosine transform begin with the lowest frequencies: a share of them along each axis, then twice
    that share, and so on.

    Attributes:
        norm: of the ball.
        steps: vectors tried, one or two queries each, at least 1.
        step_size: ε of the paper, in raw input units, above 0.
        basis: "pixel": single coordinates; "dct": waves over one channel of the image.
        share: of the frequencies of each axis that come first, in (0, 1].
        layout: where the channels are; see `Grid`.
        loss: what is raised; "ce" lowers the probability of the true class, or raises that of the target.
    """

    needs: ClassVar[str] = "score"
    norms: ClassVar[tuple[Norm, ...]] = ("l2", "linf")

    norm: Norm = "l2"
    steps: int = 10_000
    step_size: float = 0.2
    basis: Basis = "pixel"
    share: float = 0.125
    layout: Layout = "nchw"
    loss: Loss = "ce"

    def check(self) -> None:
        """See `Attack.check`."""
        if self.steps < 1 or not self.step_size > 0 or not 0 < self.share <= 1:
            raise ConfigError(
                f"steps {self.steps}, step_size {self.step_size}, share {self.share}",
                rule="steps at least 1, step_size above 0, share in (0, 1]",
                who=type(self).__name__,
            )
        if self.basis not in get_args(Basis):
            raise ConfigError(
                f"basis {self.basis!r}",
                rule=f"one of {', '.join(get_args(Basis))}",
                who=f"{type(self).__name__}.basis",
            )
        check_layout(self.layout, type(self).__name__)

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        rows = search.active
        points, size = search.x[rows], search.x[:1].numel()
        vectors, rank = self._vectors(search.x)
        keys = rank + search.draws.of(rows).uniform("order", (size,))
        order = keys.argsort(dim=1, stable=True)
        value = search.goal.of(rows).loss(search.clean[rows], self.loss)
        place = torch.zeros_like(rows)
        backwards = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        for step in range(2 * self.steps):
            on = search.going_on(rows) & (place < self.steps)
            if not bool(on.all()):
                rows, points, order, value = rows[on], points[on], order[on], value[on]
                place, backwards = place[on], backwards[on]
            if not len(rows):
                return
            move = vectors(order.gather(1, (place % size)[:, None])[:, 0])
            by = torch.where(backwards, -self.step_size, self.step_size).to(points.dtype)
            trial = search.inside(points + wide(by, points) * move, rows)
            better = (trial != points).flatten(1).any(1)  # what the box has held back is not asked
            if bool(better.any()):
                asked = better.nonzero()[:, 0]
                found, _ = search.look(trial[asked], rows[asked], step, self.loss)
                better[asked] = found > value[asked]
                value[asked] = torch.where(better[asked], found, value[asked])
            points = torch.where(wide(better, points), trial, points)
            place = place + (better | backwards)
            backwards = ~better & ~backwards

    def _vectors(self, x: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """The vectors of these numbers, [k, …] from [k]; and the group in which each comes up, [d]."""
        if self.basis == "pixel":
            size = x[:1].numel()

            def pixels(at: Tensor) -> Tensor:
                found = x.new_zeros(len(at), size).scatter(1, at[:, None], 1.0)
                return found.view(-1, *x.shape[1:])

            return pixels, torch.zeros(size, dtype=torch.float64, device=x.device)
        grid = Grid(x, self.layout)
        down, across = cosines(grid.height, x), cosines(grid.width, x)

        def waves(at: Tensor) -> Tensor:
            channel = at // (grid.height * grid.width)
            tall, long = at // grid.width % grid.height, at % grid.width
            found = x.new_zeros(len(at), grid.channels, grid.height, grid.width)
            wave = down[tall][:, :, None] * across[long][:, None, :]
            found[torch.arange(len(at), device=at.device), channel] = wave
            return grid.back(found)

        groups = torch.maximum(
            _groups(grid.height, self.share, x)[:, None], _groups(grid.width, self.share, x)[None]
        )
        return waves, groups.expand(grid.channels, -1, -1).flatten()


def _groups(size: int, share: float, like: Tensor) -> Tensor:
    """The doubling of the share at which each frequency of an axis is among the lowest, float64 [size]."""
    found = torch.zeros(size, dtype=torch.float64, device=like.device)
    turn, kept = 0, kept_frequencies(size, share)
    while kept < size:
        turn += 1
        found[kept:] = turn
        kept = kept_frequencies(size, min(1.0, share * 2**turn))
    return found
