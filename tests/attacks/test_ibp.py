"""Certified training: degenerate settings are plain training, the loss is eq. 10, rows get certified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mycelia.attacks.defences import IBP, PGDAT, TrainingDefence, build, verify
from mycelia.attacks.defences.from_config import train
from mycelia.attacks.defences.ibp import worst_logits
from mycelia.attacks.defences.train_config import DefendedTrainConfig
from mycelia.attacks.defences.verification.reading import read
from mycelia.engine.capture import capture
from mycelia.engine.config import load_config
from mycelia.engine.data import Examples, load
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.losses import cross_entropy
from mycelia.engine.optimizers import adam, sgd
from mycelia.engine.program import Program
from mycelia.engine.run import Run
from mycelia.engine.training import FitResult, Trainer
from mycelia.engine.training.plain import PlainUpdates
from tests.attacks.training_worlds import CLASSES, FEATURES, examples, linear, normalised

torch.set_num_threads(1)


def fit(program: Program, updates: Any, data: Examples | None = None, **options: Any) -> FitResult:
    options = dict[str, Any](epochs=2, batch_size=5, plan="eager", seed=4) | options
    more = {name: options.pop(name) for name in ("run", "should_stop") if name in options}
    trainer = Trainer(program, options.pop("optimizer", None) or sgd(0.1), updates=updates, **options)
    return trainer.fit(data or examples(23), **more)


def same(found: FitResult, expected: FitResult) -> bool:
    mine, other = ({**each.params, **each.buffers} for each in (found, expected))
    return all(torch.equal(tensor, other[name]) for name, tensor in mine.items())


def net(features: int, width: int, classes: int, backend: Any = "export") -> Program:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, classes))
    example = torch.zeros(2, features), torch.zeros(2, dtype=torch.int64)
    return capture(module, cross_entropy, example, backend=backend)


@pytest.mark.parametrize("program", [linear, normalised])
@pytest.mark.parametrize("defence", [IBP(warmup=1000), IBP(kappa=1.0, ramp=2)], ids=["warmup", "kappa"])
def test_the_clean_loss_alone_is_plain_training(
    program: Callable[[], Program], defence: TrainingDefence
) -> None:
    options: dict[str, Any] = {"optimizer": adam(0.05), "clip_norm": 0.5}
    found, plain = fit(program(), defence, **options), fit(program(), PlainUpdates, **options)
    for name, tensor in found.params.items():
        torch.testing.assert_close(tensor, plain.params[name])
    assert all(torch.equal(tensor, plain.buffers[name]) for name, tensor in found.buffers.items())


def test_worst_logits_of_an_affine_model() -> None:
    """z_j − z_y at its corner of the ball within the box, for each j; the corner differs from j to j."""
    data = examples(12)
    x, y = torch.from_numpy(data.inputs), torch.from_numpy(data.targets)
    chain, tensors = read(linear())
    weight, bias = tensors["weight"], tensors["bias"]
    found = worst_logits(chain, x, y, 0.3, (0.0, 1.0), tensors)
    for j in range(CLASSES):
        slope = weight[j] - weight[y]
        corner = torch.where(slope > 0, (x + 0.3).clamp(0, 1), (x - 0.3).clamp(0, 1))
        torch.testing.assert_close(found[:, j], (slope * corner).sum(1) + bias[j] - bias[y])


def test_steps_are_those_of_equation_10() -> None:
    """Against autograd on intervals written out, with k and e as they rise after the warm-up."""
    program, data = net(FEATURES, 6, CLASSES, "eager"), examples(8)
    defence = IBP(eps=0.2, kappa=0.25, warmup=1, ramp=2)
    result = fit(program, defence, data, epochs=0, steps=5, batch_size=8)
    params = {name: tensor.requires_grad_() for name, tensor in program.init()[0].items()}
    x, y = torch.from_numpy(data.inputs), torch.from_numpy(data.targets)
    for share in (0.0, 0.0, 0.5, 1.0, 1.0):
        first, b, last, c = (params[name] for name in ("0.weight", "0.bias", "2.weight", "2.bias"))
        low, high = (x - 0.2 * share).clamp(0, 1), (x + 0.2 * share).clamp(0, 1)
        up, down = first.clamp(min=0), first.clamp(max=0)
        below, above = low @ up.T + high @ down.T + b, high @ up.T + low @ down.T + b
        below, above = below.relu(), above.relu()
        rows = []
        for i in range(8):
            slopes = last - last[y[i]]
            rows.append(slopes.clamp(min=0) @ above[i] + slopes.clamp(max=0) @ below[i] + c - c[y[i]])
        z = (x @ first.T + b).relu() @ last.T + c
        k = 1 - share * 0.75
        loss = k * functional.cross_entropy(z, y) + (1 - k) * functional.cross_entropy(torch.stack(rows), y)
        grads = torch.autograd.grad(loss, list(params.values()))
        params = {
            name: (tensor - 0.1 * grad).detach().requires_grad_()
            for (name, tensor), grad in zip(params.items(), grads, strict=True)
        }
    for name, tensor in params.items():
        torch.testing.assert_close(result.params[name], tensor.detach(), atol=1e-5, rtol=1e-4)


def test_plans_agree_and_running_statistics_are_the_training_passes() -> None:
    defence, program = IBP(eps=0.1, ramp=3), net(FEATURES, 6, CLASSES)
    eager, traced = fit(program, defence), fit(program, defence, plan="interpreter")
    assert traced.plan == "interpreter"
    for name, tensor in eager.params.items():
        torch.testing.assert_close(tensor, traced.params[name], atol=1e-4, rtol=1e-3)
    assert same(eager, fit(program, defence))
    assert not same(eager, fit(program, PlainUpdates))
    plain, bounded = fit(normalised(), PlainUpdates), fit(normalised(), defence)
    assert torch.equal(plain.buffers["0.running_mean"], bounded.buffers["0.running_mean"])
    assert not same(plain, bounded)


def test_interrupted_and_resumed_is_never_stopped(tmp_path: Path) -> None:
    """The ramp goes on where it was."""
    defence = IBP(eps=0.2, warmup=1, ramp=6)
    whole = fit(normalised(), defence, optimizer=adam(0.05))
    steps = iter(range(1, 100))
    with Run.create(tmp_path / "run", "train", "") as run:
        part = fit(normalised(), defence, optimizer=adam(0.05), run=run, should_stop=lambda: next(steps) == 4)
    assert part.steps == 4
    with Run.resume(tmp_path / "run") as run:
        result = fit(normalised(), defence, optimizer=adam(0.05), run=run)
    assert result.summary()["model_sha256"] == whole.summary()["model_sha256"]


def test_training_on_bounds_certifies_more() -> None:
    """Digits: intervals certify next to nothing of a plainly trained net, and much of one trained on them."""
    data = load("digits")
    x, y = torch.from_numpy(data.test.inputs), torch.from_numpy(data.test.targets)
    shares = []
    for updates in (PlainUpdates, PGDAT(eps=0.1, steps=3), IBP(eps=0.1, ramp=150)):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
        program = capture(module, cross_entropy, (x[:2], y[:2]), backend="eager")
        found = fit(program, updates, data.train, epochs=0, steps=300, batch_size=100, optimizer=adam(0.005))
        clean = program.predict(found.params, found.buffers, x).argmax(1) == y
        sure = verify(program, x, y, 0.1, method="interval", params=found.params, buffers=found.buffers)
        assert bool((clean | ~sure.certified).all())
        shares.append((float(clean.double().mean()), sure.accuracy or 0.0))
    (plain, none), (_, some), (bounded, much) = shares
    assert plain > 0.9
    assert bounded > 0.8
    assert none < 0.1
    assert much > 0.5
    assert much > some


def test_by_name_and_in_a_configuration(tmp_path: Path) -> None:
    assert build("ibp", eps="8/255", ramp=10, bounds=[-1, 1]) == IBP(ramp=10, bounds=(-1.0, 1.0))
    asked = {"model": {"name": "mlp", "hidden": [8]}, "batch_size": 64, "plan": "eager", "steps": 3}
    defence = {"name": "ibp", "eps": 0.1, "ramp": 2}
    assert train(load_config(DefendedTrainConfig, asked | {"defence": defence})).steps == 3
    other = asked | {"model": {"name": "tanh-cnn"}, "data": "digits", "defence": defence}
    with pytest.raises(ConfigError, match="no bounds for"):
        train(load_config(DefendedTrainConfig, other), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "make",
    [lambda: IBP(eps=-1.0), lambda: IBP(kappa=1.5), lambda: IBP(kappa=float("nan")), lambda: IBP(ramp=0),
     lambda: IBP(warmup=-1), lambda: IBP(bounds=(1.0, 0.0))],
)  # fmt: skip
def test_settings_out_of_range_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_inputs_beyond_their_bounds_are_refused() -> None:
    data = examples(8)
    wide = Examples(data.inputs * 3 - 1, data.targets)
    with pytest.raises(DataError, match="bounds"):
        fit(linear(), IBP(), wide)


def test_gradients_pass_through_all_layers() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(2 * 2 * 2, 3),
    ).double()  # fmt: skip
    torch.manual_seed(1)
    x, y = torch.rand(2, 1, 8, 8).double(), torch.tensor([0, 2])
    chain, tensors = read(module)
    names = list(tensors)

    def loss(*values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        return functional.cross_entropy(worst_logits(chain, x, y, 0.05, (0.0, 1.0), given), y)

    assert torch.autograd.gradcheck(loss, [each.clone().requires_grad_() for each in tensors.values()])
