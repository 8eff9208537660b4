"""FedAdagrad: Adagrad on the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mycelia.engine.algorithms.fedopt import FedOpt
from mycelia.engine.algorithms.options import check_decay, check_positive
from mycelia.engine.optimizers import Optimizer, adagrad

__all__ = ["FedAdagrad"]


@dataclass(frozen=True)
class FedAdagrad(FedOpt):
    """Adagrad on the pseudo-gradient (Reddi et al., ICLR 2021, algorithm 2).

    m <- β1 m + (1 - β1) Δ; v <- v + Δ², from τ²; w <- w + η m / (√v + τ).

    Attributes:
        server_lr: the server's rate η, > 0.
        beta1: decay of m, in [0, 1); the paper's experiments use 0.
        tau: τ, added to the root, > 0; small values adapt more.
    """

    name: ClassVar[str] = "fedadagrad"
    server_lr: float = 0.1
    beta1: float = 0.0
    tau: float = 1e-3

    def optimizer(self) -> Optimizer:
        """Adagrad with ε = τ."""
        check_positive(self.server_lr, "server_lr")
        check_decay(self.beta1, "beta1")
        check_positive(self.tau, "tau")
        return adagrad(self.server_lr, initial_accumulator_value=self.tau**2, eps=self.tau, beta1=self.beta1)
