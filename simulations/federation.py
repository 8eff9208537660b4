"""A federation without a network: the round machine, driven on a simulated clock over a backend."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mycelia.aggregator.config import RoundConfig
from mycelia.aggregator.effects import Abort, Configure, Effect, Evaluate, Finish, Merge, Outcome, Phase
from mycelia.aggregator.merging import MergeFailed, merge
from mycelia.aggregator.rounds import Round, candidates_for
from mycelia.aggregator.selectors import Ids, Selector, checked_ids
from mycelia.aggregator.updates import Expected, UpdateMeta
from mycelia.engine import events
from mycelia.engine.algorithms import Algorithm, Message, ServerState
from mycelia.engine.errors import ConfigError, MyceliaError
from mycelia.engine.plugins import user_code
from mycelia.engine.program import Program
from mycelia.engine.sums import Total
from mycelia.engine.types import Tensors
from mycelia.privacy.pipeline import Pipeline
from mycelia.privacy.sampling import Participation
from mycelia.simulations.backends import Backend, Failure, Outcomes
from mycelia.simulations.behaviour import Behaviour
from mycelia.simulations.partition import Partition
from mycelia.simulations.secure_rounds import AFTERWARDS, Packed, SecureRounds, SumFailed, phase_of

__all__ = ["Federation", "RoundReport", "Straggler"]

_READY, _END = 0, 1
_TOO_SLOW = 4  # beside the stages of `Fates`: its answer comes after the configure deadline


@dataclass(frozen=True)
class RoundReport:
    """What a round did.

    Attributes:
        round: its number, 0-based.
        outcomes: what became of each client asked.
        aborted: why the round failed, None where it did not.
        seconds: wall-clock seconds by phase.
        simulated_s: length on the simulated clock.
        asked: number of requests to clients.
        survivors: number of updates in the sum.
        sums: loss_sum, examples and steps over the survivors; of a secure sum those that were opened, and the
            steps, which say how fast this machine is.
        secure: how the secure sum was made; None for an ordinary one.
    """

    round: int
    outcomes: tuple[Outcome, ...]
    aborted: Abort | None
    seconds: Mapping[str, float]
    simulated_s: float
    asked: int
    survivors: int
    sums: Mapping[str, float]
    secure: events.SecureSum | None = None


class Straggler(NamedTuple):
    """What will become of a client that was asked, at simulated second `end`; see `Fates`."""

    attempt: int
    end: float
    stage: int
    phase: Phase
    cause: str


@dataclass
class _Collected:
    """What arrives in one round."""

    queue: list[tuple[float, int, int, int, int, int]] = field(default_factory=list)
    fates: dict[tuple[int, int], Straggler] = field(default_factory=dict)
    replan: bool = True
    rows: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    packed: dict[int, Packed] = field(default_factory=dict)
    asked: int = 0
    stages: dict[int, int] = field(default_factory=dict)
    secure: events.SecureSum | None = None
    opened: tuple[int, ...] = ()
    sums: Mapping[str, float] = field(default_factory=dict)
    merge: Merge | None = None
    evaluate: bool = False
    done: set[tuple[int, int]] = field(default_factory=set)

    def expect(self, client: int, fate: Straggler, trained_on: int) -> None:
        """Queue the end of a client that trains on the model of round `trained_on`."""
        self.fates[client, fate.attempt] = fate
        order = len(self.fates)  # those that answer at one moment come in the order of the draw
        heapq.heappush(self.queue, (fate.end, _END, order, client, fate.attempt, trained_on))
        self.replan = True

    def take(self, pairs: Sequence[tuple[int, int]], outcomes: Outcomes) -> None:
        """What became of clients that were trained, in the order asked for."""
        for position, pair in enumerate(pairs):
            self.done.add(pair)
            self.rows[pair[0]] = outcomes.table[position]
            if outcomes.packed is not None:
                packed = outcomes.packed
                self.packed[pair[0]] = Packed(packed.vectors[position], packed.whole[position])
            self.failures.pop(pair[0], None)
        for failure in outcomes.failures:
            self.failures[pairs[failure.position][0]] = failure

    def vanished(self, survivors: Collection[int]) -> dict[int, str]:
        """Everybody asked, and where a secure sum sees each vanish, "" for those who stay to the end."""
        return {
            client: phase_of(stage, client in survivors, client in self.failures)
            for client, stage in self.stages.items()
        }


class Federation:
    """Runs rounds: the state of the server and the simulated clock between them.

    Args:
        program: the Program.
        algorithm: the algorithm.
        backend: trains and tests.
        partition: who holds what.
        selector: draws the cohorts.
        behaviour: how devices behave.
        config: the rounds' budget and policies.
        cohort: clients per round.
        seed: root seed.
        max_weight: cap on a client's weight.
        steps: local steps of a client with this many examples.
        progress: called with (clients done, clients asked) while a cohort trains.
        pipeline: what clients do to their updates, and the server to the sum before it is merged.
        participation: who took part when, where that decides who may be asked; None: anybody may.
        selection_seed: seed of the cohorts' draws, where that is another than the root seed.
        release: called with the round's number, its sum and `public`, before the sum is noised and published.
        secure: makes the sums, where they are secure.

    Attributes:
        state: the server's model and what belongs to it.
        public: what the pipeline's server halves keep from round to round.
        now_s: the simulated clock.
        carried: those whose update the next round takes.
        previous: the message that those were sent.
    """

    def __init__(
        self,
        *,
        program: Program,
        algorithm: Algorithm,
        backend: Backend,
        partition: Partition,
        selector: Selector,
        behaviour: Behaviour,
        config: RoundConfig,
        cohort: int,
        seed: int,
        max_weight: float,
        steps: Callable[[int], int],
        progress: Callable[[int, int], None] = lambda done, asked: None,
        pipeline: Pipeline = Pipeline(),  # noqa: B008 - frozen and empty
        participation: Participation | None = None,
        selection_seed: int | None = None,
        release: Callable[[int, Total, Tensors], None] | None = None,
        secure: SecureRounds | None = None,
    ) -> None:
        self.program, self.algorithm, self.backend = program, algorithm, backend
        self.partition, self.selector, self.behaviour = partition, selector, behaviour
        self.config, self.cohort, self.seed = config, cohort, seed
        self.max_weight, self.progress = max_weight, progress
        self.pipeline, self._release, self._secure = pipeline, release, secure
        self.participation = participation
        self.public: Tensors = pipeline.begin()
        self._selection_seed = seed if selection_seed is None else selection_seed
        self.state: ServerState = algorithm.start(program)
        self.now_s = 0.0
        self.carried: dict[int, Straggler] = {}
        self.previous: Message | None = None
        self._steps = steps
        self._sizes = partition.sizes()
        self.bytes_down = _bytes(self.message(0))
        specs = [*algorithm.terms(program).values(), *pipeline.terms().values()]
        self.bytes_up = 4 * sum(spec.size for spec in specs)
        if secure is not None:
            self.bytes_up = secure.plan.config.upload_bytes

    def message(self, round: int) -> Message:
        """What the server sends in this round."""
        state = self.state
        extra = {**self.algorithm.message_extra(state), **self.public}
        return Message(state.vector, state.buffers, extra, round)

    def run_round(self, number: int, *, evaluate: Callable[[], None] | None = None) -> RoundReport:
        """One round; the state moves only when it succeeds.

        Args:
            number: 0-based; names the random streams.
            evaluate: measures the merged model; None: this round is not evaluated.
        """
        started = time.perf_counter()
        message = self.message(number)
        candidates, wanted = self._select(number)
        expected = Expected(number, 1, self.program.schema.sha256, self.max_weight)
        began = self.now_s
        round = Round(
            expected,
            candidates,
            wanted,
            self.config,
            evaluate=evaluate is not None,
            carried={client: straggler.attempt for client, straggler in self.carried.items()},
        )
        collected = _Collected()
        for client, straggler in self.carried.items():
            collected.expect(client, straggler, number - 1)
        selected = time.perf_counter()
        self._carry_out(round.start(began), round, number, collected)
        while round.result is None and collected.merge is None:
            self._train_ahead(round, message, number, collected)
            self._carry_out(self._next_event(round, number, collected), round, number, collected)
        trained = time.perf_counter()
        merged = trained
        if collected.merge is not None and round.result is None:
            effects = self._merge(round, collected.merge, number, message, collected)
            merged = time.perf_counter()
            self._carry_out(effects, round, number, collected)
            if collected.evaluate and evaluate is not None and round.result is None:
                evaluate()
                round.evaluated(self.now_s)
        elif self._secure is None:
            self.backend.total()  # a failed round's sum is thrown away
        evaluated = time.perf_counter()
        result = round.result
        if result is None:  # pragma: no cover - the machine always ends
            raise MyceliaError("the round did not end", who=f"round {number}")
        late = result.carried if isinstance(result, Finish) else {}
        self.carried = {int(c): collected.fates[int(c), attempt] for c, attempt in late.items()}
        self.previous = message if self.carried else None
        survivors = result.survivors if isinstance(result, Finish) else ()
        if self._secure is not None:
            survivors = collected.opened if survivors else ()
            if collected.secure is None:
                reason = result.reason if isinstance(result, Abort) else ""
                came = {int(o.client) for o in result.outcomes if o.status == "accepted"}
                collected.secure = self._secure.failed(number, collected.vanished(came), reason)
        rows = [collected.rows[int(client)] for client in survivors]
        table = np.sum(rows, axis=0) if rows else np.zeros(6)
        sums = {"loss_sum": float(table[2]), "examples": float(table[3]), "steps": float(table[4])}
        if self._secure is not None:
            sums |= {name: collected.sums.get(name, 0.0) for name in ("loss_sum", "examples")}
        return RoundReport(
            number,
            result.outcomes,
            result if isinstance(result, Abort) else None,
            {
                "select": selected - started,
                "train": trained - selected,
                "merge": merged - trained,
                "evaluate": evaluated - merged,
            },
            self.now_s - began,
            collected.asked,
            len(survivors),
            sums,
            collected.secure,
        )

    def _select(self, number: int) -> tuple[list[int], int]:
        """The candidates and how many updates are wanted."""
        reachable = None if self.behaviour.ideal else self._reachable(number)
        barred = self._barred(number)
        everybody = range(self.partition.clients)
        ids: Ids = np.delete(np.arange(len(everybody)), barred) if len(barred) else everybody
        fixed = self.selector.fixed_size
        wanted = candidates_for(self.cohort, self.config) if fixed else min(self.cohort, len(ids))
        with user_code("selector"):
            drawn = self.selector.select(
                ids,
                wanted,
                round=number,
                seed=self._selection_seed,
                weights=np.delete(self._sizes, barred),
                available=reachable,
            )
        candidates = checked_ids(drawn, len(everybody), wanted if fixed else None)
        if len(wrong := np.intersect1d(candidates, barred)):
            raise ConfigError(
                f"the selector returned client {int(wrong[0])}, which took part too lately or too often",
                rule="it draws from the ids that it is given",
                who="selector",
            )
        return candidates, self.cohort if fixed else len(candidates)

    def _barred(self, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Those that may not be asked."""
        if self.participation is None:
            return np.empty(0, dtype=np.int64)
        return self.participation.barred(number)

    def _reachable(self, number: int) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
        return lambda ids: self.behaviour.available(self.seed, ids, round=number, now_s=self.now_s)

    def _carry_out(self, effects: Sequence[Effect], round: Round, number: int, collected: _Collected) -> None:
        for effect in effects:
            if isinstance(effect, Configure):
                clients = [int(client) for client in effect.clients]
                collected.asked += len(clients)
                deadline = round.configure_deadline
                self._expect(collected, clients, number, effect.attempt, self.now_s, deadline)
            elif isinstance(effect, Merge):
                collected.merge = effect
            elif isinstance(effect, Evaluate):
                collected.evaluate = True

    def _expect(
        self,
        collected: _Collected,
        clients: list[int],
        number: int,
        attempt: int,
        now: float,
        configure_deadline: float = -math.inf,
    ) -> None:
        """Work out what will become of clients just asked, and queue it."""
        ids = np.asarray(clients, dtype=np.int64)
        steps = 0 if self.behaviour.ideal else np.array([self._steps(int(n)) for n in self._sizes[ids]])
        fates = self.behaviour.fates(
            self.seed, ids, round=number, attempt=attempt, steps=steps,
            bytes_down=self.bytes_down, bytes_up=self.bytes_up, now_s=now, secure=self._secure is not None,
        )  # fmt: skip
        for position, client in enumerate(clients):
            stage = int(fates.stage[position])
            collected.stages[client] = stage
            if stage in AFTERWARDS:  # the sum will know; until then its update comes like any other
                stage = 0
            phase, cause = fates.loss(position) if stage else ("train", "")
            ready, end = now + float(fates.ready_s[position]), now + float(fates.end_s[position])
            if not stage and now < configure_deadline <= ready:
                # it would be given up before its update could come
                stage = collected.stages[client] = _TOO_SLOW
            collected.expect(client, Straggler(attempt, end, stage, phase, cause), number)
            if stage != 1 and end > now:  # otherwise its update says that it was ready
                order = len(collected.fates)
                heapq.heappush(collected.queue, (ready, _READY, order, client, attempt, number))

    def _train_ahead(self, round: Round, message: Message, number: int, collected: _Collected) -> None:
        """Train those whose updates will be the next to arrive, as many as the round still needs.

        Nothing trained here can be left over: each either fails or is among the first that the round takes.
        Where a client that vanishes is asked again or replaced, the newcomer could overtake those behind it,
        so the look ahead ends there.
        """
        if not collected.replan:
            return
        collected.replan = False
        needed = round.needed
        wanted: dict[int, list[tuple[int, int]]] = {number: [], number - 1: []}
        ahead = [entry for entry in collected.queue if entry[1] == _END]
        known_until = self._known_until(round, ahead, collected)
        for moment, _, _, client, attempt, trained_on in sorted(ahead):
            if needed == 0 or moment >= round.train_deadline or moment > known_until:
                break
            if collected.fates[client, attempt].stage != 0:
                continue
            needed -= 1
            if (client, attempt) not in collected.done:
                wanted[trained_on].append((client, attempt))
        for trained_on, pairs in wanted.items():
            source = message if trained_on == number else self.previous
            if not pairs or source is None:
                continue
            pairs.sort(key=lambda pair: (-int(self._sizes[pair[0]]), pair[0]))  # the largest first
            outcomes = self.backend.train(source, [client for client, _ in pairs], self.progress)
            collected.take(pairs, outcomes)
            if self.participation is not None:
                for position, (client, _) in enumerate(pairs):
                    if outcomes.table[position, 0]:
                        self.participation.note(client, number)

    def _known_until(
        self, round: Round, ahead: list[tuple[float, int, int, int, int, int]], collected: _Collected
    ) -> float:
        """Until when nobody new can arrive."""
        if self.config.on_failure not in ("retry", "replace"):
            return math.inf
        moments = [math.inf]
        for moment, _, _, client, attempt, _ in ahead:
            stage = collected.fates[client, attempt].stage
            if stage:
                moments.append(round.configure_deadline if stage == _TOO_SLOW else moment)
        return min(moments)

    def _next_event(self, round: Round, number: int, collected: _Collected) -> list[Effect]:
        """Feed the machine what happens next on the simulated clock."""
        if not collected.queue or collected.queue[0][0] >= round.deadline:
            self.now_s = round.deadline
            collected.replan = True
            return round.tick(self.now_s)
        moment, kind, _, client, attempt, trained_on = heapq.heappop(collected.queue)
        self.now_s = max(self.now_s, moment)
        if kind == _READY:
            return round.ready([client], self.now_s)
        fate = collected.fates[client, attempt]
        collected.replan |= fate.stage != 0
        if fate.stage == _TOO_SLOW:
            return []  # given up at the deadline, by the machine itself
        if fate.stage:
            return round.dropped(client, attempt, fate.cause, self.now_s, phase=fate.phase)
        failure = collected.failures.get(client)
        collected.replan |= failure is not None
        if failure is not None and failure.rejected:
            return round.rejected(client, attempt, failure.cause, self.now_s, hint=failure.hint)
        if failure is not None:
            return round.failed(client, attempt, failure.cause, self.now_s, hint=failure.hint)
        row = collected.rows[client]
        weight = float(row[1]) if self._secure is None else 1.0  # under masks nobody sees it
        meta = UpdateMeta(client, trained_on, attempt, self.program.schema.sha256, weight)
        return round.update(meta, self.now_s)

    def _secure_total(
        self, secure: SecureRounds, round: Round, merge: Merge, number: int, message: Message,
        collected: _Collected,
    ) -> Total | list[Effect]:  # fmt: skip
        """The opened sum, or how the round ends without one."""
        survivors = frozenset(int(client) for client in merge.survivors)
        packed = {client: collected.packed[client] for client in survivors}
        try:
            total, collected.opened, collected.secure = secure.sum(
                number, message, collected.vanished(survivors), packed
            )
        except SumFailed as failed:
            collected.secure = failed.event
            gone = ", ".join(f"{count} in {phase}" for phase, count in failed.event.dropped.items())
            cause = f"{failed.found}; vanished: {gone or 'nobody'}"
            return round.merge_failed(cause, self.now_s, reason="secure_sum")
        if not survivors.issuperset(collected.opened):
            raise MyceliaError(
                f"the sum holds {len(collected.opened)} updates and the round accepted {len(survivors)}",
                rule="no update is in the sum that was not accepted",
                who="merge",
            )
        collected.sums = secure.plan.quantise.report(total)
        return total

    def _merge(
        self, round: Round, merge: Merge, number: int, message: Message, collected: _Collected
    ) -> list[Effect]:
        if self._secure is not None:
            found = self._secure_total(self._secure, round, merge, number, message, collected)
            return self._publish(round, found, number) if isinstance(found, Total) else found
        total = self.backend.total()
        if total.count != len(merge.survivors):  # the sum and the record must never part
            raise MyceliaError(
                f"the sum holds {total.count} updates and the round accepted {len(merge.survivors)}",
                rule="every accepted update is in the sum, and no other",
                who="merge",
            )
        return self._publish(round, total, number)

    def _publish(self, round: Round, total: Total, number: int) -> list[Effect]:
        """From the sum to the new state."""
        try:
            merged = merge(
                self.program, self.algorithm, self.state, total,
                pipeline=self.pipeline, public=self.public, round=number, release=self._release,
            )  # fmt: skip
        except MergeFailed as failed:
            return round.merge_failed(failed.found, self.now_s, reason=failed.reason)
        self.state, self.public = merged
        return round.merged(self.now_s)


def _bytes(message: Message) -> int:
    tensors = [message.vector, *message.buffers.values(), *message.extra.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
