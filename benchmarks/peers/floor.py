"""The floor: the local SGD steps of workload S1 and nothing else, in eager PyTorch on one thread.

No federation, no reset, no sum, no shuffle: batches are cut beforehand. What is left is what an eager step
costs here, so `seconds_per_round` (250 steps divided by the cores) is what no eager simulator can beat. The
model learns on as in ordinary SGD; its accuracy means nothing for a federation and is null.
"""

from __future__ import annotations

import statistics
import time

import measure
import torch
import workload
from measure import Clock, Settings
from torch import Tensor, nn

DESCRIPTION = "The eager PyTorch steps of workload S1 on one thread, and nothing else."


Batches = list[tuple[Tensor, Tensor]]


def cut_batches(settings: Settings) -> Batches:
    """The batches of the first cohort, 250 of them (images 10 x 1 x 28 x 28, labels 10)."""
    data = workload.train_data(settings.clients)
    epochs = [workload.client_data(data, client) for client in settings.cohort_of(0)]
    return [
        (x.clone(), y.clone())
        for images, labels in epochs
        for x, y in zip(images.split(workload.BATCH_SIZE), labels.split(workload.BATCH_SIZE), strict=True)
    ]


def time_steps(model: nn.Module, batches: Batches, rounds: int, clock: Clock) -> list[float]:
    """Takes every batch once a round; returns the milliseconds per step of each round."""
    parameters = list(model.parameters())
    per_step = []
    for _ in range(rounds):
        clock.begin_round()
        before = time.perf_counter()
        for images, labels in batches:
            workload.sgd_step(model, parameters, images, labels)
        per_step.append((time.perf_counter() - before) / len(batches) * 1e3)
    return per_step


def main() -> None:
    """Runs the command line."""
    settings = measure.settings_from(measure.command_line(DESCRIPTION).parse_args())
    clock = Clock()
    torch.set_num_threads(1)
    model = workload.build_model(settings.model, settings.seed)
    batches = cut_batches(settings)
    per_step = time_steps(model, batches, settings.rounds, clock)
    steps = settings.cohort * workload.STEPS_PER_CLIENT
    clock.rounds = [value * steps / 1e3 / settings.processes for value in per_step]
    ms_per_step = statistics.fmean(per_step[1:] or per_step)
    figures = measure.result("floor", settings, clock, model, ms_per_step=ms_per_step, steps=steps)
    measure.emit(figures | {"accuracy": None})


if __name__ == "__main__":
    main()
