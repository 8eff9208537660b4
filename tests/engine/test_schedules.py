"""Schedules against torch.optim.lr_scheduler and closed forms."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import lr_scheduler

from mycelia.engine import schedules
from mycelia.engine.errors import ConfigError
from mycelia.engine.schedules import Schedule, constant, cosine, exponential, step_decay, warmup

EVERY: dict[str, Schedule] = {
    "constant": constant(0.3),
    "step_decay": step_decay(0.3, every=7, factor=0.5),
    "exponential": exponential(0.3, factor=0.9),
    "cosine": cosine(0.3, steps=40, end=0.01),
    "warmup": warmup(0.3, steps=10, start=0.1),
    "warmup then cosine": warmup(cosine(0.3, steps=30), steps=10),
}


def rates(schedule: Schedule, count: int) -> list[float]:
    return [schedule(torch.tensor(step)).item() for step in range(count)]


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        ("constant", lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
        ("step_decay", lambda o: lr_scheduler.StepLR(o, step_size=7, gamma=0.5)),
        ("exponential", lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9)),
        ("warmup", lambda o: lr_scheduler.LinearLR(o, start_factor=1 / 3, total_iters=10)),
        ("cosine", lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=40, eta_min=0.01)),
    ],
)
def test_equals_torch(name: str, scheduler: Callable[[torch.optim.Optimizer], Any]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    other, expected = scheduler(optimizer), []
    for _ in range(40):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        other.step()
    assert rates(EVERY[name], 40) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_is_a_traceable_float64_scalar(name: str) -> None:
    schedule = EVERY[name]
    traced = make_fx(schedule)(torch.tensor(0))
    for step in (0, 1, 9, 10, 11, 39, 40, 1000):
        rate = schedule(torch.tensor(step))
        assert rate.dtype == torch.float64
        assert rate.shape == ()
        assert torch.equal(traced(torch.tensor(step)), rate)


def test_steps_are_not_changed() -> None:
    step = torch.tensor(5)
    for schedule in EVERY.values():
        schedule(step)
    assert step.item() == 5


@given(st.integers(1, 1000), st.integers(0, 3000), st.floats(0, 10), st.floats(0, 10))
def test_cosine_stays_between_its_ends(steps: int, step: int, first: float, last: float) -> None:
    rate = cosine(first, steps, last)(torch.tensor(step)).item()
    tolerance = 1e-12 * (first + last)
    assert min(first, last) - tolerance <= rate <= max(first, last) + tolerance
    if step >= steps:
        assert rate == pytest.approx(last, rel=1e-12, abs=1e-300)


def test_cosine_is_half_way_at_half_time() -> None:
    assert cosine(0.4, 10, end=0.2)(torch.tensor(5)).item() == pytest.approx(0.3, rel=1e-12)


def test_exponential_takes_its_time() -> None:
    assert rates(exponential(1.0, 0.25, every=2), 5) == pytest.approx(
        [1, 0.5, 0.25, 0.125, 0.0625], rel=1e-12
    )


def test_warmup_hands_over_to_the_start_of_the_next_schedule() -> None:
    after = cosine(0.3, 30)
    found = rates(warmup(after, 10), 45)
    assert found[:10] == pytest.approx([0.03 * step for step in range(10)], rel=1e-12)
    assert found[10:] == rates(after, 35)


def test_warmup_of_no_steps_is_no_warmup() -> None:
    assert rates(warmup(0.3, 0), 3) == [0.3] * 3


@pytest.mark.parametrize(
    ("name", "options", "equal"),
    [
        ("constant", {"lr": 0.3}, constant(0.3)),
        ("step_decay", {"lr": 0.3, "every": 7}, step_decay(0.3, 7)),
        ("cosine", {"lr": 0.3, "steps": 30, "warmup_steps": 10}, EVERY["warmup then cosine"]),
        ("warmup", {"lr": 0.3, "steps": 4}, warmup(0.3, 4)),
        ("exponential", {"lr": 1, "factor": 0.5}, exponential(1.0, 0.5)),
    ],
)
def test_build(name: str, options: dict[str, Any], equal: Schedule) -> None:
    assert rates(schedules.build(name, **options), 30) == rates(equal, 30)


def test_unknown_name_lists_the_schedules() -> None:
    with pytest.raises(ConfigError, match="no schedule is called 'cosin'") as error:
        schedules.build("cosin", lr=0.1)
    assert "exponential" in error.value.rule
    assert "'cosine'" in error.value.fix


def test_unknown_or_missing_option() -> None:
    with pytest.raises(ConfigError, match="schedule 'cosine': no option is called 'step'"):
        schedules.build("cosine", lr=0.1, step=10)
    with pytest.raises(ConfigError, match="missing a required argument: 'steps'"):
        schedules.build("cosine", lr=0.1)


@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf, "0.1", True, None])
def test_bad_rates(lr: Any) -> None:
    for factory in (
        constant,
        lambda lr: step_decay(lr, 1),
        lambda lr: cosine(lr, 1),
        lambda lr: exponential(lr, 1),
        lambda lr: warmup(lr, 1),
    ):
        with pytest.raises(ConfigError, match="lr is"):
            factory(lr)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("step_decay", {"every": 0}),
        ("step_decay", {"every": 5, "factor": 1.5}),
        ("cosine", {"steps": 0}),
        ("cosine", {"steps": 5, "end": -1.0}),
        ("warmup", {"steps": -1}),
        ("warmup", {"steps": 5, "start": math.nan}),
        ("exponential", {"factor": -0.5}),
        ("exponential", {"factor": 0.5, "every": 0}),
        ("constant", {"warmup_steps": -1}),
    ],
)
def test_bad_options(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        schedules.build(name, lr=0.1, **options)
