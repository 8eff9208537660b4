"""TRADES: the clean loss, and how far the outputs move within the ball.

Zhang, Yu, Jiao, Xing, El Ghaoui, Jordan: "Theoretically principled trade-off between robustness and
accuracy", ICML 2019, algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds
from mycelia.attacks.defences.adversarial_training import check_radius
from mycelia.attacks.defences.pairs import Paired
from mycelia.attacks.defences.training import Batch
from mycelia.attacks.evasion.pgd import PGD
from mycelia.attacks.goals import Goal
from mycelia.attacks.losses import Loss, kl
from mycelia.attacks.norms import Norm
from mycelia.engine.errors import ConfigError
from mycelia.engine.program import Forward

__all__ = ["TRADES", "Away"]


@dataclass(frozen=True)
class TRADES(Paired):
    """Minimises loss(f(x), y) + beta · KL(f(x) ‖ f(x')), x' being where in the ball that is largest.

    The model must give logits [b, classes]. Clean and changed rows go through one training pass together, so
    batch statistics are those of both. The search starts at a point drawn from the ball, as PGD does.

    Attributes:
        beta: weight of the divergence, at least 0: the 1/λ of the paper.
        eps: radius in units of the inputs, at least 0.
        norm: of the ball.
        steps: of PGD, at least 1.
        step_size: length of a step; None: see `evasion.steps.step_length`.
        bounds: smallest and largest value of an input.
    """

    beta: float = 6.0
    eps: float = 8 / 255
    norm: Norm = "linf"
    steps: int = 10
    step_size: float | None = None
    bounds: Bounds = (0.0, 1.0)

    def check(self) -> None:
        """See `TrainingDefence.check`."""
        if not 0 <= self.beta < math.inf:
            raise ConfigError(f"beta {self.beta}", rule="at least 0 and finite", who="TRADES")
        check_radius(self.eps, "TRADES")
        self._attack()

    def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Clean rows, then what became of them; see `TrainingDefence.craft`."""
        result = self._attack().run(
            batch.model, batch.inputs, Away(batch.model(batch.inputs)), eps=self.eps, rng=batch.seed,
            bounds=self.bounds, batch=len(batch.inputs), keep="loss",
        )  # fmt: skip
        return self.shape(batch.inputs, batch.targets, result.x_adv)

    def losses(self, found: Forward, targets: Tensor) -> Tensor:
        """That of the clean row and the divergence; see `Paired.losses`."""
        half, z = len(targets), found.outputs
        return found.losses[:half] + self.beta * kl(z[half:], z[:half])

    def _attack(self) -> PGD:
        return PGD(norm=self.norm, steps=self.steps, step_size=self.step_size)


@dataclass(frozen=True, eq=False)
class Away(Goal):
    """Outputs as far from these as can be, by the Kullback–Leibler divergence; it is never reached.

    Attributes:
        reference: logits at the clean inputs, [n, classes].
    """

    reference: Tensor
    targeted = False

    @property
    def labels(self) -> Tensor:
        """See `Goal.labels`: the clean predictions."""
        return self.reference.argmax(1)

    def of(self, rows: Tensor) -> Away:
        """See `Goal.of`."""
        return Away(self.reference[rows])

    def loss(self, outputs: Tensor, loss: Loss = "kl") -> Tensor:
        """The divergence, whichever loss an attack names; see `Goal.loss`."""
        del loss
        return kl(outputs, self.reference)

    def reached(self, outputs: Tensor) -> Tensor:
        """Nowhere: there is more to gain."""
        return torch.zeros(len(outputs), dtype=torch.bool, device=outputs.device)
