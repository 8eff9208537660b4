"""The client half of a scenario in a Flower ClientApp.

In Flower's simulation a process acts for many nodes in turn. It has one replica of the model; what belongs to
a node alone comes with its context.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict
from flwr.app import Message as FlowerMessage

from mycelia.aggregator.private_plans import ServerPlan
from mycelia.engine.algorithms import Message
from mycelia.engine.errors import ConfigError, MyceliaError
from mycelia.engine.heap import keep_heap
from mycelia.engine.sums import ExactSum, Update
from mycelia.privacy.pipeline import Pipeline
from mycelia.simulations.backends.base import COLUMNS
from mycelia.simulations.backends.replica import Replica, Task
from mycelia.simulations.backends.shared import shared_folder
from mycelia.simulations.flower.records import (
    ContextStore,
    Work,
    error_records,
    failure_records,
    read_message,
    read_work,
    update_records,
)
from mycelia.simulations.preparation import Prepared, prepare
from mycelia.simulations.scenario import Scenario

__all__ = ["digest", "evaluate", "prepared_for", "query", "replica_of", "train"]


@lru_cache(maxsize=2)
def digest(text: str) -> str:
    """Hash of a scenario's settings as JSON, but for the backend, which changes no result."""
    scenario = Scenario.model_validate_json(text)
    return sha256(scenario.model_dump_json(exclude={"backend"}).encode()).hexdigest()


def prepared_for(text: str, plan: str = "") -> Prepared:
    """A scenario's parts, made once in a process.

    Args:
        text: the scenario as JSON.
        plan: how local steps run; empty: as the scenario says, which the ServerApp then tells the others.
    """
    if Scenario.model_validate_json(text).plan == "tune":
        return _prepared(text, plan)  # measured once, by the server
    found = _prepared(text, "")
    return found if plan in ("", found.plan.name) else _prepared(text, plan)


@lru_cache(maxsize=2)
def _prepared(text: str, plan: str) -> Prepared:
    return prepare(Scenario.model_validate_json(text), plan)


def replica_of(prepared: Prepared) -> Replica:
    """A process's copy of the model, on examples mapped into memory."""
    dataset = prepared.dataset
    arrays = (dataset.train.inputs, dataset.train.targets, dataset.test.inputs, dataset.test.targets)
    folder = shared_folder(sum(array.nbytes for array in arrays), Path(tempfile.gettempdir()))
    clipping = (
        Pipeline((prepared.privacy.clipping(),)) if isinstance(prepared.privacy, ServerPlan) else Pipeline()
    )
    try:
        dataset.train.save(folder / "train")
        dataset.test.save(folder / "test")
        prepared.partition.save(folder / "partition")
        return Replica(
            Task(
                program=prepared.program,
                algorithm=prepared.algorithm,
                work=prepared.work,
                form=prepared.form,
                seed=prepared.scenario.seed,
                plan=prepared.plan.name,
                folder=folder,
                states=folder,  # a node keeps its own
                classes=dataset.classes,
                max_cohort=1,
                batch_shape=prepared.batch_shape,
                package=prepared.package,
                pipeline=clipping,
                change_of=prepared.change_of,
            )
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the process holds its maps


def query(text: str, message: FlowerMessage, context: Context) -> FlowerMessage:
    """Which client this node is; its process gets ready meanwhile, so that no round has to wait for that."""

    def answer() -> RecordDict:
        _opened(text, message)
        said = {name: _setting(context, name) for name in ("partition-id", "num-partitions")}
        return RecordDict({"node": ConfigRecord(dict(said))})

    return _answered(message, answer)


def train(text: str, message: FlowerMessage, context: Context) -> FlowerMessage:
    """One client's part of a round; its update, or why there is none."""

    def answer() -> RecordDict:
        device, work = _opened(text, message)
        client, asked = device.turn_to(work, message, context)
        row = np.zeros(len(COLUMNS))
        failure = device.replica.train(asked, client, row)
        if failure is not None:
            return failure_records(failure)
        found = update_records(device.sum.taken)
        found["seconds"] = MetricRecord({"seconds": float(row[-1])})
        return found

    return _answered(message, answer)


def evaluate(text: str, message: FlowerMessage, context: Context) -> FlowerMessage:
    """Metrics of one client's own model on its own test examples."""

    def answer() -> RecordDict:
        device, work = _opened(text, message)
        client, asked = device.turn_to(work, message, context)
        found = device.replica.spread(asked, client, work.limit)
        return RecordDict({"metrics": MetricRecord({name: float(value) for name, value in found.items()})})

    return _answered(message, answer)


class _Taken(ExactSum):
    """A sum of one: it checks an update as the server will, and keeps it to be sent."""

    taken: Update

    def add(self, update: Update) -> None:
        """Check an update and keep it."""
        self.reset()
        super().add(update)
        self.taken = update


class _Device:
    """What a process that trains holds for one scenario and plan."""

    def __init__(self, text: str, plan: str) -> None:
        torch.set_num_threads(1)  # as everywhere: parallelism is across clients
        keep_heap()
        self.prepared = prepared_for(text, plan)
        self.replica = replica_of(self.prepared)
        self.sum = self.replica.sum = _Taken(self.prepared.form)
        program, algorithm = self.prepared.program, self.prepared.algorithm
        state = algorithm.start(program)
        extra = {**algorithm.message_extra(state), **self.replica.task.pipeline.begin()}
        self.like = Message(state.vector, state.buffers, extra, 0)

    def turn_to(self, work: Work, message: FlowerMessage, context: Context) -> tuple[int, Message]:
        """Act for a node: its own states are looked up from now on. Its client's id, and what it was sent."""
        self.replica.store = ContextStore(context.state, work.void)
        return _setting(context, "partition-id"), read_message(message.content, work.round, self.like)


_device = lru_cache(maxsize=1)(_Device)


def _opened(text: str, message: FlowerMessage) -> tuple[_Device, Work]:
    """The process's device, and what it is asked.

    Raises:
        ConfigError: the two ends do not mean the same federation.
    """
    work = read_work(message.content)
    _agree("scenario", digest(text), work.scenario_sha256)
    device = _device(text, work.plan)
    _agree("partition", device.prepared.partition.sha256, work.partition_sha256)
    _agree("model", device.prepared.program.schema.sha256, work.schema_sha256)
    return device, work


def _agree(what: str, ours: str, theirs: str) -> None:
    if ours != theirs:
        raise ConfigError(
            f"the ClientApp's {what} has the hash {ours[:12]}, the ServerApp's {theirs[:12]}",
            rule="both apps come from flower_apps with one scenario, on the same data and versions",
            fix="start the run again with the same app on every node",
            who="Flower ClientApp",
        )


def _setting(context: Context, name: str) -> int:
    found = context.node_config.get(name)
    if not isinstance(found, int) or isinstance(found, bool):
        raise ConfigError(
            f"the node's configuration has {name} = {found!r}",
            rule="a node is told which client it is",
            fix="start the SuperNode with --node-config 'partition-id=… num-partitions=…'",
            who=f"Flower node {context.node_id}",
        )
    return found


def _answered(message: FlowerMessage, answer: Callable[[], RecordDict]) -> FlowerMessage:
    """The reply; errors travel with their four parts."""
    try:
        found = answer()
    except MyceliaError as error:
        found = error_records(error)
    return FlowerMessage(found, reply_to=message)
