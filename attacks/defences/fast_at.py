"""Adversarial training with one step, and an eye on the overfitting that it is known for.

Wong, Rice, Kolter: "Fast is better than free: revisiting adversarial training", ICLR 2020.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds
from mycelia.attacks.base import Attack
from mycelia.attacks.defences.adversarial_training import check_radius
from mycelia.attacks.defences.training import Batch, Rows, TrainingDefence, in_bounds
from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.evasion.fgm import FGSM
from mycelia.attacks.evasion.pgd import PGD
from mycelia.attacks.goals import Untargeted
from mycelia.attacks.intervals import wilson
from mycelia.attacks.losses import ce
from mycelia.attacks.model import Model
from mycelia.engine.data import Examples
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.events import Event, Scalars
from mycelia.engine.rng import derive, generator

__all__ = ["OVERFITTING", "FastAT", "OverfittingGuard"]

OVERFITTING: Final = "catastrophic overfitting"
"""What `FitResult.stopped_by` says where held-out PGD accuracy collapsed and FGSM accuracy did not."""

_MOST_HELD_OUT: Final = 1000  # more would cost more to measure than the training in between


@dataclass(frozen=True)
class FastAT(TrainingDefence):
    """All rows are moved by one signed step from a point drawn from the ball, in linf.

    Training ends as `OVERFITTING` when accuracy on held-out examples under PGD falls to less than `collapse`
    of its best so far while that under FGSM does not: the model has then learnt to fool the one step.

    Attributes:
        held_out: examples that are not trained on, on which accuracies are measured; or the share of the
            training examples, in (0, 1), that is taken out for that by the seed, at most 1,000 of them. An
            epoch has as many steps as it would have with all.
        eps: radius in units of the inputs, at least 0.
        step: length of the step in units of eps, above 0.
        check_each: steps between two measurements, at least 1.
        pgd_steps: of the PGD that measures, at least 1.
        collapse: share of the best accuracy, in (0, 1); a fall counts where 95 % intervals say so.
        bounds: smallest and largest value of an input.
    """

    held_out: Examples | float = field(default=0.1, repr=False, compare=False)
    eps: float = 8 / 255
    step: float = 1.25
    check_each: int = 100
    pgd_steps: int = 10
    collapse: float = 0.5
    bounds: Bounds = (0.0, 1.0)

    def check(self) -> None:
        """See `TrainingDefence.check`."""
        check_radius(self.eps, "FastAT")
        sound = 0 < self.step < math.inf and self.check_each >= 1 and self.pgd_steps >= 1
        if isinstance(self.held_out, Examples):
            some, held_out = len(self.held_out) > 0, f"{len(self.held_out)} held-out examples"
        else:
            some, held_out = 0 < self.held_out < 1, f"held_out {self.held_out}"
        if not sound or not 0 < self.collapse < 1 or not some:
            raise ConfigError(
                f"step {self.step}, check_each {self.check_each}, pgd_steps {self.pgd_steps}, "
                f"collapse {self.collapse}, {held_out}",
                rule="a step above 0, at least 1 each, a share in (0, 1), at least one example or a share in "
                "(0, 1) of them",
                who="FastAT",
            )

    def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `TrainingDefence.craft`."""
        x, low, high = in_bounds(batch.inputs, self.bounds)
        draws = Draws(batch.seed, "FastAT", row_keys(x, batch.targets))
        points = (x + self.eps * draws.in_ball("start", "linf", x)).clamp(low, high)
        with batch.model.quiet():
            slope, _, _ = batch.model.gradient(points, lambda z: ce(z, batch.targets))
        moved = (points - x + self.step * self.eps * slope.sign()).clamp(-self.eps, self.eps)
        return (x + moved).clamp(low, high), batch.targets

    def start(self, examples: Examples, seed: int) -> tuple[TrainingDefence, Rows]:
        """See `TrainingDefence.start`.

        Raises:
            DataError: too few examples to hold one out.
        """
        if isinstance(self.held_out, Examples):
            return super().start(examples, seed)
        count = min(_MOST_HELD_OUT, math.ceil(self.held_out * len(examples)))
        if count >= len(examples):
            raise DataError(
                f"{count} of {len(examples)} examples held out",
                rule="some are left to train on",
                fix="lower held_out, or give examples",
                who="FastAT",
            )
        order = generator(seed, "held out").permutation(len(examples))
        return replace(self, held_out=examples.take(np.sort(order[:count]))), np.sort(order[count:])

    def guard(self, seed: int) -> OverfittingGuard:
        """See `TrainingDefence.guard`."""
        return OverfittingGuard(self, seed)

    def describe(self) -> str:
        """See `TrainingDefence.describe`."""
        if not isinstance(self.held_out, Examples):
            return f"{self!r} held out {self.held_out}"
        digest = hashlib.sha256()
        for array in (self.held_out.inputs, self.held_out.targets):
            digest.update(array.tobytes())
        return f"{self!r} held out {digest.hexdigest()}"


class OverfittingGuard:
    """Measures accuracy under one step and under many; see `FastAT`.

    Attributes:
        stopped: `OVERFITTING`, or "".
        best: most held-out examples that were right so far, under "pgd" and under "fgsm".

    Args:
        settings: of the training, with the examples that it holds out.
        seed: of the trainer.
    """

    def __init__(self, settings: FastAT, seed: int) -> None:
        self.settings, self.seed, self.stopped = settings, seed, ""
        self.held_out = _examples(settings)
        self.best = {"pgd": 0, "fgsm": 0}
        self._said: list[Event] = []

    def look(self, model: Model, step: int, device: torch.device) -> None:
        """See `Guard`."""
        if step % self.settings.check_each:
            return
        now = {
            "pgd": self._right(model, PGD(steps=self.settings.pgd_steps), step, device),
            "fgsm": self._right(model, FGSM(), step, device),
        }
        n = len(self.held_out)
        values = {f"held_out/{name}_accuracy": count / n for name, count in now.items()}
        self._said.append(Scalars(step=step, values=values))
        self.judge(now)

    def judge(self, now: Mapping[str, int]) -> None:
        """Compare with the best so far.

        Args:
            now: held-out examples that are right, under "pgd" and under "fgsm".
        """
        if self._fell("pgd", now) and not self._fell("fgsm", now):
            self.stopped = OVERFITTING
        self.best = {name: max(self.best[name], now[name]) for name in self.best}

    def events(self) -> Sequence[Event]:
        """See `Guard`."""
        said, self._said = self._said, []
        return said

    def state(self) -> Mapping[str, Any]:
        """See `Guard`."""
        return {"stopped": self.stopped, "best": dict(self.best)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Guard`."""
        self.stopped = str(state.get("stopped", ""))
        self.best |= {name: int(value) for name, value in dict(state.get("best", {})).items()}

    def _fell(self, name: str, now: Mapping[str, int]) -> bool:
        n = len(self.held_out)
        return wilson(now[name], n)[1] < self.settings.collapse * wilson(self.best[name], n)[0]

    def _right(self, model: Model, attack: Attack, step: int, device: torch.device) -> int:
        held_out, settings = self.held_out, self.settings
        targets = torch.from_numpy(held_out.targets.copy())
        x = torch.from_numpy(held_out.inputs.copy())  # copied: torch refuses arrays that may not be written
        result = attack.run(
            model, x.to(device), Untargeted(targets.to(device)), eps=settings.eps, bounds=settings.bounds,
            rng=derive(self.seed, f"held out/{type(attack).__name__}", round=step),
        )  # fmt: skip
        return result.counts.held


def _examples(settings: FastAT) -> Examples:
    if not isinstance(settings.held_out, Examples):
        raise ConfigError(
            f"held_out {settings.held_out}",
            rule="a guard measures on examples",
            fix="start(examples, seed) draws them",
            who="FastAT",
        )
    return settings.held_out
