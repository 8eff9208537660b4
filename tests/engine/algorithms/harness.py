"""A federation of a few lines, and two small models: a quadratic of known optimum, a net with BatchNorm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mycelia.engine.algorithms import Algorithm, Message, ServerState
from mycelia.engine.capture import capture
from mycelia.engine.local import ClientData, LocalTrainer, LocalWork
from mycelia.engine.program import Program
from mycelia.engine.sums import ExactSum, SumFormat, Total, Update
from mycelia.engine.types import Tensors

Array = np.ndarray[Any, np.dtype[np.float64]]


class Quadratic(nn.Module):
    """Outputs x * w, so that with targets x * t the loss is Σ x² (w - t)² / 2: curvature x², optimum t."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, size).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * ((outputs - targets) ** 2).sum(1)


@cache
def quadratic(size: int = 2, dtype: torch.dtype = torch.float64, backend: str = "export") -> Program:
    example = (torch.zeros(2, size, dtype=dtype), torch.zeros(2, size, dtype=dtype))
    return capture(Quadratic(size, dtype), half_square, example, backend=backend)


@dataclass(frozen=True)
class Bowl:
    """A client whose examples all have one curvature [d] and one optimum [d].

    `pull(K, lr)` is the share of the way to its optimum that K gradient steps go.
    """

    curvature: Array
    optimum: Array
    examples: int = 1

    def pull(self, steps: int, lr: float, mu: float = 0.0) -> Array:
        """Closed form; with `mu`, for the loss plus mu/2 |w - start|²."""
        whole = self.curvature + mu
        return self.curvature / whole * (1 - (1 - lr * whole) ** steps)

    def data(self, client: int, dtype: Any = np.float64) -> ClientData:
        inputs = np.tile(np.sqrt(self.curvature), (self.examples, 1)).astype(dtype)
        targets = inputs * self.optimum.astype(dtype)
        return ClientData(inputs, targets, np.arange(self.examples), client)


BOWLS = (
    Bowl(np.array([1.0, 4.0]), np.array([3.0, -1.0])),
    Bowl(np.array([5.0, 0.5]), np.array([-2.0, 2.0])),
    Bowl(np.array([0.5, 2.0]), np.array([0.0, 4.0])),
)
"""Far from alike: curvatures differ up to tenfold and optima by many units."""


def weighted(values: Iterable[Array], weights: Iterable[Array | float]) -> Array:
    """Σ w v / Σ w."""
    pairs = list(zip(values, weights, strict=True))
    return sum((w * v for v, w in pairs), np.zeros(())) / sum((w for _, w in pairs), np.zeros(()))


def optimum(bowls: Sequence[Bowl], weights: Sequence[float] | None = None) -> Array:
    """Where the weighted mean of the losses is least."""
    shares = [1.0] * len(bowls) if weights is None else weights
    return weighted([b.optimum for b in bowls], [w * b.curvature for w, b in zip(shares, bowls, strict=True)])


class Net(nn.Module):
    """A classifier with BatchNorm (buffers, a counter) and one frozen tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.second(torch.tanh(self.norm(self.first(x))))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def net_module() -> Net:
    """Always the same initial values; a new module each time, for tests train it in place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().double()


@cache
def net() -> Program:
    example = (torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
    return capture(net_module(), cross_entropy, example)


def net_clients(sizes: Sequence[int], *, seed: int = 0) -> list[ClientData]:
    """Clients with inputs and labels of their own, in one pair of arrays."""
    draw = np.random.default_rng(seed)
    total = sum(sizes)
    inputs, targets = draw.normal(size=(total, 6)), draw.integers(3, size=total)
    ends = np.cumsum(sizes)
    return [
        ClientData(inputs, targets, np.arange(end - size, end), client)
        for client, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


@dataclass
class Federation:
    """An algorithm, its state, and its clients' states."""

    algorithm: Algorithm
    program: Program
    work: LocalWork
    clients: Sequence[ClientData]
    seed: int = 0
    plan: str = "interpreter"
    trainer: LocalTrainer = field(init=False)
    state: ServerState = field(init=False)
    own: dict[int | str, Tensors | None] = field(default_factory=dict)
    number: int = 0

    def __post_init__(self) -> None:
        self.algorithm = self.algorithm.bind(population=len(self.clients))
        self.trainer = LocalTrainer(
            self.program,
            self.algorithm.work(self.work),
            adjust=self.algorithm.adjust(self.program),
            extra=self.algorithm.step_extra(self.program),
            seed=self.seed,
            plan=self.plan,
        )
        self.state = self.algorithm.start(self.program)
        largest = max(len(client) for client in self.clients)
        self.form = SumFormat.plan(self.algorithm.terms(self.program), float(largest), len(self.clients))

    def message(self) -> Message:
        extra = self.algorithm.message_extra(self.state)
        return Message(self.state.vector, self.state.buffers, extra, self.number)

    def update(self, client: ClientData) -> tuple[Update, Tensors | None]:
        return self.algorithm.local(self.trainer, self.message(), client, self.own.get(client.client))

    def total(self, cohort: Sequence[ClientData], *, workers: int = 1) -> Total:
        """Train a cohort; worker w sums clients w, w + workers, …"""
        sums = [ExactSum(self.form) for _ in range(workers)]
        states = {}
        for position, client in enumerate(cohort):
            update, states[client.client] = self.update(client)
            sums[position % workers].add(update)
        self.own.update(states)
        count = sum(part.count for part in sums)
        return ExactSum.total(self.form, [part.accumulator for part in sums], count)

    def round(self, cohort: Sequence[int] | None = None, *, workers: int = 1) -> None:
        chosen = range(len(self.clients)) if cohort is None else cohort
        total = self.total([self.clients[c] for c in chosen], workers=workers)
        self.state = self.algorithm.merge(self.program, self.state, total)
        self.number += 1

    def run(self, rounds: int) -> Array:
        """Parameters after some rounds with everybody."""
        for _ in range(rounds):
            self.round()
        return self.vector

    @property
    def vector(self) -> Array:
        result: Array = self.state.vector.double().numpy()
        return result

    def personal(self, client: int) -> tuple[Tensor, Tensors]:
        return self.algorithm.personal(self.program, self.state, self.own.get(client))


def bowls(
    algorithm: Algorithm,
    clients: Sequence[Bowl] = BOWLS,
    *,
    steps: int = 0,
    lr: float = 0.1,
    batch_size: int = 0,
    plan: str = "interpreter",
) -> Federation:
    """A federation of quadratics; `steps` 0 is one epoch."""
    work = LocalWork(epochs=1, steps=steps, batch_size=batch_size, lr=lr)
    return Federation(
        algorithm, quadratic(), work, [b.data(number) for number, b in enumerate(clients)], plan=plan
    )


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether two dictionaries of tensors are equal bit for bit."""
    return first.keys() == second.keys() and all(
        first[n].dtype == second[n].dtype and torch.equal(first[n], second[n]) for n in first
    )


def tensors_of(state: ServerState) -> Tensors:
    return {"vector": state.vector, **state.buffers, **state.extra}


def copied(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def total_of(**terms: tuple[Sequence[float], float]) -> Total:
    """A total with given means and weights; three updates."""
    sums = {name: torch.tensor(mean, dtype=torch.float64) * weight for name, (mean, weight) in terms.items()}
    return Total(sums, {name: weight for name, (_, weight) in terms.items()}, 3)
