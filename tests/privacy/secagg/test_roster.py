"""The roster: signed by the operator, unexpired, never older than one seen, and strict about its bytes."""

import hashlib
import random
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.privacy.secagg.keys import Identity, sign
from mycelia.privacy.secagg.messages import SERVER, Complaint, Done, Envelope, Reason, SecureSumError, struct
from mycelia.privacy.secagg.roster import MAX_ENTRIES, ClientEntry, Issuer, Roster, ServerEntry

NOW = 1_800_000_000
YEAR = 365 * 86_400
OPERATOR = Identity(bytes([1]) * 32)
SERVERS = [Identity(bytes([2, number]) * 16) for number in range(2)]
CLIENTS = {number: Identity(bytes([3, number]) * 16) for number in (1, 2, 5, 9)}
ROSTER = Roster(
    epoch=7,
    expires=NOW + YEAR,
    clients=tuple(
        ClientEntry(
            number,
            key.public,
            Issuer.OFFLINE,
            NOW - 10,
            NOW + 10,
            f"ward {number}",
            bytes([number]) * 32,
            ("a", "b"),
        )
        for number, key in CLIENTS.items()
    ),
    servers=tuple(
        ServerEntry(f"agg-{number}", key.public, NOW - 10, NOW + 10) for number, key in enumerate(SERVERS)
    ),
    revoked=(3, 5),
)
DOCUMENT = ROSTER.sign(OPERATOR)


def load(document: bytes = DOCUMENT, **changes: Any) -> Roster:
    return Roster.load(document, **{"operator_key": OPERATOR.public, "now": NOW, **changes})


def refused(reason: Reason, **changes: Any) -> SecureSumError:
    with pytest.raises(SecureSumError) as caught:
        load(**changes)
    assert caught.value.reason == reason
    return caught.value


# --- the document ---------------------------------------------------------------------------------


def test_it_comes_back() -> None:
    assert load() == ROSTER
    assert load(least_epoch=7) == ROSTER
    assert load(now=ROSTER.expires) == ROSTER
    small = Roster(1, NOW, (), ROSTER.servers[:1])
    assert load(small.sign(OPERATOR)) == small


def test_its_bytes() -> None:
    """Written out once more; the hash that a round names is that of the bytes without the signature."""
    clients = [
        [
            number,
            key.public,
            "offline",
            NOW - 10,
            NOW + 10,
            f"ward {number}",
            bytes([number]) * 32,
            ["a", "b"],
        ]
        for number, key in CLIENTS.items()
    ]
    servers = [[f"agg-{number}", key.public, NOW - 10, NOW + 10, b""] for number, key in enumerate(SERVERS)]
    body = struct("SA1/roster", 7, NOW + YEAR, clients, servers, [3, 5])
    assert ROSTER.encode() == body
    assert ROSTER.sha256 == hashlib.sha256(body).digest()
    signature = OPERATOR.sign(struct("SA1/roster/sig", body))
    assert struct("SA1/roster/signed", body, signature) == DOCUMENT


def test_only_the_pinned_operator_signs() -> None:
    refused(Reason.BAD_SIGNATURE, document=ROSTER.sign(SERVERS[0]))
    refused(Reason.BAD_SIGNATURE, operator_key=SERVERS[0].public)
    refused(Reason.BAD_SIGNATURE, operator_key=b"")
    body = ROSTER.encode()
    for signature in (OPERATOR.sign(body), bytes(64), DOCUMENT[-64:][::-1]):
        refused(Reason.BAD_SIGNATURE, document=struct("SA1/roster/signed", body, signature))
    # a key slipped in under the old signature
    other = replace(ROSTER, clients=(replace(ROSTER.clients[0], identity_key=bytes(32)), *ROSTER.clients[1:]))
    refused(Reason.BAD_SIGNATURE, document=struct("SA1/roster/signed", other.encode(), DOCUMENT[-64:]))


def test_an_expired_roster_names_the_date_and_the_command() -> None:
    error = refused(Reason.BAD_SIGNATURE, now=ROSTER.expires + 1)
    assert "2028-01-15 08:00:00" in str(error)
    assert "mycelia enrol renew" in str(error)


def test_a_hidden_revocation() -> None:
    """The server shows a roster from before the revocation; its signature is good."""
    error = refused(Reason.BAD_SIGNATURE, least_epoch=8)
    assert (error.have, error.need) == (7, 8)


# --- who may speak --------------------------------------------------------------------------------


def test_signatures_of_clients() -> None:
    session = bytes(32)
    good = sign(Complaint(9), session, 2, CLIENTS[2])
    assert ROSTER.verify(good, NOW) == CLIENTS[2].public
    cases = [
        (good, NOW + 11, "valid from"),
        (good, NOW - 11, "valid from"),
        (sign(Complaint(9), session, 2, CLIENTS[1]), NOW, "does not verify"),
        (replace(good, sender=1), NOW, "does not verify"),
        (sign(Complaint(9), session, 4, CLIENTS[2]), NOW, "no such client"),
        (sign(Complaint(9), session, 5, CLIENTS[5]), NOW, "revoked"),
        (sign(Complaint(9), session, 3, CLIENTS[2]), NOW, "revoked"),  # revoked without an entry
    ]
    for envelope, now, found in cases:
        with pytest.raises(SecureSumError, match=found) as caught:
            ROSTER.verify(envelope, now)
        assert (caught.value.reason, caught.value.client) == (Reason.BAD_SIGNATURE, envelope.sender)


def test_signatures_of_servers() -> None:
    session = bytes(32)
    for server in SERVERS:
        assert ROSTER.verify(sign(Done(bytes(32)), session, SERVER, server), NOW) == server.public
    good = sign(Done(bytes(32)), session, SERVER, SERVERS[0])
    cases = [
        (sign(Done(bytes(32)), session, SERVER, OPERATOR), NOW),
        (sign(Done(bytes(32)), session, SERVER, CLIENTS[2]), NOW),
        (good, NOW + 11),
        (good, NOW - 11),
        (replace(good, body=b""), NOW),
    ]
    for envelope, now in cases:
        with pytest.raises(SecureSumError, match=r"server: BAD_SIGNATURE"):
            ROSTER.verify(envelope, now)


def test_entries() -> None:
    assert ROSTER.entry(1, NOW) is ROSTER.clients[0]
    online = replace(ROSTER, clients=(replace(ROSTER.clients[0], issuer=Issuer.ONLINE),))
    assert load(online.sign(OPERATOR)).entry(1, NOW).issuer == "online"


def test_nobody_speaks_for_no_server() -> None:
    empty = Roster(1, NOW, (), ())
    assert load(empty.sign(OPERATOR)) == empty
    with pytest.raises(SecureSumError, match="BAD_SIGNATURE"):
        empty.verify(sign(Done(bytes(32)), bytes(32), SERVER, SERVERS[0]), NOW)


def test_old_and_new_keys_are_valid_together() -> None:
    roster = replace(ROSTER, clients=(*ROTATED, *ROSTER.clients[1:]))
    assert load(roster.sign(OPERATOR)) == roster
    assert roster.entries(1, NOW) == ROTATED
    assert roster.entry(1, NOW) is ROTATED[1]
    assert roster.entries(1, NOW - 1) == ROTATED[:1]
    assert roster.listed(1) == ROTATED
    assert (roster.listed(3), roster.is_revoked(3), roster.is_revoked(1)) == ((), True, False)
    assert roster.entries(1, NOW + 11) == ROTATED[1:]
    for key in (CLIENTS[1], RENEWED):
        assert roster.verify(sign(Complaint(9), bytes(32), 1, key), NOW) == key.public
    old, wrong = (sign(Complaint(9), bytes(32), 1, key) for key in (CLIENTS[1], CLIENTS[2]))
    for envelope, now in ((old, NOW + 11), (wrong, NOW), (old, NOW + 100)):
        with pytest.raises(SecureSumError, match="BAD_SIGNATURE"):
            roster.verify(envelope, now)
    with pytest.raises(SecureSumError, match="revoked"):
        replace(roster, revoked=(1,)).entries(1, NOW)


# --- what is no roster ----------------------------------------------------------------------------

FIRST, SECOND = ROSTER.clients[:2]
RENEWED = Identity(bytes([4]) * 32)
ROTATED = (
    FIRST,
    replace(
        FIRST, identity_key=RENEWED.public, tls_sha256=bytes([4]) * 32, not_before=NOW, not_after=NOW + 99
    ),
)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 0},
        {"epoch": 2**63},
        {"expires": -1},
        {"expires": 2**40},
        {"servers": ROSTER.servers[:1] * 65},
        {"servers": ROSTER.servers[:1] * 2},
        {"servers": (replace(ROSTER.servers[0], identity_key=FIRST.identity_key),)},
        {"servers": (replace(ROSTER.servers[0], name="x" * 257),)},
        {"servers": (replace(ROSTER.servers[0], not_after=0),)},
        {"clients": (SECOND, FIRST)},
        {"clients": (FIRST, FIRST)},
        {"clients": (ROTATED[1], ROTATED[0], replace(FIRST, identity_key=bytes(32), tls_sha256=b""))},
        {"clients": (ROTATED[0], SECOND, ROTATED[1])},
        {"clients": (replace(FIRST, client=0),)},
        {"clients": (replace(FIRST, client=2**64),)},
        {"clients": (FIRST, replace(SECOND, identity_key=FIRST.identity_key))},
        {"clients": (FIRST, replace(SECOND, tls_sha256=FIRST.tls_sha256))},
        {"clients": (replace(FIRST, identity_key=bytes(31)),)},
        {"clients": (replace(FIRST, tls_sha256=bytes(31)),)},
        {"clients": (replace(FIRST, not_before=NOW + 11),)},
        {"clients": (replace(FIRST, not_after=2**40),)},
        {"clients": (replace(FIRST, name="\x1b[2J"),)},
        {"clients": (replace(FIRST, name="é" * 129),)},
        {"clients": (replace(FIRST, groups=("a\n",)),)},
        {"clients": (replace(FIRST, groups=("a",) * 65),)},
        {"clients": (replace(FIRST, issuer="anybody"),)},
        {"revoked": (5, 3)},
        {"revoked": (3, 3)},
        {"revoked": (0,)},
        {"revoked": range(1, MAX_ENTRIES + 2)},
    ],
)  # fmt: skip
def test_a_bad_roster_cannot_be_made(change: dict[str, Any]) -> None:
    with pytest.raises(SecureSumError, match="CONFIG") as caught:
        replace(ROSTER, **change)
    assert caught.value.rule


def test_the_operator_cannot_sign_what_does_not_decode() -> None:
    """Signed garbage is an error too, and the typed one."""
    body = ROSTER.encode()
    for wrong in (
        b"",
        body[:-1],
        body + b"\0",
        body.replace(b"offline", b"offlinE"),
        body.replace(b"ward 1", b"\xff" * 6),
        struct("SA1/roster", 7, NOW + YEAR, [[1, bytes(32)] + [b""] * 5], [], []),
    ):
        signature = OPERATOR.sign(struct("SA1/roster/sig", wrong))
        with pytest.raises(SecureSumError) as caught:
            load(struct("SA1/roster/signed", wrong, signature))
        assert caught.value.reason in (Reason.FRAME, Reason.CONFIG)


def damaged(body: bytes, signed: bool) -> None:
    """A document decodes to what encodes the same, or gives the typed error."""
    signature = OPERATOR.sign(struct("SA1/roster/sig", body))
    document = struct("SA1/roster/signed", body, signature) if signed else body
    try:
        roster = load(document)
    except SecureSumError:
        return
    assert roster.encode() == body or document == DOCUMENT


@settings(max_examples=200)
@given(st.data(), st.booleans())
def test_damaged_documents(data: st.DataObject, signed: bool) -> None:
    whole = ROSTER.encode() if signed else DOCUMENT
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 8)))
    damaged(whole[:start] + data.draw(st.binary(max_size=8)) + whole[end:], signed)


@pytest.mark.parametrize("rounds", [1_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_damaged_documents(rounds: int) -> None:
    draw = random.Random(4)
    for _ in range(rounds):
        data = bytearray(ROSTER.encode())
        place = draw.randrange(len(data))
        match draw.randrange(3):
            case 0:
                data[place] = draw.randrange(256)
            case 1:
                del data[place : place + draw.randint(1, 40)]
            case _:
                data[place : place + 4] = draw.choice([bytes(4), b"\xff" * 4, b"\0\0\xff\xff"])
        damaged(bytes(data), signed=True)


def test_announced_sizes_cost_nothing() -> None:
    body = ROSTER.encode()
    tracemalloc.start()
    try:
        for place in range(0, len(body) - 4, 3):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            damaged(body[:place] + b"\0\0\xff\xff" + body[place + 4 :], signed=True)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 10 * len(body) + 30_000
    finally:
        tracemalloc.stop()


def test_a_roster_is_no_message() -> None:
    """The operator's signature on a roster is on no envelope, whatever the envelope says."""
    envelope = Envelope("done", bytes(32), SERVER, ROSTER.encode(), DOCUMENT[-64:])
    roster = replace(ROSTER, servers=(replace(ROSTER.servers[0], identity_key=OPERATOR.public),))
    with pytest.raises(SecureSumError, match="BAD_SIGNATURE"):
        roster.verify(envelope, NOW)
