"""What decision-based attacks have in common: a start point, the way back to the boundary, and the box.

Every row goes through a sequence of draws and queries of its own; the rows that are at the same place of
theirs share a forward pass. A row whose budget is gone is answered "not reached" without being asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mycelia.attacks.goals import Goal
from mycelia.attacks.norms import Norm, wide
from mycelia.attacks.norms import norm as length
from mycelia.attacks.search import Search
from mycelia.engine.errors import DataError

__all__ = ["ask", "bisections", "in_box", "nearest_start", "portions", "start_points", "to_boundary"]

_NUMBERS = 2**18  # that are drawn and evaluated at once: a model's layers then fit a cache
_ROWS = 32  # and at least so many inputs
_PROBES = 64  # of a row in a pass, at most: rows and not probes fill a pass


def in_box(search: Search, points: Tensor, rows: Tensor) -> Tensor:
    """The nearest points of the box, whatever the radius."""
    low, high = search.box
    return torch.minimum(torch.maximum(points, low[rows]), high[rows])


def ask(search: Search, points: Tensor, rows: Tensor, step: int) -> Tensor:
    """Whether the goal is reached at these points, which are remembered.

    Args:
        search: of the attack.
        points: [k, …]
        rows: indices [k], each at most once.
        step: for `best_step`.

    Returns:
        bool [k].
    """
    found = torch.zeros(len(rows), dtype=torch.bool, device=points.device)
    on = search.left(rows) > 0
    if bool(on.any()):
        _, found[on] = search.look(points[on], rows[on], step)
    return found


def portions(counts: Tensor, size: int) -> Iterator[tuple[Tensor, int, int]]:
    """A number of probes for each row, as passes of bounded size.

    Which probes share a pass depends on the size of an input alone, so a row's draws do too.

    Args:
        counts: probes of each row, [k].
        size: coordinates of an input.

    Yields:
        positions of rows, the first probe of the pass, and how many follow (some rows may have fewer left).
    """
    each = max(1, min(_PROBES, _NUMBERS // (16 * max(1, size))))
    together = max(-(-_ROWS // each), _NUMBERS // (each * max(1, size)))
    for part in torch.arange(len(counts), device=counts.device).split(together):
        most = int(counts[part].max()) if len(part) else 0
        for first in range(0, most, each):
            yield part, first, min(each, most - first)


def start_points(
    search: Search,
    rows: Tensor,
    tries: int,
    pool: Tensor | None = None,
    accepts: Callable[[Tensor, Goal], Tensor] | None = None,
    *,
    salt: bool = False,
    restart: int = 0,
) -> tuple[Tensor, Tensor]:
    """For each row a point at which the goal is reached; rows without one have failed (at the first restart).

    First the points of the pool, the nearest first. Then four kinds of noise by turns, as models are often
    constant on any one of them: uniform in the box; a growing share of the coordinates at a bound; a growing
    normal change; and one level for the whole input.

    Args:
        search: of the attack.
        rows: indices [k].
        tries: draws per row.
        pool: [p, …], shape of an input.
        accepts: of outputs and goal, bool [k]; None: the goal is reached.
        salt: the first half of the draws is of the second kind, so that few coordinates change.
        restart: number of this search, for other draws.

    Returns:
        points [j, …] and their rows [j].
    """
    points, todo = search.x[rows].clone(), torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    if pool is not None:
        points, todo = _from_pool(search, rows, points, todo, pool, accepts)
    for number in range(tries):
        open_ = (todo & search.going_on(rows)).nonzero()[:, 0]
        if not len(open_):
            break
        if salt and number < tries // 2:
            trial = _noise(search, rows[open_], (number, restart), 1, number, tries // 2)
        else:
            trial = _noise(search, rows[open_], (number, restart), number % 4, number // 4, tries // 4)
        hit = _wanted(search, trial, rows[open_], accepts)
        points[open_[hit]] = trial[hit]
        todo[open_[hit]] = False
    if not restart:
        spent = search.left(rows) == 0
        search.fail(rows[todo & spent], "the budget was gone before a start point")
        search.fail(rows[todo & ~spent], f"no start point in {tries} draws")
    return points[~todo], rows[~todo]


def to_boundary(
    search: Search, points: Tensor, rows: Tensor, step: int, halvings: int, norm: Norm = "l2"
) -> Tensor:
    """The nearest success found by bisection from these points towards the inputs.

    l2: along the line. linf: by clamping to balls of smaller radius (Chen, Jordan, Wainwright: HopSkipJump
    (S&P 2020), §III-C).

    Args:
        search: of the attack.
        points: successes, [k, …].
        rows: indices [k].
        step: for `best_step`.
        halvings: queries per row.
        norm: "l2" or "linf".

    Returns:
        successes, [k, …].
    """
    x, found = search.x[rows], points
    change = points - x
    reach = change.flatten(1).abs().amax(1)
    near, far = torch.zeros_like(reach), torch.ones_like(reach)
    for _ in range(halvings):
        share = wide((near + far) / 2, x)
        if norm == "linf":
            most = share * wide(reach, x)
            trial = x + torch.minimum(torch.maximum(change, -most), most)
        else:
            trial = x + share * change
        trial = in_box(search, trial, rows)
        hit = ask(search, trial, rows, step)
        found = torch.where(wide(hit, x), trial, found)
        near, far = torch.where(hit, near, (near + far) / 2), torch.where(hit, (near + far) / 2, far)
    return found


def nearest_start(
    search: Search, tries: int, pool: Tensor | None, starts: int, halvings: int, norm: Norm
) -> tuple[Tensor, Tensor]:
    """The nearest of several start points, each brought to the boundary first.

    Where a walk begins decides which part of the boundary it ends at, and a start costs little beside it.

    Args:
        search: of the attack.
        tries: see `start_points`.
        pool: see `start_points`; for the first of the starts.
        starts: how many.
        halvings: see `to_boundary`.
        norm: see `to_boundary`.

    Returns:
        points [j, …] and their rows [j].
    """
    rows = search.active
    points, rows = start_points(search, rows, tries, pool)
    points = to_boundary(search, points, rows, 0, halvings, norm)
    for restart in range(1, starts):
        on = search.going_on(rows)
        place = torch.full((len(search.x),), -1, dtype=torch.int64, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
        others, mine = start_points(search, rows[on], tries, restart=restart)
        if not len(mine):
            continue
        others = to_boundary(search, others, mine, 0, halvings, norm)
        x, at = search.x[mine], place[mine]
        nearer = length(others - x, norm) < length(points[at] - x, norm)
        points = points.index_put((at[nearer],), others[nearer])
    return points, rows


def bisections(tolerance: float, dtype: torch.dtype) -> int:
    """How often to halve until a share of `tolerance` is left, as far as the dtype tells points apart."""
    bits = -math.log2(torch.finfo(dtype).eps)
    return max(1, min(math.ceil(-math.log2(tolerance)), int(bits) - 2))


def _wanted(
    search: Search, trial: Tensor, rows: Tensor, accepts: Callable[[Tensor, Goal], Tensor] | None
) -> Tensor:
    if accepts is None:
        return ask(search, trial, rows, 0)
    return accepts(search.outputs(trial, rows), search.goal.of(rows))


def _from_pool(
    search: Search,
    rows: Tensor,
    points: Tensor,
    todo: Tensor,
    pool: Tensor,
    accepts: Callable[[Tensor, Goal], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    given = torch.as_tensor(pool).to(points)
    if given.shape[1:] != points.shape[1:] or not bool(torch.isfinite(given).all()):
        raise DataError(
            f"a pool of {list(given.shape)}", rule=f"finite, [p, {list(points.shape[1:])}]", who="pool"
        )
    apart = torch.stack([(given - point).flatten(1).square().sum(1) for point in points])
    order = apart.argsort(dim=1, stable=True)
    for turn in range(len(given)):
        open_ = (todo & search.going_on(rows)).nonzero()[:, 0]
        if not len(open_):
            break
        trial = in_box(search, given[order[open_, turn]], rows[open_])
        hit = _wanted(search, trial, rows[open_], accepts)
        points[open_[hit]] = trial[hit]
        todo[open_[hit]] = False
    return points, todo


def _noise(search: Search, rows: Tensor, number: tuple[int, int], kind: int, turn: int, turns: int) -> Tensor:
    names = {"step": number[0], "restart": number[1]}
    x, draws, shape = search.x[rows], search.draws.of(rows), search.x.shape[1:]
    share = min(1.0, (turn + 1) / max(1, turns))
    size = wide(x.flatten(1).abs().amax(1) + 1, x) * 2.0 ** min(turn, 30)  # where there is no bound
    low, high = (bound[rows] for bound in search.box)
    low = torch.where(torch.isfinite(low), low, x - size)
    high = torch.where(torch.isfinite(high), high, x + size)
    uniform = draws.uniform("start", shape, **names, dtype=x.dtype)
    if kind == 0:
        found = low + uniform * (high - low)
    elif kind == 1:
        ends = torch.where(draws.signs("start/end", shape, **names, dtype=x.dtype) > 0, high, low)
        found = torch.where(uniform < share, ends, x)
    elif kind == 2:
        found = x + share * (high - low) * draws.normal("start/normal", shape, **names, dtype=x.dtype)
    else:
        found = low + wide(draws.uniform("start/level", (), **names, dtype=x.dtype), x) * (high - low)
    return in_box(search, found, rows)
