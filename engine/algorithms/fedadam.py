"""FedAdam: Adam on the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mycelia.engine.algorithms.fedopt import FedOpt
from mycelia.engine.algorithms.options import check_decay, check_flag, check_positive
from mycelia.engine.optimizers import Optimizer, adam

__all__ = ["FedAdam"]


@dataclass(frozen=True)
class FedAdam(FedOpt):
    """Adam on the pseudo-gradient (Reddi et al., ICLR 2021, algorithm 2).

    m <- β1 m + (1 - β1) Δ; v <- β2 v + (1 - β2) Δ²; w <- w + η m / (√v + τ).

    Attributes:
        server_lr: the server's rate η, > 0.
        beta1: decay of m, in [0, 1).
        beta2: decay of v, in [0, 1).
        tau: τ, added to the root, > 0; small values adapt more.
        bias_correction: divide m and v by 1 - β**t, t = 1 in the first round, as Adam does, with v from 0.
            False is the paper's algorithm to the letter: no correction, and v from τ².
    """

    name: ClassVar[str] = "fedadam"
    server_lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    bias_correction: bool = True

    def optimizer(self) -> Optimizer:
        """Adam with ε = τ."""
        check_positive(self.server_lr, "server_lr")
        check_decay(self.beta1, "beta1")
        check_decay(self.beta2, "beta2")
        check_positive(self.tau, "tau")
        check_flag(self.bias_correction, "bias_correction")
        return adam(
            self.server_lr,
            (self.beta1, self.beta2),
            self.tau,
            initial_accumulator_value=0.0 if self.bias_correction else self.tau**2,
            bias_correction=self.bias_correction,
        )
