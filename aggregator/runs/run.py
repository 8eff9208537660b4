"""A run: rounds one after the other, each durable before anybody sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, Final

import numpy as np

from mycelia.aggregator.attempts import Suspects
from mycelia.aggregator.effects import AbortReason
from mycelia.aggregator.log_records import Charged, Failed, Frozen, Merged, Open, Published
from mycelia.aggregator.logs import log
from mycelia.aggregator.merging import Blocks, MergeFailed, merge
from mycelia.aggregator.outcomes import DeviceOutcome, outcomes_of
from mycelia.aggregator.recovery import Recovery
from mycelia.aggregator.rounds import asked_for, candidates_for, quorum_for
from mycelia.aggregator.runs.context import Context
from mycelia.aggregator.runs.errands import Errand
from mycelia.aggregator.runs.gathering import Failure, Gathered, Gathering, Stopped
from mycelia.aggregator.runs.partials import read_partial
from mycelia.aggregator.runs.plain import PlainRound, restored_sum
from mycelia.aggregator.runs.privacy import ServerPrivacy
from mycelia.aggregator.runs.secure import SecureRound
from mycelia.aggregator.runs.session_config import phase_seconds, session_config
from mycelia.aggregator.runs.state import (
    Counters,
    Current,
    first_state,
    load_state,
    store_blocks,
    store_state,
)
from mycelia.aggregator.runs.tasks import message_payload
from mycelia.aggregator.selectors import checked_ids
from mycelia.aggregator.spool import Spooled
from mycelia.aggregator.store_problems import corrupt
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import clipped
from mycelia.aggregator.wire.settings import place_of
from mycelia.engine import events
from mycelia.engine.data import Examples
from mycelia.engine.errors import BudgetExceeded, RoundAborted
from mycelia.engine.evaluation import measure
from mycelia.engine.run import Run as Folder
from mycelia.engine.sums import ExactSum
from mycelia.privacy.secagg.keys import Identity, sign
from mycelia.privacy.secagg.messages import SERVER, Config

__all__ = ["FederatedRun", "RunResult"]

_FINAL: Final = "not to be tried again: "  # how the cause of such a round begins in the log


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        rounds: that are over, failed ones that could not be tried again included.
        failed_rounds: attempts at rounds that failed.
        accepted: updates in published models, over all rounds.
        dropped: devices that were asked and are in no model, over all rounds.
        test_accuracy: on the server's own test data; None without any, or for regression.
        test_loss: likewise.
        secure_sum: whether updates were masked.
        privacy: what is said of it; None for a run without it.
        stopped_by: "budget" where the next round could not be paid for, else "".
        bytes_up: payloads from devices.
        bytes_down: payloads to devices.
        seconds_total: that the server worked on it.
        model_sha256: hash of the final parameters and buffers.
        run_dir: the run folder.
    """

    rounds: int
    failed_rounds: int
    accepted: int
    dropped: int
    test_accuracy: float | None
    test_loss: float | None
    secure_sum: bool
    privacy: dict[str, Any] | None
    stopped_by: str
    bytes_up: int
    bytes_down: int
    seconds_total: float
    model_sha256: str
    run_dir: str

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON can say them."""
        return asdict(self)


class FederatedRun:
    """One run on one server.

    Args:
        context: what its parts share.
        privacy: the server's side of the `[privacy]` block.
        identity: the server's key.
        folder: of the run.

    Attributes:
        context: as given.
        current: the newest model.
        ready: set once it is known where the run stands.
    """

    def __init__(self, context: Context, privacy: ServerPrivacy, identity: Identity, folder: Folder) -> None:
        self.context, self.folder = context, folder
        self._privacy, self._identity, self._plan = privacy, identity, context.plan
        self._log = context.writer.log
        self._keys: dict[int, bytes] = {}
        self._gathering: Gathering | None = None
        self._suspects = Suspects()
        self._extra: Payload | None = None
        self._began = context.clock()
        self._before_s = 0.0
        self._number = 0
        self._metrics: dict[str, float] = {}
        self._said: dict[int, pb.Outcome] = {}
        self.ready = asyncio.Event()
        self.current: Current

    # --- what devices say -------------------------------------------------------------------------

    def held(self, client: int) -> Iterable[pb.Held]:
        """What there is of a device's work."""
        return [] if self._gathering is None else self._gathering.held(client)

    def connected(self, client: int, identity_key: bytes) -> None:
        """A device is here."""
        self._keys[client] = identity_key
        if client in self._said:  # it may not have heard it
            self.context.service.push(client, pb.ServerFrame(outcome=self._said[client]))
        if self._gathering is not None:
            self._gathering.connected(client)

    def frame(self, client: int, frame: pb.ClientFrame) -> None:
        """A device says something about its work. Raises `Problem` if there is none."""
        self._now(client).frame(client, frame)

    def offered(self, client: int, offer: pb.Offer) -> None:
        """A device offers a payload. Raises `Problem` if it is not wanted."""
        self._now(client).offered(client, offer)

    def payload(self, client: int, payload: Spooled) -> bool:
        """A payload is complete; whether anybody wants it."""
        if self._gathering is None:
            return False
        self._gathering.payload(client, payload)
        return True

    def partial(self, body: bytes) -> None:
        """Another server hands over a partial sum. Raises `Problem` if a device has not signed its part."""
        if isinstance(self._gathering, PlainRound):
            self._gathering.queue.put_nowait(read_partial(body, self._keys))

    def turned_away(self, client: int, at: Position, problem: Problem) -> None:
        """Another server has refused what a device sent."""
        if self._gathering is not None:
            self._gathering.turned_away(client, at, problem)

    def lost(self, client: int, problem: Problem | None) -> None:
        """A stream has ended; a device that was revoked is out at once."""
        revoked = problem is not None and problem.reason in (Reason.REVOKED, Reason.NOT_ENROLLED)
        if revoked and problem is not None and self._gathering is not None:
            self._gathering.gone(client, problem)

    def describe(self, client: int) -> None:
        """Tell a device what this run would ask of it."""
        secure = self._plan.secure
        task = pb.Task(
            at=Position(self.context.name, self._number, 0).to_wire(),
            work=pb.DESCRIBE,
            purpose=self._plan.purpose,
            algorithm=self._plan.config.algorithm.name,
            settings=self._plan.task_settings,
            schema_sha256=bytes.fromhex(self._plan.program.schema.sha256),
            model_sha256=self.current.model_sha256,
        )
        if secure is not None:
            seconds = phase_seconds(self.context.deadlines)
            roster = self.context.service.roster.sha256
            config = session_config(secure, task, roster, secure.config.n_max, seconds)
            signed = sign(Config(config), config.session_id, SERVER, self._identity)
            task.secure_sum = signed.encode()
        self.context.service.push(client, pb.ServerFrame(task=task))

    def stop(self) -> None:
        """Come to an end: what is durable stays, the rest is asked for again."""
        self.context.stopping.set()
        self.context.floor.stir()
        if self._gathering is not None:
            self._gathering.queue.put_nowait(None)

    def _now(self, client: int) -> Gathering:
        if self._gathering is None:
            raise Problem(
                Reason.STALE_ROUND, "no round is open", rule="wait for the next task", who=f"client {client}"
            )
        return self._gathering

    # --- the run ----------------------------------------------------------------------------------

    async def go(self) -> RunResult:
        """All rounds that are left.

        Raises:
            Stopped: the run is to stop for now.
            RoundAborted: too many rounds failed in a row, or all of them.
            Problem: `NOT_LEADER`, `STORE_CORRUPT`, `STORE`.
        """
        config, order = self._plan.config, self._log.order
        recovery = await asyncio.to_thread(
            self._log.recovery, self.context.wall(), self.context.deadlines.waits.heartbeat
        )
        await asyncio.to_thread(self._load)
        counters = self.current.counters
        self._before_s, self._number = counters.seconds, counters.round
        if recovery.action != "next":
            if recovery.opened is not None:
                self._number = recovery.opened.round
            log("round_resumed", run=self.context.name, round=self._number + 1, phase=recovery.action)
            await self._round(recovery)
            self.ready.set()
        elif order.opened is not None and not order.failed:
            await self._tell_again(order.opened.round)
        elif order.opened is not None and order.failed:
            again = await asyncio.to_thread(self._may_try_again)
            self._number = order.opened.round + (0 if again else 1)
        self.ready.set()
        stopped_by = ""
        while self._number < config.rounds:
            stopped_by = self._privacy.stop(self._number)
            if stopped_by:
                break
            await self._round(None)
        return await self._finish(stopped_by)

    def _load(self) -> None:
        """The newest model: as published, or as it begins."""
        program, algorithm = self._plan.program, self._plan.algorithm
        if self._log.published is not None:
            self.current = load_state(program, self._log.published, self.context.blobs)
        else:
            public = self._privacy.pipeline.begin()
            self.current = first_state(program, algorithm.start(program), public, self.context.blobs)
        self._extra = message_payload(self._plan.message(self.current.state, self.current.public))

    def _may_try_again(self) -> bool:
        last = [entry for entry in self._log.entries() if isinstance(entry, Failed)]
        return not (last and last[-1].cause.startswith(_FINAL))

    async def _round(self, recovery: Recovery | None) -> None:
        began = self.context.clock()
        opened = None if recovery is None else recovery.opened
        try:
            if opened is None:
                opened = await self._open()
                recovery = None
            self._check_model(opened)
            if recovery is not None and recovery.action == "publish" and recovery.merged is not None:
                await self._publish_merged(recovery.merged, opened)
            elif recovery is not None and recovery.action == "finish":
                await self._merge(
                    opened, self._from_snapshot(recovery), None, began, charged=recovery.charged
                )
            else:
                gathering = self._made(opened)
                self._gathering = gathering
                self._said.clear()
                self.ready.set()
                gathered = await gathering.gather(recovery)
                await self._merge(opened, gathered, gathering, began)
        except Failure as failure:
            if opened is None:
                self._count_failure(failure.reason, failure.found)
            else:
                await self._failed(opened, failure, began)
        finally:
            over, self._gathering = self._gathering, None
            if over is not None:
                await over.release_all()
            self.context.floor.free_all(self.context.name)

    def _check_model(self, opened: Open) -> None:
        """Devices of a round that goes on got the model that this server has."""
        if opened.model_sha256 != self.current.model_sha256:
            raise corrupt(
                f"round {opened.round} began with model {opened.model_sha256.hex()[:12]}, and there is "
                f"{self.current.model_sha256.hex()[:12]}",
                f"round log of {self.context.name}",
            )

    # --- select -----------------------------------------------------------------------------------

    async def _open(self) -> Open:
        """Wait for devices, draw a cohort, and write down that the round begins."""
        config, floor, name = self._plan.config, self.context.floor, self.context.name
        order = self._log.order
        attempt = 0
        if order.opened is not None and order.opened.round == self._number:
            attempt = order.attempt + 1
        need = quorum_for(config.cohort, config.round)
        if self._plan.secure is not None:
            need = self._plan.secure.config.n_min
        fixed = self._plan.selector.fixed_size
        least = need if fixed and not config.secret_draw else 1
        asked = asked_for(config.cohort, config.round) if fixed else 1
        self.context.board.phase(name, self._number + 1, attempt, "waiting", None)
        here = len(self._ready())
        if here < least:
            log("waiting", run=name, round=self._number + 1, hint=f"{here} of {least} devices are here")
        await floor.wait_until(lambda: self._stopping or len(self._ready()) >= least)
        ends = self.context.clock() + self.context.deadlines.select
        self.context.board.phase(name, self._number + 1, attempt, "select", ends)
        if not config.secret_draw:
            await floor.wait_until(
                lambda: self._stopping or len(self._ready()) >= min(asked, self._plan.population.clients),
                self.context.deadlines.select,
            )
        if self._stopping:
            raise Stopped
        clients = self._draw()
        if len(clients) < (need if fixed else 0):
            raise Failure(
                "below_quorum",
                f"QUORUM: {len(clients)} devices are here in select, and {need} are needed",
                [],
            )
        opened = Open(
            round=self._number,
            attempt=attempt,
            clients=tuple(clients),
            model_sha256=self.current.model_sha256,
            config_sha256=sha256(self._log.config).digest(),
            opened_at=self.context.wall(),
            budget_s=float(config.round.budget_s),
            secure=self._plan.secure is not None,
            private=self._privacy.charges,
        )
        await self.context.append(opened)
        log("round_opened", run=name, round=self._number + 1, attempt=attempt)
        return opened

    @property
    def _stopping(self) -> bool:
        return self.context.stopping.is_set()

    def _ready(self) -> set[int]:
        return self.context.floor.idle(self.context.name) - self._suspects.excluded

    def _draw(self) -> list[int]:
        """Ids of those who may be asked, in the order of the draw."""
        config, selector = self._plan.config, self._plan.selector
        known = range(1, self._plan.population.clients + 1)
        roster = {entry.client for entry in self.context.service.roster.clients}
        whom = set(known) | roster if config.secret_draw else self._ready()
        ids = np.array(sorted(place_of(client) for client in whom), dtype=np.int64)
        if not len(ids):
            return []
        most = candidates_for(config.cohort, config.round) if selector.fixed_size else None
        wanted = min(config.cohort, len(ids)) if most is None else most
        drawn = selector.select(ids, wanted, round=self._number, seed=self._privacy.selection_seed)
        return [place + 1 for place in checked_ids(drawn, int(ids[-1]) + 1, most)]

    def _made(self, opened: Open) -> PlainRound | SecureRound:
        config = self._plan.config
        k = config.cohort if self._plan.selector.fixed_size else len(opened.clients)
        if opened.secure:
            return SecureRound(
                self.context, opened, self.current, self._extra, self._identity, self._suspects, k,
                self._privacy.charge_shares if self._privacy.charges else None,
            )  # fmt: skip
        return PlainRound(self.context, opened, self.current, self._extra, self._keys, k)

    # --- merge ------------------------------------------------------------------------------------

    async def _merge(
        self,
        opened: Open,
        gathered: Gathered,
        gathering: PlainRound | SecureRound | None,
        began: float,
        *,
        charged: bool = False,
    ) -> None:
        """From the sum to a published model."""
        name, number = self.context.name, opened.round
        trained = self.context.clock()
        ends = trained + self.context.deadlines.merge - self.context.deadlines.unmask
        self.context.board.phase(name, number + 1, gathered.attempt, "merge", ends)
        if not opened.secure:
            if gathering is not None:
                await self.context.append(Frozen(gathered.survivors, gathered.snapshot))
            if opened.private and not charged:
                await self._charge(opened, gathered, gathering)
        counters = self._counted(gathered, gathering)
        final = opened.private or opened.secure  # something of the sum is known: there is no other one
        try:
            new = await self.context.durably(lambda: self._merged(gathered, number, counters))
        except MergeFailed as failed:
            outcomes = [] if gathering is None else gathering.outcomes_of_failed(failed.reason, failed.found)
            raise Failure(failed.reason, failed.found, outcomes, again=not final) from failed
        try:
            outcomes = [] if gathering is None else gathering.merged()
        except Failure as failure:
            failure.again = not final
            raise
        await self.context.append(Merged(new.model_sha256, new.state_sha256), settled=_once(outcomes))
        await self.context.append(Published())
        self._tell(gathered.survivors, gathering, None)
        await self._adopt(new, number, gathering)
        self._record(opened, gathered, outcomes, began, trained)
        await self._evaluate(number)

    async def _charge(self, opened: Open, gathered: Gathered, gathering: Gathering | None) -> None:
        charge = partial(
            self._privacy.charge_sum, opened.round, opened.attempt, gathered.total, self.current.public
        )
        try:
            entry = await self.context.durably(charge)
        except BudgetExceeded as error:
            outcomes: list[DeviceOutcome] = []
            if isinstance(gathering, PlainRound):
                outcomes = gathering.outcomes_of_failed("merge_failed", error.found)
            raise Failure("merge_failed", error.found, outcomes, again=False) from error
        await self.context.append(Charged(entry))

    def _merged(self, gathered: Gathered, number: int, counters: Counters) -> Current:
        plan, current, blobs = self._plan, self.current, self.context.blobs
        exact, pipeline = gathered.exact, self._privacy.pipeline
        if (
            exact is not None
            and exact.count
            and not pipeline.serves
            and plan.algorithm.merges_by_coordinate()
        ):
            blocks = Blocks(plan.program, plan.algorithm, current.state, exact)
            return store_blocks(plan.program, blocks, current, counters, blobs)
        state, public = merge(
            plan.program, plan.algorithm, current.state, gathered.total,
            pipeline=pipeline, public=current.public, round=number,
        )  # fmt: skip
        return store_state(plan.program, state, public, counters, blobs)

    async def _publish_merged(self, record: Merged, opened: Open) -> None:
        """A model that was merged before a restart."""
        new = await asyncio.to_thread(load_state, self._plan.program, record, self.context.blobs)
        await self.context.append(Published())
        await self._tell_again(opened.round)
        await self._adopt(new, opened.round, None)
        self.context.board.round_ended(self.context.name, opened.round + 1, result="published")

    def _from_snapshot(self, recovery: Recovery) -> Gathered:
        """The sum of a round that was frozen before a restart."""
        exact, survivors = ExactSum(self._plan.form), recovery.survivors or ()
        if recovery.snapshot is not None:
            with self.context.blobs.get(recovery.snapshot.sha256).open() as data:
                restored_sum(exact, data, len(survivors))
        return Gathered(survivors, exact, attempt=recovery.attempt)

    async def _adopt(self, new: Current, number: int, gathering: Gathering | None) -> None:
        """The new model is the run's. The old one's file is let go by whoever reads it last."""
        old, self.current, self._number = self.current, new, number + 1
        self._extra = message_payload(self._plan.message(new.state, new.public))
        await self.context.service.forget(self.context.name, number, self._log.order.attempt + 1)
        spent = [old.model_sha256, old.state_sha256, *(gathering.blobs if gathering else ())]
        await asyncio.to_thread(self.context.discard, spent)

    def _counted(self, gathered: Gathered, gathering: Gathering | None) -> Counters:
        before, asked = self.current.counters, len(self._log.order.issued)
        return replace(
            before,
            round=self._number + 1,
            failed_in_a_row=0,
            accepted=before.accepted + len(gathered.survivors),
            dropped=before.dropped + max(0, asked - len(gathered.survivors)),
            bytes_up=before.bytes_up + (sum(gathering.bytes_up.values()) if gathering else 0),
            bytes_down=before.bytes_down + (sum(gathering.bytes_down.values()) if gathering else 0),
            seconds=self._before_s + self.context.clock() - self._began,
        )

    # --- failures ---------------------------------------------------------------------------------

    async def _failed(self, opened: Open, failure: Failure, began: float) -> None:
        cause = failure.found if failure.again else f"{_FINAL}{failure.found}"
        await self.context.append(
            Failed(failure.reason, clipped(cause, 2000)), settled=_once(failure.outcomes)
        )
        self._tell((), self._gathering, failure)
        if not failure.again:
            self._number += 1
        name, number = self.context.name, opened.round + 1
        self.context.board.round_ended(
            name, number, result="failed", reason=failure.found, seconds=self.context.clock() - began,
            dropped=_dropped(failure.outcomes),
        )  # fmt: skip
        self._show(failure.outcomes, number)
        if failure.secure is not None:
            self.folder.log(failure.secure)
        log(
            "round_failed", level="warning", run=name, round=number, reason=failure.reason, hint=failure.found
        )
        await self.context.service.forget(name, opened.round, self._log.order.attempt + 1)
        if self._gathering is not None and self._gathering.blobs:
            await asyncio.to_thread(self.context.discard, self._gathering.blobs)
        self._count_failure(failure.reason, failure.found)

    def _count_failure(self, reason: AbortReason, found: str) -> None:
        before = self.current.counters
        counters = replace(before, failed=before.failed + 1, failed_in_a_row=before.failed_in_a_row + 1)
        self.current = replace(self.current, counters=counters)
        self.folder.log(events.WarningRaised(message=found, who=f"round {self._number + 1}"))
        most = self._plan.config.round.max_failed_rounds
        over = self._number >= self._plan.config.rounds and counters.accepted == 0
        if counters.failed_in_a_row >= most or over:
            raise RoundAborted(
                f"{counters.failed_in_a_row} rounds failed in a row, the last for {reason}: {found}",
                rule=f"a run stops after round.max_failed_rounds = {most}",
                fix="look at the causes; the run goes on where it was when it is started again",
                who=self.context.name,
            )

    # --- who is told ------------------------------------------------------------------------------

    def _tell(self, survivors: Iterable[int], gathering: Gathering | None, failure: Failure | None) -> None:
        """Every device that was asked, and does not know yet: what its work came to."""
        order, accepted = self._log.order, set(survivors)
        known = set() if gathering is None else gathering.finished - accepted
        if order.opened is None:
            return
        for client, attempt in sorted(order.issued.items()):
            for each in range(order.opened.attempt, attempt + 1):
                self.context.service.withdraw(client, Position(self.context.name, order.opened.round, each))
            at = Position(self.context.name, order.opened.round, attempt)
            if client in known:
                continue
            if client in accepted:
                outcome = pb.Outcome(at=at.to_wire())
            elif failure is not None:
                reason = Reason.QUORUM if failure.reason == "below_quorum" else Reason.ROUND_ABORTED
                outcome = Problem(reason, failure.found, rule="the model stays").outcome(at)
            else:
                late = Problem(Reason.LATE, "the round did not wait for it", rule="the round is over")
                outcome = late.outcome(at)
            self._said[client] = outcome
            self.context.service.push(client, pb.ServerFrame(outcome=outcome))

    async def _tell_again(self, number: int) -> None:
        """What became of a published round, to devices that may have been away when it was said."""
        known = await asyncio.to_thread(outcomes_of, self.context.lease.store, self.context.name, number)
        self._tell([each.client for each in known if each.status == "ACCEPTED"], None, None)

    def _record(
        self,
        opened: Open,
        gathered: Gathered,
        outcomes: list[DeviceOutcome],
        began: float,
        trained: float,
    ) -> None:
        """Into the run folder, onto the page, into the log."""
        name, number, now = self.context.name, opened.round + 1, self.context.clock()
        counts: dict[str, int] = {"asked": len(self._log.order.issued)}
        counts["survivors"] = len(gathered.survivors)
        for outcome in {outcome.client: outcome for outcome in outcomes}.values():  # of each the last
            status = outcome.status.lower()
            counts[status] = counts.get(status, 0) + 1
        sums = gathered.sums
        examples = sums.get("examples", 0.0)
        counts["examples"], counts["sgd_steps"] = int(examples), int(sums.get("steps", 0))
        metrics = {"loss": sums["loss_sum"] / examples} if examples else {}
        up, down = sum(o.bytes_up for o in outcomes), sum(o.bytes_down for o in outcomes)
        seconds = {"train": trained - began, "merge": now - trained}
        self.folder.log(events.Round(number, seconds, counts, metrics, up, down))
        if gathered.secure is not None:
            self.folder.log(gathered.secure)
        self.folder.log(
            events.Outcomes(
                number,
                [
                    events.Outcome(o.client, o.attempt, o.status.lower(), o.phase, o.cause, o.hint)
                    for o in outcomes
                ],
            )
        )
        self.context.board.round_ended(
            name, number, result="published", seconds=now - began, survivors=len(gathered.survivors),
            dropped=_dropped(outcomes), metrics=metrics, bytes_up=up, bytes_down=down,
        )  # fmt: skip
        self._show(outcomes, number)
        reading = self._privacy.reading(number, self.current.public)
        if reading is not None:
            self.folder.log(reading)
            self.context.board.privacy(
                name, reading.epsilon, reading.delta, self._privacy.budget_epsilon, self._privacy.unit
            )
        log(
            "round_published", run=name, round=number, attempt=gathered.attempt, ms=1000 * (now - began),
            bytes=up, hint=f"{len(gathered.survivors)} of {counts['asked']} in the sum",
        )  # fmt: skip

    def _show(self, outcomes: Iterable[DeviceOutcome], number: int) -> None:
        for o in outcomes:
            self.context.board.outcome(
                self.context.name, number, o.client, o.status or "UNKNOWN", o.phase, o.cause, o.hint,
                o.bytes_up, o.bytes_down, o.seconds,
            )  # fmt: skip
            if o.status != "ACCEPTED":
                log(
                    "device_outcome", level="warning", run=self.context.name, round=number, attempt=o.attempt,
                    phase=o.phase, client=o.client, code=o.status or "UNKNOWN", reason=clipped(o.cause, 400),
                    hint=clipped(o.hint, 400),
                )  # fmt: skip

    # --- evaluate ---------------------------------------------------------------------------------

    async def _evaluate(self, number: int) -> None:
        """Measure the published model: on the server's own data, and on devices that are asked to."""
        evaluation, last = self._plan.config.evaluation, number + 1 >= self._plan.config.rounds
        due = last or (evaluation.every > 0 and (number + 1) % evaluation.every == 0)
        if not due or self._stopping:
            return
        name = self.context.name
        if self._plan.test is not None:
            await self._measure(self._plan.test)
            self.folder.log(events.Evaluation(metrics=self._metrics, round=number + 1))
            self.context.board.evaluation(name, number + 1, self._metrics)
        if evaluation.clients and self._plan.secure is None:
            await self._evaluate_on_devices(number)

    async def _evaluate_on_devices(self, number: int) -> None:
        name, deadlines = self.context.name, self.context.deadlines
        seconds = deadlines.evaluate - deadlines.merge
        self.context.board.phase(
            name, number + 1, self._log.order.attempt, "evaluate", self.context.clock() + seconds
        )
        at = Position(name, number, self._log.order.attempt + 1)  # what is said of the round is not about it
        errand = Errand(self.context, at, pb.EVALUATE, self.current, self._extra, self._keys, seconds)
        self._gathering = errand
        try:
            clients = sorted(self._ready())[: self._plan.config.evaluation.clients]
            await errand.go(clients)
        finally:
            self._gathering = None
        reports = errand.reports.values()
        examples = sum(report.examples for report in reports)
        if not examples:
            return
        names = sorted({name for report in reports for name in report.values})
        means = {
            each: sum(report.examples * report.values.get(each, 0.0) for report in reports) / examples
            for each in names
        }
        self.folder.log(events.Evaluation(metrics=means, split="devices", round=number + 1))
        if self._plan.test is None:
            self.context.board.evaluation(name, number + 1, means)

    # --- the end ----------------------------------------------------------------------------------

    async def _finish(self, stopped_by: str) -> RunResult:
        """Give the model to the devices, and say what the run came to."""
        name, current = self.context.name, self.current
        await self._deliver()
        if not self._metrics and self._plan.test is not None:  # it was over before this server began
            await self._measure(self._plan.test)
        counters = current.counters
        result = RunResult(
            rounds=self._number,
            failed_rounds=counters.failed,
            accepted=counters.accepted,
            dropped=counters.dropped,
            test_accuracy=self._metrics.get("accuracy"),
            test_loss=self._metrics.get("loss"),
            secure_sum=self._plan.secure is not None,
            privacy=self._privacy.facts() or None,
            stopped_by=stopped_by,
            bytes_up=counters.bytes_up,
            bytes_down=counters.bytes_down,
            seconds_total=self._before_s + self.context.clock() - self._began,
            model_sha256=await asyncio.to_thread(current.values_sha256, self._plan.program),
            run_dir=str(self.folder.path),
        )
        state = current.state
        tensors = {"vector": state.vector} | {f"buffer/{n}": t for n, t in state.buffers.items()}
        schema = {"schema": self._plan.program.schema.sha256}
        await asyncio.to_thread(self.folder.save_checkpoint, self._number, tensors, schema)
        self.folder.log(events.RunFinished(result=result.to_json()))
        self.context.board.finished(name, result.model_sha256, result.run_dir)
        log("run_finished", run=name, round=self._number, hint=result.model_sha256)
        return result

    async def _measure(self, test: Examples) -> None:
        """The newest model on the server's own data."""
        plan, state = self._plan, self.current.state
        found = await asyncio.to_thread(
            measure, plan.program, state.vector, state.buffers, test, plan.classes
        )
        self._metrics = found.result()

    async def _deliver(self) -> None:
        """The final model, to those who are here; they end with it."""
        deadlines, floor = self.context.deadlines, self.context.floor
        least = quorum_for(self._plan.config.cohort, self._plan.config.round)
        await floor.wait_until(
            lambda: self._stopping or len(floor.here) >= least, deadlines.waits.reconnect_cap
        )
        at = Position(self.context.name, self._number, self._log.order.attempt + 1)
        seconds = deadlines.evaluate - deadlines.merge
        errand = Errand(self.context, at, pb.DELIVER, self.current, self._extra, self._keys, seconds)
        self._gathering = errand
        try:
            with suppress(Stopped):
                await errand.go(set(floor.here))
        finally:
            self._gathering = None


def _dropped(outcomes: Iterable[DeviceOutcome]) -> dict[str, int]:
    """How many dropped out, by phase."""
    found: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.status in ("DROPPED", "UNKNOWN"):
            found[outcome.phase or "train"] = found.get(outcome.phase or "train", 0) + 1
    return found


def _once(outcomes: Iterable[DeviceOutcome]) -> list[DeviceOutcome]:
    """One for each device and attempt."""
    return list({(outcome.client, outcome.attempt): outcome for outcome in outcomes}.values())
