"""What every piece of work on a device needs: keys, journals, threads, the connection, the owner's word."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import Problem, Reason, clipped
from mycelia.aggregator.wire.settings import TaskSettings
from mycelia.client.device_journal import DeviceJournal, Trained
from mycelia.client.identity import DeviceIdentity, DeviceKeys
from mycelia.client.journal import ClientJournal
from mycelia.client.notices import Notice
from mycelia.client.places import Places
from mycelia.client.rules import Refused, Rules
from mycelia.client.spending import noise_source, record_of
from mycelia.client.training import Job, Local, Result, Workplace
from mycelia.client.transport import Transport
from mycelia.client.worker import Stopped, Token, Worker, looked_at
from mycelia.engine.algorithms import Message
from mycelia.engine.durable import write_whole
from mycelia.engine.errors import ConfigError, DataError
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.secagg.canonical import digest

__all__ = ["Desk", "declined", "failed", "work_sha256"]

_JOBS: Final = 2


def work_sha256(task: pb.Task) -> bytes:
    """One hash of all that decides what is trained; the same for all attempts at a round."""
    return digest(
        "FED1/work", task.at.run, task.at.round, task.purpose, task.algorithm, task.settings,
        task.schema_sha256, task.model_sha256, task.message_sha256,
    )  # fmt: skip


@dataclass
class _Training:
    """The newest training of the device, which several attempts at a round may wait for."""

    work_sha256: bytes
    token: Token
    task: asyncio.Task[Result]


@dataclass
class Desk:
    """One device's things.

    Attributes:
        identity: open.
        journal: of the device.
        sums: of its sessions of secure sums.
        state: folder for everything that it keeps.
        out: folder for delivered models.
        rules: the owner's.
        place: what it works with.
        data: what the data set is called where privacy is counted.
        transport: the connection.
        places: where payloads are.
        worker: trains.
        masker: does the arithmetic of secure sums.
        tell: tells people.
        wall: Unix time in seconds.
    """

    identity: DeviceIdentity
    journal: DeviceJournal
    sums: ClientJournal
    state: Path
    out: Path
    rules: Rules
    place: Workplace
    data: str
    transport: Transport
    places: Places
    worker: Worker
    masker: Worker
    tell: Callable[[Notice], None]
    wall: Callable[[], float]
    _jobs: dict[bytes, asyncio.Task[Job]] = field(default_factory=dict)
    _training: _Training | None = None

    @property
    def client(self) -> int:
        """The device's id."""
        return self.identity.client

    @property
    def today(self) -> date:
        """By the clock of this machine."""
        return self.rules.now().date()

    @property
    def keys(self) -> DeviceKeys:
        """Those that the newest roster lists."""
        roster = self.transport.roster
        if roster is not None:
            listed = {entry.identity_key for entry in roster.listed(self.client)}
            for keys in self.identity.keys:
                if keys.identity.public in listed:
                    return keys
        return self.identity.keys[0]

    def check(self, task: pb.Task, settings: TaskSettings, **more: Any) -> None:
        """Refuse what the owner does not allow; see `Rules.check`.

        Raises:
            Refused: with the field of the policy.
        """
        self.rules.check(task, settings, roster=self.transport.roster, **more)

    def send(self, frame: pb.ClientFrame) -> None:
        """Send a message; without a connection it is lost, and the server asks again."""
        self.transport.send(frame)

    # --- work -------------------------------------------------------------------------------------

    async def job(self, task: pb.Task, settings: TaskSettings) -> Job:
        """What a run asks of this device, built once.

        Raises:
            Refused: the device's own model is another one than the server's.
            MyceliaError: the settings are not for this device's model or data.
        """
        key = sha256(digest("job", task.at.run, task.settings)).digest()
        building = self._jobs.get(key)
        if building is None or _failed(building):
            making = self.worker.run(partial(self._make, task.at.run, settings))
            building = asyncio.create_task(making)
            building.add_done_callback(looked_at)
            while len(self._jobs) >= _JOBS:
                del self._jobs[next(iter(self._jobs))]
            self._jobs[key] = building
        # A round that does not wait for it leaves it to the next one, or a slow device would never be ready.
        job = await asyncio.shield(building)
        own = bytes.fromhex(job.program.schema.sha256)
        if own != task.schema_sha256:
            raise Refused("schema", task.schema_sha256.hex(), f"{own.hex()}, of {self.place.model.name}")
        return job

    async def train(self, task: pb.Task, job: Job, message: Message) -> Result:
        """The update of a round, which is trained once whatever the number of attempts.

        Raises:
            Stopped: nobody wants it any more.
            MyceliaError: training came to nothing.
        """
        wanted = work_sha256(task)
        training = self._training
        if training is None or training.work_sha256 != wanted or _failed(training.task):
            self.give_up()
            token = Token()
            running = asyncio.create_task(self.worker.run(partial(job.train, message), token))
            running.add_done_callback(looked_at)
            training = self._training = _Training(wanted, token, running)
        try:
            return await asyncio.shield(training.task)
        except asyncio.CancelledError:
            if training.task.cancelled():
                raise Stopped from None
            raise

    def give_up(self) -> None:
        """Whatever is being trained, nobody wants it any more."""
        if self._training is not None:
            self._training.token.give_up()
            self._training = None

    def _make(self, run: str, settings: TaskSettings) -> Job:
        folder = self.state / "runs" / quote(run, safe="")
        kind = "os" if settings.privacy is None else settings.privacy.noise_source
        source: NoiseSource = noise_source(kind, settings.seed, self.state / "noise.key")
        record = record_of(folder, self.data, run, self.rules.allow_spending, self.journal)
        return Job(settings, self.place, Local(folder / "states", source, record))

    # --- payloads that wait -----------------------------------------------------------------------

    def write(self, at: Position, parts: Iterable[bytes]) -> Payload:
        """Write an update down, which stays until its round is over, whatever happens to this process.

        Raises:
            DataError: it cannot be written.
        """
        path = self._waiting(at.run)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, parts)
            return Payload.open(path)
        except OSError as error:
            raise DataError(
                f"an update cannot be kept: {error.strerror}", fix="free space on the device", who=str(path)
            ) from error

    def kept(self, task: pb.Task) -> tuple[Trained, Payload] | None:
        """The update of this very work, if it was trained before and is still there."""
        trained = self.journal.trained(task.at.run)
        if trained is None or trained.task_sha256 != work_sha256(task):
            return None
        try:
            payload = Payload.open(self._waiting(task.at.run))
        except (OSError, ConfigError):
            return None
        return (trained, payload) if payload.sha256 == trained.sha256 else None

    def settle(self, at: Position) -> None:
        """A round is over: what waited for that goes."""
        self.journal.settle(at)
        if self.journal.trained(at.run) is None:
            with suppress(OSError):
                self._waiting(at.run).unlink()

    def _waiting(self, run: str) -> Path:
        return self.state / "outgoing" / quote(run, safe="")


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def declined(at: Position, error: Refused) -> pb.ClientFrame:
    """The answer to work that is not allowed."""
    reason = clipped(f"{Reason.POLICY}: {error.field}")
    decline = pb.Decline(
        at=at.to_wire(), reason=reason, field=clipped(error.field), asked=clipped(error.asked),
        allowed=clipped(error.allowed),
    )  # fmt: skip
    return pb.ClientFrame(decline=decline)


def failed(at: Position, problem: Problem | None, found: str) -> pb.ClientFrame:
    """The answer to work that came to nothing here. Nothing of the data is in it."""
    said = f"{problem.reason}: {problem.hint}" if problem is not None else f"failed: {found}"
    return pb.ClientFrame(decline=pb.Decline(at=at.to_wire(), reason=clipped(said)))
