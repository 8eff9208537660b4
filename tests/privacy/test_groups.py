"""Clipping the mean of a group: its gradient, the 2 C that one example can move, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dp_accounting.pld import PLDAccountant
from scipy.integrate import quad
from scipy.stats import norm
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.schema import Role
from mycelia.privacy.accounting import epsilon, state
from mycelia.privacy.attach import DPSGD, PrivateTraining
from mycelia.privacy.budget import Budget, ZcdpMonitor
from mycelia.privacy.calibrate import calibrate
from mycelia.privacy.clip import Abadi, Sensitivity
from mycelia.privacy.clipped_grad import Clipped, clipped_grad
from mycelia.privacy.events import Event
from mycelia.privacy.factorisation import Banded, Plan, planned, sensitivity
from mycelia.privacy.groups import Group
from mycelia.privacy.ledger import Ledger
from mycelia.privacy.noise.gaussian import Gaussian
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.sampling import (
    CyclicPoisson,
    FixedSize,
    FullBatch,
    MinSep,
    Poisson,
    Sampler,
    ShuffledEpochs,
    TruncatedPoisson,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

torch.set_num_threads(1)

THREE = Group(3)


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


class Pair(nn.Module):
    """Gives a tuple; its token table is looked up and summed."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        found = self.table(inputs)
        return self.head(found.sum(1)), found.mean(1)


def paired(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return entropy(outputs[0], targets) + outputs[1].square().sum(1)


def convolutional() -> tuple[nn.Module, Tensor, Callable[..., Tensor]]:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4 * 36, 3)
    )
    return model, torch.randn(12, 1, 8, 8), entropy


def tokens() -> tuple[nn.Module, Tensor, Callable[..., Tensor]]:
    return Pair(), torch.randint(0, 7, (12, 5)), paired


def given(make: Callable[[], Any]) -> tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model, inputs, loss_fn = make()
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        return model.double(), inputs, torch.randint(0, 3, (12,)), loss_fn


def clipped(
    model: nn.Module, inputs: Tensor, targets: Tensor, loss_fn: Callable[..., Tensor], backend: str = "auto"
) -> Clipped:
    batch = THREE.rows(inputs), THREE.rows(targets)
    program = capture(THREE.model(model), THREE.loss(loss_fn), (batch[0][:2], batch[1][:2]))
    return clipped_grad(program, Abadi(0.1), backend=backend)(*program.init(), batch)


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize("backend", ["auto", "vmap"])
@pytest.mark.parametrize("make", [convolutional, tokens])
def test_the_clipped_sum_of_group_means(make: Callable[[], Any], backend: str) -> None:
    model, inputs, targets, loss_fn = given(make)
    found = clipped(model, inputs, targets, loss_fn, backend)
    total, norms = 0.0, []
    for start in range(0, 12, 3):
        part = slice(start, start + 3)
        mean = loss_fn(model(inputs[part]), targets[part]).mean()
        gradient = flat(torch.autograd.grad(mean, list(model.parameters())))
        norms.append(gradient.norm())
        total = total + gradient * min(1.0, 0.1 / float(gradient.norm()))
    torch.testing.assert_close(found.norms, torch.stack(norms).detach(), rtol=1e-10, atol=0)
    names = [name for name, _ in model.named_parameters()]
    torch.testing.assert_close(flat(found.total[name] for name in names), total, rtol=1e-10, atol=1e-14)


def test_the_model_itself_stays_as_it_is() -> None:
    model, inputs, targets, _ = given(convolutional)
    before = model(inputs)
    names = list(dict(THREE.model(model).named_parameters()))
    assert names == list(dict(model.named_parameters()))
    assert torch.equal(model(inputs), before)
    program = capture(
        THREE.model(model), THREE.loss(entropy), (THREE.rows(inputs)[:2], THREE.rows(targets)[:2])
    )
    assert [entry.name for entry in program.schema.of(Role.PARAMETER)] == names


def test_one_example_moves_the_sum_by_up_to_twice_the_bound() -> None:
    """Never more, whatever takes its place; and more than C when it turns its group around."""
    model, targets = nn.Linear(4, 1).double(), THREE.rows(torch.zeros(12, 1).double())
    inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).double()

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets)[:, 0]

    program = capture(THREE.model(model), THREE.loss(loss_fn), (THREE.rows(inputs)[:2], targets[:2]))
    found = clipped_grad(program, Abadi(0.1))

    def total(fourth: Tensor) -> Tensor:
        """The sum with another example in the second group."""
        rows = torch.cat([inputs[:4], fourth[None], inputs[5:]])
        return flat(found(*program.init(), (THREE.rows(rows), targets)).total.values())

    others = [scale * inputs[4] for scale in (-1e6, -10.0, -1.0, 0.0, 1e6)]
    others.append(-1e6 * inputs[3:6].mean(0))
    moved = [float((total(other) - total(inputs[4])).norm()) for other in others]
    limit = Abadi(0.1).sensitivity().under("zero-out", THREE)
    assert limit == 0.2
    assert max(moved) <= limit * (1 + 1e-9)
    assert max(moved) > 0.15


# Accounting


def replaced(q: float, z: float, count: int, delta: float = 1e-5) -> float:
    """ε of sampled releases under replacement, by dp-accounting itself."""
    accountant = PLDAccountant(dp.NeighboringRelation.REPLACE_ONE)
    event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z))
    return float(accountant.compose(event, count).get_epsilon(delta))


@pytest.mark.parametrize("relation", [None, "replace-one", "zero-out"])
@pytest.mark.parametrize(
    ("sampler", "releases"), [(FullBatch(), 12), (ShuffledEpochs(10, 50), 3), (MinSep(2, 6), 2)], ids=repr
)
def test_without_sampling_it_is_a_gaussian_of_half_the_multiplier(
    sampler: Sampler, releases: int, relation: str | None
) -> None:
    """Sensitivity 2 C under every relation, so that replacing costs no more than leaving out."""
    found = epsilon(sampler, 6.0, 12, 1e-5, unit=THREE, relation=relation)
    one = dp.get_epsilon_gaussian(6.0 / 2 / math.sqrt(releases), 1e-5)
    assert found.epsilon == pytest.approx(one, rel=1e-9)
    assert found.relation == relation or (relation is None and found.relation in ("replace-one", "zero-out"))


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
def test_sampled_groups_are_replaced(relation: str) -> None:
    for sampler, q, count in ((Poisson(0.05), 0.05, 40), (CyclicPoisson(0.05, 4), 0.2, 10)):
        if relation in sampler.relations:
            found = epsilon(sampler, 3.0, 40, 1e-5, unit=THREE, relation=relation).epsilon
            assert replaced(q, 3.0, count) * (1 - 5e-4) <= found <= replaced(q, 3.0, count) * 1.005 + 1e-3


def test_one_step_by_numerical_integration() -> None:
    """δ(ε) of (1-q) N(0, z²) + q N(1, z²) against the same with -1."""
    q, z, at = 0.2, 2.0, 0.3

    def excess(x: float) -> float:
        first = (1 - q) * norm.pdf(x, 0, z) + q * norm.pdf(x, 1, z)
        second = (1 - q) * norm.pdf(x, 0, z) + q * norm.pdf(x, -1, z)
        return max(0.0, first - math.exp(at) * second)

    delta = quad(excess, -30, 30, limit=500, points=[1.0, 2.0, 3.0, 4.0, 5.0])[0]
    found = epsilon(Poisson(q), z, 1, 1e-5, unit=THREE).delta(at)
    assert delta * (1 - 1e-3) <= found <= delta * 1.02 + 1e-9


def test_fixed_batches_and_factorised_noise() -> None:
    """Both accountants see 2 C once, and not once for the group and once for the relation."""
    found = epsilon(FixedSize(10, 100), 4.0, 20, 1e-5, unit=THREE)
    assert found.epsilon == epsilon(FixedSize(10, 100), 4.0, 20, 1e-5).epsilon
    strategy = Banded(4)
    sampler, plan = planned(strategy, MinSep(3, 4))
    one = dp.get_epsilon_gaussian(6.0 / 2 / sensitivity(strategy, Plan(12, 3, 4)), 1e-5)
    assert epsilon(sampler, 6.0, plan.steps, 1e-5, unit=THREE).epsilon == pytest.approx(one, rel=1e-9)


def test_it_is_calibrated_and_stated() -> None:
    found = calibrate(FullBatch(), delta=1e-5, epsilon=2.0, steps=10, unit=THREE)
    assert dp.get_epsilon_gaussian(found.value / 2 / math.sqrt(10), 1e-5) == pytest.approx(2.0, rel=1e-3)
    statement = found.statement
    assert statement.unit == "example (in groups of 3)"
    assert "per example (in groups of 3)" in str(statement)
    assert any("each fixed group of 3 examples" in each and "twice the clip bound" in each
               for each in statement.assumptions)  # fmt: skip


def test_a_ledger_keeps_groups_apart() -> None:
    ledger = Ledger()
    for unit in (THREE, Group(4), "example"):
        for event in FullBatch().events(5.0, 2, first_step=ledger.steps, unit=unit, relation="replace-one"):
            ledger.record(event)
            assert Event.from_json(event.to_json()) == event
    with pytest.raises(ConfigError, match="group is 3 and 4"):
        ledger.statement(1e-5)
    units = [statement.unit for statement in ledger.statements(1e-5)]
    assert units == ["example (in groups of 3)", "example (in groups of 4)", "example"]
    monitor = ZcdpMonitor(Ledger(), 1e-5)
    monitor.ledger.record(FullBatch().events(5.0, 2, unit=THREE)[0])
    reading = monitor()
    assert reading is not None
    assert reading.rho == pytest.approx(2 / (2 * 2.5**2))


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda: Group(1), "at least 2"),
        (lambda: epsilon(TruncatedPoisson(0.1, 100, 20), 2.0, 3, 1e-5, unit=THREE), "groups of 3"),
        (lambda: epsilon(Poisson(0.1), 2.0, 3, 1e-5, unit=THREE, relation="add-remove"), "'add-remove'"),
        (lambda: FullBatch().events(1.0, 1, unit=THREE, mechanism="laplace", clip=1.0)
         and state(FullBatch().events(1.0, 1, unit=THREE, mechanism="laplace"), 1e-5), "without groups"),
        (lambda: Event("full", 1.0, 1.0, "add-remove", group=3), "stays as it is"),
        (lambda: Event("full", 1.0, 1.0, "zero-out", unit="client", group=3), "holds examples"),
        (lambda: Sensitivity(1.0).under("any", THREE), "relation"),
    ],
)  # fmt: skip
def test_what_has_no_bound_is_refused(use: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        use()


# An ordinary loop


def data(count: int = 60) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=draw)
    return inputs, (inputs[:, 0] > 0).long()


def attached(**changes: Any) -> PrivateTraining:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
    settings: Any = {
        "lr": 0.5, "sampler": FixedSize(5, 20), "clip": Abadi(0.2), "noise": 1.5, "unit": THREE,
        "source": NoiseSource.seeded(7), "mechanism": Gaussian(),
    } | changes  # fmt: skip
    return DPSGD(model, entropy, **settings)


def stepped(train: PrivateTraining) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradient that one update should have, without its noise, and the one it had."""
    inputs, targets = data()
    batch = next(train.batches((inputs, targets)))
    assert batch.inputs.shape[1:] == (3, 6)
    params = dict(train.model.named_parameters())
    sums = {name: torch.zeros_like(p) for name, p in params.items()}
    for group in batch.part.indices[batch.part.mask]:
        rows = slice(3 * group, 3 * group + 3)
        mean = entropy(train.model(inputs[rows]), targets[rows]).mean()
        found = dict(zip(params, torch.autograd.grad(mean, list(params.values())), strict=True))
        factor = min(1.0, 0.2 / float(flat(found.values()).norm()))
        sums = {name: sums[name] + factor * gradient for name, gradient in found.items()}
    train.loss(batch).backward()
    train.optimizer.step()
    return {name: value / 5 for name, value in sums.items()}, {
        name: p.grad.clone() for name, p in params.items() if p.grad is not None
    }


def test_a_loop_clips_groups_and_noises_by_the_bound() -> None:
    expected, without = stepped(attached(noise=0.0))
    train = attached()
    _, noised = stepped(train)
    torch.testing.assert_close(flat(without.values()), flat(expected.values()), rtol=1e-5, atol=1e-7)
    # small tensors are noised together, in the name of the first
    drawn = Gaussian().sample(28, 1.5 * 0.2, NoiseSource.seeded(7), "noise", 0, next(iter(expected)))
    torch.testing.assert_close(
        flat(noised.values()), flat(expected.values()) + drawn / 5, rtol=1e-4, atol=1e-6
    )
    (event,) = train.ledger
    assert (event.group, event.relation, event.unit) == (3, "replace-one", "example")
    assert train.ledger.statement(1e-5).epsilon == epsilon(FixedSize(5, 20), 1.5, 1, 1e-5).epsilon


def test_a_budget_stops_it() -> None:
    limit = epsilon(FixedSize(5, 20), 1.5, 4, 1e-5).epsilon
    train = attached(budget=Budget(limit, 1e-5, relation="replace-one"))
    for batch in train.batches(data()):
        train.loss(batch).backward()
        train.optimizer.step()
    assert (train.steps, train.stopped_by) == (4, "budget")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"budget": Budget(1.0, 1e-5, relation="add-remove"), "sampler": Poisson(0.1), "expected_batch": 2},
         "'add-remove' and groups of 3"),
        ({"budget": Budget(1.0, 1e-5, "client", "replace-one")}, "budget for the unit 'client'"),
        ({"unit": "client"}, "unit is 'client'"),
        ({"backend": "opacus"}, "opacus"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        attached(**changes)


def test_examples_that_fill_no_group_are_refused() -> None:
    with pytest.raises(DataError, match="leave the last 1 out"):
        next(attached().batches(data(61)))
    assert np.array_equal(THREE.rows(torch.arange(6)).numpy(), [[0, 1, 2], [3, 4, 5]])


def test_batch_norm_is_refused_in_groups_too() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    train = DPSGD(
        model, entropy, lr=0.1, sampler=FixedSize(5, 20), clip=Abadi(1.0), noise=1.0, unit=THREE,
        source=NoiseSource.seeded(1),
    )  # fmt: skip
    with pytest.raises(Exception, match="BatchNorm"):
        train.loss(next(train.batches(data())))
