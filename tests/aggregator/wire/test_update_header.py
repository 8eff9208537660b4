"""The header of an update is bound to client, position and payload; any other bytes are refused."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.update_header import MAX_NUMBERS, UpdateHeader
from mycelia.privacy.secagg.keys import Identity
from tests.aggregator.wire.examples import AT, HASH, NONCE, damage

IDENTITY = Identity(bytes(32))
HEADER = UpdateHeader(
    7, AT, HASH, NONCE, {"params": 12.0, "loss": 0.5}, {"loss_sum": -1e300, "examples": 3.0}, 3, 2
)


def verified(data: bytes, signature: bytes, key: bytes = IDENTITY.public, client: int = 7) -> UpdateHeader:
    return UpdateHeader.verified(data, signature, key=key, client=client, at=AT, sha256=HASH)


def test_a_header_comes_back() -> None:
    found = verified(*HEADER.sign(IDENTITY))
    assert found == HEADER
    assert list(found.weights) == ["params", "loss"]
    assert found.weight == 12.0


def test_a_header_is_bound_to_what_is_offered() -> None:
    data, signature = HEADER.sign(IDENTITY)
    with pytest.raises(Problem, match="does not verify"):
        verified(data, signature, key=Identity(bytes([1]) * 32).public)
    with pytest.raises(Problem, match="does not verify"):
        verified(data, b"")
    with pytest.raises(Problem, match="of client 7"):
        verified(data, signature, client=8)
    for other in (
        replace(HEADER, at=Position(AT.run, AT.round + 1, AT.attempt)),
        replace(HEADER, at=Position("another", AT.round, AT.attempt)),
        replace(HEADER, sha256=NONCE),
    ):
        with pytest.raises(Problem, match="that are offered") as caught:
            verified(*other.sign(IDENTITY))
        assert caught.value.reason is Reason.BAD_PAYLOAD


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_are_positive_and_finite(weight: float) -> None:
    with pytest.raises(Problem, match="weight") as caught:
        UpdateHeader.decode(replace(HEADER, weights={"params": weight}).encode())
    assert caught.value.reason is Reason.WEIGHT


def test_there_is_a_weight_and_metrics_are_finite() -> None:
    with pytest.raises(Problem, match="no weight"):
        UpdateHeader.decode(replace(HEADER, weights={}).encode())
    with pytest.raises(Problem, match="metric 'loss_sum' is nan"):
        UpdateHeader.decode(replace(HEADER, metrics={"loss_sum": float("nan")}).encode())


def test_there_are_not_too_many_numbers() -> None:
    with pytest.raises(Problem, match="33 metrics"):
        replace(HEADER, metrics={str(i): 1.0 for i in range(MAX_NUMBERS + 1)}).encode()


def decoded(data: bytes) -> None:
    try:
        header = UpdateHeader.decode(data)
    except Problem as problem:
        assert problem.reason in (Reason.FRAME, Reason.WEIGHT, Reason.BAD_PAYLOAD)  # noqa: PT017
    else:
        assert header.encode() == data


@settings(max_examples=200, deadline=None)
@given(st.binary())
def test_any_bytes(data: bytes) -> None:
    decoded(data)
    decoded(HEADER.encode()[:15] + data)


@pytest.mark.parametrize("rounds", [3_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_many_damaged_headers(rounds: int) -> None:
    draw, whole = random.Random(11), HEADER.encode()
    for _ in range(rounds):
        decoded(damage(whole, draw))
