"""The workers backend: one single-threaded process per core, a shared model, a running sum each.

The parent writes the model into shared memory once a round; workers take clients from one shared counter,
largest first, and add into their own sum, which the parent reads in place. Only positions and failures
travel through pipes. Integer sums make the split among workers invisible in the result.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mycelia.engine.algorithms import Message
from mycelia.engine.environment import resident
from mycelia.engine.errors import MyceliaError
from mycelia.engine.heap import keep_heap
from mycelia.engine.metrics import Metrics
from mycelia.engine.schema import Role
from mycelia.engine.sums import ExactSum, Total
from mycelia.simulations.backends.base import COLUMNS, Backend, Failure, Outcomes, Packed, Progress, quiet
from mycelia.simulations.backends.replica import Replica, Task
from mycelia.simulations.backends.shared import Layout, SharedTensors

__all__ = ["Workers"]

_TELL_S = 0.1
_START_S = 300.0  # imports on a busy machine


@dataclass(frozen=True)
class _Shared:
    path: Path
    layout: Layout
    extra: tuple[str, ...]


class Workers(Backend):
    """Trains in worker processes.

    Args:
        task: what to do.
        extra: example of the message's extra tensors, by name.
        workers: number of processes; 0 takes one per core.
        deadline_s: most seconds one call may take.

    Raises:
        MyceliaError: a worker could not start, died, or outran the deadline.
    """

    name = "workers"

    def __init__(
        self,
        task: Task,
        extra: dict[str, torch.Tensor],
        *,
        workers: int = 0,
        deadline_s: float = 3600.0,
    ) -> None:
        self.workers = workers or _cores()
        self._task, self._deadline_s, self._fresh = task, deadline_s, True
        program = task.program
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "vector": ((program.dimension,), program.flatten(program.init()[0]).dtype),
            "clients": ((task.max_cohort,), torch.int64),
            "table": ((task.max_cohort, len(COLUMNS)), torch.float64),
        }
        for entry in program.schema.of(Role.BUFFER, Role.COUNTER):
            tensors[f"buffer/{entry.name}"] = (entry.shape, entry.dtype)
        for name, tensor in extra.items():
            tensors[f"extra/{name}"] = (tuple(tensor.shape), tensor.dtype)
        for worker in range(self.workers):
            tensors[f"sum/{worker}"] = ((task.form.size,), torch.int64)
        if task.packed is not None:
            kind = torch.float64 if task.packed.double else torch.float32
            tensors["packed/vectors"] = ((task.max_cohort, task.packed.size), kind)
            tensors["packed/whole"] = ((task.max_cohort, 1 + task.packed.slots), torch.int64)
        shared = _Shared(task.folder / "model", Layout.of(tensors), tuple(extra))
        self._tensors = SharedTensors(shared.path, shared.layout, create=True).tensors
        context = get_context("spawn")
        self._counter = context.Value("q", 0)
        self._processes: list[Any] = []
        self._pipes: list[Connection[Any, Any]] = []
        self._count = 0
        for worker in range(self.workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(worker, theirs, self._counter, task, shared, os.getpid()),
                name=f"mycelia-worker-{worker}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            self.chunks = self._gather(_START_S)[0]
        except BaseException:
            self.close()
            raise

    def train(self, message: Message, clients: Sequence[int], progress: Progress = quiet) -> Outcomes:
        """Train these clients; workers take them in the order given."""
        count = len(clients)
        self._write(message)
        self._tensors["clients"][:count] = torch.as_tensor(np.asarray(clients, dtype=np.int64))
        table = self._tensors["table"][:count]
        table.zero_()
        self._counter.value = 0
        failures: list[Failure] = []

        def tell() -> None:
            progress(min(int(self._counter.value), count), count)

        for part in self._call(("train", message.round, count, self._fresh), tell):
            failures.extend(part)
        progress(count, count)
        self._fresh = False
        self._count += count - len(failures)
        packed = _packed(self._tensors)
        if packed is not None:
            packed = Packed(packed.vectors[:count].copy(), packed.whole[:count].copy())
        return Outcomes(table.numpy().copy(), tuple(sorted(failures, key=lambda f: f.position)), packed)

    def total(self) -> Total:
        """The sum over all workers."""
        if self._fresh:  # nobody was trained: the accumulators still hold the round before
            for worker in range(self.workers):
                self._tensors[f"sum/{worker}"].zero_()
        parts = [self._tensors[f"sum/{worker}"] for worker in range(self.workers)]
        total = ExactSum.total(self._task.form, parts, self._count)
        self._fresh, self._count = True, 0
        return total

    def test(self, message: Message) -> Metrics:
        """Metrics on the test set, its parts shared among the workers."""
        self._write(message)
        self._counter.value = 0
        metrics = Metrics(classes=self._task.classes)
        for part in self._call(("test", message.round)):
            metrics = metrics + part
        return metrics

    def spread(self, message: Message, clients: Sequence[int], limit: int) -> dict[int, dict[str, float]]:
        """Metrics by client, the clients shared among the workers."""
        found: dict[int, dict[str, float]] = {}
        self._write(message)
        for first in range(0, len(clients), self._task.max_cohort):
            part = np.asarray(clients[first : first + self._task.max_cohort], dtype=np.int64)
            self._tensors["clients"][: len(part)] = torch.as_tensor(part)
            self._counter.value = 0
            for result in self._call(("spread", message.round, len(part), limit)):
                found.update(result)
        return {int(client): found[int(client)] for client in clients}

    def memory_bytes(self) -> int:
        """Resident memory of the workers; what they share counts once each."""
        return sum(resident(process.pid) for process in self._processes)

    def close(self) -> None:
        """Stop the workers."""
        for pipe in self._pipes:
            with suppress(OSError):  # it may have gone already
                pipe.send(("close",))
            pipe.close()
        self._pipes = []
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes = []

    def _write(self, message: Message) -> None:
        self._tensors["vector"].copy_(message.vector)
        for name, tensor in message.buffers.items():
            self._tensors[f"buffer/{name}"].copy_(tensor)
        for name, tensor in message.extra.items():
            self._tensors[f"extra/{name}"].copy_(tensor)

    def _call(self, command: tuple[Any, ...], tell: Callable[[], None] = lambda: None) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(command)
        return self._gather(self._deadline_s, tell)

    def _gather(self, seconds: float, tell: Callable[[], None] = lambda: None) -> list[Any]:
        """One answer from every worker, in worker order."""
        answers: dict[int, Any] = {}
        pending = {id(pipe): worker for worker, pipe in enumerate(self._pipes)}
        ends = time.monotonic() + seconds
        while pending:
            left = ends - time.monotonic()
            ready = wait(
                [self._pipes[worker] for worker in pending.values()], timeout=max(0.0, min(left, _TELL_S))
            )
            if not ready and left > 0:
                tell()
                continue
            if not ready:
                raise MyceliaError(
                    f"no answer within {seconds:.0f} s",
                    rule="every wait has a deadline",
                    fix="raise round.budget_s, or look for a client that hangs",
                    who=f"worker {min(pending.values())}",
                )
            for found in ready:
                worker = pending.pop(id(found))
                try:
                    kind, answer = self._pipes[worker].recv()
                except (EOFError, OSError) as error:
                    self._processes[worker].join(timeout=5)
                    code = self._processes[worker].exitcode
                    raise MyceliaError(
                        f"the process died with exit code {code}",
                        fix="a negative code is a signal: -9 is often the kernel short of memory; "
                        "resume the run, with fewer workers if memory is short",
                        who=f"worker {worker}",
                    ) from error
                if kind == "error":
                    raise answer
                answers[worker] = answer
        return [answers[worker] for worker in range(len(self._pipes))]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _serve(worker: int, pipe: Connection, counter: Any, task: Task, shared: _Shared, parent: int) -> None:
    """The worker's loop: one command, one answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the parent decides
    torch.set_num_threads(1)
    keep_heap()
    try:
        tensors = SharedTensors(shared.path, shared.layout).tensors
        replica = Replica(task, tensors[f"sum/{worker}"])
        pipe.send(("ready", replica.chunks()))
        while True:
            command = pipe.recv()
            if command[0] == "close":
                return
            message = _message(tensors, shared, command[1])
            pipe.send(("done", _answer(command, replica, message, tensors, counter, parent)))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return  # the parent has gone
    except BaseException as error:
        known = isinstance(error, MyceliaError)
        told = error if known else MyceliaError(traceback.format_exc(), who=f"worker {worker}")
        with suppress(OSError):  # the parent may have gone meanwhile
            pipe.send(("error", told))


def _answer(
    command: tuple[Any, ...],
    replica: Replica,
    message: Message,
    tensors: dict[str, torch.Tensor],
    counter: Any,
    parent: int,
) -> Any:
    if command[0] == "train":
        _, _, count, fresh = command
        if fresh:
            replica.sum.reset()
        clients, table = tensors["clients"].numpy(), tensors["table"].numpy()
        packed = _packed(tensors)
        failures = []
        while (position := _take(counter)) < count and os.getppid() == parent:
            failure = replica.train(message, int(clients[position]), table[position], packed, position)
            if failure is not None:
                failures.append(replace(failure, position=position))
        return failures
    if command[0] == "test":
        metrics = Metrics(classes=replica.task.classes)
        while (chunk := _take(counter)) < replica.chunks():
            metrics = metrics + replica.test(message, chunk)
        return metrics
    _, _, count, limit = command
    found = {}
    while (position := _take(counter)) < count:
        client = int(tensors["clients"][position])
        found[client] = replica.spread(message, client, limit)
    return found


def _packed(tensors: dict[str, torch.Tensor]) -> Packed | None:
    """Where packed updates go, as arrays on the shared memory."""
    if "packed/vectors" not in tensors:
        return None
    return Packed(tensors["packed/vectors"].numpy(), tensors["packed/whole"].numpy())


def _take(counter: Any) -> int:
    with counter.get_lock():
        value = int(counter.value)
        counter.value = value + 1
    return value


def _message(tensors: dict[str, torch.Tensor], shared: _Shared, round: int) -> Message:
    buffers = {n.removeprefix("buffer/"): t for n, t in tensors.items() if n.startswith("buffer/")}
    return Message(
        tensors["vector"], buffers, {name: tensors[f"extra/{name}"] for name in shared.extra}, round
    )
