"""Solves for the one number that is missing: noise, steps, sampling rate, ε, or the decay of a schedule.

The answer satisfies the target, since it is checked against the same figure that a statement prints, and
it is tight: nothing a little cheaper does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from mycelia.engine.errors import ConfigError, MyceliaError
from mycelia.privacy.accounting import Statement
from mycelia.privacy.accounting import epsilon as account
from mycelia.privacy.groups import Unit
from mycelia.privacy.sampling import Poisson, Sampler
from mycelia.privacy.schedules import NoiseSchedule

__all__ = ["MOST_STEPS", "Calibration", "OutOfReach", "calibrate", "largest"]

MOST_STEPS = 10_000_000
_NOISE = (1e-4, 1e4)
_NOISE_TOLERANCE, _RATE_TOLERANCE = 1e-4, 1e-6
_ROUNDS = 80


class OutOfReach(MyceliaError):
    """No value of the missing number reaches the target."""

    exit_code = 3


@dataclass(frozen=True)
class Calibration:
    """A number that was solved for.

    Attributes:
        solved_for: "noise_multiplier", "steps", "sampling_rate", "epsilon" or "decay".
        value: its value.
        target_epsilon: the ε asked for; None when ε was solved for.
        statement: what the completed setting says, with an ε of at most the target.
    """

    solved_for: str
    value: float
    target_epsilon: float | None
    statement: Statement

    def __str__(self) -> str:
        return f"{self.solved_for} = {self.value:.10g}; {self.statement}"


def calibrate(
    sampler: Sampler | Callable[[float], Sampler] = Poisson,
    *,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    steps: int | None = None,
    sampling_rate: float | None = None,
    unit: Unit = "example",
    max_examples: int = 1,
    accountant: str = "auto",
    schedule: str | NoiseSchedule | None = None,
    relation: str | None = None,
) -> Calibration:
    """Solve for whichever of ε, noise multiplier, steps and sampling rate is not given.

    Args:
        sampler: a sampler, whose rate then is given; or what makes one from a rate.
        delta: δ, in (0, 1).
        epsilon: the ε to reach, above 0.
        noise_multiplier: z, or the first value of the schedule. The smallest that reaches ε, to 1e-4
            relative.
        steps: released updates T. The most that stay within ε, exactly.
        sampling_rate: q, in (0, 1]. The largest that stays within ε, to 1e-6 relative.
        unit: see `accounting.epsilon`.
        max_examples: likewise.
        accountant: likewise.
        schedule: likewise. "exp:?", "time:?" and "step:?:EVERY" solve for the largest decay, with all else
            given.
        relation: see `accounting.epsilon`.

    Raises:
        ConfigError: not exactly one number is missing, or a value is out of range.
        OutOfReach: no value reaches ε.

    >>> 1.345 < calibrate(delta=1e-5, epsilon=8, steps=2250, sampling_rate=0.04).value < 1.348
    True
    """
    fixed = None if _makes(sampler) else cast(Sampler, sampler)
    rate = sampling_rate if fixed is None else fixed.rate
    given = {
        "epsilon": epsilon, "noise_multiplier": noise_multiplier, "steps": steps, "sampling_rate": rate,
    }  # fmt: skip
    missing = [name for name, value in given.items() if value is None]
    if isinstance(schedule, str) and "?" in schedule:
        missing.append("decay")
    if len(missing) != 1 or (fixed is not None and sampling_rate is not None):
        raise ConfigError(
            "a sampler and a sampling rate" if fixed is not None and sampling_rate is not None
            else f"missing are {', '.join(missing) or 'none'}",
            rule="of epsilon, noise_multiplier, steps, sampling_rate and a decay '?', one is left out",
            fix="give the others",
            who="calibrate",
        )  # fmt: skip
    if epsilon is not None and not 0 < epsilon < math.inf:
        raise ConfigError(f"epsilon is {epsilon}", rule="above 0 and finite", who="epsilon")

    def at(**changed: Any) -> Statement:
        now = given | changed
        drawn = (
            fixed if fixed is not None else cast(Callable[[float], Sampler], sampler)(now["sampling_rate"])
        )
        z, shape = float(now["noise_multiplier"]), schedule
        if "decay" in now:
            shape = cast(str, schedule).replace("?", repr(now["decay"]))
        elif shape is not None and not isinstance(shape, str):
            shape = shape.scaled(z / shape(0))
        return account(
            drawn,
            z,
            now["steps"],
            delta,
            unit=unit,
            max_examples=max_examples,
            accountant=accountant,
            schedule=shape,
            relation=relation,
        )

    (name,) = missing
    if name == "epsilon":
        statement = at()
        return Calibration(name, statement.epsilon, None, statement)
    target = cast(float, epsilon)

    @cache
    def spent(value: float) -> float:
        return at(**{name: value}).epsilon

    if name == "steps":
        value: float = largest(lambda count: at(steps=count).epsilon, target)
        if not value:
            raise _out_of_reach("one update", target, spent(1))
        value = min(MOST_STEPS, value)
        return Calibration(name, value, target, at(steps=int(value)))
    if name == "noise_multiplier":
        value = _smallest_noise(spent, target)
    else:
        high = 1.0 if name == "sampling_rate" else 10.0
        value = _largest(spent, target, 1e-12, high, name)
    return Calibration(name, value, target, at(**{name: value}))


def largest(spent: Callable[[int], float], target: float, most: int = MOST_STEPS) -> int:
    """The most steps that stay within the target: so many do, one more does not.

    Args:
        spent: ε after a number of steps, which does not fall.
        target: ε to stay within.
        most: what is enough; it is returned when even so many stay within.
    """
    low, low_at = 1, spent(1)
    if low_at > target:
        return 0
    if most == 1:
        return 1
    high, high_at = 2, math.inf
    while True:
        high = min(high, most)
        high_at = spent(high)
        if high_at > target:
            break
        low, low_at = high, high_at
        if high == most:
            return most
        # ε grows about as the root of the steps at first, and never faster than they do.
        growth = (target / max(low_at, 1e-300)) ** 2
        high = int(min(low * min(max(growth * 1.1, 2.0), 64.0), most)) + 1
    turn = 0
    while high - low > 1:
        turn += 1
        middle = (low + high) // 2
        if turn % 3 and math.isfinite(high_at) and high_at > low_at:
            share = (target - low_at) / (high_at - low_at)
            near = low + round(share * (high - low))
            # A step beyond the estimate closes the bracket from its other side.
            middle = min(max(near + (1 if turn % 3 == 2 else 0), low + 1), high - 1)
        found = spent(middle)
        if found <= target:
            low, low_at = middle, found
        else:
            high, high_at = middle, found
    return low


def _smallest_noise(spent: Callable[[float], float], target: float) -> float:
    low, high = _NOISE
    good = 1.0
    while spent(good) > target:
        good *= 2
        if good > high:
            raise _out_of_reach(f"a noise multiplier of {high:g}", target, spent(high))
    bad = good / 2
    while spent(bad) <= target:
        good, bad = bad, bad / 2
        if bad < low:
            return good
    return _close(spent, target, bad, good, _NOISE_TOLERANCE)


def _largest(spent: Callable[[float], float], target: float, low: float, high: float, name: str) -> float:
    if spent(high) <= target:
        return high
    good, bad = high / 4, high
    while spent(good) > target:
        good, bad = good / 4, good
        if good < low:
            raise _out_of_reach(f"{name} of {low:g}", target, spent(good))
    return _close(spent, target, bad, good, _RATE_TOLERANCE)


def _close(
    spent: Callable[[float], float], target: float, bad: float, good: float, tolerance: float
) -> float:
    """The value next to which the target is crossed, on the side that reaches it.

    Secants in logarithms, where ε is nearly straight; an estimate close to one end is moved past the
    crossing, so that the bracket closes from both sides, and every third is a bisection.
    """
    for turn in range(_ROUNDS):
        width = math.log(bad / good)
        if abs(width) <= tolerance:
            return good
        middle = 0.5
        over, under = spent(bad), spent(good)
        if turn % 3 < 2 and 0 < under < over < math.inf:
            middle = (math.log(target) - math.log(under)) / (math.log(over) - math.log(under))
            margin = 0.45 * tolerance / abs(width)
            if middle < 2 * margin:
                middle = 2 * margin
            elif middle > 1 - 2 * margin:
                middle = 1 - 2 * margin
            middle = min(max(middle, 1e-3 * min(1.0, margin)), 1.0)
        value = good * math.exp(width * middle)
        if spent(value) <= target:
            good = value
        else:
            bad = value
    return good


def _makes(sampler: object) -> bool:
    """Whether it makes samplers, rather than being one."""
    return isinstance(sampler, type) or not hasattr(sampler, "draw")


def _out_of_reach(what: str, target: float, found: float) -> OutOfReach:
    return OutOfReach(
        f"{what} has ε {found:.6g}, and {target:g} is asked for",
        rule="the answer satisfies the target",
        fix="raise ε or δ, or add noise, or take fewer steps or a lower sampling rate",
        who="calibrate",
    )
