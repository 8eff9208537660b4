"""Local-only: every client trains by itself, the baseline that federation has to beat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.engine.algorithms.base import Algorithm, Message, ServerState
from mycelia.engine.algorithms.model import LOSS_GRAIN, MAX_LOSS, client_metrics
from mycelia.engine.local import ClientData, LocalTrainer
from mycelia.engine.program import Program
from mycelia.engine.sums import Term, TermSpec, Total, Update
from mycelia.engine.types import Tensors

__all__ = ["LocalOnly"]


@dataclass(frozen=True)
class LocalOnly(Algorithm):
    """No sharing: a client goes on from its own model, at first the server's, which never moves.

    The update holds the mean training loss alone; the model to look at is `personal`.
    """

    name: ClassVar[str] = "local-only"
    stateful: ClassVar[bool] = True

    def terms(self, program: Program) -> Mapping[str, TermSpec]:
        """The mean training loss."""
        del program
        return {"loss": TermSpec(1, MAX_LOSS, grain=LOSS_GRAIN)}

    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        """Local SGD from the client's own model."""
        vector, buffers = _own(message.vector, message.buffers, state)
        result = trainer.run(vector, buffers, data, message.round)
        loss = torch.tensor([result.loss_sum / result.examples], dtype=torch.float64)
        kept = {"vector": result.vector.clone()}
        kept |= {f"buffer.{name}": tensor.clone() for name, tensor in result.buffers.items()}
        return Update({"loss": Term(loss, float(len(data)))}, client_metrics(result)), kept

    def merge(self, program: Program, state: ServerState, total: Total) -> ServerState:
        """The server keeps the initial model."""
        del program, total
        return state

    def personal(
        self, program: Program, state: ServerState, client_state: Tensors | None
    ) -> tuple[Tensor, Tensors]:
        """The client's own model."""
        del program
        return _own(state.vector, state.buffers, client_state)


def _own(vector: Tensor, buffers: Tensors, state: Tensors | None) -> tuple[Tensor, Tensors]:
    if state is None:
        return vector, buffers
    return state["vector"], {name: state[f"buffer.{name}"] for name in buffers}
