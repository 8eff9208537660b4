"""FedBN: normalisation stays with the client, the rest is averaged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from torch import Tensor, fx

from mycelia.engine.algorithms.base import Algorithm, Message, ServerState
from mycelia.engine.algorithms.model import (
    client_metrics,
    client_weight,
    merge_model,
    model_specs,
    model_terms,
)
from mycelia.engine.algorithms.options import check_positive, check_weighting
from mycelia.engine.errors import ConfigError
from mycelia.engine.local import ClientData, LocalTrainer, parameter_slices
from mycelia.engine.program import Program
from mycelia.engine.schema import Role
from mycelia.engine.sums import TermSpec, Total, Update
from mycelia.engine.types import Tensors

__all__ = ["FedBN", "norm_tensors"]

_NORM = re.compile(r"(batch|layer|group|instance|rms)_norm")


@dataclass(frozen=True)
class FedBN(Algorithm):
    """Federated averaging of everything but normalisation (Li et al., ICLR 2021).

    What the model's normalisation operators read (scale, shift, running statistics) and the counters beside
    them are the client's own: kept between rounds, never sent, and the server's copies never move. A client
    that has not trained yet starts from the server's initial ones.

    Attributes:
        weighting: "examples" weighs a client by its number of examples, "uniform" by 1.
        server_lr: factor on the mean delta, > 0.
        keep: names or patterns (`norm*.weight`) of what stays with the client; empty finds it in the
            model's graph.
    """

    name: ClassVar[str] = "fedbn"
    sends_model: ClassVar[bool] = True
    stateful: ClassVar[bool] = True
    weighting: str = "examples"
    server_lr: float = 1.0
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_weighting(self.weighting)
        check_positive(self.server_lr, "server_lr")
        if not isinstance(self.keep, list | tuple) or not all(isinstance(name, str) for name in self.keep):
            raise ConfigError(f"keep is {self.keep!r}", rule="a list of names", who="algorithm.keep")
        object.__setattr__(self, "keep", tuple(self.keep))

    def terms(self, program: Program) -> Mapping[str, TermSpec]:
        """The deltas of what is shared."""
        return model_specs(program, self.kept(program))

    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        """Local SGD from the server's model with the client's own normalisation."""
        program, kept = trainer.program, self.kept(trainer.program)
        vector, buffers = _with_own(program, message.vector, message.buffers, state)
        result = trainer.run(vector, buffers, data, message.round)
        weight = client_weight(self.weighting, len(data))
        terms = model_terms(program, message, result, weight, kept)
        own = {n: result.vector[part].clone() for n, part in parameter_slices(program).items() if n in kept}
        own |= {name: tensor.clone() for name, tensor in result.buffers.items() if name in kept}
        return Update(terms, client_metrics(result)), own

    def merge(self, program: Program, state: ServerState, total: Total) -> ServerState:
        """Add `server_lr` times the weighted mean of the deltas to what is shared."""
        return merge_model(program, state, total, server_lr=self.server_lr, kept=self.kept(program))

    def personal(
        self, program: Program, state: ServerState, client_state: Tensors | None
    ) -> tuple[Tensor, Tensors]:
        """The shared model with the client's own normalisation."""
        return _with_own(program, state.vector, state.buffers, client_state)

    def kept(self, program: Program) -> frozenset[str]:
        """What `keep` names, or all that belongs to normalisation."""
        names = [e.name for e in program.schema.of(Role.PARAMETER, Role.BUFFER, Role.COUNTER)]
        for pattern in self.keep:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"no tensor matches {pattern!r}", rule=f"among {', '.join(names)}", who="algorithm.keep"
                )
        if self.keep:
            return frozenset(n for n in names if any(fnmatchcase(n, pattern) for pattern in self.keep))
        kept = norm_tensors(program)
        if not kept:
            raise ConfigError(
                "the model has no normalisation to keep with the client",
                rule="FedBN needs batch, layer, group, instance or RMS normalisation with tensors of its own",
                fix="use fedavg, or name what stays in algorithm.keep",
                who="fedbn",
            )
        return kept


def norm_tensors(program: Program) -> frozenset[str]:
    """What normalisation operators read beside their input, and the buffers of the same modules.

    Raises:
        CaptureError: the Program has no graph.
    """
    graph = program.graph("finding the normalisation tensors").graph
    roles = (Role.PARAMETER, Role.BUFFER, Role.COUNTER)
    # placeholders stand in this order, see `call_of_graph`
    order = [
        *program.schema.of(Role.PARAMETER),
        *program.schema.of(Role.BUFFER, Role.COUNTER),
        *program.schema.of(Role.FROZEN),
    ]
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    entries = dict(zip(holders, order, strict=False))
    found = set()
    for node in graph.nodes:
        if node.op == "call_function" and _NORM.search(str(node.target)):
            sources = [_source(arg) for arg in node.args[1:] if isinstance(arg, fx.Node)]
            found |= {entries[s].name for s in sources if s in entries and entries[s].role in roles}
    modules = {name.rpartition(".")[0] for name in found}
    beside = program.schema.of(Role.BUFFER, Role.COUNTER)
    return frozenset(found | {e.name for e in beside if e.name.rpartition(".")[0] in modules})


def _source(node: fx.Node) -> fx.Node:
    """Where a chain of one-input operators (views, casts) began."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _with_own(
    program: Program, vector: Tensor, buffers: Tensors, own: Tensors | None
) -> tuple[Tensor, Tensors]:
    """The server's model with a client's own tensors in their places."""
    if own is None:
        return vector, buffers
    mixed = vector.clone()
    for name, part in parameter_slices(program).items():
        if name in own:
            mixed[part] = own[name]
    return mixed, {name: own.get(name, tensor) for name, tensor in buffers.items()}
