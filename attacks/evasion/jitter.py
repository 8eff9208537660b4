"""Scaled probabilities with noise: Jitter.

Schwinn et al.: "Exploring misclassifications of robust neural networks to enhance adversarial attacks",
Applied Intelligence 2023 (arXiv 2105.10304), section 4: softmax(α · z / max |z|), so that neither small nor
large logits leave a gradient of 0, and noise on it, so that the attack does not go for one class only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.momentum import climb
from mycelia.attacks.evasion.steps import step_length
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["Jitter", "scaled_square"]


def scaled_square(z: Tensor, y: Tensor, scale: float, noise: Tensor | float = 0.0) -> Tensor:
    """Mean squared difference of scaled probabilities and the one-hot label, [n].

    Args:
        z: logits [n, classes].
        y: classes [n].
        scale: the largest absolute logit after scaling (α).
        noise: added to probabilities, [n, classes].
    """
    largest = z.abs().amax(1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)
    share = (scale * z / largest).softmax(1) + noise
    return (share - functional.one_hot(y, z.shape[1])).square().mean(1)


@dataclass(frozen=True)
class Jitter(Attack):
    """PGD on scaled probabilities with noise; points are compared by their loss without it.

    The paper divides the loss of rows that are fooled by the size of their change; here they are done.

    Attributes:
        norm: of the ball.
        steps: at least 1.
        step_size: length of a step; None: see `evasion.steps.step_length`.
        scale: the largest absolute logit after scaling, above 0 (α).
        noise: its standard deviation, at least 0 (σ).
        restarts: runs from other starts, for rows that still hold.
        random_start: begin at a point drawn uniformly from the ball, not at the input.
        eot: passes over which a gradient is averaged, for models that are random.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2", "l1")

    steps: int = 10
    step_size: float | None = None
    scale: float = 10.0
    noise: float = 0.1
    restarts: int = 1
    random_start: bool = True
    eot: int = 1

    def check(self) -> None:
        """See `Attack.check`."""
        sound = min(self.steps, self.restarts, self.eot) >= 1 and self.scale > 0 and self.noise >= 0
        if not sound or (self.step_size is not None and not self.step_size > 0):
            raise ConfigError(
                f"steps {self.steps}, step_size {self.step_size}, scale {self.scale}, noise {self.noise}, "
                f"restarts {self.restarts}, eot {self.eot}",
                rule="at least 1 each; scale and the length of a step above 0, noise at least 0",
                who="Jitter",
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""

        def plain(z: Tensor, y: Tensor) -> Tensor:
            return scaled_square(z, y, self.scale)

        def move(points: Tensor, rows: Tensor, at: int, restart: int, step: int) -> Tensor:
            draws = search.draws.of(rows)

            def loss(z: Tensor, y: Tensor) -> Tensor:
                noise = draws.normal("noise", z.shape[1:], step=step, restart=restart, dtype=z.dtype)
                noisy = scaled_square(z, y, self.scale, self.noise * noise)
                return noisy + (plain(z, y) - noisy).detach()  # the value of one, the gradient of the other

            return search.gradient(points, rows, at, loss)[0]

        climb(
            search,
            move,
            steps=self.steps,
            size=step_length(search.eps, self.steps, self.step_size),
            loss=plain,
            restarts=self.restarts,
            random=self.random_start,
        )
