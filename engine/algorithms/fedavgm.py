"""FedAvgM: FedAvg with momentum on the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mycelia.engine.algorithms.fedopt import FedOpt
from mycelia.engine.algorithms.options import check_decay, check_flag, check_positive
from mycelia.engine.optimizers import Optimizer, sgd

__all__ = ["FedAvgM"]


@dataclass(frozen=True)
class FedAvgM(FedOpt):
    """Federated averaging with server momentum (Hsu et al., arXiv 1909.06335).

    v <- momentum * v + mean delta; w <- w + server_lr * v.

    Attributes:
        server_lr: factor on the velocity, > 0.
        momentum: in [0, 1); 0 is FedAvg.
        nesterov: move by momentum * v + mean delta instead; needs momentum > 0.
    """

    name: ClassVar[str] = "fedavgm"
    server_lr: float = 1.0
    momentum: float = 0.9
    nesterov: bool = False

    def optimizer(self) -> Optimizer:
        """SGD with momentum."""
        check_positive(self.server_lr, "server_lr")
        check_decay(self.momentum, "momentum")
        check_flag(self.nesterov, "nesterov")
        return sgd(self.server_lr, self.momentum, self.nesterov)
