"""Private training in one place, through `Trainer` and `mycelia train`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mycelia.engine.capture import capture
from mycelia.engine.config import load_config
from mycelia.engine.data import Examples, load
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.losses import cross_entropy
from mycelia.engine.optimizers import Optimizer, sgd
from mycelia.engine.run import CHECKPOINTS, CONFIG
from mycelia.engine.schema import model_sha256
from mycelia.engine.training import FitResult, Trainer
from mycelia.privacy.accounting import epsilon
from mycelia.privacy.attach import DPAdamBC
from mycelia.privacy.budget import Budget
from mycelia.privacy.calibrate import OutOfReach
from mycelia.privacy.central import plan_training, private, resume, train
from mycelia.privacy.central_config import CentralPrivacy, PrivateTrainConfig
from mycelia.privacy.ledger import FILE, Ledger
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.optimizers import adam_bc
from mycelia.privacy.sampling import Poisson


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the command has it: the number of threads decides the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SEEDED = {
    "unit": "example",
    "epsilon": 4.0,
    "delta": 1e-4,
    "clip": {"name": "abadi", "bound": 1.0},
    "noise_source": "seeded",
}


def settings(**changes: object) -> dict[str, object]:
    """A short private training on the digits; a table `privacy` changes single keys of the block."""
    block = SEEDED | dict(changes.pop("privacy", {}))  # type: ignore[call-overload]
    return {"epochs": 1, "batch_size": 128, "checkpoint": {"steps": 3}} | changes | {"privacy": block}


def config(**changes: object) -> PrivateTrainConfig:
    return load_config(PrivateTrainConfig, settings(**changes))


def examples(count: int = 40) -> Examples:
    draw = np.random.default_rng(5)
    return Examples(
        draw.normal(size=(count, 6)).astype(np.float32), draw.integers(0, 3, count).astype(np.int64)
    )


def program(model: torch.nn.Module | None = None) -> object:
    torch.manual_seed(0)
    model = model or torch.nn.Linear(6, 3)
    return capture(model, cross_entropy, (torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64)))


def fit(
    block: dict[str, object],
    *,
    steps: int = 4,
    batch_size: int = 8,
    optimizer: Optimizer | None = None,
    **more: object,
) -> FitResult:
    data = examples()
    made = private(
        load_config(CentralPrivacy, SEEDED | {"delta": 1e-3} | block), batch_size=batch_size,
        examples=len(data), steps=steps,
    )  # fmt: skip
    return Trainer(
        program(), optimizer or sgd(lr=0.5), steps=steps, batch_size=batch_size, updates=made,
        **({"seed": 3} | more),
    ).fit(data)  # fmt: skip


def test_epsilon_is_that_of_the_same_numbers_elsewhere(tmp_path: Path) -> None:
    result = train(config(privacy={"noise_multiplier": 1.3}), out=tmp_path / "run")
    examples = len(load("digits").train)
    assert result.steps == -(-examples // 128)
    said = Ledger.load(tmp_path / "run" / FILE).statement(1e-4)
    assert result.epsilon == said.epsilon
    assert said.epsilon == epsilon(Poisson(said.sampling_rate or 0), 1.3, result.steps, 1e-4).epsilon
    assert said.sampling_rate == 128 / examples
    assert result.summary()["epsilon"] == said.epsilon
    assert "Privacy" in (tmp_path / "run" / "report.html").read_text()


def test_noise_that_is_left_out_spends_the_budget_and_no_more(tmp_path: Path) -> None:
    result = train(config(), out=tmp_path / "run")
    assert result.epsilon is not None
    assert 3.9 < result.epsilon <= 4.0
    assert result.stopped_by == ""


def test_the_budget_ends_training_at_the_last_update_it_pays_for(tmp_path: Path) -> None:
    result = train(config(epochs=5, privacy={"noise_multiplier": 0.7, "epsilon": 3.0}), out=tmp_path / "run")
    last = Ledger.load(tmp_path / "run" / FILE).last
    assert last is not None
    event = replace(last, step=0, count=1)
    assert result.steps == Budget(3.0, 1e-4).remaining(event)
    assert result.stopped_by == "budget"
    assert result.metrics
    again = resume(tmp_path / "run")
    assert (again.steps, again.epsilon, again.stopped_by) == (result.steps, result.epsilon, "budget")


@pytest.mark.parametrize("source", ["seeded", "os"])
def test_killed_and_resumed_it_is_the_same_run(tmp_path: Path, source: str) -> None:
    block = {"noise_source": source, "epsilon": 8.0}
    whole = train(config(epochs=3, privacy=block), out=tmp_path / "whole")
    toml = tmp_path / "config.json"
    toml.write_text(json.dumps(settings(epochs=3, privacy=block)))
    code = (
        "import json, sys, torch; torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "from mycelia.engine.config import load_config\n"
        "from mycelia.privacy.central import train\n"
        "from mycelia.privacy.central_config import PrivateTrainConfig\n"
        "asked = json.loads(Path(sys.argv[1]).read_text())\n"
        "train(load_config(PrivateTrainConfig, asked), out=Path(sys.argv[2]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(toml), str(tmp_path / "killed")])
    ledger = tmp_path / "killed" / FILE
    deadline = time.monotonic() + 120
    while not ledger.exists() or ledger.read_bytes().count(b"\n") < 9:  # past a checkpoint, not at one
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    result = resume(tmp_path / "killed")
    assert (result.steps, result.plan) == (whole.steps, whole.plan)
    assert result.steps == whole.steps
    assert result.epsilon == pytest.approx(whole.epsilon, rel=1e-12)
    assert Ledger.load(ledger).steps == whole.steps
    if source == "seeded":
        assert model_sha256(result.params) == model_sha256(whole.params)
    else:
        assert (tmp_path / "killed" / "noise.key").stat().st_mode & 0o077 == 0


def test_without_clipping_and_noise_it_is_sgd_on_the_drawn_batches() -> None:
    block = {"clip": {"name": "abadi", "bound": 20.0}, "noise_multiplier": 1e-3, "epsilon": 1e7}
    found = fit(block | {"sampler": "shuffle"}, steps=3)
    data = examples()
    plan = plan_training(
        load_config(CentralPrivacy, SEEDED | {"delta": 1e-3} | block | {"sampler": "shuffle"}),
        batch_size=8, examples=40, steps=3,
    )  # fmt: skip
    own, _ = program().init()  # type: ignore[attr-defined]
    weight, bias = own["weight"].clone(), own["bias"].clone()
    for _, part in zip(range(3), plan.settings.sampler.draw(40, NoiseSource.seeded(3)), strict=False):
        w, b = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        rows = part.indices
        out = torch.from_numpy(data.inputs[rows]) @ w.t() + b
        loss = torch.nn.functional.cross_entropy(out, torch.from_numpy(data.targets[rows]))
        gw, gb = torch.autograd.grad(loss, (w, b))
        weight, bias = weight - 0.5 * gw, bias - 0.5 * gb
    # noise of 20 * 1e-3 / 8 at rate 0.5, three times: six standard deviations are 0.013
    torch.testing.assert_close(found.params["weight"], weight, rtol=0, atol=0.013)
    torch.testing.assert_close(found.params["bias"], bias, rtol=0, atol=0.013)


def test_the_same_seed_gives_the_same_model_and_another_seed_another() -> None:
    assert model_sha256(fit({}).params) == model_sha256(fit({}).params)
    assert model_sha256(fit({}).params) != model_sha256(fit({}, seed=4).params)


@pytest.mark.parametrize("plan", ["eager", "interpreter"])
def test_plans_agree(plan: str) -> None:
    expected = fit({})
    found = fit({}, plan=plan)
    assert found.plan == plan
    for name, tensor in found.params.items():
        torch.testing.assert_close(tensor, expected.params[name], rtol=1e-5, atol=1e-6)


def test_parts_of_a_batch_are_one_update() -> None:
    whole, parts = fit({}, steps=5), fit({"physical": 3}, steps=5)
    assert parts.steps == whole.steps
    assert parts.epsilon == whole.epsilon
    for name, tensor in parts.params.items():
        torch.testing.assert_close(tensor, whole.params[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "block",
    [
        {"sampler": "fixed"},
        {"sampler": "shuffle"},
        {"schedule": "exp:0.05"},
        {"clip": {"name": "quantile", "target": 0.6, "sigma_b": 40.0}},
        {"clip": {"name": "auto-s", "bound": 0.5}},
        {"clip": {"name": "per-layer", "bound": 1.0, "groups": [["weight"], ["bias"]]}},
        {"factorisation": {"name": "blt", "buffers": 2}},
        {"factorisation": "sqrt-toeplitz"},
        {"mechanism": "discrete-gaussian"},
        {"factorisation": {"name": "blt", "buffers": 2}, "mechanism": "discrete-gaussian"},
    ],
    ids=str,
)
def test_every_setting_trains_within_its_budget(block: dict[str, object]) -> None:
    result = fit(block, steps=6)
    assert result.steps == 6
    assert result.epsilon is not None
    assert 0 < result.epsilon <= 4.0
    assert all(bool(tensor.isfinite().all()) for tensor in result.params.values())


@pytest.mark.parametrize(
    "block",
    [{"clip": {"name": "quantile", "bound": 0.5, "sigma_b": 40.0}}, {"schedule": "exp:0.3"}],
    ids=["adaptive clip", "decaying noise"],
)
def test_it_is_what_an_ordinary_loop_makes(block: dict[str, object]) -> None:
    """The same draws, clipping, noise and ε, also where the optimiser has to know each step's noise."""
    block = {"noise_multiplier": 1.0, "epsilon": 50.0} | block
    found = fit(block, steps=6, optimizer=adam_bc(0.01, floor=1e-4))
    chosen = load_config(CentralPrivacy, SEEDED | {"delta": 1e-3} | block)
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    loop = DPAdamBC(
        model, cross_entropy, lr=0.01, floor=1e-4, sampler=Poisson(8 / 40), clip=chosen.clip_function(),
        noise=chosen.noise_at(1.0), expected_batch=8.0, source=NoiseSource.seeded(3),
    )  # fmt: skip
    for batch in loop.batches((examples().inputs, examples().targets)):
        loop.loss(batch).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if loop.steps == 6:
            break
    assert found.epsilon == pytest.approx(loop.ledger.statement(1e-3).epsilon, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.params[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_the_corrected_adam_is_there_where_training_is_private(tmp_path: Path) -> None:
    table = {"name": "adam-bc", "lr": 0.01, "floor": 1e-4}
    whole = train(config(optimizer=table, schedule="cosine"), out=tmp_path / "whole")
    stop = tmp_path / "stop"
    train(config(optimizer=table, schedule="cosine"), out=stop)
    first, *later = sorted((stop / CHECKPOINTS).glob("step-*"))
    assert first.name < later[-1].name
    for path in later:
        shutil.rmtree(path)
    assert model_sha256(resume(stop).params) == model_sha256(whole.params)
    for changes, said in (
        ({"optimizer": "adam-bc", "privacy": {"factorisation": "blt"}}, "independent noise"),
        ({"optimizer": {"name": "adam-bc", "eps": 1e-8}}, "its options are lr, betas, floor"),
        ({"optimizer": {"name": "adam-bc", "floor": "low"}}, "floor"),
        ({"optimizer": {"name": "adam-bc", "lr": -1.0}, "schedule": "cosine"}, "lr"),
    ):
        with pytest.raises(ConfigError, match=said):
            config(**changes)
    with pytest.raises(ConfigError, match="without privacy"):
        load_config(PrivateTrainConfig, {"optimizer": "adam-bc"})
    with pytest.raises(ConfigError, match="independent noise"):
        fit({"factorisation": "blt"}, optimizer=adam_bc())


def test_a_ledger_names_the_source_that_the_noise_comes_from(tmp_path: Path) -> None:
    train(config(privacy={"noise_source": "os", "mechanism": "gaussian"}), out=tmp_path / "run")
    path = tmp_path / "run" / CONFIG
    path.write_text(path.read_text().replace('noise_source = "os"', 'noise_source = "seeded"'))
    with pytest.raises(ConfigError, match="names the source"):
        resume(tmp_path / "run")


def test_a_ledger_of_another_run_stops_the_resume(tmp_path: Path) -> None:
    train(config(), out=tmp_path / "run")
    path = tmp_path / "run" / FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]))
    with pytest.raises(DataError, match="ledger"):
        resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"privacy": {"delta": 0.001}}, "one over the number"),
        ({"clip_norm": 1.0}, "clip_norm"),
        ({"batch_size": 10_000}, "training examples"),
        ({"plan": "tune"}, "private steps"),
        ({"privacy": {"unit": "client"}}, "unit"),
        ({"privacy": {"schedule": "never:1"}}, "schedule"),
        ({"privacy": {"factorisation": "blt", "sampler": "poisson"}}, "sampler"),
        ({"privacy": {"factorisation": "blt", "schedule": "exp:0.1"}}, "schedule"),
        ({"privacy": {"clip": {"name": "abadi", "bound": -1.0}}}, "bound"),
        ({"privacy": {"sampling_rate": 0.1}}, "sampling_rate"),
        ({"privacy": {"epsilon": 0}}, "epsilon"),
        ({"privacy": {"noise_multiplier": 0.2, "epsilon": 0.5}}, "first update"),
        ({"privacy": {}, "model": {"name": "mlp"}, "epochs": 0}, "steps"),
    ],
)
def test_what_has_no_bound_is_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises((ConfigError, OutOfReach), match=said):
        train(config(**changes), out=tmp_path / "run")
    assert not (tmp_path / "run" / FILE).exists()
