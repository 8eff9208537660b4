"""FedAvg: local SGD and the weighted mean of the deltas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mycelia.engine.algorithms.base import Algorithm, Message, ServerState
from mycelia.engine.algorithms.model import client_weight, local_sgd, merge_model, model_specs
from mycelia.engine.algorithms.options import check_positive, check_weighting
from mycelia.engine.local import ClientData, LocalTrainer
from mycelia.engine.program import Program
from mycelia.engine.sums import TermSpec, Total, Update
from mycelia.engine.types import Tensors

__all__ = ["FedAvg"]


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Federated averaging (McMahan et al., AISTATS 2017, algorithm 1).

    Attributes:
        weighting: "examples" weighs a client by its number of examples, "uniform" by 1.
        server_lr: factor on the mean delta, > 0.
    """

    name: ClassVar[str] = "fedavg"
    sends_model: ClassVar[bool] = True
    weighting: str = "examples"
    server_lr: float = 1.0

    def __post_init__(self) -> None:
        check_weighting(self.weighting)
        check_positive(self.server_lr, "server_lr")

    def terms(self, program: Program) -> Mapping[str, TermSpec]:
        """The model's deltas."""
        return model_specs(program)

    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        """Local SGD from the server's model."""
        return local_sgd(trainer, message, data, client_weight(self.weighting, len(data))), state

    def merges_by_coordinate(self) -> bool:
        """The mean of a coordinate is its own affair."""
        return True

    def merge(self, program: Program, state: ServerState, total: Total) -> ServerState:
        """Add `server_lr` times the weighted mean of the deltas."""
        return merge_model(program, state, total, server_lr=self.server_lr)
