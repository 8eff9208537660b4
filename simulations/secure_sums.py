"""A secure sum in one process: the real machines, with dropouts, crashes and liars where they are asked for.

Messages travel as the bytes they are. What a network does to them is a function (`wire`), and whoever lies is
a machine of its own (`actors`) or a message signed anew; everything else is what a deployment runs.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mycelia.aggregator.secagg import SecureSumServer, ServerResult, status_code
from mycelia.client.history import ClientHistory
from mycelia.client.policy import ClientPolicy
from mycelia.client.secagg import SecureSumClient, Task
from mycelia.engine.errors import ConfigError, RoundAborted
from mycelia.engine.rng import generator
from mycelia.privacy.secagg import keys, messages
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.encoding import Encoding
from mycelia.privacy.secagg.events import (
    Abort,
    ChunkReceived,
    Close,
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
from mycelia.privacy.secagg.keys import Identity
from mycelia.privacy.secagg.messages import (
    KEY_BYTES,
    PHASES,
    SERVER,
    Config,
    Deliver,
    Envelope,
    Masked,
    Message,
    Reason,
    Roll,
    RoundConfig,
    SecureSumError,
    Shares,
    Survivors,
    Threat,
    Unmask,
)
from mycelia.privacy.secagg.roster import ClientEntry, Issuer, Roster, ServerEntry

__all__ = ["Fault", "InFlight", "Keys", "SecureSumAborted", "SecureSumResult", "secure_sum"]

_UNIX_TIME = 1  # the entries of the roster are valid at any time
_LAST = 253_402_300_799
_SERVER = "server"
_PARTIAL, _LATE = "masked:partial", "masked:late"
_FINAL: Final = {Reason.CONFIG, Reason.OVERFLOW, Reason.WEAK_PARAMETERS, Reason.BUDGET, Reason.EMPTY_WEIGHT}
"""Reasons that another attempt would meet again."""
_NONE: Final[Mapping[Any, Any]] = MappingProxyType({})


class Machine(Protocol):
    """Either side of the secure sum."""

    def handle(self, event: Event) -> list[Effect]:
        """Take an event and say what to do about it."""


class Fault(NamedTuple):
    """A message that was refused, or a client that left.

    Attributes:
        code: the gRPC status that a service answers with.
        reason: the code of the protocol.
        phase: in which it happened, or "".
        client: who sent or left.
        owner: whose secret it was about.
    """

    code: str
    reason: Reason
    phase: str
    client: int | None
    owner: int | None

    @classmethod
    def of(cls, error: SecureSumError) -> Fault:
        """From an error."""
        return cls(status_code(error), error.reason, error.phase, error.client, error.owner)


@dataclass(frozen=True)
class InFlight:
    """A message on its way. A changed `message` under an unchanged `raw` is sent with the old signature.

    Attributes:
        phase: of the message, or of the server for one that belongs to none.
        sender: a client's id, 0 for the server.
        receiver: the same.
        message: what it says.
        raw: the signed bytes that travel.
        chunks: of an upload, behind its header.
        held: the phase it is held until, "" if it is not.
    """

    phase: str
    sender: int
    receiver: int
    message: Message
    raw: bytes = field(repr=False)
    chunks: tuple[bytes | memoryview, ...] = field(default=(), repr=False)
    held: str = ""

    def until(self, phase: str) -> InFlight:
        """The same, delivered when the server has entered a phase, or "done"."""
        if phase not in (*PHASES, "done"):
            raise ConfigError(f"held until {phase!r}", rule=f"one of {', '.join(PHASES)}, done", who="wire")
        return replace(self, held=phase)


class Keys:
    """Signs what liars send: for the server, and for the clients named as corrupt."""

    def __init__(self, identities: Mapping[int, Identity], corrupt: Iterable[int], session_id: bytes) -> None:
        self._identities, self._corrupt, self._session_id = identities, frozenset(corrupt), session_id

    def sign(self, message: Message, as_: int | str, *, session_id: bytes | None = None) -> bytes:
        """A message in a signed envelope, as bytes.

        Args:
            message: what to say.
            as_: "server", or the id of a corrupt client.
            session_id: another session than the present one; a `Config` brings its own.

        Raises:
            ConfigError: for an honest client.
        """
        sender = SERVER if as_ == _SERVER else as_
        if sender != SERVER and sender not in self._corrupt:
            raise ConfigError(f"a signature of {as_!r}", rule="'server' or a corrupt client", who="wire")
        own = message.round.session_id if isinstance(message, Config) else self._session_id
        identity = self._identities[int(sender)]
        return keys.sign(message, session_id or own, int(sender), identity).encode()


Wire = Callable[[InFlight, Keys], InFlight | Iterable[InFlight] | None]
"""Sees every message, and returns what is delivered in its place."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SecureSumResult:
    """An opened sum, and what it took.

    Attributes:
        total: the exact sum of weight times code, int64 [d].
        mean: the weighted mean, float64 [size].
        weight: the sum of the weights.
        slots: the sums of the slots.
        survivors: who is in it, increasing.
        faults: messages refused and clients that left, in all attempts.
        released: owner to (shares of b, shares of s) that left honest clients in the last session.
        exact: whether `total`, weight and slots are the plain sums over the survivors.
        transcript_sha256: hash of the session, in hexadecimal; "" without masks.
        client_ms: CPU time inside the machine of a survivor, the median.
        server_ms: CPU time inside the server machine.
        upload_bytes: header and vector of one client.
        share_bytes: the `Shares` message of one client.
        phase_ms: wall time of each phase.
        attempts: how many it took.
        insecure_rng: whether keys and noise came from a seed, and the sum is therefore not secret.
        masked: whether there were masks.
        charged: session ids that a ledger was charged for, in hexadecimal.
    """

    total: npt.NDArray[np.int64]
    mean: npt.NDArray[np.float64]
    weight: int
    slots: Mapping[str, int]
    survivors: tuple[int, ...]
    faults: tuple[Fault, ...]
    released: Mapping[int, tuple[int, int]]
    exact: bool
    transcript_sha256: str
    client_ms: float
    server_ms: float
    upload_bytes: int
    share_bytes: int
    phase_ms: Mapping[str, float]
    attempts: int
    insecure_rng: bool
    masked: bool
    charged: tuple[str, ...]


class SecureSumAborted(RoundAborted):
    """No sum was opened.

    Attributes:
        reason: the code of the protocol.
        phase: in which it ended.
        have: how many there were.
        need: how many there had to be.
        owner: whose secret it was about.
        clients: who did not answer, left or is to blame, increasing.
        faults: messages refused and clients that left, in all attempts.
        released: as in `SecureSumResult`.
        attempts: how many were made.
    """

    def __init__(
        self,
        error: SecureSumError,
        clients: Iterable[int] = (),
        faults: tuple[Fault, ...] = (),
        released: Mapping[int, tuple[int, int]] = _NONE,
        attempts: int = 1,
    ) -> None:
        super().__init__(error.found, rule=error.rule, fix=error.fix, who=error.who)
        self.reason, self.phase = error.reason, error.phase
        self.have, self.need, self.owner = error.have, error.need, error.owner
        self.clients, self.faults = tuple(sorted(clients)), faults
        self._error = error
        self.released, self.attempts = dict(released), attempts

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild across process boundaries with the same numbers."""
        arguments = (self._error, self.clients, self.faults, self.released, self.attempts)
        return (SecureSumAborted, arguments)


def secure_sum(
    vectors: npt.ArrayLike,
    weights: Sequence[int] | None = None,
    *,
    ids: Sequence[int] | None = None,
    slots: Mapping[str, tuple[int, Sequence[int]]] | None = None,
    config: SecureSumConfig | None = None,
    policies: Mapping[int, ClientPolicy | Mapping[str, Any]] = _NONE,
    drops: Mapping[int, str] = _NONE,
    corrupt: Iterable[int] = (),
    wire: Wire | None = None,
    actors: Mapping[int | str, Callable[..., Machine]] = _NONE,
    crash: Mapping[int | str, int | str] = _NONE,
    attempts: int = 1,
    order: str | int = "sorted",
    masks: bool = True,
    seed: int | None = None,
    clock: Callable[[], float] | None = None,
) -> SecureSumResult:
    """Sum vectors as a federation would, with the machines of client and server in one process.

    >>> secure_sum([[1, 2], [3, 4], [5, 6]], config=SecureSumConfig(corrupt=0, dropout=0)).total
    array([ 9, 12])

    Args:
        vectors: [n, d] floats, which are encoded, or whole numbers, which are codes already.
        weights: of each client; 1 when left out.
        ids: of the clients, from 1, each once; 1 … n when left out.
        slots: name to (bound, one whole number for each client).
        config: the settings; the defaults when left out.
        policies: what a client takes part in, or those fields of `ClientPolicy` in which it is stricter than
            the default, which takes whatever `config` asks for.
        drops: client to the phase from which it is silent, or "masked:partial" (half of the upload comes) or
            "masked:late" (the upload comes after the freeze).
        corrupt: clients whose signatures `wire` may make.
        wire: see `Wire`.
        actors: machines in the place of the real ones, by client or "server"; called with the arguments of
            `SecureSumClient` or `SecureSumServer`.
        crash: "server" to the number, from 1, of the journal record after which it stops, or to a kind ("U2")
            for the first of these; a client to the phase before whose message it stops. Both are built anew
            from their journals.
        attempts: how often a round that fails for its clients is tried.
        order: in which clients answer: "sorted", "reversed", or the seed of a shuffle.
        masks: whether to mask; without, the sum has the same integers and is no secret.
        seed: for keys, rounding and noise, which then protect nothing; the operating system when left out.
        clock: gives the seconds of every tick; virtual time when left out.

    Raises:
        SecureSumAborted: no sum, and why.
        ConfigError: arguments that do not fit together, or settings that no round can have.
    """
    settings = config or SecureSumConfig()
    inputs = _Inputs.of(vectors, weights, ids, slots)
    _check(inputs, drops, crash, actors, order, attempts)
    chance = _Chance(seed)
    identities = {client: Identity(chance.bytes(f"identity {client}")(KEY_BYTES)) for client in inputs.ids}
    identities[SERVER] = Identity(chance.bytes("identity server")(KEY_BYTES))
    roster = _roster(identities)
    setup = _Setup(
        inputs,
        identities,
        roster,
        chance,
        _policies(policies, settings),
        drops,
        frozenset(corrupt),
        wire,
        actors,
        crash,
        order,
        clock,
    )
    first = _round_config(settings, inputs, roster, chance, 0, len(inputs.ids))
    settings = settings.model_copy(update={"n_min": first.n_min, "n_max": first.n_max})
    journals: dict[int, list[Record]] = {client: [] for client in inputs.ids}
    complaints: dict[int, int] = {}
    asked, faults, present = set(inputs.ids), list[Fault](), first
    for attempt in range(attempts):
        run = _Run(setup, present, sorted(asked), journals, attempt)
        if not masks:
            return run.plain()
        outcome = run.go()
        faults += run.faults
        if isinstance(outcome, ServerResult):
            return run.result(outcome, tuple(faults))
        blamed = {client for client in (outcome.owner, outcome.client) if client is not None} | run.silent
        asked -= run.silent
        if outcome.owner is not None and outcome.reason in (Reason.BAD_SHARE, Reason.SHARE_MISMATCH):
            asked.discard(outcome.owner)
        if outcome.reason == Reason.BAD_SHARE and outcome.client is not None:
            complaints[outcome.client] = complaints.get(outcome.client, 0) + 1
            if complaints[outcome.client] > 1:
                asked.discard(outcome.client)
        if outcome.reason in _FINAL or attempt + 1 == attempts or len(asked) < first.n_min:
            raise SecureSumAborted(outcome, blamed, tuple(faults), run.released(), attempt + 1)
        present = _round_config(settings, inputs, roster, chance, attempt + 1, len(asked))
    raise ConfigError(f"{attempts} attempts", rule="at least 1", who="secure sum")


# --- what a run is made of ---


class _Chance:
    """Randomness by name: of the operating system, or from a seed."""

    def __init__(self, seed: int | None) -> None:
        self.seeded = seed is not None
        self.root = int.from_bytes(os.urandom(7), "big") if seed is None else seed

    def bytes(self, name: str) -> Callable[[int], bytes]:
        """A source of random bytes."""
        if not self.seeded:
            return os.urandom
        drawn = 0

        def draw(count: int) -> bytes:
            nonlocal drawn
            drawn += 1
            return hashlib.shake_256(f"{self.root}\x00{drawn}\x00{name}".encode()).digest(count)

        return draw

    def rounding(self, client: int) -> np.random.Generator:
        """The stream that a client's rounding is drawn from."""
        return generator(self.root, "secure sum rounding", client=client)


@dataclass(frozen=True)
class _Inputs:
    """What every client contributes."""

    ids: tuple[int, ...]
    vectors: npt.NDArray[Any]
    weights: tuple[int, ...]
    bounds: Mapping[str, int]
    slots: Mapping[str, Sequence[int]]

    @classmethod
    def of(
        cls,
        vectors: npt.ArrayLike,
        weights: Sequence[int] | None,
        ids: Sequence[int] | None,
        slots: Mapping[str, tuple[int, Sequence[int]]] | None,
    ) -> _Inputs:
        table = np.asarray(vectors)
        if table.ndim != 2 or table.dtype.kind not in "fiu" or 0 in table.shape:
            raise _refused(f"vectors of {table.dtype} {table.shape}", "numbers [n, d]")
        if table.dtype == np.float16:
            table = table.astype(np.float32)
        n = len(table)
        named = tuple(map(index, ids)) if ids is not None else tuple(range(1, n + 1))
        weighed = tuple(weights) if weights is not None else (1,) * n
        given = dict(slots or {})
        lengths = {"ids": len(named), "weights": len(weighed)} | {
            name: len(v[1]) for name, v in given.items()
        }
        for name, length in lengths.items():
            if length != n:
                raise _refused(f"{length} {name} for {n} vectors", "one for each")
        if len(set(named)) != n or not all(0 < client < 2**64 for client in named):
            raise _refused("ids that repeat or are no ids", "whole numbers from 1, each once")
        return cls(
            named,
            table,
            weighed,
            {name: bound for name, (bound, _) in given.items()},
            {name: values for name, (_, values) in given.items()},
        )

    def update(self, client: int) -> LocalUpdate:
        place = self.ids.index(client)
        slots = {name: int(values[place]) for name, values in self.slots.items()}
        return LocalUpdate(self.vectors[place], self.weights[place], slots)


@dataclass(frozen=True)
class _Setup:
    """What all attempts have in common."""

    inputs: _Inputs
    identities: Mapping[int, Identity]
    roster: Roster
    chance: _Chance
    policies: Callable[[int], ClientPolicy]
    drops: Mapping[int, str]
    corrupt: frozenset[int]
    wire: Wire | None
    actors: Mapping[int | str, Callable[..., Machine]]
    crash: Mapping[int | str, int | str]
    order: str | int
    clock: Callable[[], float] | None


def _check(
    inputs: _Inputs,
    drops: Mapping[int, str],
    crash: Mapping[int | str, int | str],
    actors: Mapping[int | str, Any],
    order: str | int,
    attempts: int,
) -> None:
    known = set(inputs.ids)
    for name, named in (("drops", set(drops)), ("crash", {*crash}), ("actors", {*actors})):
        unknown = named - known - ({_SERVER} if name != "drops" else set())
        if unknown:
            raise _refused(f"{name} of {sorted(map(str, unknown))}", "clients of this sum, or 'server'")
    for phase in (*drops.values(), *(when for who, when in crash.items() if who != _SERVER)):
        if phase not in (*PHASES, _PARTIAL, _LATE):
            raise _refused(f"phase {phase!r}", f"one of {', '.join((*PHASES, _PARTIAL, _LATE))}")
    if order not in ("sorted", "reversed") and type(order) is not int:
        raise _refused(f"order {order!r}", "'sorted', 'reversed' or a seed")
    if attempts < 1:
        raise _refused(f"{attempts} attempts", "at least 1")


def _policies(
    given: Mapping[int, ClientPolicy | Mapping[str, Any]], settings: SecureSumConfig
) -> Callable[[int], ClientPolicy]:
    default = ClientPolicy(threat=Threat[settings.threat.upper()])
    made = {}
    for client, policy in given.items():
        if isinstance(policy, ClientPolicy):
            made[client] = policy
            continue
        try:
            made[client] = replace(default, **policy)
        except TypeError as error:
            raise _refused(f"a policy of {sorted(policy)}", "fields of ClientPolicy") from error
    return lambda client: made.get(client, default)


def _refused(found: str, rule: str) -> ConfigError:
    return ConfigError(found, rule=rule, who="secure_sum")


def _roster(identities: Mapping[int, Identity]) -> Roster:
    clients = tuple(
        ClientEntry(client, identity.public, Issuer.OFFLINE, 0, _LAST)
        for client, identity in sorted(identities.items())
        if client != SERVER
    )
    return Roster(1, _LAST, clients, (ServerEntry(_SERVER, identities[SERVER].public, 0, _LAST),))


def _task(inputs: _Inputs) -> Task:
    model, schema, task = (
        messages.digest(f"simulation/{name}", inputs.vectors.shape[1]) for name in ("model", "schema", "task")
    )
    return Task(model, schema, task, inputs.vectors.shape[1])


def _round_config(
    settings: SecureSumConfig, inputs: _Inputs, roster: Roster, chance: _Chance, attempt: int, clients: int
) -> RoundConfig:
    task = _task(inputs)
    return settings.round_config(
        job="simulation",
        round=0,
        attempt=attempt,
        nonce=chance.bytes(f"nonce {attempt}")(32),
        model_sha256=task.model_sha256,
        schema_sha256=task.schema_sha256,
        task_sha256=task.task_sha256,
        roster_sha256=roster.sha256,
        size=task.size,
        clients=clients,
        slots=inputs.bounds,
    )


class _Crashed(Exception):
    """The server has stopped; what it had not sent is lost."""


class _Run:
    """One attempt."""

    def __init__(
        self,
        setup: _Setup,
        config: RoundConfig,
        asked: Sequence[int],
        journals: dict[int, list[Record]],
        attempt: int,
    ) -> None:
        self._setup, self._config, self._asked, self._attempt = setup, config, tuple(asked), attempt
        self._task = _task(setup.inputs)
        self._client_journals, self._journal = journals, list[Record]()
        self._keys = Keys(setup.identities, setup.corrupt, config.session_id)
        self._noise = None
        if config.noise.mechanism:
            from mycelia.privacy.noise.source import NoiseSource

            seeded = setup.chance.seeded
            root = f"{setup.chance.root}\x00noise\x00{attempt}".encode()
            key = hashlib.sha256(root).digest() if seeded else os.urandom(KEY_BYTES)
            self._noise = NoiseSource("seeded" if seeded else "os", key)
        self._clients: dict[int, Machine] = {}
        self._server: Machine | None = None
        self._now = 0.0
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
            "unix_time": _UNIX_TIME,
            "random": setup.chance.bytes(f"server {self._attempt}"),
        }

    def _make_client(self, client: int) -> None:
        setup = self._setup
        made = setup.actors.get(client, SecureSumClient)
        journal = self._client_journals[client]
        self._clients[client] = made(
            client=client,
            identity=setup.identities[client],
            roster=setup.roster,
            task=self._task,
            unix_time=_UNIX_TIME,
            rounding=setup.chance.rounding(client),
            policy=setup.policies(client),
            past=ClientHistory.read(journal),
            noise=self._noise,
            random=setup.chance.bytes(f"client {client} {self._attempt} {len(journal)}"),
        )
        self._tell(client, Tick(self._now))

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
        setup = self._setup
        for client in self._asked:
            self._make_client(client)
        made = setup.actors.get(_SERVER, SecureSumServer)
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
            self._carry_out(client, self._tell(client, Tick(self._now + 1e9)))
        self.faults = list(dict.fromkeys(self.faults))
        return self._outcome

    @property
    def _phase(self) -> str:
        return str(getattr(self._server, "phase", "done"))

    def _time(self) -> float:
        if self._setup.clock is not None:
            self._now = self._setup.clock()
        return self._now

    def _close(self) -> None:
        """Nobody has anything more to say: the phase ends by the clock, or else by the policy of a driver."""
        self.silent |= self._owed
        phase, deadline = self._phase, getattr(self._server, "deadline", None)
        if self._setup.clock is None and deadline is not None:
            self._now = deadline
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
            made = self._setup.actors.get(_SERVER, SecureSumServer)
            restore = getattr(made, "restore", SecureSumServer.restore)
            self._server = restore(self._journal, **self._server_arguments())
            self._serve(Tick(self._now))
            raise

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
                    (self._journal if who == SERVER else self._client_journals[who]).append(record)
                    if who == SERVER:
                        self._stop_at(record)
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
                    if who == SERVER and effect.release.session_id not in self._charged:
                        self._charged.append(effect.release.session_id)

    def _stop_at(self, record: Record) -> None:
        when = self._crash.get(_SERVER)
        if when in (len(self._journal), record.kind):
            del self._crash[_SERVER]
            raise _Crashed

    def _note(self, who: int, error: SecureSumError) -> None:
        if who != SERVER and error.client is None and error.owner is None:
            error.client = who
        self.faults.append(Fault.of(error))

    # --- the network ---

    def _send(self, sender: int, receiver: int, raw: bytes, chunks: tuple[memoryview, ...] = ()) -> None:
        setup = self._setup
        kind = Envelope.decode(raw, max(self._limit, len(raw))).kind if setup.wire or sender != SERVER else ""
        if sender != SERVER:
            self._measure(kind, sender, raw, chunks)
        message = InFlight("", sender, receiver, _UNREAD, raw, chunks)
        if sender in self._drops and kind == Masked.KIND and self._drops[sender] == _LATE:
            self._held.append(message.until("agree"))
            return
        if sender in self._drops and kind == Masked.KIND and self._drops[sender] == _PARTIAL:
            message = replace(message, chunks=_half(chunks))
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
            phase_ms={phase: self._phase_ms.get(phase, 0.0) for phase in PHASES},
            attempts=self._attempt + 1,
            insecure_rng=self._setup.chance.seeded,
            masked=True,
            charged=tuple(session.hex() for session in self._charged),
        )

    def plain(self) -> SecureSumResult:
        """The sum without masks: clients that drop before their upload is complete are not in it."""
        lost = {"advertise", "share", "masked", _PARTIAL, _LATE}
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
        began = time.thread_time()
        decoded = Encoding(self._config, self._task.size).decode(self._plain_sum(survivors), len(survivors))
        return SecureSumResult(
            total=decoded.total,
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
            phase_ms={},
            attempts=1,
            insecure_rng=self._setup.chance.seeded,
            masked=False,
            charged=(),
        )


_UNREAD: Final = messages.Done(bytes(32))
"""Stands for a message that nobody looks into."""


def _half(chunks: Sequence[memoryview]) -> tuple[memoryview, ...]:
    """The first half of an upload."""
    left, half = sum(map(len, chunks)) // 2, []
    for chunk in chunks:
        half.append(chunk[: min(left, len(chunk))])
        left -= len(half[-1])
    return tuple(chunk for chunk in half if len(chunk))
