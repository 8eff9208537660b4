"""Local training: one client's steps on one resident replica of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.program import Program
from mycelia.engine.rng import derive, generator
from mycelia.engine.schema import Role
from mycelia.engine.step import Adjust, sgd_step
from mycelia.engine.transforms.compile import PlannedStep
from mycelia.engine.types import Tensors

__all__ = [
    "Change",
    "ChangeOf",
    "ClientData",
    "LocalResult",
    "LocalSteps",
    "LocalTrainer",
    "LocalWork",
    "StepsOf",
    "Taken",
    "named_views",
    "parameter_slices",
]

Array = npt.NDArray[np.generic]

_GATHER = 4096  # examples copied out of the data set at once


@dataclass(frozen=True)
class LocalWork:
    """What a client does in a round.

    Attributes:
        epochs: passes over the client's examples; ignored when `steps` > 0.
        steps: SGD steps; > 0 replaces epochs.
        batch_size: examples a step; 0 takes all the client's examples.
        lr: learning rate, > 0.
    """

    epochs: int = 1
    steps: int = 0
    batch_size: int = 10
    lr: float = 0.1

    def __post_init__(self) -> None:
        if self.epochs < 0 or self.steps < 0 or self.epochs + self.steps == 0:
            raise ConfigError(
                f"epochs = {self.epochs}, steps = {self.steps}", rule="one of them > 0", who="local"
            )
        if self.batch_size < 0:
            raise ConfigError(f"batch_size = {self.batch_size}", rule=">= 0; 0 means all", who="local")
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"lr = {self.lr}", rule="positive and finite", who="local")

    def step_count(self, examples: int) -> int:
        """SGD steps for a client with this many examples."""
        if self.steps:
            return self.steps
        return self.epochs * -(-examples // (self.batch_size or max(examples, 1)))

    def rate(self, dtype: torch.dtype) -> Tensor:
        """The learning rate as a step reads it (0-d): float64 for float64 parameters, else float32."""
        return torch.tensor(self.lr, dtype=torch.float64 if dtype is torch.float64 else torch.float32)


@dataclass(frozen=True)
class ClientData:
    """One client's examples: rows `indices` of arrays that may be memory-mapped.

    Attributes:
        inputs: [N, ...] for the whole data set.
        targets: [N, ...].
        indices: the client's rows [n].
        client: its id, for streams and messages.
    """

    inputs: Array
    targets: Array
    indices: npt.NDArray[np.int64]
    client: int | str

    def __len__(self) -> int:
        return len(self.indices)

    def tensors(self, order: npt.NDArray[np.int64] | None = None) -> tuple[Tensor, Tensor]:
        """The client's inputs and targets, copied, in the given order."""
        rows = self.indices if order is None else self.indices[order]
        return torch.from_numpy(self.inputs[rows]), torch.from_numpy(self.targets[rows])


@dataclass(frozen=True)
class LocalResult:
    """Where local training ended; the tensors are the trainer's own and change with the next client.

    Attributes:
        vector: parameters [d].
        buffers: float buffers and counters.
        steps: SGD steps taken.
        loss_sum: sum over steps of the batch's mean loss times its size.
        examples: sum of the batch sizes.
    """

    vector: Tensor
    buffers: Tensors
    steps: int
    loss_sum: float
    examples: int


class Taken(NamedTuple):
    """What a client's steps came to; see `LocalResult`."""

    steps: int
    examples: int
    loss_sum: float


class LocalSteps(Protocol):
    """One client's steps of a round, which change parameters and buffers in place."""

    def __call__(
        self, params: Tensors, buffers: Tensors, data: ClientData, round: int, extra: Tensors
    ) -> Taken:
        """Take them; `extra["lr"]` is the rate (0-d), the rest is what `adjust` reads."""


StepsOf = Callable[[Program, Adjust | None], LocalSteps]
"""Makes other steps than SGD on reshuffled batches, such as private ones, for a program and its `adjust`."""


class Change(Protocol):
    """Changes the inputs of a batch before the step on it."""

    def __call__(
        self, params: Tensors, buffers: Tensors, inputs: Tensor, targets: Tensor, seed: int
    ) -> Tensor:
        """Inputs of the same shape.

        Args:
            params: parameters as they are at this step; only read.
            buffers: likewise.
            inputs: of the batch, a copy of the examples.
            targets: of the batch.
            seed: names what is drawn.
        """


ChangeOf = Callable[[Program], Change]
"""Makes what changes batches of a program."""


class LocalTrainer:
    """A resident replica that is reset to the server's model and trained in place for each client.

    Args:
        program: the Program.
        work: what a client does.
        adjust: what the algorithm adds to a gradient.
        extra: tensors that `adjust` reads, by name, as examples of their shapes ("lr" is added here).
        seed: root seed of batch order and dropout.
        plan: resolved plan.
        batch_shape: shape of the inputs of a full batch, None where there is none.
        package: the compiled step of a full batch, for the plan `inductor`; see `package_of`.
        steps_of: makes the steps where they are not SGD; then plan and package are not used.
        before_step: called before each SGD step; what it raises ends the training.
        change_of: makes what changes the inputs of each SGD step.

    Attributes:
        buffers: float buffers and counters, where the last client ended.
        runs: clients trained so far.

    Raises:
        ConfigError: changed inputs for steps that are not SGD.
    """

    def __init__(
        self,
        program: Program,
        work: LocalWork,
        *,
        adjust: Adjust | None = None,
        extra: Mapping[str, Tensor] | None = None,
        seed: int = 0,
        plan: str = "interpreter",
        batch_shape: tuple[int, ...] | None = None,
        package: Path | None = None,
        steps_of: StepsOf | None = None,
        before_step: Callable[[], None] | None = None,
        change_of: ChangeOf | None = None,
    ) -> None:
        if steps_of is not None and change_of is not None:
            raise ConfigError(
                "changed inputs for other steps than SGD",
                rule="such steps draw their own batches",
                who="LocalTrainer",
            )
        self.program, self.work, self.seed = program, work, seed
        params, self.buffers = program.init()
        self.runs = 0
        self._before_step = before_step
        self._change = None if change_of is None else change_of(program)
        self.start = program.flatten(params).clone()
        self.vector = self.start.clone()
        self._params = program.unflatten(self.vector)
        uniform = all(e.dtype == self.vector.dtype for e in program.schema.of(Role.PARAMETER))
        self._views = uniform
        self._extra: Tensors = {"lr": work.rate(self.vector.dtype)} | dict(extra or {})
        self._named: dict[str, tuple[Tensor, Tensors]] = {}
        self._scratch: Tensors = {}
        self._zero_seed = torch.zeros((), dtype=torch.int64)
        self._random = uses_seed(program)
        self._coupled = updates_buffers(program)
        self._step = PlannedStep(sgd_step(program, adjust), plan, batch_shape, package)
        self._steps: LocalSteps = self._sgd if steps_of is None else steps_of(program, adjust)

    def run(
        self,
        vector: Tensor,
        buffers: Tensors,
        data: ClientData,
        round: int,
        extra: Mapping[str, Tensor] | None = None,
    ) -> LocalResult:
        """Train from `vector` [d] and `buffers` on one client's data.

        Args:
            vector: parameters to start from; not changed.
            buffers: buffers to start from; not changed.
            data: the client's examples.
            round: names the random streams, with the client's id.
            extra: values of the tensors the algorithm's `adjust` reads; not changed.

        Raises:
            DataError: the client has no examples.
            ConfigError: `extra` holds a tensor that the algorithm's `step_extra` did not announce.
        """
        if len(data) == 0:
            raise DataError(
                "the client has no examples",
                rule="a client that trains needs at least one",
                fix="raise min_size in the partition",
                who=f"client {data.client}",
            )
        self.vector.copy_(vector)
        if not self._views:
            for name, tensor in self.program.unflatten(self.vector).items():
                self._params[name].copy_(tensor)
        for name, tensor in self.buffers.items():
            tensor.copy_(buffers[name])
        if extra:
            if not extra.keys() <= self._extra.keys():
                raise ConfigError(
                    f"extra tensors {', '.join(sorted(extra.keys() - self._extra.keys()))}",
                    rule="the step was built for those that step_extra names",
                    who="algorithm",
                )
            self._extra.update(extra)
        self.runs += 1
        steps, examples, loss_sum = self._steps(self._params, self.buffers, data, round, self._extra)
        if not self._views:
            self.vector.copy_(self.program.flatten(self._params))
        return LocalResult(self.vector, self.buffers, steps, loss_sum, examples)

    def warm_up(self, inputs: Tensor, targets: Tensor) -> None:
        """Trace the step of a full batch now, and not in the first round; nothing is trained.

        Args:
            inputs: of a full batch, whatever their values.
            targets: likewise.
        """
        params = {name: tensor.clone() for name, tensor in self._params.items()}
        buffers = {name: tensor.clone() for name, tensor in self.buffers.items()}
        self._step(params, buffers, inputs, targets, self._zero_seed, self._extra)

    def named_views(self, prefix: str, vector: Tensor) -> Tensors:
        """`named_views` of the program, remembered while the same tensor comes back."""
        known = self._named.get(prefix)
        if known is None or known[0] is not vector:
            known = self._named[prefix] = (vector, named_views(self.program, prefix, vector))
        return known[1]

    def scratch(self, name: str, dtype: torch.dtype) -> Tensor:
        """A vector [d] to write to, always the same for one name; a client's own, until the next client."""
        if name not in self._scratch:
            self._scratch[name] = torch.empty(self.program.dimension, dtype=dtype)
        return self._scratch[name]

    def _sgd(self, params: Tensors, buffers: Tensors, data: ClientData, round: int, extra: Tensors) -> Taken:
        seed = self._zero_seed
        base = derive(self.seed, "local randomness", round=round, client=data.client) if self._random else 0
        changes = derive(self.seed, "changed inputs", round=round, client=data.client) if self._change else 0
        steps, examples, loss_sum = 0, 0, 0.0
        for own, targets in self._batches(data, round):
            if self._before_step is not None:
                self._before_step()
            inputs = own
            if self._change is not None:
                inputs = self._change(params, buffers, own, targets, (changes + steps) % 2**63)
            if self._random:
                seed = torch.tensor((base + steps) & 0x7FFFFFFFFFFFFFFF)
            loss = self._step(params, buffers, inputs, targets, seed, extra)
            steps += 1
            examples += len(targets)
            loss_sum += loss.item() * len(targets)
        return Taken(steps, examples, loss_sum)

    def _batches(self, data: ClientData, round: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Reshuffled passes over the client's examples; every pass's last batch may be smaller.

        With statistics of the batch, as batch norm has them, a last batch of one example would have none: it
        joins the batch before.
        """
        if self._coupled and len(data) == 1:
            raise DataError(
                "the client has one example",
                rule="a model that updates buffers from the batch, as batch norm does, needs two or more",
                fix="raise min_size in the partition, or use another normalisation",
                who=f"client {data.client}",
            )
        rng = generator(self.seed, "batches", round=round, client=data.client)
        size = self.work.batch_size or len(data)
        left = self.work.step_count(len(data))
        while left > 0:
            order = rng.permutation(len(data))[: left * size]
            gather = size * max(1, _GATHER // size)
            for start in range(0, len(order), gather):
                inputs, targets = data.tensors(order[start : start + gather])
                first = 0
                while first < len(targets):
                    end = first + size
                    if self._coupled and end == len(targets) - 1:
                        end, left = end + 1, left - 1
                    yield inputs[first:end], targets[first:end]
                    first, left = end, left - 1


def parameter_slices(program: Program) -> dict[str, slice]:
    """Where each parameter lies in the flat vector [d]."""
    slices, offset = {}, 0
    for entry in program.schema.of(Role.PARAMETER):
        slices[entry.name] = slice(offset, offset + entry.numel)
        offset += entry.numel
    return slices


def named_views(program: Program, prefix: str, vector: Tensor) -> Tensors:
    """`vector` [d] by parameter, each called `prefix.name`; always views, whatever the parameters' dtypes."""
    slices = parameter_slices(program)
    return {
        f"{prefix}.{entry.name}": vector[slices[entry.name]].view(entry.shape)
        for entry in program.schema.of(Role.PARAMETER)
    }


def updates_buffers(program: Program) -> bool:
    """Whether the training pass writes float buffers, as batch norm does (a Program without a graph may)."""
    entries = program.schema.of(Role.BUFFER, Role.COUNTER)
    if program.graphs is None:
        return any(entry.role is Role.BUFFER for entry in entries)
    results = program.graphs[0].graph.output_node().args[0]
    ends = list(results)[len(results) - len(entries) :] if isinstance(results, (list, tuple)) else []
    return any(
        entry.role is Role.BUFFER and getattr(node, "op", "") != "placeholder"
        for entry, node in zip(entries, ends, strict=True)
    )


def uses_seed(program: Program) -> bool:
    """Whether the training pass draws random numbers (a Program without a graph may)."""
    if program.graphs is None:
        return True
    graph = program.graphs[0].graph
    return any(node.op == "placeholder" and node.name == "seed" and node.users for node in graph.nodes)
