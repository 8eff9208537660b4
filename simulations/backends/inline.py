"""The reference backend: everything in this process, one client after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mycelia.engine.algorithms import Message
from mycelia.engine.metrics import Metrics
from mycelia.engine.sums import ExactSum, Total
from mycelia.simulations.backends.base import COLUMNS, Backend, Outcomes, Packed, Progress, quiet
from mycelia.simulations.backends.replica import Replica, Task

__all__ = ["Inline"]


class Inline(Backend):
    """Trains in the calling process.

    Args:
        task: what to do.
    """

    name = "inline"
    workers = 1

    def __init__(self, task: Task) -> None:
        self._replica = Replica(task)
        self._fresh = True

    def train(self, message: Message, clients: Sequence[int], progress: Progress = quiet) -> Outcomes:
        """Train these clients in order."""
        if self._fresh:
            self._replica.sum.reset()
            self._fresh = False
        table = np.zeros((len(clients), len(COLUMNS)))
        failures = []
        shape = self._replica.task.packed
        packed = None if shape is None else Packed.empty(len(clients), shape)
        for position, client in enumerate(clients):
            failure = self._replica.train(message, int(client), table[position], packed, position)
            if failure is not None:
                failures.append(replace(failure, position=position))
            progress(position + 1, len(clients))
        return Outcomes(table, tuple(failures), packed)

    def total(self) -> Total:
        """The running sum; the next `train` starts a new one."""
        own = self._replica.sum
        if self._fresh:  # nobody was trained: it still holds the sum before
            own.reset()
        self._fresh = True
        return ExactSum.total(own.form, [own.accumulator], own.count)

    def test(self, message: Message) -> Metrics:
        """Metrics on the test set."""
        metrics = Metrics(classes=self._replica.task.classes)
        for chunk in range(self._replica.chunks()):
            metrics = metrics + self._replica.test(message, chunk)
        return metrics

    def spread(self, message: Message, clients: Sequence[int], limit: int) -> dict[int, dict[str, float]]:
        """Metrics by client."""
        return {int(client): self._replica.spread(message, int(client), limit) for client in clients}

    def close(self) -> None:
        """Nothing to free."""
