"""Several attacks in a row, each on what still holds, and the worst of them for every example: AutoAttack.

Croce, Hein: "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
attacks", ICML 2020; its l1 budgets: "Mind the box", ICML 2021.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds, bounds_of, clipped, inputs_of
from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.apgd import APGD, APGDT
from mycelia.attacks.evasion.fab import FAB, FABT
from mycelia.attacks.evasion.square import Square
from mycelia.attacks.goals import Goal
from mycelia.attacks.model import Model, as_model
from mycelia.attacks.norms import Norm
from mycelia.attacks.result import AttackResult, Status
from mycelia.attacks.search import Keep, Search
from mycelia.attacks.windows import Layout
from mycelia.engine.errors import ConfigError
from mycelia.engine.rng import derive

__all__ = ["AutoAttack", "MemberFacts", "SuiteResult", "Version", "worst_case"]

Version = Literal["standard", "plus", "rand"]
_L1: Final = {"restarts": 5, "targets": 5}  # of APGD-CE and of APGD-T, in l1


@dataclass(frozen=True)
class MemberFacts:
    """What one attack did in a suite.

    Attributes:
        name: its short name.
        attack: name and settings.
        attacked: rows that it was given and could attack.
        broken: of these.
        failed: rows that it could not attack.
        held_after: rows that no attack had broken when it was done.
        forward: forward passes.
        backward: backward passes.
        seconds: it took; 0.0 where no row was left for it.
    """

    name: str
    attack: Attack
    attacked: int
    broken: int
    failed: int
    held_after: int
    forward: int
    backward: int
    seconds: float


@dataclass(frozen=True, eq=False)
class SuiteResult(AttackResult):
    """The worst case of several attacks: a row holds only if it held against each.

    `x_adv` of a row that holds is the point of the highest margin among those that the attacks give back;
    `loss` is the margin throughout; queries and gradients are those of all attacks together.

    Attributes:
        members: in the order in which they ran.
        broken_by: place in `members` of the first attack that broke a row, int64 [n]; −1: none did.
    """

    members: tuple[MemberFacts, ...] = ()
    broken_by: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


@dataclass(frozen=True)
class AutoAttack(Attack):
    """The usual ensemble, each attack on the rows that still hold.

    "standard": APGD-CE, APGD-T, FAB-T, Square. "plus": APGD-CE, APGD-DLR and FAB with 5 restarts, Square,
    APGD-T, FAB-T. "rand", for random models: APGD-CE and APGD-DLR with gradients over 20 passes. In l1
    "standard" has 5 restarts of APGD-CE, and APGD-T has 5 targets.

    Attributes:
        version: which of the three.
        norm: of the ball.
        steps: of the gradient attacks.
        queries: of Square.
        targets: of APGD-T (5 at most in l1) and FAB-T; all other classes, where there are fewer.
        layout: of images, for Square.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2", "l1")

    norm: Norm = field(default="linf", kw_only=True)
    version: Version = "standard"
    steps: int = field(default=100, kw_only=True)
    queries: int = field(default=5000, kw_only=True)
    targets: int = field(default=9, kw_only=True)
    layout: Layout = field(default="nchw", kw_only=True)

    def check(self) -> None:
        """See `Attack.check`."""
        if self.version not in get_args(Version):
            raise ConfigError(
                f"version {self.version!r}", rule=f"one of {', '.join(get_args(Version))}", who="AutoAttack"
            )
        _ = self.members  # refuses the other settings

    @property
    def members(self) -> tuple[tuple[str, Attack], ...]:
        """The attacks, with their short names."""
        p, steps, sparse = self.norm, self.steps, self.norm == "l1"
        starts = _L1["restarts"] if sparse else 1
        towards = APGDT(
            norm=p, steps=steps, targets=min(self.targets, _L1["targets"]) if sparse else self.targets
        )
        boundary = FABT(norm=p, steps=steps, targets=self.targets)
        square = Square(norm=p, steps=self.queries, layout=self.layout)
        match self.version:
            case "standard":
                ce = APGD(norm=p, steps=steps, restarts=starts)
                return ("apgd-ce", ce), ("apgd-t", towards), ("fab-t", boundary), ("square", square)
            case "plus":
                return (
                    ("apgd-ce", APGD(norm=p, steps=steps, restarts=5)),
                    ("apgd-dlr", APGD(norm=p, loss="dlr", steps=steps, restarts=5)),
                    ("fab", FAB(norm=p, steps=steps, restarts=5)),
                    ("square", square),
                    ("apgd-t", towards),
                    ("fab-t", boundary),
                )
            case _:
                return (
                    ("apgd-ce", APGD(norm=p, steps=steps, eot=20)),
                    ("apgd-dlr", APGD(norm=p, loss="dlr", steps=steps, eot=20)),
                )

    def search(self, search: Search) -> None:
        """A suite has none of its own."""
        raise ConfigError(
            "a suite inside a search",
            rule="its attacks have searches of their own",
            fix="run(...)",
            who="AutoAttack",
        )

    def run(
        self,
        model: object,
        x: Any,
        goal: Goal,
        *,
        eps: float | None = None,
        rng: int = 0,
        bounds: Bounds = (0.0, 1.0),
        batch: int = 256,
        ids: Any = None,
        keep: Keep = "closest",
        queries: int | None = None,
        quantise: int | None = None,
        votes: int | None = None,
    ) -> SuiteResult:
        """Attack every row of x; see `Attack.run` for the arguments.

        Args:
            model: see `Attack.run`.
            x: inputs [n, …].
            goal: what is wanted of each row.
            eps: radius.
            rng: seed.
            bounds: of x.
            batch: rows at a time.
            ids: integers [n] that name the rows for random draws.
            keep: "closest" only.
            queries: forward passes that a row may take in all attacks together.
            quantise: bits to which results are rounded.
            votes: see `Attack.run`; None: the most over which an attack of the suite averages gradients.

        Raises:
            ConfigError: keep="loss": the attacks raise different losses.
        """
        if keep != "closest":
            raise ConfigError(
                f"keep {keep!r}",
                rule="attacks that raise different losses have no highest one",
                fix="one of the members",
                who="AutoAttack.run",
            )
        return worst_case(
            self, self.members, model, x, goal, eps=eps, rng=rng, bounds=bounds, batch=batch, ids=ids,
            queries=queries, quantise=quantise, votes=votes,
        )  # fmt: skip


def worst_case(
    suite: Attack,
    members: Sequence[tuple[str, Attack]],
    model: object,
    x: Any,
    goal: Goal,
    *,
    eps: float | None,
    rng: int = 0,
    bounds: Bounds = (0.0, 1.0),
    batch: int = 256,
    ids: Any = None,
    queries: int | None = None,
    quantise: int | None = None,
    votes: int | None = None,
) -> SuiteResult:
    """Run attacks one after another, each on the rows that no earlier one broke.

    What an attack does to a row does not depend on the other rows, so that the outcome is that of all attacks
    on all rows. The seed of each is derived from `rng`, its place and its name.

    Args:
        suite: whose name and checks these are.
        members: attacks of one norm with short names, at least one.
        model: see `Attack.run`.
        x: inputs [n, …].
        goal: what is wanted of each row.
        eps: radius.
        rng: seed.
        bounds: of x.
        batch: rows at a time.
        ids: integers [n] that name the rows for random draws.
        queries: forward passes that a row may take in all attacks together.
        quantise: bits to which results are rounded.
        votes: see `Attack.run`; None: the most over which any of them averages gradients.
    """
    began = time.perf_counter()
    target = as_model(model, numpy=isinstance(x, np.ndarray))
    inputs = inputs_of(x)
    radius = suite._radius(eps)
    low, high = bounds_of(bounds, inputs)
    suite._check_call(target, inputs, goal, batch, "closest", queries, quantise, votes)
    passes = votes or max(getattr(attack, "eot", 1) for _, attack in members)
    inputs, sound = clipped(inputs, low, high)
    goal = goal.of(torch.arange(len(inputs), device=inputs.device))
    state = _Worst(inputs, goal, radius, (low, high), batch, rng)
    names = None if ids is None else torch.as_tensor(ids, device=inputs.device)
    facts = [
        state.attack(place, name, attack, target, names, queries, sound, votes)
        for place, (name, attack) in enumerate(members)
    ]
    with target.quiet():
        found = suite._verified(target, state.result(suite, eps), inputs, goal, batch, passes)
        if quantise is not None:
            found = suite._quantised(
                target, found, inputs, goal, radius, (low, high), quantise, batch, passes
            )
    return SuiteResult(
        **{**vars(found), "seconds": time.perf_counter() - began},
        members=tuple(facts),
        broken_by=torch.where(found.is_(Status.BROKEN), state.broken_by, -1),
    )


class _Worst:
    """What is known of each row so far."""

    def __init__(
        self, x: Tensor, goal: Goal, eps: float, bounds: tuple[Tensor, Tensor], batch: int, seed: int
    ) -> None:
        n = len(x)
        self.x, self.goal, self.eps, self.bounds, self.batch, self.seed = x, goal, eps, bounds, batch, seed
        self.x_adv = x.clone()
        self.status = torch.full((n,), int(Status.FAILED), dtype=torch.int8, device=x.device)
        self.reason = [""] * n
        self.loss = torch.full((n,), torch.nan, dtype=torch.float64, device=x.device)
        self.best_step = torch.full((n,), -1, dtype=torch.int64, device=x.device)
        self.broken_by, self.queries, self.gradients = (
            self.best_step.clone(),
            *(torch.zeros(n, dtype=torch.int64, device=x.device) for _ in range(2)),
        )
        self.unreproduced = 0

    def attack(
        self,
        place: int,
        name: str,
        attack: Attack,
        model: Model,
        ids: Tensor | None,
        most: int | None,
        sound: Tensor,
        votes: int | None,
    ) -> MemberFacts:
        """Run one attack on what no other one has broken."""
        began = time.perf_counter()
        n = len(self.x)
        if place == 0:
            open_ = torch.ones(n, dtype=torch.bool, device=self.x.device)
        elif self.eps == 0:  # nothing can change
            open_ = torch.zeros(n, dtype=torch.bool, device=self.x.device)
        else:
            open_ = sound & ((self.status == int(Status.HELD)) | (self.status == int(Status.FAILED)))
        seed = derive(self.seed, f"attacks/suite/{place}/{name}")
        attacked = broken = failed = 0
        before = int(self.queries.sum()), int(self.gradients.sum())
        for left, rows in self._budgets(open_, most):
            result = attack.run(
                model, self.x[rows], self.goal.of(rows), eps=self.eps, rng=seed, bounds=self._box(rows),
                batch=self.batch, ids=None if ids is None else ids[rows], queries=left,
                votes=votes,
            )  # fmt: skip
            counts = result.counts
            attacked, broken = attacked + counts.broken + counts.held, broken + counts.broken
            failed += counts.failed
            self._take(place, name, rows, result, model, most)
        held = int((self.status == int(Status.HELD)).sum())
        ran = bool(open_.any())
        return MemberFacts(
            name, attack, attacked, broken, failed, held, int(self.queries.sum()) - before[0],
            int(self.gradients.sum()) - before[1], time.perf_counter() - began if ran else 0.0,
        )  # fmt: skip

    def _budgets(self, open_: Tensor, most: int | None) -> list[tuple[int | None, Tensor]]:
        """Rows that may still be attacked, by the queries that they have left."""
        rows = open_.nonzero()[:, 0]
        if most is None:
            return [(None, rows)] if len(rows) else []
        left = most - self.queries[rows]
        # The look at the clean rows, with which each attack begins, is one of them.
        return [(int(each) - 1, rows[left == each]) for each in left.unique() if each > 1]

    def _box(self, rows: Tensor) -> Bounds:
        low, high = (bound[rows] if len(bound) == len(self.x) > 1 else bound for bound in self.bounds)
        return low, high

    def _take(
        self, place: int, name: str, rows: Tensor, result: AttackResult, model: Model, most: int | None
    ) -> None:
        self.queries[rows] += result.queries
        self.gradients[rows] += result.gradients
        self.unreproduced += result.unreproduced
        for row, said, status in zip(rows.tolist(), result.reason, result.status.tolist(), strict=True):
            text = f"{name}: {said}" if status == int(Status.FAILED) and place else said
            if text:
                self.reason[row] = "; ".join(filter(None, (self.reason[row], text)))
        broken, held = result.is_(Status.BROKEN), result.is_(Status.HELD)
        # A row that one attack cannot go at is one that holds if another one could.
        known = ~(result.is_(Status.FAILED) & (self.status[rows] == int(Status.HELD)))
        self.status[rows[known]] = result.status[known]
        new = rows[broken]
        self.broken_by[new] = place
        self.x_adv[new], self.best_step[new] = result.x_adv[broken], result.best_step[broken]
        # Margins are what the losses of different attacks have in common; they cost one more look.
        near = result.distance[result.norm] <= self.eps * (1 + 1e-6)
        look = broken | (held & near)
        if most is not None:
            look &= self.queries[rows] < most
        points, at = result.x_adv[look], rows[look]
        margins = self._margins(model, points, at)
        self.queries[at] += 1
        better = ~(margins <= self.loss[at]) | broken[look]
        self.loss[at[better]] = margins[better]
        self.x_adv[at[better]], self.best_step[at[better]] = points[better], result.best_step[look][better]

    def _margins(self, model: Model, points: Tensor, rows: Tensor) -> Tensor:
        if not len(rows):
            return self.loss[rows]
        with model.quiet():
            return torch.cat([
                self.goal.of(part).loss(model(some), "margin").double()
                for some, part in zip(points.split(self.batch), rows.split(self.batch), strict=True)
            ])  # fmt: skip

    def result(self, suite: Attack, eps: float | None) -> AttackResult:
        """All of it, before the second look."""
        return AttackResult(
            x_adv=self.x_adv, status=self.status, reason=tuple(self.reason), distance={}, loss=self.loss,
            queries=self.queries, gradients=self.gradients, best_step=self.best_step,
            verified=torch.zeros_like(self.status, dtype=torch.bool), unreproduced=self.unreproduced, eps=eps,
            attack=suite, norm=suite.norm, seed=self.seed, seconds=0.0,
        )  # fmt: skip
