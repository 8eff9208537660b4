"""Private optimisers: noise before any state, division by a public number, and Adam's corrected bias."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.engine.optimizers import Optimizer, State, adam, adamw, sgd
from mycelia.engine.types import Tensors
from mycelia.privacy.noise.gaussian import Gaussian
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.optimizers import (
    PrivateUpdate,
    adam_bc,
    dp_adam,
    dp_adam_bc,
    dp_adamw,
    dp_sgd,
    privatise,
)

torch.set_num_threads(1)


def noise(std: Any = 0.0, batch: float = 4.0) -> PrivateUpdate:
    return PrivateUpdate(Gaussian(), std, batch, NoiseSource.seeded(3))


def params() -> Tensors:
    draw = torch.Generator().manual_seed(0)
    return {"w": torch.randn(50, 40, generator=draw), "b": torch.randn(40, generator=draw)}


def totals(step: int) -> Tensors:
    draw = torch.Generator().manual_seed(10 + step)
    return {name: torch.randn(value.shape, generator=draw) for name, value in params().items()}


def run(optimizer: Optimizer, gradient: Callable[[int], Tensors], steps: int = 6) -> tuple[Tensors, State]:
    own = params()
    state = optimizer.init(own)
    for step in range(steps):
        own, state = optimizer.update(gradient(step), state, own)
    return own, state


PAIRS = {
    "sgd": (lambda n: dp_sgd(n, 0.1, momentum=0.9), lambda: sgd(0.1, momentum=0.9)),
    "adam": (lambda n: dp_adam(n, 0.1), lambda: adam(0.1)),
    "adamw": (lambda n: dp_adamw(n, 0.1, weight_decay=0.2), lambda: adamw(0.1, weight_decay=0.2)),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("std", [0.0, 0.5])
def test_the_optimiser_sees_the_private_mean_and_nothing_else(name: str, std: float) -> None:
    private, plain = PAIRS[name]
    how = noise(std)
    found = run(private(how), totals)
    expected = run(plain(), lambda step: how.mean(totals(step), step))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_public_denominator() -> None:
    """What is divided by is the number that was given, whatever the total is made of."""
    zero = {name: torch.zeros_like(value) for name, value in params().items()}
    for batch in (1.0, 4.0, 1000.0):
        assert all(not value.any() for value in noise(0.0, batch).mean(zero, 0).values())
        found = noise(0.0, batch).mean(totals(0), 0)
        torch.testing.assert_close(found["w"], totals(0)["w"] / batch)


def test_noise_has_the_asked_size_and_is_new_in_every_step_and_tensor() -> None:
    how = noise(2.0, 5.0)
    zero = {name: torch.zeros(40_000) for name in ("a", "b")}
    one, two = how.mean(zero, 0), how.mean(zero, 1)
    for value in (*one.values(), *two.values()):
        assert abs(float(value.std()) / (2.0 / 5.0) - 1) < 0.02
        assert abs(float(value.mean())) < 0.4 / math.sqrt(40_000) * 5
    pairs = [(one["a"], one["b"]), (one["a"], two["a"])]
    assert all(abs(float(torch.corrcoef(torch.stack(pair))[0, 1])) < 0.03 for pair in pairs)
    torch.testing.assert_close(how.mean(zero, 0), one, rtol=0, atol=0)


def test_in_place_gives_the_same_bits() -> None:
    for make in (*(pair[0] for pair in PAIRS.values()), dp_adam_bc):
        optimizer = make(noise(0.5))
        own = params()
        state = optimizer.init(own)
        for step in range(6):
            own, state = optimizer.update_(totals(step), state, own)
        torch.testing.assert_close((own, state), run(optimizer, totals), rtol=0, atol=0)


def test_corrected_bias_without_noise_is_adam() -> None:
    found, _ = run(dp_adam_bc(noise(), 0.1, floor=1e-30), totals)
    expected, _ = run(privatise(adam(0.1, eps=0.0), noise()), totals)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("std", [0.8, lambda step: 0.8 / (1 + 0.5 * step)], ids=["constant", "decaying"])
def test_corrected_bias_by_hand(std: Any) -> None:
    """Algorithm 1 in float64, the noise's variance averaged like the squared gradients."""
    how, floor, betas = noise(std), 1e-4, (0.9, 0.99)
    found, _ = run(dp_adam_bc(how, 0.1, betas, floor), totals)
    own = {name: value.double() for name, value in params().items()}
    for name, start in own.items():
        value = start.clone()
        m, v, phi = torch.zeros_like(value), torch.zeros_like(value), 0.0
        for step in range(6):
            grad = how.mean(totals(step), step)[name].double()
            m = betas[0] * m + (1 - betas[0]) * grad
            v = betas[1] * v + (1 - betas[1]) * grad**2
            sigma = (std(step) if callable(std) else std) / 4
            phi = betas[1] * phi + (1 - betas[1]) * sigma**2
            first, second = 1 - betas[0] ** (step + 1), 1 - betas[1] ** (step + 1)
            value -= 0.1 * (m / first) / ((v - phi) / second).clamp(min=floor).sqrt()
        torch.testing.assert_close(found[name].double(), value, rtol=1e-4, atol=1e-5)


def test_the_correction_takes_out_what_the_noise_adds() -> None:
    """On noise alone v̂ of Adam estimates (σ/B)², and that of the corrected form 0, as it should be."""
    how = noise(2.0, 4.0)
    zero: Tensors = {"w": torch.zeros(20_000)}
    means = []
    for make in (dp_adam, dp_adam_bc):
        optimizer = make(how, 0.0, betas=(0.9, 0.999))
        state = optimizer.init(zero)
        own = zero
        for _ in range(200):
            own, state = optimizer.update(zero, state, own)
        second = state["v"]
        assert isinstance(second, dict)
        means.append(float(second["w"].double().mean()) / (1 - 0.999**200))
    variance = (2.0 / 4.0) ** 2
    assert means == pytest.approx([variance, 0.0], abs=0.01 * variance)


def test_a_schedule_names_each_step() -> None:
    how = noise(float)
    zero: Tensors = {"w": torch.zeros(10_000)}
    assert not how.mean(zero, 0)["w"].any()
    assert abs(float(how.mean(zero, 3)["w"].std()) / (3 / 4) - 1) < 0.05


@pytest.mark.parametrize("std", [-1.0, math.inf, math.nan])
def test_bad_noise(std: float) -> None:
    with pytest.raises(ConfigError, match="finite and at least 0"):
        noise(std)
    with pytest.raises(ConfigError, match="step 2"):
        noise(lambda step: 1.0 if step < 2 else std).mean(totals(0), 2)


@pytest.mark.parametrize("batch", [0.0, -1.0, math.inf, math.nan])
def test_bad_batch(batch: float) -> None:
    with pytest.raises(ConfigError, match="expected_batch"):
        noise(1.0, batch)


def test_bad_options() -> None:
    with pytest.raises(ConfigError, match="floor"):
        dp_adam_bc(noise(), floor=0.0)
    with pytest.raises(ConfigError, match="betas"):
        dp_adam_bc(noise(), betas=(0.9, 1.0))
    optimizer = adam_bc()
    with pytest.raises(ConfigError, match="without known noise"):
        optimizer.update(totals(0), optimizer.init(params()), params())


def test_state_is_a_tensor_dictionary() -> None:
    _, state = run(dp_adam(noise(1.0)), totals)
    assert isinstance(state["step"], Tensor)
    assert int(state["step"]) == 6
