"""When a device tries again: no I/O, and the clock and the dice belong to the test."""

import math
import pickle
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycelia.aggregator.deadlines import derive
from mycelia.aggregator.wire.frames import STATUS, Reason
from mycelia.client.backoff import Backoff, Then, TransportError, reconnect_cap, then


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def longest(low: float, high: float) -> float:
    return high


def shortest(low: float, high: float) -> float:
    return low


def middle(low: float, high: float) -> float:
    return (low + high) / 2


def backoff(uniform: Callable[[float, float], float] = longest, cap_s: float = 60.0) -> tuple[Backoff, Clock]:
    clock = Clock()
    return Backoff(uniform, clock, cap_s=cap_s), clock


def test_one_second_doubled_up_to_the_cap() -> None:
    waits, _ = backoff()
    assert [waits.next() for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    waits, _ = backoff(cap_s=5)
    assert [waits.next() for _ in range(4)] == [1, 2, 4, 5]


def test_full_jitter_never_waits_for_nothing() -> None:
    waits, _ = backoff(shortest)
    assert all(0 < waits.next() < 0.1 for _ in range(50))


@given(st.integers(0, 2**32), st.integers(1, 200), st.floats(2, 60))
def test_every_wait_is_within_what_is_allowed(seed: int, failures: int, cap_s: float) -> None:
    waits = Backoff(random.Random(seed).uniform, Clock(), cap_s=cap_s)
    for number in range(failures):
        assert 0 < waits.next() <= min(2.0 ** min(number, 10), cap_s)


def test_waits_are_spread_over_the_whole_range() -> None:
    # Uniform on [0, cap]: mean cap / 2, and each of five equal parts holds about a fifth.
    many = []
    for seed in range(2000):
        waits = Backoff(random.Random(seed).uniform, Clock(), cap_s=1.0)
        many.append(waits.next())
    assert sum(many) / len(many) == pytest.approx(0.5, abs=0.03)
    parts = [sum(low <= 5 * wait < low + 1 for wait in many) for low in range(5)]
    assert min(parts) > 300


def test_a_completed_task_begins_anew_and_a_connection_does_not() -> None:
    waits, clock = backoff()
    for _ in range(5):
        waits.next()
    clock.now += 1000
    assert waits.next() == 32
    waits.reset()
    assert waits.next() == 1


def test_retry_at_overrides() -> None:
    waits, clock = backoff(middle)
    waits.retry_at(300)
    clock.now += 100
    assert waits.next() == pytest.approx(200)
    assert waits.next() == 0.5  # once only
    waits.retry_at(300)
    clock.now += 400
    assert waits.next() == 1.0  # over already


@given(st.integers(0, 2**32), st.floats(0.1, 3600))
def test_a_tenth_more_or_less(seed: int, delay: float) -> None:
    waits = Backoff(random.Random(seed).uniform, Clock())
    waits.retry_at(delay)
    assert 0.9 * delay - 1e-6 <= waits.next() <= 1.1 * delay + 1e-6


def test_no_server_sends_a_device_away_for_ever() -> None:
    waits, _ = backoff(middle)
    waits.retry_at(1e12)
    assert waits.next() == 86_400
    waits.retry_at(math.inf)
    assert waits.next() == 86_400


def test_the_operator_has_a_quarter_of_an_hour() -> None:
    waits, _ = backoff(middle)
    assert waits.next(Then.OPERATOR) == 900
    assert waits.next() == 0.5


@given(st.floats(40, 1e6))
def test_the_cap_is_that_of_the_budget(budget: float) -> None:
    waits = derive(budget).waits
    assert reconnect_cap(waits.heartbeat) == pytest.approx(waits.reconnect_cap)


OPERATOR = {
    Reason.BAD_HELLO, Reason.CERT_EXPIRED, Reason.NOT_ENROLLED, Reason.REVOKED, Reason.BAD_TOKEN,
    Reason.VERSION, Reason.STORE_CORRUPT,
}  # fmt: skip


@pytest.mark.parametrize("reason", list(Reason))
def test_what_follows_each_reason(reason: Reason) -> None:
    expected = Then.OPERATOR if reason in OPERATOR else Then.RETRY
    if reason is Reason.SUPERSEDED:
        expected = Then.STOP
    assert then(STATUS[reason], reason) is expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (14, Then.RETRY), (4, Then.RETRY), (10, Then.RETRY), (8, Then.RETRY), (13, Then.RETRY),
        (16, Then.OPERATOR), (7, Then.OPERATOR), (12, Then.OPERATOR), (15, Then.OPERATOR),
    ],
)  # fmt: skip
def test_what_follows_a_status_alone(code: int, expected: Then) -> None:
    assert then(code) is expected


def test_an_error_goes_through_processes() -> None:
    error = TransportError(
        Then.STOP, "found", rule="rule", fix="fix", who="who", reason=Reason.RATE, delay_s=2.0
    )
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (again.then, again.reason, again.delay_s, str(again)) == (Then.STOP, Reason.RATE, 2.0, str(error))
