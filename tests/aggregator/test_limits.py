"""What a device and an address may ask of the server, with a clock that the test turns."""

import pytest

from mycelia.aggregator.limits import Gate, Limits, Rates
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.engine.errors import ConfigError


def refused(limit: str, call: object, *arguments: object) -> None:
    with pytest.raises(Problem) as caught:
        call(*arguments)  # type: ignore[operator]
    assert caught.value.reason is Reason.RATE
    assert f"`{limit}`" in caught.value.rule


def test_streams_of_an_address_and_of_all() -> None:
    gate = Gate(Limits(streams=3, address_streams=2))
    gate.enter("a", 0)
    gate.enter("a", 0)
    refused("address_streams", gate.enter, "a", 0)
    gate.enter("b", 0)
    refused("streams", gate.enter, "c", 0)
    gate.leave("a")
    gate.enter("c", 0)


def test_never_more_than_so_many_handshakes_in_any_second() -> None:
    gate = Gate(Limits(handshakes=200))
    let_in = []
    for millisecond in range(0, 5000):
        try:
            gate.enter(f"{millisecond}", millisecond / 1000)
        except Problem:
            continue
        let_in.append(millisecond)
    for first in let_in:
        assert sum(first <= other < first + 1000 for other in let_in) <= 200
    assert len(let_in) >= 500  # and at least half as many get through


def test_handshakes_of_an_address() -> None:
    gate = Gate(Limits(address_handshakes=2))
    for _ in range(20):
        gate.enter("a", 0)
    refused("address_handshakes", gate.enter, "a", 0)
    gate.enter("b", 0)
    gate.enter("a", 0.6)
    refused("address_handshakes", gate.enter, "a", 0.6)


def test_hellos_that_fail() -> None:
    gate = Gate(Limits(address_failures=3))
    for _ in range(3):
        gate.enter("a", 0)
        gate.failed("a", 0)
    refused("address_failures", gate.enter, "a", 0)
    gate.enter("b", 0)
    refused("address_failures", gate.enter, "a", 19)
    gate.enter("a", 21)  # 3 a minute


def test_frames_and_bytes_of_a_device() -> None:
    rates = Rates(Limits(frames=5, frame_bytes=1000))
    for _ in range(50):
        rates.frame(7, 1, 0)
    refused("frames", rates.frame, 7, 1, 0)
    rates.frame(8, 16_000, 0)
    refused("frame_bytes", rates.frame, 8, 1, 0)
    rates.frame(8, 1000, 1.0)
    rates.frame(7, 1, 0.25)
    refused("frames", rates.frame, 7, 1, 0.25)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_no_limit_is_no_setting(value: float) -> None:
    with pytest.raises(ConfigError, match="frames"):
        Limits(frames=value)
