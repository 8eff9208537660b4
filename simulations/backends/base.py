"""What a backend does for the simulator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mycelia.engine.algorithms import Message
from mycelia.engine.metrics import Metrics
from mycelia.engine.sums import Total
from mycelia.privacy.secure_updates import PackedShape

__all__ = ["COLUMNS", "Backend", "Failure", "Outcomes", "Packed", "PackedShape", "Progress", "quiet"]

COLUMNS = ("done", "weight", "loss_sum", "examples", "steps", "seconds")
"""What a backend records for each client it trained; `done` is 1 where the update was added."""


Progress = Callable[[int, int], None]


def quiet(done: int, asked: int) -> None:
    """Progress that nobody looks at."""


@dataclass(frozen=True)
class Failure:
    """A client that did not contribute.

    Attributes:
        position: its place in the list of clients asked for.
        rejected: the update came and was refused; otherwise training itself failed.
        cause: one line, or a traceback.
        hint: what to do.
    """

    position: int
    rejected: bool
    cause: str
    hint: str = ""


@dataclass(frozen=True)
class Packed:
    """Updates that are packed for a secure sum, in the order asked for; rows of those that failed are void.

    Attributes:
        vectors: floating point [clients, size].
        whole: int64 [clients, 1 + slots]: the weight, then the slots.
    """

    vectors: npt.NDArray[Any]
    whole: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, clients: int, shape: PackedShape) -> Packed:
        """Room for so many."""
        return cls(
            np.zeros((clients, shape.size), np.float64 if shape.double else np.float32),
            np.zeros((clients, 1 + shape.slots), np.int64),
        )


@dataclass(frozen=True)
class Outcomes:
    """What became of the clients of one call.

    Attributes:
        table: float64 [clients, len(COLUMNS)], in the order asked for.
        failures: those that did not contribute.
        packed: their updates, for a secure sum; None where they are in the running sum.
    """

    table: npt.NDArray[np.float64]
    failures: tuple[Failure, ...]
    packed: Packed | None = None


class Backend(ABC):
    """Trains clients and keeps the running exact sum; the result is the same for every backend."""

    name: str
    workers: int

    @abstractmethod
    def train(self, message: Message, clients: Sequence[int], progress: Progress = quiet) -> Outcomes:
        """Train these clients from `message` and add their updates to the running sum, or give them back.

        `progress` is called now and then with (clients done, clients asked).
        """

    @abstractmethod
    def total(self) -> Total:
        """The running sum; the next call of `train` starts a new one after it."""

    @abstractmethod
    def test(self, message: Message) -> Metrics:
        """Metrics of the message's model on the test set."""

    @abstractmethod
    def spread(self, message: Message, clients: Sequence[int], limit: int) -> dict[int, dict[str, float]]:
        """Metrics of each client's own model on its own test examples, by client.

        Args:
            message: the server's model.
            clients: whom to measure.
            limit: most test examples for one client.
        """

    def memory_bytes(self) -> int:
        """Resident memory of the worker processes; 0 where there are none."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Free processes and files; calling twice is harmless."""

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
