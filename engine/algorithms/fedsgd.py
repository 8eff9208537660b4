"""FedSGD: one step on each client's whole data, so that the sum is a gradient step on the cohort's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from mycelia.engine.algorithms.base import Algorithm, Message, ServerState
from mycelia.engine.algorithms.model import client_weight, local_sgd, merge_model, model_specs
from mycelia.engine.algorithms.options import check_weighting
from mycelia.engine.local import ClientData, LocalTrainer, LocalWork
from mycelia.engine.program import Program
from mycelia.engine.sums import TermSpec, Total, Update
from mycelia.engine.types import Tensors

__all__ = ["FedSGD"]


@dataclass(frozen=True)
class FedSGD(Algorithm):
    """Federated SGD (McMahan et al., AISTATS 2017, section 2: FedAvg with E = 1 and B = all).

    The client's delta is -lr times its gradient, with `lr` that of the local work.

    Attributes:
        weighting: "examples" makes the step that of the cohort's pooled data, "uniform" weighs clients alike.
    """

    name: ClassVar[str] = "fedsgd"
    sends_model: ClassVar[bool] = True
    weighting: str = "examples"

    def __post_init__(self) -> None:
        check_weighting(self.weighting)

    def work(self, work: LocalWork) -> LocalWork:
        """One step on all of a client's examples, whatever was configured."""
        return replace(work, steps=1, batch_size=0)

    def terms(self, program: Program) -> Mapping[str, TermSpec]:
        """The model's deltas."""
        return model_specs(program)

    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        """One full-batch step from the server's model."""
        return local_sgd(trainer, message, data, client_weight(self.weighting, len(data))), state

    def merges_by_coordinate(self) -> bool:
        """The mean of a coordinate is its own affair."""
        return True

    def merge(self, program: Program, state: ServerState, total: Total) -> ServerState:
        """Add the weighted mean of the steps."""
        return merge_model(program, state, total)
