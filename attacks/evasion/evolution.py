"""Differential evolution (Storn, Price, J. of Global Optimization 11, 1997): a population for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from mycelia.attacks.losses import Loss
from mycelia.attacks.search import Search

__all__ = ["Base", "evolve"]

Base = Literal["random", "best"]

_NUMBERS = 2**22  # of points that are made at once


def evolve(
    search: Search,
    start: Callable[[Tensor], Tensor],
    points: Callable[[Tensor, Tensor], Tensor],
    *,
    steps: int,
    factor: float,
    base: Base,
    loss: Loss,
) -> None:
    """Each child is a + factor · (b − c) of three other members, and takes its parent's place if better.

    With base "best", a is the best member (DE/best/1; the other is DE/rand/1), which is greedier. There is no
    crossover. A gene that leaves [0, 1] is put at its end.

    Args:
        search: of the attack; its active rows are attacked.
        start: from rows [k] to their first populations, [k, members, genes], in [0, 1].
        points: from populations and rows to points, [k, members, …], inside ball and box.
        steps: generations, at least 1.
        factor: of the difference.
        base: "random" or "best".
        loss: fitness.
    """
    rows = search.active
    members = start(rows[:1]).shape[1] if len(rows) else 1
    together = max(1, _NUMBERS // (members * max(1, search.x[:1].numel())))
    for some in rows.split(together):
        _evolve(search, some, start, points, steps, factor, base, loss)


def _evolve(
    search: Search,
    rows: Tensor,
    start: Callable[[Tensor], Tensor],
    points: Callable[[Tensor, Tensor], Tensor],
    steps: int,
    factor: float,
    base: Base,
    loss: Loss,
) -> None:
    parents = start(rows)
    n = parents.shape[1]
    counts = search.left(rows).clamp(max=n)
    fitness, _ = search.look_many(points(parents, rows), rows, counts, 0, loss)
    for step in range(1, steps + 1):
        on = search.going_on(rows)
        if not bool(on.all()):
            rows, parents, fitness = rows[on], parents[on], fitness[on]
        if not len(rows):
            return
        draws = search.draws.of(rows)
        # Offsets from a member to three others, all different.
        first = 1 + draws.integers("first", n - 1, (n,), step=step)
        second = 1 + draws.integers("second", n - 2, (n,), step=step)
        second = second + (second >= first)
        third = 1 + draws.integers("third", n - 3, (n,), step=step)
        low, high = torch.minimum(first, second), torch.maximum(first, second)
        third = third + (third >= low)
        third = third + (third >= high)
        a, b, c = (
            parents.gather(
                1, ((torch.arange(n, device=rows.device) + each) % n)[:, :, None].expand_as(parents)
            )
            for each in (first, second, third)
        )
        if base == "best":
            top = fitness.argmax(1)[:, None, None].expand(-1, 1, parents.shape[2])
            a = parents.gather(1, top)
        children = (a + factor * (b - c)).clamp(0, 1)
        counts = search.left(rows).clamp(max=n)
        found, _ = search.look_many(points(children, rows), rows, counts, step, loss)
        better = found > fitness
        parents = torch.where(better[:, :, None], children, parents)
        fitness = torch.where(better, found, fitness)
