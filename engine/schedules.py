"""Learning-rate schedules: pure functions of the step.

A schedule takes the number of updates already made (a 0-d integer tensor, 0 at the first update) and gives
the rate (a 0-d float64 tensor). It never reads the step's value in Python, so it can be traced into a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.engine.plugins import check_options, chosen

__all__ = [
    "SCHEDULES",
    "Schedule",
    "build",
    "check_number",
    "constant",
    "cosine",
    "exponential",
    "step_decay",
    "warmup",
]

Schedule = Callable[[Tensor], Tensor]
"""`schedule(step) -> rate`: 0-d integer tensor to 0-d float64 tensor."""


def constant(lr: float) -> Schedule:
    """The same rate at every step."""
    check_number("constant", "lr", lr)

    def schedule(step: Tensor) -> Tensor:
        return torch.full_like(step, lr, dtype=torch.float64)

    return schedule


def step_decay(lr: float, every: int, factor: float = 0.1) -> Schedule:
    """`lr * factor ** (step // every)`: a staircase.

    Args:
        lr: rate of the first `every` steps, at least 0.
        every: steps on each stair, at least 1.
        factor: height of a stair relative to the one before, in [0, 1].
    """
    check_number("step_decay", "lr", lr)
    check_number("step_decay", "every", every, low=1)
    check_number("step_decay", "factor", factor, high=1)

    def schedule(step: Tensor) -> Tensor:
        return lr * factor ** torch.floor(step.double() / every)

    return schedule


def exponential(lr: float, factor: float, every: float = 1) -> Schedule:
    """`lr * factor ** (step / every)`: a smooth decay.

    Args:
        lr: rate of the first step, at least 0.
        factor: what is left of the rate after `every` steps, in [0, 1].
        every: steps in which the rate falls by `factor`, at least 1.
    """
    check_number("exponential", "lr", lr)
    check_number("exponential", "factor", factor, high=1)
    check_number("exponential", "every", every, low=1)

    def schedule(step: Tensor) -> Tensor:
        return lr * factor ** (step.double() / every)

    return schedule


def cosine(lr: float, steps: int, end: float = 0.0) -> Schedule:
    """Half a cosine from `lr` at step 0 to `end` at step `steps`, then `end` for good.

    Loshchilov & Hutter, "SGDR", ICLR 2017, equation 5, without restarts.

    Args:
        lr: rate of the first step, at least 0.
        steps: length of the decay, at least 1.
        end: last rate, at least 0.
    """
    check_number("cosine", "lr", lr)
    check_number("cosine", "steps", steps, low=1)
    check_number("cosine", "end", end)

    def schedule(step: Tensor) -> Tensor:
        progress = (step.double() / steps).clamp(max=1.0)
        return end + (lr - end) * (1 + torch.cos(math.pi * progress)) / 2

    return schedule


def warmup(lr: float | Schedule, steps: int, start: float = 0.0) -> Schedule:
    """A straight line from `start` at step 0 to the full rate at step `steps`, then `lr`.

    Goyal et al., "Accurate, large minibatch SGD", 2017, section 2.2.

    Args:
        lr: the full rate, or the schedule that takes over; it begins at its own step 0.
        steps: length of the line, at least 0.
        start: rate of the first step, at least 0.
    """
    after = lr if callable(lr) else constant(lr)
    check_number("warmup", "steps", steps)
    check_number("warmup", "start", start)

    def schedule(step: Tensor) -> Tensor:
        progress = (step.double() / max(steps, 1)).clamp(max=1.0)
        rate = after((step - steps).clamp(min=0))
        return torch.where(step < steps, start + (rate - start) * progress, rate)

    return schedule


SCHEDULES: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "constant": constant,
        "step_decay": step_decay,
        "cosine": cosine,
        "warmup": warmup,
        "exponential": exponential,
    }
)


def build(name: str, *, warmup_steps: int = 0, **options: Any) -> Schedule:
    """The schedule called `name`.

    Args:
        name: a key of `SCHEDULES`.
        warmup_steps: when above 0, a warm-up from 0 over so many steps comes first.
        options: arguments of that schedule.

    Raises:
        ConfigError: unknown name or option, or a value out of range.

    >>> rate = build("cosine", lr=0.1, steps=100, warmup_steps=10)
    >>> rate(torch.tensor(5)).item(), rate(torch.tensor(10)).item()
    (0.05, 0.1)
    """
    factory = chosen(SCHEDULES, name, kind="schedule", who="schedule")
    check_options(factory, options, who=f"schedule {name!r}")
    schedule = factory(**options)
    return warmup(schedule, warmup_steps) if warmup_steps else schedule


def check_number(
    who: str, name: str, value: object, *, low: float = 0.0, high: float = math.inf, below: float = math.inf
) -> None:
    """Refuse what is not a finite number in [low, high] and under `below`.

    Raises:
        ConfigError: the message names `who`, the option, the value and the range.
    """
    valid = isinstance(value, (int, float)) and not isinstance(value, bool)
    if valid and math.isfinite(value) and low <= value <= high and value < below:  # type: ignore[arg-type,operator]
        return
    if below < math.inf:
        rule = f"{low:g} <= {name} < {below:g}"
    elif high < math.inf:
        rule = f"{low:g} <= {name} <= {high:g}"
    else:
        rule = f"{name} is finite and at least {low:g}"
    raise ConfigError(f"{name} is {value!r}", rule=rule, who=who)
