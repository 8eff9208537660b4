"""Carlini, Wagner: "Towards evaluating the robustness of neural networks" (S&P 2017), in linf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.adam import Adam
from mycelia.attacks.evasion.constants import Confident
from mycelia.attacks.evasion.tanh_box import TanhBox
from mycelia.attacks.norms import Norm, norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["CarliniWagnerLinf"]

_STRIDE: Final = 0.05  # of τ: the longest step; a longer one jumps over what the penalty leaves room for
_NEAR: Final = 1.01  # a τ that failed and a success so near to each other end a row
_GAIN: Final = 1e-3  # relative fall of the objective without which an attempt ends


@dataclass(frozen=True)
class CarliniWagnerLinf(Attack):
    """c · max(κ − margin, 0) + Σ max(|δ_k| − τ, 0) by Adam, for one limit τ after another (§VI-C).

    Only coordinates beyond τ are pulled back, so that not just the largest one is. Where an attempt succeeds
    τ becomes a share of the change that it found; where it fails the constant c rises first, and then τ, to
    the geometric mean of the last failure and the nearest success. An attempt begins at the nearest success,
    before any at the point of largest margin. Each row has a τ and a constant of its own.

    Attributes:
        norm: "linf".
        steps: of each attempt, at least 1.
        rounds: attempts, at least 1.
        constant: the first one, above 0.
        largest: constant above which an attempt counts as failed, at least the first one.
        decrease: share of a success's change that is the next τ, in (0, 1).
        learning_rate: of Adam, at most; in raw input units in the middle of the box, above 0.
        kappa: margin in logits that counts as success, at least 0.
    """

    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("linf",)

    norm: Norm = "linf"
    steps: int = 100
    rounds: int = 40
    constant: float = 0.1
    largest: float = 1e2
    decrease: float = 0.9
    learning_rate: float = 0.005
    kappa: float = 0.0

    def check(self) -> None:
        """See `Attack.check`."""
        counts = self.steps >= 1 and self.rounds >= 1
        sizes = 0 < self.constant <= self.largest and self.learning_rate > 0 and self.kappa >= 0
        if not (counts and sizes and 0 < self.decrease < 1):
            raise ConfigError(
                f"steps {self.steps}, rounds {self.rounds}, constant {self.constant}, largest "
                f"{self.largest}, decrease {self.decrease}, learning_rate {self.learning_rate}, "
                f"kappa {self.kappa}",
                rule="counts at least 1; constants and rate above 0, the largest last; decrease in (0, 1); "
                "kappa at least 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        search.goal = Confident(search.goal, self.kappa)
        rows = search.active
        failed = torch.zeros(len(search.x), dtype=search.x.dtype, device=search.x.device)
        tau, constant = torch.full_like(failed, torch.inf), torch.full_like(failed, self.constant)
        for attempt in range(self.rounds):
            rows = rows[search.going_on(rows)]
            if not len(rows):
                return
            success = self._attempt(search, rows, tau[rows], constant[rows], attempt * self.steps)
            harder = ~success & (constant[rows] < self.largest)
            constant[rows] = torch.where(
                harder, (constant[rows] * 10).clamp(max=self.largest), constant[rows]
            )
            failed[rows] = torch.where(success | harder, failed[rows], tau[rows])
            reach = self._nearest(search, rows)
            following = torch.maximum((failed[rows] * reach).sqrt(), self.decrease * reach)
            tau[rows] = torch.where(harder, tau[rows], following)
            # A row that failed without any limit has nothing to come nearer from.
            rows = rows[(failed[rows] < torch.inf) & (reach > _NEAR * failed[rows])]

    def _nearest(self, search: Search, rows: Tensor) -> Tensor:
        """The change of the nearest success, [k]; infinite without one."""
        reach = norm(search.best[rows] - search.x[rows], "linf")
        return torch.where(search.broken[rows], reach, torch.inf)

    def _attempt(self, search: Search, rows: Tensor, tau: Tensor, constant: Tensor, first: int) -> Tensor:
        """Descend with one τ and one constant per row; bool [k]: who came within τ, or nearly, by it."""
        everyone = rows
        success = torch.zeros(len(search.x), dtype=torch.bool, device=rows.device)
        wide = (-1, *[1] * (search.x.dim() - 1))
        x, c, limit = search.x[rows], constant.view(wide), tau.view(wide)
        box = TanhBox(search, rows)
        inner = box.inner(search.best[rows])
        adam = Adam(inner)
        lowest = torch.full_like(constant, torch.inf)
        every = max(1, self.steps // 5)
        for step in range(self.steps):
            points, slope = box.outer(inner)
            grad, margin, outputs = search.gradient(points, rows, first + step, "margin")
            delta = points - x
            beyond = delta.abs() > limit
            reached = search.goal.of(rows).reached(outputs) & (norm(delta, "linf") <= limit.flatten())
            success[rows] |= reached
            hinge = (self.kappa - margin).clamp(min=0)
            pull = torch.where(beyond, delta.sign(), torch.zeros_like(delta))
            descent = (pull - c * (hinge > 0).view(wide) * grad) * slope
            rate = (_STRIDE * limit).clamp(max=self.learning_rate)
            inner = inner - rate * adam.step(descent)
            on = search.going_on(rows) & ~reached
            if (step + 1) % every == 0:
                over = torch.where(beyond, delta.abs() - limit, torch.zeros_like(delta))
                value = over.flatten(1).sum(1) + c.flatten() * hinge
                on &= value <= (1 - _GAIN) * lowest
                lowest = torch.minimum(lowest, value)
            if not bool(on.all()):
                rows, x, c, limit, lowest, inner = (
                    rows[on], x[on], c[on], limit[on], lowest[on], inner[on]
                )  # fmt: skip
                adam.keep(on)
                if not len(rows):
                    break
                box = TanhBox(search, rows)
        return success[everyone]
