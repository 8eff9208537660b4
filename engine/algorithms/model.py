"""The model's part of an update: its terms, a client's deltas, and how their sum moves the server's model.

| role | what is sent | what the server does |
|---|---|---|
| parameter | the delta | adds the weighted mean, times the server's rate |
| float buffer | the delta | adds the weighted mean |
| counter | the increment | adds the weighted mean, rounded to an integer |
| frozen | nothing | nothing |

Names in `kept` stay with the client: they are in no term and the server's copies never move.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mycelia.engine.algorithms.base import Message, ServerState
from mycelia.engine.errors import ConfigError
from mycelia.engine.local import ClientData, LocalResult, LocalTrainer, parameter_slices
from mycelia.engine.program import Program
from mycelia.engine.schema import Entry, Role
from mycelia.engine.sums import Term, TermSpec, Total, Update
from mycelia.engine.types import Tensors

__all__ = [
    "LOSS_GRAIN",
    "MAX_LOSS",
    "MAX_PARAMETER_DELTA",
    "client_metrics",
    "client_weight",
    "local_sgd",
    "merge_buffers",
    "merge_model",
    "model_specs",
    "model_terms",
]

# A delta beyond these is not training but divergence or attack, and the client is rejected.
MAX_PARAMETER_DELTA = 1024.0
MAX_BUFFER_DELTA = 2.0**24
MAX_COUNTER_INCREMENT = 2.0**31
MAX_LOSS = 2.0**20

LOSS_GRAIN = 2.0**-8
"""To what a client's mean loss is rounded where it is summed in whole numbers."""

_BUFFER_TERMS = (
    ("buffers", Role.BUFFER, MAX_BUFFER_DELTA),
    ("counters", Role.COUNTER, MAX_COUNTER_INCREMENT),
)


def model_specs(program: Program, kept: Collection[str] = ()) -> dict[str, TermSpec]:
    """The terms of a model delta: `params`, and `buffers` and `counters` where there are any.

    Raises:
        ConfigError: a complex tensor, which has no place in a sum of real numbers; or nothing is sent.
    """
    for entry in program.schema.of(Role.PARAMETER, Role.BUFFER):
        if entry.dtype.is_complex:
            raise ConfigError(f"{entry.name} is {entry.dtype}", rule="what is sent is real", who="model")
    size = sum(entry.numel for entry in program.schema.of(Role.PARAMETER) if entry.name not in kept)
    if size == 0:
        raise ConfigError(
            "no parameter is sent", rule="at least one parameter is trained and shared", who="model"
        )
    specs = {"params": TermSpec(size, MAX_PARAMETER_DELTA)}
    for name, role, bound in _BUFFER_TERMS:
        size = sum(entry.numel for entry in _sent(program, role, kept))
        if size:
            specs[name] = TermSpec(size, bound, grain=1.0 if role is Role.COUNTER else None)
    return specs


def model_terms(
    program: Program, message: Message, result: LocalResult, weight: float, kept: Collection[str] = ()
) -> dict[str, Term]:
    """A client's terms for `model_specs`: deltas against the message, all with one weight.

    Without `kept` the parameters are the trainer's own vector, not a copy.
    """
    new, old = result.vector, message.vector
    if kept:
        parts = _sent_slices(program, kept)
        new, old = (torch.cat([vector[part] for part in parts]) for vector in (new, old))
    terms = {"params": Term(new, weight, old)}
    if message.buffers:
        for name, role, _ in _BUFFER_TERMS:
            deltas = [
                result.buffers[e.name].reshape(-1).double() - message.buffers[e.name].reshape(-1).double()
                for e in _sent(program, role, kept)
                if e.numel
            ]
            if deltas:
                terms[name] = Term(torch.cat(deltas), weight)
    return terms


def merge_model(
    program: Program,
    state: ServerState,
    total: Total,
    *,
    server_lr: float = 1.0,
    kept: Collection[str] = (),
) -> ServerState:
    """The server's model after a round; dtype and shape never change, and `state` is not written to.

    Parameters move by the weighted mean of the deltas times `server_lr`; buffers as in `merge_buffers`.
    """
    step = total.mean("params").mul_(server_lr)
    vector = state.vector.double()
    if kept:
        vector = vector.clone() if vector is state.vector else vector  # .double() of float64 is no copy
        offset = 0
        for part in _sent_slices(program, kept):
            size = part.stop - part.start
            vector[part] += step[offset : offset + size]
            offset += size
    else:
        vector = step.add_(vector)
    return replace(
        state,
        vector=vector.to(state.vector.dtype),
        buffers=merge_buffers(program, state.buffers, total, kept),
    )


def merge_buffers(program: Program, buffers: Tensors, total: Total, kept: Collection[str] = ()) -> Tensors:
    """The buffers after a round.

    Float buffers move by the weighted mean of their deltas; counters by that of their increments, rounded
    half to even, so that they stay integers (a maximum would not add).
    """
    merged = dict(buffers)
    for name, role, _ in _BUFFER_TERMS:
        if name not in total.sums:
            continue
        mean = total.mean(name)
        if role is Role.COUNTER:
            mean = mean.round()
        offset = 0
        for entry in _sent(program, role, kept):
            part = mean[offset : offset + entry.numel].view(entry.shape)
            old = buffers[entry.name]
            new = old + part.to(torch.int64) if role is Role.COUNTER else old.double() + part
            merged[entry.name] = new.to(entry.dtype)
            offset += entry.numel
    return merged


def local_sgd(
    trainer: LocalTrainer,
    message: Message,
    data: ClientData,
    weight: float,
    *,
    extra: Mapping[str, Tensor] | None = None,
) -> Update:
    """Local SGD from the server's model; the update is the model's deltas."""
    result = trainer.run(message.vector, message.buffers, data, message.round, extra)
    return Update(model_terms(trainer.program, message, result, weight), client_metrics(result))


def client_metrics(result: LocalResult) -> dict[str, float]:
    """What the report sums per client."""
    return {"loss_sum": result.loss_sum, "examples": float(result.examples), "steps": float(result.steps)}


def client_weight(weighting: str, examples: int) -> float:
    """A client's weight: its number of examples, or 1."""
    return float(examples) if weighting == "examples" else 1.0


def _sent(program: Program, role: Role, kept: Collection[str]) -> list[Entry]:
    return [entry for entry in program.schema.of(role) if entry.name not in kept]


def _sent_slices(program: Program, kept: Collection[str]) -> list[slice]:
    """The parts of the flat vector that are sent, neighbours joined."""
    parts: list[slice] = []
    for name, part in parameter_slices(program).items():
        if name in kept:
            continue
        if parts and parts[-1].stop == part.start:
            parts[-1] = slice(parts[-1].start, part.stop)
        else:
            parts.append(part)
    return parts
