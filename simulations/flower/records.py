"""How models, updates and clients' states look in Flower's records.

| record | holds |
|---|---|
| `vector`, `buffers`, `extra` (ArrayRecord) | the server's model and what else the client half reads |
| `task` (ConfigRecord) | round, plan, hashes of what both ends must agree on, rounds to forget |
| `terms` (ArrayRecord), `weights` (ConfigRecord) | an update: one vector and one weight for each term |
| `metrics` (MetricRecord) | its numbers for the report |
| `failure`, `error` (ConfigRecord) | a client that did not contribute; an error that ends the run |
| `mycelia-state` (ConfigRecord, in the client's context) | what the client keeps between rounds |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from mycelia.engine.algorithms import Message
from mycelia.engine.client_store import ClientStore
from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.engine.sums import Term, Update
from mycelia.engine.types import Tensors
from mycelia.simulations.backends import Failure

__all__ = [
    "ContextStore",
    "Work",
    "error_records",
    "failure_records",
    "model_records",
    "raise_error",
    "read_failure",
    "read_message",
    "read_update",
    "read_work",
    "update_records",
    "work_records",
]

_ERRORS = {kind.__name__: kind for kind in (ConfigError, DataError, MyceliaError)}


@dataclass(frozen=True)
class Work:
    """What a client is asked to do.

    Attributes:
        plan: how local steps run.
        scenario_sha256: of the settings, which both ends have to share.
        partition_sha256: of who holds what.
        schema_sha256: of the model's tensors.
        round: its number.
        void: rounds whose states the client forgets: they failed, as a whole or for this client.
        limit: most test examples, where the client measures.
    """

    plan: str
    scenario_sha256: str
    partition_sha256: str
    schema_sha256: str
    round: int = 0
    void: tuple[int, ...] = ()
    limit: int = 0


def work_records(work: Work, model: Mapping[str, ArrayRecord] | None = None) -> RecordDict:
    """The records of a message that asks a client to train or to measure; without a model, to get ready."""
    task = ConfigRecord(
        {
            "round": work.round,
            "plan": work.plan,
            "scenario-sha256": work.scenario_sha256,
            "partition-sha256": work.partition_sha256,
            "schema-sha256": work.schema_sha256,
            "void": list(work.void),
            "limit": work.limit,
        }
    )
    return RecordDict({**(model or {}), "task": task})


def model_records(message: Message) -> dict[str, ArrayRecord]:
    """The records of what the algorithm sends; the messages to a cohort share them."""
    parts: dict[str, Mapping[str, Tensor]] = {
        "vector": {"vector": message.vector},
        "buffers": message.buffers,
        "extra": message.extra,
    }
    return {name: _arrays(tensors) for name, tensors in parts.items()}


def read_work(records: RecordDict) -> Work:
    """What the client is told beside the model."""
    task: Mapping[str, Any] = records.config_records["task"]
    return Work(
        plan=task["plan"],
        scenario_sha256=task["scenario-sha256"],
        partition_sha256=task["partition-sha256"],
        schema_sha256=task["schema-sha256"],
        round=task["round"],
        void=tuple(task["void"]),
        limit=task["limit"],
    )


def read_message(records: RecordDict, round: int, like: Message) -> Message:
    """What the algorithm sent.

    Args:
        records: as they came.
        round: its number.
        like: any message of the run, for the dtypes.
    """

    def part(name: str, dtypes: Mapping[str, Tensor]) -> Tensors:
        found = _tensors(records.array_records[name])
        return {key: tensor.to(dtypes[key].dtype) for key, tensor in found.items()}

    vector = part("vector", {"vector": like.vector})["vector"]
    return Message(vector, part("buffers", like.buffers), part("extra", like.extra), round)


def update_records(update: Update) -> RecordDict:
    """A client's answer: what the sum adds, bit for bit.

    A difference is taken in the precision of its inputs, float32 at least, as `FixedPoint.add_difference_`
    takes it, so that the server's sum has the same bits as one made where the client is.
    """
    vectors = {name: _difference(term) for name, term in update.terms.items()}
    weights = [float(term.weight) for term in update.terms.values()]
    return RecordDict(
        {
            "terms": _arrays(vectors),
            "weights": ConfigRecord({"terms": list(update.terms), "weights": weights}),
            "metrics": MetricRecord({name: float(value) for name, value in update.metrics.items()}),
        }
    )


def read_update(records: RecordDict) -> Update:
    """The inverse of `update_records`."""
    order: Mapping[str, Any] = records.config_records["weights"]
    vectors = _tensors(records.array_records["terms"])
    terms = {
        name: Term(vectors[name], float(weight))
        for name, weight in zip(order["terms"], order["weights"], strict=True)
    }
    metrics: Mapping[str, Any] = records.metric_records["metrics"]
    return Update(terms, {name: float(value) for name, value in metrics.items()})


def failure_records(failure: Failure) -> RecordDict:
    """The answer of a client that did not contribute."""
    said = ConfigRecord({"rejected": failure.rejected, "cause": failure.cause, "hint": failure.hint})
    return RecordDict({"failure": said})


def read_failure(records: RecordDict, position: int) -> Failure | None:
    """Why the client did not contribute; None where it did."""
    if "failure" not in records:
        return None
    said: Mapping[str, Any] = records.config_records["failure"]
    return Failure(position, bool(said["rejected"]), str(said["cause"]), str(said["hint"]))


def error_records(error: MyceliaError) -> RecordDict:
    """The answer of a client that found something with which the run cannot go on."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS)
    parts = {"kind": kind, "found": error.found, "rule": error.rule, "fix": error.fix, "who": error.who}
    return RecordDict({"error": ConfigRecord(dict(parts))})


def raise_error(records: RecordDict) -> None:
    """Raise the error that a client answered with, if it did."""
    if "error" not in records:
        return
    said: Mapping[str, Any] = records.config_records["error"]
    kind = _ERRORS.get(said["kind"], MyceliaError)
    raise kind(said["found"], rule=said["rule"], fix=said["fix"], who=said["who"])


class ContextStore(ClientStore):
    """What one client keeps between rounds, in the state of its Flower context.

    As in the store on disk, a state is looked up as of a round, and two of them are kept.

    Args:
        state: the context's.
        void: rounds whose states are dropped.
    """

    _PREFIX = "mycelia-state"

    def __init__(self, state: RecordDict, void: tuple[int, ...]) -> None:
        self._state = state
        for number in void:
            state.pop(self._name(number), None)

    def get(self, client: int, round: int) -> Tensors | None:
        """The client's newest state from before `round`, or None."""
        del client
        found = max((number for number in self._kept() if number < round), default=None)
        if found is None:
            return None
        held = self._state.config_records[self._name(found)]["tensors"]
        return dict(safetensors.torch.load(held)) if isinstance(held, bytes) else None

    def put(self, client: int, round: int, state: Tensors) -> None:
        """Keep the state this round leaves."""
        del client
        held = safetensors.torch.save({name: tensor.contiguous() for name, tensor in state.items()})
        self._state[self._name(round)] = ConfigRecord({"tensors": held})
        for old in sorted(number for number in self._kept() if number < round)[:-1]:
            del self._state[self._name(old)]

    def _kept(self) -> list[int]:
        prefix = f"{self._PREFIX}/"
        return [int(name.removeprefix(prefix)) for name in self._state if name.startswith(prefix)]

    def _name(self, round: int) -> str:
        return f"{self._PREFIX}/{round}"


def _difference(term: Term) -> Tensor:
    """`values - minus` as the exact sum takes it."""
    values = _single(term.values)
    return values if term.minus is None else values - _single(term.minus)


def _single(tensor: Tensor) -> Tensor:
    """At least float32, as NumPy and the exact sum have it; exact."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Arrays by name; NumPy has no bfloat16, which travels as float32."""
    return ArrayRecord(
        {name: Array(_single(tensor.detach()).numpy(force=True)) for name, tensor in tensors.items()}
    )


def _tensors(record: ArrayRecord) -> Tensors:
    """Tensors by name, which own their memory."""
    return {name: torch.from_numpy(array.numpy()) for name, array in record.items()}
