"""What the server of the secure sum refuses, when it gives up, and what its journal holds."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mycelia.aggregator.secagg import SecureSumServer
from mycelia.client.secagg import SecureSumClient
from mycelia.privacy.secagg import keys
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.events import Close, Effect, LocalUpdate, Persist, Received, Record, Refuse, Tick
from mycelia.privacy.secagg.keys import Identity
from mycelia.privacy.secagg.messages import (
    Advert,
    Agree,
    Complaint,
    Config,
    Deliver,
    Envelope,
    Masked,
    Message,
    Reason,
    RoundConfig,
    SecureSumError,
    Shares,
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
    arguments: dict[str, object] = {"config": SETTINGS, "seed": 3, "wire": wire} | named
    try:
        return secure_sum(VECTORS, **arguments)  # type: ignore[arg-type]
    except SecureSumAborted as error:
        return error


def reasons(outcome: SecureSumResult | SecureSumAborted, client: int) -> set[Reason]:
    return {fault.reason for fault in outcome.faults if fault.client == client}


def cheat(kind: type[Message], change: Callable[[Message], Message]) -> Wire:
    """Client 2 says something else, and signs it."""

    def wire(flight: InFlight, signers: Keys) -> InFlight:
        if isinstance(flight.message, kind) and flight.sender == 2:
            return replace(flight, raw=signers.sign(change(flight.message), 2))
        return flight

    return wire


CHEATS = {
    "a key of low order": (Advert, lambda m: replace(m, mask_key=bytes(32)), Reason.BAD_KEY),
    "one key for both uses": (Advert, lambda m: replace(m, mask_key=m.channel_key), Reason.BAD_KEY),
    "another's name": (Advert, lambda m: replace(m, client=3), Reason.BAD_SIGNATURE),
    "another cohort": (Shares, lambda m: replace(m, u0=bytes(32)), Reason.SPLIT_VIEW),
    "too few shares": (Shares, lambda m: replace(m, fields=m.fields[1:]), Reason.SPLIT_VIEW),
    "another U1": (Masked, lambda m: replace(m, u1=bytes(32)), Reason.SPLIT_VIEW),
    "another length": (Masked, lambda m: replace(m, length=m.length + 1), Reason.BAD_UPLOAD),
    "another hash": (Masked, lambda m: replace(m, sha256=bytes(32)), Reason.BAD_UPLOAD),
    "other survivors": (Agree, lambda m: replace(m, u2=bytes(32)), Reason.INCONSISTENT_SURVIVORS),
    "too few shares to open": (
        Unmask,
        lambda m: replace(m, b_shares=m.b_shares[1:]),
        Reason.SHARE_MISMATCH,
    ),
    "a wrong share": (
        Unmask,
        lambda m: replace(m, b_shares=(bytes(36), *m.b_shares[1:])),
        Reason.SHARE_MISMATCH,
    ),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_bad_message_of_one_client_is_refused_and_the_sum_is_exact(name: str) -> None:
    kind, change, reason = CHEATS[name]
    outcome = run(cheat(kind, change), corrupt=[2])  # type: ignore[arg-type]
    assert isinstance(outcome, SecureSumResult)
    assert outcome.exact
    assert reason in reasons(outcome, 2)
    assert (2 in outcome.survivors) == (kind in (Agree, Unmask))


def test_two_identities_with_one_key_are_not_both_taken() -> None:
    seen: list[Advert] = []

    def wire(flight: InFlight, signers: Keys) -> InFlight:
        if isinstance(flight.message, Advert):
            seen.append(flight.message)
            if flight.sender == 2:
                return replace(
                    flight, raw=signers.sign(replace(flight.message, channel_key=seen[0].channel_key), 2)
                )
        return flight

    outcome = run(wire, corrupt=[2])
    assert isinstance(outcome, SecureSumResult)
    assert outcome.survivors == (1, 3, 4, 5, 6)
    assert Reason.BAD_KEY in reasons(outcome, 2)


@pytest.mark.parametrize("kind", [Advert, Shares, Masked, Agree, Unmask])
def test_a_message_changed_on_the_way_is_refused(kind: type[Message]) -> None:
    def wire(flight: InFlight, signers: Keys) -> InFlight:
        if isinstance(flight.message, kind) and flight.sender == 2:
            return replace(flight, raw=flight.raw[:-1] + bytes([flight.raw[-1] ^ 1]))
        return flight

    outcome = run(wire)
    assert isinstance(outcome, SecureSumResult)
    assert outcome.exact
    assert Reason.BAD_SIGNATURE in reasons(outcome, 2)


@pytest.mark.parametrize("kind", [Advert, Shares, Masked, Agree, Unmask])
def test_the_first_message_of_a_kind_counts(kind: type[Message]) -> None:
    other = {
        Advert: lambda m: replace(m, nonce=bytes(16)),
        Shares: lambda m: replace(m, commitment=bytes(32)),
        Masked: lambda m: replace(m, sha256=bytes(32)),
        Agree: lambda m: replace(m, u2=bytes(32)),
        Unmask: lambda m: replace(m, b_shares=m.b_shares[::-1]),
    }[kind]

    def wire(flight: InFlight, signers: Keys) -> list[InFlight]:
        if isinstance(flight.message, kind) and flight.sender == 2:
            second = replace(flight, raw=signers.sign(other(flight.message), 2), chunks=())
            return [flight, second]
        return [flight]

    outcome = run(wire, corrupt=[2])
    assert isinstance(outcome, SecureSumResult)
    assert outcome.exact
    assert reasons(outcome, 2) == {Reason.EQUIVOCATION}


CHUNKS = {
    "short": lambda chunks: [chunks[0][:-1]],
    "too long": lambda chunks: [bytes(chunks[0]) + b"\0"],
    "changed": lambda chunks: [bytes([chunks[0][0] ^ 1]) + bytes(chunks[0][1:])],
    "empty": lambda chunks: [b"", chunks[0]],
    "crumbs": lambda chunks: [chunks[0][place : place + 1] for place in range(len(chunks[0]))],
}


@pytest.mark.parametrize("name", CHUNKS)
def test_a_broken_upload_is_not_in_the_sum(name: str) -> None:
    def wire(flight: InFlight, signers: Keys) -> InFlight:
        if isinstance(flight.message, Masked) and flight.sender == 2:
            return replace(flight, chunks=tuple(CHUNKS[name](flight.chunks)))
        return flight

    outcome = run(wire)
    assert isinstance(outcome, SecureSumResult)
    assert outcome.exact
    assert outcome.survivors == (1, 3, 4, 5, 6)


def test_a_false_commitment_names_its_owner() -> None:
    outcome = run(cheat(Shares, lambda m: replace(m, commitment=bytes(32))), corrupt=[2])  # type: ignore[arg-type]
    assert isinstance(outcome, SecureSumAborted)
    assert (outcome.reason, outcome.owner) == (Reason.SHARE_MISMATCH, 2)
    assert [fault.code for fault in outcome.faults if fault.reason == Reason.SHARE_MISMATCH] == ["DATA_LOSS"]


class TooLarge(SecureSumClient):
    """Sends a code beyond the bound, which no honest client can."""

    def handle(self, event: object) -> list[Effect]:  # type: ignore[override]
        if isinstance(event, LocalUpdate) and self._session is not None:
            encoding = self._session.encoding
            object.__setattr__(encoding, "encode", lambda *_, **__: np.full(5, 2**17, np.uint32))
        return super().handle(event)  # type: ignore[arg-type]


def test_a_sum_beyond_what_clients_may_send_is_not_returned() -> None:
    outcome = run(actors={2: TooLarge})
    assert isinstance(outcome, SecureSumAborted)
    assert outcome.reason == Reason.SUM_OUT_OF_RANGE


def test_no_weight_is_no_mean() -> None:
    outcome = run(weights=[0] * 6)
    assert isinstance(outcome, SecureSumAborted)
    assert outcome.reason == Reason.EMPTY_WEIGHT


def test_a_complaint_ends_the_attempt_and_the_next_goes_without_the_owner() -> None:
    def wire(flight: InFlight, signers: Keys) -> list[InFlight]:
        if isinstance(flight.message, Masked) and flight.sender == 2:
            return [replace(flight, raw=signers.sign(Complaint(3), 2), chunks=())]
        return [flight]

    outcome = run(wire, corrupt=[2])
    assert isinstance(outcome, SecureSumAborted)
    assert (outcome.reason, outcome.owner, outcome.clients) == (Reason.BAD_SHARE, 3, (2, 3))
    again = run(wire, corrupt=[2], attempts=3)
    assert isinstance(again, SecureSumResult)
    assert (again.survivors, again.attempts) == ((1, 4, 5, 6), 2)
    assert again.exact


def test_a_complaint_about_a_stranger_changes_nothing() -> None:
    def wire(flight: InFlight, signers: Keys) -> list[InFlight]:
        if isinstance(flight.message, Masked) and flight.sender == 2:
            return [replace(flight, raw=signers.sign(Complaint(99), 2), chunks=()), flight]
        return [flight]

    outcome = run(wire, corrupt=[2])
    assert isinstance(outcome, SecureSumResult)
    assert outcome.survivors == (1, 2, 3, 4, 5, 6)


def test_a_message_of_a_later_phase_is_refused_without_a_trace() -> None:
    def wire(flight: InFlight, signers: Keys) -> list[InFlight]:
        if isinstance(flight.message, Advert) and flight.sender == 2:
            early = signers.sign(Agree(bytes(32), bytes(32), bytes(32)), 2)
            return [replace(flight, raw=early), flight]
        return [flight]

    outcome = run(wire, corrupt=[2])
    assert isinstance(outcome, SecureSumResult)
    assert outcome.survivors == (1, 2, 3, 4, 5, 6)
    assert reasons(outcome, 2) == {Reason.WRONG_PHASE}


# --- the journal ---


class Spy(SecureSumServer):
    """Keeps what went through it."""

    effects: list[Effect] = []  # noqa: RUF012  # a restart makes another machine

    def handle(self, event: object) -> list[Effect]:  # type: ignore[override]
        effects = super().handle(event)  # type: ignore[arg-type]
        Spy.effects += effects
        return effects


def journal(**named: object) -> list[Record]:
    Spy.effects.clear()
    run(actors={"server": Spy}, **named)
    return [effect.record for effect in Spy.effects if isinstance(effect, Persist)]


def test_the_journal_has_every_step_before_what_follows_from_it() -> None:
    kinds = [record.kind for record in journal(drops={6: "masked"})]
    assert kinds == [
        "CONFIG", *["ADVERT"] * 6, "U0", *["SHARES"] * 6, "U1", *["RECEIPT"] * 5, "SNAPSHOT", "U2",
        *["AGREE"] * 5, "CHARGED", "RESULT",
    ]  # fmt: skip
    names = [
        effect.record.kind if isinstance(effect, Persist) else type(effect).__name__ for effect in Spy.effects
    ]
    charged = names.index("Charge")
    assert names[charged : charged + 3] == ["Charge", "CHARGED", "Send"]


def test_no_secret_is_in_the_journal() -> None:
    secrets: list[bytes] = []

    class Telling(SecureSumClient):
        def handle(self, event: object) -> list[Effect]:  # type: ignore[override]
            effects = super().handle(event)  # type: ignore[arg-type]
            session = self._session
            if session is not None:
                secrets.extend([session.seed, session.mask.private, session.channel.private])
                secrets.extend(session.pairs.values())
                secrets.extend(share for held in session.held.values() for share in held)
            return effects

    Spy.effects.clear()
    run(actors={**dict.fromkeys(range(1, 7), Telling), "server": Spy}, drops={6: "masked"})
    records = [effect.record for effect in Spy.effects if isinstance(effect, Persist)]
    written = b"".join(record.encode() for record in records)
    assert len(set(secrets)) > 60
    assert not [secret for secret in set(secrets) if secret in written]


IDENTITIES = {client: Identity(bytes([client + 1]) * 32) for client in range(5)}
ROSTER = Roster(
    1,
    100,
    tuple(
        ClientEntry(client, identity.public, Issuer.OFFLINE, 0, 100)
        for client, identity in IDENTITIES.items()
        if client
    ),
    (ServerEntry("server", IDENTITIES[0].public, 0, 100),),
)


def round_config() -> RoundConfig:
    return SecureSumConfig(n_min=3, corrupt=0, dropout=0.25).round_config(
        job="job",
        round=0,
        nonce=bytes(32),
        model_sha256=bytes(32),
        schema_sha256=bytes(32),
        task_sha256=bytes(32),
        roster_sha256=ROSTER.sha256,
        size=4,
        clients=4,
    )


def server(records: list[Record] | None = None) -> SecureSumServer:
    if records is None:
        return SecureSumServer(round_config(), 4, range(1, 5), IDENTITIES[0], ROSTER, unix_time=50)
    return SecureSumServer.restore(records, 4, IDENTITIES[0], ROSTER, unix_time=50)


def test_phases_end_at_their_deadlines() -> None:
    machine = server()
    effects = machine.handle(Tick(100.0))
    assert [type(effect).__name__ for effect in effects] == ["Persist", *["Send"] * 4]
    assert machine.deadline == 130.0
    assert machine.handle(Tick(129.9)) == []
    names = [type(effect).__name__ for effect in machine.handle(Tick(130.0))]
    assert names == ["Persist", *["Send"] * 4, "Abort"]
    assert machine.phase == "done"


def test_a_restart_asks_again_with_the_same_bytes() -> None:
    first = server().handle(Tick(0.0))
    records = [effect.record for effect in first if isinstance(effect, Persist)]
    again = server(records).handle(Tick(7.0))
    assert again == [effect for effect in first if not isinstance(effect, Persist)]


def test_after_a_restart_nothing_counts_before_the_first_tick() -> None:
    first = server().handle(Tick(0.0))
    machine = server([effect.record for effect in first if isinstance(effect, Persist)])
    config = round_config()
    advert = Advert(config.session_id, 1, bytes([9]) * 32, bytes([8]) * 32, bytes(16))
    data = keys.sign(advert, config.session_id, 1, IDENTITIES[1]).encode()
    (effect,) = machine.handle(Received(1, data))
    assert isinstance(effect, Refuse)
    assert machine.handle(Close("advertise")) == []
    assert machine.phase == "advertise"
    machine.handle(Tick(0.0))
    assert [type(effect) for effect in machine.handle(Received(1, data))] == [Persist]


def test_a_failed_round_stays_failed_after_a_restart() -> None:
    machine = server()
    effects = [*machine.handle(Tick(0.0)), *machine.handle(Tick(1000.0))]
    records = [effect.record for effect in effects if isinstance(effect, Persist)]
    told = server(records).handle(Tick(0.0))
    assert type(told[-1]).__name__ == "Abort"


@pytest.mark.parametrize(
    "records",
    [
        [],
        [Record("U0", b"")],
        [Record("CONFIG", b"")],
    ],
)
def test_records_that_no_session_leaves_are_an_error(records: list[Record]) -> None:
    with pytest.raises(SecureSumError, match="JOURNAL"):
        server(records)


def test_a_record_out_of_its_place_is_an_error() -> None:
    (first,) = (effect.record for effect in server().handle(Tick(0.0)) if isinstance(effect, Persist))
    for kind in ("SHARES", "U1", "RECEIPT", "SNAPSHOT", "U2", "AGREE", "CHARGED", "RESULT", "CONFIG"):
        with pytest.raises(SecureSumError, match="JOURNAL"):
            server([first, Record(kind, b"")])


def test_garbage_changes_nothing() -> None:
    machine = server()
    machine.handle(Tick(0.0))
    config = round_config()
    good = keys.sign(
        Advert(config.session_id, 1, bytes([9]) * 32, bytes([8]) * 32, bytes(16)),
        config.session_id,
        1,
        IDENTITIES[1],
    ).encode()
    for place in range(len(good)):
        damaged = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
        (effect,) = machine.handle(Received(1, damaged))
        assert isinstance(effect, Refuse)
    (effect,) = machine.handle(Received(2, good))
    assert isinstance(effect, Refuse)
    assert [type(effect) for effect in machine.handle(Received(1, good))] == [Persist]


def test_what_is_sent_is_signed_by_the_server() -> None:
    seen: list[str] = []

    def wire(flight: InFlight, signers: Keys) -> InFlight:
        if flight.sender == 0 and isinstance(flight.message, Config | Deliver):
            assert Envelope.decode(flight.raw, len(flight.raw)).sender == 0
            seen.append(flight.message.KIND)
        return flight

    run(wire)
    assert seen.count("config") == seen.count("deliver") == 6
