"""A server with real runs, and devices that compute without training."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch

from mycelia.aggregator.config import FederationConfig
from mycelia.aggregator.deadlines import Deadlines
from mycelia.aggregator.merging import merge
from mycelia.aggregator.runs.plans import Population, RunPlan, plan_run
from mycelia.aggregator.runs.run import RunResult
from mycelia.aggregator.runs.server import Places, Server, Work
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.metrics import MetricsReport
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.payload import check_tensors, read_tensors, write_tensors
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.sinks import MemorySink
from mycelia.aggregator.wire.update_header import UpdateHeader
from mycelia.aggregator.wire.updates_form import MODEL_ROLES
from mycelia.client.identity import DeviceIdentity
from mycelia.client.transport import Came, Event, Lost, Place, Received, Sent, Transport
from mycelia.engine.config import load_config
from mycelia.engine.program import Program
from mycelia.engine.recipe import Recipe
from mycelia.engine.schema import model_sha256
from mycelia.engine.sums import ExactSum, Term, Total, Update
from mycelia.privacy.pipeline import Pipeline
from tests.aggregator.connections import WAITS, World

_Result = TypeVar("_Result")

PATIENT: Final = Deadlines(0.2, 20.0, 40.0, 80.0, 100.0, 120.0, 140.0, 160.0, WAITS)
"""Long enough for a busy machine: rounds close when all have answered."""


class Built(Recipe):
    """A recipe that is followed once in a process."""

    def __call__(self) -> Program:
        found: Program | None = vars(self).get("built")
        if found is None:
            found = super().__call__()
            object.__setattr__(self, "built", found)
        return found


RECIPE: Final = Built(
    "mlp", {"hidden": [4]}, "cross-entropy", (3,), 2, (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
)
SECURE: Final = {"secure_sum": {"threat": "passive", "corrupt": 0.0, "dropout": 0.3}}


def run(work: Coroutine[Any, Any, _Result], seconds: float = 25.0) -> _Result:
    """A test in an event loop; one that hangs fails."""

    async def patiently() -> _Result:
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(patiently())


def deadlines(**changes: Any) -> Deadlines:
    """Those of a patient server, but for some."""
    waits = {name: changes.pop(name) for name in WAITS._fields if name in changes}
    return PATIENT._replace(waits=WAITS._replace(**waits), **changes)


def plan(
    name: str = "study",
    *,
    clients: int = 3,
    recipe: Recipe = RECIPE,
    largest: int = 10,
    hidden: int = 4,
    **settings: Any,
) -> RunPlan:
    """A run of two rounds with all of the clients."""
    if hidden != 4:
        recipe = replace(recipe, options={"hidden": [hidden]})
    table: dict[str, Any] = {
        "model": {"name": "mlp", "hidden": [hidden]}, "data": "none", "algorithm": "fedavg", "rounds": 2,
        "cohort": clients, "round": {"budget_s": 20.0}, "evaluation": {"clients": 0},
    }  # fmt: skip
    if "privacy" not in settings:
        table["update"] = {"max_weight": 10.0}
    config = load_config(FederationConfig, table | settings)
    return plan_run(config, recipe, name=name, purpose=name, population=Population(clients, largest))


@contextlib.asynccontextmanager
async def serving(
    world: World,
    folder: Path,
    *plans: RunPlan,
    store: str = "",
    blobs: Path | None = None,
    times: Deadlines = PATIENT,
    listen: str = "127.0.0.1:0",
    **more: Any,
) -> AsyncIterator[tuple[Server, int]]:
    places = Places(store or f"sqlite:///{folder}/mycelia.db", blobs or folder / "blobs", folder / "own")
    works = [Work(each, folder / "runs" / each.name) for each in plans]
    server = Server(world.keys, world.document(), works, places, deadlines=lambda plan: times, **more)
    try:
        port = await server.start(listen)
        yield server, port
    finally:
        await server.stop(0.0)


class Quick(random.Random):
    """Dice of a device that does not wait long."""

    def uniform(self, a: float, b: float) -> float:
        return min(b, 0.05)


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass
class Habits:
    """What a device does otherwise than others.

    Attributes:
        change: from a model to its update; None: each tensor plus the device's id.
        weight: of its updates.
        silent: which tasks it does not answer.
        fails: what it says instead of an update.
        declines: the field of its policy that does not allow a task.
        header: changes the header before it is signed.
        payload: changes the bytes that are sent.
        gate: waits for this before it sends an update.
        task: is told every task.
    """

    change: Change | None = None
    weight: float = 1.0
    silent: Callable[[Position], bool] = lambda at: False
    fails: str = ""
    declines: str = ""
    header: Callable[[UpdateHeader], UpdateHeader] = lambda header: header
    payload: Callable[[Payload], Payload] = lambda payload: payload
    gate: asyncio.Event | None = None
    task: Callable[[pb.Task], None] = lambda task: None


class Dummy:
    """A device whose update is the model plus its id."""

    def __init__(
        self,
        port: int,
        identity: DeviceIdentity,
        plan: RunPlan | Iterable[RunPlan],
        habits: Habits | None = None,
    ) -> None:
        plans = [plan] if isinstance(plan, RunPlan) else list(plan)
        self.plans = {each.name: each for each in plans}
        self.identity, self.client, self.habits = identity, identity.client, habits or Habits()
        self.transport = Transport([f"127.0.0.1:{port}"], identity, self._place, dice=Quick())
        self.outcomes: list[pb.Outcome] = []
        self.lost: list[Lost] = []
        self.sent: list[Position] = []
        self.delivered: dict[str, bytes] = {}
        self.tasks: dict[Position, pb.Task] = {}
        self.asked: list[Position] = []
        self.answers: dict[Position, tuple[Payload, pb.Offer]] = {}
        self.models: dict[Position, bytes] = {}
        self.done = asyncio.Event()
        self._jobs: set[asyncio.Task[None]] = set()

    def _place(self, offer: pb.Offer, manifest: Any) -> Place:
        return Place(MemorySink(manifest.size))

    async def run(self) -> None:
        async with self.transport as transport:
            async for event in transport:
                await self.handle(event)
                if self.done.is_set():
                    return

    async def handle(self, event: Event) -> None:
        match event:
            case Came(frame) if frame.HasField("task"):
                await self.task(Position.of(frame.task.at), frame.task)
            case Came(frame) if frame.HasField("outcome"):
                if frame.outcome not in self.outcomes:  # it is said again to those who come back
                    self.outcomes.append(frame.outcome)
                if frame.outcome.reason != "EQUIVOCATION":  # that is about another update
                    self.transport.forget(Position.of(frame.outcome.at))
            case Received(offer, sink) if offer.kind == pb.MODEL:
                at = Position.of(offer.at)
                self.models[at] = bytes(sink.read(0, offer.size))
                self._spawn(self.model(at))
            case Sent(offer):
                self.sent.append(Position.of(offer.at))
            case Lost():
                self.lost.append(event)
            case _:
                pass

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def task(self, at: Position, task: pb.Task) -> None:
        again = at in self.tasks
        self.tasks[at] = task
        self.asked.append(at)
        self.habits.task(task)
        if self._is_silent(at, task):
            return
        if task.work == pb.TRAIN and self.habits.declines:
            said = pb.Decline(
                at=at.to_wire(), reason="POLICY", field=self.habits.declines, asked="this", allowed="that"
            )
            self.transport.send(pb.ClientFrame(decline=said))
        elif task.work == pb.TRAIN and self.habits.fails:
            self.transport.send(
                pb.ClientFrame(decline=pb.Decline(at=at.to_wire(), reason=f"failed: {self.habits.fails}"))
            )
        elif again and at in self.answers:
            self.transport.send_payload(*self.answers[at])
        elif again and at in self.models:
            await self.model(at)

    def _is_silent(self, at: Position, task: pb.Task) -> bool:
        return task.work == pb.TRAIN and self.habits.silent(at)

    async def model(self, at: Position) -> None:
        task = self.tasks[at]
        refuses = task.work == pb.TRAIN and (self.habits.declines or self.habits.fails)
        if self._is_silent(at, task) or refuses:
            return
        match task.work:
            case pb.DELIVER:
                self.transport.send(pb.ClientFrame(ready=pb.Ready(at=at.to_wire())))
                self.delivered[at.run] = self.models[at]
                if self.delivered.keys() >= self.plans.keys():
                    self.transport.reconnect()  # so that what was said is read
                    self.done.set()
            case pb.EVALUATE:
                self.answer(at, *self.measured(at))
            case _:
                self.transport.send(pb.ClientFrame(ready=pb.Ready(at=at.to_wire())))
                await self.train(at)

    def measured(self, at: Position) -> tuple[Payload, pb.Offer]:
        report = MetricsReport(
            self.client, at, self.tasks[at].model_sha256, self.client, {"accuracy": self.client / 10}
        )
        data, signature = report.sign(self.identity.keys[0].identity)
        payload = Payload(data)
        return payload, payload.offer(pb.METRICS, at, signature=signature)

    async def train(self, at: Position) -> None:
        plan, data = self.plans[at.run], self.models[at]
        schema = plan.program.schema
        tensors = read_tensors(data, check_tensors(data, len(data), schema, MODEL_ROLES))
        change = self.habits.change or (lambda old: {name: t + self.client for name, t in old.items()})
        payload = self.habits.payload(
            Payload(b"".join(write_tensors(change(tensors), plan.entries.schema, plan.entries.roles)))
        )
        if self.habits.gate is not None:
            await self.habits.gate.wait()
        self.answer(at, payload, self.offer(at, payload))

    def offer(self, at: Position, payload: Payload) -> pb.Offer:
        plan = self.plans[at.run]
        weights = dict.fromkeys(plan.form.specs, self.habits.weight)
        header = UpdateHeader(
            self.client, at, payload.sha256, self.tasks[at].model_sha256, weights,
            {"loss_sum": 1.0, "examples": 1.0, "steps": 1.0}, 1, 1,
        )  # fmt: skip
        encoded, signature = self.habits.header(header).sign(self.identity.keys[0].identity)
        schema = bytes.fromhex(plan.program.schema.sha256)
        return payload.offer(pb.UPDATE, at, schema_sha256=schema, header=encoded, signature=signature)

    def answer(self, at: Position, payload: Payload, offer: pb.Offer) -> None:
        self.answers[at] = payload, offer
        self.transport.send_payload(payload, offer)

    def reasons(self) -> list[str]:
        """What its work came to, in order; "" for an update that is in a model."""
        return [outcome.reason for outcome in self.outcomes]


@contextlib.asynccontextmanager
async def running(devices: Sequence[Any]) -> AsyncIterator[None]:
    """The devices, until the block ends."""
    tasks = [asyncio.create_task(device.run()) for device in devices]
    try:
        yield
    finally:
        for device in devices:
            await device.transport.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def expected(plan: RunPlan, rounds: Iterable[Iterable[int]], weight: float = 1.0) -> str:
    """Hash of the model after rounds in which these devices are in the sum, each of which adds its id.

    The sum is that of `ExactSum.add`, of whole vectors; the server adds payloads block by block.
    """
    state = plan.algorithm.start(plan.program)
    for clients in rounds:
        exact = ExactSum(plan.form)
        for client in clients:
            exact.add(Update({"params": Term(state.vector + client, weight, state.vector)}))
        total = ExactSum.total(plan.form, [exact.accumulator], exact.count)
        state, _ = merge(plan.program, plan.algorithm, state, total, pipeline=Pipeline(), public={}, round=0)
    return model_sha256(plan.program.unflatten(state.vector) | state.buffers)


STEP: Final = 1 / 128  # of the updates under masks: whole steps of the encoding, which round to themselves


def expected_secure(plan: RunPlan, rounds: Iterable[Iterable[int]]) -> str:
    """The same under masks: each device adds so many steps as its id says, to every coordinate."""
    state = plan.algorithm.start(plan.program)
    for clients in rounds:
        ids = list(clients)
        sums = torch.full((plan.program.dimension,), sum(ids) * STEP, dtype=torch.float64)
        total = Total({"params": sums}, {"params": float(len(ids))}, len(ids))
        state, _ = merge(plan.program, plan.algorithm, state, total, pipeline=Pipeline(), public={}, round=0)
    return model_sha256(plan.program.unflatten(state.vector) | state.buffers)


def shift(plan: RunPlan, result: RunResult, model: bytes) -> np.ndarray[Any, Any]:
    """How far every parameter of a delivered model is from where the run began."""
    layout = check_tensors(model, len(model), plan.program.schema, MODEL_ROLES)
    vector = plan.program.flatten(read_tensors(model, layout))
    assert result.run_dir
    return (vector - plan.algorithm.start(plan.program).vector).numpy()


def changed(header: UpdateHeader, **changes: Any) -> UpdateHeader:
    """The same header but for some fields."""
    return replace(header, **changes)
