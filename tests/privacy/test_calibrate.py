"""Calibrated numbers satisfy the target and are tight."""

from __future__ import annotations

import dp_accounting as dp
import pytest

from mycelia.engine.errors import ConfigError
from mycelia.privacy.accounting import epsilon
from mycelia.privacy.calibrate import OutOfReach, calibrate, largest
from mycelia.privacy.sampling import CyclicPoisson, FullBatch, Poisson, ShuffledEpochs
from mycelia.privacy.schedules import ExpDecay


def test_known_answers() -> None:
    found = calibrate(delta=1e-5, epsilon=8, sampling_rate=0.04, steps=2250)
    assert (found.solved_for, found.target_epsilon) == ("noise_multiplier", 8)
    assert 1.345 <= found.value <= 1.348
    by_rdp = calibrate(delta=1e-5, epsilon=8, sampling_rate=0.04, steps=2250, accountant="rdp")
    assert by_rdp.value == pytest.approx(1.416, abs=5e-4)
    other = calibrate(delta=1e-6, epsilon=1, sampling_rate=0.1, steps=512)
    assert other.value == pytest.approx(9.66, abs=0.005)


@pytest.mark.parametrize("target", [0.3, 2.0, 12.0])
def test_noise_is_minimal(target: float) -> None:
    found = calibrate(delta=1e-5, epsilon=target, sampling_rate=0.02, steps=300)
    assert found.statement.epsilon <= target
    assert epsilon(Poisson(0.02), found.value * (1 - 1e-4), 300, 1e-5).epsilon > target


@pytest.mark.parametrize("target", [0.5, 3.0])
def test_rate_is_maximal(target: float) -> None:
    found = calibrate(delta=1e-5, epsilon=target, noise_multiplier=1.2, steps=300)
    assert found.statement.epsilon <= target
    assert epsilon(Poisson(found.value * (1 + 1e-6)), 1.2, 300, 1e-5).epsilon > target


@pytest.mark.parametrize("target", [0.5, 3.0])
def test_steps_are_maximal(target: float) -> None:
    found = calibrate(delta=1e-5, epsilon=target, noise_multiplier=1.2, sampling_rate=0.02)
    assert found.value == int(found.value)
    assert epsilon(Poisson(0.02), 1.2, int(found.value), 1e-5).epsilon <= target
    assert epsilon(Poisson(0.02), 1.2, int(found.value) + 1, 1e-5).epsilon > target


def test_epsilon_is_the_statement() -> None:
    found = calibrate(delta=1e-5, noise_multiplier=1.5, sampling_rate=0.04, steps=2250)
    assert found.value == found.statement.epsilon == epsilon(Poisson(0.04), 1.5, 2250, 1e-5).epsilon
    assert found.target_epsilon is None


def test_gaussian_equals_the_closed_form() -> None:
    found = calibrate(FullBatch(), delta=1e-6, epsilon=1.0, steps=1)
    assert found.value == pytest.approx(dp.get_sigma_gaussian(1.0, 1e-6), rel=1e-4)
    epochs = calibrate(ShuffledEpochs(1, 10), delta=1e-6, epsilon=2.0, noise_multiplier=10.0)
    assert epochs.value == 10 * int((10 / dp.get_sigma_gaussian(2.0, 1e-6)) ** 2)


def test_other_samplers() -> None:
    found = calibrate(
        lambda rate: CyclicPoisson(rate, 4), delta=1e-6, epsilon=2, sampling_rate=0.01, steps=400
    )
    assert epsilon(CyclicPoisson(0.01, 4), found.value, 400, 1e-6).epsilon <= 2


def test_schedules() -> None:
    setting = {"delta": 1e-5, "epsilon": 3.0, "sampling_rate": 0.02, "steps": 30}
    first = calibrate(schedule="exp:0.01", **setting)  # type: ignore[arg-type]
    assert first.statement.epsilon <= 3.0
    lower = first.value * (1 - 2e-4)
    assert epsilon(Poisson(0.02), lower, 30, 1e-5, schedule="exp:0.01").epsilon > 3.0
    same = calibrate(schedule=ExpDecay(7.0, 0.01), **setting)  # type: ignore[arg-type]
    assert same.value == pytest.approx(first.value)
    decay = calibrate(schedule="exp:?", noise_multiplier=first.value, **setting)  # type: ignore[arg-type]
    assert decay.solved_for == "decay"
    assert decay.value == pytest.approx(0.01, rel=0.01)
    assert decay.statement.epsilon <= 3.0


def test_out_of_reach() -> None:
    with pytest.raises(OutOfReach, match="one update"):
        calibrate(FullBatch(), delta=1e-5, epsilon=0.01, noise_multiplier=1.0)
    with pytest.raises(OutOfReach, match="noise multiplier of"):
        calibrate(FullBatch(), delta=1e-12, epsilon=1e-6, steps=10**6)
    assert OutOfReach.exit_code == 3


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="missing are noise_multiplier, steps"):
        calibrate(delta=1e-5, epsilon=1, sampling_rate=0.1)
    with pytest.raises(ConfigError, match="missing are none"):
        calibrate(delta=1e-5, epsilon=1, sampling_rate=0.1, steps=1, noise_multiplier=1)
    with pytest.raises(ConfigError, match="a sampler and a sampling rate"):
        calibrate(FullBatch(), delta=1e-5, epsilon=1, sampling_rate=0.1, steps=1)
    with pytest.raises(ConfigError, match="epsilon"):
        calibrate(delta=1e-5, epsilon=-1, sampling_rate=0.1, steps=1)


@pytest.mark.parametrize("answer", [0, 1, 2, 3, 17, 1000, 99_999])
@pytest.mark.parametrize("power", [0.4, 1.0, 1.6])
def test_largest(answer: int, power: float) -> None:
    calls = []

    def spent(count: int) -> float:
        calls.append(count)
        return count**power

    assert largest(spent, (answer + 0.5) ** power) == answer
    assert len(calls) < 60
    assert largest(spent, 1e9, most=50) == 50


def test_everything_fits() -> None:
    found = calibrate(delta=1e-5, epsilon=50, noise_multiplier=100, steps=10)
    assert found.value == 1.0
