"""An existing Flower `NumPyClient` as the client half of a Mycelia algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from flwr.app import Context, RecordDict
from flwr.client import Client, NumPyClient
from flwr.common import Code, FitIns, FitRes, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from torch import Tensor

from mycelia.engine.algorithms import Algorithm, Message, ServerState
from mycelia.engine.algorithms import build as build_algorithm
from mycelia.engine.algorithms.model import client_weight, model_specs, model_terms
from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.engine.local import ClientData, LocalResult, LocalTrainer
from mycelia.engine.plugins import check_options, is_reference, resolve, user_code
from mycelia.engine.program import Program
from mycelia.engine.schema import Entry, Role
from mycelia.engine.sums import TermSpec, Total, Update
from mycelia.engine.types import Tensors

__all__ = ["NumPyClients", "numpy_client"]

_SERVERS = ("fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad")
_LOSSES = ("train_loss", "train-loss", "loss")
_STATE = "context"


@dataclass(frozen=True)
class NumPyClients(Algorithm):
    """Clients that a Flower `client_fn` makes, and the server half of an algorithm of Mycelia.

    In each round `client_fn(context)` is called and its client's `fit` gets the model as a list of arrays in
    `state_dict` order, and `config` with `server-round`, which counts from 1. What it gives back less what it
    got is the update, and its number of examples the weight. `context.node_config` has `partition-id` and
    `num-partitions`; what the client leaves in `context.state` it finds there in its next round. The
    scenario's data, partition and local work are not the client's business; its test set measures the model.

    Attributes:
        client_fn: where the function is, as `package.module:function`.
        config: what `fit` is told.
        run_config: what the client finds in `context.run_config`.
        server: the algorithm whose server half merges the updates: fedavg, fedavgm, fedadam, fedyogi or
            fedadagrad; a name, or a table with a name and options.
        names: the tensors that travel, in the client's order; empty: all, as `state_dict` has them.
        population: the number of clients; 0 takes that of the run.
    """

    name: ClassVar[str] = "flower-numpy-client"
    stateful: ClassVar[bool] = True
    sends_model: ClassVar[bool] = True
    client_fn: str
    config: Mapping[str, Any] = field(default_factory=dict)
    run_config: Mapping[str, Any] = field(default_factory=dict)
    server: str | Mapping[str, Any] = "fedavg"
    names: tuple[str, ...] = ()
    population: int = 0
    _server: Algorithm = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        function = resolve(self.client_fn, kind="client_fn")
        if [*inspect.signature(function).parameters] != ["context"]:
            raise ConfigError(
                f"{self.client_fn} takes ({', '.join(inspect.signature(function).parameters)})",
                rule="client_fn(context)",
                fix="the client's number is context.node_config['partition-id']",
                who="algorithm.client_fn",
            )
        options = {"name": self.server} if isinstance(self.server, str) else dict(self.server)
        name = options.pop("name", "")
        if name not in _SERVERS:
            raise ConfigError(
                f"server is {name!r}",
                rule=f"one of {', '.join(_SERVERS)}: the client half of another would not be run",
                who="algorithm.server",
            )
        object.__setattr__(self, "_server", build_algorithm(name, **options))
        object.__setattr__(self, "names", tuple(self.names))

    @property
    def weighting(self) -> str:
        """What a client counts by."""
        return str(getattr(self._server, "weighting", "examples"))

    def bind(self, *, population: int) -> Self:
        """Fill in the population unless it was configured."""
        return self if self.population else replace(self, population=population)

    def server_extra(self, program: Program) -> Tensors:
        """That of the server half."""
        return self._server.server_extra(program)

    def terms(self, program: Program) -> Mapping[str, TermSpec]:
        """The model's deltas."""
        self._order(program)  # a model whose order is not known is refused before the run starts
        return model_specs(program)

    def merge(self, program: Program, state: ServerState, total: Total) -> ServerState:
        """As the server half does."""
        return self._server.merge(program, state, total)

    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        """Call the client's `fit`."""
        program, who = trainer.program, f"client {data.client}, NumPyClient.fit"
        order = self._order(program)
        known: Tensors = {**program.unflatten(message.vector), **message.buffers, **program.frozen}
        sent = [_array(known[entry.name]) for entry in order]
        context = Context(
            run_id=1,
            node_id=int(data.client) + 1,
            node_config={"partition-id": int(data.client), "num-partitions": self.population},
            state=_read_state(state),
            run_config=dict(self.run_config),
        )
        config = {"server-round": message.round + 1, **self.config}
        with user_code(f"client {data.client}, {self.client_fn}"):
            client = resolve(self.client_fn, kind="client_fn")(context)
        if isinstance(client, NumPyClient):
            client = client.to_client()
        if not isinstance(client, Client):
            raise MyceliaError(
                f"it gave a {type(client).__name__}",
                rule="a flwr.client.Client",
                fix="end it with return MyClient().to_client()",
                who=f"client {data.client}, {self.client_fn}",
            )
        with user_code(who):
            found = client.fit(FitIns(ndarrays_to_parameters(sent), config))
        if found.status.code != Code.OK:
            raise MyceliaError(f"its status is {found.status.code.name}: {found.status.message}", who=who)
        tensors = _received(order, sent, found, who)
        result = self._result(program, message, tensors, found)
        weight = client_weight(self.weighting, found.num_examples)
        metrics = {"loss_sum": result.loss_sum, "examples": float(result.examples), "steps": 0.0}
        return Update(model_terms(program, message, result, weight), metrics), _write_state(context.state)

    def _result(self, program: Program, message: Message, tensors: Tensors, found: FitRes) -> LocalResult:
        """What came back, where the model's tensors that did not travel are as they were."""
        params = program.unflatten(message.vector) | {
            n: t for n, t in tensors.items() if n not in message.buffers
        }
        vector = program.flatten({name: params[name].clone() for name in program.unflatten(message.vector)})
        buffers = {name: tensors.get(name, tensor) for name, tensor in message.buffers.items()}
        loss = next((found.metrics[name] for name in _LOSSES if name in found.metrics), None)
        if not isinstance(loss, int | float):  # a mean loss over examples that reported none is no mean
            return LocalResult(vector, buffers, 0, 0.0, 0)
        return LocalResult(vector, buffers, 0, float(loss) * found.num_examples, found.num_examples)

    def _order(self, program: Program) -> list[Entry]:
        """The tensors that travel, in the client's order."""
        entries = {entry.name: entry for entry in program.schema}
        if not self.names:
            return _state_dict_order(program)
        needed = [entry.name for entry in program.schema.of(Role.PARAMETER)]
        wrong = [name for name in self.names if name not in entries]
        missing = [name for name in needed if name not in self.names]
        found = "a name is there twice" if len(set(self.names)) < len(self.names) else ""
        found = f"{missing[0]!r} is missing" if missing else found
        found = f"no tensor is called {wrong[0]!r}" if wrong else found
        if found:
            rule = f"each name once, with all of {', '.join(needed)}; there are {', '.join(entries)}"
            raise ConfigError(found, rule=rule, who="algorithm.names")
        return [entries[name] for name in self.names]


def numpy_client(client_fn: str | Callable[[Context], Client], **options: Any) -> dict[str, Any]:
    """The `algorithm` of a scenario whose clients are those of a Flower `client_fn`.

    In a file its name is `mycelia.simulations.flower:NumPyClients`; `client_fn` and the options stand beside.

    Args:
        client_fn: a function of a module, or where it is, as `package.module:function`; modules of the
            current folder are found too.
        options: see `NumPyClients`.

    Raises:
        ConfigError: there is no such function, or an option is wrong.
    """
    who = "numpy_client"
    reference = (
        client_fn if isinstance(client_fn, str) else f"{client_fn.__module__}:{client_fn.__qualname__}"
    )
    if not isinstance(client_fn, str) and not is_reference(reference):
        raise ConfigError(
            f"client_fn is {reference}",
            rule="other processes find it by its module and name",
            fix="define it at the top of a module",
            who=who,
        )
    check_options(NumPyClients, options, who, given=("client_fn",))
    NumPyClients(reference, **options)
    return {"name": f"{__package__}:NumPyClients", "client_fn": reference, **options}


def _state_dict_order(program: Program) -> list[Entry]:
    """The order of `state_dict`: module by module, its parameters and then its buffers.

    Raises:
        ConfigError: a module has buffers and no parameters, so that its place is not known.
    """
    buffers: dict[str, list[Entry]] = {}
    parameters: list[Entry] = []
    for entry in program.schema:
        is_buffer = entry.role in (Role.BUFFER, Role.COUNTER) or entry.dtype == torch.bool
        (buffers.setdefault(_module(entry.name), []) if is_buffer else parameters).append(entry)
    order: list[Entry] = []
    for position, entry in enumerate(parameters):
        order.append(entry)
        module = _module(entry.name)
        if all(_module(later.name) != module for later in parameters[position + 1 :]):
            order.extend(buffers.pop(module, []))
    if buffers:
        names = ", ".join(entry.name for entry in next(iter(buffers.values())))
        raise ConfigError(
            f"{names} belong to a module without parameters",
            rule="the order of state_dict is known where each module with buffers has parameters",
            fix="give the names in the client's order: algorithm.names = [*model.state_dict()]",
            who="algorithm.names",
        )
    return order


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """As a client gets it; NumPy has no bfloat16."""
    found = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    array: np.ndarray[Any, Any] = found.numpy(force=True)
    return array


def _received(order: list[Entry], sent: list[np.ndarray[Any, Any]], found: FitRes, who: str) -> Tensors:
    """What `fit` gave back, by name and with the model's dtypes.

    Raises:
        DataError: another number of arrays, another shape or kind, or a frozen tensor that was changed.
    """
    arrays = parameters_to_ndarrays(found.parameters)
    if len(arrays) != len(order):
        raise DataError(
            f"{who} gave {len(arrays)} arrays",
            rule=f"the {len(order)} that it was sent: {', '.join(entry.name for entry in order)}",
            who=who,
        )
    tensors: Tensors = {}
    for entry, old, new in zip(order, sent, arrays, strict=True):
        if new.shape != entry.shape or new.dtype.kind not in _kinds(old):
            raise DataError(
                f"{who} gave {entry.name} as {new.dtype} {list(new.shape)}",
                rule=f"{old.dtype} {list(entry.shape)}",
                fix="return the arrays in the order in which they came",
                who=who,
            )
        if entry.role is Role.FROZEN:
            if not np.array_equal(old, new):
                raise DataError(
                    f"{who} changed {entry.name}", rule="the tensor is frozen in the model", who=who
                )
            continue
        tensors[entry.name] = torch.from_numpy(np.ascontiguousarray(new).reshape(new.shape)).to(entry.dtype)
    return tensors


def _kinds(old: np.ndarray[Any, Any]) -> str:
    """Kinds of dtype that may come back: another width is rounded, a mean of counts is not a count."""
    return {"f": "f", "i": "iu", "u": "iu"}.get(old.dtype.kind, str(old.dtype.kind))


def _read_state(state: Tensors | None) -> RecordDict:
    if state is None:
        return RecordDict()
    return recorddict_from_proto(RecordDictProto.FromString(state[_STATE].numpy().tobytes()))


def _write_state(state: RecordDict) -> Tensors | None:
    """The client's records as bytes; None where there are none."""
    if not state:
        return None
    return {
        _STATE: torch.frombuffer(bytearray(recorddict_to_proto(state).SerializeToString()), dtype=torch.uint8)
    }
