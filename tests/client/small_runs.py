"""Small federations with clients that are simulated and deployed: the same settings, data and messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mycelia.aggregator.wire.payload import write_tensors
from mycelia.aggregator.wire.settings import TaskSettings, message_entries
from mycelia.aggregator.wire.updates_form import MODEL_ROLES
from mycelia.client.training import Job, Local, Workplace
from mycelia.engine.algorithms import Message
from mycelia.engine.config import Named, load_config
from mycelia.engine.data import Dataset
from mycelia.engine.schema import Schema
from mycelia.privacy.client_plans import ClientPlan
from mycelia.privacy.federated import RecordRelease
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.pipeline import Stage
from mycelia.simulations.backends.base import COLUMNS, Packed
from mycelia.simulations.backends.inline import Inline
from mycelia.simulations.backends.replica import Replica
from mycelia.simulations.guard import Guard, open_guard
from mycelia.simulations.preparation import Prepared, open_backend, prepare
from mycelia.simulations.scenario import Scenario

ROUNDS = 3


def scenario(**changes: Any) -> Scenario:
    """Six clients with some of the digits each; all of them in a round."""
    given = {
        "model": {"name": "mlp", "hidden": [8]},
        "data": "digits",
        "algorithm": "fedavg",
        "rounds": ROUNDS,
        "cohort": 6,
        "population": {"clients": 6, "examples_per_client": 25},
        "partition": {"name": "dirichlet", "alpha": 0.5, "min_size": 12, "test_fraction": 0.2},
        "local": {"epochs": 2, "batch_size": 10, "lr": 0.1},
        "backend": "inline",
        "seed": 11,
    } | changes
    return load_config(Scenario, given, [])


def settings_of(prepared: Prepared) -> TaskSettings:
    """What a server says of this run."""
    given, sizes = prepared.scenario, prepared.partition.sizes()
    return TaskSettings(
        algorithm=given.algorithm,
        loss=given.loss_for(prepared.dataset.classes),
        local=given.local,
        update=given.update,
        max_weight=prepared.max_weight,
        seed=given.seed,
        rounds=given.rounds,
        cohort=prepared.cohort,
        population=prepared.partition.clients,
        examples=int(sizes.sum()),
        privacy=given.privacy,
        packing=None if prepared.secure is None else prepared.secure.packing,
    )


def own_data(prepared: Prepared, client: int) -> Dataset:
    """What one client holds, as its own device would load it."""
    data, partition = prepared.dataset, prepared.partition
    return Dataset(
        f"of client {client}",
        data.train.take(partition.indices(client)),
        data.train.take(partition.test_indices(client)),
        data.classes,
    )


@dataclass
class Side:
    """One client's device, without a network."""

    job: Job
    settings: TaskSettings

    @classmethod
    def of(cls, prepared: Prepared, client: int, folder: Path, **more: Any) -> Side:
        settings = TaskSettings.decode(settings_of(prepared).encode())
        source = NoiseSource.seeded(settings.seed)

        def record(plan: ClientPlan, source: NoiseSource) -> Stage:
            return RecordRelease(plan.ledgers(folder, source), plan.event, plan.limits.uses)

        given = prepared.scenario.model
        place = Workplace(
            own_data(prepared, client), Named(name=given.name, **given.options), client + 1, **more
        )
        return cls(Job(settings, place, Local(folder / "states", source, record)), settings)


def payloads(message: Message, job: Job) -> tuple[bytes, bytes | None]:
    """What a server sends in this round: MODEL, and MESSAGE where there is one."""
    tensors = job.program.unflatten(message.vector) | message.buffers
    model = b"".join(write_tensors(tensors, job.program.schema, MODEL_ROLES))
    if not message.extra:
        return model, None
    more = message_entries(message.extra)
    return model, b"".join(write_tensors(dict(message.extra), Schema(()), (), more))


@dataclass
class Simulated:
    """The same run in a simulation, whose clients are trained one at a time."""

    prepared: Prepared
    replica: Replica
    guard: Guard | None

    def train(
        self, message: Message, client: int
    ) -> tuple[torch.Tensor, np.ndarray[Any, Any], Packed | None]:
        """The integers that one client adds to the sum, its row, and what it packs."""
        self.replica.sum.reset()
        row = np.zeros(len(COLUMNS))
        shape = self.replica.task.packed
        packed = None if shape is None else Packed.empty(1, shape)
        failure = self.replica.train(message, client, row, packed)
        assert failure is None, failure
        return self.replica.sum.accumulator.clone(), row, packed


@contextmanager
def simulated(given: Scenario, folder: Path) -> Iterator[Simulated]:
    prepared = prepare(given)
    folder.mkdir(parents=True)
    guard = None
    if prepared.privacy is not None:
        guard = open_guard(prepared.privacy, prepared.form, folder, given.seed, None)
    with open_backend(prepared, folder, guard) as backend:
        assert isinstance(backend, Inline)
        try:
            yield Simulated(prepared, backend._replica, guard)
        finally:
            if guard is not None:
                guard.close()
