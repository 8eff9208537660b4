"""Suppress-privacy: what it does to weights and gradients, and that nothing takes it for a guarantee."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mycelia.engine.errors import ConfigError
from mycelia.privacy.attach import DPSGD
from mycelia.privacy.clip import Abadi
from mycelia.privacy.ledger import FILE, Ledger
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.sampling import Poisson
from mycelia.privacy.suppress import Suppression, Suppressor
from tests.cli.command_line import mycelia

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

torch.set_num_threads(1)


def model_of() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4))


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(60, 6, generator=draw)
    return inputs, (inputs[:, 0] > 0).long()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs, targets = data()
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def test_the_schedule_is_cubic() -> None:
    how = Suppressor(sparse_start=0.2, sparse_end=0.8, start=10, end=30)
    assert [how.sparsity(t) for t in (0, 9)] == [0.0, 0.0]
    assert how.sparsity(10) == pytest.approx(0.2)
    assert how.sparsity(15) == pytest.approx(0.8 - 0.6 * 0.75**3)
    assert how.sparsity(30) == how.sparsity(10**6) == pytest.approx(0.8)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad]
)
def test_the_largest_weights_are_kept(optimizer: Any) -> None:
    """With any optimiser: small weights are zero and stay so, biases are left alone."""
    model = model_of()
    own = optimizer(model.parameters(), lr=0.05)
    if optimizer is torch.optim.SGD:
        own = optimizer(model.parameters(), lr=0.05, momentum=0.9)  # moves weights that have no gradient
    suppression = Suppressor(sparse_end=0.5, end=4).attach(model, own)
    zero: list[Tensor] = []
    for number in range(8):
        weights = [model[0].weight, model[2].weight]
        before = [weight.detach().clone() for weight in weights]
        inputs, targets = data()
        whole = torch.autograd.grad(F.cross_entropy(model(inputs), targets), weights)
        step(model, own)
        share = Suppressor(sparse_end=0.5, end=4).sparsity(number)
        for old, grad, layer in zip(before, whole, (model[0], model[2]), strict=True):
            expected = set(old.abs().flatten().argsort()[: math.floor(share * old.numel())].tolist())
            found = set((layer.weight == 0).flatten().nonzero().flatten().tolist())
            assert found == expected
            assert torch.equal(layer.weight.grad, grad.masked_fill(layer.weight == 0, 0.0))
            assert (layer.bias != 0).all()
        if zero:
            assert all(bool((new | ~old).all()) for old, new in zip(zero, zeros(model), strict=True))
        zero = zeros(model)
    assert suppression.sparsity == pytest.approx(0.5)
    suppression.detach()
    step(model, own)
    assert suppression.steps == 8
    assert not own._optimizer_step_pre_hooks
    assert not own._optimizer_step_post_hooks


def zeros(model: nn.Sequential) -> list[Tensor]:
    return [layer.weight == 0 for layer in (model[0], model[2])]


def test_clamp_and_noise() -> None:
    model, plain = model_of(), model_of()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    how = Suppressor(sparse_end=0.5, start=1, end=2, clamp=0.25, noise=0.01)
    how.attach(model, own, source=NoiseSource.seeded(3))
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    step(model, own)
    step(plain, other)
    assert torch.equal(model[0].weight, plain[0].weight)  # it has not begun
    step(model, own)
    step(plain, other)
    assert float(model[0].weight.detach().abs().max()) == 0.25
    inside = plain[0].weight.abs() < 0.23
    moved = (model[0].weight - plain[0].weight)[inside].detach()
    assert 0.005 < float(moved.abs().max()) <= 0.01 * (1 + 1e-5)
    assert torch.unique(moved).numel() > 20


def test_suppress_is_heuristic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every output says so, and nothing gives an ε."""
    model = model_of()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    ledger = Ledger.create(tmp_path / FILE)
    suppression = Suppressor(sparse_end=0.5, end=3).attach(model, own, ledger=ledger)
    for _ in range(4):
        step(model, own)
    for text in (str(suppression.suppressor), suppression.report()):
        assert "a heuristic, without ε" in text
    assert "no attack was measured" in suppression.report()
    report = suppression.report({"membership, true positives at 1 %": (0.12, 0.05)})
    assert "0.12 without, 0.05 with it" in report
    assert "50.0% of the weights are zero" in report
    with pytest.raises(ConfigError, match="a heuristic has no ε"):
        suppression.epsilon(1e-5)
    with pytest.raises(ConfigError, match="a heuristic has no ε"):
        ledger.statement(1e-5)
    assert "budget" not in {name.lower() for name in vars(Suppressor(0.1)) | vars(suppression)}
    ledger.close()

    done = mycelia(capsys, "privacy", "ledger", tmp_path, "--format", "json")
    facts = json.loads(done.out)
    assert (done.code, facts["statements"], facts["events"]) == (0, [], [])
    assert facts["heuristics"] == [str(suppression.suppressor)]
    text = mycelia(capsys, "privacy", "ledger", tmp_path).out
    assert "a heuristic, without ε" in text
    assert "nothing was released with an ε" in text


def test_beside_private_training(tmp_path: Path) -> None:
    """It acts on what is noised already: ε is that of the noise, and the statement says so."""
    ledger = Ledger.create(tmp_path / FILE)
    train = DPSGD(
        model_of(), lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"), lr=0.1,
        sampler=Poisson(0.2), clip=Abadi(1.0), noise=1.0, expected_batch=12, ledger=ledger,
    )  # fmt: skip
    suppression: Suppression = Suppressor(sparse_end=0.5, end=2).attach(
        train.model, train.optimizer, ledger=ledger
    )
    for batch in train.batches(data()):
        train.loss(batch).backward()
        train.optimizer.step()
        train.optimizer.zero_grad()
        if train.steps == 4:
            break
    assert suppression.sparsity == pytest.approx(0.5)
    statement = ledger.statement(1e-5)
    plain = Ledger()
    for event in Poisson(0.2).events(1.0, 4):
        plain.record(event)
    assert statement.epsilon == plain.statement(1e-5).epsilon
    assert f"{suppression.suppressor} adds nothing to it" in statement.assumptions
    assert Ledger.load(tmp_path / FILE).heuristics == (str(suppression.suppressor),)


@pytest.mark.parametrize(
    "options",
    [
        {"sparse_end": 1.0}, {"sparse_start": 0.9, "sparse_end": 0.5}, {"sparse_start": -0.1}, {"noise": -1},
        {"start": 5, "end": 5}, {"start": -1}, {"clamp": 0.0}, {"clamp": math.inf}, {"noise": math.nan},
    ],
)  # fmt: skip
def test_values_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Suppressor(**options)


def test_a_model_without_weights_is_refused() -> None:
    model = nn.LayerNorm(4)
    with pytest.raises(ConfigError, match="two dimensions"):
        Suppressor().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
