"""Devices whose updates are masked: the real machine of the secure sum, without training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import MAX_CHUNK
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.settings import rounding_stream, sent_sha256, task_sha256
from mycelia.client.history import ClientHistory
from mycelia.client.policy import ClientPolicy
from mycelia.client.secagg import SecureSumClient, Task
from mycelia.client.transport import Came, Event, Received
from mycelia.engine.sums import Term, Update
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.secagg.canonical import SecureSumError
from mycelia.privacy.secagg.events import (
    Abort,
    Charge,
    Effect,
    Finish,
    LocalUpdate,
    Persist,
    Release,
    Send,
    SendStream,
    Tick,
)
from mycelia.privacy.secagg.events import Event as SumEvent
from mycelia.privacy.secagg.events import Received as SumReceived
from mycelia.privacy.secagg.messages import SERVER, Envelope
from mycelia.privacy.secagg.round_config import Threat
from mycelia.privacy.secure_updates import SLOTS, VECTOR
from tests.aggregator.runs.run_world import STEP, Dummy

KINDS: Final[Mapping[str, str]] = {
    "advertise": "advert", "share": "shares", "masked": "masked", "agree": "agree", "unmask": "unmask",
}  # fmt: skip


class SecureDummy(Dummy):
    """A device that adds as many steps as its id says, behind masks.

    Attributes:
        drops: (round, attempt) to the phase from which on it says nothing.
        before: is told each kind of message before it is sent, and may wait.
        sums: hashes of the transcripts of sums that it was in.
        errors: why sessions ended without it.
        released: what it was charged for.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.past = ClientHistory()
        self.machines: dict[Position, SecureSumClient] = {}
        self.drops: dict[tuple[int, int], str] = {}
        self.before: Callable[[Position, str], None] = lambda at, kind: None
        self.sums: list[bytes] = []
        self.errors: list[SecureSumError] = []
        self.released: list[Release] = []
        self.noise = NoiseSource.os()

    async def handle(self, event: Event) -> None:
        match event:
            case Came(frame) if frame.HasField("secagg"):
                self.say(Position.of(frame.secagg.at), SumReceived(SERVER, frame.secagg.data))
            case Received(offer, sink) if offer.kind == pb.ENVELOPE:
                self.say(Position.of(offer.at), SumReceived(SERVER, bytes(sink.read(0, offer.size))))
            case _:
                await super().handle(event)

    async def task(self, at: Position, task: pb.Task) -> None:
        known = at in self.machines
        await super().task(at, task)
        if task.work != pb.TRAIN or self._is_silent(at, task) or self.habits.declines or self.habits.fails:
            return
        if not known:
            assert self.transport.roster is not None
            plan = self.plans[at.run]
            assert plan.secure is not None
            about = Task(sent_sha256(task), task.schema_sha256, task_sha256(task), plan.secure.quantise.size)
            self.machines[at] = SecureSumClient(
                self.client, self.identity.keys[0].identity, self.transport.roster, about,
                unix_time=int(time.time()),
                rounding=rounding_stream(plan.config.seed, at.round, self.client),
                policy=ClientPolicy(threat=Threat.PASSIVE), past=self.past, noise=self.noise,
            )  # fmt: skip
            self.say(at, Tick(time.monotonic()))
        self.say(at, SumReceived(SERVER, task.secure_sum))

    async def train(self, at: Position) -> None:
        plan = self.plans[at.run]
        assert plan.secure is not None
        values = torch.full(
            (plan.program.dimension,),
            self.client * STEP,
            dtype=plan.program.flatten(plan.program.init()[0]).dtype,
        )
        update = Update({"params": Term(values, self.habits.weight)}, {"loss_sum": 1.0, "examples": 1.0})
        packed = plan.secure.quantise.device(update, None)  # type: ignore[arg-type]
        slots = dict(zip(plan.secure.quantise.given, packed.terms[SLOTS].values.tolist(), strict=True))
        if self.habits.gate is not None:
            await self.habits.gate.wait()
        vector = packed.terms[VECTOR]
        self.say(at, LocalUpdate(vector.values.numpy(), int(vector.weight), slots))

    def say(self, at: Position, event: SumEvent) -> None:
        """Tell the machine, and do what it wants."""
        machine = self.machines.get(at)
        if machine is None or self._is_gone(at):
            return
        for effect in machine.handle(event):
            if self._is_gone(at):
                return
            self._do(at, effect)

    def _is_gone(self, at: Position) -> bool:
        return self.drops.get((at.round, at.attempt)) == "gone"

    def _do(self, at: Position, effect: Effect) -> None:
        match effect:
            case Persist(record):
                self.past = ClientHistory.read([record], self.past)
            case Send(_, data):
                self._send(at, data)
            case SendStream(_, header, chunks):
                self._send(at, header)
                if not self._is_gone(at):
                    payload = Payload(b"".join(chunks))
                    self.answer(at, payload, payload.offer(pb.MASKED, at))
            case Charge(release):
                self.released.append(release)
            case Finish(transcript):
                self.sums.append(bytes(transcript))
            case Abort(error):
                self.errors.append(error)
            case _:
                pass

    def _send(self, at: Position, data: bytes) -> None:
        kind = Envelope.decode(data, 2**30).kind
        self.before(at, kind)
        dropped = self.drops.get((at.round, at.attempt))
        if dropped is not None and KINDS[dropped] == kind:
            self.drops[at.round, at.attempt] = "gone"
            return
        if len(data) <= MAX_CHUNK:
            self.transport.send(pb.ClientFrame(secagg=pb.SecAgg(at=at.to_wire(), data=data)))
        else:
            payload = Payload(data)
            self.transport.send_payload(payload, payload.offer(pb.ENVELOPE, at))
