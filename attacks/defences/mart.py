"""MART: misclassified examples weigh more in what keeps the outputs from moving.

Wang, Zou, Yi, Bailey, Ma, Gu: "Improving adversarial robustness requires revisiting misclassified examples",
ICLR 2020, algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds
from mycelia.attacks.defences.adversarial_training import PGDAT, check_radius
from mycelia.attacks.defences.pairs import Paired
from mycelia.attacks.defences.training import Batch
from mycelia.attacks.losses import ce, kl
from mycelia.attacks.norms import Norm
from mycelia.engine.errors import ConfigError
from mycelia.engine.program import Forward

__all__ = ["MART", "boosted_ce"]


@dataclass(frozen=True)
class MART(Paired):
    """Minimises BCE(p(x'), y) + weight · KL(p(x) ‖ p(x')) · (1 − p_y(x)), x' by PGD on the cross-entropy.

    BCE is `boosted_ce` (eq. 8 and 11). The loss of the program is not used: its outputs are logits
    [b, classes]. Clean and changed rows go through one training pass together, as in `TRADES`.

    Attributes:
        weight: λ of the paper, at least 0.
        eps: radius in units of the inputs, at least 0.
        norm: of the ball.
        steps: of PGD, at least 1.
        step_size: length of a step; None: see `evasion.steps.step_length`.
        bounds: smallest and largest value of an input.
    """

    weight: float = 5.0
    eps: float = 8 / 255
    norm: Norm = "linf"
    steps: int = 10
    step_size: float | None = None
    bounds: Bounds = (0.0, 1.0)

    def check(self) -> None:
        """See `TrainingDefence.check`."""
        if not 0 <= self.weight < math.inf:
            raise ConfigError(f"weight {self.weight}", rule="at least 0 and finite", who="MART")
        check_radius(self.eps, "MART")
        self._inner()

    def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Clean rows, then what became of them; see `TrainingDefence.craft`."""
        return self.shape(batch.inputs, batch.targets, self._inner().craft(batch)[0])

    def losses(self, found: Forward, targets: Tensor) -> Tensor:
        """See `Paired.losses`."""
        half = len(targets)
        z, moved = found.outputs[:half], found.outputs[half:]
        unsure = 1 - z.softmax(1).gather(1, targets[:, None])[:, 0]
        total: Tensor = boosted_ce(moved, targets) + self.weight * kl(moved, z) * unsure
        return total

    def _inner(self) -> PGDAT:
        return PGDAT(self.eps, self.norm, self.steps, self.step_size, self.bounds)


def boosted_ce(z: Tensor, y: Tensor) -> Tensor:
    """−log p_y − log(1 − max_{k≠y} p_k), p = softmax(z): a larger margin than cross-entropy asks for; [n].

    Args:
        z: logits [n, classes].
        y: labels [n].
    """
    rival = z.detach().scatter(1, y[:, None], -torch.inf).argmax(1, keepdim=True)
    # log(1 − p_k) by the logits of the other classes: nothing is lost where p_k is near 1
    others = z.scatter(1, rival, -torch.inf)
    return ce(z, y) + z.logsumexp(1) - others.logsumexp(1)
