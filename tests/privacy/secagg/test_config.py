"""Settings and the rounds they become; refusals, each with what would pass."""

import copy
import tomllib
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycelia.engine.config import Strict, load_config, to_toml
from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.canonical import PHASES, Reason, SecureSumError
from mycelia.privacy.secagg.config import SecureSumConfig, SettingsRefused, check_round
from mycelia.privacy.secagg.encoding import WEIGHT
from mycelia.privacy.secagg.graph import calculate
from mycelia.privacy.secagg.noise import NoiseShare
from mycelia.privacy.secagg.round_config import Graph, Mechanism, NoiseBlock, RoundConfig, ThresholdRule

HASHES = dict.fromkeys(("model_sha256", "schema_sha256", "task_sha256", "roster_sha256"), bytes(32))
NOISE = {"mechanism": "skellam", "variance": 10**6, "corrupt": 2}


def settings(**changes: Any) -> SecureSumConfig:
    return SecureSumConfig(**changes)


def a_round(config: SecureSumConfig, clients: int | None = 20, size: int = 10, **named: Any) -> RoundConfig:
    return config.round_config(
        job="test", round=1, nonce=bytes(32), size=size, clients=clients, **HASHES, **named
    )


def refused(config: SecureSumConfig, reason: Reason, *arguments: Any, **named: Any) -> SettingsRefused:
    with pytest.raises(SettingsRefused) as error:
        a_round(config, *arguments, **named)
    assert error.value.reason is reason
    return error.value


# --- settings ----------------------------------------------------------------------------------------------


def test_the_fields_and_their_defaults() -> None:
    assert dict(SecureSumConfig()) == {
        "neighbours": "auto", "threshold": "auto", "bits": "auto", "frac_bits": 16, "value_bound": 2**15,
        "clip": None, "weight_max": 1, "n_min": "auto", "n_max": None, "threat": "active", "corrupt": 0.1,
        "dropout": 0.1, "noise": None, "rotate": False, "deadlines": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "off"},
        {"treat": "active"},
        {"threat": ""},
        {"threat": "none"},
        {"threat": None},
        {"neighbours": ""},
        {"neighbours": None},
        {"neighbours": 1},
        {"neighbours": 2.0},
        {"neighbours": True},
        {"neighbours": "10"},
        {"threshold": 1},
        {"threshold": "two-thirds"},
        {"bits": 7},
        {"bits": 65},
        {"bits": "Auto"},
        {"frac_bits": -1},
        {"frac_bits": 63},
        {"value_bound": 0},
        {"clip": 0.0},
        {"clip": float("inf")},
        {"clip": float("nan")},
        {"clip": "1"},
        {"weight_max": 0},
        {"n_min": 2},
        {"n_max": 2},
        {"corrupt": 1.0},
        {"corrupt": -0.1},
        {"dropout": 1.0},
        {"rotate": 1},
        {"rotate": "yes"},
        {"noise": {}},
        {"noise": ""},
        {"noise": "skellam"},
        {"noise": NOISE | {"mechanism": ""}},
        {"noise": NOISE | {"mechanism": "gaussian"}},
        {"noise": NOISE | {"variance": 0}},
        {"noise": NOISE | {"variance": float("nan")}},
        {"noise": NOISE | {"variance": True}},
        {"noise": NOISE | {"corrupt": -1}},
        {"noise": NOISE | {"std": 3}},
        {"noise": {"mechanism": "skellam", "variance": 3}},
        {"deadlines": {"train": 3.0}},
        {"deadlines": {"masked": 0.0}},
        {"deadlines": 600},
        # contradictions
        {"n_min": 10, "n_max": 9},
        {"noise": NOISE, "weight_max": 2},
        {"noise": NOISE | {"corrupt": 5}, "n_min": 5},
        {"clip": 2.0**-17},
        {"clip": 2.0**47},
        {"neighbours": 10, "threshold": 11},
    ],
)
def test_settings_that_are_none(changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsRefused) as error:
        SecureSumConfig(**changes)
    assert error.value.reason is Reason.CONFIG
    assert isinstance(error.value, ConfigError | SecureSumError)
    assert error.value.exit_code == 2
    assert next(iter(changes)).split("_")[0] in str(error.value)
    with pytest.raises(ConfigError):
        load_config(SecureSumConfig, changes)


def test_a_refusal_names_every_setting() -> None:
    with pytest.raises(ConfigError) as error:
        SecureSumConfig(threat="", treat="active", n_min=2)  # type: ignore[call-arg, arg-type]
    text = str(error.value)
    assert "threat = ''" in text
    assert "did you mean 'threat'" in text
    assert 'n_min = 2: must be "auto" or a whole number from 3 to 32768' in text


class Table(Strict):
    secure_sum: SecureSumConfig | None = None


def test_the_block_in_a_file() -> None:
    block = {"n_min": 5, "noise": NOISE, "clip": 1.0, "deadlines": {"masked": 60.0}}
    loaded = load_config(Table, {"secure_sum": block}, ["secure_sum.corrupt=0.2"]).secure_sum
    assert loaded == SecureSumConfig(**block, corrupt=0.2)
    assert load_config(SecureSumConfig, tomllib.loads(to_toml(SecureSumConfig(**block)))) == SecureSumConfig(
        **block
    )
    with pytest.raises(ConfigError, match=r"secure_sum: CONFIG: threat = ''"):
        load_config(Table, {"secure_sum": {"threat": ""}})


def test_a_refusal_is_rebuilt_whole() -> None:
    error = refused(settings(bits=20), Reason.OVERFLOW)
    again = copy.deepcopy(error)
    assert (type(again), again.reason, again.need, str(again)) == (
        SettingsRefused, Reason.OVERFLOW, error.need, str(error),
    )  # fmt: skip


# --- cohorts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dropout", "clients", "n_min"),
    [
        (0.1, 10, 9), (0.1, 20, 18), (0.1, 11, 10), (0.1, 3, 3), (0.0, 7, 7), (0.2, 15, 12), (0.25, 30, 23),
        (0.07, 100, 93),
    ],
)  # fmt: skip
def test_n_min_is_who_stays(dropout: float, clients: int, n_min: int) -> None:
    found = a_round(settings(dropout=dropout, corrupt=0.0, threat="passive"), clients)
    assert (found.n_min, found.n_max) == (n_min, clients)


def test_cohorts() -> None:
    assert a_round(settings(n_max=30), None).n_min == 27
    found = a_round(settings(n_max=30), 20)
    assert (found.n_min, found.n_max) == (18, 30)
    assert a_round(settings(n_min=4), 20).n_min == 4
    for config, clients in [
        (settings(), None), (settings(), 2), (settings(), 0), (settings(n_max=10), 11),
        (settings(n_min=21), 20), (settings(), 2**15 + 1),
    ]:  # fmt: skip
        refused(config, Reason.CONFIG, clients)


@pytest.mark.parametrize(
    ("rate", "ppm"), [(0.1, 100_000), (0.07, 70_000), (0.29, 290_000), (1 / 3, 333_334), (0.0, 0), (1e-9, 1)]
)
def test_rates_in_parts_per_million(rate: float, ppm: int) -> None:
    found = a_round(settings(corrupt=rate, dropout=0.0, threat="passive"), 20)
    assert (found.corrupt_ppm, found.dropout_ppm) == (ppm, 0)


# --- neighbours --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [3, 4, 5, 10, 20, 100, 256])
def test_all_are_neighbours_up_to_256(clients: int) -> None:
    found = a_round(settings(), clients)
    assert (found.graph, found.k) == (Graph.COMPLETE, clients - 1)
    assert (found.threshold_rule, found.t) == (ThresholdRule.TWO_THIRDS, 2 * (clients - 1) // 3 + 1)


@pytest.mark.parametrize(
    ("threat", "corrupt", "dropout", "clients", "k", "t"),
    [  # the published table; n_min is n_max there
        ("passive", 0.05, 0.05, 300, 24, 14),
        ("passive", 0.1, 0.1, 1000, 48, 27),
        ("active", 0.05, 0.05, 1000, 98, 78),
        ("active", 0.1, 0.1, 1000, 178, 136),
        ("active", 0.2, 0.1, 300, 162, 133),
        ("active", 0.1, 0.1, 10_000, 300, 218),
    ],
)
def test_beyond_that_the_least_that_is_safe(
    threat: str, corrupt: float, dropout: float, clients: int, k: int, t: int
) -> None:
    config = settings(threat=threat, corrupt=corrupt, dropout=dropout, n_min=clients)
    found = a_round(config, clients)
    assert (found.graph, found.threshold_rule, found.k, found.t) == (Graph.RING, ThresholdRule.FIXED, k, t)


def test_neighbours_as_given() -> None:
    passive = {"threat": "passive"}
    found = a_round(settings(neighbours=10, threshold=6, **passive), 20)
    assert (found.graph, found.k, found.threshold_rule, found.t) == (Graph.RING, 10, ThresholdRule.FIXED, 6)
    found = a_round(settings(neighbours=19, **passive), 20)
    assert (found.graph, found.threshold_rule) == (Graph.COMPLETE, ThresholdRule.TWO_THIRDS)
    found = a_round(settings(neighbours=500, threshold=14, **passive), 20)
    assert (found.graph, found.k, found.threshold_rule, found.t) == (
        Graph.COMPLETE,
        19,
        ThresholdRule.FIXED,
        14,
    )
    found = a_round(settings(neighbours=98, **passive), 1000)
    assert (found.k, found.t) == (98, 50)  # the least above half
    assert a_round(settings(neighbours=98, threshold=60, **passive), 1000).t == 60
    refused(settings(neighbours=11, **passive), Reason.WEAK_PARAMETERS, 20)  # a ring has two equal sides


def test_a_complete_graph_whose_two_thirds_would_not_return() -> None:
    config = settings(threat="passive", dropout=0.4, corrupt=0.05, n_min=100)
    found = a_round(config, 100)
    assert found.threshold_rule == ThresholdRule.FIXED
    rates = {"threat": 0, "corrupt_ppm": 50_000, "dropout_ppm": 400_000}
    assert calculate(100, found.k, found.t, **rates).safe
    assert not calculate(100, 99, 67, **rates).safe


@pytest.mark.parametrize(
    "changes",
    [
        {"neighbours": 30, "threshold": 10},
        {"neighbours": 30, "threshold": 30},
        {"neighbours": 20},
        {"threshold": 50},
        {"threshold": 120},
        {"threat": "passive", "neighbours": 4},
    ],
)
def test_weak_neighbours_are_told_the_least_that_pass(changes: dict[str, Any]) -> None:
    error = refused(settings(**changes), Reason.WEAK_PARAMETERS, 100)
    k, t = (int(part.split("=")[1]) for part in error.allowed.split(","))
    assert f"neighbours = {k}, threshold = {t}" in str(error)
    least = settings(**{**changes, "neighbours": k, "threshold": t})
    assert a_round(least, 100).t == t
    refused(settings(**{**changes, "neighbours": k, "threshold": t - 1}), Reason.WEAK_PARAMETERS, 100)
    for threshold in range(2, k - 1):
        refused(
            settings(**{**changes, "neighbours": k - 2, "threshold": threshold}), Reason.WEAK_PARAMETERS, 100
        )


def test_where_nothing_passes() -> None:
    refused(settings(threat="passive", dropout=0.9), Reason.WEAK_PARAMETERS, 100)
    refused(settings(corrupt=0.7), Reason.WEAK_PARAMETERS, 50)


# --- the ring's size ---------------------------------------------------------------------------------------


@given(st.integers(3, 200), st.integers(1, 2**30), st.integers(1, 2**16), st.integers(1, 2**40))
def test_bits_are_as_few_as_cannot_overflow(clients: int, bound: int, weight: int, slot: int) -> None:
    config = {"value_bound": bound, "weight_max": weight, "threat": "passive", "dropout": 0.0, "corrupt": 0.0}
    left = max(clients * weight * (bound + 1), clients * slot, clients * weight)
    needed = 1 + left.bit_length()
    found = a_round(settings(**config), clients, slots={"examples": slot})
    assert found.bits == max(8, needed)
    assert left < 2 ** (found.bits - 1)
    if needed > 8:
        error = refused(
            settings(**config, bits=needed - 1), Reason.OVERFLOW, clients, slots={"examples": slot}
        )
        assert (error.have, error.need) == (needed - 1, needed)
    assert a_round(
        settings(**config, bits=needed + 1 if needed > 7 else 9), clients, slots={"examples": slot}
    )


def test_known_bits() -> None:
    assert a_round(settings(), 255).bits == 24
    assert a_round(settings(), 1024).bits == 27
    assert a_round(settings(weight_max=255), 1024).bits == 34
    error = refused(settings(value_bound=2**61, weight_max=2), Reason.OVERFLOW, 100)
    assert (error.have, error.need) == (64, 70)
    assert "lower" in error.fix


# --- what travels ------------------------------------------------------------------------------------------


def test_a_round_has_what_was_set() -> None:
    config = settings(
        frac_bits=20, value_bound=2**20, clip=3.5, rotate=True, weight_max=7, corrupt=0.05, dropout=0.0,
        deadlines={"masked": 60, "agree": 0.5}, bits=40,
    )  # fmt: skip
    found = config.round_config(
        job="job", round=4, attempt=2, nonce=bytes([7] * 32), model_sha256=bytes([1] * 32), size=1000,
        schema_sha256=bytes([2] * 32), task_sha256=bytes([3] * 32), roster_sha256=bytes([4] * 32), clients=20,
        slots={"examples": 500, "clipped": 1000}, seal=1,
    )  # fmt: skip
    expected = {
        "version": 1, "job": "job", "round": 4, "attempt": 2, "nonce": bytes([7] * 32),
        "model_sha256": bytes([1] * 32), "schema_sha256": bytes([2] * 32), "task_sha256": bytes([3] * 32),
        "roster_sha256": bytes([4] * 32), "n_min": 20, "n_max": 20, "graph": 0, "k": 19, "threshold_rule": 1,
        "t": 13, "threat": 1, "corrupt_ppm": 50_000, "dropout_ppm": 0, "bits": 40, "dimension": 1024,
        "slots": ((WEIGHT, 7), ("examples", 500), ("clipped", 1000)), "frac_bits": 20, "value_bound": 2**20,
        "l2_steps": 3670016, "rotation": 1, "noise": NoiseBlock(),
        "deadlines_ms": (30_000, 30_000, 60_000, 500, 20_000), "seal": 1,
    }  # fmt: skip
    assert {field.name: getattr(found, field.name) for field in fields(found)} == expected
    assert RoundConfig.decode(found.encode()) == found
    assert a_round(settings()).deadlines_ms == (30_000, 30_000, 500_000, 20_000, 20_000)
    assert sum(a_round(settings()).deadlines_ms) == 600_000
    assert len(PHASES) == 5


@given(st.floats(2.0**-15, 2.0**40), st.integers(0, 40))
def test_the_clip_bound_is_rounded_down(clip: float, frac_bits: int) -> None:
    exact = Fraction(clip) * 2**frac_bits
    if exact < 1 or exact >= 2**63:
        with pytest.raises(SettingsRefused):
            SecureSumConfig(clip=clip, frac_bits=frac_bits)
    else:
        steps = SecureSumConfig(clip=clip, frac_bits=frac_bits).l2_steps
        assert steps <= exact < steps + 1


@pytest.mark.parametrize(
    "slots",
    [
        {WEIGHT: 3}, {"": 3}, {"a": 0}, {"a": -1}, {"a": 1.0}, {"a": True}, {"a" * 300: 1}, {"clipped": 9},
        {f"slot {number}": 1 for number in range(64)},
    ],
)  # fmt: skip
def test_slots_that_are_none(slots: dict[str, Any]) -> None:
    refused(settings(), Reason.CONFIG, slots=slots)


@pytest.mark.parametrize("named", [{"size": 0}, {"size": -1}, {"nonce": b""}, {"job": ""}, {"seal": 2}])
def test_rounds_that_are_none(named: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "job": "j",
        "round": 0,
        "nonce": bytes(32),
        "size": 3,
        "clients": 5,
        **HASHES,
    }
    with pytest.raises(SettingsRefused) as error:
        settings().round_config(**(arguments | named))
    assert error.value.reason is Reason.CONFIG


# --- noise -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [("skellam", Mechanism.SKELLAM), ("discrete-gaussian", Mechanism.DISCRETE_GAUSSIAN)],
)
def test_noise_in_a_round(name: str, mechanism: Mechanism) -> None:
    found = a_round(settings(noise=NOISE | {"mechanism": name, "variance": 1234567.5}, clip=1.0), 20, 100)
    assert found.noise == NoiseBlock(mechanism, 1234568, 2, 606_530_660)
    share = NoiseShare(mechanism, 1234568, 18 - 2)
    assert NoiseShare.of(found) == share
    left = 20 * (2**15 + 1 + share.tail(20 * 100)[0])
    assert found.bits == 1 + left.bit_length()
    error = refused(
        settings(noise=NOISE | {"mechanism": name, "variance": 1234567.5}, clip=1.0, bits=found.bits - 1),
        Reason.OVERFLOW, 20, 100,
    )  # fmt: skip
    assert error.need == found.bits


def test_noise_that_is_none() -> None:
    config = settings(noise=NOISE | {"corrupt": 18}, clip=1.0)
    refused(config, Reason.CONFIG, 20)  # n_min is 18: nobody would be left to add it
    assert a_round(settings(noise=NOISE | {"corrupt": 17}, clip=1.0), 20).noise.corrupt == 17
    refused(settings(noise=NOISE, clip=1.0), Reason.CONFIG, slots={"examples": 5})  # slots carry no noise
    tiny = {"mechanism": "discrete-gaussian", "variance": 3, "corrupt": 0}
    refused(settings(noise=tiny, clip=1.0), Reason.CONFIG, 20)
    refused(settings(noise=NOISE | {"variance": 2**62}, clip=1.0), Reason.CONFIG, 20)


# --- what each client repeats ------------------------------------------------------------------------------


def check(config: RoundConfig, reason: Reason, size: int = 10, **named: Any) -> SecureSumError:
    with pytest.raises(SecureSumError) as error:
        check_round(config, size, **named)
    assert error.value.reason is reason
    return error.value


def test_a_client_repeats_the_proofs() -> None:
    good = a_round(settings(), 1000)
    assert check_round(good, 10).config is good
    assert check(replace(good, bits=good.bits - 1), Reason.OVERFLOW).need == good.bits
    assert check(replace(good, t=good.t - 1), Reason.WEAK_PARAMETERS).allowed == "k = 178, t = 136"
    check(replace(good, k=150), Reason.WEAK_PARAMETERS)
    check(replace(good, n_min=150), Reason.WEAK_PARAMETERS)  # so small a cohort could be opened too
    check(good, Reason.CONFIG, size=9)
    check(good, Reason.WEAK_PARAMETERS, corrupt_ppm=200_000)
    check_round(good, 10, corrupt_ppm=1)
    check(replace(good, corrupt_ppm=10**6), Reason.CONFIG)


def test_recovery_is_the_servers_concern() -> None:
    config = replace(a_round(settings(threat="passive"), 100), dropout_ppm=400_000)
    check(config, Reason.WEAK_PARAMETERS)
    check_round(config, 10, recovery=False)
