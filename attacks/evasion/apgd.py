"""APGD: gradient steps that choose their own length.

linf and l2: Croce, Hein: "Reliable evaluation of adversarial robustness with an ensemble of diverse
parameter-free attacks", ICML 2020, algorithm 1. l1: the same: "Mind the box: l1-APGD for sparse adversarial
attacks on image classifiers", ICML 2021, §3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Final

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.steps import direction, random_start
from mycelia.attacks.losses import Loss, dlr_targeted
from mycelia.attacks.norms import Norm, project, wide
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["APGD", "APGDT", "checkpoints"]

LossOf = Callable[[Tensor], Loss]
"""The loss of some rows, by their indices in the search."""

_MOMENTUM: Final = 0.75
_WIDER: Final = (
    (3.0, 0.3),
    (2.0, 0.3),
)  # l1: radii in units of eps, and shares of the steps, before eps itself
_SPARSER: Final = 1.5  # l1: a step moves this much fewer coordinates than the best point has changed
_FIRST_SHARE: Final = 0.2  # l1: of the coordinates, in a first step
_SHORTEST: Final = 0.1  # l1: of the first step


def checkpoints(steps: int) -> tuple[int, ...]:
    """Steps after which the length of a step is reconsidered.

    p_0 = 0, p_1 = 0.22, p_{j+1} = p_j + max(p_j − p_{j−1} − 0.03, 0.06), times the steps and rounded up.

    >>> checkpoints(100)
    (22, 41, 57, 70, 80, 87, 93, 99)
    """
    found, place, gap = [], 22, 22  # in hundredths: no rounding errors
    while place <= 100:
        found.append(-(-place * steps // 100))
        gap = max(gap - 3, 6)
        place += gap
    return tuple(sorted(set(found)))


@dataclass(frozen=True)
class APGD(Attack):
    """Steps of 2 · eps with momentum, halved for a row that no longer rises, from its best point so far.

    In l1 a step moves few coordinates, fewer as the best point gets sparser; balls of 3 and 2 eps come first.

    Attributes:
        norm: of the ball.
        loss: what is raised; "dlr" is "margin" with fewer than 3 classes (4 for a target).
        steps: of each run, at least 1.
        restarts: runs from other starts, for rows that still hold.
        rho: where no larger share of the steps since the last check rose, the length is halved; not in l1.
        eot: passes over which a gradient is averaged, for models that are random.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2", "l1")

    loss: Loss = "ce"
    steps: int = 100
    restarts: int = 1
    rho: float = 0.75
    eot: int = 1

    def check(self) -> None:
        """See `Attack.check`."""
        _check(self, steps=self.steps, restarts=self.restarts, rho=self.rho, eot=self.eot)

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        few = self.loss == "dlr" and search.classes < 3
        loss: Loss = "margin" if few else self.loss
        for run in range(self.restarts):
            rows = search.active
            if len(rows):
                _ascend(search, rows, lambda _: loss, run, self.steps, self.rho, self.eot)


@dataclass(frozen=True)
class APGDT(Attack):
    """APGD towards one class after another, those with the best scores of the clean input first.

    The loss is the targeted difference of logits ratio; with fewer than 4 classes, where there is none, it is
    the target's logit less the true one. A goal with a target is attacked towards that one only.

    Attributes:
        norm: of the ball.
        steps: of each run, at least 1.
        restarts: runs for each class, for rows that still hold.
        targets: how many classes, at least 1; all others, where there are fewer.
        rho: see `APGD`.
        eot: see `APGD`.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2", "l1")

    steps: int = 100
    restarts: int = 1
    targets: int = 9
    rho: float = 0.75
    eot: int = 1

    def check(self) -> None:
        """See `Attack.check`."""
        _check(
            self, steps=self.steps, restarts=self.restarts, rho=self.rho, eot=self.eot, targets=self.targets
        )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        for run, loss_of in enumerate(self._losses(search)):
            rows = search.active
            if len(rows):
                _ascend(search, rows, loss_of, run, self.steps, self.rho, self.eot)

    def _losses(self, search: Search) -> Iterator[LossOf]:
        """One for each run."""
        if search.goal.targeted:
            yield from [lambda _: "dlr"] * self.restarts
            return
        y = search.goal.labels
        count = min(self.targets, search.classes - 1)
        others = search.clean.scatter(1, y[:, None], -torch.inf).topk(count, 1).indices
        for place in range(count):
            for _ in range(self.restarts):
                yield towards(others[:, place], search.classes)


def _check(attack: Attack, *, rho: float, **counts: int) -> None:
    if min(counts.values()) < 1 or not 0 <= rho <= 1:
        raise ConfigError(
            ", ".join(f"{name} {value}" for name, value in {**counts, "rho": rho}.items()),
            rule="at least 1 each, rho in [0, 1]",
            who=type(attack).__name__,
        )


def towards(targets: Tensor, classes: int) -> LossOf:
    def loss_of(rows: Tensor) -> Loss:
        t = targets[rows]
        if classes >= 4:
            return lambda z, y: dlr_targeted(z, y, t)
        return lambda z, y: (z.gather(1, t[:, None]) - z.gather(1, y[:, None]))[:, 0]

    return loss_of


@dataclass
class _State:
    """Rows on their way.

    Attributes:
        rows: their indices.
        points: where they are.
        grad: there.
        loss: there.
        size: length of a step.
        best: point of highest loss in this run.
        best_grad: there.
        best_loss: there.
    """

    rows: Tensor
    points: Tensor
    grad: Tensor
    loss: Tensor
    size: Tensor
    best: Tensor
    best_grad: Tensor
    best_loss: Tensor

    def keep(self, on: Tensor) -> None:
        """Only some rows go on."""
        if not bool(on.all()):
            for each in fields(self):
                setattr(self, each.name, getattr(self, each.name)[on])

    def wide(self, values: Tensor) -> Tensor:
        """A number per row, to go with points."""
        return wide(values, self.points)

    def moved(self, points: Tensor, grad: Tensor, loss: Tensor) -> None:
        """They are elsewhere now."""
        self.points, self.grad, self.loss = points, grad, loss
        better = loss > self.best_loss
        self.best = torch.where(self.wide(better), points, self.best)
        self.best_grad = torch.where(self.wide(better), grad, self.best_grad)
        self.best_loss = torch.where(better, loss, self.best_loss)

    def back(self, rows: Tensor) -> None:
        """These go on from their best points; a bool per row."""
        self.points = torch.where(self.wide(rows), self.best, self.points)
        self.grad = torch.where(self.wide(rows), self.best_grad, self.grad)
        self.loss = torch.where(rows, self.best_loss, self.loss)


@dataclass
class _Halving(_State):
    """Rows whose steps are halved.

    Attributes:
        before: the points before the last step.
        rose: how many steps raised the loss since the last check.
        reduced: whether the length was halved there.
        checked: the best loss there.
    """

    before: Tensor
    rose: Tensor
    reduced: Tensor
    checked: Tensor


@dataclass
class _Sparse(_State):
    """Rows whose steps are sparse.

    Attributes:
        share: of the coordinates that a step moves.
        changed: how many coordinates the best point had changed at the last check.
    """

    share: Tensor
    changed: Tensor


def _ascend(
    search: Search, rows: Tensor, loss_of: LossOf, run: int, steps: int, rho: float, eot: int
) -> None:
    """One run."""
    points = random_start(search, rows, run)
    if search.norm != "l1":
        _halving(search, rows, points, loss_of, run * (steps + 1), steps, rho, eot)
        return
    at, left = run * (steps + 1 + len(_WIDER)), steps
    for factor, share in (*_WIDER, (1.0, 1.0)):
        count = left if share == 1 else int(share * steps)
        left -= count
        if count:
            first = at == run * (steps + 1 + len(_WIDER))
            rows, points = _sparse(search, rows, points, loss_of, at, count, factor, eot, first=first)
            at += count + 1
        if not len(rows):
            return


def _halving(
    search: Search, rows: Tensor, points: Tensor, loss_of: LossOf, at: int, steps: int, rho: float, eot: int
) -> None:
    """Algorithm 1 of the first paper: linf and l2."""
    grad, loss, _ = search.gradient(points, rows, at, loss_of(rows))
    size = torch.full_like(loss, 2 * search.eps)
    state = _Halving(
        rows, points, grad, loss, size, points, grad, loss,
        before=points, rose=torch.zeros_like(rows), reduced=torch.ones_like(rows, dtype=torch.bool),
        checked=loss,
    )  # fmt: skip
    checks, last = checkpoints(steps), 0
    for step in range(1, steps + 1):
        state.keep(search.going_on(state.rows))
        if not len(state.rows):
            return
        now, rows = state.points, state.rows
        moved = search.inside(now + state.wide(state.size) * direction(state.grad, search.norm), rows)
        if step > 1:
            drift = (1 - _MOMENTUM) * (now - state.before)
            moved = search.inside(now + _MOMENTUM * (moved - now) + drift, rows)
        if step == steps and eot == 1:  # nothing follows that needs a gradient
            search.look(moved, rows, at + step, loss_of(rows))
            return
        grad, loss, _ = search.gradient(moved, rows, at + step, loss_of(rows))
        state.before = now
        state.rose += loss > state.loss
        state.moved(moved, grad, loss)
        if step in checks:
            stale = ~state.reduced & (state.checked >= state.best_loss)
            cut = (state.rose <= rho * (step - last)) | stale
            state.size = torch.where(cut, state.size / 2, state.size)
            state.back(cut)
            state.reduced, state.checked, last = cut, state.best_loss, step
            state.rose = torch.zeros_like(state.rose)


def _sparse(
    search: Search, rows: Tensor, points: Tensor, loss_of: LossOf, at: int, steps: int, factor: float,
    eot: int, *, first: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Steps in the l1 ball of radius factor · eps, as the second paper has them.

    Returns:
        rows that go on, and the best points of each.
    """
    radius = factor * search.eps

    def inside(points: Tensor, rows: Tensor) -> Tensor:
        x = search.x[rows]
        delta = project(points - x, "l1", radius, search.lower[rows], search.upper[rows])
        return torch.minimum(torch.maximum(x + delta, search.low[rows]), search.high[rows])

    def changed(points: Tensor, rows: Tensor) -> Tensor:
        return (points != search.x[rows]).flatten(1).sum(1).to(loss.dtype)

    points = inside(points, rows)
    grad, loss, _ = search.gradient(points, rows, at, loss_of(rows))
    many = changed(points, rows)
    total = points[0].numel()
    share = torch.full_like(many, _FIRST_SHARE) if first else many / (_SPARSER * total)
    state = _Sparse(
        rows, points, grad, loss, torch.full_like(loss, radius), points, grad, loss, share=share, changed=many
    )
    every = max(1, int(0.04 * steps))
    for step in range(1, steps + 1):
        state.keep(search.going_on(state.rows))
        rows = state.rows
        if not len(rows):
            break
        moved = inside(state.points + state.wide(state.size) * _few(state.grad, state.share), rows)
        if step == steps and eot == 1 and factor == 1:
            search.look(moved, rows, at + step, loss_of(rows))
            break
        grad, loss, _ = search.gradient(moved, rows, at + step, loss_of(rows))
        state.moved(moved, grad, loss)
        if step % every == 0:
            many = changed(state.best, rows)
            sparser = many < 0.95 * state.changed
            state.size = torch.where(sparser, radius, (state.size / _SPARSER).clamp(min=_SHORTEST * radius))
            state.back(sparser)
            state.share, state.changed = many / (_SPARSER * total), many
    state.keep(search.going_on(state.rows))
    return state.rows, state.best


def _few(grad: Tensor, share: Tensor) -> Tensor:
    """Signs of the largest coordinates, a share of them for each row, of l1 norm 1; 0 for a gradient of 0."""
    size = grad.flatten(1).abs()
    count = (share * size.shape[1]).floor().clamp(1, size.shape[1]).to(torch.int64)
    least = size.sort(1, descending=True).values.gather(1, (count - 1)[:, None])
    signs = grad.flatten(1).sign() * (size >= least)
    return (signs / signs.abs().sum(1, keepdim=True).clamp(min=1)).view_as(grad)
