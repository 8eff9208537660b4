"""One call for model, optimiser and privacy: the right optimiser, on private means, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mycelia.engine.errors import ConfigError
from mycelia.privacy.adam_bc import AdamBC
from mycelia.privacy.attach import DPSGD, DPAdam, DPAdamBC, DPAdamW, PrivateTraining, attach, schedules
from mycelia.privacy.budget import Budget
from mycelia.privacy.clip import Abadi
from mycelia.privacy.noise.gaussian import Gaussian
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.optimizers import PrivateUpdate, dp_adam, dp_adam_bc, dp_adamw, dp_sgd
from mycelia.privacy.sampling import Poisson

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

torch.set_num_threads(1)

STEPS = 5


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(60, 6, generator=draw)
    return inputs, (inputs[:, 0] > 0).long()


def model_of() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def settings(**changes: Any) -> Any:
    return {
        "sampler": Poisson(0.2), "clip": Abadi(0.5), "noise": 1.0, "expected_batch": 12.0,
        "source": NoiseSource.seeded(7),
    } | changes  # fmt: skip


def trained(train: PrivateTraining, steps: int = STEPS) -> dict[str, Tensor]:
    """An ordinary loop that knows the handle alone; the model's parameters after it."""
    for batch in train.batches(data()):
        train.loss(batch).backward()
        train.optimizer.step()
        train.optimizer.zero_grad()
        if train.steps == steps:
            break
    return {name: p.detach().clone() for name, p in train.model.named_parameters()}


FRONTS: dict[str, tuple[Callable[..., PrivateTraining], type, dict[str, Any], Callable[..., Any]]] = {
    "sgd": (DPSGD, torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}, dp_sgd),
    "adam": (DPAdam, torch.optim.Adam, {"lr": 0.01}, dp_adam),
    "adam-bc": (DPAdamBC, AdamBC, {"lr": 0.01, "floor": 1e-3}, dp_adam_bc),
    "adamw": (DPAdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.3}, dp_adamw),
}


def totals(step: int, model: nn.Module) -> dict[str, Tensor]:
    """The clipped sum of a step by one-example autograd in float64."""
    inputs, targets = data()
    drawn = next(iter(Poisson(0.2).draw(60, NoiseSource.seeded(7), step)))
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for row in drawn.indices[drawn.mask]:
        model.zero_grad()
        loss_fn(model(inputs[row : row + 1]), targets[row : row + 1]).sum().backward()
        grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        for name, grad in grads.items():
            total[name] += min(1.0, 0.5 / norm) * grad
    return total


@pytest.mark.parametrize("name", FRONTS)
@pytest.mark.parametrize("z", [1.0, schedules.ExpDecay(1.0, 0.2)], ids=["constant", "decaying"])
def test_fronts_are_the_published_optimisers(name: str, z: Any) -> None:
    """Beside the pure optimisers of the room, on sums that plain autograd makes."""
    front, kind, options, pure = FRONTS[name]
    train = front(model_of(), loss_fn, **options, **settings(noise=z))
    assert type(train.optimizer) is kind
    assert train.optimizer.param_groups[0]["lr"] == options["lr"]
    found = trained(train)

    model = model_of()
    std = (lambda step: 0.5 * z(step)) if callable(z) else 0.5
    optimizer = pure(PrivateUpdate(Gaussian(), std, 12.0, NoiseSource.seeded(7), 0.5), **options)
    own = {key: p.detach().clone() for key, p in model.named_parameters()}
    state = optimizer.init(own)
    for step in range(STEPS):
        model.load_state_dict(own)
        total = {key: value.float() for key, value in totals(step, model).items()}
        own, state = optimizer.update(total, state, own)
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)


def test_a_front_is_attach_and_an_optimiser() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    two = trained(attach(model, loss_fn, optimizer, **settings()))
    one = trained(DPAdamW(model_of(), loss_fn, lr=0.01, **settings()))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_budgets_and_schedulers_reach_through() -> None:
    budget = Budget(3.0, 1e-5)
    train = DPSGD(model_of(), loss_fn, lr=0.1, **settings(budget=budget))
    scheduler = torch.optim.lr_scheduler.LambdaLR(train.optimizer, schedules.ExpDecay(1.0, 0.5))
    trained(train, 1)
    scheduler.step()
    assert train.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * math.exp(-0.5))
    trained(train, 10**9)
    assert train.stopped_by == "budget"
    assert train.ledger is budget.ledger


def test_corrected_adam_needs_to_know_the_noise() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamBC([parameter])
    parameter.grad = torch.ones(3)
    with pytest.raises(ConfigError, match="known noise"):
        optimizer.step()
    optimizer.expect(0.5)
    optimizer.step()
    with pytest.raises(ConfigError, match="known noise"):  # one word is for one step
        optimizer.step()
    optimizer.expect(0.5)
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: 0.0)
    for options, named in (({"lr": -1.0}, "lr"), ({"betas": (0.9, 1.0)}, "betas"), ({"floor": 0.0}, "floor")):
        with pytest.raises(ConfigError, match=named):
            AdamBC([parameter], **options)  # type: ignore[arg-type]


def test_corrected_adam_keeps_its_state() -> None:
    train = DPAdamBC(model_of(), loss_fn, **settings())
    trained(train, 3)
    state = train.optimizer.state_dict()
    other = AdamBC(train.model.parameters())
    other.load_state_dict(state)
    kept = other.state_dict()
    assert kept["param_groups"] == state["param_groups"]
    for index, values in state["state"].items():
        for name, value in values.items():
            same = torch.equal(value, kept["state"][index][name]) if isinstance(value, Tensor) else None
            assert same if same is not None else kept["state"][index][name] == value


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="max_grad_norm"):
        DPSGD(model_of(), loss_fn, lr=0.1, max_grad_norm=1.0, **settings())
    with pytest.raises(TypeError, match="noise"):
        DPSGD(model_of(), loss_fn, lr=0.1, sampler=Poisson(0.1), clip=Abadi(1.0), expected_batch=6)  # type: ignore[call-arg]
