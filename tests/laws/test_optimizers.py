"""Laws of every optimiser. A new one joins by rows in CASES."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mycelia.engine.errors import DataError
from mycelia.engine.optimizers import (
    Optimizer,
    State,
    adagrad,
    adam,
    adamw,
    flatten_state,
    lamb,
    rmsprop,
    sgd,
    unflatten_state,
    yogi,
)
from mycelia.engine.schedules import Schedule, constant, cosine
from mycelia.engine.types import Tensors

Array = np.ndarray[Any, np.dtype[np.float64]]
Reference = Callable[[Array, list[Array]], Array]
"""`reference(start, gradients) -> end`, in NumPy, from a paper."""


def yogi_paper(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    start: float,
    corrected: bool,
    w: Array,
    grads: list[Array],
) -> Array:
    """Zaheer et al. 2018, algorithm 2; with Adam's bias correction if asked for."""
    m, v = np.zeros_like(w), np.full_like(w, start)
    for t, g in enumerate(grads, 1):
        m = beta1 * m + (1 - beta1) * g
        v = v - (1 - beta2) * np.sign(v - g**2) * g**2
        m_hat, v_hat = (m / (1 - beta1**t), v / (1 - beta2**t)) if corrected else (m, v)
        w = w - lr * m_hat / (np.sqrt(v_hat) + eps)
    return w


def lamb_paper(
    lr: float, beta1: float, beta2: float, eps: float, decay: float, w: Array, grads: list[Array]
) -> Array:
    """You et al. 2020, algorithm 2, phi the identity; a zero norm leaves the step unscaled."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        r = m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + eps)
        u = r + decay * w
        sizes = np.sqrt(np.sum(w**2)), np.sqrt(np.sum(u**2))
        w = w - lr * (sizes[0] / sizes[1] if all(sizes) else 1.0) * u
    return w


def fed_opt_paper(
    kind: str, lr: float, beta1: float, beta2: float, tau: float, w: Array, grads: list[Array]
) -> Array:
    """Reddi et al. 2021, algorithm 2; its Delta is -g, and v starts at tau²."""
    m, v = np.zeros_like(w), np.full_like(w, tau**2)
    for g in grads:
        delta = -g
        m = beta1 * m + (1 - beta1) * delta
        if kind == "adagrad":
            v = v + delta**2
        elif kind == "yogi":
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        w = w + lr * m / (np.sqrt(v) + tau)
    return w


def adam_root_paper(
    lr: float, beta1: float, beta2: float, root: float, w: Array, grads: list[Array]
) -> Array:
    """Kingma & Ba 2015, algorithm 1, with the constant under the root."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        w = w - lr * m / (1 - beta1**t) / np.sqrt(v / (1 - beta2**t) + root)
    return w


@dataclass(frozen=True)
class Case:
    """One optimiser with its options, and what to compare it with."""

    name: str
    make: Callable[..., Optimizer]  # make(lr=...)
    lr: float
    twin: Callable[..., torch.optim.Optimizer] | None = None
    paper: Reference | None = None

    def build(self, lr: float | Schedule | None = None) -> Optimizer:
        return self.make(lr=self.lr if lr is None else lr)


def same(name: str, make: Callable[..., Optimizer], other: Any, lr: float, **options: Any) -> Case:
    """A case whose options torch has under the same names."""
    return Case(name, partial(make, **options), lr, twin=partial(other, **options))


FED: dict[str, Any] = {"bias_correction": False, "eps": 1e-3, "initial_accumulator_value": 1e-6}

CASES = [
    same("sgd", sgd, torch.optim.SGD, 0.1),
    same("sgd decay", sgd, torch.optim.SGD, 0.1, weight_decay=0.01),
    same("sgd momentum", sgd, torch.optim.SGD, 0.1, momentum=0.9, weight_decay=0.01),
    same("sgd dampening", sgd, torch.optim.SGD, 0.1, momentum=0.9, dampening=0.3),
    same("sgd nesterov", sgd, torch.optim.SGD, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    same("adam", adam, torch.optim.Adam, 0.01),
    same("adam betas", adam, torch.optim.Adam, 0.01, betas=(0.5, 0.7), eps=1e-3, weight_decay=0.1),
    same("adam amsgrad", adam, torch.optim.Adam, 0.01, betas=(0.8, 0.5), amsgrad=True),
    same("adamw", adamw, torch.optim.AdamW, 0.01),
    same("adamw amsgrad", adamw, torch.optim.AdamW, 0.01, weight_decay=0.1, amsgrad=True, betas=(0.8, 0.5)),
    same("adagrad", adagrad, torch.optim.Adagrad, 0.1),
    same("adagrad decay", adagrad, torch.optim.Adagrad, 0.1, lr_decay=0.1, weight_decay=0.01, eps=1e-3),
    same("adagrad accumulator", adagrad, torch.optim.Adagrad, 0.1, initial_accumulator_value=0.5),
    same("rmsprop", rmsprop, torch.optim.RMSprop, 0.01),
    same("rmsprop decay", rmsprop, torch.optim.RMSprop, 0.01, alpha=0.9, eps=1e-3, weight_decay=0.01),
    same("rmsprop centered", rmsprop, torch.optim.RMSprop, 0.01, alpha=0.9, centered=True),
    same("rmsprop momentum", rmsprop, torch.optim.RMSprop, 0.01, momentum=0.9, centered=True),
    Case("yogi", yogi, 0.01, paper=partial(yogi_paper, 0.01, 0.9, 0.999, 1e-3, 1e-6, True)),
    Case(
        "yogi paper",
        partial(yogi, betas=(0.8, 0.7), eps=1e-2, initial_accumulator_value=0.1, bias_correction=False),
        0.02,
        paper=partial(yogi_paper, 0.02, 0.8, 0.7, 1e-2, 0.1, False),
    ),
    Case("lamb", lamb, 0.01, paper=partial(lamb_paper, 0.01, 0.9, 0.999, 1e-6, 0.0)),
    Case(
        "lamb decay",
        partial(lamb, betas=(0.8, 0.7), eps=1e-3, weight_decay=0.01),
        0.02,
        paper=partial(lamb_paper, 0.02, 0.8, 0.7, 1e-3, 0.01),
    ),
    Case(
        "fedadam",
        partial(adam, betas=(0.9, 0.99), **FED),
        0.1,
        paper=partial(fed_opt_paper, "adam", 0.1, 0.9, 0.99, 1e-3),
    ),
    Case(
        "fedyogi",
        partial(yogi, betas=(0.9, 0.99), **FED),
        0.1,
        paper=partial(fed_opt_paper, "yogi", 0.1, 0.9, 0.99, 1e-3),
    ),
    Case(
        "fedadagrad",
        partial(adagrad, beta1=0.9, eps=1e-3, initial_accumulator_value=1e-6),
        0.1,
        paper=partial(fed_opt_paper, "adagrad", 0.1, 0.9, 0.0, 1e-3),
    ),
    Case(
        "adam root",
        partial(adam, eps=0.0, eps_root=1e-4),
        0.01,
        paper=partial(adam_root_paper, 0.01, 0.9, 0.999, 1e-4),
    ),
    Case(
        "adagrad root",
        partial(adagrad, eps=0.0, eps_root=1e-4),
        0.1,
        paper=lambda w, grads: (
            w
            - 0.1
            * sum(
                g / np.sqrt(1e-4 + v) for g, v in zip(grads, np.cumsum(np.square(grads), axis=0), strict=True)
            )
        ),
    ),
]

SHAPES = {"layer.weight": (4, 3), "layer.bias": (3,), "scale": (), "empty": (0, 2)}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def over(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


every = over(CASES)
in_torch = over([case for case in CASES if case.twin is not None])
in_papers = over([case for case in CASES if case.paper is not None])
both_precisions = pytest.mark.parametrize("dtype", TOLERANCE)


def tensors(seed: int, dtype: torch.dtype = torch.float64, shapes: dict[str, Any] = SHAPES) -> Tensors:
    rng = np.random.default_rng(seed)
    return {
        name: torch.from_numpy(np.asarray(rng.normal(size=shape))).to(dtype) for name, shape in shapes.items()
    }


@cache
def gradients(steps: int, dtype: torch.dtype = torch.float64) -> tuple[Tensors, ...]:
    """Gradients of changing size, with a zero now and then."""
    found = []
    for step in range(steps):
        grads = tensors(1000 + step, dtype)
        grads["layer.weight"][step % 4] = 0.0
        found.append({name: grad * (1 + step % 3) for name, grad in grads.items()})
    return tuple(found)


def train(optimizer: Optimizer, params: Tensors, steps: int = 50) -> tuple[Tensors, State]:
    state = optimizer.init(params)
    for grads in gradients(steps, next(iter(params.values())).dtype):
        params, state = optimizer.update(grads, state, params)
    return params, state


def copies(values: Tensors) -> Tensors:
    return {name: value.clone() for name, value in values.items()}


def assert_equal(found: Tensors, expected: Tensors) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def by_torch(case: Case, dtype: torch.dtype, schedule: Schedule | None = None) -> Tensors:
    assert case.twin is not None
    leaves = {name: torch.nn.Parameter(value) for name, value in tensors(0, dtype).items()}
    other = case.twin(list(leaves.values()), lr=case.lr, foreach=False)
    for step, grads in enumerate(gradients(50, dtype)):
        if schedule is not None:
            other.param_groups[0]["lr"] = schedule(torch.tensor(step)).item()
        for name, leaf in leaves.items():
            leaf.grad = grads[name]
        other.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


@in_torch
@both_precisions
def test_equals_torch(case: Case, dtype: torch.dtype) -> None:
    expected = by_torch(case, dtype)
    found, _ = train(case.build(), tensors(0, dtype))
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@in_torch
def test_equals_torch_under_a_schedule(case: Case) -> None:
    schedule = cosine(case.lr, 40, end=case.lr / 100)
    expected = by_torch(case, torch.float64, schedule)
    found, _ = train(case.build(schedule), tensors(0))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@in_papers
def test_equals_the_paper(case: Case) -> None:
    assert case.paper is not None
    start, steps = tensors(0), gradients(50)
    found, _ = train(case.build(), copies(start))
    for name, value in start.items():
        expected = case.paper(value.numpy(), [grads[name].numpy() for grads in steps])
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-12, atol=1e-12)


LARGE = 1e12  # so large an eps that the root does not matter: m / (root + eps) = m / eps


@pytest.mark.parametrize(
    "optimizer",
    [
        sgd(0.1, momentum=0.0, weight_decay=0.0),
        adam(0.1 * LARGE, betas=(0.0, 0.9), eps=LARGE),
        adamw(0.1 * LARGE, betas=(0.0, 0.9), eps=LARGE, weight_decay=0.0),
        yogi(0.1 * LARGE, betas=(0.0, 0.9), eps=LARGE),
        adagrad(0.1 * LARGE, eps=LARGE),
        adagrad(0.1 * LARGE**0.5, eps=0.0, eps_root=LARGE),
        rmsprop(0.1 * LARGE, eps=LARGE),
    ],
    ids=lambda optimizer: optimizer.name,
)
def test_degenerate_parameters_give_plain_sgd(optimizer: Optimizer) -> None:
    expected = tensors(0)
    for grads in gradients(50):
        expected = {name: value - 0.1 * grads[name] for name, value in expected.items()}
    torch.testing.assert_close(train(optimizer, tensors(0))[0], expected, rtol=1e-8, atol=1e-8)


def test_degenerate_lamb_is_normalised_gradient_descent() -> None:
    expected = tensors(0)
    for grads in gradients(50):
        for name, grad in grads.items():
            if grad.norm() > 0:
                expected[name] = expected[name] - 0.1 * expected[name].norm() * grad / grad.norm()
    found, _ = train(lamb(0.1, betas=(0.0, 0.9), eps=LARGE), tensors(0))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@every
def test_a_rate_of_zero_moves_nothing(case: Case) -> None:
    start = tensors(0)
    assert_equal(train(case.build(0.0), start, steps=3)[0], start)


@every
@both_precisions
def test_a_constant_schedule_is_a_constant(case: Case, dtype: torch.dtype) -> None:
    found = train(case.build(constant(case.lr)), tensors(0, dtype), steps=5)[0]
    expected = train(case.build(), tensors(0, dtype), steps=5)[0]
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@every
def test_update_is_pure(case: Case) -> None:
    optimizer = case.build()
    params, state = train(optimizer, tensors(0), steps=2)
    grads = tensors(1)
    before = copies(params), copies(flatten_state(state)), copies(grads)
    moved, new = optimizer.update(grads, state, params)
    assert_equal(params, before[0])
    assert_equal(flatten_state(state), before[1])
    assert_equal(grads, before[2])
    old = {tensor.data_ptr() for group in (params, flatten_state(state), grads) for tensor in group.values()}
    fresh = [tensor for group in (moved, flatten_state(new)) for tensor in group.values() if tensor.numel()]
    assert old.isdisjoint(tensor.data_ptr() for tensor in fresh)
    again, _ = optimizer.update(grads, state, params)
    assert_equal(again, moved)


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_in_place_update_gives_the_same_bits(case: Case, dtype: torch.dtype) -> None:
    optimizer = case.build()
    expected = train(optimizer, tensors(0, dtype), steps=5)
    params = tensors(0, dtype)
    state = optimizer.init(params)
    for grads in gradients(5, dtype):
        before = copies(grads)
        params, state = optimizer.update_(grads, state, params)
        assert_equal(grads, before)
    assert_equal(params, expected[0])
    assert_equal(flatten_state(state), flatten_state(expected[1]))


@every
def test_in_place_update_uses_the_memory_it_was_given(case: Case) -> None:
    optimizer, params = case.build(), tensors(0)
    state = optimizer.init(params)
    before = {name: value.data_ptr() for name, value in {**params, **flatten_state(state)}.items()}
    params, state = optimizer.update_(tensors(1), state, params)
    after = {name: value.data_ptr() for name, value in {**params, **flatten_state(state)}.items()}
    assert {name for name in before if before[name] != after[name]} == {"step"}


@every
@pytest.mark.parametrize("scheduled", [False, True])
def test_traced_update_equals_the_eager_one(case: Case, scheduled: bool) -> None:
    optimizer = case.build(cosine(case.lr, 20) if scheduled else None)
    params = tensors(0)
    state = optimizer.init(params)
    traced = make_fx(optimizer.update)(tensors(1), state, params)
    for grads in gradients(5):  # the step is an input of the graph, not a constant in it
        found, found_state = traced(grads, state, params)
        params, state = optimizer.update(grads, state, params)
        assert_equal(found, params)
        assert_equal(flatten_state(found_state), flatten_state(state))


@every
def test_clients_can_be_batched(case: Case) -> None:
    optimizer = case.build()
    clients = [train(optimizer, tensors(seed), steps=seed + 1) for seed in range(3)]
    grads = [tensors(10 + seed) for seed in range(3)]

    def stack(groups: list[Tensors]) -> Tensors:
        return {name: torch.stack([group[name] for group in groups]) for name in groups[0]}

    states = unflatten_state(stack([flatten_state(state) for _, state in clients]))
    found, found_states = torch.vmap(optimizer.update)(
        stack(grads), states, stack([params for params, _ in clients])
    )
    each = [optimizer.update(g, state, params) for g, (params, state) in zip(grads, clients, strict=True)]
    torch.testing.assert_close(found, stack([params for params, _ in each]), rtol=1e-12, atol=1e-12)
    expected = stack([flatten_state(state) for _, state in each])
    torch.testing.assert_close(flatten_state(found_states), expected, rtol=1e-12, atol=1e-12)


@every
def test_clients_can_start_from_one_model(case: Case) -> None:
    optimizer, params = case.build(), tensors(0)
    grads = {name: torch.stack([grad, 2 * grad]) for name, grad in tensors(1).items()}
    found, _ = torch.vmap(optimizer.update, in_dims=(0, None, None))(grads, optimizer.init(params), params)
    single = optimizer.update({name: grad[1] for name, grad in grads.items()}, optimizer.init(params), params)
    torch.testing.assert_close({name: value[1] for name, value in found.items()}, single[0])


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_shapes_are_kept(case: Case, dtype: torch.dtype) -> None:
    optimizer, params = case.build(), tensors(0, dtype)
    state = optimizer.init(params)
    moved, new = optimizer.update(tensors(1, dtype), state, params)
    assert {n: (v.dtype, v.shape) for n, v in moved.items()} == {
        n: (v.dtype, v.shape) for n, v in params.items()
    }
    layout = {name: (value.dtype, value.shape) for name, value in flatten_state(state).items()}
    assert {name: (value.dtype, value.shape) for name, value in flatten_state(new).items()} == layout
    assert layout["step"] == (torch.int64, torch.Size([]))
    wide = torch.promote_types(dtype, torch.float32)
    assert all(found == wide for name, (found, _) in layout.items() if name != "step")
    assert list(moved) == list(params)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_float32_rounded_at_the_end(case: Case, dtype: torch.dtype) -> None:
    optimizer, params = case.build(), tensors(0, dtype)
    state = optimizer.init(params)
    for grads in gradients(5, dtype):
        small = {name: grad * 1e-4 for name, grad in grads.items()}  # their squares are zero in float16
        exact, _ = optimizer.update(
            {name: grad.float() for name, grad in small.items()},
            state,
            {name: value.float() for name, value in params.items()},
        )
        params, state = optimizer.update(small, state, params)
        assert all(value.isfinite().all() for value in params.values())
        assert_equal(params, {name: value.to(dtype) for name, value in exact.items()})


@every
def test_state_goes_through_a_file(case: Case) -> None:
    optimizer = case.build()
    params, state = train(optimizer, tensors(0), steps=3)
    stored = safetensors.torch.save(flatten_state(state))
    restored = unflatten_state(safetensors.torch.load(stored))
    assert restored.keys() == state.keys()
    grads = tensors(1)
    found, expected = optimizer.update(grads, restored, params), optimizer.update(grads, state, params)
    assert_equal(found[0], expected[0])
    assert_equal(flatten_state(found[1]), flatten_state(expected[1]))


@every
def test_step_counts_updates(case: Case) -> None:
    state = train(case.build(), tensors(0), steps=4)[1]
    assert isinstance(state["step"], torch.Tensor)
    assert state["step"].item() == 4


@every
@pytest.mark.parametrize("call", ["update", "update_"])
def test_gradients_that_do_not_fit(case: Case, call: str) -> None:
    optimizer, params = case.build(), tensors(0)
    state, update = optimizer.init(params), getattr(optimizer, call)
    before = copies(params)
    grads = tensors(1)
    del grads["scale"]
    with pytest.raises(DataError, match="differ in 'scale'"):
        update(grads, state, params)
    with pytest.raises(DataError, match="differ in 'extra'"):
        update({**tensors(1), "extra": torch.ones(1)}, state, params)
    with pytest.raises(DataError, match=r"gradient 'layer.bias' has shape \[1\], the parameter \[3\]"):
        update({**tensors(1), "layer.bias": torch.ones(1)}, state, params)
    assert_equal(params, before)
