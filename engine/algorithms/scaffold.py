"""SCAFFOLD: control variates that take each client's drift out of its local steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from mycelia.engine.algorithms.base import Algorithm, Message, ServerState
from mycelia.engine.algorithms.gradient import mean_gradient
from mycelia.engine.algorithms.model import (
    client_metrics,
    client_weight,
    merge_model,
    model_specs,
    model_terms,
)
from mycelia.engine.algorithms.options import check_choice, check_count, check_positive, check_weighting
from mycelia.engine.errors import ConfigError
from mycelia.engine.local import ClientData, LocalTrainer, named_views
from mycelia.engine.program import Program
from mycelia.engine.rng import derive
from mycelia.engine.step import Adjust
from mycelia.engine.sums import Term, TermSpec, Total, Update
from mycelia.engine.types import Tensors

__all__ = ["Scaffold"]

# Control variates are gradients. One this much larger than before is divergence, and the client is rejected.
MAX_CONTROL_DELTA = 2.0**14


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """SCAFFOLD (Karimireddy et al., ICML 2020, algorithm 1).

    Local step: y <- y - lr (g(y) - c_i + c). Then c_i moves to the gradient at the server's model x (option
    I, one more pass over the client's data) or to c_i - c + (x - y) / (K lr) (option II). Server: x <- x +
    server_lr * mean(y - x); c <- c + |S|/N * mean(new c_i - c_i). A client keeps c_i, as large as the
    model.

    Attributes:
        option: "I" or "II".
        server_lr: factor on the mean delta, > 0.
        weighting: "uniform", the paper's, or "examples" where clients count by their examples; |S|/N is
            then an estimate of the cohort's share.
        population: the number of clients N; 0 takes that of the run.
    """

    name: ClassVar[str] = "scaffold"
    sends_model: ClassVar[bool] = True
    stateful: ClassVar[bool] = True
    option: str = "II"
    server_lr: float = 1.0
    weighting: str = "uniform"
    population: int = 0

    def __post_init__(self) -> None:
        check_choice(self.option, "option", ("I", "II"))
        check_positive(self.server_lr, "server_lr")
        check_weighting(self.weighting)
        check_count(self.population, "population", least=0)

    def bind(self, *, population: int) -> Self:
        """Fill in the population unless it was configured."""
        return self if self.population else replace(self, population=population)

    def adjust(self, program: Program) -> Adjust:
        """Take the client's drift, c_i - c, from the gradient."""
        del program

        def corrected(grads: Tensors, params: Tensors, extra: Tensors) -> Tensors:
            del params
            return {n: (grad - extra[f"drift.{n}"]).to(grad.dtype) for n, grad in grads.items()}

        return corrected

    def step_extra(self, program: Program) -> Tensors:
        """The client's drift."""
        return named_views(program, "drift", self._zeros(program))

    def server_extra(self, program: Program) -> Tensors:
        """The server's control variate c, at first zero."""
        return {"control": self._zeros(program)}

    def message_extra(self, state: ServerState) -> Mapping[str, Tensor]:
        """The server's control variate."""
        return {"control": state.extra["control"]}

    def terms(self, program: Program) -> Mapping[str, TermSpec]:
        """The model's deltas, and what the client's control variate moved by."""
        return {**model_specs(program), "control": TermSpec(program.dimension, MAX_CONTROL_DELTA)}

    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        """Corrected local SGD, then the new control variate."""
        control = message.extra["control"]
        own = None if state is None else state["control"]
        drift = trainer.scratch("drift", control.dtype)
        if own is None:
            torch.neg(control, out=drift)
        else:
            torch.sub(own, control, out=drift)
        new = self._gradient(trainer, message, data).to(control.dtype) if self.option == "I" else None
        extra = trainer.named_views("drift", drift)
        result = trainer.run(message.vector, message.buffers, data, message.round, extra)
        if new is None:
            new = message.vector.to(control.dtype) - result.vector
            torch.add(drift, new, alpha=1 / (result.steps * trainer.work.lr), out=new)
        weight = client_weight(self.weighting, len(data))
        terms = model_terms(trainer.program, message, result, weight)
        terms["control"] = Term(new, weight, own)
        return Update(terms, client_metrics(result)), {"control": new}

    def merges_by_coordinate(self) -> bool:
        """The control variate is as long as the vector."""
        return True

    def merge(self, program: Program, state: ServerState, total: Total) -> ServerState:
        """Move the model by the mean delta and c by the cohort's share of the mean change."""
        if not 0 < self.population >= total.count:
            raise ConfigError(
                f"{total.count} updates from a population of {self.population}",
                rule="SCAFFOLD knows the number of clients, which no cohort exceeds",
                fix="call bind(population=N), or set algorithm.population",
                who="algorithm.population",
            )
        merged = merge_model(program, state, total, server_lr=self.server_lr)
        old = state.extra["control"]
        step = total.mean("control").mul_(total.count / self.population)
        return replace(merged, extra={"control": step.add_(old).to(old.dtype)})

    def _gradient(self, trainer: LocalTrainer, message: Message, data: ClientData) -> Tensor:
        seed = derive(trainer.seed, "scaffold gradient", round=message.round, client=data.client)
        return mean_gradient(trainer.program, message.vector, message.buffers, data, seed=seed)

    @staticmethod
    def _zeros(program: Program) -> Tensor:
        vector = program.flatten(program.init()[0])
        return torch.zeros_like(vector, dtype=torch.promote_types(vector.dtype, torch.float32))
