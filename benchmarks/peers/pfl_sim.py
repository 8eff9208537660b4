"""Workload S1 on `pfl` (Apple's pfl-research): one process or, with `--processes 2`, `torchrun` on gloo.

Their best setting for small models on a CPU: in-memory tensor datasets, one thread per process, no platform
metrics, no evaluation of clients after the first round (pfl always evaluates in round 0, which is not timed).
PyTorch's plain, fused and foreach SGD cost the same here. Cohorts come from the workload's generator instead
of pfl's sampler, and a member's epoch is handed over in its order, since pfl itself does not shuffle.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys

import measure
import numpy as np
import torch
import workload
from measure import Clock, Settings
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F

DESCRIPTION = "Workload S1 on pfl, in one process or under torchrun."
_LAUNCHED = "TORCHELASTIC_RUN_ID"


class Trainable(nn.Module):
    """The workload's module with the two methods that pfl asks for."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of a batch."""
        return F.cross_entropy(self.network(images), labels)

    @torch.no_grad()
    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Weighted]:
        """Summed loss and number of examples."""
        loss = F.cross_entropy(self.network(images), labels, reduction="sum")
        return {"loss": Weighted(loss.item(), len(labels))}


class Members:
    """pfl's user sampler: the next (round, client) at each call, cohort after cohort."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._round = 0
        self._waiting: list[tuple[int, int]] = []

    def __call__(self) -> tuple[int, int]:
        """The next member. pfl calls this for every process and keeps its own share."""
        if not self._waiting:
            cohort = self._settings.cohort_of(self._round)
            self._waiting = [(self._round, client) for client in reversed(cohort)]
            self._round += 1
        return self._waiting.pop()


class Timer(TrainingProcessCallback):
    """Times the central iterations, each from the end of the one before."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """The first round starts."""
        self._clock.begin_round()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """A round ends and the next one starts."""
        self._clock.end_round()
        self._clock.begin_round()
        return False, Metrics()


def federation(settings: Settings) -> FederatedDataset:
    """The population: each member's epoch is one shuffled (or file-ordered) in-memory tensor dataset."""
    data = workload.train_data(settings.clients)

    def dataset(member: tuple[int, int]) -> PyTorchTensorDataset:
        round_index, client = member
        epoch = settings.epoch_of(data, round_index, client)
        return PyTorchTensorDataset(epoch, user_id=str(client))

    return FederatedDataset(dataset, Members(settings))


def train(settings: Settings, clock: Clock) -> nn.Module:
    """Runs FedAvg for the asked rounds; returns the merged module."""
    network = workload.build_model(settings.model, settings.seed)
    trainable = Trainable(network)
    model = PyTorchModel(
        trainable,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(trainable.parameters(), lr=1.0),
    )
    population = federation(settings)
    FederatedAveraging().run(
        backend=SimulatedBackend(training_data=population, val_data=population),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=settings.rounds,
            evaluation_frequency=settings.rounds + 1,
            train_cohort_size=settings.cohort,
            val_cohort_size=None,
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=workload.LEARNING_RATE,
            local_batch_size=workload.BATCH_SIZE,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Timer(clock)],
        send_metrics_to_platform=False,
    )
    return network


def launch(processes: int) -> int:
    """Runs this command line again under torchrun, on the loopback device only; returns its exit status."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(processes), *sys.argv),
    ]
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return subprocess.run(command, check=False, env=os.environ | environment).returncode


def main() -> None:
    """Runs the command line."""
    settings = measure.settings_from(measure.command_line(DESCRIPTION, processes=1).parse_args())
    if settings.cohort % settings.processes:
        sys.exit("pfl deals a cohort to its processes in turn: --processes must divide the cohort")
    if settings.processes > 1 and _LAUNCHED not in os.environ:
        sys.exit(launch(settings.processes))
    clock = Clock()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    np.random.seed(settings.seed)  # noqa: NPY002 - pfl's processes must share NumPy's global state
    asyncio.set_event_loop(asyncio.new_event_loop())
    network = train(settings, clock)
    if int(os.environ.get("RANK", "0")) == 0:
        measure.emit(measure.result(f"pfl_{settings.processes}", settings, clock, network))
    if settings.processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
