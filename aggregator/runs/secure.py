"""A round whose updates are masked: the machine of the secure sum, over devices and a log.

    advertise, share   while devices get the model and begin to train
    masked             until they have trained
    agree, unmask      then the sum is opened

An attempt that fails for its devices is followed by another with those that are left, in the same budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Final

from mycelia.aggregator.attempts import MAX_ATTEMPTS, RoundAttempts, Suspects
from mycelia.aggregator.log_records import Issued, Machine, Open
from mycelia.aggregator.outcomes import DeviceOutcome
from mycelia.aggregator.recovery import HEARTBEATS, Recovery
from mycelia.aggregator.round_log import INLINE_BYTES
from mycelia.aggregator.runs.context import Context, Stopped
from mycelia.aggregator.runs.gathering import Failure, Gathered, Gathering
from mycelia.aggregator.runs.session_config import phase_seconds, session_config
from mycelia.aggregator.runs.state import Current
from mycelia.aggregator.runs.tasks import Assignment, envelope_frame, off_loop
from mycelia.aggregator.secagg import SecureSumServer, ServerResult
from mycelia.aggregator.secure_plans import SecurePlan
from mycelia.aggregator.spool import Spooled
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.payload import check_masked_size
from mycelia.aggregator.wire.position import Position
from mycelia.engine import events
from mycelia.engine.errors import BudgetExceeded, MyceliaError
from mycelia.privacy.secagg import keys
from mycelia.privacy.secagg.canonical import PHASES, SecureSumError
from mycelia.privacy.secagg.canonical import Reason as SumReason
from mycelia.privacy.secagg.events import (
    CHUNK_BYTES,
    Abort,
    Charge,
    ChargeRefused,
    ChunkReceived,
    Close,
    Effect,
    Event,
    Finish,
    Left,
    Persist,
    Received,
    Record,
    Refuse,
    Release,
    Send,
    Tick,
)
from mycelia.privacy.secagg.keys import Identity
from mycelia.privacy.secagg.messages import SERVER, Config
from mycelia.privacy.secagg.messages import Abort as AbortMessage

__all__ = ["SecureRound"]

_SHOWN: Final[Mapping[str, str]] = {
    "advertise": "configure", "share": "configure", "masked": "train", "agree": "agree", "unmask": "unmask",
}  # fmt: skip


class SecureRound(Gathering):
    """One round.

    Args:
        context: of the run.
        opened: its record.
        current: the model that devices get.
        message: what goes with it.
        identity: the server's key.
        suspects: of the run.
        k: updates wanted.
        charge: called with what is about to be opened, before anything of it is.
    """

    def __init__(
        self,
        context: Context,
        opened: Open,
        current: Current,
        message: Payload | None,
        identity: Identity,
        suspects: Suspects,
        k: int,
        charge: Callable[[Release], None] | None,
    ) -> None:
        super().__init__(context, Position(context.name, opened.round, opened.attempt))
        plan = context.plan.secure
        if plan is None:
            raise MyceliaError("a round without a secure sum", who=context.name)
        self._plan: SecurePlan = plan
        self._opened, self._current, self._message = opened, current, message
        self._identity, self._suspects, self._k, self._charge = identity, suspects, k, charge
        self._seconds = phase_seconds(context.deadlines)
        self._attempts: RoundAttempts
        self._now = self.at  # position of the attempt
        self._assignment: Assignment
        self._machine: SecureSumServer
        self._result: ServerResult
        self._asked: tuple[int, ...] = ()
        self._hello = b""  # the configuration of the session, as it is sent
        self._last: dict[int, bytes] = {}  # what each was sent last, for those who come back
        self._earlier: list[DeviceOutcome] = []  # of attempts that failed
        self._early: dict[int, Spooled] = {}  # vectors whose header has yet to come
        self._lost: dict[int, str] = {}
        self._left: dict[int, tuple[str, str]] = {}
        self._rejected: dict[int, SecureSumError] = {}
        self._phase_ms: dict[str, float] = {}
        self._entered: tuple[str, float] = ("", 0.0)
        self._last_phase = "advertise"
        self._released = False

    # --- the round --------------------------------------------------------------------------------

    async def gather(self, recovery: Recovery | None = None) -> Gathered:
        """From asking the devices to an opened sum that is durable.

        Args:
            recovery: what the log says of a round that goes on.

        Raises:
            Failure: no sum.
            Stopped: the run is to stop.
        """
        clock = self.context.clock
        left = self._opened.budget_s if recovery is None else recovery.budget_s
        n_min = self._plan.config.n_min
        limit = min(self.context.plan.config.round.max_attempts, MAX_ATTEMPTS)
        budget = max(sum(self._seconds), self._least)
        began = clock() - min(max(0.0, self._opened.budget_s - left), budget - self._least)
        self._attempts = RoundAttempts(
            self._opened.clients, n_min, budget, self._suspects, began=began, limit=limit
        )
        if recovery is not None and recovery.issued:
            self.issued = dict(recovery.issued)
            self._attempts.number = recovery.attempt - self.at.attempt
            self._attempts.clients = tuple(
                sorted(client for client, attempt in recovery.issued.items() if attempt == recovery.attempt)
            )
        if len(self._attempts.clients) < n_min:
            raise self._short(len(self._attempts.clients), n_min)
        again = recovery
        while True:
            try:
                outcome = await self._attempt(again)
            except Stopped:
                with suppress(Problem):  # what is not in the snapshot is asked for again
                    await self._carry_out(self._machine.snapshot())
                raise
            again = None
            if isinstance(outcome, ServerResult):
                return self._gathered(outcome)
            missed = {client for client, phase in self._lost.items() if phase != "late"}
            if self._released or not self._attempts.go_on(outcome, missed | self._left.keys(), clock()):
                raise self._failure(outcome)
            self._earlier += self._outcomes_now(frozenset(), outcome)

    def merged(self) -> list[DeviceOutcome]:
        """What became of everybody."""
        return self._outcomes(frozenset(self._result.survivors))

    def outcomes_of_failed(self, reason: str, cause: str) -> list[DeviceOutcome]:
        """The sum does not become a model: what became of everybody."""
        del reason, cause
        return self.merged()

    # --- what devices say -------------------------------------------------------------------------

    def held(self, client: int) -> Iterable[pb.Held]:
        """See `Gathering.held`."""
        if client not in self._last:
            return []
        return [pb.Held(at=self._now.to_wire(), phase=self._machine.phase, kind=pb.MASKED)]

    def connected(self, client: int) -> None:
        """See `Gathering.connected`."""
        self.queue.put_nowait((client, "again"))

    def frame(self, client: int, frame: pb.ClientFrame) -> None:
        """See `Gathering.frame`."""
        body = frame.WhichOneof("body")
        if body not in ("ready", "decline", "secagg"):
            raise Problem(Reason.WRONG_PHASE, f"a frame {body}", rule="the sum of this run is a secure one")
        at = Position.of(getattr(frame, body).at)
        if problem := self.wrong_position(at, self._now.attempt):
            raise problem
        if at == self._now:  # else it is of an attempt that is over
            self.queue.put_nowait((client, frame))

    def offered(self, client: int, offer: pb.Offer) -> None:
        """See `Gathering.offered`."""
        at = Position.of(offer.at)
        if problem := self.wrong_position(at, self._now.attempt):
            raise problem
        if at != self._now or client not in self._asked or offer.kind not in (pb.MASKED, pb.ENVELOPE):
            raise Problem(
                Reason.WRONG_PHASE,
                f"a payload {pb.Kind.Name(offer.kind)} of {at}",
                rule="what was asked for",
                who=f"client {client}",
            )
        if offer.kind == pb.MASKED:
            check_masked_size(offer.size, self._machine.config)
            closed = self._machine.phase not in ("advertise", "share", "masked")
            if closed and client not in self._machine.folded:
                raise Problem(
                    Reason.LATE,
                    "the round did not wait for it",
                    rule="an update comes before the round closes",
                    fix="take the next task",
                    who=f"client {client}",
                    phase="train",
                )

    # --- an attempt -------------------------------------------------------------------------------

    async def _attempt(self, recovery: Recovery | None) -> ServerResult | SecureSumError:
        clock, number = self.context.clock, self._attempts.number
        self._now = self.at._replace(attempt=self.at.attempt + number)
        self._asked = self._attempts.clients
        for kept in (self._last, self._lost, self._left, self._rejected, self._phase_ms):
            kept.clear()
        self._entered = ("", 0.0)
        await self._drop_early()
        ends_at = clock() + self._attempts.left(clock())
        self._assignment = Assignment(
            self.context, self._now, pb.TRAIN, self._current, self._message, ends_at
        )
        for client in self._asked:
            self.context.floor.take(client, self.context.name)
        self.context.board.asked(self.context.name, self._asked)
        restored = recovery is not None and recovery.action == "session"
        if recovery is not None and restored:
            try:
                self._machine = self._restored(recovery)
            except SecureSumError as error:
                return await self._give_up(error)
        else:
            try:
                self._machine = self._made(self._seconds_left(recovery))
            except SecureSumError as error:
                raise Failure("secure_sum", error.found, [], again=False) from error
            if recovery is None or not recovery.issued:
                await self.context.append(Issued(self._now.attempt, self._asked))
                self.issued.update(dict.fromkeys(self._asked, self._now.attempt))
        config = self._machine.config
        self._hello = keys.sign(Config(config), config.session_id, SERVER, self._identity).encode()
        effects = self._machine.handle(Tick(self._first_tick(recovery) if restored else clock()))
        if self._machine.phase == "masked" and len(self._machine.folded) >= self._k:
            effects += self._handle(Close("masked"))
        while True:
            outcome = await self._carry_out(effects)
            self._show()
            if outcome is not None:
                return outcome
            event = await self.next(self._machine.deadline)
            effects = await self._happen(event)

    @property
    def _least(self) -> float:
        """Seconds that a phase has at least after a restart."""
        return HEARTBEATS * self.context.deadlines.waits.heartbeat

    def _seconds_left(self, recovery: Recovery | None) -> tuple[float, ...]:
        first, *others = self._attempts.deadlines(self._seconds, self.context.clock())
        return (first if recovery is None else max(first, self._least), *others)

    def _first_tick(self, recovery: Recovery | None) -> float:
        """What time it is for a session that goes on, so that its phase ends when it should.

        That is when the budget says, and not before devices had time to come back.
        """
        now, deadlines = self.context.clock(), self.context.deadlines
        phase = self._machine.phase
        if recovery is None or phase not in PHASES:
            return now
        place = PHASES.index(phase)
        ends = (
            deadlines.advertise, deadlines.configure, deadlines.train, deadlines.agree, deadlines.unmask
        )[place]  # fmt: skip
        whole = self._machine.config.deadlines_ms[place] / 1000
        due = now + ends - (self._opened.budget_s - recovery.budget_s)
        return max(now + self._least, min(due, now + whole)) - whole

    def _made(self, seconds: Sequence[float]) -> SecureSumServer:
        roster = self.context.service.roster
        config = session_config(self._plan, self._assignment.task, roster.sha256, len(self._asked), seconds)
        return SecureSumServer(
            config, self._plan.quantise.size, self._asked, self._identity, roster,
            unix_time=int(self.context.wall()),
        )  # fmt: skip

    def _restored(self, recovery: Recovery) -> SecureSumServer:
        self._released = any(record.kind == "CHARGED" for record in recovery.session)
        return SecureSumServer.restore(
            recovery.session, self._plan.quantise.size, self._identity, self.context.service.roster,
            unix_time=int(self.context.wall()),
        )  # fmt: skip

    async def _give_up(self, error: SecureSumError) -> SecureSumError:
        """A session that cannot go on after a restart, because the roster is another one."""
        if error.reason == SumReason.CONFIG:  # as far as this session is concerned
            error = SecureSumError(SumReason.SESSION, error.found, rule=error.rule, who=error.who)
        record = Record("FAILED", AbortMessage.of(error).encode())
        await self.context.append(Machine(self._now.attempt, record))
        self._machine = self._made(self._seconds_left(None))  # nobody is asked by it
        return error

    # --- events -----------------------------------------------------------------------------------

    async def _happen(self, event: object) -> list[Effect]:
        # phases are timed from the moment they open, so the machine has to know what time it is
        return [*self._handle(Tick(self.context.clock())), *await self._take_in(event)]

    async def _take_in(self, event: object) -> list[Effect]:
        match event:
            case None:
                return []
            case (int(client), Spooled() as payload):
                return await self._take(client, payload)
            case (int(client), Problem() as problem):
                return self._leave(client, "DROPPED", f"{problem.reason}", problem.hint)
            case (int(client), "again"):
                self._send_again(client)
                return []
            case (int(client), pb.ClientFrame() as frame) if frame.HasField("secagg"):
                return await self._received(client, frame.secagg.data)
            case (int(client), pb.ClientFrame() as frame) if frame.HasField("decline"):
                decline = frame.decline
                if not decline.field:
                    return self._leave(client, "DROPPED", decline.reason or "declined", "")
                hint = f"asked {decline.asked}, allowed {decline.allowed}"
                return self._leave(client, "DECLINED", decline.field, hint)
            case _:
                return []

    def _handle(self, event: Event) -> list[Effect]:
        """Give the machine an event, and see who missed the end of a phase."""
        before, waits_for = self._machine.phase, self._machine.waits_for
        effects = self._machine.handle(event)
        if self._machine.phase != before and isinstance(event, Tick | Close):
            for client in waits_for - self._left.keys():
                self._lost.setdefault(client, "late" if isinstance(event, Close) else before)
        return effects

    async def _received(self, client: int, data: bytes) -> list[Effect]:
        self.bytes_up[client] = self.bytes_up.get(client, 0) + len(data)
        effects = self._handle(Received(client, data))
        early = self._early.pop(client, None)
        return effects + await self._take(client, early) if early is not None else effects

    async def _take(self, client: int, payload: Spooled) -> list[Effect]:
        """A payload is complete: a message, or a vector, once its header is there."""
        if payload.manifest.at != self._now:
            await self.context.service.release(payload)
            return []
        if payload.manifest.kind == pb.ENVELOPE:
            with payload.open() as data:
                message = bytes(data)
            await self.context.service.release(payload)
            return await self._received(client, message)
        if self._machine.phase == "masked" and not self._machine.expects_upload(client):
            if client not in self._machine.folded:
                self._early[client] = payload
                return []
        elif self._machine.phase == "masked":
            self.bytes_up[client] = self.bytes_up.get(client, 0) + payload.manifest.size
        effects: list[Effect] = []
        await off_loop(payload.manifest.size, partial(self._feed, client, payload, effects))
        await self.context.service.release(payload)
        if self._machine.phase == "masked" and len(self._machine.folded) >= self._k:
            effects += self._handle(Close("masked"))
        return effects

    def _feed(self, client: int, payload: Spooled, effects: list[Effect]) -> None:
        """The chunks of a vector, out of the spool; the machine keeps views until all are added."""
        bits = self._machine.config.bits
        size = CHUNK_BYTES - CHUNK_BYTES % bits
        with payload.open() as data, memoryview(data) as view:
            parts = [view[start : start + size] for start in range(0, len(view), size)]
            for number, part in enumerate(parts):
                effects += self._handle(ChunkReceived(client, number, part))
            for part in parts:
                part.release()

    def _leave(self, client: int, status: str, cause: str, hint: str) -> list[Effect]:
        if client not in self._asked:
            return []
        self._left.setdefault(client, (status, f"{cause}\n{hint}".strip()))
        self._lost.setdefault(client, self._machine.phase)
        return self._handle(Left(client, cause))

    def _send_again(self, client: int) -> None:
        phase = self._machine.phase
        if phase == "idle" or client not in self._asked or client in self._left:
            return
        if phase == "advertise" or (phase in ("share", "masked") and client not in self._machine.folded):
            self._push_task(client)  # it may have neither task nor model
        if client in self._last and phase != "advertise":
            self._push(client, self._last[client])

    async def _drop_early(self) -> None:
        for payload in self._early.values():
            await self.context.service.release(payload)
        self._early.clear()

    # --- effects ----------------------------------------------------------------------------------

    async def _carry_out(self, effects: Sequence[Effect]) -> ServerResult | SecureSumError | None:
        """In their order; records that stand together share a sync."""
        records: list[Machine] = []
        outcome: ServerResult | SecureSumError | None = None
        for effect in effects:
            if isinstance(effect, Persist):
                records.append(Machine(self._now.attempt, effect.record))
                continue
            await self._write(records)
            match effect:
                case Send(to, data):
                    self._last[to] = data
                    self._push(to, data)
                case Charge(release):
                    refused = await self._pay(release)
                    if refused:
                        return await self._carry_out(self._handle(ChargeRefused(refused)))
                    self._released = True
                case Refuse(to, error):
                    self._rejected[to] = error
                case Finish(result):
                    outcome = result
                case Abort(error):
                    outcome = error
                case _:
                    pass
        await self._write(records)
        return outcome

    async def _write(self, records: list[Machine]) -> None:
        if records:
            await self.context.append(*records)
            large = [each.record.body for each in records if len(each.record.body) > INLINE_BYTES]
            self.blobs += [sha256(body).digest() for body in large]
            records.clear()

    def _push_task(self, client: int) -> None:
        if self._assignment.push(client, self._hello):
            self.note_asked([client], self._assignment.bytes_down + len(self._hello))

    def _push(self, client: int, data: bytes) -> None:
        if data == self._hello:
            self._push_task(client)
            return
        envelope_frame(self.context, client, self._now, data)
        self.bytes_down[client] = self.bytes_down.get(client, 0) + len(data)

    async def _pay(self, release: Release) -> str:
        """Why the ledger does not allow it; "" where it does."""
        if self._charge is None:
            return ""
        try:
            await asyncio.to_thread(self._charge, release)
        except BudgetExceeded as error:
            return error.found
        return ""

    # --- the end ----------------------------------------------------------------------------------

    def _gathered(self, result: ServerResult) -> Gathered:
        self._result = result
        decoded, plan = result.decoded, self._plan
        total = plan.quantise.opened(decoded.values, decoded.weight, decoded.slots, len(result.survivors))
        report = plan.quantise.report(total)
        event = self._event(
            attempts=self._attempts.number + 1,
            survivors=len(result.survivors),
            phase_ms=dict(self._phase_ms),
            bytes_up=sum(self.bytes_up.values()),
            bytes_down=sum(self.bytes_down.values()),
            upload_bytes=plan.config.upload_bytes,
            transcript_sha256=result.transcript.hex(),
            clipped=report.get("clipped"),
        )
        return Gathered(result.survivors, None, total, report, attempt=self._now.attempt, secure=event)

    def _failure(self, error: SecureSumError) -> Failure:
        found = f"{error.found} ({error.who})" if error.who else error.found
        event = self._event(failed=str(error.reason), attempts=self._attempts.number + 1)
        over = self._released or error.reason in (SumReason.BUDGET, SumReason.CONFIG, SumReason.OVERFLOW)
        return Failure("secure_sum", found, self._outcomes(frozenset(), error), again=not over, secure=event)

    def _short(self, have: int, need: int) -> Failure:
        found = f"{SumReason.COHORT_TOO_SMALL}: {have} clients are left to ask, and {need} are needed"
        return Failure("below_quorum", found, [], secure=None)

    def _event(self, **more: object) -> events.SecureSum:
        gone: dict[str, int] = {}
        for phase in self._lost.values():
            name = "masked" if phase == "late" else phase
            gone[name] = gone.get(name, 0) + 1
        faults: dict[str, int] = {}
        for error in self._machine.faults:
            faults[str(error.reason)] = faults.get(str(error.reason), 0) + 1
        return events.SecureSum(
            round=self.at.round + 1,
            masked=True,
            asked=len(self._asked),
            n_min=self._plan.config.n_min,
            dropped=gone,
            faults=faults,
            settings=self._plan.facts(),
            **more,  # type: ignore[arg-type]
        )

    def _outcomes(
        self, survivors: frozenset[int], error: SecureSumError | None = None
    ) -> list[DeviceOutcome]:
        return [*self._earlier, *self._outcomes_now(survivors, error)]

    def _outcomes_now(self, survivors: frozenset[int], error: SecureSumError | None) -> list[DeviceOutcome]:
        """Of the attempt."""
        return [self._outcome(client, survivors, error) for client in self._asked]

    def _outcome(self, client: int, survivors: frozenset[int], error: SecureSumError | None) -> DeviceOutcome:
        attempt = self._now.attempt
        if client in survivors:
            return self.settled(client, attempt, "ACCEPTED", "train")
        if client in self._left:
            status, words = self._left[client]
            cause, _, hint = words.partition("\n")
            return self.settled(client, attempt, status, self._lost.get(client, ""), cause, hint)
        if client in self._rejected:
            refused = self._rejected[client]
            if refused.reason == SumReason.LATE:
                return self.settled(client, attempt, "LATE", "masked", "the round did not wait for it")
            return self.settled(
                client, attempt, "REJECTED", refused.phase or "", str(refused.reason), refused.rule or ""
            )
        phase = self._lost.get(client, "")
        if phase == "late":
            return self.settled(client, attempt, "LATE", "masked", "the cohort was complete")
        if phase:
            hint = "is the device switched on and connected?"
            return self.settled(client, attempt, "DROPPED", phase, f"no answer in {phase}", hint)
        cause = "the round ended without a sum" if error is None else f"the round failed: {error.reason}"
        return self.settled(client, attempt, "LATE", self._last_phase, cause)

    def _show(self) -> None:
        phase, now = self._machine.phase, self.context.clock()
        name, since = self._entered
        if phase == name:
            return
        if name:
            self._phase_ms[name] = 1000 * (now - since)
        self._entered = (phase, now)
        self._last_phase = phase if phase in PHASES else self._last_phase
        shown = _SHOWN.get(phase)
        if shown:
            self.context.board.phase(
                self.context.name, self.at.round + 1, self._now.attempt, shown, self._machine.deadline
            )
