"""Centralised: SGD on all data in one place, the baseline that federation tries to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mycelia.engine.algorithms.base import Algorithm, Message, ServerState
from mycelia.engine.algorithms.model import local_sgd, merge_model, model_specs
from mycelia.engine.errors import ConfigError
from mycelia.engine.local import ClientData, LocalTrainer
from mycelia.engine.program import Program
from mycelia.engine.sums import TermSpec, Total, Update
from mycelia.engine.types import Tensors

__all__ = ["Centralised"]


@dataclass(frozen=True)
class Centralised(Algorithm):
    """One virtual client that holds the union of the data; a round is its local work, one epoch by default.

    Because it is `pooled`, whoever runs it gives all training examples to one client and asks for that one.
    """

    name: ClassVar[str] = "centralised"
    pooled: ClassVar[bool] = True

    def terms(self, program: Program) -> Mapping[str, TermSpec]:
        """The model's deltas."""
        return model_specs(program)

    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        """SGD from the current model."""
        return local_sgd(trainer, message, data, 1.0), state

    def merge(self, program: Program, state: ServerState, total: Total) -> ServerState:
        """Take the one client's model."""
        if total.count > 1:
            raise ConfigError(
                f"{total.count} clients trained",
                rule="all examples lie in one client",
                fix="pool the data, or use fedavg",
                who="centralised",
            )
        return merge_model(program, state, total)
