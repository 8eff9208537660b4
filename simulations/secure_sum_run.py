"""One attempt of a secure sum in one process: machines, a network between them, and a clock."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mycelia.aggregator.secagg import SecureSumServer, ServerResult
from mycelia.client.secagg import SecureSumClient
from mycelia.engine.errors import ConfigError
from mycelia.engine.rng import generator
from mycelia.privacy.secagg import keys, messages
from mycelia.privacy.secagg.encoding import Encoding
from mycelia.privacy.secagg.events import (
    Abort,
    ChunkReceived,
    Close,
    Effect,
    Event,
    Finish,
    Persist,
    Received,
    Record,
    Refuse,
    Release,
    Send,
    SendStream,
    Tick,
)
from mycelia.privacy.secagg.messages import (
    KEY_BYTES,
    PHASES,
    SERVER,
    Deliver,
    Envelope,
    Masked,
    Reason,
    Roll,
    RoundConfig,
    SecureSumError,
    Shares,
    Survivors,
    Unmask,
)
from mycelia.simulations.secure_sum_journals import ClientSink, Journals, Sink
from mycelia.simulations.secure_sum_results import Fault, SecureSumAborted, SecureSumResult
from mycelia.simulations.secure_sum_setup import LATE, PARTIAL, UNIX_TIME, Machine, Setup
from mycelia.simulations.secure_sum_wire import SERVER_NAME, InFlight, Keys, half

__all__ = ["Run"]


class _Crashed(Exception):
    """The server has stopped; what it had not sent is lost."""


class Run:
    """One attempt.

    Args:
        setup: the sum.
        config: of the attempt.
        asked: clients that are asked.
        journals: of all.
        attempt: its number.
        began: when it begins, in virtual seconds.

    Attributes:
        faults: messages refused and clients that left.
        silent: clients that did not answer.
        now: the time, in seconds.
    """

    def __init__(
        self,
        setup: Setup,
        config: RoundConfig,
        asked: Sequence[int],
        journals: Journals,
        attempt: int = 0,
        began: float = 0.0,
    ) -> None:
        self._setup, self._config, self._asked, self._attempt = setup, config, tuple(asked), attempt
        self._task, self._journals = setup.task, journals
        self._sinks: dict[int, ClientSink] = {}
        self._sink: Sink | None = None
        self._records = 0
        self._keys = Keys(setup.identities, setup.corrupt, config.session_id)
        self._noise = setup.context.noise
        if config.noise.mechanism and self._noise is None:
            from mycelia.privacy.noise.source import NoiseSource

            seeded = setup.chance.seeded
            root = f"{setup.chance.root}\x00noise\x00{attempt}".encode()
            key = hashlib.sha256(root).digest() if seeded else os.urandom(KEY_BYTES)
            self._noise = NoiseSource("seeded" if seeded else "os", key)
        self._clients: dict[int, Machine] = {}
        self._server: Machine | None = None
        self.now = began
        self._order = self._ordered(asked)
        self._drops = {client: setup.drops[client] for client in asked if client in setup.drops}
        self._crash = dict(setup.crash) if attempt == 0 else {}
        self._outcome: ServerResult | SecureSumError | None = None
        self._box: list[InFlight] = []
        self._held: list[InFlight] = []
        self._limit = messages.envelope_limit(config)
        self._cpu: dict[int, float] = {}
        self._seen: dict[int, dict[str, bytes]] = {}
        self._owed: set[int] = set()
        self._left: dict[tuple[int, int], set[int]] = {}
        self._sizes: dict[str, int] = {}
        self._charged: list[bytes] = []
        self._phase_ms: dict[str, float] = {}
        self.faults: list[Fault] = []
        self._cut: set[int] = set()
        self.silent: set[int] = set()

    def _ordered(self, clients: Sequence[int]) -> dict[int, int]:
        order, ids = self._setup.order, sorted(clients)
        if order == "reversed":
            ids.reverse()
        elif order != "sorted":
            generator(int(order), "order of answers").shuffle(ids)
        return {client: place for place, client in enumerate(ids)}

    # --- machines ---

    def _server_arguments(self) -> dict[str, Any]:
        setup = self._setup
        return {
            "size": self._task.size,
            "identity": setup.identities[SERVER],
            "roster": setup.roster,
            "unix_time": UNIX_TIME,
            "random": setup.chance.bytes(f"server {self._attempt}"),
        }

    def _make_client(self, client: int) -> None:
        setup = self._setup
        made = setup.actors.get(client, SecureSumClient)
        if client in self._sinks:
            self._sinks.pop(client).close()
        sink = self._sinks[client] = self._journals.client(client)
        self._clients[client] = made(
            client=client,
            identity=setup.identities[client],
            roster=setup.roster,
            task=self._task,
            unix_time=UNIX_TIME,
            rounding=setup.chance.rounding(client),
            policy=setup.policies(client),
            past=sink.history,
            noise=self._noise,
            random=setup.chance.bytes(f"client {client} {self._attempt} {sink.records}"),
        )
        self._tell(client, Tick(self.now))

    def _tell(self, who: int, event: Event) -> list[Effect]:
        """Hand an event to a machine, and take the time."""
        machine = self._server if who == SERVER else self._clients[who]
        if machine is None:
            return []
        began = time.thread_time()
        effects = machine.handle(event)
        self._cpu[who] = self._cpu.get(who, 0.0) + time.thread_time() - began
        return effects

    # --- the course of a session ---

    def go(self) -> ServerResult | SecureSumError:
        """Drive all machines to their ends."""
        try:
            return self._go()
        finally:
            for sink in (*self._sinks.values(), *([self._sink] if self._sink else [])):
                sink.close()

    def _go(self) -> ServerResult | SecureSumError:
        setup = self._setup
        try:
            self._sink = self._journals.begin(self._config.session_id)
        except SecureSumError as error:
            self._note(SERVER, error)
            return error
        for client in self._asked:
            self._make_client(client)
        made = setup.actors.get(SERVER_NAME, SecureSumServer)
        self._server = made(config=self._config, candidates=self._asked, **self._server_arguments())
        began, phase = time.perf_counter(), "advertise"
        self._try_serve(Tick(self._time()))
        while True:
            self._deliver_held()
            if self._box:
                batch, self._box = self._box, []
                for message in sorted(batch, key=lambda m: self._order.get(m.receiver, 0)):
                    self._to_client(message)
            elif self._outcome is None:
                self._close()
            else:
                break
            if self._phase != phase or self._outcome is not None:
                now = time.perf_counter()
                self._phase_ms[phase] = self._phase_ms.get(phase, 0.0) + 1000 * (now - began)
                began, phase = now, self._phase
        for client in sorted(set(self._asked) - self._cut):  # whoever still waits ends by its deadline
            self._carry_out(client, self._tell(client, Tick(self.now + 1e9)))
        self.faults = list(dict.fromkeys(self.faults))
        if self._sink is not None:
            self._journals.end(self._sink)
        return self._outcome

    @property
    def _phase(self) -> str:
        return str(getattr(self._server, "phase", "done"))

    def _time(self) -> float:
        if self._setup.clock is not None:
            self.now = self._setup.clock()
        return self.now

    def _close(self) -> None:
        """Nobody has anything more to say: the phase ends by the clock, or else by the policy of a driver."""
        self.silent |= self._owed
        phase, deadline = self._phase, getattr(self._server, "deadline", None)
        if self._setup.clock is None and deadline is not None:
            self.now = deadline
        closed = self._try_serve(Tick(self._time()))
        if closed and self._phase == phase and not self._box and self._outcome is None:
            closed = self._try_serve(Close(phase))
            if closed and self._phase == phase and not self._box and self._outcome is None:
                raise ConfigError(f"the server does not end its phase {phase!r}", who="secure_sum")

    def _deliver_held(self) -> None:
        places = {phase: place for place, phase in enumerate((*PHASES, "done"))}
        due = [message for message in self._held if places[message.held] <= places.get(self._phase, 0)]
        self._held = [message for message in self._held if message not in due]
        for message in due:
            if message.receiver == SERVER:
                self._to_server(message)
            else:
                self._box.append(message)

    def _serve(self, event: Event) -> None:
        """The server takes an event, and its effects are carried out unless it stops in between."""
        try:
            self._carry_out(SERVER, self._tell(SERVER, event))
        except _Crashed:
            self._restart()
            raise

    def _restart(self) -> None:
        """The server that stopped is built anew from its journal, or the session is over."""
        made = self._setup.actors.get(SERVER_NAME, SecureSumServer)
        restore = getattr(made, "restore", SecureSumServer.restore)
        if self._sink is not None:
            self._sink.close()
        try:
            self._sink, records = self._journals.resume(self._config.session_id)
            self._records = len(records)
            self._server = restore(records, **self._server_arguments())
        except SecureSumError as error:
            self._lose_server(error)
        else:
            self._serve(Tick(self.now))

    def _lose_server(self, error: SecureSumError) -> None:
        """Without its journal a server says nothing more; the clients end by their deadlines."""
        self._server, self._sink = None, None
        self._note(SERVER, error)
        self._outcome = error

    def _try_serve(self, event: Event) -> bool:
        try:
            self._serve(event)
        except _Crashed:
            return False
        return True

    def _carry_out(self, who: int, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Persist(record):
                    if not self._persist(who, record):
                        return
                case Send(to, data):
                    self._send(who, to, data)
                case SendStream(to, header, chunks):
                    self._send(who, to, header, tuple(chunks))
                case Refuse(_, error):
                    self._note(who, error)
                case Finish(result):
                    if who == SERVER:
                        self._outcome = result
                case Abort(error):
                    self._note(who, error)
                    if who == SERVER:
                        self._outcome = error
                case _:  # a charge
                    if who == SERVER:
                        self._charge(effect.release)

    def _charge(self, release: Release) -> None:
        """Once for each session."""
        if release.session_id not in self._charged:
            if self._setup.context.charge is not None:
                self._setup.context.charge(release)
            self._charged.append(release.session_id)

    def _persist(self, who: int, record: Record) -> bool:
        """Whether the record is durable; without it nothing that follows may be done."""
        sink = self._sink if who == SERVER else self._sinks[who]
        try:
            if sink is None:
                raise SecureSumError(Reason.JOURNAL, "there is no journal", who="server")
            sink.append(record)
        except SecureSumError as error:
            if who == SERVER:
                self._lose_server(error)
            else:
                self._note(who, error)
                self._cut.add(who)
            return False
        if who == SERVER:
            self._records += 1
            self._stop_at(record)
        return True

    def _stop_at(self, record: Record) -> None:
        when = self._crash.get(SERVER_NAME)
        if when in (self._records, record.kind):
            del self._crash[SERVER_NAME]
            raise _Crashed

    def _note(self, who: int, error: SecureSumError) -> None:
        if who != SERVER and error.client is None and error.owner is None:
            error.client = who
        self.faults.append(Fault.of(error))

    # --- the network ---

    def _send(self, sender: int, receiver: int, raw: bytes, chunks: tuple[memoryview, ...] = ()) -> None:
        setup = self._setup
        kind = Envelope.decode(raw, max(self._limit, len(raw))).kind if setup.wire or sender != SERVER else ""
        way = "down" if sender == SERVER else "up"
        self._sizes[way] = self._sizes.get(way, 0) + len(raw) + sum(map(len, chunks))
        if sender != SERVER:
            self._measure(kind, sender, raw, chunks)
        message = InFlight("", sender, receiver, _UNREAD, raw, chunks)
        if sender in self._drops and kind == Masked.KIND and self._drops[sender] == LATE:
            self._held.append(message.until("agree"))
            return
        if sender in self._drops and kind == Masked.KIND and self._drops[sender] == PARTIAL:
            message = replace(message, chunks=half(chunks))
            self._cut.add(sender)
        for one in self._through(message):
            if one.held:
                self._held.append(one)
            elif one.receiver == SERVER:
                self._to_server(one)
            else:
                self._box.append(one)

    def _through(self, message: InFlight) -> list[InFlight]:
        wire = self._setup.wire
        if wire is None:
            return [message]
        envelope = Envelope.decode(message.raw, max(self._limit, len(message.raw)))
        kind = messages.MESSAGES[envelope.kind]
        read = replace(
            message, phase=kind.PHASE or self._phase, message=kind.decode(envelope.body, self._config)
        )
        found = wire(read, self._keys)
        given = [] if found is None else [found] if isinstance(found, InFlight) else list(found)
        return [
            replace(one, raw=replace(envelope, kind=one.message.KIND, body=one.message.encode()).encode())
            if one.message != read.message and one.raw == read.raw
            else one
            for one in given
        ]

    def _measure(self, kind: str, sender: int, raw: bytes, chunks: tuple[memoryview, ...]) -> None:
        if kind == Shares.KIND:
            self._sizes["share"] = max(len(raw), self._sizes.get("share", 0))
        elif kind == Masked.KIND:
            size = len(raw) + sum(map(len, chunks))
            self._sizes["upload"] = max(size, self._sizes.get("upload", 0))
        elif kind == Unmask.KIND and sender not in self._setup.corrupt and sender not in self._setup.actors:
            self._count_released(sender, raw)

    def _count_released(self, holder: int, raw: bytes) -> None:
        """Which shares these are follows from what their holder was told."""
        told = self._seen[holder]
        bodies = {kind: Envelope.decode(data, len(data)).body for kind, data in told.items()}
        config = self._config
        roll, deliver = (
            Roll.decode(bodies[Roll.KIND], config),
            Deliver.decode(bodies[Deliver.KIND], config),
        )
        alive = set(keys.members(Survivors.decode(bodies[Survivors.KIND], config).u2, roll.ids))
        sent = Unmask.decode(Envelope.decode(raw, len(raw)).body, config)
        for kind, owners, shares in (
            (0, [owner for owner in deliver.owners if owner in alive], sent.b_shares),
            (1, [owner for owner in deliver.owners if owner not in alive], sent.s_shares),
        ):
            for owner, _ in zip(owners, shares, strict=True):
                self._left.setdefault((owner, kind), set()).add(holder)

    def _to_server(self, message: InFlight) -> None:
        whole = not message.chunks or sum(map(len, message.chunks)) == self._config.upload_bytes
        if whole and message.sender not in self._cut:
            self._owed.discard(message.sender)
        if not self._try_serve(Received(message.sender, message.raw)):
            return  # the connection broke with the server
        for number, chunk in enumerate(message.chunks):
            if not self._try_serve(ChunkReceived(message.sender, number, chunk)):
                return

    def _to_client(self, message: InFlight) -> None:
        client = message.receiver
        if client not in self._clients or client in self._cut:
            return
        try:
            envelope = Envelope.decode(message.raw, max(self._limit, len(message.raw)))
            kind = messages.MESSAGES[envelope.kind]
        except SecureSumError:
            self._carry_out(client, self._tell(client, Received(SERVER, message.raw)))
            return
        asks = kind.PHASE in PHASES and kind is not messages.Done
        if asks:
            self._owed.add(client)
            if self._is_silent(client, kind.PHASE):
                self._cut.add(client)
                return
            if self._crash.get(client) == kind.PHASE:
                del self._crash[client]
                self._make_client(client)
        self._seen.setdefault(client, {}).setdefault(envelope.kind, message.raw)
        effects = self._tell(client, Received(SERVER, message.raw))
        if kind is messages.Abort:
            effects = [
                effect for effect in effects if not isinstance(effect, Abort)
            ]  # the server's own words
        self._carry_out(client, effects)
        if kind is Deliver:
            self._carry_out(client, self._tell(client, self._setup.inputs.update(client)))

    def _is_silent(self, client: int, phase: str) -> bool:
        drop = self._drops.get(client)
        return drop in PHASES and PHASES.index(drop) <= PHASES.index(phase)

    # --- what came of it ---

    def released(self) -> dict[int, tuple[int, int]]:
        """Owner to the shares of b and of s that left honest clients."""
        owners = sorted({owner for owner, _ in self._left})
        return {
            owner: (len(self._left.get((owner, 0), ())), len(self._left.get((owner, 1), ())))
            for owner in owners
        }

    def _plain_sum(self, survivors: Sequence[int]) -> npt.NDArray[Any]:
        """The sum of the same encodings without masks, as residues."""
        encoding = Encoding(self._config, self._task.size)
        total = None
        for client in survivors:
            update = self._setup.inputs.update(client)
            words = encoding.encode(
                update.vector,
                update.weight,
                update.slots,
                client=client,
                rounding=self._setup.chance.rounding(client),
                noise=self._noise,
            )
            total = words if total is None else total + words
        if total is None:
            raise ConfigError("no survivors", who="secure_sum")
        return total & total.dtype.type(2**self._config.bits - 1)

    def result(self, outcome: ServerResult, faults: tuple[Fault, ...]) -> SecureSumResult:
        """What a finished session gives."""
        decoded, survivors = outcome.decoded, outcome.survivors
        encoding = Encoding(self._config, self._task.size)
        plain = encoding.integers(self._plain_sum(survivors))
        opened = [decoded.weight, *decoded.slots.values()]
        exact = np.array_equal(plain, np.concatenate([np.array(opened, np.int64), decoded.total]))
        return SecureSumResult(
            total=decoded.total,
            values=decoded.values,
            mean=decoded.mean,
            weight=decoded.weight,
            slots=decoded.slots,
            survivors=survivors,
            faults=faults,
            released=self.released(),
            exact=bool(exact),
            transcript_sha256=outcome.transcript.hex(),
            client_ms=1000 * statistics.median(self._cpu[client] for client in survivors),
            server_ms=1000 * self._cpu[SERVER],
            upload_bytes=self._sizes.get("upload", 0),
            share_bytes=self._sizes.get("share", 0),
            bytes_up=self._sizes.get("up", 0),
            bytes_down=self._sizes.get("down", 0),
            phase_ms={phase: self._phase_ms.get(phase, 0.0) for phase in PHASES},
            attempts=self._attempt + 1,
            insecure_rng=self._setup.chance.seeded,
            masked=True,
            charged=tuple(session.hex() for session in self._charged),
        )

    def plain(self) -> SecureSumResult:
        """The sum without masks: clients that drop before their upload is complete are not in it."""
        lost = {"advertise", "share", "masked", PARTIAL, LATE}
        survivors = tuple(client for client in self._asked if self._drops.get(client) not in lost)
        if len(survivors) < self._config.n_min:
            error = SecureSumError(
                Reason.COHORT_TOO_SMALL,
                f"{len(survivors)} clients are left",
                rule=f"at least n_min = {self._config.n_min}",
                phase="masked",
                have=len(survivors),
                need=self._config.n_min,
            )
            raise SecureSumAborted(error, self._drops)
        config = self._config
        self._charge(Release(config.session_id, config.job, config.round, config.attempt, len(survivors)))
        began = time.thread_time()
        decoded = Encoding(config, self._task.size).decode(self._plain_sum(survivors), len(survivors))
        return SecureSumResult(
            total=decoded.total,
            values=decoded.values,
            mean=decoded.mean,
            weight=decoded.weight,
            slots=decoded.slots,
            survivors=survivors,
            faults=(),
            released={},
            exact=True,
            transcript_sha256="",
            client_ms=0.0,
            server_ms=1000 * (time.thread_time() - began),
            upload_bytes=self._config.upload_bytes,
            share_bytes=0,
            bytes_up=self._config.upload_bytes * len(survivors),
            bytes_down=0,
            phase_ms={},
            attempts=1,
            insecure_rng=self._setup.chance.seeded,
            masked=False,
            charged=tuple(session.hex() for session in self._charged),
        )


_UNREAD: Final = messages.Done(bytes(32))
"""Stands for a message that nobody looks into."""
