"""Optimisers by name, their defaults, and what they refuse."""

import math
from typing import Any

import pytest
import torch

from mycelia.engine import optimizers
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.optimizers import (
    OPTIMIZERS,
    adagrad,
    adam,
    adamw,
    flatten_state,
    lamb,
    rmsprop,
    sgd,
    unflatten_state,
)
from mycelia.engine.types import Tensors


def tensors() -> Tensors:
    return {"weight": torch.ones(2, 3), "bias": torch.zeros(3)}


def test_lamb_starts_from_zero_weights() -> None:
    start = {"w": torch.zeros(3, dtype=torch.float64)}
    optimizer = lamb(0.01)
    found, _ = optimizer.update({"w": torch.tensor([1.0, -2.0, 0.5]).double()}, optimizer.init(start), start)
    expected = torch.tensor([-0.01, 0.01, -0.01], dtype=torch.float64)  # Adam's first step is lr * sign(g)
    torch.testing.assert_close(found["w"], expected, rtol=1e-5, atol=0)


def test_names_of_the_flat_state() -> None:
    params = {"layer.weight": torch.ones(2), "a/b": torch.ones(1)}
    state = adam().init(params)
    flat = flatten_state(state)
    assert set(flat) == {"step", "m/layer.weight", "v/layer.weight", "m/a/b", "v/a/b"}
    assert flatten_state(unflatten_state(flat)) == flat


def test_no_parameters() -> None:
    for name in OPTIMIZERS:
        optimizer = optimizers.build(name, lr=0.1)
        assert optimizer.update({}, optimizer.init({}), {})[0] == {}


def test_autograd_goes_through_an_update() -> None:
    optimizer = adam(0.1, bias_correction=False, eps=0.5)
    grad = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    params = {"w": torch.ones(2, dtype=torch.float64)}

    def moved(value: torch.Tensor) -> torch.Tensor:
        return optimizer.update({"w": value}, optimizer.init(params), params)[0]["w"]

    assert torch.autograd.gradcheck(moved, grad)


def test_defaults_are_those_of_torch() -> None:
    for make, other in (
        (adam, torch.optim.Adam),
        (adamw, torch.optim.AdamW),
        (adagrad, torch.optim.Adagrad),
        (rmsprop, torch.optim.RMSprop),
    ):
        leaf = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        leaf.grad = torch.full((3,), 0.01, dtype=torch.float64)
        start = {"w": leaf.detach().clone()}
        optimizer = make()
        other([leaf]).step()
        found, _ = optimizer.update({"w": leaf.grad}, optimizer.init(start), start)
        torch.testing.assert_close(found["w"], leaf.detach(), rtol=1e-12, atol=0)


def test_build_by_name() -> None:
    assert set(OPTIMIZERS) == {"sgd", "adam", "adamw", "adagrad", "yogi", "rmsprop", "lamb"}
    for name in OPTIMIZERS:
        assert optimizers.build(name, lr=0.1).name == name
    found, expected = optimizers.build("adam", lr=0.1, betas=[0.5, 0.6]), adam(0.1, betas=(0.5, 0.6))
    params, grads = tensors(), {"weight": torch.full((2, 3), 0.3), "bias": torch.ones(3)}
    torch.testing.assert_close(
        found.update(grads, found.init(params), params),
        expected.update(grads, expected.init(params), params),
        rtol=0,
        atol=0,
    )


def test_unknown_name_lists_the_optimisers() -> None:
    with pytest.raises(ConfigError, match="no optimiser is called 'adan'") as error:
        optimizers.build("adan", lr=0.1)
    assert "sgd, adam, adamw, adagrad, yogi, rmsprop, lamb" in error.value.rule
    assert "did you mean 'adam'" in error.value.fix


def test_unknown_or_missing_option_is_named() -> None:
    with pytest.raises(ConfigError, match="no option is called 'momentun'") as error:
        optimizers.build("sgd", lr=0.1, momentun=0.9)
    assert "did you mean 'momentum'" in error.value.fix
    with pytest.raises(ConfigError, match="missing a required argument: 'lr'"):
        optimizers.build("sgd")
    with pytest.raises(ConfigError, match="nesterov is 'false'"):
        optimizers.build("sgd", lr=0.1, momentum=0.9, nesterov="false")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf, "0.1", None, True])
def test_bad_rate(name: str, lr: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}: lr is"):
        optimizers.build(name, lr=lr)


BAD: dict[str, list[Any]] = {
    "momentum": [-0.1, 1.0, math.nan],
    "dampening": [-0.1, 1.1, math.nan],
    "alpha": [-0.1, 1.0, math.nan],
    "beta1": [-0.1, 1.0, math.nan],
    "betas": [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan), (0.9,), (0.9, 0.9, 0.9), 0.9, "ab"],
    "eps": [-1e-8, math.nan, math.inf],
    "eps_root": [-1e-8, math.nan, math.inf],
    "weight_decay": [-0.1, math.nan, math.inf, "0.1"],
    "lr_decay": [-0.1, math.nan],
    "initial_accumulator_value": [-0.1, math.nan, math.inf],
}
OPTIONS = {
    "sgd": ["momentum", "dampening", "weight_decay"],
    "adam": ["betas", "eps", "eps_root", "weight_decay", "initial_accumulator_value"],
    "adamw": ["betas", "eps", "eps_root", "weight_decay", "initial_accumulator_value"],
    "adagrad": ["lr_decay", "eps", "eps_root", "weight_decay", "initial_accumulator_value", "beta1"],
    "yogi": ["betas", "eps", "eps_root", "weight_decay", "initial_accumulator_value"],
    "rmsprop": ["alpha", "eps", "weight_decay", "momentum"],
    "lamb": ["betas", "eps", "weight_decay"],
}


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [(name, option, value) for name, known in OPTIONS.items() for option in known for value in BAD[option]],
)
def test_bad_options_are_refused(name: str, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}: {option}"):
        optimizers.build(name, lr=0.1, **{option: value})


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "dampening": 0.1}])
def test_nesterov_needs_momentum_and_no_dampening(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="nesterov"):
        sgd(0.1, nesterov=True, **options)


def test_a_state_of_another_optimiser_is_refused() -> None:
    params = tensors()
    with pytest.raises(DataError, match="adam: the state holds step") as error:
        adam().update(tensors(), sgd(0.1).init(params), params)
    assert "m, step, v" in error.value.rule
    with pytest.raises(DataError, match="no 'm' for 'bias'"):
        adam().update(tensors(), adam().init({"weight": params["weight"]}), params)


def test_tensors_without_a_step_are_no_state() -> None:
    with pytest.raises(DataError, match="step"):
        unflatten_state({"m/w": torch.ones(1)})


def test_integer_parameters_are_refused() -> None:
    with pytest.raises(DataError, match="parameter 'count' is"):
        sgd(0.1).init({"count": torch.tensor(3)})
