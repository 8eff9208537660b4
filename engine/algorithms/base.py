"""What a federated algorithm is: both halves as pure functions, and what it needs from a sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

from torch import Tensor

from mycelia.engine.local import ClientData, LocalTrainer, LocalWork
from mycelia.engine.program import Program
from mycelia.engine.step import Adjust
from mycelia.engine.sums import TermSpec, Total, Update
from mycelia.engine.types import Tensors

__all__ = ["Algorithm", "Message", "ServerState"]


@dataclass(frozen=True)
class ServerState:
    """The server's model and whatever else the algorithm keeps.

    Attributes:
        vector: parameters [d].
        buffers: float buffers and counters by name.
        extra: further tensors by name (control variates, optimiser moments).
    """

    vector: Tensor
    buffers: Tensors
    extra: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Message:
    """What the server sends to a client; receivers read it and never write.

    Attributes:
        vector: parameters [d].
        buffers: float buffers and counters by name.
        extra: further tensors the client half needs, by name; names, shapes and dtypes never change in a run.
        round: round number, 0-based.
    """

    vector: Tensor
    buffers: Tensors
    extra: Mapping[str, Tensor]
    round: int


@dataclass(frozen=True)
class Algorithm(ABC):
    """A federated algorithm: options as fields, both halves as pure functions.

    A class is abstract or final: final ones fill in what is abstract and override the defaults here,
    nothing else. The order of calls in a run: `bind`, then `work`, `terms`, `start` and, in every process
    that trains, `adjust` and `step_extra`; in a round `message_extra`, `local` for each client, `merge`.

    Class attributes:
        name: how configuration calls it.
        linear: whether a weighted sum of updates is all the server needs, so that masks and any order are
            fine.
        stateful: whether clients keep state between rounds.
        pooled: whether all training examples belong in one client, whatever the partition (a central
            baseline).
        sends_model: whether the terms `params`, `buffers` and `counters` are what the model moved by, so that
            a device may send the model it came to, less what it keeps, and the server subtracts.
    """

    name: ClassVar[str]
    linear: ClassVar[bool] = True
    stateful: ClassVar[bool] = False
    pooled: ClassVar[bool] = False
    sends_model: ClassVar[bool] = False

    def bind(self, *, population: int) -> Self:
        """This algorithm for one run: what only the run knows is filled in where the options left it open.

        Args:
            population: number of clients there are, of which each round sees a cohort.
        """
        del population
        return self

    def work(self, work: LocalWork) -> LocalWork:
        """The local work, where the algorithm prescribes part of it."""
        return work

    def adjust(self, program: Program) -> Adjust | None:
        """What is added to each local gradient; traced into the compiled step."""
        del program
        return None

    def step_extra(self, program: Program) -> Tensors:
        """Example tensors that `adjust` reads through `extra`, by name."""
        del program
        return {}

    def server_extra(self, program: Program) -> Tensors:
        """The server's further state at the start, by name."""
        del program
        return {}

    def message_extra(self, state: ServerState) -> Mapping[str, Tensor]:
        """The part of the server's further state that clients need."""
        del state
        return {}

    @abstractmethod
    def terms(self, program: Program) -> Mapping[str, TermSpec]:
        """Names, sizes and bounds of the vectors a client contributes; at least one.

        The weight of the first is the one that checks and records call the client's weight.
        """

    def kept(self, program: Program) -> frozenset[str]:
        """Names of the model's tensors that stay with each client, and are in no term."""
        del program
        return frozenset()

    @abstractmethod
    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        """The client half: train and say what to add.

        Args:
            trainer: the resident replica.
            message: from the server; not changed.
            data: the client's examples.
            state: what this client kept from its last round, None at first; not changed.

        Returns:
            The update, whose tensors may be the trainer's own until its next run, and the new state, whose
            tensors own their memory.
        """

    @abstractmethod
    def merge(self, program: Program, state: ServerState, total: Total) -> ServerState:
        """The server half: the new state from the sum of updates.

        `state` is not changed, and comes back as it is from a total of no updates.
        """

    def merges_by_coordinate(self) -> bool:
        """Whether `merge` does the same for any part of the coordinates as for all of them.

        Then a large model is merged block by block: `merge` gets the block's entries of the vector, of each
        term and of each further tensor that is as long as the vector; buffers and their terms come with the
        last block, and every other tensor whole with each.
        """
        return False

    def personal(
        self, program: Program, state: ServerState, client_state: Tensors | None
    ) -> tuple[Tensor, Tensors]:
        """The model a client uses: (vector, buffers). The server's, unless the algorithm personalises."""
        del program, client_state
        return state.vector, state.buffers

    def start(self, program: Program) -> ServerState:
        """The server's state before the first round."""
        params, buffers = program.init()
        return ServerState(program.flatten(params), buffers, self.server_extra(program))
