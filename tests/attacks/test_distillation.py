"""Defensive distillation: its loss, its two trainings, and that it hides more than it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from mycelia.attacks import PGD, Untargeted, as_model
from mycelia.attacks.defences import Distillation, build
from mycelia.attacks.defences.from_config import resume, train
from mycelia.attacks.defences.train_config import DefendedTrainConfig
from mycelia.engine.capture import capture
from mycelia.engine.config import load_config
from mycelia.engine.data import load
from mycelia.engine.errors import ConfigError
from mycelia.engine.losses import cross_entropy
from mycelia.engine.optimizers import adam, sgd
from mycelia.engine.program import Program
from mycelia.engine.training import FitResult, Trainer
from mycelia.engine.training.plain import PlainUpdates
from tests.attacks.training_worlds import CLASSES, FEATURES, examples, linear, normalised

torch.set_num_threads(1)


def fit(program: Program, updates: Any, count: int = 23, **options: Any) -> FitResult:
    options = dict[str, Any](epochs=2, batch_size=5, plan="eager", seed=4) | options
    trainer = Trainer(program, options.pop("optimizer", None) or sgd(0.1), updates=updates, **options)
    return trainer.fit(examples(count))


def teacher(seed: int = 1) -> nn.Module:
    module = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in module.parameters():
            each.copy_(3 * torch.randn(each.shape, generator=draw))
    return module


def test_temperature_1_without_a_teacher_is_plain_training() -> None:
    for make in (linear, normalised):
        found, plain = fit(make(), Distillation(1.0)), fit(make(), PlainUpdates)
        for name, tensor in {**found.params, **found.buffers}.items():
            torch.testing.assert_close(tensor, {**plain.params, **plain.buffers}[name])


@pytest.mark.parametrize("taught", [False, True])
def test_a_step(taught: bool) -> None:
    """Against torch's cross-entropy of z / T, with labels or with the teacher's softmax(z / T)."""
    program, data, module = linear(), examples(10), teacher()
    kept = {name: each.clone() for name, each in module.state_dict().items()}
    defence = Distillation(5.0, module if taught else None)
    result = fit(program, defence, 10, epochs=1, batch_size=10)
    params = {name: tensor.requires_grad_() for name, tensor in program.init()[0].items()}
    x, y = torch.from_numpy(data.inputs), torch.from_numpy(data.targets)
    assert module.training
    assert all(torch.equal(each, kept[name]) for name, each in module.state_dict().items())
    wanted = (module.eval()(x).detach() / 5).softmax(1) if taught else y
    loss = functional.cross_entropy((x @ params["weight"].T + params["bias"]) / 5, wanted)
    assert result.train_loss == pytest.approx(float(loss.detach()), rel=1e-5)
    loss.backward()
    for name, tensor in params.items():
        assert tensor.grad is not None
        torch.testing.assert_close(result.params[name], tensor.detach() - 0.1 * tensor.grad)


@pytest.mark.parametrize("taught", [False, True])
def test_plans_agree(taught: bool) -> None:
    torch.manual_seed(0)
    module = nn.Linear(FEATURES, CLASSES)
    program = capture(module, cross_entropy, (torch.zeros(2, FEATURES), torch.zeros(2, dtype=torch.int64)))
    defence = Distillation(5.0, teacher() if taught else None)
    eager, traced = fit(program, defence), fit(program, defence, plan="interpreter")
    assert traced.plan == "interpreter"
    for name, tensor in eager.params.items():
        torch.testing.assert_close(tensor, traced.params[name], atol=1e-5, rtol=1e-4)


def test_settings_tell_teachers_apart() -> None:
    assert Distillation(20.0, teacher(1)) == Distillation(20.0, teacher(1))
    assert Distillation(20.0, teacher(1)).describe() != Distillation(20.0, teacher(2)).describe()
    assert Distillation(20.0).sha256 == ""
    for temperature in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError):
            Distillation(temperature)
    with pytest.raises(ConfigError, match="a teacher of 5 classes"):
        fit(linear(), Distillation(2.0, nn.Linear(FEATURES, 5)))


def test_in_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trainings: the run folder of the first is the teacher of the second, which resumes to the bit."""
    monkeypatch.chdir(tmp_path)
    asked = {"model": {"name": "mlp", "hidden": [8]}, "batch_size": 64, "plan": "eager", "steps": 4}

    def config(**changes: Any) -> DefendedTrainConfig:
        return load_config(DefendedTrainConfig, asked | changes)

    train(config(defence={"name": "distillation", "temperature": 10.0}), out=Path("runs/first"))
    block = {"name": "distillation", "temperature": 10.0, "teacher": "runs/first"}
    whole = train(config(defence=block, seed=3))
    stopped = config(defence=block, seed=3, checkpoint={"steps": 2})

    def stop(event: object) -> None:
        if type(event).__name__ == "CheckpointSaved":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(stopped, out=Path("run"), listeners=[stop])
    assert resume(Path("run")).summary()["model_sha256"] == whole.summary()["model_sha256"]
    found = build("distillation", teacher="runs/first")
    assert isinstance(found, Distillation)
    assert len(found.sha256) == 64
    with pytest.raises(ConfigError):
        config(defence=block | {"teacher": "runs/none"})


def test_it_hides_and_does_not_hold() -> None:
    """Digits: gradients of the cross-entropy vanish and PGD on it fails; on the margin it does not."""
    data = load("digits")
    x, y = torch.from_numpy(data.test.inputs[:150]), torch.from_numpy(data.test.targets[:150])
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    program = capture(module, cross_entropy, (x[:2], y[:2]), backend="eager")

    def trained(updates: Any) -> FitResult:
        trainer = Trainer(program, adam(0.01), epochs=15, batch_size=64, plan="eager", updates=updates)
        return trainer.fit(data.train)

    first = trained(Distillation(50.0))
    tutor = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    tutor.load_state_dict(first.params)
    distilled, plain = trained(Distillation(50.0, tutor)), trained(PlainUpdates)
    held, clean, silent = {}, {}, {}
    for name, result in (("distilled", distilled), ("plain", plain)):
        model = as_model(program, params=result.params, buffers=result.buffers)
        right = model(x).argmax(1) == y
        clean[name] = float(right.double().mean())
        slope, _, _ = model.gradient(x, lambda z: functional.cross_entropy(z, y, reduction="none"))
        silent[name] = float((slope.flatten(1).abs().amax(1) < 1e-30).double().mean())
        for loss in ("ce", "margin"):
            found = PGD(steps=20, loss=loss).run(model, x, Untargeted(y), eps=0.15, rng=0)
            held[name, loss] = found.counts.held / len(x)
    assert min(clean.values()) > 0.9
    assert silent["distilled"] > 0.5 > silent["plain"]
    assert held["distilled", "ce"] > held["plain", "ce"] + 0.2
    assert held["distilled", "margin"] < held["distilled", "ce"] - 0.2
    assert held["distilled", "margin"] < held["plain", "margin"] + 0.25
