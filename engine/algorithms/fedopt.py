"""FedOpt: the mean delta as a gradient for an optimiser on the server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from mycelia.engine.algorithms.base import Algorithm, Message, ServerState
from mycelia.engine.algorithms.model import client_weight, local_sgd, merge_buffers, model_specs
from mycelia.engine.algorithms.options import check_weighting
from mycelia.engine.local import ClientData, LocalTrainer
from mycelia.engine.optimizers import Optimizer, flatten_state, unflatten_state
from mycelia.engine.program import Program
from mycelia.engine.sums import TermSpec, Total, Update
from mycelia.engine.types import Tensors

__all__ = ["FedOpt"]


@dataclass(frozen=True)
class FedOpt(Algorithm):
    """Local SGD and an optimiser on the server (Reddi et al., ICLR 2021, algorithm 1); subclasses name it.

    The pseudo-gradient is minus the weighted mean of the deltas. Moments are kept in float64 beside the
    model. Buffers are averaged as in FedAvg.

    Attributes:
        weighting: "examples" weighs a client by its number of examples, "uniform" by 1.
    """

    sends_model: ClassVar[bool] = True
    weighting: str = "examples"

    def __post_init__(self) -> None:
        check_weighting(self.weighting)
        self.optimizer()  # refuses options out of range before the run starts

    @abstractmethod
    def optimizer(self) -> Optimizer:
        """The server's optimiser."""

    def server_extra(self, program: Program) -> Tensors:
        """The optimiser's state before the first round."""
        vector = program.flatten(program.init()[0]).double()
        return flatten_state(self.optimizer().init({"vector": vector}))

    def terms(self, program: Program) -> Mapping[str, TermSpec]:
        """The model's deltas."""
        return model_specs(program)

    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        """Local SGD from the server's model."""
        return local_sgd(trainer, message, data, client_weight(self.weighting, len(data))), state

    def merges_by_coordinate(self) -> bool:
        """So are its moments."""
        return True

    def merge(self, program: Program, state: ServerState, total: Total) -> ServerState:
        """One step of the optimiser; no updates, no step, so that moments do not decay in a failed round."""
        if total.count == 0:
            return state
        params, moments = self.optimizer().update(
            {"vector": total.mean("params").neg_()},
            unflatten_state(state.extra),
            {"vector": state.vector.double()},
        )
        return replace(
            state,
            vector=params["vector"].to(state.vector.dtype),
            buffers=merge_buffers(program, state.buffers, total),
            extra=flatten_state(moments),
        )
