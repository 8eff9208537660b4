"""A careful hand loop in plain eager PyTorch: one single-threaded worker process per core, FedAvg on workload S1.

What someone who knows PyTorch would write for this one job. Data and weights lie in shared memory; each worker
keeps one model whose parameters are views of a flat vector, resets it by one copy, and adds each trained client
to its own flat sum; a round sends only client ids through a pipe. No compiler, no framework.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection

import measure
import torch
import torch.multiprocessing as mp
import workload
from measure import Clock, Settings
from torch import Tensor, nn


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
    """A worker: for each (round, ids) received, sums the trained weights of these clients and answers; None ends."""
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
            epoch = workload.client_epoch(data, settings.seed, round_index, client, settings.full_participation)
            workload.train_client(model, parameters, *epoch)
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


def main() -> None:
    """Runs the command line."""
    settings = measure.parse(__doc__.splitlines()[0])
    clock = Clock()
    torch.set_num_threads(1)
    context = mp.get_context("spawn")
    model = workload.build_model(settings.model, settings.seed)
    weights = flatten(model)
    images, labels = workload.train_data(settings.clients)
    shared = Shared(weights, torch.zeros(settings.processes, weights.numel()), images, labels)
    for tensor in vars(shared).values():
        tensor.share_memory_()
    pipes, workers = [], []
    for rank in range(settings.processes):
        ours, theirs = context.Pipe()
        worker = context.Process(target=train_share, args=(rank, settings, shared, theirs), daemon=True)
        worker.start()
        pipes.append(ours)
        workers.append(worker)
    for pipe in pipes:
        pipe.recv()
    for round_index in range(settings.rounds):
        clock.begin_round()
        run_round(round_index, settings, shared, pipes)
        clock.end_round()
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send(None)
        worker.join()
    measure.emit(measure.result("loop", settings, clock, model))


if __name__ == "__main__":
    main()
