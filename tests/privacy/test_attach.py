"""Private training in an ordinary loop: what the optimiser gets, what is refused, where a budget stops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mycelia.engine.errors import BudgetExceeded, CaptureError, ConfigError
from mycelia.privacy.attach import PrivateTraining, attach
from mycelia.privacy.budget import Budget
from mycelia.privacy.clip import Abadi, AutoS, QuantileClip
from mycelia.privacy.ledger import Ledger
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.sampling import FixedSize, Poisson

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

torch.set_num_threads(1)


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def data(count: int = 60) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=draw)
    return inputs, (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()


def model_of(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def attached(**changes: Any) -> tuple[nn.Module, torch.optim.Optimizer, PrivateTraining]:
    model = changes.pop("model", None) or model_of()
    optimizer = changes.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.5)
    settings: dict[str, Any] = {
        "sampler": Poisson(0.2), "clip": Abadi(0.5), "noise": 1.0, "expected_batch": 12.0,
        "source": NoiseSource.seeded(7),
    }  # fmt: skip
    return model, optimizer, attach(model, loss_fn, optimizer, **settings | changes)


def run(optimizer: torch.optim.Optimizer, train: PrivateTraining, steps: int) -> list[float]:
    losses = []
    for batch in train.batches(data()):
        losses.append(float(train.loss(batch)))
        train.loss(batch).backward()
        if batch.part.last:
            optimizer.step()
            optimizer.zero_grad()
            if train.steps == steps:
                break
    return losses


def test_without_noise_and_clipping_it_is_sgd_over_the_public_batch() -> None:
    model, optimizer, train = attached(clip=Abadi(1e6), noise=0.0)
    plain = model_of()
    inputs, targets = data()
    for batch in train.batches((inputs, targets)):
        rows = torch.from_numpy(batch.part.indices[batch.part.mask])
        plain.zero_grad()
        (loss_fn(plain(inputs[rows]), targets[rows]).sum() / 12.0).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.sub_(0.5 * parameter.grad)  # type: ignore[operator]
        train.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if train.steps == 5:
            break
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_noise_is_scaled_by_the_clip_bound_and_the_public_batch() -> None:
    model = nn.Linear(6, 4000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _, _, train = attached(
        model=model, optimizer=optimizer, clip=Abadi(0.25), noise=2.0, sampler=Poisson(0.0),
        expected_batch=10.0,
    )  # fmt: skip
    before = model.weight.detach().clone()
    inputs, targets = data()
    batch = next(train.batches((inputs, targets)))
    assert not batch.mask.any()
    train.loss(batch).backward()
    optimizer.step()
    change = (model.weight.detach() - before).flatten()
    assert abs(float(change.std()) / (2.0 * 0.25 / 10.0) - 1) < 0.02


def test_empty_batch_full_noise() -> None:
    """Also counted: an empty draw is a release like any other."""
    model, optimizer, train = attached(sampler=Poisson(0.0), expected_batch=5.0)
    before = [p.detach().clone() for p in model.parameters()]
    run(optimizer, train, 3)
    assert train.steps == 3
    assert train.ledger.steps == 3
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_budget_hard_stop_exact() -> None:
    event = Poisson(0.2).events(1.0, 1)[0]
    allowed = Budget(3.0, 1e-5).remaining(event)
    budget = Budget(3.0, 1e-5)
    _, optimizer, train = attached(budget=budget, clip=Abadi(0.5), source=NoiseSource.seeded(1))
    run(optimizer, train, 10**9)
    assert train.steps == allowed
    assert train.stopped_by == "budget"
    assert budget.spent <= 3.0
    strict = Budget(3.0, 1e-5, on_exceed="raise")
    _, optimizer, train = attached(budget=strict)
    with pytest.raises(BudgetExceeded, match="0 more updates"):
        run(optimizer, train, 10**9)
    assert train.steps == allowed


def test_accumulation_counts_updates() -> None:
    models = []
    for physical in (None, 4):
        model, optimizer, train = attached(sampler=Poisson(0.3, physical=physical), expected_batch=18.0)
        run(optimizer, train, 4)
        assert train.ledger.steps == 4
        models.append(list(model.parameters()))
    for one, two in zip(*models, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def test_nothing_is_wrapped() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kind, defaults, forward = type(optimizer), dict(optimizer.defaults), type(model).forward
    names = set(vars(model))
    _, _, train = attached(model=model, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run(optimizer, train, 2)
    scheduler.step()
    assert type(optimizer) is kind
    assert optimizer.defaults == defaults
    assert type(model).forward is forward
    assert set(vars(model)) == names
    assert optimizer.param_groups[0]["lr"] == 0.005
    assert len(optimizer.state_dict()["state"]) == 4
    train.detach()
    assert not optimizer._optimizer_step_pre_hooks
    model.zero_grad()
    loss_fn(model(data()[0]), data()[1]).mean().backward()
    optimizer.step()  # an ordinary one again
    assert train.ledger.steps == 2


def test_a_gradient_around_the_clipping_is_refused() -> None:
    model, optimizer, train = attached()
    batch = next(train.batches(data()))
    train.loss(batch).backward()
    loss_fn(model(data()[0]), data()[1]).mean().backward()
    with pytest.raises(ConfigError, match="filled from elsewhere"):
        optimizer.step()
    assert train.ledger.steps == 0


def test_the_regulariser_acts_on_parameters_alone() -> None:
    plain, one, first = attached(noise=0.0)
    decayed, two, second = attached(
        noise=0.0, regulariser=lambda p: sum((v**2).sum() for v in p.values()) / 2
    )
    start = [p.detach().clone() for p in plain.parameters()]
    run(one, first, 1)
    run(two, second, 1)
    for a, b, s in zip(plain.parameters(), decayed.parameters(), start, strict=True):
        torch.testing.assert_close(b, a - 0.5 * s, rtol=1e-5, atol=1e-6)


def test_misuse_has_a_fix() -> None:
    _, optimizer, train = attached()
    with pytest.raises(ConfigError, match="not complete"):
        optimizer.step()
    batch = next(train.batches(data()))
    loss = train.loss(batch)
    loss.backward()
    with pytest.raises(ConfigError, match="twice"):
        loss.backward()
    with pytest.raises(ConfigError, match="seen already"):
        train.loss(batch)
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: 0.0)
    optimizer.step()
    with pytest.raises(ConfigError, match="not the next"):
        train.loss(batch)


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="public"):
        attached(expected_batch=None)
    with pytest.raises(ConfigError, match="expected_batch"):
        attached(expected_batch=0.0)
    with pytest.raises(ConfigError, match="its own ledger"):
        attached(budget=Budget(1.0, 1e-5), ledger=Ledger())
    with pytest.raises(ConfigError, match=r"0\.weight is not in the optimiser"):
        attached(optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    attached(sampler=FixedSize(10, 60), expected_batch=None)


def test_batchnorm_is_refused_with_its_place() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    _, optimizer, train = attached(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CaptureError, match="BatchNorm"):
        run(optimizer, train, 1)


def test_what_is_frozen_or_rebound_is_noticed() -> None:
    model, optimizer, train = attached()
    run(optimizer, train, 1)
    first = model[0]
    assert isinstance(first, nn.Linear)
    first.weight.requires_grad_(False)
    before = first.weight.detach().clone()
    run(optimizer, train, 2)
    assert torch.equal(first.weight, before)
    first.bias = nn.Parameter(torch.zeros(8))
    with pytest.raises(ConfigError, match=r"0\.bias"):
        run(optimizer, train, 3)


def test_adaptive_clip_honest() -> None:
    """The ledger has the z that was asked for, and the bound moves."""
    _, optimizer, train = attached(clip=QuantileClip(bound=1e-4), noise=0.7)
    run(optimizer, train, 5)
    events = train.ledger.events
    assert {event.noise_multiplier for event in events} == {0.7}
    bounds = [event.clip for event in events]
    assert bounds[0] == 1e-4
    assert bounds[-1] > 1.2e-4  # type: ignore[operator]


def test_resume_bit_identical() -> None:
    whole, optimizer, train = attached(clip=QuantileClip(bound=0.5))
    run(optimizer, train, 6)
    model, optimizer, train = attached(clip=QuantileClip(bound=0.5))
    run(optimizer, train, 3)
    saved, state, ledger = model.state_dict(), train.state_dict(), train.ledger
    other = model_of(9)
    other.load_state_dict(saved)
    _, optimizer, train = attached(model=other, clip=QuantileClip(bound=0.5), ledger=ledger)
    train.load_state_dict(state)
    run(optimizer, train, 6)
    assert train.ledger.steps == 6
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), other.parameters(), strict=True))


def test_it_learns() -> None:
    model, optimizer, train = attached(clip=AutoS(1.0), noise=0.3, sampler=Poisson(0.5), expected_batch=30.0)
    optimizer.param_groups[0]["lr"] = 2.0
    run(optimizer, train, 100)
    inputs, targets = data()
    assert float((model(inputs).argmax(1) == targets).float().mean()) > 0.8
