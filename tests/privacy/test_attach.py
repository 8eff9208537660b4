"""Private training in an ordinary loop: what the optimiser gets, what is refused, where a budget stops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mycelia.engine.errors import BudgetExceeded, CaptureError, ConfigError, DataError
from mycelia.privacy.accounting import state
from mycelia.privacy.attach import PrivateTraining, attach, schedules
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


def wide(**changes: Any) -> tuple[nn.Linear, torch.optim.Optimizer, PrivateTraining]:
    """A model whose weight is large enough to see the size of the noise, and is not moved by it."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, optimizer, attached(model=model, optimizer=optimizer, **changes)[2]


def gradients(optimizer: torch.optim.Optimizer, train: PrivateTraining, steps: int) -> list[Tensor]:
    """The weight's gradient in each update, as the optimiser saw it."""
    found: list[Tensor] = []
    for batch in train.batches(data()):
        train.loss(batch).backward()
        if batch.part.last:
            optimizer.step()
            grad = optimizer.param_groups[0]["params"][0].grad
            found.append(grad.clone())
            optimizer.zero_grad()
            if train.steps == steps:
                break
    return found


def test_empty_batch_full_noise() -> None:
    """Zero signal, noise of z times the bound over the public batch, and counted like any other update."""
    _, optimizer, train = wide(sampler=Poisson(0.0), clip=Abadi(0.25), noise=2.0, expected_batch=10.0)
    batch = next(train.batches(data()))
    assert not batch.mask.any()
    found = gradients(optimizer, train, 3)
    for each in found:
        assert abs(float(each.std()) / (2.0 * 0.25 / 10.0) - 1) < 0.02
        assert abs(float(each.mean())) < 5 * 0.05 / each.numel() ** 0.5
    assert not torch.equal(found[0], found[1])
    assert (train.steps, train.ledger.steps) == (3, 3)


def test_noise_scale_matches_reduction() -> None:
    """Noise of the sum is added to the sum: dividing by the public batch scales both, and once."""
    parts = {}
    for batch in (6.0, 600.0):
        for z in (0.0, 1.5):
            _, optimizer, train = wide(clip=Abadi(0.5), noise=z, sampler=Poisson(0.2), expected_batch=batch)
            parts[batch, z] = gradients(optimizer, train, 1)[0] * batch
    signal, noised = parts[6.0, 0.0], parts[6.0, 1.5]
    torch.testing.assert_close(parts[600.0, 0.0], signal, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts[600.0, 1.5], noised, rtol=1e-5, atol=1e-5)
    assert abs(float((noised - signal).std()) / (1.5 * 0.5) - 1) < 0.02
    assert 0.5 < float(signal.norm()) <= 0.5 * 60  # a sum of clipped gradients, not their mean

    # A loss that is a mean already has no gradient of one example, and is refused.
    model = model_of()
    train = attach(
        model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), sampler=Poisson(0.2),
        clip=Abadi(0.5), noise=1.0, expected_batch=12.0,
    )  # fmt: skip
    with pytest.raises(CaptureError, match="reduction"):
        train.loss(next(train.batches(data())))


def test_noise_follows_clip() -> None:
    """The noise has z times the bound in force, whether a schedule or a quantile moves it."""
    falling = schedules.ExpDecay(2.0, 0.5)
    _, optimizer, train = wide(
        sampler=Poisson(0.0), clip=Abadi(2.0), clip_schedule=falling, noise=1.0, expected_batch=1.0
    )
    sizes = [float(each.std()) for each in gradients(optimizer, train, 4)]
    assert sizes == pytest.approx([2.0 * math.exp(-0.5 * step) for step in range(4)], rel=0.02)
    assert [event.clip for event in train.ledger] == [falling(step) for step in range(4)]

    adaptive = QuantileClip(bound=4.0, rate=1.0, target=0.0)  # falls by e^-½ where half of none is clipped
    _, optimizer, train = wide(
        sampler=Poisson(0.0), clip=adaptive, noise=0.5, expected_batch=1000.0, source=NoiseSource.seeded(1)
    )
    sizes = [float(each.std()) * 1000 for each in gradients(optimizer, train, 4)]
    bounds = [float(event.clip or 0) for event in train.ledger]
    each = adaptive.gradient_multiplier(0.5, 1000.0)
    assert sizes == pytest.approx([each * bound for bound in bounds], rel=0.02)
    assert bounds[-1] < 0.5 * bounds[0]


def test_a_clip_schedule_is_of_the_bound_alone() -> None:
    falling = schedules.ExpDecay(2.0, 0.5)
    with pytest.raises(ConfigError, match="starts at 2"):
        attached(clip=Abadi(1.0), clip_schedule=falling)
    with pytest.raises(ConfigError, match="quantile"):
        attached(clip=QuantileClip(bound=2.0), clip_schedule=falling)
    with pytest.raises(ConfigError, match="sigma_b"):
        attached(clip=QuantileClip(sigma_b=0.1), noise=1.0)


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
    wrong: dict[str, object] = {"sampler": DataLoader([1]), "clip": 1.0, "factorisation": "blt"}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"{name} is a {type(value).__name__}"):
            attached(**{name: value})


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


def test_what_is_trained_stays_within_a_batch() -> None:
    model, optimizer, train = attached(sampler=Poisson(0.5, physical=8))
    first = model.get_parameter("0.weight")
    batches = train.batches(data())
    train.loss(next(batches)).backward()
    first.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"0\.weight was frozen within step 0"):
        train.loss(next(batches)).backward()
    first.requires_grad_(True)
    for batch in train.batches(data()):
        if batch.part.part:
            train.loss(batch).backward()
        if batch.part.last:
            break
    first.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"0\.weight was frozen within step 0"):
        optimizer.step()
    assert train.ledger.steps == 0


def test_the_ledger_has_the_total_multiplier_of_an_adaptive_clip() -> None:
    """It has the z that was asked for, and the bound moves."""
    _, optimizer, train = attached(clip=QuantileClip(bound=1e-4), noise=0.7)
    run(optimizer, train, 5)
    events = train.ledger.events
    assert {event.noise_multiplier for event in events} == {0.7}
    bounds = [event.clip for event in events]
    assert bounds[0] == 1e-4
    assert bounds[-1] > 1.2e-4  # type: ignore[operator]


def test_going_on_from_a_state_of_ones_own() -> None:
    whole, optimizer, train = attached(clip=QuantileClip(bound=0.5))
    run(optimizer, train, 6)
    model, optimizer, train = attached(clip=QuantileClip(bound=0.5))
    run(optimizer, train, 3)
    saved, kept, ledger = model.state_dict(), train.state_dict(), train.ledger
    other = model_of(9)
    other.load_state_dict(saved)
    _, optimizer, train = attached(model=other, clip=QuantileClip(bound=0.5), ledger=ledger)
    train.load_state_dict(kept)
    run(optimizer, train, 6)
    assert train.ledger.steps == 6
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), other.parameters(), strict=True))
    with pytest.raises(DataError, match="does not pass through"):
        attached(clip=QuantileClip(bound=0.5))[2].load_state_dict(kept)


def test_a_schedule_stops_at_the_last_affordable_update() -> None:
    """Every update has another z, and the budget still knows which is the last."""
    falling = schedules.ExpDecay(1.5, 0.02)
    events = Poisson(0.2).events(falling, 60)
    allowed = Budget(4.0, 1e-5).remaining(events)
    budget = Budget(4.0, 1e-5)
    _, optimizer, train = attached(budget=budget, noise=falling)
    run(optimizer, train, 10**9)
    assert (train.steps, train.stopped_by) == (allowed, "budget")
    assert state(events[:allowed], 1e-5).epsilon <= 4.0 < state(events[: allowed + 1], 1e-5).epsilon


def test_statements_say_which_source() -> None:
    budget = Budget(50.0, 1e-5)
    _, optimizer, train = attached(budget=budget)
    run(optimizer, train, 1)
    assert train.ledger is budget.ledger
    assert "not for release" in str(train.ledger.statement(1e-5))
    _, _, secure = attached(source=None)
    assert "operating system" in secure.ledger.noise_source
    with pytest.raises(ConfigError, match="names the source"):
        attached(ledger=Ledger(NoiseSource.os().note))


def test_the_same_secret_is_for_the_same_sums() -> None:
    """The same secret and step with other data would tell the difference of the two sums."""
    _, optimizer, train = attached()
    run(optimizer, train, 3)
    _, optimizer, again = attached(ledger=train.ledger)
    run(optimizer, again, 3)  # the same releases
    assert train.ledger.steps == 3
    _, optimizer, other = attached(ledger=train.ledger, model=model_of(5))
    with pytest.raises(DataError, match="tell their difference"):
        run(optimizer, other, 1)
    _, optimizer, fresh = attached(ledger=train.ledger, model=model_of(5), source=NoiseSource.seeded(8))
    run(optimizer, fresh, 3)
    assert train.ledger.steps == 6


def test_it_learns() -> None:
    model, optimizer, train = attached(clip=AutoS(1.0), noise=0.3, sampler=Poisson(0.5), expected_batch=30.0)
    optimizer.param_groups[0]["lr"] = 2.0
    run(optimizer, train, 100)
    inputs, targets = data()
    assert float((model(inputs).argmax(1) == targets).float().mean()) > 0.8
