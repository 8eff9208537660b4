"""What an attack says of every example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

__all__ = ["AttackResult", "Counts", "Status"]


class Status(IntEnum):
    """What became of a row."""

    CLEAN_WRONG = 0
    """Untargeted, and wrong already: it was not attacked, and is no success."""
    ALREADY_TARGET = 1
    """Targeted, and classified as the target already."""
    BROKEN = 2
    """The goal was reached, inside ball and box, and again when it was looked at once more."""
    HELD = 3
    """The attack did not succeed; that is no proof that none would."""
    FAILED = 4
    """It could not be attacked; `reason` says why."""


@dataclass(frozen=True)
class Counts:
    """How many rows have each status."""

    clean_wrong: int
    already_target: int
    broken: int
    held: int
    failed: int

    @property
    def n(self) -> int:
        """All rows."""
        return self.clean_wrong + self.already_target + self.broken + self.held + self.failed


@dataclass(frozen=True, eq=False)
class AttackResult:
    """One attack on n examples.

    Attributes:
        x_adv: as x: the closest verified success where BROKEN (with `keep="loss"` the point of highest loss),
            the visited point of highest loss where HELD, x itself otherwise.
        status: int8 [n], see `Status`.
        reason: one text per row, "" where there is nothing to say.
        distance: "l0", "l1", "l2", "linf" of x_adv − x, float64 [n] each.
        loss: the attack's loss at x_adv, float64 [n]; NaN where it was not computed.
        queries: forward passes spent on each row, int64 [n].
        gradients: backward passes spent on each row, int64 [n].
        best_step: the step that x_adv is from, int64 [n]; 0 is the start point, −1: the attack never ran.
        verified: bool [n]: the goal is reached at x_adv, in most passes of a second look.
        unreproduced: how many successes did not come again in that look.
        eps: radius; None for a smallest change without limit.
        attack: name and settings.
        norm: of the ball, or of what was made small.
        seed: of the call.
        seconds: it took.
        survive_8bit: after rounding to 8 bits, the share of BROKEN rows that stay so; None: not asked.
        votes: passes of the second look; a success reached the goal in more than half of them.
    """

    x_adv: Tensor
    status: Tensor
    reason: tuple[str, ...]
    distance: Mapping[str, Tensor]
    loss: Tensor
    queries: Tensor
    gradients: Tensor
    best_step: Tensor
    verified: Tensor
    unreproduced: int
    eps: float | None
    attack: object
    norm: str
    seed: int
    seconds: float
    survive_8bit: float | None = None
    votes: int = 1

    def __len__(self) -> int:
        return len(self.status)

    def is_(self, status: Status) -> Tensor:
        """The rows with this status, bool [n]."""
        return self.status == int(status)

    @property
    def counts(self) -> Counts:
        """How many rows have each status."""
        numbers = [int((self.status == int(status)).sum()) for status in Status]
        return Counts(*numbers)

    @property
    def clean_accuracy(self) -> float | None:
        """Share of rows that were right before; None without rows."""
        counts = self.counts
        return None if not counts.n else 1 - counts.clean_wrong / counts.n

    @property
    def robust_accuracy(self) -> float | None:
        """Share of all rows that HELD; None without rows."""
        counts = self.counts
        return None if not counts.n else counts.held / counts.n

    @property
    def success_rate(self) -> float | None:
        """BROKEN among the rows that could be broken; None if there is none."""
        counts = self.counts
        attacked = counts.broken + counts.held + counts.failed
        return None if not attacked else counts.broken / attacked
