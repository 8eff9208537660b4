"""The server optimisers against the papers' equations in NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mycelia.engine.algorithms import Algorithm, FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi
from mycelia.engine.errors import ConfigError
from tests.engine.algorithms.harness import Array, quadratic, same, tensors_of, total_of

ETA, B1, B2, TAU = 0.05, 0.7, 0.9, 0.01
DELTAS = np.random.default_rng(0).normal(size=(6, 2))
Rule = Callable[[Array, list[Array]], Array]


def reddi(v_of: Callable[[Array, Array], Array], b1: float, corrected: bool = False) -> Rule:
    """Reddi et al. 2021, algorithm 2: x + η m / (√v + τ); `corrected`: with Kingma & Ba's divisors."""

    def run(x: Array, deltas: list[Array]) -> Array:
        m, v = np.zeros_like(x), np.zeros_like(x) if corrected else np.full_like(x, TAU**2)
        for t, delta in enumerate(deltas, 1):
            m = b1 * m + (1 - b1) * delta
            v = v_of(v, delta)
            m_hat, v_hat = (m / (1 - b1**t), v / (1 - B2**t)) if corrected else (m, v)
            x = x + ETA * m_hat / (np.sqrt(v_hat) + TAU)
        return x

    return run


def hsu(momentum: float, nesterov: bool = False) -> Rule:
    """Hsu et al. 2019: v <- βv + Δ; x <- x + v, or by βv + Δ of the new v."""

    def run(x: Array, deltas: list[Array]) -> Array:
        v = np.zeros_like(x)
        for delta in deltas:
            v = momentum * v + delta
            x = x + ETA * (momentum * v + delta if nesterov else v)
        return x

    return run


def adam_v(v: Array, delta: Array) -> Array:
    return B2 * v + (1 - B2) * delta**2


def yogi_v(v: Array, delta: Array) -> Array:
    return v - (1 - B2) * delta**2 * np.sign(v - delta**2)


def adagrad_v(v: Array, delta: Array) -> Array:
    return v + delta**2


MOMENTS: dict[str, Any] = {"server_lr": ETA, "beta1": B1, "beta2": B2, "tau": TAU}
PAPER = {**MOMENTS, "bias_correction": False}


@pytest.mark.parametrize(
    ("algorithm", "rule"),
    [
        (FedAdam(**PAPER), reddi(adam_v, B1)),
        (FedAdam(**MOMENTS), reddi(adam_v, B1, corrected=True)),
        (FedYogi(**PAPER), reddi(yogi_v, B1)),
        (FedYogi(**MOMENTS), reddi(yogi_v, B1, corrected=True)),
        (FedAdagrad(server_lr=ETA, tau=TAU), reddi(adagrad_v, 0.0)),
        (FedAdagrad(server_lr=ETA, tau=TAU, beta1=B1), reddi(adagrad_v, B1)),
        (FedAvgM(server_lr=ETA, momentum=B1), hsu(B1)),
        (FedAvgM(server_lr=ETA, momentum=B1, nesterov=True), hsu(B1, nesterov=True)),
        (FedAvgM(server_lr=ETA, momentum=0.0), hsu(0.0)),
    ],
    ids=lambda value: str(value) if isinstance(value, Algorithm) else "",
)
@pytest.mark.parametrize("rounds", [1, 6])
def test_paper(algorithm: Algorithm, rule: Rule, rounds: int) -> None:
    program = quadratic()
    state = algorithm.start(program)
    start = state.vector.numpy().copy()
    for delta in DELTAS[:rounds]:
        state = algorithm.merge(program, state, total_of(params=(delta.tolist(), 7.0)))
    np.testing.assert_allclose(state.vector.numpy(), rule(start, list(DELTAS[:rounds])), rtol=1e-12)


def test_first_step_of_adam_is_a_full_one() -> None:
    """Bias correction that starts at 0 divides by zero; at 2, the step is too long or too short."""
    algorithm, program = FedAdam(server_lr=0.1, tau=1e-9), quadratic()
    state = algorithm.start(program)
    moved = algorithm.merge(program, state, total_of(params=([0.3, -4.0], 1.0))).vector - state.vector
    torch.testing.assert_close(moved, torch.tensor([0.1, -0.1], dtype=torch.float64))


def test_without_momentum_it_is_fedavg_bit_for_bit() -> None:
    program, total = quadratic(2, torch.float32, "eager"), total_of(params=([0.1234567, -3.3], 3.0))
    ends = [
        algorithm.merge(program, algorithm.start(program), total).vector
        for algorithm in (FedAvg(server_lr=0.7), FedAvgM(server_lr=0.7, momentum=0.0))
    ]
    assert torch.equal(*ends)


def test_resumes_from_saved_tensors() -> None:
    algorithm, program, total = FedYogi(), quadratic(), total_of(params=([1.0, 2.0], 1.0))
    state = algorithm.merge(program, algorithm.start(program), total)
    assert set(state.extra) == {"step", "m/vector", "v/vector"}
    again = [algorithm.merge(program, state, total) for _ in range(2)]
    assert same(tensors_of(again[0]), tensors_of(again[1]))


@pytest.mark.parametrize("make", [FedAdam, FedYogi, FedAdagrad])
@pytest.mark.parametrize(
    ("option", "value"),
    [("server_lr", 0.0), ("server_lr", -1.0), ("server_lr", float("inf")), ("tau", 0.0), ("beta1", 1.0),
     ("beta1", "0.9"), ("tau", True), ("weighting", "sizes")],
)  # fmt: skip
def test_options_out_of_range(make: Callable[..., Algorithm], option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        make(**{option: value})


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": -0.1}, "momentum"),
        ({"nesterov": "false"}, "nesterov"),
        ({"momentum": 0.0, "nesterov": True}, "Nesterov"),
    ],
)
def test_momentum_out_of_range(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        FedAvgM(**options)
