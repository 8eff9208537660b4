"""The secure sum end to end: dropouts, restarts and retries; the sum is the plain one, or there is none."""

import pickle
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from mycelia.engine.errors import ConfigError, RoundAborted
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.messages import (
    PHASES,
    Abort,
    Config,
    Masked,
    Message,
    Reason,
    SecureSumError,
)
from mycelia.simulations.secure_sums import (
    InFlight,
    Keys,
    SecureSumAborted,
    SecureSumResult,
    Wire,
    secure_sum,
)

N = 10
VECTORS = np.random.default_rng(0).integers(-(2**15), 2**15 + 1, (N, 37))
SETTINGS = SecureSumConfig(n_min=5, corrupt=0.1, dropout=0.2)
RING = SecureSumConfig(neighbours=6, threshold=4, n_min=5, corrupt=0, dropout=0, threat="passive")


def plain(survivors: tuple[int, ...]) -> np.ndarray:
    return VECTORS[[client - 1 for client in survivors]].sum(axis=0)


def attempt(**named: object) -> SecureSumResult | SecureSumAborted:
    try:
        return secure_sum(VECTORS, config=SETTINGS, **named)  # type: ignore[arg-type]
    except SecureSumAborted as error:
        return error


@pytest.mark.parametrize("settings", [SETTINGS, RING], ids=["complete", "ring"])
@pytest.mark.parametrize("order", ["sorted", "reversed", 7])
def test_the_sum_is_exact(settings: SecureSumConfig, order: str | int) -> None:
    found = secure_sum(VECTORS, config=settings, order=order)
    assert np.array_equal(found.total, VECTORS.sum(axis=0))
    assert found.exact
    assert found.survivors == tuple(range(1, N + 1))
    assert not found.faults
    assert not found.insecure_rng
    assert found.weight == N
    assert np.allclose(found.mean, VECTORS.mean(axis=0) / 2**16)


@pytest.mark.parametrize("phase", [*PHASES, "masked:partial", "masked:late"])
def test_clients_may_vanish_in_any_phase(phase: str) -> None:
    found = secure_sum(VECTORS, config=SETTINGS, drops={3: phase, 7: phase}, seed=1)
    stays = phase in ("agree", "unmask")
    assert found.survivors == tuple(c for c in range(1, N + 1) if stays or c not in (3, 7))
    assert np.array_equal(found.total, plain(found.survivors))
    kinds = {fault.reason for fault in found.faults}
    assert kinds == ({Reason.LATE} if phase in ("masked:partial", "masked:late") else set())
    silent = phase in ("masked", "masked:partial", "masked:late")
    assert {owner for owner, (b, s) in found.released.items() if s} == ({3, 7} if silent else set())
    assert not any(b and s for b, s in found.released.values())


@pytest.mark.parametrize("seed", range(8))
def test_any_schedule_gives_the_plain_sum_or_no_sum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    places = [*PHASES, "masked:partial", "masked:late"]
    drops = {
        int(client): str(rng.choice(places))
        for client in rng.choice(np.arange(1, N + 1), rng.integers(0, 5), replace=False)
    }
    lost = {client for client, phase in drops.items() if phase not in ("agree", "unmask")}
    found = attempt(drops=drops, order=seed, seed=seed)
    if isinstance(found, SecureSumResult):
        assert np.array_equal(found.total, plain(found.survivors))
        assert set(found.survivors) == set(range(1, N + 1)) - lost
    else:
        assert found.reason in (Reason.COHORT_TOO_SMALL, Reason.UNMASK_SHORT)
        assert found.have is not None
        assert found.need is not None
        assert found.have < found.need
        assert isinstance(found, RoundAborted)
        assert not hasattr(found, "total")


def test_weights_and_slots_are_summed_exactly() -> None:
    weights = list(range(N))
    counts = [7 * client - 20 for client in range(N)]
    settings = SecureSumConfig(n_min=5, dropout=0.2, weight_max=9)
    found = secure_sum(
        VECTORS, weights, config=settings, slots={"examples": (100, counts)}, drops={2: "masked"}
    )
    kept = [client - 1 for client in found.survivors]
    assert found.weight == sum(weights[place] for place in kept)
    assert found.slots == {"examples": sum(counts[place] for place in kept)}
    assert np.array_equal(found.total, np.array(weights)[kept] @ VECTORS[kept])


def test_floats_without_masks_give_the_same_integers() -> None:
    vectors = np.random.default_rng(1).uniform(-0.5, 0.5, (N, 37))
    named = {"config": SETTINGS, "seed": 5, "drops": {4: "masked"}}
    masked, bare = secure_sum(vectors, **named), secure_sum(vectors, masks=False, **named)  # type: ignore[arg-type]
    assert np.array_equal(masked.total, bare.total)
    assert np.array_equal(masked.mean, bare.mean)
    assert (masked.masked, bare.masked, masked.insecure_rng) == (True, False, True)
    assert np.abs(masked.mean - vectors[[c - 1 for c in masked.survivors]].mean(axis=0)).max() < 2**-16
    again = secure_sum(vectors, **named)  # type: ignore[arg-type]
    assert again.transcript_sha256 == masked.transcript_sha256


def test_ids_of_any_size() -> None:
    ids = [2**63, 5, 17, 2**40, 9, 1, 3, 4, 8, 6]
    found = secure_sum(VECTORS, ids=ids, config=SETTINGS, drops={17: "share"})
    assert found.survivors == tuple(sorted(set(ids) - {17}))
    assert np.array_equal(found.total, VECTORS.sum(axis=0) - VECTORS[2])


@pytest.mark.parametrize("bits", [20, 24, 27, 32, 33, 40, 61, 64])
def test_any_ring(bits: int) -> None:
    settings = SecureSumConfig(n_min=5, dropout=0.2, bits=bits)
    found = secure_sum(VECTORS, config=settings, drops={4: "masked"})
    assert np.array_equal(found.total, plain(found.survivors))


@pytest.mark.parametrize("mechanism", ["skellam", "discrete-gaussian"])
def test_noise_is_in_the_sum(mechanism: str) -> None:
    noise = {"mechanism": mechanism, "variance": 10_000, "corrupt": 1}
    settings = SecureSumConfig(n_min=9, dropout=0.1, clip=1.0, noise=noise)
    found = secure_sum(np.zeros((N, 2000)), config=settings, seed=2)
    assert found.exact
    assert 0.8 < found.total.std() / np.sqrt(10_000 * N / 8) < 1.25


@pytest.mark.parametrize(
    "record",
    ["CONFIG", "ADVERT", "U0", "SHARES", "U1", "RECEIPT", "SNAPSHOT", "U2", "AGREE", "CHARGED", "RESULT"],
)
def test_a_server_that_stops_goes_on(record: str) -> None:
    named = {"config": SETTINGS, "seed": 1, "drops": {3: "masked"}}
    found = secure_sum(VECTORS, crash={"server": record}, **named)  # type: ignore[arg-type]
    straight = secure_sum(VECTORS, **named)  # type: ignore[arg-type]
    assert np.array_equal(found.total, plain(found.survivors))
    assert found.transcript_sha256 == straight.transcript_sha256
    assert len(found.charged) == 1


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_stops_in_a_session_is_a_dropout(phase: str) -> None:
    found = secure_sum(VECTORS, config=SETTINGS, seed=1, crash={4: phase})
    assert np.array_equal(found.total, plain(found.survivors))
    assert (4 in found.survivors) == (phase in ("advertise", "agree", "unmask"))


def test_a_failed_attempt_is_repeated_among_those_who_answered() -> None:
    drops = dict.fromkeys((2, 4, 6), "masked")
    with pytest.raises(SecureSumAborted) as caught:
        secure_sum(VECTORS, config=SETTINGS, drops=drops)
    assert caught.value.reason == Reason.UNMASK_SHORT
    assert set(caught.value.clients) >= {2, 4, 6}
    found = secure_sum(VECTORS, config=SETTINGS, drops=drops, attempts=2)
    assert (found.survivors, found.attempts) == ((1, 3, 5, 7, 8, 9, 10), 2)
    assert np.array_equal(found.total, plain(found.survivors))


def test_after_a_release_there_is_no_second_attempt() -> None:
    drops = dict.fromkeys((2, 4, 6), "unmask")
    with pytest.raises(SecureSumAborted) as caught:
        secure_sum(VECTORS, config=SETTINGS, drops=drops, attempts=3)
    assert (caught.value.reason, caught.value.phase, caught.value.attempts) == (
        Reason.UNMASK_SHORT,
        "unmask",
        1,
    )


def test_too_few_clients_are_told_with_the_numbers() -> None:
    with pytest.raises(SecureSumAborted, match="COHORT_TOO_SMALL") as caught:
        secure_sum(VECTORS, config=SETTINGS, drops=dict.fromkeys(range(1, 7), "advertise"))
    error = caught.value
    assert (error.phase, error.have, error.need, error.clients) == ("advertise", 4, 5, (1, 2, 3, 4, 5, 6))


def test_messages_may_come_late_or_never() -> None:
    def wire(flight: InFlight, keys: Keys) -> list[InFlight]:
        if isinstance(flight.message, Masked) and flight.sender == 3:
            return [flight.until("unmask")]
        return [] if flight.sender == 5 else [flight]

    found = secure_sum(VECTORS, config=SETTINGS, wire=wire)
    assert found.survivors == (1, 2, 4, 6, 7, 8, 9, 10)
    assert found.exact
    assert Reason.LATE in {fault.reason for fault in found.faults if fault.client == 3}


def test_a_clock_that_jumps_ends_phases_and_nothing_worse() -> None:
    times = iter([0.0, 1e6, 2e6, 3e6, 4e6, 5e6, 6e6, 7e6, 8e6, 9e6])
    found = attempt(clock=lambda: next(times))
    if isinstance(found, SecureSumResult):
        assert found.exact
    else:
        assert found.reason in (Reason.COHORT_TOO_SMALL, Reason.UNMASK_SHORT)


def test_a_message_held_to_the_end_comes_when_nobody_waits_for_it() -> None:
    def wire(flight: InFlight, keys: Keys) -> InFlight:
        return flight.until("done") if isinstance(flight.message, Masked) and flight.sender == 3 else flight

    found = secure_sum(VECTORS, config=SETTINGS, wire=wire)
    assert 3 not in found.survivors
    assert {Reason.SESSION, Reason.LATE} <= {fault.reason for fault in found.faults if fault.client == 3}


def damaged(message: Message, rng: np.random.Generator) -> Message:
    """One field of a message that may be any bytes or numbers of its kind, changed at random."""
    name = str(rng.choice(list(vars(message))))
    value = getattr(message, name)
    if isinstance(value, bytes) and value:
        place = int(rng.integers(len(value)))
        value = value[:place] + bytes([value[place] ^ 1 << int(rng.integers(8))]) + value[place + 1 :]
    elif isinstance(value, tuple) and value:
        place = int(rng.integers(len(value)))
        value = value[:place] + (value[place + 1 :] if rng.random() < 0.5 else value[place - 1 :])
    return replace(message, **{name: value})


def lies(seed: int, chance: float) -> Wire:
    """The server says something else, to some: changed, crossed, stale, twice or not at all, and signed."""
    rng = np.random.default_rng(seed)
    said: list[Message] = []

    def wire(flight: InFlight, keys: Keys) -> list[InFlight]:
        if flight.sender != 0 or isinstance(flight.message, Config | Abort):
            return [flight]
        said.append(flight.message)
        if rng.random() > chance:
            return [flight]
        other = [
            lambda: damaged(flight.message, rng),
            lambda: said[int(rng.integers(len(said)))],
            lambda: flight.message,
        ][int(rng.integers(3))]()
        lie = replace(flight, raw=keys.sign(other, "server"))
        return [[lie], [lie, flight], [flight, lie], []][int(rng.integers(4))]

    return wire


def never_both(released: Mapping[int, tuple[int, int]], threshold: int) -> bool:
    return all(b < threshold or s < threshold for b, s in released.values())


@pytest.mark.parametrize("seed", range(15))
def test_whatever_the_server_says_no_owner_gives_both_secrets(seed: int) -> None:
    found = attempt(wire=lies(seed, 0.05 + 0.02 * (seed % 5)), drops={4: "masked"} if seed % 2 else {})
    assert never_both(found.released, 2 * (N - 1) // 3 + 1)
    if isinstance(found, SecureSumResult):
        assert np.array_equal(found.total, plain(found.survivors))


@pytest.mark.slow
def test_a_server_that_lies_for_a_long_time() -> None:
    for seed in range(100, 1100):
        found = attempt(wire=lies(seed, 0.1), drops={4: "masked"} if seed % 2 else {})
        assert never_both(found.released, 2 * (N - 1) // 3 + 1)
        if isinstance(found, SecureSumResult):
            assert np.array_equal(found.total, plain(found.survivors))


def test_a_policy_may_be_given_by_its_fields() -> None:
    found = secure_sum(VECTORS, config=SETTINGS, policies={2: {"n_min": 6}})
    assert found.survivors == (1, 3, 4, 5, 6, 7, 8, 9, 10)
    assert {fault.reason for fault in found.faults} == {Reason.POLICY}
    with pytest.raises(ConfigError, match="ClientPolicy"):
        secure_sum(VECTORS, config=SETTINGS, policies={2: {"least": 6}})


def test_an_abort_survives_the_way_to_another_process() -> None:
    error = attempt(drops=dict.fromkeys(range(1, 7), "share"))
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
    assert isinstance(error, SecureSumAborted)
    assert (str(again), again.reason, again.clients, again.faults) == (
        str(error), error.reason, error.clients, error.faults
    )  # fmt: skip


def test_a_signature_of_an_honest_client_is_not_to_be_had() -> None:
    def wire(flight: InFlight, keys: Keys) -> InFlight:
        keys.sign(flight.message, 3)
        return flight

    with pytest.raises(ConfigError, match="corrupt"):
        secure_sum(VECTORS, config=SETTINGS, wire=wire)


@pytest.mark.parametrize(
    "named",
    [
        {"drops": {11: "share"}},
        {"drops": {1: "shares"}},
        {"crash": {"clerk": 1}},
        {"order": "random"},
        {"attempts": 0},
        {"weights": [1]},
        {"ids": [1] * N},
        {"slots": {"count": (5, [1])}},
        {"config": SecureSumConfig(n_min=11)},
        {"config": SecureSumConfig(bits=17)},
    ],
)
def test_what_does_not_fit_is_an_error_before_anything_is_sent(named: dict[str, object]) -> None:
    with pytest.raises((ConfigError, SecureSumError)):
        secure_sum(VECTORS, **{"config": SETTINGS} | named)  # type: ignore[arg-type]


def test_a_large_upload_travels_in_chunks_and_its_size_is_known() -> None:
    vectors = np.random.default_rng(0).integers(-100, 100, (4, 2**19 + 3))
    settings = SecureSumConfig(n_min=3, corrupt=0, dropout=0.25, bits=32)
    found = secure_sum(vectors, config=settings, drops={2: "masked:partial"})
    assert np.array_equal(found.total, vectors[[0, 2, 3]].sum(axis=0))
    assert 0 < found.upload_bytes - 4 * (2**19 + 4) < 500


@pytest.mark.slow
def test_a_large_ring_with_everything_that_happens_in_practice() -> None:
    vectors = np.random.default_rng(0).integers(-9, 10, (300, 50))
    drops = {**dict.fromkeys(range(3, 9), "masked"), **dict.fromkeys(range(20, 24), "share")}
    drops |= {30: "agree", 40: "unmask", 50: "masked:late"}
    settings = SecureSumConfig(corrupt=0.05, dropout=0.05)
    found = secure_sum(vectors, config=settings, drops=drops, crash={"server": "SNAPSHOT"}, order=3)
    assert np.array_equal(found.total, vectors[[client - 1 for client in found.survivors]].sum(axis=0))
    assert len(found.survivors) == 300 - 11
    assert {(fault.reason, fault.client) for fault in found.faults} == {(Reason.LATE, 50)}
    assert never_both(found.released, 45)
