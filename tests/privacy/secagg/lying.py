"""A server that lies to real clients, and helps itself with the keys of the corrupt ones among them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from mycelia.aggregator.cohort import Cohort
from mycelia.client.history import ClientHistory
from mycelia.client.policy import ClientPolicy
from mycelia.client.secagg import SecureSumClient, Task
from mycelia.engine.rng import generator
from mycelia.privacy.secagg import keys
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.events import (
    Abort,
    Effect,
    Event,
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
    MESSAGES,
    SERVER,
    Advert,
    Agree,
    Config,
    Deliver,
    Envelope,
    Message,
    Open,
    Reason,
    Roll,
    RoundConfig,
    Shares,
    Survivors,
    Unmask,
)
from mycelia.privacy.secagg.roster import ClientEntry, Issuer, Roster, ServerEntry

N = 8
CLIENTS = tuple(range(1, N + 1))
CORRUPT = (7, 8)
HONEST = tuple(client for client in CLIENTS if client not in CORRUPT)
SIZE = 3
NOW, LAST = 50, 100
SETTINGS = SecureSumConfig(n_min=6, corrupt=0.25, dropout=0.125)
TASK = Task(bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32, SIZE)

IDENTITIES = {client: Identity(bytes([client + 1]) * 32) for client in (SERVER, *CLIENTS)}


def make_roster(revoked: Iterable[int] = (), epoch: int = 1, last: int = LAST) -> Roster:
    """All clients but those revoked."""
    gone = tuple(revoked)
    entries = tuple(
        ClientEntry(client, IDENTITIES[client].public, Issuer.OFFLINE, 0, LAST)
        for client in CLIENTS
        if client not in gone
    )
    servers = (ServerEntry("server", IDENTITIES[SERVER].public, 0, last),)
    return Roster(epoch, LAST, entries, servers, revoked=gone)


ROSTER = make_roster()


def round_config(round: int = 0, attempt: int = 0, nonce: int = 0, roster: Roster = ROSTER) -> RoundConfig:
    return SETTINGS.round_config(
        job="job",
        round=round,
        attempt=attempt,
        nonce=bytes([nonce]) * 32,
        model_sha256=TASK.model_sha256,
        schema_sha256=TASK.schema_sha256,
        task_sha256=TASK.task_sha256,
        roster_sha256=roster.sha256,
        size=SIZE,
        clients=N,
    )


@dataclass
class Heard:
    """What the server has heard in one session."""

    config: RoundConfig
    adverts: dict[int, Envelope] = field(default_factory=dict)
    shares: dict[int, Shares] = field(default_factory=dict)
    uploads: set[int] = field(default_factory=set)
    agreed: dict[bytes, dict[int, bytes]] = field(default_factory=dict)
    """Hashes of the three sets, as one message: signer to signature."""


@dataclass
class Shown:
    """What one client was shown in its session, as the server remembers it."""

    config: RoundConfig
    cohort: Cohort | None = None
    u1: tuple[int, ...] = ()
    u2: tuple[int, ...] = ()
    agreement: bytes = b""


class Bench:
    """Eight real clients and no server but this one.

    Attributes:
        machines: of the clients.
        journals: of the clients.
        heard: by session id.
        shown: to each client in the session that it is in.
        said: all that was ever sent to anybody.
        released: session id and owner to {client: kinds of its share that it gave away}.
        releases: (client, job, round) to the sessions it released in.
        signed: (session id, client) to the sets it signed.
        thresholds: of each session, the least that a client went by.
    """

    def __init__(self, client: type[SecureSumClient] = SecureSumClient, roster: Roster = ROSTER) -> None:
        self._client, self.roster = client, roster
        self.journals: dict[int, list[Record]] = {client: [] for client in CLIENTS}
        self.machines: dict[int, SecureSumClient] = {}
        self.heard: dict[bytes, Heard] = {}
        self.shown: dict[int, Shown] = {}
        self.said: list[bytes] = []
        self.released: dict[tuple[bytes, int], dict[int, set[str]]] = {}
        self.releases: dict[tuple[int, str, int], set[bytes]] = {}
        self.signed: dict[tuple[bytes, int], set[bytes]] = {}
        self.thresholds: dict[bytes, int] = {}
        self.time = 0.0
        for one in CLIENTS:
            self.restart(one)

    # --- what can be done ---

    def restart(self, client: int, **named: object) -> None:
        """The client stops, and begins again with what its journal says."""
        arguments: dict[str, object] = {
            "roster": self.roster,
            "task": TASK,
            "unix_time": NOW,
            "policy": ClientPolicy(),
            "past": ClientHistory.read(self.journals[client]),
        } | named
        self.machines[client] = self._client(
            client=client,
            identity=IDENTITIES[client],
            rounding=generator(0, "rounding", client=client),
            **arguments,  # type: ignore[arg-type]
        )
        self.shown.pop(client, None)
        self.tell(client, Tick(self.time))

    def say(self, client: int, message: Message, session_id: bytes | None = None) -> list[Effect]:
        """A message, signed by the server."""
        shown = self.shown.get(client)
        if session_id is None:
            session_id = message.round.session_id if isinstance(message, Config) else shown_id(shown)
        data = keys.sign(message, session_id, SERVER, IDENTITIES[SERVER]).encode()
        return self.say_bytes(client, data)

    def say_bytes(self, client: int, data: bytes) -> list[Effect]:
        """Any bytes, in the name of the server."""
        self.said.append(data)
        return self.tell(client, Received(SERVER, data))

    def sign_as(self, client: int, message: Message, session_id: bytes) -> Envelope:
        """A message of a corrupt client."""
        if client not in CORRUPT:
            raise ValueError(f"{client} is honest")
        return keys.sign(message, session_id, client, IDENTITIES[client])

    def tell(self, client: int, event: Event) -> list[Effect]:
        """An event, and what follows from it."""
        effects = self.machines[client].handle(event)
        for effect in effects:
            match effect:
                case Persist(record):
                    self.journals[client].append(record)
                case Send(_, data):
                    self._hear(client, data)
                case SendStream(_, data, _):
                    self._hear(client, data)
        return effects

    # --- what a server says next ---

    def config(self, client: int, config: RoundConfig) -> list[Effect]:
        """Open a session with a client, which forgets any other."""
        self.heard.setdefault(config.session_id, Heard(config))
        if client in self.shown or self.machines[client].phase == "done":
            self.restart(client)
        effects = self.say(client, Config(config))
        if not refused(effects):
            self.shown[client] = Shown(config)
        return effects

    def roll(self, client: int, without: Iterable[int] = ()) -> Roll | None:
        """The roll that fits what was heard; None where none can be made."""
        shown = self.shown.get(client)
        if shown is None:
            return None
        heard, out = self.heard[shown.config.session_id], set(without)
        ids = tuple(sorted(set(heard.adverts) - out | {client} & set(heard.adverts)))
        if client not in ids or len(ids) < 4:
            return None
        nonces = tuple(Advert.decode(heard.adverts[one].body, shown.config).nonce for one in ids)
        cohort = Cohort(shown.config, ids, nonces)
        if shown.cohort is None or self.machines[client].phase == "share":
            shown.cohort, shown.u1 = cohort, ()
        return Roll(ids, nonces, tuple(heard.adverts[one] for one in cohort.near[client]))

    def deliver(self, client: int, without: Iterable[int] = ()) -> Deliver | None:
        """The shares of all that shared in this client's cohort, but of some."""
        shown = self.shown.get(client)
        if shown is None or shown.cohort is None:
            return None
        cohort, heard = shown.cohort, self.heard[shown.config.session_id]
        same = {one for one, shares in heard.shares.items() if shares.u0 == cohort.u0}
        members = (same | {client}) - (set(without) - {client})
        u1 = tuple(one for one in cohort.ids if one in members)
        if not shown.u1 or self.machines[client].phase == "masked":
            shown.u1 = u1
        owners = tuple(one for one in cohort.near[client] if one in u1)
        fields = tuple(heard.shares[one].fields[cohort.places[one][client] - 1] for one in owners)
        return Deliver(cohort.bits(u1), owners, fields)

    def survivors(self, client: int, without: Iterable[int] = ()) -> Survivors | None:
        """Survivors among those who shared, but for some."""
        shown = self.shown.get(client)
        if shown is None or shown.cohort is None or not shown.u1:
            return None
        cohort = shown.cohort
        shown.u2 = tuple(one for one in shown.u1 if one == client or one not in set(without))
        session_id = shown.config.session_id
        message = Survivors(cohort.u0, keys.u1_hash(session_id, cohort.bits(shown.u1)), cohort.bits(shown.u2))
        shown.agreement = Agree(message.u0, message.u1, keys.u2_hash(session_id, message.u2)).encode()
        return message

    def opening(self, client: int, agreement: bytes | None = None) -> Open | None:
        """All signatures there are for a set of survivors, those of the corrupt included."""
        shown = self.shown.get(client)
        if shown is None or shown.cohort is None:
            return None
        wanted = agreement or shown.agreement
        session_id = shown.config.session_id
        signed = dict(self.heard[session_id].agreed.get(wanted, {}))
        for one in CORRUPT:
            unsigned = Envelope(Agree.KIND, session_id, one, wanted, b"")
            signed[one] = IDENTITIES[one].sign(unsigned.signed)
        signers = tuple(one for one in shown.cohort.near[client] if one in signed and one in shown.u2)
        return Open(signers, tuple(signed[one] for one in signers))

    def update(self, client: int) -> list[Effect]:
        """The client's own vector is ready."""
        return self.tell(client, LocalUpdate(np.full(SIZE, client)))

    def run_on(
        self, end: str, without: Iterable[int] = (), silent: Iterable[int] = (), *, start: str = "share"
    ) -> None:
        """Say to all what an honest server would say next, from one phase to another."""
        quiet = set(silent)
        steps: dict[str, Callable[[int], Message | None]] = {
            "share": lambda client: self.roll(client, without),
            "masked": lambda client: self.deliver(client, without),
            "agree": lambda client: self.survivors(client, without),
            "unmask": self.opening,
        }
        names = list(steps)
        for name in names[names.index(start) : names.index(end) + 1]:
            for client in sorted(set(self.shown) - quiet):
                message = steps[name](client)
                if message is not None:
                    self.say(client, message)
                if name == "masked":
                    self.update(client)

    # --- what comes of it ---

    def _hear(self, client: int, data: bytes) -> None:
        envelope = Envelope.decode(data, len(data))
        heard = self.heard.get(envelope.session_id)
        if heard is None:
            return
        message = MESSAGES[envelope.kind].decode(envelope.body, heard.config)
        match message:
            case Advert():
                heard.adverts[client] = envelope
            case Shares():
                heard.shares[client] = message
            case Agree():
                heard.agreed.setdefault(envelope.body, {})[client] = envelope.signature
                self.signed.setdefault((envelope.session_id, client), set()).add(envelope.body)
            case Unmask():
                self._count(client, heard.config, message)

    def _count(self, client: int, config: RoundConfig, unmask: Unmask) -> None:
        """Whose shares these are: a holder answers for the set it signed, whatever was said to it since."""
        session = self.machines[client]._session
        if session is None:
            raise RuntimeError("shares without a session")
        self.releases.setdefault((client, config.job, config.round), set()).add(config.session_id)
        least = min(session.t, self.thresholds.get(config.session_id, session.t))
        self.thresholds[config.session_id] = least
        owners = [owner for owner in session.neighbours if owner in session.u1]
        for kind, named, shares in (
            ("b", [owner for owner in owners if owner in session.u2], unmask.b_shares),
            ("s", [owner for owner in owners if owner not in session.u2], unmask.s_shares),
        ):
            for owner, _ in zip(named, shares, strict=True):
                holders = self.released.setdefault((config.session_id, owner), {})
                holders.setdefault(client, set()).add(kind)

    def check(self) -> None:
        """What no server may reach: both secrets of an honest client, given the shares of the corrupt."""
        for (session_id, owner), holders in self.released.items():
            if owner in CORRUPT:
                continue
            t = self.thresholds[session_id]
            honest = {client: kinds for client, kinds in holders.items() if client in HONEST}
            counts = [sum(kind in kinds for kinds in honest.values()) for kind in ("b", "s")]
            if min(counts) + len(CORRUPT) >= t:
                raise AssertionError(f"{counts} shares of {owner} left honest clients, and {t} rebuild")
        for (client, _, round), sessions in self.releases.items():
            if len(sessions) > 1:
                raise AssertionError(f"client {client} released round {round} in {len(sessions)} sessions")
        for (_, client), sets in self.signed.items():
            if client in HONEST and len(sets) > 1:
                raise AssertionError(f"client {client} signed {len(sets)} sets of survivors")


def shown_id(shown: Shown | None) -> bytes:
    return bytes(32) if shown is None else shown.config.session_id


def refused(effects: Iterable[Effect]) -> set[Reason]:
    """The reasons for which a message was refused or a client left."""
    return {effect.error.reason for effect in effects if isinstance(effect, Abort | Refuse)}


def with_key(bench: Bench, envelope: Envelope, client: int, **changes: bytes) -> Envelope:
    """The advert of a corrupt client, with another key in it."""
    config = bench.heard[envelope.session_id].config
    advert = replace(Advert.decode(envelope.body, config), **changes)
    return bench.sign_as(client, advert, envelope.session_id)
