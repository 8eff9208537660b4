"""A round whose updates are summed as they come: the round machine, over devices and a log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch

from mycelia.aggregator.effects import Abort, Configure, Effect, Merge, Outcome
from mycelia.aggregator.log_records import Accepted, Issued, Open, Snapshot
from mycelia.aggregator.outcomes import DeviceOutcome, Fate
from mycelia.aggregator.recovery import HEARTBEATS, Recovery
from mycelia.aggregator.rounds import Round
from mycelia.aggregator.runs.context import Context
from mycelia.aggregator.runs.gathering import Failure, Gathered, Gathering, Stopped
from mycelia.aggregator.runs.partials import Partial, add_partial
from mycelia.aggregator.runs.state import Current
from mycelia.aggregator.runs.tasks import Assignment, off_loop
from mycelia.aggregator.runs.updates_check import METRICS, Asked, checked_header, expected_of, meta_of
from mycelia.aggregator.spool import Spooled
from mycelia.aggregator.store_problems import corrupt
from mycelia.aggregator.tensor_sum import TensorSum
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.offers import Buffer, Payload
from mycelia.aggregator.wire.payload import TensorsCheck, check_tensors_size, expected
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import clipped
from mycelia.aggregator.wire.update_header import UpdateHeader
from mycelia.engine.sums import ExactSum

__all__ = ["PlainRound", "restored_sum"]

SNAPSHOT_EVERY: Final = 64
"""Updates folded between two snapshots of the sum, at most."""
SNAPSHOT_BYTES: Final = 2**30
"""The same, bytes of updates."""

_FATES: Final[Mapping[str, Fate]] = {
    "accepted": "ACCEPTED", "late": "LATE", "unused": "LATE", "dropped": "DROPPED", "failed": "DROPPED",
    "rejected": "REJECTED",
}  # fmt: skip
_POLICY: Final = "policy: "


class _Refusal(NamedTuple):
    """An offer was refused for what it says of itself."""

    client: int
    attempt: int
    problem: Problem


class PlainRound(Gathering):
    """One round.

    Args:
        context: of the run.
        opened: its record.
        current: the model that devices get.
        message: what goes with it.
        keys: identity keys of the devices, as they connect.
        k: updates wanted.
    """

    def __init__(
        self,
        context: Context,
        opened: Open,
        current: Current,
        message: Payload | None,
        keys: Mapping[int, bytes],
        k: int,
    ) -> None:
        super().__init__(context, Position(context.name, opened.round, opened.attempt))
        plan = context.plan
        self._opened, self._current, self._keys = opened, current, keys
        self._expected = expected_of(plan, self.at)
        self.machine = Round(
            self._expected, opened.clients, k, plan.config.round, evaluate=False, deadlines=context.deadlines
        )
        self._exact = ExactSum(plan.form)
        self._sum = TensorSum(
            self._exact, plan.entries.schema, plan.entries.roles, plan.entries.more,
            base=current.model.data, layout=current.layout,
        )  # fmt: skip
        self._tensors, self._layout_of = expected(*plan.entries), TensorsCheck(*plan.entries)
        self._message = message
        self._assignments: dict[int, Assignment] = {}
        self._headers: dict[tuple[int, int, bytes], UpdateHeader] = {}
        self._known: dict[int, bytes] = {}  # accepted, be it before a restart
        self._folded: set[int] = set()
        self._sums = dict.fromkeys(METRICS, 0.0)
        self._unsaved = self._unsaved_bytes = 0
        self._writes: list[asyncio.Future[bool]] = []
        self._retried: list[DeviceOutcome] = []
        self._merge: Merge | None = None
        self._snapshot: bytes | None = None
        self._phase = ""

    # --- the round --------------------------------------------------------------------------------

    async def gather(self, recovery: Recovery | None = None) -> Gathered:
        """From asking the devices to a sum that is fixed and durable.

        Args:
            recovery: what the log says of a round that goes on.

        Raises:
            Failure: no sum.
            Stopped: the run is to stop.
        """
        effects = self.machine.start(self.context.clock()) if recovery is None else self._resumed(recovery)
        try:
            await self._carry_out(effects)
            while self._merge is None and self.machine.result is None:
                self._show()
                await self._carry_out(await self._happen(await self.next(self.machine.deadline)))
        except Stopped:
            with suppress(Problem):  # what is not in the snapshot is asked for again
                await self._save()
            raise
        if self._merge is None:
            raise self._failure()
        await self._save()
        survivors = tuple(int(client) for client in self._merge.survivors)
        return Gathered(survivors, self._exact, None, dict(self._sums), self._snapshot, self._newest)

    def merged(self) -> list[DeviceOutcome]:
        """The merged model is about to be published: what became of everybody.

        Raises:
            Failure: it took too long.
        """
        self.machine.merged(self.context.clock())
        if isinstance(self.machine.result, Abort):
            raise self._failure()
        return self._outcomes()

    def outcomes_of_failed(self, reason: str, cause: str) -> list[DeviceOutcome]:
        """The sum does not become a model: what became of everybody."""
        del reason
        self.machine.merge_failed(cause, self.context.clock())
        return self._outcomes()

    # --- what devices say -------------------------------------------------------------------------

    def held(self, client: int) -> Iterable[pb.Held]:
        """See `Gathering.held`."""
        attempt = self.machine.pending.get(client)
        if attempt is None:
            return []
        at = self.at._replace(attempt=attempt)
        return [pb.Held(at=at.to_wire(), phase=self.machine.phase, kind=pb.UPDATE)]

    def connected(self, client: int) -> None:
        """See `Gathering.connected`."""
        attempt = self.machine.pending.get(client)
        if attempt is not None and self.issued.get(client) == attempt:  # else it is about to be
            self._push(client, attempt)

    def frame(self, client: int, frame: pb.ClientFrame) -> None:
        """See `Gathering.frame`."""
        body = frame.WhichOneof("body")
        if body not in ("ready", "decline"):
            raise Problem(Reason.WRONG_PHASE, f"a frame {body}", rule="the sum of this run is a plain one")
        at = Position.of(getattr(frame, body).at)
        if problem := self.wrong_position(at, self._newest):
            raise problem
        self.queue.put_nowait((client, frame))

    def offered(self, client: int, offer: pb.Offer) -> None:
        """See `Gathering.offered`."""
        at = Position.of(offer.at)
        if offer.kind != pb.UPDATE:
            raise Problem(Reason.WRONG_PHASE, f"a payload {pb.Kind.Name(offer.kind)}", rule="an UPDATE")
        if problem := self.wrong_position(at, self._newest):
            raise problem
        asked = self.issued.get(client)
        if asked != at.attempt:
            stale = asked is not None and at.attempt < asked
            raise Problem(
                Reason.STALE_ROUND if stale else Reason.WRONG_PHASE,
                f"an update of attempt {at.attempt}",
                rule="a device answers what it was asked last" if asked is not None else "it was not asked",
                fix="wait for the next task",
                who=f"client {client}",
                phase="train",
            )
        first = self._known.get(client)
        if first is not None and first != offer.sha256:
            raise Problem(
                Reason.EQUIVOCATION,
                "another update than the first one",
                rule="the first update of a device in an attempt stands",
                who=f"client {client}",
                phase="train",
            )
        awaited = self.machine.awaits(client, at.attempt)
        if not awaited and first is None:
            raise self._late(client)
        try:
            self._headers[client, at.attempt, offer.sha256] = self._checked(client, at, offer)
        except Problem as problem:
            if awaited:  # it will send no other one
                self.queue.put_nowait(_Refusal(client, at.attempt, problem))
            raise

    def turned_away(self, client: int, at: Position, problem: Problem) -> None:
        """See `Gathering.turned_away`."""
        if self.machine.awaits(client, at.attempt):
            self.queue.put_nowait(_Refusal(client, at.attempt, problem))

    def _checked(self, client: int, at: Position, offer: pb.Offer) -> UpdateHeader:
        """The header of an offer, after all that can be known before the payload is there."""
        check_tensors_size(offer.size, self._tensors)
        asked = Asked(at, self._current.model_sha256, self._expected._replace(attempt=at.attempt))
        return checked_header(self.context.plan, asked, client, self._keys[client], offer)

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _newest(self) -> int:
        return max([self.at.attempt, *self.issued.values()])

    async def _happen(self, event: object) -> list[Effect]:
        now = self.context.clock()
        match event:
            case None:
                return self.machine.tick(now)
            case _Refusal(client, attempt, refused):
                self.finished.add(client)
                return self.machine.rejected(client, attempt, str(refused.reason), now, hint=refused.hint)
            case (int(client), Spooled() as payload):
                return await self._take(client, payload)
            case Partial() as partial_sum:
                return await self._merge_partial(partial_sum)
            case (int(client), Problem() as problem):
                asked = self.machine.pending.get(client)
                if asked is None:
                    return []
                return self.machine.dropped(client, asked, str(problem.reason), now, hint=problem.hint)
            case (int(client), pb.ClientFrame() as frame) if frame.HasField("decline"):
                return self._declined(client, frame.decline, now)
            case (int(client), pb.ClientFrame()):
                return self.machine.ready([client], now)
            case _:
                return []

    def _declined(self, client: int, decline: pb.Decline, now: float) -> list[Effect]:
        attempt = Position.of(decline.at).attempt
        if decline.field:
            cause = f"{_POLICY}{decline.field}"
            hint = f"asked {decline.asked}, allowed {decline.allowed}"
        else:
            cause, hint = decline.reason or "declined", ""
        self.finished.add(client)
        phase = "train" if self.machine.phase == "train" else "configure"
        return self.machine.failed(client, attempt, cause, now, phase=phase, hint=hint)  # type: ignore[arg-type]

    async def _take(self, client: int, payload: Spooled) -> list[Effect]:
        """A payload is complete: into the sum with it, whole or not at all."""
        at = payload.manifest.at or self.at
        header = self._headers.pop((client, at.attempt, payload.manifest.sha256), None)
        now = self.context.clock()
        self.bytes_up[client] = self.bytes_up.get(client, 0) + payload.manifest.size
        effects = self.machine.tick(now)
        try:
            if header is None or not self.machine.awaits(client, at.attempt):
                self._tell_late(client, at)
                return effects
            try:
                await off_loop(payload.manifest.size, partial(self._fold, payload, header))
            except Problem as problem:
                self._tell(client, problem.outcome(at))
                cause, hint = str(problem.reason), problem.hint
                return effects + self.machine.rejected(client, at.attempt, cause, now, hint=hint)
            meta = meta_of(client, at, self._expected.schema, header)
            self._writes.append(
                self.context.writer.put(Accepted(at.attempt, client, payload.manifest.sha256))
            )
            self._known[client] = payload.manifest.sha256
            self._folded.add(client)
            self._unsaved += 1
            self._unsaved_bytes += payload.manifest.size
            for name in self._sums:
                self._sums[name] += header.metrics.get(name, 0.0)
            effects += self.machine.update(meta, now)
            if self._unsaved >= SNAPSHOT_EVERY or self._unsaved_bytes >= SNAPSHOT_BYTES:
                await self._save()
            return effects
        finally:
            await self.context.service.release(payload)

    async def _merge_partial(self, found: Partial) -> list[Effect]:
        """The sum of another server's devices: into this one whole, or not at all.

        Of a partial sum nothing can be taken out. If one of its updates is here already, be it in another
        partial sum, or is not wanted any more, none of it is added; the others are asked for again.
        """
        now = self.context.clock()
        effects = self.machine.tick(now)
        wanted = [item for item in found.items if self.machine.awaits(item.client, item.at.attempt)]
        added = len(wanted) == len(found.items) <= self.machine.needed
        if added:
            try:
                size = 8 * len(self._exact.accumulator)
                await off_loop(size, lambda: add_partial(self._exact, found, self.context.blobs))
            except Problem as problem:
                if problem.reason is not Reason.STORE_CORRUPT:
                    raise
                added = False
        if not added:
            for item in wanted[: self.machine.needed]:
                self.context.service.again(item.client, item.at)
                self._push(item.client, item.at.attempt)
            return effects
        for item in found.items:
            self._writes.append(
                self.context.writer.put(Accepted(item.at.attempt, item.client, item.header.sha256))
            )
            self._known[item.client] = item.header.sha256
            self._folded.add(item.client)
            self._unsaved += 1
            self._unsaved_bytes += item.size
            self.bytes_up[item.client] = self.bytes_up.get(item.client, 0) + item.size
            for name in self._sums:
                self._sums[name] += item.header.metrics.get(name, 0.0)
        for item in found.items:
            effects += self.machine.update(
                meta_of(item.client, item.at, self._expected.schema, item.header), now
            )
        if self._unsaved >= SNAPSHOT_EVERY or self._unsaved_bytes >= SNAPSHOT_BYTES:
            await self._save()
        return effects

    def _fold(self, payload: Spooled, header: UpdateHeader) -> None:
        with payload.open() as data:
            layout = self._layout_of(data, payload.manifest.size)
            for _ in self._sum.fold(data, layout, header.weights):
                pass

    async def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Configure(_, attempt, clients):
                    named = tuple(int(client) for client in clients)
                    self._note_retries(named, attempt)
                    await self.context.append(Issued(attempt, named))
                    self.issued.update(dict.fromkeys(named, attempt))
                    self.finished.difference_update(named)
                    self._ask(named, attempt)
                case Merge():
                    self._merge = effect
                case _:
                    pass

    def _ask(self, clients: Sequence[int], attempt: int) -> None:
        self.context.board.asked(self.context.name, clients)
        for client in clients:
            self.context.floor.take(client, self.context.name)
            self._push(client, attempt)

    def _push(self, client: int, attempt: int) -> None:
        assignment = self._assignments.get(attempt)
        if assignment is None:
            at = self.at._replace(attempt=attempt)
            ends_at = self.machine.train_deadline
            assignment = Assignment(self.context, at, pb.TRAIN, self._current, self._message, ends_at)
            self._assignments[attempt] = assignment
        if assignment.push(client):
            self.note_asked([client], assignment.bytes_down)

    def _note_retries(self, clients: Sequence[int], attempt: int) -> None:
        """Whoever is asked again has failed once."""
        for client in clients:
            before = self.issued.get(client)
            if before is not None and before < attempt:
                cause = "it failed, and is asked again"
                self._retried.append(self.settled(client, before, "DROPPED", "train", cause))

    async def _save(self) -> None:
        """The sum as it stands, durably, after the records of what is in it."""
        if not self._unsaved:
            return
        writes, self._writes = self._writes, []
        await self.context.written(writes)
        accumulator = self._exact.accumulator
        blob = await self.context.durably(lambda: self.context.blobs.put(_parts(accumulator)))
        await self.context.append(Snapshot(tuple(sorted(self._folded)), blob.sha256))
        self._snapshot, self._unsaved, self._unsaved_bytes = blob.sha256, 0, 0
        before, self.blobs = self.blobs, [blob.sha256]
        if before:
            await asyncio.to_thread(self.context.discard, before)

    def _resumed(self, recovery: Recovery) -> list[Effect]:
        """Go on with a round after a restart, in what is left of its budget."""
        self._load(recovery)
        deadlines, now = self.context.deadlines, self.context.clock()
        least = HEARTBEATS * deadlines.waits.heartbeat
        began = now - max(0.0, self._opened.budget_s - recovery.budget_s)
        if not recovery.issued:  # nobody was asked
            return self.machine.start(max(began, now + least - deadlines.configure))
        self.issued = dict(recovery.issued)
        began = max(began, now + least - deadlines.train)
        effects = self.machine.resume(began, now, self.issued, self._folded)
        for client, attempt in self.machine.pending.items():
            self._ask([int(client)], attempt)
        return effects

    def _load(self, recovery: Recovery) -> None:
        self._known = dict(recovery.accepted)
        if recovery.snapshot is not None:
            with self.context.blobs.get(recovery.snapshot.sha256).open() as data:
                restored_sum(self._exact, data, len(recovery.snapshot.clients))
            self._folded = set(recovery.snapshot.clients)
            self._snapshot = recovery.snapshot.sha256
            self.blobs = [recovery.snapshot.sha256]

    def _tell_late(self, client: int, at: Position) -> None:
        """An update that is of no use; of one that is in the sum the outcome will say so."""
        if client in self._folded:
            return
        self._tell(client, self._late(client).outcome(at))

    def _late(self, client: int) -> Problem:
        return Problem(
            Reason.LATE, "the round did not wait for it", rule="an update comes before the round closes",
            fix="take the next task", who=f"client {client}", phase="train",
        )  # fmt: skip

    def _tell(self, client: int, outcome: pb.Outcome) -> None:
        self.finished.add(client)
        self.context.service.push(client, pb.ServerFrame(outcome=outcome))

    def _show(self) -> None:
        phase = self.machine.phase
        if phase != self._phase:
            self._phase = phase
            self.context.board.phase(
                self.context.name, self.at.round + 1, self._newest, phase, self.machine.deadline
            )

    def _failure(self) -> Failure:
        result = self.machine.result
        if not isinstance(result, Abort):
            return Failure("merge_failed", "the round ended without a sum", self._outcomes())
        error = result.error()
        return Failure(result.reason, error.found, self._outcomes())

    def _outcomes(self) -> list[DeviceOutcome]:
        result = self.machine.result
        found = [] if result is None else [self._outcome(each) for each in result.outcomes]
        return [*self._retried, *found]

    def _outcome(self, outcome: Outcome) -> DeviceOutcome:
        client, status = int(outcome.client), _FATES.get(outcome.status, "UNKNOWN")
        if status == "DROPPED" and outcome.cause.startswith(_POLICY):
            status = "DECLINED"
        cause, hint = clipped(outcome.cause, 2000), clipped(outcome.hint, 2000)
        return self.settled(client, outcome.attempt, status, outcome.phase, cause, hint)


def restored_sum(exact: ExactSum, data: Buffer, count: int) -> None:
    """Go on from a snapshot.

    Raises:
        Problem: `STORE_CORRUPT`: it is of another size.
    """
    found = np.frombuffer(data, np.int64) if len(data) % 8 == 0 else np.zeros(0, np.int64)
    if found.shape != tuple(exact.accumulator.shape):
        raise corrupt("it is no sum of this run", "snapshot")
    exact.accumulator.copy_(torch.from_numpy(found.copy()))
    exact.count = count


def _parts(accumulator: torch.Tensor) -> Iterable[memoryview]:
    view = accumulator.numpy().data.cast("B")
    return (view[start : start + 2**20] for start in range(0, len(view), 2**20))
