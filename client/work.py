"""The pieces of work that a server asks for, each from its task to its outcome.

train      policy → model → Ready → local steps → update → outcome
masked     policy → session of the secure sum, beside model → local steps → its vector → outcome
evaluate   policy → model → metrics
deliver    model → files
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import MAX_CHUNK
from mycelia.aggregator.wire.metrics import MetricsReport
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.payload import BLOCK_BYTES
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.aggregator.wire.settings import TaskSettings, rounding_stream, sent_sha256, task_sha256
from mycelia.aggregator.wire.transfer import Sink
from mycelia.aggregator.wire.update_header import UpdateHeader
from mycelia.client.desk import Desk, work_sha256
from mycelia.client.device_journal import Spent, Trained
from mycelia.client.notices import (
    Accepted,
    Delivered,
    Failed,
    Measured,
    Started,
    Uploaded,
)
from mycelia.client.notices import Trained as TrainedNotice
from mycelia.client.places import mapped
from mycelia.client.rules import Refused
from mycelia.client.secagg import SecureSumClient
from mycelia.client.secagg import Task as SumTask
from mycelia.client.session import Session
from mycelia.client.spending import noise_source
from mycelia.client.training import Job, Result
from mycelia.engine.algorithms import Message
from mycelia.engine.durable import write_whole
from mycelia.engine.errors import DataError
from mycelia.privacy.secagg.canonical import Reason as SumReason
from mycelia.privacy.secagg.canonical import SecureSumError
from mycelia.privacy.secagg.events import LocalUpdate, Release
from mycelia.privacy.secagg.messages import Envelope, envelope_limit, parse_config
from mycelia.privacy.secagg.round_config import Mechanism, RoundConfig

__all__ = ["Deliver", "Evaluate", "MaskedTraining", "Training", "Work", "work_of"]

MODEL_FILE: Final = "model.safetensors"
PERSONAL_FILE: Final = "personal.safetensors"

_ALARMS: Final = {SumReason.EQUIVOCATION, SumReason.INCONSISTENT_SURVIVORS, SumReason.SPLIT_VIEW}


class Work(ABC):
    """One piece of work.

    Args:
        desk: of the device.
        task: as it came.

    Attributes:
        task: as it came.
        at: where it belongs.
        kind: what is to be done.
        job: of its run, once it is built.
    """

    kind: ClassVar[pb.Work]
    job: Job | None = None

    def __init__(self, desk: Desk, task: pb.Task) -> None:
        self.desk, self.task, self.at = desk, task, Position.of(task.at)
        self.settings = TaskSettings.decode(task.settings)
        wanted = {pb.MODEL: task.model_sha256, pb.MESSAGE: task.message_sha256}
        loop = asyncio.get_running_loop()
        self._payloads: dict[int, tuple[bytes, asyncio.Future[tuple[pb.Offer, Sink]]]] = {
            kind: (sha, loop.create_future()) for kind, sha in wanted.items() if sha
        }
        self._outcome: asyncio.Future[pb.Outcome] = loop.create_future()
        self._answer: tuple[Payload, pb.Offer] | None = None
        self._under_way = self._was_sent = False

    @abstractmethod
    async def run(self) -> None:
        """Do it.

        Raises:
            Refused: the owner's policy does not allow it.
            Problem: what the server sent is not as it has to be.
            MyceliaError: it came to nothing.
            Stopped: nobody wants it any more.
        """

    def again(self) -> None:
        """The server has sent the task once more: it may not have heard the answer."""
        if self._answer is not None and not self._under_way:
            self._offer(*self._answer)

    def received(self, offer: pb.Offer, sink: Sink) -> None:
        """A payload is complete."""
        wanted, future = self._payloads.get(offer.kind, (b"", None))
        if future is not None and offer.sha256 == wanted and not future.done():
            future.set_result((offer, sink))

    def sent(self, offer: pb.Offer) -> None:
        """The server holds all of a payload of this work."""
        del offer
        self._under_way, self._was_sent = False, True

    def secagg(self, data: bytes) -> None:
        """A message of the secure sum came."""
        del data

    def settled(self, outcome: pb.Outcome) -> None:
        """The server says what became of it."""
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    @property
    def over(self) -> bool:
        """Whether the server has said what became of it."""
        return self._outcome.done()

    @property
    def late(self) -> bool:
        """Whether the run has gone on, and this work did not get to the server in time."""
        return False

    # --- for those below --------------------------------------------------------------------------

    def _offer(self, payload: Payload, offer: pb.Offer) -> None:
        """Send the answer; it goes on over as many connections as it takes."""
        self._answer, self._under_way = (payload, offer), True
        self.desk.transport.send_payload(payload, offer)

    async def _message(self, job: Job) -> Message:
        """What the server sends, once it is there."""
        found: dict[int, tuple[pb.Offer, Sink]] = {}
        for kind, (_, future) in self._payloads.items():
            found[kind] = await asyncio.shield(future)

        def read() -> Message:
            offer, sink = found[pb.MODEL]
            model = mapped(sink, offer.size)
            extra = None
            if pb.MESSAGE in found:
                offer, sink = found[pb.MESSAGE]
                extra = mapped(sink, offer.size)
            return job.message(model, extra, self.at.round)

        return await self.desk.worker.run(read)

    def _join(self) -> None:
        """From here on this position is used up."""
        task = pb.Task()
        task.CopyFrom(self.task)
        task.remaining_ms = 0
        data = task.SerializeToString(deterministic=True)
        roster = self.desk.transport.roster
        epoch = 0 if roster is None else roster.epoch
        desk = self.desk
        highest, known = desk.journal.highest(self.at.run), desk.journal.task(self.at.run)
        place = (self.at.round, self.at.attempt)
        if highest is not None and (place < highest or (place == highest and known != data)):
            raise Problem(
                Reason.STALE_ROUND,
                f"{self.at} was answered",
                rule=f"after round {highest[0]}, attempt {highest[1]}",
                fix="go on with the run's next round",
                who=f"client {desk.client}",
            )
        desk.journal.join(self.at, data, epoch, desk.today)
        self.desk.tell(Started(self.at, self.settings.rounds, bool(self.task.secure_sum)))

    def _ready(self) -> None:
        self.desk.send(pb.ClientFrame(ready=pb.Ready(at=self.task.at)))

    def _spend(self) -> None:
        """Where the noise is not this device's own, the whole budget of the run counts from the start.

        Raises:
            BudgetExceeded: the owner does not allow it.
            JournalError: it cannot be written down.
        """
        privacy = self.settings.privacy
        if privacy is not None and privacy.unit == "client" and privacy.model != "local":
            spent = Spent(self.desk.data, self.at.run, privacy.epsilon, privacy.delta)
            self.desk.rules.allow_spending(spent)
            self.desk.journal.spend(spent)

    def _tell_trained(self, rows: int, metrics: dict[str, float], seconds: float) -> None:
        examples = metrics.get("examples", 0.0)
        loss = metrics["loss_sum"] / examples if examples and "loss_sum" in metrics else None
        steps = int(metrics.get("steps", 0))
        self.desk.tell(TrainedNotice(self.at, self.settings.rounds, rows, steps, loss, seconds))


class _Round(Work):
    """Work on a round, from its task to its outcome, which may come at any time."""

    kind = pb.TRAIN
    _told = False

    async def run(self) -> None:
        """See `Work.run`."""
        steps = asyncio.create_task(self._steps())
        try:
            either: set[asyncio.Future[Any]] = {steps, self._outcome}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if steps.done():
                steps.result()
        finally:
            steps.cancel()
            await asyncio.gather(steps, return_exceptions=True)
        outcome = await self._outcome
        self.desk.settle(self.at)
        if not outcome.code:
            self.desk.transport.completed()
            self.desk.tell(Accepted(self.at))
            return
        problem = Problem.of(outcome)
        if self.job is not None:
            self.job.forget(self.at.round)
        if not self._told:
            alarm = problem.reason is Reason.EQUIVOCATION
            self.desk.tell(Failed(self.at, str(problem.reason), problem.hint, alarm))

    @abstractmethod
    async def _steps(self) -> None:
        """All that this device has to do."""


class Training(_Round):
    """A round of training whose update is summed as it is."""

    def __init__(self, desk: Desk, task: pb.Task) -> None:
        super().__init__(desk, task)
        self._said_ready = False

    async def _steps(self) -> None:
        desk, privacy = self.desk, self.settings.privacy
        if self.settings.packing is not None or (privacy is not None and privacy.in_shares):
            raise Refused(
                "secure_sum", "none", "what the settings say: updates are packed, or noised in shares"
            )
        desk.check(self.task, self.settings)
        kept = desk.kept(self.task)
        if kept is None:
            job = self.job = await desk.job(self.task, self.settings)
            desk.check(self.task, self.settings, upload_bytes=job.upload_bytes)
            self._join()
            self._say_ready()  # before the model is here, which may take longer than devices have to say so
            message = await self._message(job)
            result = await desk.train(self.task, job, message)
            trained, payload = await self._keep(job, result)
            self._tell_trained(result.rows, dict(result.update.metrics), result.seconds)
        else:
            trained, payload = kept
            self._join()
            self._say_ready()
            self._tell_trained(len(desk.place.dataset.train), trained.metrics, 0.0)
        self._offer(payload, self._signed(trained, payload))

    def again(self) -> None:
        """See `Work.again`."""
        if self._said_ready:
            self._ready()
        super().again()

    def sent(self, offer: pb.Offer) -> None:
        """See `Work.sent`."""
        if not self._was_sent:
            self.desk.tell(Uploaded(self.at, offer.size, masked=False))
        super().sent(offer)

    @property
    def late(self) -> bool:
        """See `Work.late`; an update that got there may be in the model."""
        return not (self._was_sent or self.over)

    def _say_ready(self) -> None:
        self._said_ready = True
        self._ready()

    async def _keep(self, job: Job, result: Result) -> tuple[Trained, Payload]:
        desk = self.desk
        await desk.worker.run(partial(job.remember, self.at.round, result))

        def write() -> Payload:
            return desk.write(self.at, job.payload(result))

        payload = await desk.worker.run(write)
        metrics = {name: result.number(name) for name in ("loss_sum", "examples", "steps")}
        trained = Trained(
            self.at.round, work_sha256(self.task), payload.sha256, result.weights, metrics,
            int(metrics["examples"]), int(metrics["steps"]),
        )  # fmt: skip
        self._spend()
        desk.journal.sent(self.at, payload.size, desk.today)
        desk.journal.keep(self.at, trained)
        return trained, payload

    def _signed(self, trained: Trained, payload: Payload) -> pb.Offer:
        header = UpdateHeader(
            self.desk.client, self.at, payload.sha256, self.task.model_sha256, trained.weights,
            trained.metrics, trained.examples, trained.steps,
        )  # fmt: skip
        signed, signature = header.sign(self.desk.keys.identity)
        return payload.offer(
            pb.UPDATE, self.at, schema_sha256=self.task.schema_sha256, header=signed, signature=signature
        )


class MaskedTraining(_Round):
    """A round of training whose update is seen by nobody but in a sum."""

    def __init__(self, desk: Desk, task: pb.Task) -> None:
        super().__init__(desk, task)
        self._envelope = Envelope.decode(task.secure_sum, envelope_limit(None))
        self.config: RoundConfig = parse_config(self._envelope)
        self._session: Session | None = None
        self._early: list[bytes] = []
        self._transcript = b""

    async def _steps(self) -> None:
        desk, task = self.desk, self.task
        self._check()
        desk.check(task, self.settings, config=self.config)
        # Keys are settled while the model is built: what it takes is known, but for what a rotation hides.
        size = self.config.dimension
        if self.config.rotation:
            size = _packed_size(await desk.job(task, self.settings))
        self._join()
        session = self._session = self._open(size)
        for data in self._early:
            session.received(data)
        running = asyncio.create_task(session.run(task.secure_sum))
        training = asyncio.create_task(self._train(session, size))
        try:
            await asyncio.wait({running, training}, return_when=asyncio.FIRST_EXCEPTION)
            for each in (training, running):
                if each.done():
                    each.result()
            await training
            self._transcript = await running
        except SecureSumError as error:
            if error.reason is SumReason.JOURNAL:
                raise
            self._told = True
            self.desk.tell(Failed(self.at, str(error.reason), error.found, error.reason in _ALARMS))
        finally:
            for each in (running, training):
                each.cancel()
            await asyncio.gather(running, training, return_exceptions=True)

    def again(self) -> None:
        """See `Work.again`; the machine gives its answer once more."""
        self.secagg(self.task.secure_sum)

    def received(self, offer: pb.Offer, sink: Sink) -> None:
        """See `Work.received`; long messages come as payloads, too."""
        if offer.kind == pb.ENVELOPE:
            self.secagg(bytes(sink.read(0, offer.size)))
        else:
            super().received(offer, sink)

    def sent(self, offer: pb.Offer) -> None:
        """See `Work.sent`."""
        if offer.kind == pb.MASKED:
            self.desk.tell(Uploaded(self.at, offer.size, masked=True))

    def secagg(self, data: bytes) -> None:
        """See `Work.secagg`."""
        if self._session is None:
            self._early.append(data)
        else:
            self._session.received(data)

    async def _train(self, session: Session, size: int) -> None:
        job = self.job = await self.desk.job(self.task, self.settings)
        if _packed_size(job) != size:
            raise Refused(
                "schema", f"a sum of {size} numbers", f"{_packed_size(job)}, of this device's model"
            )
        result = await self.desk.train(self.task, job, await self._message(job))
        await self.desk.worker.run(partial(job.remember, self.at.round, result))
        vector, weight, slots = job.packed(result)
        self._tell_trained(result.rows, dict(result.update.metrics), result.seconds)
        session.contribute(LocalUpdate(vector, weight, slots))

    def _check(self) -> None:
        """Configuration and settings are of one piece of work, and the noise that was promised is in it."""
        config, privacy, packing = self.config, self.settings.privacy, self.settings.packing
        if (config.job, config.round, config.attempt) != self.at or packing is None:
            raise Problem(
                Reason.BAD_PAYLOAD,
                f"a configuration of round {config.round}, attempt {config.attempt} of {config.job}",
                rule=f"that of {self.at}, with settings that say how updates are packed",
                who="task",
            )
        shares = privacy is not None and privacy.in_shares
        if shares != packing.private or shares != (config.noise.mechanism != Mechanism.NONE):
            said = Mechanism(config.noise.mechanism).name.lower()
            raise Refused("noise", said, "noise in shares" if shares else "none, as the settings say")

    def _open(self, size: int) -> Session:
        desk, settings, roster = self.desk, self.settings, self.desk.transport.roster
        if roster is None:
            raise DataError("a task before its roster", rule="Welcome comes first", who="task")
        kind = "os" if settings.privacy is None else settings.privacy.noise_source
        machine = SecureSumClient(
            desk.client,
            desk.keys.identity,
            roster,
            SumTask(sent_sha256(self.task), self.task.schema_sha256, task_sha256(self.task), size),
            unix_time=int(desk.wall()),
            rounding=rounding_stream(settings.seed, self.at.round, desk.client),
            policy=desk.rules.secure_policy(),
            past=desk.sums.history,
            noise=noise_source(kind, settings.seed, desk.state / "noise.key"),
        )
        loop = asyncio.get_running_loop()
        return Session(
            machine,
            desk.sums,
            desk.masker,
            clock=loop.time,
            send=self._send,
            upload=self._upload,
            charge=self._charge,
            refused=lambda error: None,
        )

    def _send(self, data: bytes) -> None:
        if len(data) <= MAX_CHUNK:
            self.desk.send(pb.ClientFrame(secagg=pb.SecAgg(at=self.task.at, data=data)))
            return
        payload = Payload(data)
        self.desk.transport.send_payload(payload, payload.offer(pb.ENVELOPE, self.at))

    def _upload(self, data: bytes) -> None:
        payload = Payload(data)
        self.desk.journal.sent(self.at, payload.size, self.desk.today)
        self.desk.transport.send_payload(payload, payload.offer(pb.MASKED, self.at))

    def _charge(self, release: Release) -> None:
        del release
        self._spend()


class Evaluate(Work):
    """The model is measured on this device's own examples."""

    kind = pb.EVALUATE

    async def run(self) -> None:
        """See `Work.run`."""
        desk = self.desk
        desk.check(self.task, self.settings)
        job = await desk.job(self.task, self.settings)
        message = await self._message(job)
        examples, values = await desk.worker.run(partial(job.evaluate, message))
        report = MetricsReport(desk.client, self.at, self.task.model_sha256, examples, values)
        data, signature = report.sign(desk.keys.identity)
        payload = Payload(data)
        desk.tell(Measured(self.at, examples, values))
        self._offer(payload, payload.offer(pb.METRICS, self.at, signature=signature))
        await self._outcome


class Deliver(Work):
    """The run is over, and this is its model."""

    kind = pb.DELIVER

    async def run(self) -> None:
        """See `Work.run`."""
        desk = self.desk
        job = await desk.job(self.task, self.settings)
        message = await self._message(job)
        model, personal = await desk.worker.run(partial(self._write, job, message))
        desk.settle(self.at)
        desk.journal.finish(self.at.run)
        self._ready()
        desk.transport.completed()
        desk.tell(Delivered(self.at.run, model, personal))

    def again(self) -> None:
        """See `Work.again`."""
        if self.desk.journal.finished(self.at.run):
            self._ready()

    def _write(self, job: Job, message: Message) -> tuple[Path, Path | None]:
        out = self.desk.out
        offer, sink = self._payloads[pb.MODEL][1].result()
        try:
            out.mkdir(parents=True, exist_ok=True)
            with memoryview(mapped(sink, offer.size)) as whole:
                parts = (whole[start : start + BLOCK_BYTES] for start in range(0, len(whole), BLOCK_BYTES))
                write_whole(out / MODEL_FILE, parts, mode=0o644)
            own = job.personal(message)
            if own is None:
                return out / MODEL_FILE, None
            write_whole(out / PERSONAL_FILE, own)
        except OSError as error:
            raise DataError(
                f"the model cannot be written: {error.strerror}",
                fix="look at the folder that out names",
                who=str(out),
            ) from error
        return out / MODEL_FILE, out / PERSONAL_FILE


def work_of(desk: Desk, task: pb.Task) -> Work:
    """The work that a task asks for.

    Raises:
        Problem: work of another kind, or settings that are none.
        SecureSumError: a configuration of a secure sum that is none.
    """
    match task.work:
        case pb.TRAIN:
            return MaskedTraining(desk, task) if task.secure_sum else Training(desk, task)
        case pb.EVALUATE:
            return Evaluate(desk, task)
        case pb.DELIVER:
            return Deliver(desk, task)
    raise Problem(Reason.WRONG_PHASE, "work of another kind", rule="train, evaluate or deliver", who="task")


def _packed_size(job: Job) -> int:
    """Numbers in the vector of an update."""
    return 0 if job.quantise is None else job.quantise.size
