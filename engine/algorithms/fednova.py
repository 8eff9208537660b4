"""FedNova: deltas normalised by their number of steps, so that clients who step more do not pull harder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from mycelia.engine.algorithms.base import Algorithm, Message, ServerState
from mycelia.engine.algorithms.model import (
    client_metrics,
    client_weight,
    merge_model,
    model_specs,
    model_terms,
)
from mycelia.engine.algorithms.options import check_positive, check_weighting
from mycelia.engine.local import ClientData, LocalTrainer
from mycelia.engine.program import Program
from mycelia.engine.sums import Term, TermSpec, Total, Update
from mycelia.engine.types import Tensors

__all__ = ["FedNova"]

MAX_STEPS = 2.0**24


@dataclass(frozen=True)
class FedNova(Algorithm):
    """Normalised averaging for local SGD (Wang et al., NeurIPS 2020, section 4, with a_i all ones).

    w <- w + server_lr * τ_eff * Σ p_i Δ_i / τ_i with τ_eff = Σ p_i τ_i and p_i the weights' shares in the
    cohort. As a sum: the deltas weigh n_i / τ_i, and the steps travel beside them with weight n_i.

    Attributes:
        weighting: n_i is the number of examples ("examples") or 1 ("uniform").
        server_lr: factor on the step, > 0.
    """

    name: ClassVar[str] = "fednova"
    sends_model: ClassVar[bool] = True
    weighting: str = "examples"
    server_lr: float = 1.0

    def __post_init__(self) -> None:
        check_weighting(self.weighting)
        check_positive(self.server_lr, "server_lr")

    def terms(self, program: Program) -> Mapping[str, TermSpec]:
        """The steps, which carry the client's weight, and the model's deltas."""
        specs = model_specs(program)
        specs["params"] = replace(specs["params"], own_weight=True)
        return {"steps": TermSpec(1, MAX_STEPS, grain=1.0), **specs}

    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        """Local SGD from the server's model."""
        result = trainer.run(message.vector, message.buffers, data, message.round)
        weight = client_weight(self.weighting, len(data))
        steps = Term(torch.tensor([float(result.steps)], dtype=torch.float64), weight)
        terms = {"steps": steps, **model_terms(trainer.program, message, result, weight)}
        terms["params"] = Term(result.vector, weight / result.steps, message.vector)
        return Update(terms, client_metrics(result)), state

    def merges_by_coordinate(self) -> bool:
        """τ comes whole with each block."""
        return True

    def merge(self, program: Program, state: ServerState, total: Total) -> ServerState:
        """Add τ_eff times the weighted mean of the steps' directions."""
        if total.count == 0:
            return state
        # merge_model divides by Σ n_i / τ_i; the rule divides by Σ n_i and multiplies by Σ n_i τ_i / Σ n_i
        tau = float(total.mean("steps"))
        factor = tau * total.weights["params"] / total.weights["steps"]
        return merge_model(program, state, total, server_lr=self.server_lr * factor)
