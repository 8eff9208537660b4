"""Rounds of both machines of the secure sum and the log on a clock of numbers, with a bad network between."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Final, NamedTuple

import numpy as np

from mycelia.aggregator.attempts import RoundAttempts, Suspects
from mycelia.aggregator.blobs import Blobs
from mycelia.aggregator.charges import charge, releases_of
from mycelia.aggregator.log_records import Failed, Issued, Machine, Merged, Open, Published
from mycelia.aggregator.round_log import RoundLog
from mycelia.aggregator.secagg import SecureSumServer, ServerResult
from mycelia.aggregator.store import Store
from mycelia.client.history import ClientHistory
from mycelia.client.secagg import SecureSumClient
from mycelia.privacy.secagg import keys
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.events import (
    Abort,
    Charge,
    ChunkReceived,
    Effect,
    Event,
    Finish,
    LocalUpdate,
    Persist,
    Received,
    Record,
    Refuse,
    Send,
    SendStream,
    Tick,
)
from mycelia.privacy.secagg.messages import PHASES, SERVER, Config, SecureSumError
from mycelia.simulations.secure_sum_setup import UNIX_TIME, Chance, Context, Inputs, Setup
from tests.aggregator.round_histories import CONFIG, EVENT, lease_of
from tests.e2e.chaos.fake_network import SHARE, Crashed, Faults, Network, carry

RUN: Final = "chaos"
DEVICES: Final = 8
DIMENSION: Final = 4
BUDGET_S: Final = 60.0
SETTINGS: Final = SecureSumConfig(
    n_min=5, n_max=DEVICES, threshold=4, threat="passive", corrupt=0.0, dropout=0.1
)
_SECONDS: Final = (6.0, 6.0, 30.0, 5.0, 5.0)
"""Of each phase."""
_RECORDS: Final = 40  # of a round, at most, that a kill is drawn from
_MESSAGES: Final = 20  # of a device, both ways, in the two attempts that many rounds take


class Upload(NamedTuple):
    header: bytes
    chunks: tuple[bytes, ...]


def codes_of(client: int, round: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng([client, round]).integers(-(2**15), 2**15, DIMENSION)


@dataclass
class Device:
    """One client: what it has written down outlives it, its machine does not."""

    world: World
    client: int
    faults: Faults = field(default_factory=lambda: Faults({}))
    up: bool = True
    lives: int = 0
    journal: list[Record] = field(default_factory=list)
    machine: SecureSumClient | None = None
    hello: bytes = b""  # of the session that the machine is in
    why: SecureSumError | None = None

    def take(self, hello: bytes, data: bytes) -> None:
        """From the server, in the session that begins with `hello`."""
        if not self.up:
            return
        world, now = self.world, self.world.network.now
        if self.machine is None or self.hello != hello:
            if data != hello and not self.machine:
                data = hello  # the task comes first, which holds it
            elif data != hello:
                return  # of a session that is over
            setup = world.setup
            self.hello, self.machine = hello, SecureSumClient(
                client=self.client, identity=setup.identities[self.client], roster=setup.roster,
                task=setup.task, unix_time=UNIX_TIME, rounding=setup.chance.rounding(self.client),
                policy=setup.policies(self.client), past=ClientHistory.read(self.journal),
            )  # fmt: skip
            self.carry_out(self.machine.handle(Tick(now)))
            life, machine = self.lives, self.machine
            world.network.after(world.dice.uniform(0.5, 20.0), lambda: self.trained(machine, life))
        self.carry_out(self.machine.handle(Received(SERVER, data)))

    def trained(self, machine: SecureSumClient, life: int) -> None:
        if self.up and life == self.lives and self.machine is machine:
            self.carry_out(machine.handle(LocalUpdate(codes_of(self.client, self.world.number))))

    def carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Persist(record):
                    self.journal.append(record)
                case Send(_, data):
                    self.world.to_server(self.client, self.hello, data)
                case SendStream(_, header, chunks):
                    parts = tuple(bytes(chunk) for chunk in chunks)
                    self.world.to_server(self.client, self.hello, Upload(header, parts))
                case Abort(error):
                    self.why = error
                case _:
                    pass

    def kill(self) -> None:
        self.up, self.machine, self.hello = False, None, b""
        self.lives += 1
        dice, life = self.world.dice, self.lives
        gone = dice.uniform(0.5, 15.0) if dice.random() < 0.6 else 10 * BUDGET_S
        self.world.network.after(gone, lambda: self.back(life))

    def back(self, life: int) -> None:
        if life == self.lives:
            self.up = True
            self.world.connected(self.client)


class World:
    """A run of one server, whose rounds are secure sums. Arguments as of the plain one."""

    def __init__(self, store: Store, blobs: Blobs, seed: int) -> None:
        self.dice = random.Random(seed)
        self.seed, self.number, self.attempt = seed, 0, 0
        self.network = Network(self.dice, f"seed {seed}")
        self.store, self.blobs = store, blobs
        ids = tuple(range(1, DEVICES + 1))
        inputs = Inputs.of(np.zeros((DEVICES, DIMENSION)), None, ids, None)
        self.people = self.setup = Setup.of(inputs, SETTINGS, seed=seed, context=Context(RUN, 0))
        self.devices = {client: Device(self, client) for client in ids}
        self.log = RoundLog.create(lease_of(store, RUN), blobs, CONFIG)
        self.model_sha256 = blobs.put([b"model 0"]).sha256
        self.suspects = Suspects()
        self.server_up, self.generation, self.records, self.crash_at = True, 0, 0, 0
        self.crash_before = False
        self.seen: list[str] = []
        self.opened: Open
        self.attempts: RoundAttempts
        self.session = 0  # attempt on the wire
        self._forget()

    def _forget(self) -> None:
        """What a server has in memory."""
        self.machine: SecureSumServer | None = None
        self.hello = b""
        self.last: dict[int, bytes] = {}
        self.lost: dict[int, str] = {}
        self.refused: dict[int, SecureSumError] = {}

    # --- one round --------------------------------------------------------------------------------

    def play(self) -> str:
        """A round with its faults, to its end; "published", or why it failed."""
        dice, network = self.dice, self.network
        network.name = f"seed {self.seed}, round {self.number}, attempt {self.attempt}"
        self.setup = replace(
            self.people, context=Context(RUN, self.number), chance=Chance(self.seed * 10**6 + self.number)
        )
        for device in self.devices.values():
            device.faults = Faults.draw(dice, _MESSAGES)
            if not device.up and dice.random() < 0.7:
                device.lives += 1
                device.up = True
        self.crash_at = self.records + dice.randint(1, _RECORDS) if dice.random() < SHARE else 0
        self.crash_before = dice.random() < 0.5
        self._end, self._result, self._restarted, round = "", None, False, self.number
        network.at(network.now, lambda: self._guarded(self._begin))
        network.play(lambda: bool(self._end) and self.server_up, 5 * BUDGET_S)
        self._check(round)
        return self._end

    def _check(self, round: int) -> None:
        """What holds after every round."""
        name = f"{self.network.name}: {self._end}"
        released = releases_of(self.store, RUN)
        assert len({each.round for each in released}) == len(released), (name, released)
        mine = [each for each in released if each.round == round]
        if self._end == "published":
            result = self._result
            if result is None:
                return  # it was merged before a restart, which its test is about
            survivors = result.survivors
            assert len(set(survivors)) == len(survivors) >= SETTINGS.n_min, name  # type: ignore[operator]
            total = sum((codes_of(client, round) for client in survivors), np.zeros(DIMENSION, np.int64))
            assert np.array_equal(result.decoded.total, total), (name, survivors)
            assert len(mine) == 1, (name, mine)
            faults = {fault.client for fault in result.faults}
            for client in set(self.attempts.clients) - set(survivors):
                known = client in self.lost or client in self.refused or client in faults
                assert known or self._restarted, (name, client)
        else:
            error = self._error
            assert error is not None, name
            assert error.reason, name
            assert error.phase in PHASES, (name, error)
        for device in self.devices.values():
            history = ClientHistory.read(device.journal)  # raises where it contradicts itself
            times = [record for record in device.journal if record.kind == "RELEASED"]
            assert len(times) == len({place for place in history.rounds}), (name, device.client)

    # --- the server -------------------------------------------------------------------------------

    def append(self, *entries: Any) -> None:
        """Durable when this returns; the process may be killed on either side of it."""
        self.records += 1
        hit = self.records == self.crash_at
        if hit and self.crash_before:
            raise Crashed
        self.log.append_many(entries)
        if hit:
            raise Crashed

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Crashed:
            self.server_up = False
            self.generation += 1
            self._forget()
            self.network.after(self.dice.uniform(0.2, 5.0), lambda: self._guarded(self._restart))

    def _begin(self) -> None:
        self._forget()
        self.opened = Open(
            self.number, self.attempt, tuple(sorted(self.devices)), self.model_sha256,
            sha256(CONFIG).digest(), self.network.now, BUDGET_S, secure=True, private=True,
        )  # fmt: skip
        self.append(self.opened)
        self._make_attempts(self.network.now)
        self._issue()

    def _make_attempts(self, began: float) -> None:
        n_min = int(SETTINGS.n_min)
        self.attempts = RoundAttempts(self.opened.clients, n_min, BUDGET_S, self.suspects, began=began)

    def _issue(self) -> None:
        """The next attempt asks those who are left."""
        self.session = self.opened.attempt + self.attempts.number
        self.append(Issued(self.session, self.attempts.clients))
        self._open_session()

    def _open_session(self) -> None:
        setup, now = self.setup, self.network.now
        seconds = self.attempts.deadlines(_SECONDS, now)
        config = setup.round_config(self.session, len(self.attempts.clients), seconds)
        self._forget()
        self.machine = SecureSumServer(
            config, DIMENSION, self.attempts.clients, setup.identities[SERVER], setup.roster,
            unix_time=UNIX_TIME,
        )  # fmt: skip
        self.carry_out(self.handle(Tick(now)))

    def _restart(self) -> None:
        """The same command again: everything from the log."""
        self.server_up = self._restarted = True
        self.log = RoundLog.open(lease_of(self.store, RUN), self.blobs)
        found = self.log.recovery(self.network.now, 1.5)
        self.seen.append(found.action)
        if found.action == "next":
            if found.opened != getattr(self, "opened", None):
                self._begin()
            else:
                self._over("published" if not self.log.order.failed else "failed before the restart")
            return
        assert found.opened is not None
        self.opened = found.opened
        if found.action == "publish":
            self.append(Published())
            self._over("published")
            return
        self._make_attempts(self.network.now - max(0.0, BUDGET_S - max(found.budget_s, 15.0)))
        if not found.issued:
            self._issue()
            return
        self.attempts.number = found.attempt - self.opened.attempt
        self.attempts.clients = tuple(
            sorted(client for client, attempt in found.issued.items() if attempt == found.attempt)
        )
        self.session = found.attempt
        if found.action == "ask":
            self._open_session()
            return
        setup = self.setup
        self.machine = SecureSumServer.restore(
            found.session, DIMENSION, setup.identities[SERVER], setup.roster, unix_time=UNIX_TIME
        )
        self.carry_out(self.handle(Tick(self.network.now)))

    def handle(self, event: Event) -> list[Effect]:
        """Give the machine an event, and see who missed the end of a phase."""
        machine = self.machine
        assert machine is not None
        before, waits_for = machine.phase, machine.waits_for
        effects = machine.handle(event)
        if machine.phase != before and isinstance(event, Tick):
            for client in waits_for:
                self.lost.setdefault(client, before)
        return effects

    def carry_out(self, effects: Sequence[Effect]) -> None:
        machine = self.machine
        for effect in effects:
            match effect:
                case Persist(record):
                    self.append(Machine(self.session, record))
                case Send(to, data):
                    if not self.hello:
                        self.hello = self._hello()
                    self.last[to] = data
                    self.tell(to, data)
                case Charge(release):
                    assert (release.round, release.attempt) == (self.number, self.session)
                    charge(self.log.lease, self.number, self.session, EVENT)
                case Refuse(to, error):
                    self.refused[to] = error
                case Finish(result):
                    self._publish(result)
                    return
                case Abort(error):
                    self._failed(error)
                    return
                case _:
                    pass
        if machine is not None and machine is self.machine:
            self._expect_tick()

    def _hello(self) -> bytes:
        """What a session begins with, the same for everybody."""
        assert self.machine is not None
        config = self.machine.config
        return keys.sign(Config(config), config.session_id, SERVER, self.setup.identities[SERVER]).encode()

    def _expect_tick(self) -> None:
        generation, machine = self.generation, self.machine
        if machine is not None and machine.deadline is not None:

            def tick() -> None:
                if generation == self.generation and machine is self.machine and not self._end:
                    self._guarded(lambda: self.carry_out(self.handle(Tick(self.network.now))))

            self.network.at(machine.deadline, tick)

    def _publish(self, result: ServerResult) -> None:
        self._result = result
        blob = self.blobs.put([f"model {self.number + 1}".encode()])
        state = self.blobs.put([f"state {self.number + 1}".encode()])
        self.append(Merged(blob.sha256, state.sha256))
        self.append(Published())
        self.model_sha256 = blob.sha256
        self._over("published")

    def _failed(self, error: SecureSumError) -> None:
        """Another attempt with those that are left, or none."""
        self._error = error
        released = any(each.round == self.number for each in releases_of(self.store, RUN))
        silent = set(self.lost)
        if not released and self.attempts.go_on(error, silent, self.network.now):
            self._issue()
            return
        self.append(Failed("secure_sum", error.found))
        self._over(str(error.reason))

    def _over(self, how: str) -> None:
        self._end = how
        if how == "published":
            published = self.log.published
            assert published is not None
            self.model_sha256 = published.model_sha256
        released = any(each.round == self.number for each in releases_of(self.store, RUN))
        if how != "published" and not released and self.dice.random() < 0.5:
            self.attempt = self.log.order.attempt + 1
        else:
            self.number, self.attempt = self.number + 1, 0

    # --- messages ---------------------------------------------------------------------------------

    def tell(self, client: int, data: bytes) -> None:
        device, hello = self.devices[client], self.hello
        self._over_the_network(device, data, lambda what: device.take(hello, what))

    def to_server(self, client: int, hello: bytes, message: bytes | Upload) -> None:
        device = self.devices[client]
        self._over_the_network(device, message, lambda what: self._receive(client, hello, what))

    def _over_the_network(
        self, device: Device, message: bytes | Upload, deliver: Callable[[Any], None]
    ) -> None:
        faults = device.faults.next()
        if "kill" in faults:
            device.kill()
            return
        carry(self.network, faults, message, deliver, self._damaged, (0.2, 9.0))

    def _damaged(self, message: bytes | Upload) -> bytes | Upload:
        """A bit is another one."""
        if isinstance(message, Upload):
            if self.dice.random() < 0.5:
                return Upload(self._flipped(message.header), message.chunks)
            return Upload(message.header, tuple(map(self._flipped, message.chunks)))
        return self._flipped(message)

    def _flipped(self, data: bytes) -> bytes:
        place = self.dice.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << self.dice.randrange(8)]) + data[place + 1 :]

    def connected(self, client: int) -> None:
        """A device is here again: what it was sent last is sent again."""
        if self.server_up and not self._end and client in self.last:
            self.tell(client, self.last[client])

    def _receive(self, client: int, hello: bytes, message: bytes | Upload) -> None:
        if not self.server_up or self._end or self.machine is None or hello != self.hello:
            return

        def take() -> None:
            machine = self.machine
            if isinstance(message, bytes):
                self.carry_out(self.handle(Received(client, message)))
                return
            self.carry_out(self.handle(Received(client, message.header)))
            for number, chunk in enumerate(message.chunks):
                if machine is self.machine and not self._end:
                    self.carry_out(self.handle(ChunkReceived(client, number, chunk)))

        self._guarded(take)
