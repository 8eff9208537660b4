"""A device from its start to its end: it connects, does what servers ask for and its owner allows, and ends.

    Device(config).run()

What is asked for is one piece of work at a time for each run; nothing that goes wrong in one ends the device.
It ends when it is told to, when its certificate, journal or data are not to be relied on, or with `once` when
a run it took part in is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.aggregator.wire.transfer import Sink
from mycelia.client.config import ClientConfig
from mycelia.client.desk import Desk, declined, failed
from mycelia.client.device_journal import DeviceJournal, JournalError
from mycelia.client.identity import DeviceIdentity
from mycelia.client.journal import ClientJournal
from mycelia.client.notices import (
    Accepted,
    ConnectedTo,
    Declined,
    Delivered,
    Disconnected,
    Failed,
    KeysRenewed,
    Listener,
    Notice,
    Report,
    Waiting,
)
from mycelia.client.own_training import OwnTrain
from mycelia.client.places import Places
from mycelia.client.rules import Refused, Rules
from mycelia.client.training import Workplace
from mycelia.client.transport import Came, Connected, Event, Lost, NewRoster, Received, Sent, Transport
from mycelia.client.work import Work, work_of
from mycelia.client.worker import Stopped, Worker
from mycelia.engine.data import Dataset, load
from mycelia.engine.errors import BudgetExceeded, CaptureError, ConfigError, MyceliaError
from mycelia.engine.heap import keep_heap
from mycelia.engine.plugins import user_code
from mycelia.privacy.secagg.canonical import Reason as SumReason
from mycelia.privacy.secagg.canonical import SecureSumError
from mycelia.privacy.secagg.certificates import DAY, IdentityProblem
from mycelia.privacy.secagg.messages import Envelope, envelope_limit

__all__ = ["Device"]

SUMS: Final = "secure-sum.journal"

_LOOK_S: Final = DAY
"""How often a device looks whether its keys are to be renewed."""


class Device:
    """One device.

    Args:
        config: what its owner says.
        train: a function of its own in the place of the local steps; see `OwnTrain`.
        data: its examples; None: those that the configuration names.
        listeners: called with every `Notice`.
        insecure: without TLS, as the server was started.
        once: end when a run that it took part in is over.
        new_journal: begin new journals in the place of any there are: only after it was enrolled anew.
        wall: Unix time in seconds.

    Attributes:
        report: what it has done so far.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        train: OwnTrain | None = None,
        data: Dataset | None = None,
        listeners: Sequence[Listener] = (),
        insecure: bool = False,
        once: bool = False,
        new_journal: bool = False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._train, self._data = config, train, data
        self._listeners, self._insecure, self._once = tuple(listeners), insecure, once
        self._new_journal, self._wall = new_journal, wall
        self.report = Report(0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._closed = False
        self._seen: dict[str, set[Position]] = {}
        self._arrived: dict[Position, list[tuple[pb.Offer, Sink]]] = {}
        self._works: dict[tuple[str, int], tuple[Work, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._fatal: asyncio.Future[None] | None = None
        self._desk: Desk
        self._transport: Transport
        self._renewing = False

    def run(self) -> Report:
        """Take part until it ends; blocks.

        Returns:
            what it has done.

        Raises:
            ConfigError: the configuration does not fit.
            DataError: identity, journal or data cannot be used.
            TransportError: another process uses this identity.
        """
        return asyncio.run(self.arun())

    def close(self) -> None:
        """End in good order, within 5 s; from any thread, also before it has begun."""
        self._closed = True
        if self._loop is not None and self._closing is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._closing.set)

    async def arun(self) -> Report:
        """As `run`, in an event loop that is there."""
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        self._fatal = self._loop.create_future()
        if self._closed:
            return self.report
        keep_heap()
        async with AsyncExitStack() as stack:
            await self._open(stack)
            waiting: list[asyncio.Future[None]] = [
                asyncio.create_task(self._pump()),
                asyncio.create_task(self._look_at_keys()),
                asyncio.create_task(_until(self._closing)),
                self._fatal,
            ]
            try:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    each.result()
            finally:
                for each in waiting:
                    each.cancel()
                await self._end()
                await asyncio.gather(*waiting, return_exceptions=True)
        return self.report

    # --- beginning and end ------------------------------------------------------------------------

    async def _open(self, stack: AsyncExitStack) -> None:
        config = self._config
        identity = stack.enter_context(DeviceIdentity.open(config.identity))
        self.report.client = identity.client
        identity.check(int(self._wall()))
        state: Path = config.state
        make = DeviceJournal.new if self._new_journal else DeviceJournal.open
        journal = make(state, identity.folder)
        stack.callback(journal.close)
        fresh = self._new_journal or not (journal.used or (state / SUMS).exists())
        sums = ClientJournal.new(state / SUMS) if fresh else ClientJournal.open(state / SUMS)
        stack.callback(sums.close)
        worker, masker = Worker("training"), Worker("secure sum")
        self._workers = (worker, masker)
        stack.push_async_callback(_stopped, worker, masker)
        dataset = self._data
        if dataset is None:
            dataset = await worker.run(partial(_loaded, config))
        places = Places(state / "incoming")
        stack.callback(places.close)
        rules = Rules(config, journal, len(dataset.train), self._insecure, self._now)
        transport = Transport(
            config.server, identity, places, insecure=self._insecure,
            secure_sum=config.policy.secure_sum == "required", wall=self._wall,
        )  # fmt: skip
        place = Workplace(dataset, config.model, identity.client, self._train, worker.check)
        self._desk = Desk(
            identity, journal, sums, state, config.out, rules, place, config.data.name, transport, places,
            worker, masker, self._tell, self._wall,
        )  # fmt: skip
        self._transport = await stack.enter_async_context(transport)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._wall())

    async def _end(self) -> None:
        """Bye, and no more work; both at once, since neither may take long."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(self._transport.close(), _stopped(*self._workers))

    def _tell(self, notice: Notice) -> None:
        """Tell people, and with `once` end when the run is over."""
        self.report.note(notice)
        for listener in self._listeners:
            listener(notice)
        if self._once and isinstance(notice, Delivered):
            self.close()

    # --- what happens -----------------------------------------------------------------------------

    async def _pump(self) -> None:
        async for event in self._transport:
            self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case Connected(server, _, _):
                identity = self._desk.identity
                expires = identity.keys[0].certificate.not_after
                self._tell(ConnectedTo(server, identity.client, not self._insecure, expires))
                self._renew_keys()
            case Lost(error, wait_s):
                self._renewing = False
                self._tell(Disconnected(str(error), wait_s))
            case Came(frame):
                self._came(frame)
            case Received(offer, sink):
                at = Position.of(offer.at)
                self._arrived.setdefault(at, []).append((offer, sink))
                for work in self._at(at):
                    work.received(offer, sink)
            case Sent(offer):
                for work in self._at(Position.of(offer.at)):
                    work.sent(offer)
            case NewRoster():
                self._renew_keys()

    def _came(self, frame: pb.ServerFrame) -> None:
        match frame.WhichOneof("body"):
            case "task":
                self._asked(frame.task)
            case "outcome":
                self._settled(frame.outcome)
            case "secagg":
                for work in self._at(Position.of(frame.secagg.at)):
                    work.secagg(frame.secagg.data)
            case "retry_at":
                self._tell(Waiting(frame.retry_at.delay_ms / 1000, frame.retry_at.reason))
            case "renewed":
                self._renewed(frame.renewed)
            case _:
                pass

    def _at(self, at: Position) -> list[Work]:
        """The work at a position: of a round and of its evaluation there may be one each."""
        return [work for work, _ in self._works.values() if work.at == at]

    def _asked(self, task: pb.Task) -> None:
        at = Position.of(task.at)
        key = (at.run, task.work)
        if key in self._works:
            before, running = self._works[key]
            if before.at == at and before.over:  # once that is written down, it is known for old work
                running.add_done_callback(lambda done: None if done.cancelled() else self._asked(task))
                return
            if before.at == at and _same(before.task, task):
                before.again()
                return
            self._drop(key, at)
        if task.work == pb.DELIVER:
            self._drop((at.run, pb.TRAIN))
        for older in self._seen.get(at.run, set()) - {at}:
            self._forget(older)
        self._seen[at.run] = {each for each in self._seen.get(at.run, set()) if self._at(each)} | {at}
        try:
            work = work_of(self._desk, task)
        except MyceliaError as error:
            self._answer(at, error)
            return
        for offer, sink in self._arrived.get(at, []):  # what is here does not come again
            work.received(offer, sink)
        task_of = asyncio.create_task(self._go(key, work))
        self._works[key] = work, task_of
        self._tasks.add(task_of)
        task_of.add_done_callback(self._tasks.discard)

    def _drop(self, key: tuple[str, int], newer: Position | None = None) -> None:
        """The run goes on without this work."""
        if key not in self._works:
            return
        before, running = self._works.pop(key)
        if not before.over:  # else it is about to end by itself
            running.cancel()
        if before.late and (newer is None or before.at.round != newer.round):
            if before.job is not None:
                before.job.forget(before.at.round)
            hint = "the run went on without this device's update"
            self._tell(Failed(before.at, str(Reason.LATE), hint))
        if newer is None or before.at.round != newer.round:
            self._desk.give_up()

    def _settled(self, outcome: pb.Outcome) -> None:
        at = Position.of(outcome.at)
        works = sorted(self._at(at), key=lambda work: work.kind)
        if works:
            works[0].settled(outcome)
            return
        known = self._desk.journal.highest(at.run)
        if known == (at.round, at.attempt) and self._desk.journal.task(at.run) is not None:
            self._desk.settle(at)  # of work from before a restart
            self._tell(Failed(at, outcome.reason, outcome.hint) if outcome.code else Accepted(at))

    async def _go(self, key: tuple[str, int], work: Work) -> None:
        error: Exception | None = None
        try:
            await work.run()
        except Stopped:
            pass
        except Exception as raised:  # a user's model, data or function: it fails this work alone
            error = raised
        finally:
            known = self._works.get(key)
            if known is not None and known[0] is work:
                del self._works[key]
        if error is not None:
            self._answer(work.at, error)
        self._renew_keys()

    def _answer(self, at: Position, error: Exception) -> None:
        """Work that is not allowed, or came to nothing: the server is told, but nothing of the data."""
        journal = isinstance(error, SecureSumError) and error.reason is SumReason.JOURNAL
        if journal or isinstance(error, JournalError | IdentityProblem):
            self._give_up(error)
            return
        if isinstance(error, BudgetExceeded):
            error = Refused("limits.epsilon", "one more release", "what the budgets pay for")
        if isinstance(error, Refused):
            self._tell(Declined(at, error.field, error.asked, error.allowed))
            self._transport.send(declined(at, error))
        elif isinstance(error, Problem):
            self._tell(Failed(at, str(error.reason), str(error)))
            self._transport.send(failed(at, error, ""))
        else:
            known = isinstance(error, ConfigError | CaptureError | SecureSumError)
            found = str(getattr(error, "found", "")) if known else ""
            self._tell(Failed(at, "failed", f"{error}" if isinstance(error, MyceliaError) else repr(error)))
            said = found or f"{type(error).__name__}; what the device itself says tells more"
            self._transport.send(failed(at, None, said))
        self._forget(at)

    def _forget(self, at: Position) -> None:
        """Nothing of a position is sent or taken any more, unless there is other work."""
        if not self._at(at):
            self._transport.forget(at)
            self._desk.places.forget(at)
            self._arrived.pop(at, None)

    def _give_up(self, error: Exception) -> None:
        if self._fatal is not None and not self._fatal.done():
            self._fatal.set_exception(error)

    # --- keys -------------------------------------------------------------------------------------

    async def _look_at_keys(self) -> None:
        while True:
            self._renew_keys()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await asyncio.Event().wait()

    def _renew_keys(self) -> None:
        """Ask for new keys when it is time, but never in the middle of work."""
        identity = self._desk.identity
        due = bool(identity.keys) and self._wall() >= identity.keys[0].renew_after
        if not due or self._renewing or self._works or not self._transport.connected:
            return
        self._renewing = True
        self._transport.send(pb.ClientFrame(renew=identity.renew_request()))

    def _renewed(self, reply: pb.Renewed) -> None:
        self._renewing = False
        identity = self._desk.identity
        try:
            keys = identity.accept_renewed(reply, int(self._wall()))
        except (IdentityProblem, SecureSumError) as error:
            self._tell(Disconnected(f"the new keys are refused: {error}", 0.0))
            return
        self._tell(KeysRenewed(keys.certificate.not_after))
        self._transport.reconnect()


def _loaded(config: ClientConfig) -> Dataset:
    with user_code(f"data {config.data.name}"):
        return load(config.data.name, **config.data.options)


def _same(before: pb.Task, task: pb.Task) -> bool:
    """Whether a task came again; the time that is left differs, and which server signs for a secure sum."""
    first, second = pb.Task(), pb.Task()
    first.CopyFrom(before)
    second.CopyFrom(task)
    for each in (first, second):
        each.remaining_ms = 0
        each.secure_sum = _unsigned(each.secure_sum)
    return first == second


def _unsigned(data: bytes) -> bytes:
    """What an envelope says; other bytes as they are."""
    try:
        return Envelope.decode(data, envelope_limit(None)).signed if data else data
    except SecureSumError:
        return data


async def _until(event: asyncio.Event) -> None:
    await event.wait()


async def _stopped(*workers: Worker) -> None:
    await asyncio.gather(*(worker.stop() for worker in workers))
