"""Faults that secure sums in the field have had, each with the behaviour that rules it out.

Faults of one building block are tested beside it; the last test here knows all names.
"""

import gc
import logging
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np
import numpy.typing as npt
import pytest

from mycelia.aggregator.secagg import SecureSumServer
from mycelia.client.policy import ClientPolicy
from mycelia.client.secagg import SecureSumClient, Task
from mycelia.engine.errors import ConfigError, RoundAborted
from mycelia.engine.rng import generator
from mycelia.privacy.secagg import keys, masks
from mycelia.privacy.secagg.canonical import digest, struct
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.events import Abort, Effect, Finish, Refuse, Tick
from mycelia.privacy.secagg.keys import Label, Sealer
from mycelia.privacy.secagg.messages import (
    MESSAGES,
    Advert,
    Config,
    Deliver,
    Envelope,
    Masked,
    Open,
    Reason,
    Roll,
    SecureSumError,
    Shares,
    Survivors,
    Unmask,
)
from mycelia.privacy.secagg.noise import NoiseShare
from mycelia.privacy.secagg.round_config import Mechanism, NoiseBlock, RoundConfig
from mycelia.simulations import secure_sum
from mycelia.simulations.secure_sum_journals import FileJournals
from mycelia.simulations.secure_sum_setup import Context
from mycelia.simulations.secure_sums import InFlight, Keys, SecureSumAborted, SecureSumResult
from tests.privacy.secagg.encodings import SOURCE, Bits, codes_of, encode, encoding
from tests.privacy.secagg.leaks import collected
from tests.privacy.secagg.sums import SETTINGS, VECTORS, run_sum


def opened(outcome: SecureSumResult | SecureSumAborted) -> SecureSumResult:
    assert isinstance(outcome, SecureSumResult)
    assert outcome.exact
    return outcome


def reasons(outcome: SecureSumResult | SecureSumAborted, client: int) -> set[Reason]:
    return {fault.reason for fault in outcome.faults if fault.client == client}


# --- who may ask for what ---


def test_overlapping_lists_cannot_be_asked() -> None:
    """Nothing asked in `unmask` names an owner; what leaves follows from the one set that was signed."""
    assert {field.name for field in fields(Open)} == {"signers", "signatures"}
    answers: dict[int, Unmask] = {}

    def wire(flight: InFlight, keys: Keys) -> list[InFlight]:
        if isinstance(flight.message, Unmask):
            answers[flight.sender] = flight.message
        if isinstance(flight.message, Survivors):  # and that 5 and 6 are gone, to those who said they are not
            other = keys.sign(replace(flight.message, u2=b"\x0f"), "server")
            return [flight, replace(flight, raw=other)]
        if isinstance(flight.message, Open):
            return [flight, flight]
        return [flight]

    outcome = run_sum(wire=wire, drops={6: "masked"})
    for client in range(1, 6):
        assert Reason.EQUIVOCATION in reasons(outcome, client)
    assert all(not (b and s) for b, s in outcome.released.values())
    assert all(len(answer.b_shares) + len(answer.s_shares) <= 5 for answer in answers.values())


def late_upload() -> tuple[npt.NDArray[np.uint32], dict[int, bytes], SecureSumResult, bytes]:
    """What came late from client 3, its pair keys by neighbour, the outcome and the session."""
    late: list[InFlight] = []

    def wire(flight: InFlight, keys: Keys) -> InFlight:
        if isinstance(flight.message, Masked) and flight.sender == 3:
            late.append(flight)
            return flight.until("agree")
        return flight

    pairs: dict[int, bytes] = {}
    kdf = keys.kdf
    with pytest.MonkeyPatch.context() as patched:

        def seen(ikm: bytes, session_id: bytes, label: Label, i: int, j: int) -> bytes:
            key = kdf(ikm, session_id, label, i, j)
            if label == "sa1/pair" and 3 in (i, j):
                pairs[i + j - 3] = key
            return key

        patched.setattr(keys, "kdf", seen)
        outcome = opened(run_sum(wire=wire, vectors=np.zeros((6, 500), int)))
    (flight,) = late
    config = SETTINGS.round_config(
        job="x", round=0, nonce=bytes(32), model_sha256=bytes(32), schema_sha256=bytes(32),
        task_sha256=bytes(32), roster_sha256=bytes(32), size=500, clients=6,
    )  # fmt: skip
    packed = b"".join(flight.chunks)
    session = Envelope.decode(flight.raw, len(flight.raw)).session_id
    return masks.unpack(packed, config.length, config.bits), pairs, outcome, session  # type: ignore[return-value]


def test_late_upload_stays_hidden() -> None:
    """With the pair masks taken off, as the server could, a second mask is still on it."""
    words, pairs, outcome, _ = late_upload()
    assert 3 not in outcome.survivors
    assert outcome.released[3] == (0, 5)
    assert Reason.LATE in reasons(outcome, 3)
    assert set(pairs) == {1, 2, 4, 5, 6}
    bits = int(words.max()).bit_length()
    signs = [-1 if other > 3 else 1 for other in pairs]
    masks.add_streams(words, list(pairs.values()), signs, bits)
    counts = np.bincount(words >> (bits - 2), minlength=4)  # of zeros, without the self mask, all are 0
    assert counts.min() > 80


@pytest.mark.parametrize("phase", ["advertise", "share"])
def test_drop_before_shares(phase: str) -> None:
    found = opened(run_sum(drops={2: phase}))
    assert found.survivors == (1, 3, 4, 5, 6)
    assert 2 not in found.released


# --- numbers ---


def test_overflow_counts_the_cohort() -> None:
    """Bits that do for a few shares and not for the cohort are refused, not warned about."""
    for clients, bits in ((3, 18), (100, 23), (1000, 26)):
        rates = {"corrupt": 0.0, "dropout": 0.0, "threat": "passive"}
        named = {"config": SecureSumConfig(bits=bits, n_max=clients, **rates)}
        found = secure_sum(np.full((3, 2), 2**15), **named)  # type: ignore[arg-type]
        assert found.total.tolist() == [3 * 2**15] * 2
        less = SecureSumConfig(bits=bits - 1, n_max=clients, **rates)
        with pytest.raises(SecureSumError, match="OVERFLOW") as caught:
            secure_sum(np.full((3, 2), 2**15), config=less)
        assert caught.value.need == bits


def test_small_field_refused() -> None:
    for frac_bits, bits in ((16, 8), (16, 16), (30, 16)):
        with pytest.raises(SecureSumError, match="OVERFLOW"):
            run_sum(config=SETTINGS.model_copy(update={"bits": bits, "frac_bits": frac_bits}))


@pytest.mark.parametrize("n", [3, 5, 11])
def test_slots_do_not_carry(n: int) -> None:
    """Neighbouring slots at their bounds, weights at theirs, and sums beyond 32 bits."""
    slots = {f"s{i}": (2**33, [(-1) ** i * 2**33] * n) for i in range(6)}
    settings = SecureSumConfig(corrupt=0, dropout=0, weight_max=10**6)
    found = secure_sum(np.full((n, 3), -(2**15)), [10**6] * n, slots=slots, config=settings)
    assert found.exact
    assert found.slots == {f"s{i}": n * (-1) ** i * 2**33 for i in range(6)}
    assert found.weight == n * 10**6
    assert found.total.tolist() == [-n * 10**6 * 2**15] * 3


def test_top_of_range_has_a_code() -> None:
    for sign in (1, -1):
        found = opened(run_sum(vectors=np.full((6, 5), sign * 0.5)))  # 2**15 steps of 2**-16
        assert found.total.tolist() == [sign * 6 * 2**15] * 5
        beyond = opened(run_sum(vectors=np.full((6, 5), sign * 0.75)))
        assert beyond.total.tolist() == found.total.tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_never_encoded(value: float) -> None:
    vectors, uploads = np.ones((6, 4)), set[int]()
    vectors[2, 1] = value

    def wire(flight: InFlight, keys: Keys) -> InFlight:
        if isinstance(flight.message, Masked):
            uploads.add(flight.sender)
        return flight

    found = opened(run_sum(vectors=vectors, wire=wire))
    assert uploads == set(found.survivors) == {1, 2, 4, 5, 6}
    assert reasons(found, 3) == {Reason.INVALID_INPUT}


def test_counts_not_in_clear() -> None:
    """Other weights and counts change the masked vectors, and nothing else of what clients send."""
    sent: list[dict[tuple[int, str], bytes]] = []

    def wire(flight: InFlight, keys: Keys) -> InFlight:
        if flight.sender:
            sent[-1][flight.sender, flight.message.KIND] = flight.raw
        return flight

    for weights, counts in ([1] * 6, [5] * 6), (list(range(6)), [100, -100, 7, 0, 1, 99]):
        sent.append({})
        settings = SETTINGS.model_copy(update={"weight_max": 9})
        slots = {"examples": (100, counts)}
        secure_sum(VECTORS, weights, config=settings, slots=slots, seed=1, wire=wire)
    one, two = sent
    assert set(one) == set(two)
    assert {kind for (_, kind), raw in one.items() if raw != two[_, kind]} == {"masked"}
    assert {len(raw) for (_, kind), raw in one.items() if kind == "masked"} == {
        len(raw) for (_, kind), raw in two.items() if kind == "masked"
    }
    assert {field.name for field in fields(Masked)} == {"u1", "length", "sha256"}


def test_weights_exact_when_small() -> None:
    vectors = np.random.default_rng(0).uniform(-0.5, 0.5, (6, 50))
    settings = SETTINGS.model_copy(update={"weight_max": 10**6})
    found = secure_sum(vectors, [1] * 6, config=settings)
    assert found.weight == 6
    assert np.abs(found.mean - vectors.mean(axis=0)).max() < 2**-16
    refused = secure_sum(vectors, [1, 1, 1, 1, 1, 10**6 + 1], config=settings)
    assert 6 not in refused.survivors
    assert reasons(refused, 6) == {Reason.INVALID_INPUT}


# --- noise ---

NOISE = {"mechanism": "skellam", "variance": 9000, "corrupt": 1}


def test_sensitivity_needs_equal_weights() -> None:
    with pytest.raises(SecureSumError, match="CONFIG"):
        SecureSumConfig(noise=NOISE, weight_max=2)
    settings = SecureSumConfig(n_min=4, corrupt=0.2, dropout=0.2, clip=1.0, noise=NOISE)
    found = secure_sum(np.zeros((6, 4)), [1, 1, 0, 1, 1, 1], config=settings)
    assert reasons(found, 3) == {Reason.INVALID_INPUT}
    assert found.weight == len(found.survivors) == 5


def test_noise_for_who_is_left() -> None:
    """The share is that of the fewest honest clients a sum is opened for, so that dropouts leave enough."""
    settings = SecureSumConfig(n_min=8, corrupt=0.1, dropout=0.2, clip=1.0, noise=NOISE)
    found = secure_sum(np.zeros((10, 20_000)), config=settings, drops={1: "masked", 2: "share"}, seed=5)
    assert len(found.survivors) == 8
    assert found.total.var() > 0.97 * 9000 * 8 / 7
    assert NoiseShare(Mechanism.SKELLAM, 9000, 7).share == pytest.approx(9000 / 7)


def test_rounding_retry_ends() -> None:
    """Bits that always round up never meet the bound: it is drawn 65 times, then rounded towards zero."""
    form = encoding(
        10_000, 3, l2_steps=1, n_min=3,
        noise=NoiseBlock(Mechanism.SKELLAM, 300, beta_ppb=606_530_660),
    )  # fmt: skip
    bits = Bits(*[2**64 - 1] * 500)
    found = form.encode(np.full(10_000, 1e-5), client=1, rounding=np.random.Generator(bits), noise=SOURCE)
    assert bits.asked == 65
    noise = codes_of(form, encode(form, np.zeros(10_000, int)))
    assert not (codes_of(form, found) - noise).any()


# --- keys ---


def test_derivation_bound_to_session() -> None:
    """Every part of a derivation counts, no raw agreement is a key, and no two lists of fields are one."""
    base = {"ikm": bytes(32), "session_id": bytes(32), "label": "sa1/pair", "i": 1, "j": 2}
    changes = {"ikm": b"\1" * 32, "session_id": b"\1" * 32, "label": "sa1/chan-lo-hi", "i": 3, "j": 3}
    derived = [keys.kdf(**base)]  # type: ignore[arg-type]
    derived += [keys.kdf(**base | {name: value}) for name, value in changes.items()]  # type: ignore[arg-type]
    assert len(set(derived)) == len(derived)
    assert bytes(32) not in derived
    assert digest("t", b"ab", b"c") != digest("t", b"a", b"bc") != digest("t", b"abc")
    with collected() as secrets:
        opened(run_sum(drops={6: "masked"}))
    keys_in_use = set.union(*(found for name, found in secrets.bytes_.items() if name.startswith("key ")))
    assert not keys_in_use & secrets.bytes_["agreement"]
    assert secrets.bytes_["mask key"] <= keys_in_use


def swap_key(flight: InFlight, keys: Keys) -> InFlight:
    """The server gives client 6 another key for client 1, without a signature of client 1."""
    if isinstance(flight.message, Roll) and flight.receiver == 6:
        first = flight.message.adverts[0]
        body = first.body[:-52] + bytes(range(32)) + first.body[-20:]
        adverts = (replace(first, body=body), *flight.message.adverts[1:])
        return replace(flight, raw=keys.sign(replace(flight.message, adverts=adverts), "server"))
    return flight


def repeat_key(flight: InFlight, keys: Keys) -> InFlight:
    """Client 2, with the server, gives client 6 the channel key of client 1 as its own."""
    if isinstance(flight.message, Roll) and flight.receiver == 6:
        first, second = (Advert.decode(one.body, CONFIGS[0]) for one in flight.message.adverts[:2])
        copied = keys.sign(replace(second, channel_key=first.channel_key), 2)
        envelope = Envelope.decode(copied, len(copied))
        adverts = (flight.message.adverts[0], envelope, *flight.message.adverts[2:])
        return replace(flight, raw=keys.sign(replace(flight.message, adverts=adverts), "server"))
    if isinstance(flight.message, Config):
        CONFIGS[:] = [flight.message.round]
    return flight


def rename_session(flight: InFlight, keys: Keys) -> InFlight:
    """The session id is said, not computed."""
    if isinstance(flight.message, Config) and flight.receiver == 6:
        envelope = Envelope.decode(flight.raw, len(flight.raw))
        return replace(flight, raw=replace(envelope, session_id=bytes(32)).encode())
    return flight


CONFIGS: list[RoundConfig] = []


def test_peer_keys_authenticated_and_distinct() -> None:
    assert Reason.BAD_SIGNATURE in reasons(run_sum(wire=swap_key), 6)
    assert Reason.BAD_KEY in reasons(run_sum(wire=repeat_key, corrupt=[2]), 6)
    found = run_sum(wire=rename_session)
    assert 6 not in opened(found).survivors
    assert reasons(found, 6) & {Reason.SESSION, Reason.BAD_SIGNATURE}


def test_binary_framing() -> None:
    """Whatever the bytes of a share or the digits of an id are, they come through."""
    for plain in (b"|" * 72, b"\0" * 72, b"\n,;:" * 18, struct("a", b"b")[:12] * 6):
        sealed = Sealer(bytes(32)).seal(plain, b"context")
        assert Sealer(bytes(32)).open_(sealed, b"context") == plain
    assert struct("t", b"a|b") != struct("t", b"a", b"b") != struct("t", "a|", "b")
    ids = [1, 12, 2, 112, 11, 2**63]
    found = opened(run_sum())
    named = secure_sum(VECTORS, ids=ids, config=SETTINGS, drops={112: "masked"})
    assert named.survivors == (1, 2, 11, 12, 2**63)
    assert np.array_equal(named.total, found.total - VECTORS[3])


def test_no_low_entropy_tags() -> None:
    """The same vector gives nothing equal, neither from two clients nor from one in two rounds."""
    seen: list[bytes] = []

    def wire(flight: InFlight, keys: Keys) -> InFlight:
        message = flight.message
        if isinstance(message, Masked):
            seen.append(message.sha256)
        if isinstance(message, Shares):
            seen.append(message.commitment)
            seen.extend(field[start : start + 16] for field in message.fields for start in (88, 104))
        return flight

    for _ in range(2):
        opened(run_sum(vectors=np.ones((6, 4), int), wire=wire))
    assert len(seen) == 2 * 6 * (2 + 2 * 5)
    assert len(set(seen)) == len(seen)


# --- what clients insist on ---


def test_split_model_gives_no_gradient() -> None:
    """A client that was shown another model shares no keys with the others: no mask of it cancels."""
    other = bytes([9]) * 32
    adverts: dict[int, Envelope] = {}

    class Misled(SecureSumClient):
        def __init__(self, task: Task, **named: object) -> None:
            super().__init__(task=task._replace(model_sha256=other), **named)  # type: ignore[arg-type]

    def wire(flight: InFlight, keys: Keys) -> InFlight:
        message = flight.message
        if isinstance(message, Config) and flight.receiver == 6:
            changed = Config(replace(message.round, model_sha256=other))
            return replace(flight, raw=keys.sign(changed, "server"))
        return flight

    outcome = opened(run_sum(wire=wire, actors={6: Misled}))
    assert outcome.survivors == (1, 2, 3, 4, 5)

    def insist(flight: InFlight, keys: Keys) -> InFlight:
        """The server passes the advert of the other session on as if it were of this one."""
        message = wire(flight, keys).message
        if isinstance(message, Advert):
            adverts[flight.sender] = Envelope.decode(flight.raw, len(flight.raw))
        if isinstance(message, Roll) and 6 in adverts:
            place = adverts[6]
            roll = replace(
                message, ids=(*message.ids, 6), nonces=(*message.nonces, place.body[-16:]),
                adverts=(*message.adverts, place),
            )  # fmt: skip
            return replace(flight, raw=keys.sign(roll, "server"))
        return wire(flight, keys)

    split = run_sum(wire=insist, actors={6: Misled})
    assert isinstance(split, SecureSumAborted)
    assert not split.released
    assert all(Reason.SPLIT_VIEW in reasons(split, client) for client in range(1, 6))


def test_tiny_cohort_refused_by_client() -> None:
    refused = run_sum(policies={client: {"n_min": 5} for client in range(1, 7)})
    assert isinstance(refused, SecureSumAborted)
    assert all(reasons(refused, client) == {Reason.POLICY} for client in range(1, 7))
    with pytest.raises(ConfigError, match="n_min"):
        ClientPolicy(n_min=2)

    def wire(flight: InFlight, keys: Keys) -> InFlight:  # three of six, where the round says four
        if isinstance(flight.message, Deliver):
            return replace(flight, raw=keys.sign(replace(flight.message, u1=b"\x07"), "server"))
        return flight

    small = run_sum(wire=wire)
    assert isinstance(small, SecureSumAborted)
    assert not small.released


def test_unknown_mode_is_an_error() -> None:
    for named in (
        {"threat": ""}, {"threat": "none"}, {"threat": None}, {"threat": "Active"}, {"noise": ""},
        {"noise": {"mechanism": "", "variance": 9.0, "corrupt": 0}}, {"neighbours": ""}, {"masks": "off"},
    ):  # fmt: skip
        with pytest.raises(SecureSumError, match="CONFIG"):
            SecureSumConfig(**named)


def test_halted_sum_stops_the_round() -> None:
    with pytest.raises(RoundAborted) as caught:
        secure_sum(VECTORS, config=SETTINGS, drops=dict.fromkeys((1, 2, 3), "masked"))
    assert not {"total", "mean", "slots"} & set(vars(caught.value))
    assert isinstance(caught.value, SecureSumAborted)
    assert caught.value.reason == Reason.COHORT_TOO_SMALL


# --- afterwards ---

MACHINES: list[SecureSumClient | SecureSumServer] = []
ENDINGS: list[Effect] = []


class Kept:
    """Stays after the round, as does what it said at its end."""

    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)
        MACHINES.append(self)  # type: ignore[arg-type]

    def handle(self, event: object) -> list[Effect]:
        effects: list[Effect] = super().handle(event)  # type: ignore[misc]
        ENDINGS.extend(effect for effect in effects if isinstance(effect, Abort | Finish | Refuse))
        return effects


class KeptClient(Kept, SecureSumClient):
    pass


class KeptServer(Kept, SecureSumServer):
    pass


def reachable(root: object) -> bytes:
    """All bytes and arrays that an object leads to, but those of modules, classes and functions."""
    seen, open_, found = set[int](), [root], list[bytes]()
    while open_:
        one = open_.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, bytes | bytearray | memoryview):
            found.append(bytes(one))
        elif isinstance(one, np.ndarray):
            found.append(one.tobytes())
        open_.extend(gc.get_referents(one))
    return b"\n".join(found)


ENDS: dict[str, dict[str, object]] = {
    "done": {"drops": {6: "masked"}},
    "aborted": {"drops": dict.fromkeys((4, 5, 6), "masked")},
    "refused": {"wire": swap_key},
}


@pytest.mark.parametrize("name", ENDS)
def test_no_state_after_round(name: str) -> None:
    MACHINES.clear()
    ENDINGS.clear()
    actors = {**dict.fromkeys(range(1, 7), KeptClient), "server": KeptServer}
    vectors = np.random.default_rng(1).integers(-1000, 1000, (6, 40))
    with collected() as secrets:
        run_sum(vectors=vectors, actors=actors, **ENDS[name])  # type: ignore[arg-type]
    del secrets.bytes_["identity"]  # which is not of the round
    assert len(MACHINES) == 7
    for machine in MACHINES:
        machine.handle(Tick(1e12))  # one that vanished ends by its deadline
        kept = {name: value for name, value in vars(machine).items() if name != "_probe"}
        assert secrets.find(reachable(kept)) == set(), type(machine)
    assert ENDINGS
    assert secrets.find(reachable(ENDINGS)) == set()


def test_nothing_logged(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    vectors = np.random.default_rng(1).integers(-1000, 1000, (6, 40))
    results: list[object] = []

    class Told(SecureSumServer):
        def handle(self, event: object) -> list[Effect]:  # type: ignore[override]
            effects = super().handle(event)  # type: ignore[arg-type]
            results.extend(effects)
            return effects

    with caplog.at_level(logging.DEBUG):
        opened(run_sum(vectors=vectors, drops={6: "masked"}, actors={"server": Told}))
    assert caplog.records == []
    told = capfd.readouterr()
    assert told.out + told.err == ""
    total = vectors[:5].sum(axis=0)
    assert not [number for number in map(str, total[np.abs(total) > 99]) if number in repr(results)]


# --- long ---


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("rounds", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_soak_1000_rounds(rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round after round with the same journals, clients that come and go: exact, and nothing grows."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    rng = generator(7, "soak")
    journals = FileJournals(tmp_path, range(1, 9))
    vectors = rng.integers(-(2**15), 2**15, (8, 64))
    settings = SecureSumConfig(n_min=5, corrupt=0.1, dropout=0.25)
    phases = ["advertise", "share", "masked", "masked:partial", "masked:late", "agree", "unmask"]
    memory, files = 0, 0
    for number in range(rounds):
        leave = rng.choice(np.arange(1, 9), rng.integers(0, 3), replace=False)
        drops = {int(client): str(rng.choice(phases)) for client in leave}
        crash = {"server": int(rng.integers(1, 40))} if number % 5 == 0 else {}
        found = opened(
            run_sum(
                journals,
                vectors,
                settings,
                drops=drops,
                crash=crash,
                order=number,
                context=Context(round=number),
            )
        )
        lost = {client for client, phase in drops.items() if phase not in ("agree", "unmask")}
        assert set(found.survivors) == set(range(1, 9)) - lost
        places = [client - 1 for client in found.survivors]
        assert np.array_equal(found.total, vectors[places].sum(axis=0))
        if number == rounds // 5:
            gc.collect()
            memory, files = resident(), len(os.listdir("/proc/self/fd"))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files
    assert resident() - memory < 16 * 2**20
    assert len(gc.garbage) == 0
    journals.close()
    assert len(list((tmp_path / "server").glob("*.journal"))) == rounds


# --- all names ---

NAMES = """
mask_key_keeps_256_bits masks_uniform_in_whole_ring mask_is_a_vector_and_fresh
no_prg_word_is_an_error overlapping_lists_cannot_be_asked nothing_leaves_before_survivors_agreed
late_upload_stays_hidden drop_before_shares threshold_below_all overflow_counts_the_cohort
small_field_refused slots_do_not_carry top_of_range_has_a_code nonfinite_never_encoded
counts_not_in_clear weights_exact_when_small sensitivity_needs_equal_weights
bad_share_is_found_and_named share_coefficients_random modulus_is_a_constant no_state_after_round
derivation_bound_to_session peer_keys_authenticated_and_distinct
graph_not_from_a_guessable_generator failed_call_does_not_desync binary_framing
noise_for_who_is_left rounding_retry_ends no_low_entropy_tags split_model_gives_no_gradient
tiny_cohort_refused_by_client nothing_logged unknown_mode_is_an_error halted_sum_stops_the_round
soak_1000_rounds threshold_many_shares_cost
"""


def test_every_fault_has_its_test_once() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    found = re.findall(r"^def test_(\w+)\(", text, re.MULTILINE)
    names = NAMES.split()
    assert {name: found.count(name) for name in names} == dict.fromkeys(names, 1)
    assert len(names) == 36
    assert len(MESSAGES) == 13  # whoever adds a message asks which fault it brings
