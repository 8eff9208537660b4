"""Canonical bytes, the configuration of a round, and every message: strict in both directions."""

import copy
import hashlib
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mycelia.engine.errors import ProtocolError
from mycelia.privacy.secagg import messages as m
from mycelia.privacy.secagg.canonical import Reader
from mycelia.privacy.secagg.messages import Envelope, NoiseBlock, Reason, RoundConfig, SecureSumError

PRIME = 2**255 - 19
# n_max, k and t are such that every field can be changed alone
CONFIG = RoundConfig(
    job="ward-7",
    round=3,
    attempt=1,
    nonce=bytes([1]) * 32,
    model_sha256=bytes([2]) * 32,
    schema_sha256=bytes([3]) * 32,
    task_sha256=bytes([4]) * 32,
    roster_sha256=bytes([5]) * 32,
    n_min=5,
    n_max=21,
    graph=m.Graph.RING,
    k=20,
    threshold_rule=m.ThresholdRule.FIXED,
    t=14,
    threat=m.Threat.ACTIVE,
    corrupt_ppm=100_000,
    dropout_ppm=50_000,
    bits=32,
    dimension=1000,
    slots=(("weight", 255), ("loss", 2**20)),
    frac_bits=16,
    value_bound=2**15,
    l2_steps=40_000,
    rotation=0,
    noise=NoiseBlock(m.Mechanism.SKELLAM, 10**9, 2, 1000),
    deadlines_ms=(30_000, 30_000, 500_000, 20_000, 20_000),
    seal=m.Seal.AES_GCM,
)
CHANGES: dict[str, list[Any]] = {
    "job": ["ward-8", "ward-77"],
    "round": [4],
    "attempt": [2],
    "nonce": [bytes(32)],
    "model_sha256": [bytes(32)],
    "schema_sha256": [bytes(32)],
    "task_sha256": [bytes(32)],
    "roster_sha256": [bytes(32)],
    "n_min": [6],
    "n_max": [22],
    "graph": [m.Graph.COMPLETE],
    "k": [18],
    "threshold_rule": [m.ThresholdRule.TWO_THIRDS],
    "t": [15],
    "threat": [m.Threat.PASSIVE],
    "corrupt_ppm": [100_001],
    "dropout_ppm": [50_001],
    "bits": [33],
    "dimension": [1001],
    "slots": [(), (("weight", 254), ("loss", 2**20)), (("loss", 2**20), ("weight", 255)), (("weight", 255),)],
    "frac_bits": [17],
    "value_bound": [2**15 - 1],
    "l2_steps": [40_001],
    "rotation": [1],
    "noise": [
        NoiseBlock(m.Mechanism.DISCRETE_GAUSSIAN, 10**9, 2, 1000),
        NoiseBlock(m.Mechanism.SKELLAM, 10**9 + 1, 2, 1000),
        NoiseBlock(m.Mechanism.SKELLAM, 10**9, 3, 1000),
        NoiseBlock(m.Mechanism.SKELLAM, 10**9, 2, 1001),
        NoiseBlock(),
    ],
    "deadlines_ms": [
        tuple(31_000 if place == moved else old for place, old in enumerate(CONFIG.deadlines_ms))
        for moved in range(5)
    ],
    "seal": [m.Seal.CHACHA20_POLY1305],
}


# --- canonical bytes ------------------------------------------------------------------------------


def test_the_frozen_struct() -> None:
    expected = (
        "000000085341312f7465737400000008000000000000000700000002010200000002616200000002"
        "000000080000000000000001000000080000000000000002"
    )
    assert m.struct("SA1/test", 7, b"\1\2", "ab", [1, 2]).hex() == expected
    digest = m.digest("SA1/test", 7, b"\1\2", "ab", (1, 2))
    assert digest.hex() == "1b121acdbf45d0a7cd7573d006604038a2e1e563eea69d23545933758ffef7f7"


VALUES = st.recursive(
    st.integers(0, 2**64 - 1) | st.binary(max_size=12),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=8,
)


def reference(value: Any) -> bytes:
    """The rules of the encoding once more, without a short cut for anything."""
    if isinstance(value, int):
        return b"\0\0\0\x08" + value.to_bytes(8, "big")
    if isinstance(value, bytes):
        return len(value).to_bytes(4, "big") + value
    return len(value).to_bytes(4, "big") + b"".join(reference(item) for item in value)


@given(st.lists(VALUES, max_size=4))
@example([(b"ab", b"cd"), (b"", b"")])
@example([(b"ab", b"c"), ()])
def test_structs_follow_the_rules(values: list[Any]) -> None:
    assert m.struct("tag", *values) == b"\0\0\0\x03tag" + b"".join(map(reference, values))


def test_lists_and_fields_do_not_run_together() -> None:
    shapes: list[tuple[Any, ...]] = [
        (b"ab", b"c"),
        (b"a", b"bc"),
        (b"abc",),
        ((b"ab", b"c"),),
        ((b"ab",), b"c"),
    ]
    assert len({m.digest("tag", *shape) for shape in shapes}) == len(shapes)
    assert m.digest("ta", b"gab") != m.digest("tag", b"ab")


@pytest.mark.parametrize("value", [-1, 2**64, [1, -1]])
def test_integers_have_64_bits(value: Any) -> None:
    with pytest.raises(ValueError, match="2\\*\\*64"):
        m.struct("tag", value)


def test_nothing_else_is_encoded() -> None:
    for value in (1.0, None, {1}, bytearray(2), memoryview(b"ab"), range(2)):
        with pytest.raises(TypeError):
            m.struct("tag", value)  # type: ignore[arg-type]
    assert m.struct("tag", "é") == m.struct("tag", b"\xc3\xa9")


def test_a_reader_refuses_what_an_encoder_would_not_write() -> None:
    def read(data: bytes, take: Callable[[Reader], object]) -> object:
        reader = Reader(data, "t", 200)
        value = take(reader)
        reader.end()
        return value

    assert read(m.struct("t", 7), Reader.integer) == 7
    assert read(m.struct("t", [7, 8]), lambda reader: reader.integers(2)) == (7, 8)
    assert read(m.struct("t", [b"ab", b"cd"]), lambda reader: reader.blobs(2, 2)) == (b"ab", b"cd")
    refused: list[tuple[bytes, Callable[[Reader], object]]] = [
        (m.struct("t", b"1234567"), Reader.integer),  # an integer of seven bytes
        (m.struct("t", b"123456789"), Reader.integer),
        (m.struct("t", [b"1234567", b"123456789"]), lambda reader: reader.integers(2)),
        (m.struct("t", [b"abc", b"d"]), lambda reader: reader.blobs(2, 2)),
        (m.struct("t", [1, 2, 3]), lambda reader: reader.integers(2)),  # above the limit
        (m.struct("t", b"abc"), lambda reader: reader.blob(2)),
        (m.struct("t", b"a"), lambda reader: reader.blob(2, exact=True)),
        (m.struct("t", b"\xff"), Reader.text),
        (m.struct("t", b"\xed\xa0\x80"), Reader.text),  # a lone surrogate
        (m.struct("t", "x" * 257), lambda reader: reader.text()),
        (m.struct("t", 7) + b"\0", Reader.integer),
        (m.struct("t", 7)[:-1], Reader.integer),
        (m.struct("u", 7), Reader.integer),
        (b"", Reader.integer),
        (bytes(201), Reader.integer),
    ]
    for data, take in refused:
        with pytest.raises(SecureSumError, match="FRAME"):
            read(data, take)


# --- the error ------------------------------------------------------------------------------------


def test_the_error_says_who_what_and_how_many() -> None:
    error = SecureSumError(
        Reason.COHORT_TOO_SMALL, "too few answered", rule="at least n_min", phase="share", have=4, need=5
    )
    assert isinstance(error, ProtocolError)
    assert (error.reason, error.phase, error.have, error.need) == ("COHORT_TOO_SMALL", "share", 4, 5)
    assert (error.owner, error.client, error.field) == (None, None, "")
    assert "COHORT_TOO_SMALL: too few answered (phase share, have 4, need 5)" in str(error)
    assert "at least n_min" in str(error)
    complaint = SecureSumError(Reason.BAD_SHARE, "the shares do not open", owner=3, client=5)
    assert str(complaint) == "client 5: BAD_SHARE: the shares do not open (owner 3)"
    assert str(SecureSumError(Reason.BAD_SHARE, "x", owner=3)) == "owner 3: BAD_SHARE: x"
    policy = SecureSumError(Reason.POLICY, "the policy refuses", field="n_min", asked=3, allowed=20)
    assert (policy.field, policy.asked, policy.allowed) == ("n_min", "3", "20")
    assert "field n_min, asked 3, allowed 20" in str(policy)


def test_the_error_crosses_processes() -> None:
    error = SecureSumError(
        Reason.POLICY, "found", rule="rule", fix="fix", who="who", phase="share", have=0, need=1, owner=2,
        client=3, field="f", asked=1, allowed="x",
    )  # fmt: skip
    again = copy.copy(error)  # by __reduce__, as between processes
    assert type(again) is SecureSumError
    assert str(again) == str(error)
    assert {**vars(again)} == {**vars(error)}


# --- RoundConfig ----------------------------------------------------------------------------------


def test_the_frozen_session_id() -> None:
    """The order and the shape of every field, written out once more."""
    number = reference
    expected = b"".join([
        reference(b"SA1/config"), number(1), reference(b"ward-7"), number(3), number(1),
        *(reference(bytes([byte]) * 32) for byte in (1, 2, 3, 4, 5)),
        number(5), number(21), number(1), number(20), number(0), number(14), number(1),
        number(100_000), number(50_000), number(32), number(1000),
        reference(((b"weight", 255), (b"loss", 2**20))),
        number(16), number(2**15), number(40_000), number(0),
        reference((1, 10**9, 2, 1000)),
        reference((30_000, 30_000, 500_000, 20_000, 20_000)),
        number(0),
    ])  # fmt: skip
    assert CONFIG.encode() == expected
    assert CONFIG.session_id == hashlib.sha256(expected).digest()
    assert CONFIG.session_id.hex() == "d46af2aa89188054a82851372860d4128564f8b79bb0f4bf16ad6fd48e3b9ad0"


def test_every_field_changes_the_session() -> None:
    names = [field.name for field in fields(RoundConfig)]
    assert set(names) == {*CHANGES, "version"}  # there is no other version yet
    ids = [CONFIG.session_id]
    for name, values in CHANGES.items():
        for value in values:
            changed = replace(CONFIG, **{name: value})
            assert RoundConfig.decode(changed.encode()) == changed
            ids.append(changed.session_id)
    data = CONFIG.encode()
    place = len(reference(b"SA1/config")) + 11
    assert data[place] == 1
    other = data[:place] + b"\2" + data[place + 1 :]
    with pytest.raises(SecureSumError, match="version is 2"):
        RoundConfig.decode(other)
    ids.append(hashlib.sha256(other).digest())
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_min": 2}, "CONFIG"),
        ({"n_min": 22}, "CONFIG"),
        ({"n_max": 2**15 + 1}, "CONFIG"),
        ({"n_max": 20}, "CONFIG"),  # k neighbours are more than there can be
        ({"graph": 2}, "CONFIG"),
        ({"graph": 0, "n_max": 22}, "CONFIG"),  # complete, and k less than that
        ({"k": 17}, "CONFIG"),  # an odd ring
        ({"threshold_rule": 1, "t": 15}, "CONFIG"),
        ({"threshold_rule": 2}, "CONFIG"),
        ({"t": 10}, "WEAK_PARAMETERS"),
        ({"t": 21}, "WEAK_PARAMETERS"),
        ({"t": 1, "k": 2}, "WEAK_PARAMETERS"),
        ({"t": 0}, "WEAK_PARAMETERS"),
        ({"threat": 2}, "CONFIG"),
        ({"corrupt_ppm": 10**6 + 1}, "CONFIG"),
        ({"bits": 7}, "CONFIG"),
        ({"bits": 65}, "CONFIG"),
        ({"dimension": 0}, "CONFIG"),
        ({"dimension": 2**40 + 1}, "CONFIG"),
        ({"dimension": 1.0}, "CONFIG"),
        ({"rotation": True}, "CONFIG"),
        ({"rotation": -1}, "CONFIG"),
        ({"value_bound": 0}, "CONFIG"),
        ({"seal": 2}, "CONFIG"),
        ({"job": ""}, "CONFIG"),
        ({"job": "x" * 257}, "CONFIG"),
        ({"job": "é" * 129}, "CONFIG"),
        ({"job": "a\x1b[2J"}, "CONFIG"),
        ({"job": "\ud800"}, "CONFIG"),
        ({"nonce": bytes(31)}, "CONFIG"),
        ({"nonce": "x" * 32}, "CONFIG"),
        ({"slots": tuple((f"s{place}", 1) for place in range(65))}, "CONFIG"),
        ({"slots": (("a", 1), ("a", 2))}, "CONFIG"),
        ({"slots": (("a", 0),)}, "CONFIG"),
        ({"slots": (("", 1),)}, "CONFIG"),
        ({"slots": [("a", 1)]}, "CONFIG"),
        ({"slots": (("a",),)}, "CONFIG"),
        ({"noise": NoiseBlock(3, 1, 0, 0)}, "CONFIG"),
        ({"noise": NoiseBlock(1, 0, 0, 0)}, "CONFIG"),  # noise of variance 0 is no noise
        ({"noise": NoiseBlock(0, 1, 0, 0)}, "CONFIG"),
        ({"noise": NoiseBlock(1, 1, 5, 0)}, "CONFIG"),  # n_min is 5: nobody left to add any
        ({"noise": None}, "CONFIG"),
        ({"deadlines_ms": (1, 2, 3, 4)}, "CONFIG"),
        ({"deadlines_ms": (1, 2, 3, 4, 0)}, "CONFIG"),
    ],
)  # fmt: skip
def test_a_bad_configuration_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(SecureSumError) as caught:
        replace(CONFIG, **change)
    assert caught.value.reason == reason
    assert caught.value.rule


def test_k_and_t_in_force() -> None:
    complete = replace(
        CONFIG, graph=m.Graph.COMPLETE, threshold_rule=m.ThresholdRule.TWO_THIRDS, n_max=31, k=30, t=21
    )
    assert [complete.degree(n) for n in (5, 21, 31)] == [4, 20, 30]
    assert [complete.threshold(n) for n in (5, 21, 31)] == [3, 14, 21]
    ring = replace(CONFIG, n_max=100, n_min=10)
    assert [ring.degree(n) for n in (10, 21, 22, 100)] == [9, 20, 20, 20]
    assert [ring.threshold(n) for n in (10, 100)] == [14, 14]


def test_upload_size() -> None:
    assert CONFIG.length == 1002
    assert CONFIG.upload_bytes == 4008
    assert replace(CONFIG, bits=27).upload_bytes == -(-1002 * 27 // 8)


def test_the_longest_configuration_fits() -> None:
    slots = tuple((f"{place:02}" + "x" * (m.MAX_TEXT - 2), 2**62) for place in range(m.MAX_SLOTS))
    longest = replace(CONFIG, job="j" * m.MAX_TEXT, slots=slots)
    assert len(longest.encode()) <= m.MAX_CONFIG_BYTES
    assert RoundConfig.decode(longest.encode()) == longest


# --- messages -------------------------------------------------------------------------------------


def blob(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


def blobs(size: int, least: int = 0, most: int = CONFIG.k) -> st.SearchStrategy[tuple[bytes, ...]]:
    return st.lists(blob(size), min_size=least, max_size=most).map(tuple)


IDS = st.lists(st.integers(1, 2**64 - 1), unique=True, max_size=CONFIG.k).map(lambda ids: tuple(sorted(ids)))
PUBLIC = st.integers(0, PRIME - 1).map(lambda number: number.to_bytes(32, "little"))
ADVERTS = st.builds(m.Advert, blob(32), st.integers(1, 2**64 - 1), PUBLIC, PUBLIC, blob(16))
SIGNED = st.builds(
    lambda advert, signature: Envelope(
        "advert", advert.session_id, advert.client, advert.encode(), signature
    ),
    ADVERTS,
    blob(64),
)
NUMBER = st.none() | st.integers(0, 2**64 - 1)
PLAIN = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40)


def per_id(
    kind: Callable[..., m.Message], ids: st.SearchStrategy[tuple[int, ...]], size: int
) -> st.SearchStrategy[m.Message]:
    return ids.flatmap(lambda some: st.builds(kind, st.just(some), blobs(size, len(some), len(some))))


STRATEGIES: dict[type[m.Message], st.SearchStrategy[Any]] = {
    m.Config: st.sampled_from(list(CHANGES)).map(
        lambda name: m.Config(replace(CONFIG, **{name: CHANGES[name][0]}))
    ),
    m.Advert: ADVERTS,
    m.Roll: st.tuples(IDS, st.lists(SIGNED, max_size=4)).flatmap(
        lambda pair: blobs(16, len(pair[0]), len(pair[0])).map(
            lambda nonces: m.Roll(pair[0], nonces, tuple(pair[1]))
        )
    ),
    m.Shares: st.builds(m.Shares, blob(32), blob(32), blobs(120)),
    m.Deliver: st.binary(max_size=3).flatmap(
        lambda u1: per_id(lambda *parts: m.Deliver(u1, *parts), IDS, 120)
    ),
    m.Masked: st.builds(m.Masked, blob(32), st.just(CONFIG.upload_bytes), blob(32)),
    m.Complaint: st.builds(m.Complaint, st.integers(1, 2**64 - 1)),
    m.Survivors: st.builds(m.Survivors, blob(32), blob(32), st.binary(max_size=3)),
    m.Agree: st.builds(m.Agree, blob(32), blob(32), blob(32)),
    m.Open: per_id(m.Open, IDS, 64),
    m.Unmask: st.builds(m.Unmask, blobs(36, 0, 10), blobs(36, 0, 10)),
    m.Done: st.builds(m.Done, blob(32)),
    m.Abort: st.builds(
        m.Abort, st.sampled_from(Reason), st.sampled_from(["", *m.PHASES]), NUMBER, NUMBER, NUMBER, NUMBER,
        PLAIN, PLAIN, PLAIN,
    ),
}  # fmt: skip
ANY = st.one_of(*STRATEGIES.values())


def largest() -> list[m.Message]:
    """Of each kind the one that takes most bytes."""
    h, many, n = bytes(32), range(CONFIG.k), CONFIG.n_max
    advert = m.Advert(h, 2**64 - 1, h, h, bytes(16))
    signed = Envelope("advert", h, 2**64 - 1, advert.encode(), bytes(64))
    neighbours = tuple(2**64 - CONFIG.k + place for place in many)
    text = "x" * m.MAX_TEXT
    return [
        advert,
        m.Roll(tuple(range(1, n + 1)), (bytes(16),) * n, (signed,) * CONFIG.k),
        m.Shares(h, h, (bytes(120),) * CONFIG.k),
        m.Deliver(bytes(3), neighbours, (bytes(120),) * CONFIG.k),
        m.Masked(h, CONFIG.upload_bytes, h),
        m.Complaint(1),
        m.Survivors(h, h, bytes(3)),
        m.Agree(h, h, h),
        m.Open(neighbours, (bytes(64),) * CONFIG.k),
        m.Unmask((bytes(36),) * CONFIG.k, ()),
        m.Done(h),
        m.Abort(Reason.INCONSISTENT_SURVIVORS, "advertise", 1, 2, 3, 4, text, text, text),
    ]


def test_strategies_and_largest_cover_the_protocol() -> None:
    assert list(m.MESSAGES.values()) == list(STRATEGIES)
    assert [type(message) for message in largest()] == list(STRATEGIES)[1:]
    assert all(name == kind.KIND for name, kind in m.MESSAGES.items())
    assert {kind.PHASE for kind in m.MESSAGES.values()} == {*m.PHASES, ""}


@settings(max_examples=300)
@given(ANY)
def test_messages_come_back(message: m.Message) -> None:
    data = message.encode()
    assert type(message).decode(data, CONFIG) == message
    assert len(data) <= type(message).limit(CONFIG)
    envelope = Envelope(message.KIND, CONFIG.session_id, 0, data, bytes(64))
    assert Envelope.decode(envelope.encode(), m.envelope_limit(CONFIG)) == envelope


@pytest.mark.parametrize("message", largest(), ids=lambda message: message.KIND)
def test_limits_are_exact(message: m.Message) -> None:
    kind, data = type(message), message.encode()
    assert kind.decode(data, CONFIG) == message
    if kind is m.Unmask:  # the shares may all be of either kind
        assert len(data) == kind.limit(CONFIG) - CONFIG.k * 40
    else:
        assert len(data) == kind.limit(CONFIG)
    with pytest.raises(SecureSumError):
        kind.decode(data + bytes(kind.limit(CONFIG)), CONFIG)
    for end in range(0, len(data), 1 + len(data) // 200):
        with pytest.raises(SecureSumError):
            kind.decode(data[:end], CONFIG)


def test_sizes_of_the_protocol() -> None:
    """120 bytes for each neighbour, so 7 KB for fifty; four bytes of upload an element at 32 bits."""
    config = replace(CONFIG, n_max=100, k=50, t=26, slots=(), dimension=100_000)
    shares = m.Shares(bytes(32), bytes(32), (bytes(m.FIELD_BYTES),) * 50)
    envelope = Envelope("shares", config.session_id, 1, shares.encode(), bytes(64))
    assert m.FIELD_BYTES == 120
    assert len(envelope.encode()) <= 7000
    assert config.upload_bytes == 400_000


def test_fields_that_do_not_fit_together() -> None:
    def refused(message: m.Message, reason: Reason) -> None:
        with pytest.raises(SecureSumError) as caught:
            type(message).decode(message.encode(), CONFIG)
        assert caught.value.reason == reason

    h = bytes(32)
    for ids in ((2, 1), (1, 1), (0, 1)):
        refused(m.Roll(ids, (bytes(16),) * 2, ()), Reason.BAD_ROLL)
        refused(m.Deliver(b"", ids, (bytes(120),) * 2), Reason.BAD_ROLL)
        refused(m.Open(ids, (bytes(64),) * 2), Reason.FRAME)
    refused(m.Roll((1, 2), (bytes(16),), ()), Reason.BAD_ROLL)
    refused(m.Roll(tuple(range(1, 23)), (bytes(16),) * 22, ()), Reason.BAD_ROLL)
    refused(m.Deliver(b"", (1,), ()), Reason.BAD_ROLL)
    refused(m.Deliver(bytes(4), (), ()), Reason.BAD_ROLL)
    refused(m.Open((1, 2), (bytes(64),)), Reason.FRAME)
    refused(m.Unmask((bytes(36),) * 11, (bytes(36),) * 10), Reason.FRAME)
    refused(m.Masked(h, CONFIG.upload_bytes + 1, h), Reason.BAD_UPLOAD)
    refused(m.Complaint(0), Reason.FRAME)
    refused(m.Survivors(h, h, bytes(4)), Reason.FRAME)
    refused(m.Abort("NOTHING", ""), Reason.FRAME)  # type: ignore[arg-type]
    refused(m.Abort(Reason.LATE, "tea"), Reason.FRAME)
    refused(m.Abort(Reason.LATE, asked="\x1b[2J"), Reason.FRAME)
    refused(m.Abort(Reason.LATE, asked="x" * 257), Reason.FRAME)


@pytest.mark.parametrize("number", [PRIME, PRIME + 1, PRIME + 9, 2**255 - 1, 2**255, 2**255 + 9, 2**256 - 1])
def test_a_key_has_one_encoding(number: int) -> None:
    key, fine = number.to_bytes(32, "little"), (9).to_bytes(32, "little")
    for advert in (
        m.Advert(bytes(32), 4, key, fine, bytes(16)),
        m.Advert(bytes(32), 4, fine, key, bytes(16)),
    ):
        signed = Envelope("advert", bytes(32), 4, advert.encode(), bytes(64))
        roll = m.Roll((1, 4), (bytes(16),) * 2, (signed,))
        for message in (advert, roll):
            with pytest.raises(SecureSumError) as caught:
                type(message).decode(message.encode(), CONFIG)
            assert (caught.value.reason, caught.value.client) == (Reason.BAD_KEY, 4)


def test_secrets_do_not_print() -> None:
    share = bytes([0xAB]) * 36
    assert repr(share)[2:-1] not in repr(m.Unmask((share,), (share,)))


def test_an_abort_carries_the_numbers_of_an_error() -> None:
    error = SecureSumError(
        Reason.POLICY, "the policy refuses", phase="advertise", have=0, need=3, owner=4, client=5,
        field="n_min", asked=3, allowed="20\nor more " + "é" * 200,
    )  # fmt: skip
    abort = m.Abort.of(error)
    again = m.Abort.decode(abort.encode(), CONFIG).error(5)
    assert again.reason == error.reason
    assert (again.phase, again.have, again.need, again.owner, again.client) == ("advertise", 0, 3, 4, 5)
    assert (again.field, again.asked) == ("n_min", "3")
    assert again.allowed == "20or more " + "é" * 123
    assert str(again).startswith("client 5: POLICY")
    assert "server" in str(m.Abort(Reason.LATE).error(m.SERVER))


# --- envelopes ------------------------------------------------------------------------------------


def test_the_signature_covers_everything() -> None:
    envelope = Envelope("done", bytes(32), 0, b"body", b"")
    signed = {
        envelope.signed,
        replace(envelope, kind="abort").signed,
        replace(envelope, session_id=bytes([1]) * 32).signed,
        replace(envelope, sender=1).signed,
        replace(envelope, body=b"bod").signed,
    }
    assert len(signed) == 5
    assert envelope.signed == b"".join(map(reference, (b"SA1/sig", b"done", bytes(32), 0, b"body")))


def test_parse() -> None:
    session = CONFIG.session_id
    done = Envelope("done", session, 0, m.Done(bytes(32)).encode(), bytes(64))
    assert m.parse(done, CONFIG, m.Done, m.Abort) == m.Done(bytes(32))
    advert = m.Advert(session, 4, (9).to_bytes(32, "little"), (8).to_bytes(32, "little"), bytes(16))
    sent = Envelope("advert", session, 4, advert.encode(), bytes(64))
    assert m.parse(sent, CONFIG, m.Advert).client == 4
    refused = [
        (replace(done, session_id=bytes(32)), (m.Done,), Reason.SESSION),
        (done, (m.Open, m.Abort), Reason.WRONG_PHASE),
        (done, (), Reason.WRONG_PHASE),
        (replace(done, sender=4), (m.Done,), Reason.BAD_SIGNATURE),
        (replace(sent, sender=0), (m.Advert,), Reason.BAD_SIGNATURE),
        (replace(sent, sender=5), (m.Advert,), Reason.BAD_SIGNATURE),
        (
            replace(sent, body=replace(advert, session_id=bytes(32)).encode()),
            (m.Advert,),
            Reason.BAD_SIGNATURE,
        ),
        (replace(done, body=b""), (m.Done,), Reason.FRAME),
    ]
    for envelope, expected, reason in refused:
        with pytest.raises(SecureSumError) as caught:
            m.parse(envelope, CONFIG, *expected)
        assert caught.value.reason == reason


def test_parse_config() -> None:
    opening = Envelope("config", CONFIG.session_id, 0, m.Config(CONFIG).encode(), bytes(64))
    raw = Envelope.decode(opening.encode(), m.envelope_limit(None))
    assert m.parse_config(raw) == CONFIG
    refused = [
        (replace(opening, session_id=bytes(32)), Reason.SESSION),
        (replace(opening, sender=1), Reason.BAD_SIGNATURE),
        (replace(opening, kind="abort"), Reason.WRONG_PHASE),
        (replace(opening, body=opening.body[:-1]), Reason.CONFIG),
    ]
    for envelope, reason in refused:
        with pytest.raises(SecureSumError) as caught:
            m.parse_config(envelope)
        assert caught.value.reason == reason


def test_an_unknown_kind_is_no_envelope() -> None:
    data = Envelope("gossip", bytes(32), 0, b"", bytes(64)).encode()
    with pytest.raises(SecureSumError, match="unknown kind"):
        Envelope.decode(data, 1000)
    data = Envelope("done", bytes(32), 0, b"", bytes(63)).encode()
    with pytest.raises(SecureSumError, match="64"):
        Envelope.decode(data, 1000)


# --- garbage --------------------------------------------------------------------------------------


def decoded(kind: type[m.Message] | type[Envelope], data: bytes) -> bool:
    """Whether it decodes, and then to what encodes the same; anything but the typed error fails the test."""
    try:
        message = (
            kind.decode(data, m.envelope_limit(CONFIG)) if kind is Envelope else kind.decode(data, CONFIG)
        )  # type: ignore[arg-type]
    except SecureSumError:
        return False
    assert message.encode() == data
    return True


@given(st.sampled_from([Envelope, *STRATEGIES]), st.binary(max_size=400))
def test_garbage(kind: Any, data: bytes) -> None:
    decoded(kind, data)
    tag = Envelope.TAG if kind is Envelope else RoundConfig.TAG if kind is m.Config else kind.tag()
    decoded(kind, m.struct(tag) + data)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(ANY, st.data())
def test_damaged_messages(message: m.Message, data: st.DataObject) -> None:
    whole = message.encode()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 8)))
    patched = whole[:start] + data.draw(st.binary(max_size=8)) + whole[end:]
    if decoded(type(message), patched):
        assert len(patched) <= type(message).limit(CONFIG)
    for other in STRATEGIES:
        if other is not type(message):
            assert not decoded(other, whole)


def test_announced_sizes_cost_nothing() -> None:
    """A head of four bytes may announce four billion items; nothing is allocated for them."""
    envelope = Envelope("roll", CONFIG.session_id, 0, largest()[1].encode(), bytes(64))
    for message in (*largest(), m.Config(CONFIG), envelope):
        whole = message.encode()
        tracemalloc.start()
        try:
            for place in range(0, len(whole) - 4, 1 + len(whole) // 150):
                for head in (b"\xff\xff\xff\xff", b"\0\0\x7f\xff", b"\0\1\0\0"):
                    data = whole[:place] + head + whole[place + 4 :]
                    before, _ = tracemalloc.get_traced_memory()
                    tracemalloc.reset_peak()
                    decoded(type(message), data)
                    _, peak = tracemalloc.get_traced_memory()
                    assert peak - before < 10 * len(whole) + 30_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("rounds", [3_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_many_damaged_messages(rounds: int) -> None:
    draw = random.Random(9)
    envelope = Envelope("roll", CONFIG.session_id, 0, largest()[1].encode(), bytes(64))
    wholes = [(type(message), message.encode()) for message in (*largest(), m.Config(CONFIG), envelope)]
    for _ in range(rounds):
        kind, whole = draw.choice(wholes)
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(data) or 1)
            match draw.randrange(4):
                case 0:
                    data[place : place + 1] = bytes([draw.randrange(256)])
                case 1:
                    del data[place : place + draw.randint(1, 40)]
                case 2:
                    data[place:place] = draw.randbytes(draw.randint(1, 40))
                case _:
                    data[place : place + 4] = draw.choice(
                        [bytes(4), b"\xff" * 4, b"\0\0\0\1", b"\x7f\xff\xff\xff"]
                    )
        decoded(kind, bytes(data))
