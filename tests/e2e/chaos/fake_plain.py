"""Rounds of the round machine and its log on a clock of numbers; server and devices are killed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, NamedTuple

import numpy as np

from mycelia.aggregator.blobs import Blobs
from mycelia.aggregator.charges import charge, releases_of
from mycelia.aggregator.config import RoundConfig
from mycelia.aggregator.deadlines import derive
from mycelia.aggregator.effects import Abort, Accept, Configure, Effect, Finish, Merge, Outcome, Reject
from mycelia.aggregator.log_records import (
    Accepted,
    Charged,
    Entry,
    Failed,
    Frozen,
    Issued,
    Merged,
    Open,
    Published,
    Snapshot,
)
from mycelia.aggregator.outcomes import DeviceOutcome, Fate, outcomes_of
from mycelia.aggregator.recovery import HEARTBEATS, Recovery
from mycelia.aggregator.round_log import RoundLog
from mycelia.aggregator.rounds import Round, candidates_for
from mycelia.aggregator.store import Store
from mycelia.aggregator.updates import Expected, UpdateMeta
from tests.aggregator.round_histories import CONFIG, EVENT, lease_of
from tests.e2e.chaos.fake_network import SHARE, Crashed, Faults, Network, carry

RUN: Final = "chaos"
DEVICES: Final = 7
COHORT: Final = 5
BUDGET_S: Final = 60.0
DIMENSION: Final = 3
_RECORDS: Final = 14  # of a round, at most, that a kill is drawn from
_SNAPSHOT_EVERY: Final = 2
_FATES: Final[dict[str, Fate]] = {
    "accepted": "ACCEPTED", "late": "LATE", "unused": "LATE", "dropped": "DROPPED", "failed": "DROPPED",
    "rejected": "REJECTED",
}  # fmt: skip

Vector = np.ndarray[Any, np.dtype[np.int64]]


class Task(NamedTuple):
    round: int
    attempt: int


class Ready(NamedTuple):
    """A device trains."""

    task: Task


class Update(NamedTuple):
    """What a device sends; `sha256` is of the vector as the device has it."""

    meta: UpdateMeta
    vector: bytes
    sha256: bytes


def vector_of(client: int, round: int) -> Vector:
    """A device's update is the same whenever it is computed."""
    return np.random.default_rng([client, round]).integers(-(2**40), 2**40, DIMENSION)


def update_of(client: int, task: Task) -> Update:
    data = vector_of(client, task.round).tobytes()
    return Update(UpdateMeta(client, task.round, task.attempt, "s", 1.0), data, sha256(data).digest())


@dataclass
class Device:
    """Trains when it is asked to, and keeps its update until it hears what became of it."""

    world: World
    client: int
    faults: Faults = field(default_factory=lambda: Faults({}))
    up: bool = True
    doing: Task | None = None
    made: Update | None = None
    sound: bool = True
    lives: int = 0

    def take(self, message: object) -> None:
        """From the server; damaged bytes break the connection, and the server says it again."""
        if not self.up or not isinstance(message, Task | Outcome):
            return
        if isinstance(message, Outcome):
            if self.doing is not None and message.attempt == self.doing.attempt:
                self.doing = self.made = None
            return
        if message == self.doing:  # again: it may not have heard the answer
            self.say(Ready(message))
            if self.made is not None:
                self.say(self.made)
            return
        if self.doing is not None and message < self.doing:
            return
        self.doing, self.made = message, None
        self.say(Ready(message))
        life = self.lives
        self.world.network.after(self.world.dice.uniform(0.5, 20.0), lambda: self.trained(message, life))

    def trained(self, task: Task, life: int) -> None:
        if self.up and self.doing == task and life == self.lives:
            self.made = update_of(self.client, task)
            if not self.sound:
                self.made = self.world.unsound(self.made)
            self.say(self.made)

    def say(self, message: object) -> None:
        self.world.to_server(self.client, message)

    def kill(self) -> None:
        """What it had in memory is gone; some do not come back before the round is over."""
        self.up, self.doing, self.made = False, None, None
        self.lives += 1
        gone = self.world.dice.uniform(0.5, 15.0) if self.world.dice.random() < 0.6 else 10 * BUDGET_S
        life = self.lives
        self.world.network.after(gone, lambda: self.back(life))

    def back(self, life: int) -> None:
        if life == self.lives:
            self.up = True
            self.world.connected(self.client)


class World:
    """A run of one server.

    Args:
        store: empty.
        blobs: empty.
        seed: of everything that is drawn.
        policy: what is done about a device that fails.
    """

    def __init__(self, store: Store, blobs: Blobs, seed: int, policy: str = "drop") -> None:
        self.dice = random.Random(seed)
        self.seed, self.number, self.attempt = seed, 0, 0
        self.network = Network(self.dice, f"seed {seed}")
        self.store, self.blobs = store, blobs
        self.config = RoundConfig(
            budget_s=BUDGET_S, over_select=1.2, quorum=0.5, on_failure=policy, max_attempts=2
        )
        self.deadlines = derive(BUDGET_S)
        self.devices = {client: Device(self, client) for client in range(1, DEVICES + 1)}
        self.log = RoundLog.create(lease_of(store, RUN), blobs, CONFIG)
        self.model: Vector = np.zeros(DIMENSION, np.int64)
        self.model_sha256 = blobs.put([self.model.tobytes()]).sha256
        self.server_up, self.generation, self.crash_at = True, 0, 0
        self.records = 0
        self.machine: Round
        self.opened: Open
        self.seen: list[str] = []
        self._forget()

    def _forget(self) -> None:
        """What a server has in memory."""
        self.sum: Vector = np.zeros(DIMENSION, np.int64)
        self.folded: set[int] = set()
        self.known: dict[int, bytes] = {}
        self.issued: dict[int, int] = {}
        self.snapshot: Snapshot | None = None
        self.unsaved = 0

    # --- one round --------------------------------------------------------------------------------

    def play(self) -> str:
        """A round with its faults, to its end; "published", or why it failed."""
        dice, network = self.dice, self.network
        network.name = f"seed {self.seed}, round {self.number}, attempt {self.attempt}"
        hopeless = dice.random() < 0.05  # nobody has a sound update
        for device in self.devices.values():
            device.faults = Faults.draw(dice, 4)
            device.sound = not hopeless
            device.doing = device.made = None
            if not device.up and dice.random() < 0.7:
                device.lives += 1
                device.up = True
        self.crash_at = self.records + dice.randint(1, _RECORDS) if dice.random() < SHARE else 0
        self.crash_before = dice.random() < 0.5
        before, round = self.model.copy(), self.number
        self._end = ""
        network.at(network.now, lambda: self._guarded(self._begin))
        network.play(lambda: bool(self._end) and self.server_up, 4 * BUDGET_S)
        self._check(before, round, hopeless)
        return self._end

    def _check(self, before: Vector, round: int, hopeless: bool) -> None:
        """What holds after every round."""
        name = f"{self.network.name}: {self._end}"
        found = [each for each in outcomes_of(self.store, RUN, round) if each.attempt >= self.opened.attempt]
        accepted = [each.client for each in found if each.status == "ACCEPTED"]
        for each in found:
            assert each.client > 0, name
            assert each.status, (name, each)
            if each.status != "ACCEPTED":
                assert each.phase, (name, each)
                assert each.cause, (name, each)
        if self._end == "published":
            assert not hopeless, f"{name}: a round without a sound update"
            assert len(accepted) == len(set(accepted)) >= 3, (name, accepted)
            total = sum((vector_of(client, round) for client in accepted), np.zeros(DIMENSION, np.int64))
            assert np.array_equal(self.model - before, total), (name, accepted)
        else:
            assert np.array_equal(self.model, before), name
            assert not accepted or self.log.order.failed, (name, accepted)
        released = [(each.round, each.attempt) for each in releases_of(self.store, RUN)]
        assert len({each for each, _ in released}) == len(released), (name, released)
        if self._end == "published" and self.opened.private:
            assert round in {each for each, _ in released}, (name, released)

    # --- the server -------------------------------------------------------------------------------

    def append(self, *entries: Entry, settled: Sequence[DeviceOutcome] = ()) -> None:
        """Durable when this returns; the process may be killed on either side of it."""
        self.records += 1
        hit = self.records == self.crash_at
        if hit and self.crash_before:
            raise Crashed
        self.log.append_many(entries, settled=settled)
        if hit:
            raise Crashed

    def _guarded(self, work: Callable[[], None]) -> None:
        """Something that the server does; a kill in it is the end of all it had in memory."""
        try:
            work()
        except Crashed:
            self.server_up = False
            self.generation += 1
            self._forget()
            self.network.after(self.dice.uniform(0.2, 10.0), lambda: self._guarded(self._restart))

    def _begin(self) -> None:
        self._forget()
        drawn = self.dice.sample(sorted(self.devices), min(candidates_for(COHORT, self.config), DEVICES))
        self.opened = Open(
            self.number, self.attempt, tuple(drawn), self.model_sha256, sha256(CONFIG).digest(),
            self.network.now, BUDGET_S, private=self.dice.random() < 0.5,
        )  # fmt: skip
        self.append(self.opened)
        self._make_machine()
        self.carry_out(self.machine.start(self.network.now))

    def _make_machine(self) -> None:
        expected = Expected(self.opened.round, self.opened.attempt, "s", 10.0)
        self.machine = Round(expected, self.opened.clients, COHORT, self.config, evaluate=False)
        self._end = ""

    def _restart(self) -> None:
        """The same command again: everything from the log."""
        self.server_up = True
        self.log = RoundLog.open(lease_of(self.store, RUN), self.blobs)
        found = self.log.recovery(self.network.now, self.deadlines.waits.heartbeat)
        published = self.log.published
        if published is not None:
            self._load_model(published.model_sha256)
        self.seen.append(found.action)
        if found.action == "next":
            if found.opened is None or found.opened != self.opened:
                self._begin()  # its OPEN was not written
            else:
                self._over("published" if not self.log.order.failed else "failed before the restart")
            return
        assert found.opened is not None
        self.opened = found.opened
        self._make_machine()
        if found.action == "publish":
            assert found.merged is not None
            self.append(Published())
            self._adopt(found.merged.model_sha256)
        elif found.action == "finish":
            self._load_sum(found)
            self._merge_now(found.survivors or (), charged=found.charged)
        else:
            self._resume(found)

    def _load_sum(self, found: Recovery) -> None:
        self.known = dict(found.accepted)
        if found.snapshot is not None:
            with self.blobs.get(found.snapshot.sha256).open() as data:
                self.sum = np.frombuffer(bytes(data), np.int64).copy()
            self.folded, self.snapshot = set(found.snapshot.clients), found.snapshot

    def _resume(self, found: Recovery) -> None:
        self._load_sum(found)
        now, least = self.network.now, HEARTBEATS * self.deadlines.waits.heartbeat
        began = now - max(0.0, self.opened.budget_s - found.budget_s)
        if not found.issued:
            self.carry_out(self.machine.start(max(began, now + least - self.deadlines.configure)))
        else:
            self.issued = dict(found.issued)
            effects = self.machine.resume(
                max(began, now + least - self.deadlines.train), now, self.issued, self.folded
            )
            for client, attempt in self.machine.pending.items():
                self.push(int(client), int(attempt))
            self.carry_out(effects)
        for device in self.devices.values():
            if device.up:
                self.network.after(self.dice.uniform(0.1, 4.0), lambda c=device.client: self.connected(c))

    def carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Configure(_, attempt, clients):
                    named = tuple(int(client) for client in clients)
                    again = [
                        DeviceOutcome(c, self.issued[c], "DROPPED", "train", "it failed, and is asked again")
                        for c in named if c in self.issued
                    ]  # fmt: skip
                    self.append(Issued(attempt, named), settled=again)
                    self.issued.update(dict.fromkeys(named, attempt))
                    for client in named:
                        self.push(client, attempt)
                case Accept(client, attempt):
                    self.append(Accepted(attempt, int(client), self.known[int(client)]))
                    if self.unsaved >= _SNAPSHOT_EVERY:
                        self._save()
                case Reject(client, _, attempt, reason, _):
                    if reason not in ("duplicate", "stale_round", "stale_attempt"):
                        self.tell(int(client), Outcome(client, attempt, "rejected", "train", reason))
                case Merge(survivors):
                    self._save()
                    self.append(Frozen(tuple(map(int, survivors)), self._snapshot_hash()))
                    self._merge_now(tuple(map(int, survivors)))
                    return
                case Abort():
                    self.append(Failed(effect.reason, effect.cause), settled=self._outcomes(effect))
                    self._over(effect.reason)
                    return
                case _:
                    pass
        self._expect_tick()

    def _snapshot_hash(self) -> bytes | None:
        return None if self.snapshot is None else self.snapshot.sha256

    def _expect_tick(self) -> None:
        generation, machine = self.generation, self.machine
        if machine.result is None and machine.deadline < float("inf"):

            def tick() -> None:
                if generation == self.generation and machine is self.machine and not self._end:
                    self._guarded(lambda: self.carry_out(machine.tick(self.network.now)))

            self.network.at(machine.deadline, tick)

    def _save(self) -> None:
        if self.unsaved:
            blob = self.blobs.put([self.sum.tobytes()])
            self.snapshot = Snapshot(tuple(sorted(self.folded)), blob.sha256)
            self.append(self.snapshot)
            self.unsaved = 0

    def _merge_now(self, survivors: tuple[int, ...], *, charged: bool = False) -> None:
        """From the sum to a published model; it takes its time."""
        assert set(survivors) == self.folded, self.network.name
        if self.opened.private and not charged:
            release = charge(self.log.lease, self.opened.round, self.opened.attempt, EVENT)
            self.append(Charged(release.hash))
        model = self.model + self.sum
        blob = self.blobs.put([model.tobytes()])
        state = self.blobs.put([b"state", model.tobytes()])
        generation, machine = self.generation, self.machine

        def done() -> None:
            if generation == self.generation and machine is self.machine and not self._end:
                self._guarded(publish)

        def publish() -> None:
            result: Finish | Abort | None = None
            if self.machine.phase == "merge":
                self.machine.merged(self.network.now)
                result = self.machine.result
            if isinstance(result, Abort):
                self.append(Failed(result.reason, result.cause), settled=self._outcomes(result))
                self._over(result.reason, final=self.opened.private)
                return
            settled = [] if result is None else self._outcomes(result)
            self.append(Merged(blob.sha256, state.sha256), settled=settled)
            self.append(Published())
            self._adopt(blob.sha256)

        slow = self.dice.random() < 0.1
        self.network.after(self.dice.uniform(0, 2 * BUDGET_S if slow else 1.0), done)

    def _outcomes(self, result: Finish | Abort) -> list[DeviceOutcome]:
        return [
            DeviceOutcome(int(o.client), o.attempt, _FATES[o.status], o.phase, o.cause, o.hint)
            for o in result.outcomes
            if int(o.client) in self.issued
        ]

    def _adopt(self, model_sha256: bytes) -> None:
        self._load_model(model_sha256)
        self._over("published")

    def _load_model(self, model_sha256: bytes) -> None:
        with self.blobs.get(model_sha256).open() as data:
            self.model = np.frombuffer(bytes(data), np.int64).copy()
        self.model_sha256 = model_sha256

    def _over(self, how: str, *, final: bool = False) -> None:
        """The next round, or another attempt at this one; a round that was released has no other."""
        self._end = how
        released = {each.round for each in releases_of(self.store, RUN)}
        again = how != "published" and not final and self.number not in released and self.dice.random() < 0.5
        if again:
            self.attempt = self.log.order.attempt + 1
        else:
            self.number, self.attempt = self.number + 1, 0

    # --- messages ---------------------------------------------------------------------------------

    def push(self, client: int, attempt: int) -> None:
        self.tell(client, Task(self.opened.round, attempt))

    def tell(self, client: int, message: object) -> None:
        device = self.devices[client]
        self._over_the_network(device, message, device.take)

    def to_server(self, client: int, message: object) -> None:
        device = self.devices[client]
        self._over_the_network(device, message, lambda what: self._receive(client, what))

    def _over_the_network(self, device: Device, message: object, deliver: Callable[[Any], None]) -> None:
        faults = device.faults.next()
        if "kill" in faults:
            device.kill()
            return
        carry(self.network, faults, message, deliver, self._damaged, (5.0, 1.2 * BUDGET_S))

    def _damaged(self, message: object) -> object:
        """Bytes that changed on the way, or that were never what they should be."""
        if isinstance(message, Update) and self.dice.random() < 0.5:
            return self.unsound(message)
        return b"garbage"

    def unsound(self, update: Update) -> Update:
        meta = update.meta
        changed = self.dice.choice(
            [
                meta._replace(non_finite="w"), meta._replace(schema="t"), meta._replace(weight=float("nan")),
                meta._replace(weight=11.0), meta._replace(weight=0.0),
            ]
        )  # fmt: skip
        return update._replace(meta=changed)

    def connected(self, client: int) -> None:
        """A device is here again: what it was asked is asked again."""
        if not self.server_up or self._end:
            return
        attempt = self.machine.pending.get(client)
        if attempt is not None and self.issued.get(client) == attempt:
            self.push(client, attempt)

    def _receive(self, client: int, message: object) -> None:
        if not self.server_up:
            return
        if message == b"garbage":  # TLS finds it, and the stream ends; the device connects again
            generation = self.generation
            self.network.after(
                self.dice.uniform(0.5, 4.0),
                lambda: self.connected(client) if generation == self.generation else None,
            )
            return
        if self._end:
            return
        self._guarded(lambda: self._take(client, message))

    def _take(self, client: int, message: object) -> None:
        now = self.network.now
        if isinstance(message, Update):
            meta = message.meta
            if sha256(message.vector).digest() != message.sha256:
                return
            first = self.known.get(client)
            wanted = self.machine.awaits(client, meta.attempt) and meta.round == self.opened.round
            good = wanted and not meta.non_finite and meta.schema == "s" and 0 < meta.weight <= 10
            assert first is None or not good or first == message.sha256, self.network.name
            if good:
                self.sum = self.sum + np.frombuffer(message.vector, np.int64)
                self.folded.add(client)
                self.known[client] = message.sha256
                self.unsaved += 1
            effects = self.machine.update(meta, now)
            took = any(isinstance(effect, Accept) for effect in effects)
            assert took == good, (self.network.name, meta, effects)
            self.carry_out(effects)
        elif isinstance(message, Ready) and message.task.round == self.opened.round:
            self.carry_out(self.machine.ready([client], now))
