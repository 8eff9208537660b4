"""DP-FTRL in an ordinary loop: the noise is that of the factorisation, and the run is one release."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting as dp
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mycelia.engine.errors import BudgetExceeded, ConfigError
from mycelia.privacy.accounting import epsilon
from mycelia.privacy.attach import DPSGD, DPAdamBC, PrivateBatch, PrivateTraining, attach, schedules
from mycelia.privacy.budget import Budget
from mycelia.privacy.calibrate import calibrate
from mycelia.privacy.clip import Abadi, QuantileClip
from mycelia.privacy.factorisation import (
    BLT,
    Banded,
    Identity,
    Plan,
    SqrtToeplitz,
    Strategy,
    Tree,
    optimise,
    planned,
    sensitivity,
)
from mycelia.privacy.noise.discrete_gaussian import DiscreteGaussian
from mycelia.privacy.noise.gaussian import Gaussian
from mycelia.privacy.noise.laplace import Laplace
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.sampling import CyclicPoisson, FullBatch, MinSep, Poisson

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

torch.set_num_threads(1)

FITTED = BLT(2, (0.3, 0.2), (0.9, 0.5))


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def data(count: int = 60) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=draw)
    return inputs, (inputs[:, 0] > 0).long()


def attached(**changes: Any) -> PrivateTraining:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
    settings: Any = {
        "lr": 0.0, "sampler": MinSep(3, 4), "clip": Abadi(0.5), "noise": 2.0, "expected_batch": 15.0,
        "source": NoiseSource.seeded(7), "factorisation": Banded(4),
    } | changes  # fmt: skip
    return DPSGD(model, loss_fn, **settings)


def gradients(train: PrivateTraining) -> list[dict[str, Tensor]]:
    """What the optimiser saw in each update, until the batches end."""
    found = []
    for batch in train.batches(data()):
        train.loss(batch).backward()
        train.optimizer.step()
        found.append({n: p.grad.double() for n, p in train.model.named_parameters() if p.grad is not None})
        train.optimizer.zero_grad()
    return found


def dense(strategy: Strategy, steps: int) -> Tensor:
    """C by its definition, float64 [steps, steps]."""
    if isinstance(strategy, BLT):
        column = [1.0] + [
            sum(a * d ** (t - 1) for a, d in zip(strategy.scales, strategy.decays, strict=True))
            for t in range(1, steps)
        ]
    elif isinstance(strategy, Banded):
        column = [*strategy.band, *[0.0] * steps][:steps]
    else:
        column = [math.comb(2 * t, t) / 4**t for t in range(steps)]
    return torch.tensor(
        [[column[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)], dtype=torch.float64
    )


@pytest.mark.parametrize("strategy", [Banded(4), FITTED, SqrtToeplitz()], ids=lambda each: each.name)
def test_noise_is_a_row_of_the_inverse(strategy: Strategy) -> None:
    """The model does not move, so what differs from a run without noise is the noise."""
    noised = gradients(attached(factorisation=strategy))
    plain = gradients(attached(factorisation=strategy, noise=0.0))
    assert len(noised) == len(plain) == 12
    rows = torch.linalg.inv(dense(strategy, 12))
    for name, shape in (("weight", (4, 6)), ("bias", (4,))):
        drawn = torch.stack([
            Gaussian().sample(shape, 2.0 * 0.5, NoiseSource.seeded(7), "noise", step, name).double()
            for step in range(12)
        ])  # fmt: skip
        expected = torch.tensordot(rows, drawn, 1)
        found = torch.stack([15.0 * (n[name] - p[name]) for n, p in zip(noised, plain, strict=True)])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", [Identity(), Tree(), FITTED], ids=lambda each: each.name)
def test_the_run_is_one_release(strategy: Strategy) -> None:
    train = attached(factorisation=strategy)
    moved = sensitivity(strategy, Plan(12, 3, 4))
    one = dp.get_epsilon_gaussian(2.0 / moved, 1e-5)
    gradients(train)
    assert train.ledger.steps == 12
    assert train.ledger.statement(1e-5).epsilon == pytest.approx(one, rel=1e-9)
    assert train.ledger.statement(1e-5).participations == 3
    assert f"sensitivity {moved:.6g}" in train.ledger.statement(1e-5).assumptions[1]
    # A part of the run has told no more than the whole.
    begun = attached(factorisation=strategy)
    batch = next(begun.batches(data()))
    begun.loss(batch).backward()
    begun.optimizer.step()
    assert begun.ledger.statement(1e-5).epsilon == pytest.approx(one, rel=1e-9)


def test_safe_noise_is_the_same_release_on_a_grid() -> None:
    """Integers of the grid; the rows of z (C + √d grid), made in float64 and rounded; and the same ε."""
    grid, entries = 2.0**-14, 4 * 6 + 4
    safe = DiscreteGaussian(step=1e-4, sampler="rounded")
    train = attached(mechanism=safe)
    noised = gradients(train)
    plain = gradients(attached(noise=0.0))
    rows = torch.linalg.inv(dense(Banded(4), 12))
    std = 2.0 * (0.5 + math.sqrt(entries) * grid)
    for name, shape in (("weight", (4, 6)), ("bias", (4,))):
        drawn = torch.stack([
            Gaussian().sample(
                shape, std, NoiseSource.seeded(7), "noise", step, name, dtype=torch.float64
            ) for step in range(12)
        ])  # fmt: skip
        expected = (torch.tensordot(rows, drawn, 1) / grid).round()
        sums = torch.stack([15.0 * each[name] for each in noised]) / grid
        totals = torch.stack([15.0 * each[name] for each in plain]) / grid
        # float32 means have some 24 digits, so a sum of thousands of steps is told to a hundredth
        assert (sums - sums.round()).abs().max() < 0.05
        assert (sums.round() - totals.round() - expected).abs().max() <= 1
    moved = sensitivity(Banded(4), Plan(12, 3, 4))
    statement = train.ledger.statement(1e-5)
    assert statement.epsilon == pytest.approx(dp.get_epsilon_gaussian(2.0 / moved, 1e-5), rel=1e-9)
    (event,) = train.ledger
    assert event.mechanism == "discrete-gaussian"


def test_safe_noise_is_the_default_with_the_source_of_the_system() -> None:
    for factorisation, sampler in ((Banded(4), "rounded"), (None, "exact")):
        train = attached(factorisation=factorisation, source=NoiseSource.os())
        assert train._releases.settings.mechanism == DiscreteGaussian(sampler=sampler)
        gradients(train)


def test_parameters_that_come_late_are_refused_with_factorised_noise() -> None:
    """What rounding adds was figured for those that were there."""
    train = attached(mechanism=DiscreteGaussian(sampler="rounded"))
    train.model.register_parameter("late", nn.Parameter(torch.zeros(3)))
    train.optimizer.add_param_group({"params": [train.model.get_parameter("late")]})
    train.loss(next(train.batches(data()))).backward()
    with pytest.raises(ConfigError, match="31 entries are trained, and there were 28"):
        train.optimizer.step()
    assert train.ledger.steps == 0


def test_a_budget_pays_for_all_of_it_or_nothing() -> None:
    moved = planned(FITTED, MinSep(3, 4)).sampler.sensitivity
    one = dp.get_epsilon_gaussian(2.0 / moved, 1e-5)
    enough = attached(factorisation=FITTED, budget=Budget(one * 1.001, 1e-5, relation="zero-out"))
    assert len(gradients(enough)) == 12
    short = attached(factorisation=FITTED, budget=Budget(one * 0.999, 1e-5, relation="zero-out"))
    assert gradients(short) == []
    assert (short.stopped_by, short.ledger.steps) == ("budget", 0)
    with pytest.raises(ConfigError, match="relation"):
        attached(factorisation=FITTED, budget=Budget(one, 1e-5))


def test_it_ends_as_planned() -> None:
    train = attached()
    gradients(train)
    assert list(train.batches(data())) == []
    forced = next(iter(MinSep(4, 4).draw(60, NoiseSource.seeded(7), 12)))
    inputs, targets = data()
    rows = torch.from_numpy(forced.indices)
    train.loss(PrivateBatch(inputs[rows], targets[rows], torch.from_numpy(forced.mask), forced)).backward()
    with pytest.raises(BudgetExceeded, match="all 12 planned"):
        train.optimizer.step()
    assert train.ledger.steps == 12


def test_bands_are_amplified_over_groups() -> None:
    """⌈n / b⌉ draws at rate q·b, with z over a column's length (Choquette-Choo et al. 2023, theorem 4)."""
    strategy = Banded(3)
    column = math.sqrt(1 + 1 / 4 + 9 / 64)
    train = attached(sampler=CyclicPoisson(0.05, 4), factorisation=strategy, steps=10)
    gradients(train)
    assert train.ledger.steps == 10
    event = dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(2.0 / column))
    expected = dp.pld.PLDAccountant().compose(event, 3).get_epsilon(1e-5)
    statement = train.ledger.statement(1e-5)
    assert expected * (1 - 5e-4) <= statement.epsilon <= expected * 1.005 + 1e-3
    assert statement.amplified
    # All of a group, every time: nothing is amplified, and each pass is one Gaussian.
    full = planned(strategy, CyclicPoisson(0.25, 4), 10).sampler
    one = dp.get_epsilon_gaussian(2.0 / column / math.sqrt(3), 1e-5)
    assert epsilon(full, 2.0, 10, 1e-5).epsilon == pytest.approx(one, rel=1e-9)
    # Noise as in the run of one release.
    rows = torch.linalg.inv(dense(strategy, 10))
    noised = gradients(attached(sampler=CyclicPoisson(0.0, 4), factorisation=strategy, steps=10))
    drawn = torch.stack([
        Gaussian().sample((4, 6), 1.0, NoiseSource.seeded(7), "noise", step, "weight").double()
        for step in range(10)
    ])  # fmt: skip
    found = torch.stack([15.0 * each["weight"] for each in noised])
    torch.testing.assert_close(found, torch.tensordot(rows, drawn, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sampler": Poisson(0.1)}, "Poisson"),
        ({"sampler": FullBatch()}, "how often and how soon"),
        ({"sampler": CyclicPoisson(0.1, 4)}, "no planned steps"),
        ({"sampler": CyclicPoisson(0.1, 3), "steps": 12}, "4 bands for 3 groups"),
        ({"sampler": CyclicPoisson(0.1, 4), "factorisation": FITTED, "steps": 12}, "blt with CyclicPoisson"),
        ({"steps": 11}, "draws 12 steps"),
        ({"sampler": MinSep(3, 4, sensitivity=1.0)}, "what is accounted is what is added"),
        ({"factorisation": BLT(2)}, "fitted to a plan"),
        ({"factorisation": None, "sampler": MinSep(3, 4, sensitivity=1.7)}, "no factorisation"),
        ({"factorisation": None, "steps": 12}, "no factorisation"),
        ({"clip": QuantileClip()}, "clip bound that moves"),
        ({"clip_schedule": schedules.ExpDecay(0.5)}, "clip bound that moves"),
        ({"noise": schedules.ExpDecay(2.0)}, "noise schedule"),
        ({"mechanism": DiscreteGaussian()}, "exact discrete noise"),
        ({"mechanism": Laplace()}, "Laplace noise"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        attached(**changes)


def test_corrected_adam_is_refused() -> None:
    model = nn.Linear(6, 4)
    with pytest.raises(ConfigError, match="DPAdam"):
        DPAdamBC(
            model, loss_fn, sampler=MinSep(3, 4), clip=Abadi(0.5), noise=2.0, expected_batch=15.0,
            factorisation=Banded(4),
        )  # fmt: skip


def test_without_a_factorisation_each_use_counts() -> None:
    train = attached(factorisation=None)
    gradients(train)
    one = dp.get_epsilon_gaussian(2.0 / math.sqrt(3), 1e-5)
    assert train.ledger.statement(1e-5).epsilon == pytest.approx(one, rel=1e-9)


def test_parameters_may_be_frozen_on_the_way() -> None:
    """The noise of a tensor is that of its own rows, whatever else is trained."""
    whole, train = gradients(attached(sampler=MinSep(3, 4))), attached(sampler=MinSep(3, 4))
    weight = train.model.get_parameter("weight")
    for step, batch in enumerate(train.batches(data())):
        weight.requires_grad_(step not in (4, 5))
        train.loss(batch).backward()
        train.optimizer.step()
        train.optimizer.zero_grad()
        if step == 7:
            break
    train.loss(next(train.batches(data()))).backward()
    train.optimizer.step()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.double(), whole[8]["weight"], rtol=1e-4, atol=1e-5)


def test_ftrl_trains_digits() -> None:
    """ε ≤ 8 at δ = 1e-4 without any sampling; chance is a tenth."""
    digits = load_digits()
    inputs = torch.tensor(digits.data / 16, dtype=torch.float32)
    targets = torch.tensor(digits.target)
    sampler = MinSep(uses=4, separation=12)
    strategy = optimise(BLT(3), Plan(48, 4, 12))
    accounted, plan = planned(strategy, sampler)
    z = calibrate(accounted, delta=1e-4, epsilon=8.0, steps=plan.steps).value
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    train = attach(
        model, loss_fn, optimizer, sampler=sampler, clip=Abadi(1.0), noise=z, factorisation=strategy,
        expected_batch=150, source=NoiseSource.seeded(0), budget=Budget(8.0, 1e-4, relation="zero-out"),
    )  # fmt: skip
    for batch in train.batches((inputs, targets)):
        train.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert train.steps == 48
    one = dp.get_epsilon_gaussian(z / sensitivity(strategy, plan), 1e-4)
    assert train.ledger.statement(1e-4).epsilon == pytest.approx(one, rel=1e-9)
    assert one <= 8.0
    assert float((model(inputs).argmax(1) == targets).float().mean()) > 0.8
