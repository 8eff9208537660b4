"""Projected gradient steps of Adam's: AdamPGD (Uesato et al.: "Adversarial risk", ICML 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.adam import Adam, check_betas
from mycelia.attacks.evasion.steps import random_start
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["AdamPGD"]


@dataclass(frozen=True)
class AdamPGD(Attack):
    """PGD along Adam's step: where gradients change their sign, coordinates come to rest.

    Attributes:
        norm: of the ball; in l2 a step is as long as the gradients of the row agree, see `evasion.adam`.
        steps: at least 1.
        step_size: length of a first step; None: eps, as steps get shorter by themselves.
        restarts: runs from other starts, for rows that still hold.
        random_start: begin at a point drawn uniformly from the ball, not at the input.
        beta1: of Adam.
        beta2: of Adam.
        loss: what is raised.
        eot: passes over which a gradient is averaged, for models that are random.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2")

    steps: int = 40
    step_size: float | None = None
    restarts: int = 1
    random_start: bool = True
    beta1: float = 0.9
    beta2: float = 0.999
    loss: Loss = "ce"
    eot: int = 1

    def check(self) -> None:
        """See `Attack.check`."""
        who = type(self).__name__
        if min(self.steps, self.restarts, self.eot) < 1 or (
            self.step_size is not None and not self.step_size > 0
        ):
            raise ConfigError(
                f"steps {self.steps}, step_size {self.step_size}, restarts {self.restarts}, eot {self.eot}",
                rule="at least 1 each; a step has a length above 0",
                who=who,
            )
        check_betas(self.beta1, self.beta2, who)
        if self.restarts > 1 and not self.random_start:
            raise ConfigError(
                f"{self.restarts} restarts from the same point",
                rule="they would all be the same",
                fix="random_start=True",
                who=who,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        size = self.step_size or search.eps
        for restart in range(self.restarts):
            rows, first = search.active, restart * (self.steps + 1)
            if not len(rows):
                return
            points = random_start(search, rows, restart) if self.random_start else search.x[rows]
            adam = Adam(points, self.beta1, self.beta2, search.norm)
            for step in range(self.steps):
                grad, _, _ = search.gradient(points, rows, first + step, self.loss)
                points = search.inside(points + size * adam.step(grad), rows)
                on = search.going_on(rows)
                if not bool(on.all()):
                    rows, points = rows[on], points[on]
                    adam.keep(on)
                    if not len(rows):
                        break
            if len(rows):
                search.look(points, rows, first + self.steps, self.loss)
