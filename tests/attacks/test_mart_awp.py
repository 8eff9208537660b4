"""MART and adversarial weight perturbation: degenerate settings, their papers' losses, what they do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mycelia.attacks import as_model
from mycelia.attacks.defences import AWP, MART, PGDAT, TrainingDefence, build
from mycelia.attacks.defences.awp import weight_change
from mycelia.attacks.defences.local import wrong_with_local
from mycelia.attacks.defences.mart import boosted_ce
from mycelia.attacks.defences.training import Batch
from mycelia.engine.capture import capture
from mycelia.engine.config import Named
from mycelia.engine.data import Examples
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.losses import cross_entropy
from mycelia.engine.optimizers import adam, sgd
from mycelia.engine.program import Program
from mycelia.engine.run import Run
from mycelia.engine.training import FitResult, Trainer
from mycelia.engine.training.plain import PlainUpdates
from tests.attacks.training_worlds import CLASSES, FEATURES, examples, linear, normalised

torch.set_num_threads(1)

EPS = 0.1


def fit(program: Program, updates: Any, count: int = 23, **options: Any) -> FitResult:
    options = dict[str, Any](epochs=2, batch_size=5, plan="eager", seed=4) | options
    more = {name: options.pop(name) for name in ("run", "should_stop") if name in options}
    trainer = Trainer(program, options.pop("optimizer", None) or sgd(0.1), updates=updates, **options)
    return trainer.fit(examples(count), **more)


def same(found: FitResult, expected: FitResult) -> bool:
    pairs = (({**each.params, **each.buffers}) for each in (found, expected))
    mine, other = pairs
    return all(torch.equal(tensor, other[name]) for name, tensor in mine.items())


def logits(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return x @ params["weight"].T + params["bias"]


def watched(kind: type[Any], seen: list[tuple[Tensor, Tensor]], **settings: Any) -> TrainingDefence:
    class Watched(kind):  # type: ignore[misc]
        def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
            seen.append(super().craft(batch))
            return seen[-1]

    made = Watched(**settings)
    assert isinstance(made, TrainingDefence)
    return made


# --- MART -------------------------------------------------------------------------------------------


def test_boosted_cross_entropy() -> None:
    """By hand: p = (1/2, 1/3, 1/6); y = 0: −ln 1/2 − ln 2/3; y = 1: −ln 1/3 − ln 1/2."""
    z = torch.tensor([[0.5, 1 / 3, 1 / 6]] * 2, dtype=torch.float64).log() + 7
    found = boosted_ce(z, torch.tensor([0, 1]))
    np.testing.assert_allclose(found.numpy(), [np.log(2) + np.log(1.5), np.log(3) + np.log(2)], rtol=1e-12)
    far = torch.tensor([[-200.0, 200.0, 0.0]], requires_grad=True)  # p_k rounds to 1: still finite
    loss = boosted_ce(far, torch.tensor([0]))
    (slope,) = torch.autograd.grad(loss.sum(), far)
    assert float(loss.detach()) == pytest.approx(400 + 200)
    assert bool(torch.isfinite(slope).all())


def test_boosted_cross_entropy_by_finite_differences() -> None:
    torch.manual_seed(0)
    z = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda given: boosted_ce(given, torch.tensor([0, 1, 4, 2])), (z,))


def test_mart_step() -> None:
    """Against autograd on the loss of eq. 11, written with probabilities."""
    program, seen = linear(), list[tuple[Tensor, Tensor]]()
    result = fit(program, watched(MART, seen, weight=3.0, eps=EPS, steps=3), 10, epochs=1, batch_size=10)
    ((inputs, targets),) = seen
    clean, changed, y = inputs[:10], inputs[10:], targets[:10]
    assert torch.equal(targets[10:], y)
    assert float((changed - clean).abs().max()) <= EPS * (1 + 1e-5)
    params = {name: tensor.requires_grad_() for name, tensor in program.init()[0].items()}
    p, moved = logits(params, clean).softmax(1), logits(params, changed).softmax(1)
    rows = torch.arange(10)
    rival = torch.stack([moved[i, [k for k in range(CLASSES) if k != y[i]]].max() for i in range(10)])
    divergence = (p * (p.log() - moved.log())).sum(1)
    losses = -moved[rows, y].log() - (1 - rival).log() + 3.0 * divergence * (1 - p[rows, y])
    loss = losses.mean()
    assert result.train_loss == pytest.approx(float(loss.detach()), rel=1e-5)
    loss.backward()
    for name, tensor in params.items():
        assert tensor.grad is not None
        torch.testing.assert_close(result.params[name], tensor.detach() - 0.1 * tensor.grad)


def test_mart_trains_on_the_rows_that_pgd_makes() -> None:
    data, program = examples(12, 1), linear()
    params, buffers = program.init()
    x, y = torch.from_numpy(data.inputs), torch.from_numpy(data.targets)
    batch = Batch(as_model(program, params=params, buffers=buffers), x, y, np.arange(12), 7)
    inputs, _ = MART(eps=EPS, steps=4).craft(batch)
    assert torch.equal(inputs[:12], x)
    assert torch.equal(inputs[12:], PGDAT(eps=EPS, steps=4).craft(batch)[0])


# --- AWP --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [linear, normalised])
def test_weights_that_stay_are_adversarial_training(program: Callable[[], Program]) -> None:
    found = fit(program(), AWP(gamma=0.0, eps=EPS, steps=2), optimizer=adam(0.05), clip_norm=0.5)
    assert same(found, fit(program(), PGDAT(eps=EPS, steps=2), optimizer=adam(0.05), clip_norm=0.5))


def test_changes_of_weights_have_their_size_and_direction() -> None:
    """w = (3, 4) in a row: norm 5; g = (0, 2): v = 0.1 · 5 · (0, 1)."""
    params = {"w": torch.tensor([[3.0, 4.0]]), "flat": torch.tensor([[1.0]]), "bias": torch.tensor([1.0])}
    grads = {"w": torch.tensor([[0.0, 2.0]]), "flat": torch.tensor([[0.0]]), "bias": torch.tensor([5.0])}
    found = weight_change(params, grads, 0.1)
    assert set(found) == {"w", "flat"}
    torch.testing.assert_close(found["w"], torch.tensor([[0.0, 0.5]]))
    assert float(found["flat"]) == 0


def test_awp_step() -> None:
    """Against algorithm 1 as it is written: w ← (w + v) − η ∇L(w + v) − v."""
    program, seen = linear(), list[tuple[Tensor, Tensor]]()
    result = fit(program, watched(AWP, seen, gamma=0.2, eps=EPS, steps=3), 10, epochs=1, batch_size=10)
    ((x, y),) = seen
    params = {name: tensor.requires_grad_() for name, tensor in program.init()[0].items()}
    functional.cross_entropy(logits(params, x), y).backward()
    weight = params["weight"]
    assert weight.grad is not None
    v = 0.2 * weight.detach().norm() * weight.grad / weight.grad.norm()
    moved = {
        "weight": (weight.detach() + v).requires_grad_(),
        "bias": params["bias"].detach().clone().requires_grad_(),
    }
    loss = functional.cross_entropy(logits(moved, x), y)
    loss.backward()
    for name, change in (("weight", v), ("bias", torch.zeros(CLASSES))):
        grad = moved[name].grad
        assert grad is not None
        torch.testing.assert_close(result.params[name], moved[name].detach() - 0.1 * grad - change)
    assert result.train_loss == pytest.approx(float(loss.detach()), rel=1e-5)
    plain = functional.cross_entropy(logits(program.init()[0], x), y)
    assert float(loss.detach()) > float(plain) + 0.01  # the worst weights nearby are worse


def test_buffers_move_once_in_a_step() -> None:
    seen = list[tuple[Tensor, Tensor]]()
    fitted = fit(normalised(), watched(AWP, seen, eps=EPS, steps=2), 11, epochs=1, batch_size=4)
    mean = torch.zeros(FEATURES)
    for inputs, _ in seen:
        mean = 0.9 * mean + 0.1 * inputs.mean(0)
    torch.testing.assert_close(fitted.buffers["0.running_mean"], mean)
    assert int(fitted.buffers["0.num_batches_tracked"]) == fitted.steps == len(seen) == 3


# --- both -------------------------------------------------------------------------------------------

BOTH = [MART(eps=EPS, steps=2), AWP(gamma=0.02, eps=EPS, steps=2)]
by_name = pytest.mark.parametrize("defence", BOTH, ids=["mart", "awp"])


@by_name
def test_plans_agree_and_seeds_decide(defence: TrainingDefence) -> None:
    module = torch.nn.Linear(FEATURES, CLASSES)
    with torch.no_grad():
        module.weight.copy_(torch.arange(12.0).view(3, 4).sin())
        module.bias.zero_()
    program = capture(module, cross_entropy, (torch.zeros(2, FEATURES), torch.zeros(2, dtype=torch.int64)))
    eager = fit(program, defence)
    traced = fit(program, defence, plan="interpreter")
    assert traced.plan == "interpreter"
    for name, tensor in eager.params.items():
        torch.testing.assert_close(tensor, traced.params[name], atol=1e-4, rtol=1e-3)
    assert same(eager, fit(program, defence))
    assert not same(eager, fit(program, defence, seed=5))


@by_name
def test_interrupted_and_resumed_is_never_stopped(defence: TrainingDefence, tmp_path: Path) -> None:
    whole = fit(normalised(), defence, optimizer=adam(0.05))
    steps = iter(range(1, 100))
    with Run.create(tmp_path / "run", "train", "") as run:
        part = fit(normalised(), defence, optimizer=adam(0.05), run=run, should_stop=lambda: next(steps) == 4)
    assert part.steps == 4
    with Run.resume(tmp_path / "run") as run:
        result = fit(normalised(), defence, optimizer=adam(0.05), run=run)
    assert result.summary()["model_sha256"] == whole.summary()["model_sha256"]
    with Run.resume(tmp_path / "run") as run, pytest.raises((ConfigError, DataError), match="defence was"):
        fit(normalised(), PGDAT(eps=0.03), optimizer=adam(0.05), run=run)


@pytest.mark.parametrize("defence", [MART(eps=0.2, steps=3), AWP(eps=0.2, steps=3)], ids=["mart", "awp"])
def test_training_turns_to_the_feature_that_cannot_be_flipped(defence: TrainingDefence) -> None:
    """One strong feature and many weak ones that eps turns round (Tsipras et al., ICLR 2019)."""
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=600)
    weak = 0.5 + 0.1 * (2 * y[:, None] - 1) + 0.1 * rng.normal(size=(600, 12))
    strong = np.where(rng.random(600) < 0.9, y, 1 - y)[:, None] * 0.6 + 0.2
    data = Examples(np.clip(np.hstack([strong, weak]), 0, 1).astype(np.float32), y)
    module = torch.nn.Linear(13, 2)
    torch.nn.init.zeros_(module.weight)
    torch.nn.init.zeros_(module.bias)
    example = (torch.zeros(2, 13), torch.zeros(2, dtype=torch.int64))
    program = capture(module, cross_entropy, example, backend="eager")
    sways = []
    for updates in (PlainUpdates, defence):
        trainer = Trainer(
            program, adam(0.05), epochs=0, steps=120, batch_size=100, plan="eager", updates=updates
        )
        weight = trainer.fit(data).params["weight"]
        slope = weight[1] - weight[0]
        sways.append(float(0.2 * slope[1:].abs().sum() / (0.3 * slope[0])))  # weak under attack / strong
    assert sways[0] > 1
    assert 0 <= sways[1] < 0.6


@pytest.mark.parametrize(
    "make",
    [lambda: MART(weight=-1.0), lambda: MART(eps=-1.0), lambda: MART(steps=0), lambda: AWP(gamma=-1.0),
     lambda: AWP(gamma=float("inf")), lambda: AWP(norm="l0")],
)  # fmt: skip
def test_settings_out_of_range_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_by_name() -> None:
    assert build("mart", weight=2.0, eps="8/255") == MART(weight=2.0, eps=8 / 255)
    assert build("awp", gamma=0.01, bounds=[-1.0, 1.0]) == AWP(gamma=0.01, bounds=(-1.0, 1.0))


@pytest.mark.parametrize("name", ["mart", "awp"])
def test_clients_of_a_federation_have_steps_of_their_own(name: str) -> None:
    """As with TRADES: what a client minimises is said by the algorithm."""
    ((key, says),) = wrong_with_local(Named(name=name))
    assert key == "defence.name"
    assert f"{name} needs a step of its own" in says
