"""A careful hand loop for workload S1 in eager PyTorch: one single-threaded worker process per core, FedAvg.

What someone who knows PyTorch would write for this one job. Data and weights lie in shared memory; each
worker keeps one model whose parameters are views of a flat vector, resets it by one copy, and adds each
trained client to its own flat sum; a round sends only client ids through a pipe. No compiler, no framework.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import measure
import torch
import torch.multiprocessing as mp
import workload
from measure import Clock, Settings
from torch import Tensor, nn

DESCRIPTION = "A careful hand loop in eager PyTorch, one worker process per core."


@dataclass(frozen=True)
class Shared:
    """Tensors in shared memory: weights (P), the workers' sums (workers x P), images and labels."""

    weights: Tensor
    sums: Tensor
    images: Tensor
    labels: Tensor


def flatten(model: nn.Module) -> Tensor:
    """Moves the parameters into one flat vector (P) of which they become views, in their own order."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat


def train_share(rank: int, settings: Settings, shared: Shared, pipe: Connection) -> None:
    """A worker: for each (round, ids) it gets, sums the trained weights of these clients; None ends it."""
    torch.set_num_threads(1)
    model = workload.build_model(settings.model, settings.seed)
    flat, total, data = flatten(model), shared.sums[rank], (shared.images, shared.labels)
    parameters = list(model.parameters())
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        round_index, ids = task
        total.zero_()
        for client in ids:
            flat.copy_(shared.weights)
            images, labels = settings.epoch_of(data, round_index, client)
            workload.train_client(model, parameters, images, labels)
            total.add_(flat)
        pipe.send(len(ids))


def run_round(round_index: int, settings: Settings, shared: Shared, pipes: list[Connection]) -> None:
    """Deals the cohort to the workers, waits for all and merges with equal weights."""
    cohort = settings.cohort_of(round_index)
    for rank, pipe in enumerate(pipes):
        pipe.send((round_index, cohort[rank :: len(pipes)]))
    trained = sum(pipe.recv() for pipe in pipes)
    torch.sum(shared.sums, 0, out=shared.weights)
    shared.weights.div_(trained)


def start_workers(settings: Settings, shared: Shared) -> dict[Connection, BaseProcess]:
    """Spawns the workers and waits until each has its model. A dead worker ends its pipe, so the wait."""
    context = mp.get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    for rank in range(settings.processes):
        ours, theirs = context.Pipe()
        worker = context.Process(target=train_share, args=(rank, settings, shared, theirs), daemon=True)
        worker.start()
        theirs.close()
        workers[ours] = worker
    for pipe in workers:
        pipe.recv()
    return workers


def main() -> None:
    """Runs the command line."""
    settings = measure.settings_from(measure.command_line(DESCRIPTION).parse_args())
    clock = Clock()
    torch.set_num_threads(1)
    model = workload.build_model(settings.model, settings.seed)
    weights = flatten(model)
    sums = torch.zeros(settings.processes, weights.numel())
    shared = Shared(weights, sums, *workload.train_data(settings.clients))
    for tensor in vars(shared).values():
        tensor.share_memory_()
    workers = start_workers(settings, shared)
    for round_index in range(settings.rounds):
        clock.begin_round()
        run_round(round_index, settings, shared, list(workers))
        clock.end_round()
    for pipe, worker in workers.items():
        pipe.send(None)
        worker.join()
    measure.emit(measure.result("loop", settings, clock, model))


if __name__ == "__main__":
    main()
