"""Noise and clip schedules: pure functions of the step, never of the data.

A schedule takes step numbers, a number or an array, and gives the value in force at each. Whoever trains, the
ledger and the monitors read the same object, so a decay has one set of defaults. Whatever looks at data is no
schedule but a mechanism with an event of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mycelia.engine.errors import ConfigError
from mycelia.privacy.events import choose

__all__ = ["SCHEDULES", "Constant", "ExpDecay", "NoiseSchedule", "StepDecay", "TimeDecay", "parse"]


class NoiseSchedule(Protocol):
    """`schedule(step)`: the value in force at a step."""

    @overload
    def __call__(self, step: int) -> float: ...
    @overload
    def __call__(self, step: ArrayLike) -> NDArray[np.float64]: ...
    def __call__(self, step: ArrayLike) -> float | NDArray[np.float64]:
        """The value at step numbers from 0: a float for a number, float64 [n] for an array [n]."""

    def scaled(self, factor: float) -> NoiseSchedule:
        """The same shape, `factor` times as high everywhere."""


@dataclass(frozen=True)
class _Decay:
    """The common half: a first value that a shape of the step, in (0, 1], is multiplied by."""

    first: float

    def __post_init__(self) -> None:
        if not 0 <= self.first < math.inf:
            raise ConfigError(
                f"the first value is {self.first}", rule="at least 0 and finite", who=type(self).__name__
            )

    @overload
    def __call__(self, step: int) -> float: ...
    @overload
    def __call__(self, step: ArrayLike) -> NDArray[np.float64]: ...
    def __call__(self, step: ArrayLike) -> float | NDArray[np.float64]:
        """The value at step numbers from 0: a float for a number, float64 [n] for an array [n]."""
        value = self.first * self._shape(np.asarray(step, dtype=np.float64))
        return float(value) if np.ndim(value) == 0 else value

    def _shape(self, step: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.ones_like(step)


@dataclass(frozen=True)
class Constant(_Decay):
    """The same value at every step.

    Attributes:
        first: the value, at least 0.
    """

    def scaled(self, factor: float) -> Constant:
        """The same shape, `factor` times as high."""
        return Constant(self.first * factor)


@dataclass(frozen=True)
class TimeDecay(_Decay):
    """z₀ / (1 + r·t).

    Attributes:
        first: the value z₀ at step 0, at least 0.
        rate: r, at least 0.
    """

    rate: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rate("TimeDecay", self.rate, math.inf)

    def scaled(self, factor: float) -> TimeDecay:
        """The same shape, `factor` times as high."""
        return TimeDecay(self.first * factor, self.rate)

    def _shape(self, step: NDArray[np.float64]) -> NDArray[np.float64]:
        return 1 / (1 + self.rate * step)


@dataclass(frozen=True)
class StepDecay(_Decay):
    """z₀ (1 − r)^⌊t / every⌋.

    Attributes:
        first: the value z₀ of the first `every` steps, at least 0.
        rate: r, in [0, 1).
        every: steps on each stair, at least 1.
    """

    rate: float = 0.01
    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rate("StepDecay", self.rate, 1.0)
        if self.every < 1:
            raise ConfigError(f"every is {self.every}", rule="at least 1", who="StepDecay")

    def scaled(self, factor: float) -> StepDecay:
        """The same shape, `factor` times as high."""
        return StepDecay(self.first * factor, self.rate, self.every)

    def _shape(self, step: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.power(1 - self.rate, np.floor(step / self.every))


@dataclass(frozen=True)
class ExpDecay(_Decay):
    """z₀ e^(−r·t).

    Attributes:
        first: the value z₀ at step 0, at least 0.
        rate: r, at least 0.
    """

    rate: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rate("ExpDecay", self.rate, math.inf)

    def scaled(self, factor: float) -> ExpDecay:
        """The same shape, `factor` times as high."""
        return ExpDecay(self.first * factor, self.rate)

    def _shape(self, step: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.exp(-self.rate * step)


SCHEDULES = {"time": TimeDecay, "step": StepDecay, "exp": ExpDecay}
_FORMS = "time:R, step:R:EVERY or exp:R"


def parse(text: str, first: float) -> TimeDecay | StepDecay | ExpDecay:
    """The schedule that `time:R`, `step:R:EVERY` or `exp:R` names.

    Args:
        text: the shape; what is left out has its default.
        first: the value at step 0.

    Raises:
        ConfigError: no schedule has that name, or its numbers are missing, too many or out of range.

    >>> parse("step:0.5:10", 2.0)(25)
    0.5
    """
    name, *numbers = text.split(":")
    choose("noise schedule", name, tuple(SCHEDULES))
    try:
        values = [float(number) for number in numbers]
        if name == "step":
            rate, every = (*values, *(0.01, 1.0)[len(values) :])
            if not every.is_integer():
                raise ValueError
            return StepDecay(first, rate, int(every))
        (rate,) = values or (0.01,)
        return (TimeDecay if name == "time" else ExpDecay)(first, rate)
    except ConfigError:
        raise
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"the noise schedule is {text!r}", rule=_FORMS, who="noise schedule") from error


def _check_rate(who: str, rate: float, high: float) -> None:
    if not 0 <= rate < high:
        raise ConfigError(
            f"rate is {rate}", rule=f"in [0, {high:g})" if high < math.inf else "at least 0", who=who
        )
