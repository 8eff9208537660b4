"""Pixle (Pomponi, Scardapane, Uncini: "Pixle: a fast and effective black-box attack", IJCNN 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.decisions import in_box
from mycelia.attacks.evasion.grid import Grid
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.attacks.windows import Layout, check_layout
from mycelia.engine.errors import ConfigError

__all__ = ["Pixle"]

_NUMBERS = 2**22  # of points that are made at once


@dataclass(frozen=True)
class Pixle(Attack):
    """Pixels of a patch of the input are copied to random places; the best of several such copies is kept.

    No pixel appears that the input does not have, bounds of single pixels aside. Each step starts from the
    best image so far, proposes copies of several patches, and keeps the one of highest loss if that is a
    rise. The paper has no radius: here eps counts coordinates, and where a copy would exceed it, changes of
    earlier steps are taken back at random; where it is no multiple of the channels, the smallest ones, too.

    Attributes:
        norm: "l0".
        steps: at least 1 (restarts of the paper).
        proposals: of each step, one query each, at least 1.
        patch: smallest and largest side of a patch in pixels, at least 1; no longer than the image is.
        layout: where the channels are; see `Grid`.
        loss: what is raised; "ce" lowers the probability of the true class, or raises that of the target.
    """

    needs: ClassVar[str] = "score"
    norms: ClassVar[tuple[Norm, ...]] = ("l0",)

    norm: Norm = "l0"
    steps: int = 20
    proposals: int = 10
    patch: tuple[int, int] = (2, 10)
    layout: Layout = "nchw"
    loss: Loss = "ce"

    def check(self) -> None:
        """See `Attack.check`."""
        if min(self.steps, self.proposals) < 1 or not 1 <= self.patch[0] <= self.patch[1]:
            raise ConfigError(
                f"steps {self.steps}, proposals {self.proposals}, patch {self.patch}",
                rule="at least 1 each, and the patch's smallest side first",
                who=type(self).__name__,
            )
        check_layout(self.layout, type(self).__name__)

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        rows = search.active
        together = max(1, _NUMBERS // (self.proposals * max(1, search.x[:1].numel())))
        for some in rows.split(together):
            self._climb(search, some)

    def _climb(self, search: Search, rows: Tensor) -> None:
        grid = Grid(search.x, self.layout)
        best = search.x[rows]
        value = search.goal.of(rows).loss(search.clean[rows], self.loss)
        for step in range(self.steps):
            on = search.going_on(rows)
            if not bool(on.all()):
                rows, best, value = rows[on], best[on], value[on]
            if not len(rows):
                return
            trial = self._copies(search, grid, best, rows, step)
            counts = search.left(rows).clamp(max=self.proposals)
            found, _ = search.look_many(trial, rows, counts, step, self.loss)
            top, at = found.max(1)
            rose = (top > value).nonzero()[:, 0]
            best = best.index_put((rose,), trial[rose, at[rose]])
            value = torch.maximum(value, top)

    def _copies(self, search: Search, grid: Grid, best: Tensor, rows: Tensor, step: int) -> Tensor:
        """[k, proposals, …], inside ball and box."""
        k, n, area = len(rows), self.proposals, grid.height * grid.width
        draws = search.draws.of(rows)
        x, now = (grid.of(each).flatten(2)[:, None] for each in (search.x[rows], best))
        tall, top = self._side(draws.uniform("down", (n, 2), step=step), grid.height)
        long, left = self._side(draws.uniform("across", (n, 2), step=step), grid.width)
        most = min(self.patch[1], grid.height) * min(self.patch[1], grid.width)
        entry = torch.arange(most, device=rows.device)
        valid = entry < (tall * long)[:, :, None]
        # Pixels of the patch row by row; those beyond its last one are not used.
        source = (top[:, :, None] + entry // long[:, :, None]) * grid.width + left[:, :, None]
        source = (source + entry % long[:, :, None]).clamp(max=area - 1)
        keys = draws.uniform("places", (n, area), step=step)
        places = keys.argsort(dim=2)[:, :, :most]
        given = x.expand(-1, n, -1, -1).gather(3, _wide(source, grid.channels))
        spread = _wide(places, grid.channels)
        current = now.expand(-1, n, -1, -1)
        kept = torch.where(valid[:, :, None], given, current.gather(3, spread))
        trial = current.scatter(3, spread, kept)
        allowed = max(1, min(area, math.ceil(search.eps / grid.channels)))
        fresh = torch.zeros_like(keys).scatter(2, places, valid.to(keys.dtype))
        changed = (trial != x).any(2)
        rank = torch.where(changed, fresh + keys, -1.0)  # this copy's first, in its own random order
        order = rank.argsort(dim=2, descending=True)
        back = torch.ones_like(changed).scatter(2, order[:, :, :allowed], torch.zeros_like(changed))
        trial = torch.where(back[:, :, None], x, trial)
        flat = grid.back(trial.flatten(0, 1))
        who = rows.repeat_interleave(n)
        flat = in_box(search, flat, who)
        if allowed * grid.channels > search.eps:
            flat = search.inside(flat, who)
        return flat.view(k, n, *flat.shape[1:])

    def _side(self, drawn: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Length and first place of patches along an axis, [k, proposals] each."""
        least, most = (min(each, size) for each in self.patch)
        length = least + (drawn[:, :, 0] * (most - least + 1)).long()
        return length, (drawn[:, :, 1] * (size - length + 1)).long()


def _wide(places: Tensor, channels: int) -> Tensor:
    """[k, proposals, p] as [k, proposals, channels, p]."""
    return places[:, :, None].expand(-1, -1, channels, -1)
