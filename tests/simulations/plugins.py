"""A user's own algorithms and models, as tests name them by `module:name`."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from mycelia.engine.algorithms import FedAvg, Message
from mycelia.engine.local import ClientData, LocalTrainer
from mycelia.engine.sums import Term, Update
from mycelia.engine.types import Tensors


@dataclass(frozen=True)
class Odd(FedAvg):
    """FedAvg in which the clients of some ids misbehave."""

    name: ClassVar[str] = "odd"
    how: str = "raise"
    every: int = 1

    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        """As FedAvg, but for clients whose id is a multiple of `every`."""
        update, state = super().local(trainer, message, data, state)
        if int(data.client) % self.every:
            return update, state
        params = update.terms["params"]
        if self.how == "raise":
            raise RuntimeError(f"no battery left on device {data.client}")
        if self.how == "nan":
            values = params.values.clone()
            values[3] = torch.nan
            params = replace(params, values=values)
        elif self.how == "zero weight":
            params = replace(params, weight=0.0)
        elif self.how == "write":
            message.vector.add_(1.0)
        elif self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return Update(dict(update.terms) | {"params": params}, update.metrics), state


@dataclass(frozen=True)
class Median(FedAvg):
    """An algorithm whose server would look at each update."""

    name: ClassVar[str] = "median"
    linear: ClassVar[bool] = False


@dataclass(frozen=True)
class Counting(FedAvg):
    """FedAvg whose clients count their rounds and add the count to their first parameter."""

    name: ClassVar[str] = "counting"
    stateful: ClassVar[bool] = True

    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        """As FedAvg, with a state that enters the update."""
        update, _ = super().local(trainer, message, data, state)
        count = torch.zeros(()) if state is None else state["count"]
        params = update.terms["params"]
        values = params.values.clone()
        values[0] += count
        terms = dict(update.terms) | {"params": Term(values, params.weight, params.minus)}
        return Update(terms, update.metrics), {"count": count + 1}


@dataclass(frozen=True)
class OddCounting(Counting):
    """Counting in which the clients whose id is a multiple of `every` fail."""

    name: ClassVar[str] = "odd-counting"
    every: int = 7

    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        """As Counting, but for the clients that fail after their training."""
        found = super().local(trainer, message, data, state)
        if int(data.client) % self.every == 0:
            raise RuntimeError(f"no battery left on device {data.client}")
        return found


def normed(input_shape: tuple[int, ...], classes: int, width: int = 8) -> nn.Module:
    """A model with batch norm and dropout: buffers, a counter and randomness."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(width, classes),
    )


def unexportable(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model that branches on a value."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum().item() > 0:
                return self.linear(x.flatten(1))
            return -self.linear(x.flatten(1))

    del input_shape
    return Branching()


def few(input_shape: tuple[int, ...]) -> nn.Module:
    """A model with two outputs, whatever the classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 2))


def broken(input_shape: tuple[int, ...]) -> nn.Module:
    """A factory that raises."""
    raise RuntimeError(f"no such layer for {input_shape}")


def fractions(ids: Any, k: int, *, round: int, seed: int, weights: Any, available: Any) -> Any:
    """A selector of halves."""
    del ids, round, seed, weights, available
    return np.arange(k) + 0.5


def twice(ids: Any, k: int, *, round: int, seed: int, weights: Any, available: Any) -> Any:
    """A selector that names one client again and again."""
    del ids, round, seed, weights, available
    return np.zeros(k, dtype=np.int64)


def beyond(ids: Any, k: int, *, round: int, seed: int, weights: Any, available: Any) -> Any:
    """A selector of clients that do not exist."""
    del round, seed, weights, available
    return np.arange(k) + len(ids)


def angry(ids: Any, k: int, *, round: int, seed: int, weights: Any, available: Any) -> Any:
    """A selector that raises."""
    raise KeyError("nobody")


class Pair(FedAvg):
    """An algorithm whose client half returns something else."""

    name: ClassVar[str] = "pair"

    def local(self, *arguments: Any) -> Any:
        """Not an update."""
        del arguments
        return (1, 2)


class Nothing(FedAvg):
    """An algorithm whose server half returns nothing."""

    name: ClassVar[str] = "nothing"

    def merge(self, *arguments: Any) -> Any:
        """Not a state."""
        del arguments


def stubborn(ids: Any, k: int, *, round: int, seed: int, weights: Any, available: Any) -> Any:
    """A selector that takes the same clients, whomever it may draw from."""
    del ids, round, seed, weights, available
    return np.arange(k)
