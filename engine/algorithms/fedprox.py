"""FedProx: FedAvg whose clients are held near the server's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.engine.algorithms.base import Algorithm, Message, ServerState
from mycelia.engine.algorithms.model import (
    LOSS_GRAIN,
    MAX_LOSS,
    client_metrics,
    client_weight,
    merge_model,
    model_specs,
    model_terms,
)
from mycelia.engine.algorithms.options import check_count, check_flag, check_positive, check_weighting
from mycelia.engine.local import ClientData, LocalTrainer, named_views
from mycelia.engine.program import Program
from mycelia.engine.step import Adjust
from mycelia.engine.sums import Term, TermSpec, Total, Update
from mycelia.engine.types import Tensors

__all__ = ["FedProx"]


@dataclass(frozen=True)
class FedProx(Algorithm):
    """FedAvg with a proximal term, μ/2 |w - w_server|² (Li et al., MLSys 2020, algorithm 2).

    With `adaptive`, μ starts at `mu` and follows the heuristic of section 5.3.2: up by `mu_step` when the
    loss rises, down by as much after `patience` consecutive falls, never below 0. The loss is the clients'
    mean training loss of the round, weighted by examples, which costs no extra pass.

    Attributes:
        mu: weight of the proximal term, >= 0; 0 is FedAvg.
        weighting: "examples" weighs a client by its number of examples, "uniform" by 1.
        server_lr: factor on the mean delta, > 0.
        adaptive: let the server move μ.
        mu_step: size of a move, > 0.
        patience: consecutive falls before μ goes down, at least 1.
    """

    name: ClassVar[str] = "fedprox"
    sends_model: ClassVar[bool] = True
    mu: float = 0.01
    weighting: str = "examples"
    server_lr: float = 1.0
    adaptive: bool = False
    mu_step: float = 0.1
    patience: int = 5

    def __post_init__(self) -> None:
        check_positive(self.mu, "mu", zero=True)
        check_weighting(self.weighting)
        check_positive(self.server_lr, "server_lr")
        check_flag(self.adaptive, "adaptive")
        check_positive(self.mu_step, "mu_step")
        check_count(self.patience, "patience", least=1)

    @property
    def _proximal(self) -> bool:
        return self.adaptive or self.mu > 0

    def adjust(self, program: Program) -> Adjust | None:
        """Add μ (w - w_server) to the gradient."""
        del program
        if not self._proximal:
            return None
        fixed = None if self.adaptive else self.mu

        def proximal(grads: Tensors, params: Tensors, extra: Tensors) -> Tensors:
            new = {}
            for name, grad in grads.items():
                away = params[name] - extra[f"anchor.{name}"]
                if fixed is None:
                    pulled = torch.addcmul(grad, away, extra["mu"])
                else:
                    pulled = torch.add(grad, away, alpha=fixed)
                new[name] = pulled.to(grad.dtype)
            return new

        return proximal

    def step_extra(self, program: Program) -> Tensors:
        """The server's parameters, and μ where it moves."""
        if not self._proximal:
            return {}
        anchor = program.flatten(program.init()[0])
        return self._extra(named_views(program, "anchor", anchor), torch.tensor(self.mu, dtype=torch.float64))

    def server_extra(self, program: Program) -> Tensors:
        """μ, the last loss, and the falls in a row; -1 falls: no loss so far."""
        del program
        if not self.adaptive:
            return {}
        return {
            "mu": torch.tensor(self.mu, dtype=torch.float64),
            "loss": torch.zeros((), dtype=torch.float64),
            "falls": torch.tensor(-1),
        }

    def message_extra(self, state: ServerState) -> Mapping[str, Tensor]:
        """Today's μ, where it moves."""
        return {"mu": state.extra["mu"]} if self.adaptive else {}

    def terms(self, program: Program) -> Mapping[str, TermSpec]:
        """The model's deltas, and the mean loss where μ follows it."""
        specs = model_specs(program)
        if self.adaptive:
            specs["loss"] = TermSpec(1, MAX_LOSS, grain=LOSS_GRAIN, own_weight=True)
        return specs

    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        """Local SGD on the loss plus the proximal term."""
        extra = None
        if self._proximal:
            extra = self._extra(trainer.named_views("anchor", message.vector), message.extra.get("mu"))
        result = trainer.run(message.vector, message.buffers, data, message.round, extra)
        weight = client_weight(self.weighting, len(data))
        terms = model_terms(trainer.program, message, result, weight)
        if self.adaptive:
            loss = torch.tensor([result.loss_sum / result.examples], dtype=torch.float64)
            terms["loss"] = Term(loss, float(len(data)))
        return Update(terms, client_metrics(result)), state

    def merges_by_coordinate(self) -> bool:
        """μ follows the loss, of which each block would take another step."""
        return not self.adaptive

    def merge(self, program: Program, state: ServerState, total: Total) -> ServerState:
        """Add `server_lr` times the weighted mean of the deltas, and move μ where it is adaptive."""
        merged = merge_model(program, state, total, server_lr=self.server_lr)
        if not self.adaptive or total.count == 0:
            return merged
        return replace(merged, extra=self._adapt(state.extra, float(total.mean("loss"))))

    def _extra(self, anchor: Tensors, mu: Tensor | None) -> Tensors:
        return {**anchor, "mu": mu} if self.adaptive and mu is not None else anchor

    def _adapt(self, extra: Tensors, loss: float) -> Tensors:
        """μ after a round with this loss."""
        mu, last, falls = float(extra["mu"]), float(extra["loss"]), int(extra["falls"])
        first = falls < 0
        falls = falls + 1 if not first and loss < last else 0
        if not first and loss > last:
            mu += self.mu_step
        elif falls == self.patience:
            mu, falls = max(0.0, mu - self.mu_step), 0
        return {
            "mu": torch.tensor(mu, dtype=torch.float64),
            "loss": torch.tensor(loss, dtype=torch.float64),
            "falls": torch.tensor(falls),
        }
