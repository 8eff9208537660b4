"""A real server over TLS whose words a test speaks, and real devices with data of a small federation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from mycelia.aggregator.deadlines import Waits
from mycelia.aggregator.service import Service
from mycelia.aggregator.spool import Spooled
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.payload import write_tensors
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import Problem
from mycelia.aggregator.wire.settings import TaskSettings, message_entries
from mycelia.aggregator.wire.updates_form import MODEL_ROLES
from mycelia.client import notices
from mycelia.client.config import ClientConfig
from mycelia.client.runner import Device
from mycelia.engine.algorithms import Message
from mycelia.engine.config import load_config
from mycelia.engine.schema import Schema
from mycelia.simulations.preparation import Prepared
from tests.aggregator.connections import WAITS, Recorder, World, served
from tests.client.small_runs import own_data, settings_of

RUN = "study"


class Rig:
    """The server's side, and what devices said."""

    def __init__(self, world: World, folder: Path, prepared: Prepared) -> None:
        self.world, self.folder, self.prepared = world, folder, prepared
        self.settings: TaskSettings = settings_of(prepared)
        self.service: Service
        self.told: Recorder
        self.port = 0
        self.offers: dict[tuple[int, bytes], pb.Offer] = {}
        self.notices: dict[int, list[notices.Notice]] = {}
        self.heard: asyncio.Queue[tuple[str, int, Any]] = asyncio.Queue()
        self.again: Callable[[int], None] = lambda client: None
        self.refuses: Problem | None = None

    # --- the handler ------------------------------------------------------------------------------

    async def offered(self, client: int, offer: pb.Offer) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.offers[client, offer.sha256] = offer

    async def frame(self, client: int, frame: pb.ClientFrame) -> None:
        body = frame.WhichOneof("body")
        assert body is not None
        self.heard.put_nowait((body, client, getattr(frame, body)))

    async def payload(self, client: int, payload: Spooled) -> None:
        with payload.open() as data:
            offer = self.offers[client, payload.manifest.sha256]
            self.heard.put_nowait((pb.Kind.Name(offer.kind).lower(), client, (offer, bytes(data))))
        await self.service.release(payload)

    async def connected(self, client: int, entry: object) -> None:
        self.heard.put_nowait(("connected", client, entry))
        self.again(client)

    async def lost(self, client: int, problem: Problem | None) -> None:
        self.heard.put_nowait(("lost", client, problem))

    async def next(self, *kinds: str, skip: tuple[str, ...] = ("lost",)) -> tuple[int, Any]:
        """What comes next, which is one of these."""
        while True:
            kind, client, what = await self.heard.get()
            if kind in kinds:
                return client, what
            assert kind in skip, (kind, client, what)

    # --- what it says -----------------------------------------------------------------------------

    def message(self, round: int = 0, **extra: Any) -> Message:
        algorithm = self.prepared.algorithm
        state = algorithm.start(self.prepared.program)
        return Message(state.vector, state.buffers, {**algorithm.message_extra(state), **extra}, round)

    def payloads(self, message: Message) -> tuple[Payload, Payload | None]:
        program = self.prepared.program
        tensors = program.unflatten(message.vector) | message.buffers
        model = Payload(b"".join(write_tensors(tensors, program.schema, MODEL_ROLES)))
        if not message.extra:
            return model, None
        entries = message_entries(message.extra)
        return model, Payload(b"".join(write_tensors(dict(message.extra), Schema(()), (), entries)))

    def task(self, at: Position, message: Message, work: pb.Work = pb.TRAIN, **more: Any) -> pb.Task:
        model, extra = self.payloads(message)
        given: dict[str, Any] = {
            "at": at.to_wire(),
            "work": work,
            "purpose": "study",
            "algorithm": self.settings.algorithm.name,
            "settings": self.settings.encode(),
            "schema_sha256": bytes.fromhex(self.prepared.program.schema.sha256),
            "model_sha256": model.sha256,
            "message_sha256": b"" if extra is None else extra.sha256,
            "remaining_ms": 60_000,
        }
        return pb.Task(**{**given, **more})

    def ask(self, client: int, task: pb.Task, message: Message) -> None:
        """Send a task and its payloads."""
        at = Position.of(task.at)
        model, extra = self.payloads(message)
        if not self.service.push(client, pb.ServerFrame(task=task)):
            return
        schema = task.schema_sha256
        self.service.send_payload(client, model, model.offer(pb.MODEL, at, schema_sha256=schema))
        if extra is not None:
            self.service.send_payload(client, extra, extra.offer(pb.MESSAGE, at, schema_sha256=schema))

    def accept(self, client: int, at: Position) -> None:
        self.service.push(client, pb.ServerFrame(outcome=pb.Outcome(at=at.to_wire())))

    def refuse(self, client: int, at: Position, problem: Problem) -> None:
        self.service.push(client, pb.ServerFrame(outcome=problem.outcome(at)))

    # --- devices ----------------------------------------------------------------------------------

    def config(self, client: int, *, policy: dict[str, Any] | None = None, **changes: Any) -> ClientConfig:
        model = self.prepared.scenario.model
        given = {
            "server": [f"127.0.0.1:{self.port}"],
            "identity": str(self.folder / f"device-{client}"),
            "state": str(self.folder / f"state-{client}"),
            "model": {"name": model.name, **model.options},
            "data": f"own:{client}",
            "out": str(self.folder / f"out-{client}"),
        }
        allowed = {"purposes": ["study"], "algorithms": "any", "secure_sum": "any", "threat": "passive"}
        table = {"client": {**given, **changes}, "policy": {**allowed, **(policy or {})}}
        return load_config(ClientConfig, table, [])

    def make(self, client: int, config: Any = None, **more: Any) -> Device:
        seen = self.notices.setdefault(client, [])
        more.setdefault("data", own_data(self.prepared, client - 1))
        return Device(config or self.config(client), listeners=[seen.append], **more)

    def told_people(self, client: int, kind: type[Any]) -> list[Any]:
        return [notice for notice in self.notices[client] if isinstance(notice, kind)]

    @contextlib.asynccontextmanager
    async def device(self, client: int, **more: Any) -> AsyncIterator[tuple[Device, asyncio.Task[Any]]]:
        """A device that runs, and is closed at the end."""
        made = self.make(client, **more)
        running = asyncio.create_task(made.arun())
        connected = asyncio.create_task(self.next("connected"))
        try:
            done, _ = await asyncio.wait({running, connected}, return_when=asyncio.FIRST_COMPLETED)
            if running in done:
                running.result()
            yield made, running
        finally:
            connected.cancel()
            made.close()
            await asyncio.wait({running}, timeout=6)
            assert running.done()
        running.result()


@contextlib.asynccontextmanager
async def rig(
    folder: Path, prepared: Prepared, clients: tuple[int, ...] = (1,), *, waits: Waits = WAITS, days: int = 30
) -> AsyncIterator[Rig]:
    """A server, and devices that are enrolled and not started."""
    world = World()
    for client in clients:
        world.enrol_folder(client, folder / f"device-{client}", days=days).close()
    made = Rig(world, folder, prepared)
    async with served(world, folder, waits=waits) as (service, told, port):
        made.service, made.told, made.port = service, told, port
        for name in ("offered", "frame", "payload", "connected", "lost"):
            setattr(told, name, getattr(made, name))
        yield made
