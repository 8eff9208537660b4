"""A client that cheats spoils no sum: it is refused, left out or named, and the others lose nothing."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.aggregator.secagg import SecureSumServer
from mycelia.client.secagg import SecureSumClient
from mycelia.privacy.secagg import keys, masks, messages, shamir
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.events import Abort, ChunkReceived, Close, Effect, Received, Refuse, Tick
from mycelia.privacy.secagg.messages import (
    MESSAGES,
    PHASES,
    SERVER,
    Complaint,
    Envelope,
    Masked,
    Message,
    Reason,
    Shares,
)
from mycelia.simulations.secure_sums import InFlight, Keys, SecureSumAborted, SecureSumResult, Wire
from tests.privacy.secagg.lying import (
    CLIENTS,
    CORRUPT,
    IDENTITIES,
    ROSTER,
    SIZE,
    Bench,
    Heard,
    refused,
    round_config,
)
from tests.privacy.secagg.sums import SETTINGS, run_sum


def cheat(change: Callable[[Shares], Shares]) -> Wire:
    """Client 2 deals something else, and signs it."""

    def wire(flight: InFlight, keys: Keys) -> InFlight:
        if isinstance(flight.message, Shares) and flight.sender == 2:
            return replace(flight, raw=keys.sign(change(flight.message), 2))
        return flight

    return wire


def changed_field(place: int, change: Callable[[bytes], bytes]) -> Callable[[Shares], Shares]:
    def changed(shares: Shares) -> Shares:
        fields = list(shares.fields)
        fields[place] = change(fields[place])
        return replace(shares, fields=tuple(fields))

    return changed


DEALS: dict[str, Callable[[Shares], Shares]] = {
    "a damaged sealed share": changed_field(0, lambda field: bytes([field[0] ^ 1]) + field[1:]),
    "a damaged tag of the cipher": changed_field(1, lambda field: field[:80] + bytes(8) + field[88:]),
    "a false tag of a b share": changed_field(2, lambda field: field[:88] + bytes(16) + field[104:]),
    "a false tag of an s share": changed_field(3, lambda field: field[:104] + bytes(16)),
    "tags the wrong way round": changed_field(4, lambda f: f[:88] + f[104:] + f[88:104]),
    "swapped shares": lambda shares: replace(
        shares, fields=(shares.fields[1], shares.fields[0], *shares.fields[2:])
    ),
    "one share for all": lambda shares: replace(shares, fields=(shares.fields[0],) * 5),
}


@pytest.mark.parametrize("name", DEALS)
def test_whoever_deals_badly_is_named_and_left_out(name: str) -> None:
    once = run_sum(wire=cheat(DEALS[name]), corrupt=[2])
    assert isinstance(once, SecureSumAborted)
    assert (once.reason, once.owner) == (Reason.BAD_SHARE, 2)
    assert not once.released
    again = run_sum(wire=cheat(DEALS[name]), corrupt=[2], attempts=2)
    assert isinstance(again, SecureSumResult)
    assert again.exact
    assert 2 not in again.survivors


class Dealer(SecureSumClient):
    """Deals shares with good tags and seals that are of no polynomial, or of another secret."""

    secret = "seed"

    def _seal_shares(self, session: Any) -> tuple[bytes, ...]:
        true = session.seed if self.secret == "seed" else session.mask
        try:
            if self.secret == "seed":
                session.seed = bytes(32)
            elif self.secret == "mask":
                session.mask = keys.AgreementKey(bytes(range(32)))
            return super()._seal_shares(session)
        finally:
            if self.secret == "seed":
                session.seed = true
            elif self.secret == "mask":
                session.mask = true


class MaskDealer(Dealer):
    secret = "mask"


class Scatterer(SecureSumClient):
    """Every share is of a polynomial of its own."""

    def _seal_shares(self, session: Any) -> tuple[bytes, ...]:
        split = shamir.split

        def scattered(secrets: Any, k: int, t: int, random: Any) -> Any:
            shares = split(secrets, k, t, random)
            for place in range(k):
                shares[:, place] = split(secrets, k, t, random)[:, place]
            return shares

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(shamir, "split", scattered)
            return super()._seal_shares(session)


@pytest.mark.parametrize(
    ("actor", "drops"),
    [(Dealer, {}), (MaskDealer, {2: "masked"}), (Scatterer, {}), (Scatterer, {2: "masked"})],
)
def test_shares_of_another_secret_are_found_at_the_end_and_name_their_owner(
    actor: type, drops: dict[int, str]
) -> None:
    outcome = run_sum(actors={2: actor}, drops=drops, attempts=3)
    assert isinstance(outcome, SecureSumAborted)
    assert (outcome.reason, outcome.owner, outcome.attempts) == (Reason.SHARE_MISMATCH, 2, 1)
    assert outcome.phase == "unmask"


@pytest.mark.parametrize("actor", [Dealer, MaskDealer])
def test_a_secret_nobody_needs_is_not_looked_at(actor: type) -> None:
    drops = {2: "masked"} if actor is Dealer else {}
    outcome = run_sum(actors={2: actor}, drops=drops)
    assert isinstance(outcome, SecureSumResult)
    assert outcome.exact


def test_false_complaints_cost_an_honest_client_one_attempt_and_the_liar_its_place() -> None:
    def wire(flight: InFlight, keys: Keys) -> InFlight:
        if isinstance(flight.message, Masked) and flight.sender == 2:
            owner = 3 if complained.setdefault(flight.raw, len(complained)) == 0 else 4
            return replace(flight, raw=keys.sign(Complaint(owner), 2), chunks=())
        return flight

    complained: dict[bytes, int] = {}
    settings = SecureSumConfig(n_min=8, corrupt=0.1, dropout=0.2)
    outcome = run_sum(vectors=np.ones((12, 3), int), config=settings, wire=wire, corrupt=[2], attempts=3)
    assert isinstance(outcome, SecureSumResult)
    assert outcome.exact
    assert set(range(1, 13)) - set(outcome.survivors) == {2, 3, 4}


UPLOADS: dict[str, tuple[Callable[[bytes], list[bytes]], Reason]] = {
    "a byte less": (lambda data: [data[:-1]], Reason.LATE),
    "a byte more": (lambda data: [data + b"\0"], Reason.BAD_UPLOAD),
    "another byte": (lambda data: [bytes([data[0] ^ 1]) + data[1:]], Reason.BAD_UPLOAD),
    "an empty chunk": (lambda data: [b"", data], Reason.BAD_UPLOAD),
    "half of it, and then nothing": (lambda data: [data[: len(data) // 2]], Reason.LATE),
    "nothing": (lambda data: [], Reason.LATE),
}


@pytest.mark.parametrize("name", UPLOADS)
def test_a_bad_upload_is_not_in_the_sum(name: str) -> None:
    change, reason = UPLOADS[name]

    def wire(flight: InFlight, keys: Keys) -> InFlight:
        if isinstance(flight.message, Masked) and flight.sender == 2:
            return replace(flight, chunks=tuple(change(b"".join(flight.chunks))))
        return flight

    outcome = run_sum(wire=wire)
    assert isinstance(outcome, SecureSumResult)
    assert outcome.exact
    assert outcome.survivors == (1, 3, 4, 5, 6)
    assert reason in {fault.reason for fault in outcome.faults if fault.client in (2, None)} or not change(
        b"ab"
    )


def test_padding_bits_are_looked_at() -> None:
    config = SETTINGS.model_copy(update={"bits": 21})
    packed = masks.pack(np.arange(5, dtype=np.uint32), 21)
    assert 5 * 21 % 8
    with pytest.raises(messages.SecureSumError, match="BAD_UPLOAD"):
        masks.unpack(packed[:-1] + bytes([packed[-1] | 0x80]), 5, 21)
    vectors = np.random.default_rng(0).integers(-9, 9, (6, 4))

    def wire(flight: InFlight, keys: Keys) -> InFlight:
        if isinstance(flight.message, Masked) and flight.sender == 2:
            data = b"".join(flight.chunks)
            data = data[:-1] + bytes([data[-1] | 0x80])
            header = replace(flight.message, sha256=hashlib.sha256(data).digest())
            return replace(flight, raw=keys.sign(header, 2), chunks=(data,))
        return flight

    outcome = run_sum(vectors=vectors, config=config, wire=wire, corrupt=[2])
    assert isinstance(outcome, SecureSumResult)
    assert outcome.exact
    assert Reason.BAD_UPLOAD in {fault.reason for fault in outcome.faults if fault.client == 2}


# --- garbage, to both machines, in every phase ---


def state_of(machine: object) -> str:
    """What a machine remembers, but for its list of faults, and for the roster, which fills its caches."""
    kept = {name: value for name, value in vars(machine).items() if name not in ("faults", "_roster")}
    parts = []
    for name, value in sorted(kept.items()):
        inner = vars(value) if hasattr(value, "__dict__") else value
        parts.append(f"{name}: {inner!r}")
    return "\n".join(parts)


def server_in(phase: str) -> tuple[SecureSumServer, Bench]:
    """A server that waits for the messages of a phase, and its clients."""
    config = round_config()
    server = SecureSumServer(config, SIZE, CLIENTS, IDENTITIES[SERVER], ROSTER, unix_time=50)
    bench = Bench()
    bench.heard[config.session_id] = Heard(config)
    todo = server.handle(Tick(0.0))
    while server.phase != phase:
        answers: list[tuple[int, Effect]] = []
        for effect in todo:
            if type(effect).__name__ == "Send":
                answers += [(effect.to, one) for one in bench.tell(effect.to, Received(SERVER, effect.data))]
                if server.phase == "masked":
                    answers += [(effect.to, one) for one in bench.update(effect.to)]
        todo = []
        for client, answer in answers:
            if type(answer).__name__ == "Send":
                todo += server.handle(Received(client, answer.data))
            elif type(answer).__name__ == "SendStream":
                todo += server.handle(Received(client, answer.header))
                for number, chunk in enumerate(answer.chunks):
                    todo += server.handle(ChunkReceived(client, number, chunk))
    return server, bench


def random_body(kind: type[Message], data: bytes) -> bytes:
    """Bytes that begin as a message of the kind does."""
    return messages.struct(kind.tag()) + data


@pytest.mark.parametrize("phase", PHASES)
@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from([kind for kind in MESSAGES if kind != "abort"]),
    data=st.binary(max_size=400),
    tagged=st.booleans(),
)
def test_garbage_of_a_client_changes_nothing(phase: str, kind: str, data: bytes, tagged: bool) -> None:
    if phase not in SERVERS:
        SERVERS[phase] = server_in(phase)[0]
    server, client = SERVERS[phase], CORRUPT[0]
    body = random_body(MESSAGES[kind], data) if tagged else data
    unsigned = Envelope(kind, server.config.session_id, client, body, b"")
    signed = replace(unsigned, signature=IDENTITIES[client].sign(unsigned.signed))
    before = state_of(server)
    (effect,) = server.handle(Received(client, signed.encode()))
    assert isinstance(effect, Refuse)
    assert isinstance(effect.error.reason, Reason)
    assert state_of(server) == before


SERVERS: dict[str, SecureSumServer] = {}


@pytest.mark.parametrize("phase", PHASES)
@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=500), sender=st.integers(0, 9), number=st.integers(-1, 3))
def test_bytes_that_are_no_message_change_nothing(phase: str, data: bytes, sender: int, number: int) -> None:
    if phase not in SERVERS:
        SERVERS[phase] = server_in(phase)[0]
    server = SERVERS[phase]
    before = state_of(server)
    for event in (Received(sender, data), ChunkReceived(sender, number, data), Close("nothing")):
        effects = server.handle(event)
        assert all(isinstance(effect, Refuse) for effect in effects)
    assert state_of(server) == before


@pytest.mark.parametrize("phase", PHASES)
@settings(max_examples=10, deadline=None)
@given(kind=st.sampled_from(list(MESSAGES)), data=st.binary(max_size=400), tagged=st.booleans())
def test_garbage_of_a_server_is_refused_or_ends_the_session(
    phase: str, kind: str, data: bytes, tagged: bool
) -> None:
    """Signed by the server it ends the session, with a reason; nothing is answered, and no share leaves."""
    bench = Bench()
    config = round_config()
    if phase != "advertise":
        for client in CLIENTS:
            bench.config(client, config)
        before = PHASES[: PHASES.index(phase)]
        if before[-1] != "advertise":
            bench.run_on(before[-1])
    body = random_body(MESSAGES[kind], data) if tagged else data
    unsigned = Envelope(kind, config.session_id, SERVER, body, b"")
    signed = replace(unsigned, signature=IDENTITIES[SERVER].sign(unsigned.signed))
    effects = bench.say_bytes(1, signed.encode())
    assert refused(effects)
    assert not bench.released
    told = [effect for effect in effects if not isinstance(effect, Abort | Refuse)]
    for effect in told:
        assert type(effect).__name__ == "Send"
        assert Envelope.decode(effect.data, len(effect.data)).kind == "abort"  # type: ignore[union-attr]
