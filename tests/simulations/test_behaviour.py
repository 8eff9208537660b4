"""How devices behave: exact shares, rates, durations, and that all of it repeats."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, kstest

from mycelia.engine.config import load_config
from mycelia.engine.errors import ConfigError
from mycelia.simulations.behaviour import Behaviour

MANY = np.arange(20_000)


def behaviour(**tables: Any) -> Behaviour:
    return load_config(Behaviour, tables)


def close_to(observed: int, n: int, rate: float) -> bool:
    return binomtest(observed, n, rate).pvalue > 1e-4


def test_as_it_stands_everyone_answers_at_once() -> None:
    plain = Behaviour()
    fates = plain.fates(0, np.array([4, 2]), round=3, steps=100, bytes_up=10**9, bytes_down=10**9)
    assert plain.ideal
    assert fates.clients.tolist() == [4, 2]
    assert fates.stage.tolist() == [0, 0]
    assert fates.available.all()
    assert fates.ready_s.tolist() == fates.end_s.tolist() == [0, 0]


@pytest.mark.parametrize(
    "tables",
    [
        {"dropout": 0.1},
        {"dropout": {"train": 0.1}},
        {"availability": 0.9},
        {"availability": {"night": 0.5}},
        {"speed": {"steps_per_s": 10}},
        {"network": {"latency_s": 0.1}},
        {"network": {"up_mbit": 1}},
    ],
)
def test_any_setting_ends_the_ideal(tables: dict) -> None:
    assert not behaviour(**tables).ideal


# Dropping out


@given(st.integers(0, 40), st.floats(0, 1), st.integers(0, 1000))
def test_a_share_is_exact_and_spread_over_the_phases(n: int, share: float, round: int) -> None:
    fates = behaviour(dropout=share).fates(1, np.arange(n) * 7, round=round)
    lost = math.floor(share * n + 0.5)
    by_stage = np.bincount(fates.stage, minlength=4)
    assert by_stage[0] == n - lost
    assert by_stage[1:].max() - by_stage[1:].min() <= 1


def test_who_drops_out_does_not_depend_on_the_order_of_asking() -> None:
    half = behaviour(dropout=0.5)
    clients = np.array([3, 8, 1, 5, 9, 2])
    forwards = half.fates(0, clients, round=1)
    backwards = half.fates(0, clients[::-1], round=1)
    assert dict(zip(forwards.clients, forwards.stage, strict=True)) == dict(
        zip(backwards.clients, backwards.stage, strict=True)
    )
    other = half.fates(0, clients, round=2)
    assert forwards.stage.tolist() != other.stage.tolist()


def test_rates_per_phase_are_conditional_on_having_come_so_far() -> None:
    fates = behaviour(dropout={"configure": 0.1, "train": 0.2, "upload": 0.5}).fates(0, MANY, round=0)
    counts = np.bincount(fates.stage, minlength=4)
    for stage, rate in [(1, 0.1), (2, 0.9 * 0.2), (3, 0.9 * 0.8 * 0.5), (0, 0.9 * 0.8 * 0.5)]:
        assert close_to(int(counts[stage]), len(MANY), rate)


def test_rates_of_zero_and_one() -> None:
    assert set(behaviour(dropout={"train": 1.0}).fates(0, MANY, round=0).stage.tolist()) == {2}
    everyone = behaviour(dropout=1.0).fates(0, np.arange(9), round=0)
    assert np.bincount(everyone.stage).tolist() == [0, 3, 3, 3]


def test_a_device_asked_again_has_new_luck() -> None:
    half = behaviour(dropout={"train": 0.5})
    first, second = (half.fates(0, MANY, round=0, attempt=a).stage > 0 for a in (1, 2))
    assert close_to(int((first & second).sum()), len(MANY), 0.25)


def test_what_the_round_is_told() -> None:
    fates = behaviour(dropout={"configure": 0.3, "train": 0.3, "upload": 0.3}, availability=0.8).fates(
        0, MANY, round=0
    )
    told = {fates.loss(i) for i in np.flatnonzero(fates.stage)}
    assert told == {
        ("configure", "not available"),
        ("configure", "dropped out in configure"),
        ("train", "dropped out in train"),
        ("train", "dropped out in upload"),
    }


# Being available


def test_availability_is_a_coin_per_round_and_client() -> None:
    some = behaviour(availability=0.3)
    first, second = (some.available(0, MANY, round=r) for r in (0, 1))
    assert close_to(int(first.sum()), len(MANY), 0.3)
    assert close_to(int((first & second).sum()), len(MANY), 0.09)
    fates = some.fates(0, MANY, round=0)
    assert (fates.available == first).all()
    assert (fates.stage[~first] == 1).all()
    assert (fates.stage[first] == 0).all()


def test_day_and_night_follow_the_simulated_time() -> None:
    sleepy = behaviour(availability={"day": 1.0, "night": 0.0, "day_hours": 6})
    hours = np.array([sleepy.available(0, MANY, round=0, now_s=h * 3600) for h in range(48)])
    assert close_to(int(hours[0].sum()), len(MANY), 6 / 24)
    assert (hours[:24].sum(axis=0) == 6).all()  # each device is awake for six hours of the day
    assert (hours[24:] == hours[:24]).all()  # and for the same ones tomorrow
    changes = (hours[:24] != np.roll(hours[:24], 1, axis=0)).sum(axis=0)
    assert (changes == 2).all()  # in one piece


# Taking time


def test_durations_without_spread_are_exact() -> None:
    timed = behaviour(speed={"steps_per_s": 4}, network={"down_mbit": 16, "up_mbit": 8, "latency_s": 0.25})
    fates = timed.fates(
        0, np.array([1, 2]), round=0, steps=np.array([20, 40]), bytes_down=2_000_000, bytes_up=3_000_000
    )
    assert fates.ready_s.tolist() == [0.25, 0.25]
    assert fates.end_s.tolist() == [0.25 + 1 + 5 + 3, 0.25 + 1 + 10 + 3]


def test_speed_and_bandwidth_are_log_normal_and_stay_with_the_device() -> None:
    spread = behaviour(speed={"steps_per_s": 2, "sigma": 0.5})
    first, second = (spread.fates(0, MANY, round=r, steps=8).end_s for r in (0, 1))
    assert (first == second).all()
    assert kstest((np.log(first) - np.log(4)) / 0.5, "norm").pvalue > 1e-4
    wire = behaviour(network={"up_mbit": 8, "sigma": 1.0}).fates(0, MANY, round=0, bytes_up=1_000_000)
    assert kstest(np.log(wire.end_s), "norm").pvalue > 1e-4


def test_stragglers_are_slow_for_one_round() -> None:
    some = behaviour(speed={"steps_per_s": 1}, stragglers={"share": 0.25, "slowdown": 8})
    first, second = (some.fates(0, MANY, round=r, steps=3).end_s for r in (0, 1))
    assert set(first) == {3.0, 24.0}
    assert close_to(int((first == 24).sum()), len(MANY), 0.25)
    assert close_to(int(((first == 24) & (second == 24)).sum()), len(MANY), 0.0625)


def test_a_device_vanishes_before_its_stage_ends() -> None:
    tables = {"speed": {"steps_per_s": 1}, "network": {"down_mbit": 8, "up_mbit": 8, "latency_s": 1}}
    work = {"steps": 10, "bytes_down": 2_000_000, "bytes_up": 4_000_000}  # 1, 2, 10 and 4 seconds
    for phase, low, high in [("configure", 1, 1), ("train", 3, 13), ("upload", 13, 17)]:
        end = behaviour(dropout={phase: 1.0}, **tables).fates(0, MANY, round=0, **work).end_s
        assert end.min() >= low
        assert end.max() <= high
        if low < high:
            assert kstest((end - low) / (high - low), "uniform").pvalue > 1e-4


def test_a_client_alone_has_the_same_fate_as_in_company() -> None:
    busy = behaviour(
        dropout={"train": 0.3},
        availability=0.8,
        speed={"steps_per_s": 3, "sigma": 1.0},
        stragglers=0.2,
        network={"up_mbit": 2, "sigma": 0.5, "latency_s": 0.1},
    )
    clients = np.array([11, 3, 7, 400])
    together = busy.fates(5, clients, round=9, steps=10, bytes_up=1000)
    for i, client in enumerate(clients):
        alone = busy.fates(5, np.array([client]), round=9, steps=10, bytes_up=1000)
        assert [field[0] for field in alone] == [field[i] for field in together]


# Bad settings


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"dropout": 1.1}, "dropout.share = 1.1"),
        ({"dropout": -0.1}, "dropout.share = -0.1"),
        ({"dropout": True}, "dropout = True: must be a table"),
        ({"dropout": {"share": 0.1, "train": 0.1}}, "dropout.share: give the share of the cohort or rates"),
        ({"dropout": {"training": 0.1}}, "did you mean 'train'"),
        ({"availability": 2}, "availability.day = 2"),
        ({"availability": {"day_hours": 25}}, "availability.day_hours = 25"),
        ({"speed": {"sigma": 1.0}}, "speed.sigma: needs speed.steps_per_s"),
        ({"stragglers": 0.1}, "stragglers: needs speed.steps_per_s"),
        ({"stragglers": {"slowdown": 0.5}}, "stragglers.slowdown = 0.5"),
        ({"network": {"sigma": 0.1}}, "network.sigma: needs"),
        ({"network": {"up_mbit": -1}}, "network.up_mbit = -1"),
        ({"batery": 1}, "batery: unknown key"),
    ],
)
def test_bad_settings(tables: dict, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        behaviour(**tables)
    assert says in str(caught.value)


# Under a secure sum

SECURE_STAGES = (1, 5, 2, 3, 6, 7)


@given(st.integers(0, 40), st.floats(0, 1), st.integers(0, 1000))
def test_a_share_is_spread_over_the_six_phases_of_a_secure_sum(n: int, share: float, round: int) -> None:
    fates = behaviour(dropout=share).fates(1, np.arange(n) * 7, round=round, secure=True)
    by_stage = np.bincount(fates.stage, minlength=8)
    lost = math.floor(share * n + 0.5)
    assert by_stage[0] == n - lost
    assert by_stage[4] == 0
    each = by_stage[list(SECURE_STAGES)]
    assert each.sum() == lost
    assert each.max() - each.min() <= 1


def test_in_six_rounds_every_phase_has_its_turn() -> None:
    stages = {
        int(stage)
        for round in range(6)
        for stage in behaviour(dropout=0.1).fates(1, np.arange(10), round=round, secure=True).stage
    }
    assert stages == {0, *SECURE_STAGES}


@pytest.mark.parametrize(
    ("name", "stage"),
    [("configure", 1), ("sharing", 5), ("train", 2), ("upload", 3), ("agree", 6), ("unmask", 7)],
)
def test_rates_of_the_phases_of_a_secure_sum(name: str, stage: int) -> None:
    stages = behaviour(dropout={name: 0.3}).fates(3, MANY, round=1, secure=True).stage
    assert set(stages.tolist()) == {0, stage}
    assert close_to(int((stages == stage).sum()), len(MANY), 0.3)


def test_who_vanishes_behind_its_upload_takes_the_time_of_one() -> None:
    plain = behaviour(speed={"steps_per_s": 10})
    gone = behaviour(speed={"steps_per_s": 10}, dropout={"agree": 1.0})
    early = behaviour(speed={"steps_per_s": 10}, dropout={"sharing": 1.0})
    given_ = {"round": 1, "steps": 100, "secure": True}
    assert (
        gone.fates(0, MANY[:9], **given_).end_s.tolist() == plain.fates(0, MANY[:9], **given_).end_s.tolist()
    )
    assert early.fates(0, MANY[:9], **given_).end_s.tolist() == [0] * 9
    assert gone.fates(0, MANY[:9], **given_).loss(0)[1] == "dropped out in agree"
    assert early.fates(0, MANY[:9], **given_).loss(0) == ("configure", "dropped out in sharing")


def test_phases_of_a_secure_sum_are_told_apart() -> None:
    assert behaviour(dropout={"agree": 0.1}).dropout.secure
    assert not behaviour(dropout={"train": 0.1, "upload": 0.2}).dropout.secure
    with pytest.raises(ConfigError, match="not both"):
        behaviour(dropout={"share": 0.1, "unmask": 0.1})
