"""What a client of the secure sum refuses, with which reason, and what it never gives away."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from mycelia.client.history import ClientHistory
from mycelia.client.policy import ClientPolicy
from mycelia.client.secagg import SecureSumClient, Task
from mycelia.engine.errors import ConfigError
from mycelia.engine.rng import generator
from mycelia.privacy.secagg import keys
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.events import (
    Abort,
    Charge,
    ChargeRefused,
    Effect,
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
    Agree,
    Config,
    Deliver,
    Done,
    Envelope,
    Message,
    Open,
    Reason,
    Roll,
    RoundConfig,
    Shares,
    Survivors,
    Threat,
    Unmask,
)
from mycelia.privacy.secagg.roster import ClientEntry, Issuer, Roster, ServerEntry
from mycelia.simulations.secure_sums import (
    InFlight,
    Keys,
    SecureSumAborted,
    SecureSumResult,
    Wire,
    secure_sum,
)

VECTORS = np.arange(24).reshape(6, 4)
SETTINGS = SecureSumConfig(n_min=4, corrupt=0.2, dropout=0.2)


def run(wire: Wire | None = None, **named: object) -> SecureSumResult | SecureSumAborted:
    try:
        return secure_sum(VECTORS, config=SETTINGS, wire=wire, seed=3, **named)  # type: ignore[arg-type]
    except SecureSumAborted as error:
        return error


def lie(kind: type[Message], client: int, change: Callable[[Message], Message]) -> Wire:
    """The server says something else to one client, and signs it."""

    def wire(flight: InFlight, signers: Keys) -> InFlight:
        if isinstance(flight.message, kind) and flight.receiver == client:
            return replace(flight, raw=signers.sign(change(flight.message), "server"))
        return flight

    return wire


def flip(kind: type[Message], client: int) -> Wire:
    """A byte of the signature changes on the way."""

    def wire(flight: InFlight, signers: Keys) -> InFlight:
        if isinstance(flight.message, kind) and flight.receiver == client:
            return replace(flight, raw=flight.raw[:-1] + bytes([flight.raw[-1] ^ 1]))
        return flight

    return wire


def reasons(outcome: SecureSumResult | SecureSumAborted, client: int) -> set[Reason]:
    return {fault.reason for fault in outcome.faults if fault.client == client}


def change_config(**changes: object) -> Callable[[Message], Message]:
    def change(message: Message) -> Message:
        assert isinstance(message, Config)
        return Config(replace(message.round, **changes))  # type: ignore[arg-type]

    return change


def change_roll(change: Callable[[Roll], Roll]) -> Callable[[Message], Message]:
    def changed(message: Message) -> Message:
        assert isinstance(message, Roll)
        return change(message)

    return changed


def foreign(roll: Roll) -> Roll:
    first = roll.adverts[0]
    body = first.body.replace(first.session_id, bytes(32))
    return replace(roll, adverts=(replace(first, body=body), *roll.adverts[1:]))


LIES = {
    "another model": (Config, change_config(model_sha256=bytes(32)), Reason.MODEL_MISMATCH),
    "another schema": (Config, change_config(schema_sha256=bytes(32)), Reason.MODEL_MISMATCH),
    "another task": (Config, change_config(task_sha256=bytes(32)), Reason.MODEL_MISMATCH),
    "another roster": (Config, change_config(roster_sha256=bytes(32)), Reason.BAD_SIGNATURE),
    "too few bits": (Config, change_config(bits=17), Reason.OVERFLOW),
    "a low threshold": (Config, change_config(threshold_rule=0, t=3), Reason.WEAK_PARAMETERS),
    "a weaker threat": (Config, change_config(threat=0), Reason.POLICY),
    "another nonce": (
        Roll,
        change_roll(lambda roll: replace(roll, nonces=(bytes(16), *roll.nonces[1:]))),
        Reason.BAD_ROLL,
    ),
    "a client left out": (
        Roll,
        change_roll(lambda roll: replace(roll, ids=roll.ids[1:], nonces=roll.nonces[1:])),
        Reason.BAD_ROLL,
    ),
    "a stranger": (
        Roll,
        change_roll(lambda roll: replace(roll, ids=(*roll.ids[:-1], 7), nonces=roll.nonces)),
        Reason.BAD_ROLL,
    ),
    "an advert missing": (
        Roll,
        change_roll(lambda roll: replace(roll, adverts=roll.adverts[1:])),
        Reason.BAD_ROLL,
    ),
    "an unsigned advert": (
        Roll,
        change_roll(
            lambda roll: replace(
                roll, adverts=(replace(roll.adverts[0], signature=bytes(64)), *roll.adverts[1:])
            )
        ),
        Reason.BAD_SIGNATURE,
    ),
    "an advert of another session": (Roll, change_roll(foreign), Reason.SPLIT_VIEW),
    "itself not in U1": (Deliver, lambda m: replace(m, u1=b"\x1f"), Reason.BAD_ROLL),
    "U1 too small": (Deliver, lambda m: replace(m, u1=b"\x23"), Reason.BAD_ROLL),
    "shares missing": (
        Deliver,
        lambda m: replace(m, owners=m.owners[1:], fields=m.fields[1:]),
        Reason.BAD_ROLL,
    ),
    "another U1 hash": (Survivors, lambda m: replace(m, u1=bytes(32)), Reason.SPLIT_VIEW),
    "another U0 hash": (Survivors, lambda m: replace(m, u0=bytes(32)), Reason.SPLIT_VIEW),
    "too few survivors": (Survivors, lambda m: replace(m, u2=b"\x23"), Reason.SPLIT_VIEW),
    "itself not in U2": (Survivors, lambda m: replace(m, u2=b"\x1f"), Reason.LATE),
    "a bit beyond U0": (Survivors, lambda m: replace(m, u2=b"\x7f"), Reason.BAD_ROLL),
    "other survivors": (Survivors, lambda m: replace(m, u2=b"\x3e"), Reason.INCONSISTENT_SURVIVORS),
    "too few signatures": (
        Open,
        lambda m: replace(m, signers=m.signers[1:], signatures=m.signatures[1:]),
        Reason.INCONSISTENT_SURVIVORS,
    ),
    "borrowed signatures": (
        Open,
        lambda m: replace(m, signatures=(m.signatures[1], *m.signatures[1:])),
        Reason.INCONSISTENT_SURVIVORS,
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_to_one_client_is_refused_with_its_reason(name: str) -> None:
    kind, change, reason = LIES[name]
    outcome = run(lie(kind, 6, change))  # type: ignore[arg-type]
    assert reason in reasons(outcome, 6)
    shares = outcome.released.values()
    assert all(b < 4 or s < 4 for b, s in shares)
    if isinstance(outcome, SecureSumResult):
        assert outcome.exact


@pytest.mark.parametrize("kind", [Config, Roll, Deliver, Survivors, Open])
def test_a_message_with_a_broken_signature_counts_for_nothing(kind: type[Message]) -> None:
    outcome = run(flip(kind, 6))
    assert Reason.BAD_SIGNATURE in reasons(outcome, 6)
    assert isinstance(outcome, SecureSumResult)
    assert outcome.exact


def test_every_policy_of_a_client_is_named_when_it_refuses() -> None:
    for policy in (
        ClientPolicy(n_min=5),
        ClientPolicy(threshold=0.9),
        ClientPolicy(clip=1.0),
        ClientPolicy(noise=1.0),
        ClientPolicy(tasks=frozenset({bytes(32)})),
    ):
        outcome = run(policies={2: policy})
        assert reasons(outcome, 2) == {Reason.POLICY}
        assert isinstance(outcome, SecureSumResult)
        assert 2 not in outcome.survivors


def test_a_client_may_reckon_with_more_corruption_than_the_round() -> None:
    outcome = run(policies={2: ClientPolicy(corrupt=0.9)})
    assert reasons(outcome, 2) == {Reason.WEAK_PARAMETERS}


@pytest.mark.parametrize(
    "limits", [{"n_min": 2}, {"corrupt": 1.0}, {"threshold": 2.0}, {"clip": 0.0}, {"noise": float("nan")}]
)
def test_a_policy_out_of_range_is_an_error(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ClientPolicy(**limits)  # type: ignore[arg-type]


def test_crossed_shares_are_found_and_the_owner_is_named() -> None:
    def cross(message: Message) -> Message:
        assert isinstance(message, Deliver)
        return replace(message, fields=(message.fields[1], message.fields[0], *message.fields[2:]))

    outcome = run(lie(Deliver, 6, cross))
    assert isinstance(outcome, SecureSumAborted)
    assert (outcome.reason, outcome.owner) == (Reason.BAD_SHARE, 1)
    assert not outcome.released


def test_a_tag_that_is_not_that_of_the_share_is_a_bad_share() -> None:
    def change(message: Message) -> Message:
        assert isinstance(message, Deliver)
        return replace(message, fields=(message.fields[0][:-1] + b"\0", *message.fields[1:]))

    outcome = run(lie(Deliver, 6, change))
    assert isinstance(outcome, SecureSumAborted)
    assert outcome.reason == Reason.BAD_SHARE


def test_a_second_set_of_survivors_is_equivocation() -> None:
    def wire(flight: InFlight, signers: Keys) -> list[InFlight]:
        if isinstance(flight.message, Survivors) and flight.receiver == 6:
            other = replace(flight.message, u2=b"\x3e")
            return [flight, replace(flight, raw=signers.sign(other, "server"))]
        return [flight]

    outcome = run(wire)
    assert Reason.EQUIVOCATION in reasons(outcome, 6)


def test_an_early_open_changes_nothing() -> None:
    def wire(flight: InFlight, signers: Keys) -> list[InFlight]:
        if isinstance(flight.message, Roll):
            early = signers.sign(Open((1, 2), (bytes(64), bytes(64))), "server")
            return [replace(flight, raw=early), flight]
        return [flight]

    outcome = run(wire)
    assert isinstance(outcome, SecureSumResult)
    assert outcome.exact
    assert all(Reason.WRONG_PHASE in reasons(outcome, client) for client in range(1, 7))


def test_the_same_message_twice_is_answered_with_the_same_bytes() -> None:
    sent: dict[tuple[int, str], set[bytes]] = {}

    def wire(flight: InFlight, signers: Keys) -> list[InFlight]:
        if flight.sender:
            sent.setdefault((flight.sender, flight.message.KIND), set()).add(flight.raw)
            return [flight]
        return [flight, flight]

    outcome = run(wire)
    assert isinstance(outcome, SecureSumResult)
    assert outcome.exact
    assert all(len(bytes_) == 1 for bytes_ in sent.values())


def test_input_that_is_no_number_never_leaves_the_client() -> None:
    vectors = np.ones((6, 4))
    vectors[1, 2] = np.nan
    found = secure_sum(vectors, config=SETTINGS, seed=1)
    assert found.survivors == (1, 3, 4, 5, 6)
    assert [fault.reason for fault in found.faults if fault.client == 2] == [Reason.INVALID_INPUT]


# --- one machine by hand ---

OPERATOR = {client: Identity(bytes([client + 1]) * 32) for client in range(5)}
ROSTER = Roster(
    3,
    100,
    tuple(
        ClientEntry(client, identity.public, Issuer.OFFLINE, 0, 100)
        for client, identity in OPERATOR.items()
        if client
    ),
    (ServerEntry("server", OPERATOR[0].public, 0, 100),),
)
TASK = Task(bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32, 4)


def round_config(round: int = 5, attempt: int = 0) -> RoundConfig:
    return SecureSumConfig(n_min=3, corrupt=0, dropout=0.25).round_config(
        job="job",
        round=round,
        attempt=attempt,
        nonce=bytes(32),
        model_sha256=TASK.model_sha256,
        schema_sha256=TASK.schema_sha256,
        task_sha256=TASK.task_sha256,
        roster_sha256=ROSTER.sha256,
        size=4,
        clients=4,
    )


def machine(past: ClientHistory | None, **named: object) -> SecureSumClient:
    arguments: dict[str, object] = {"unix_time": 50, "rounding": generator(0, "rounding")} | named
    return SecureSumClient(1, OPERATOR[1], ROSTER, TASK, past=past, **arguments)  # type: ignore[arg-type]


def said(message: Message, config: RoundConfig) -> Received:
    return Received(0, keys.sign(message, config.session_id, 0, OPERATOR[0]).encode())


def records(effects: list[Effect]) -> list[Record]:
    return [effect.record for effect in effects if isinstance(effect, Persist)]


def abort_of(effects: list[Effect]) -> Abort:
    (found,) = (effect for effect in effects if isinstance(effect, Abort))
    return found


def test_it_journals_before_it_joins_and_joins_no_attempt_twice() -> None:
    config = round_config()
    effects = machine(ClientHistory()).handle(said(Config(config), config))
    assert [type(effect) for effect in effects] == [Persist, Send]
    past = ClientHistory.read(records(effects))
    assert past.highest == {"job": (5, 0)}
    for again in (config, round_config(4, 9)):
        assert abort_of(machine(past).handle(said(Config(again), again))).reason == Reason.REPLAY
    later = round_config(5, 1)
    assert records(machine(past).handle(said(Config(later), later)))


def test_a_released_round_has_no_other_attempt() -> None:
    past = ClientHistory(highest={"job": (5, 0)}, rounds=frozenset({("job", 5)}))
    config = round_config(5, 1)
    assert abort_of(machine(past).handle(said(Config(config), config))).reason == Reason.ALREADY_RELEASED
    following = round_config(6)
    assert records(machine(past).handle(said(Config(following), following)))


def test_without_a_journal_it_joins_nothing() -> None:
    config = round_config()
    assert abort_of(machine(None).handle(said(Config(config), config))).reason == Reason.JOURNAL


@pytest.mark.parametrize("kind", ["JOINED", "AGREED", "RELEASED", "OTHER"])
def test_a_damaged_journal_is_an_error(kind: str) -> None:
    with pytest.raises(Exception, match="JOURNAL"):
        ClientHistory.read([Record(kind, b"\0\0\0\x01")])


def test_an_older_roster_and_an_expired_entry_are_refused() -> None:
    config = round_config()
    for effects in (
        machine(ClientHistory(epoch=4)).handle(said(Config(config), config)),
        machine(ClientHistory(), unix_time=101).handle(said(Config(config), config)),
    ):
        assert abort_of(effects).reason == Reason.BAD_SIGNATURE


def test_it_ends_by_its_deadlines() -> None:
    config = round_config()
    client = machine(ClientHistory())
    client.handle(Tick(10.0))
    client.handle(said(Config(config), config))
    last = 10.0 + sum(config.deadlines_ms) / 1000
    assert client.handle(Tick(last - 0.001)) == []
    assert abort_of(client.handle(Tick(last))).reason == Reason.LATE
    assert client.phase == "done"


def test_garbage_changes_nothing() -> None:
    config = round_config()
    client = machine(ClientHistory())
    client.handle(said(Config(config), config))
    good = keys.sign(Done(bytes(32)), config.session_id, 0, OPERATOR[0]).encode()
    rng = np.random.default_rng(0)
    for size in (0, 1, 40, len(good)):
        for _ in range(20):
            (effect,) = client.handle(Received(0, rng.bytes(size)))
            assert isinstance(effect, Refuse)
    for place in range(len(good)):
        damaged = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
        (effect,) = client.handle(Received(0, damaged))
        assert isinstance(effect, Refuse)
    (effect,) = client.handle(Received(2, good))
    assert isinstance(effect, Refuse)
    assert client.phase == "share"


class Spy(SecureSumClient):
    """Keeps what went through it."""

    made: ClassVar[list["Spy"]] = []

    def __init__(self, **named: object) -> None:
        super().__init__(**named)  # type: ignore[arg-type]
        self.effects: list[Effect] = []
        Spy.made.append(self)

    def handle(self, event: object) -> list[Effect]:  # type: ignore[override]
        effects = super().handle(event)  # type: ignore[arg-type]
        self.effects += effects
        return effects


def test_records_come_before_what_they_are_about_and_a_release_is_paid_for_first() -> None:
    Spy.made.clear()
    run(actors={1: Spy})
    kinds = [
        effect.record.kind if isinstance(effect, Persist) else type(effect).__name__
        for effect in Spy.made[0].effects
    ]
    assert kinds == [
        "JOINED", "Send", "Send", "SendStream", "AGREED", "Send", "RELEASED", "Charge", "Send", "Finish"
    ]  # fmt: skip


def test_a_budget_that_refuses_keeps_the_shares_in() -> None:
    class Poor(SecureSumClient):
        def handle(self, event: object) -> list[Effect]:  # type: ignore[override]
            effects = super().handle(event)  # type: ignore[arg-type]
            for place, effect in enumerate(effects):
                if isinstance(effect, Charge):
                    return effects[:place] + super().handle(ChargeRefused("nothing is left"))
            return effects

    outcome = run(actors={1: Poor})
    assert isinstance(outcome, SecureSumResult)
    assert Reason.BUDGET in reasons(outcome, 1)


def test_nothing_is_left_after_the_round() -> None:
    Spy.made.clear()
    run(actors={1: Spy})
    (client,) = Spy.made
    client.effects.clear()
    assert client._session is None
    assert client._update is None
    assert not client._answered
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is keys.Sealer]


def test_an_update_may_come_before_it_is_known_for_whom_to_mask() -> None:
    class Early(SecureSumClient):
        def handle(self, event: object) -> list[Effect]:  # type: ignore[override]
            effects = super().handle(event)  # type: ignore[arg-type]
            if self.phase == "share":
                super().handle(LocalUpdate(VECTORS[0]))
            return [] if isinstance(event, LocalUpdate) else effects

    outcome = run(actors={1: Early})
    assert isinstance(outcome, SecureSumResult)
    assert outcome.exact
    assert 1 in outcome.survivors


def test_shares_leave_for_neighbours_that_shared_and_for_no_others() -> None:
    found: dict[int, tuple[int, int]] = {}

    def wire(flight: InFlight, signers: Keys) -> InFlight:
        if isinstance(flight.message, Unmask):
            found[flight.sender] = (len(flight.message.b_shares), len(flight.message.s_shares))
        return flight

    run(wire, drops={2: "masked"})
    assert set(found) == {1, 3, 4, 5, 6}
    assert set(found.values()) == {(4, 1)}


def test_the_guard_of_a_session_can_be_the_weaker_one_if_a_client_allows_it() -> None:
    settings = SecureSumConfig(n_min=4, corrupt=0.2, dropout=0.2, threat="passive")
    assert secure_sum(VECTORS, config=settings, seed=0).exact
    with pytest.raises(SecureSumAborted) as caught:
        secure_sum(VECTORS, config=settings, seed=0, policies=dict.fromkeys(range(1, 7), ClientPolicy()))
    assert {fault.reason for fault in caught.value.faults} >= {Reason.POLICY}
    assert ClientPolicy().threat == Threat.ACTIVE


def test_it_signs_one_set_and_its_upload_is_in_chunks() -> None:
    Spy.made.clear()
    secure_sum(np.zeros((6, 2**19), np.int64), config=SETTINGS, seed=0, actors={1: Spy})
    stream = next(effect for effect in Spy.made[0].effects if isinstance(effect, SendStream))
    sizes = [len(chunk) for chunk in stream.chunks]
    assert max(sizes) <= 2**20
    assert len(sizes) == 2
    agreed = [
        envelope
        for effect in Spy.made[0].effects
        if isinstance(effect, Send)
        and (envelope := Envelope.decode(effect.data, len(effect.data))).kind in (Agree.KIND, Shares.KIND)
    ]
    assert [envelope.kind for envelope in agreed] == ["shares", "agree"]
