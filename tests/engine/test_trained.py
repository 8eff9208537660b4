"""The model of a run is the one that the run says it ended with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mycelia.engine.config import Named, load_config
from mycelia.engine.data import load
from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.engine.models import build
from mycelia.engine.run import Run
from mycelia.engine.train_config import TrainConfig
from mycelia.engine.trained import of_run, of_weights
from mycelia.engine.training import train
from mycelia.simulations import simulate
from mycelia.simulations.scenario import Scenario

MLP: dict[str, Any] = {"model": {"name": "mlp", "hidden": [8]}, "data": "digits", "seed": 5}
RESNET = MLP | {"model": {"name": "resnet8", "norm": "batch"}}  # has buffers and counters


def accuracy(module: nn.Module) -> float:
    test = load("digits").test
    with torch.no_grad():
        found = module(torch.from_numpy(test.inputs)).argmax(1)
    return float((found == torch.from_numpy(test.targets)).double().mean())


@pytest.mark.parametrize("settings", [MLP, RESNET], ids=["mlp", "batch-norm"])
def test_a_trained_model_predicts_as_it_was_measured(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = load_config(TrainConfig, settings | {"steps": 20, "plan": "eager"})
    summary = train(config, out=tmp_path / "run").summary()
    found = of_run(tmp_path / "run")
    assert found.sha256 == summary["model_sha256"]
    assert accuracy(found.module) == pytest.approx(summary["test_accuracy"])
    assert not found.module.training
    assert (found.run_dir, found.step, found.data) == (str(tmp_path / "run"), 20, Named(name="digits"))


def test_a_federated_model_predicts_as_it_was_measured(tmp_path: Path) -> None:
    table = RESNET | {"rounds": 1, "cohort": 2, "backend": "inline", "population": {"clients": 4}}
    result = simulate(load_config(Scenario, table), out=tmp_path / "run")
    found = of_run(tmp_path / "run")
    assert found.sha256 == result.model_sha256
    assert accuracy(found.module) == pytest.approx(result.test_accuracy)


def test_weights_of_a_model_by_name(tmp_path: Path) -> None:
    dataset = load("digits")
    module = build("resnet8", dataset.input_shape, 10, seed=3, norm="batch")
    save_file(module.state_dict(), tmp_path / "weights.safetensors")
    found = of_weights(Named(name="resnet8", norm="batch"), tmp_path / "weights.safetensors", dataset)
    for name, tensor in module.state_dict().items():
        assert torch.equal(found.module.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda tensors: tensors.popitem(), "there is no tensor"),
        (lambda tensors: tensors.update(more=torch.zeros(1)), "no tensor 'more'"),
        (lambda tensors: tensors.update({k: v.double() for k, v in tensors.items()}), "float64"),
        (lambda tensors: tensors.update({k: v[None] for k, v in tensors.items()}), r"\[1, "),
    ],
    ids=["missing", "unknown", "dtype", "shape"],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, spoil: Any, said: str) -> None:
    dataset, path = load("digits"), tmp_path / "weights.safetensors"
    save_file(build("mlp", dataset.input_shape, 10).state_dict(), path)
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path)
    with pytest.raises(DataError, match=said):
        of_weights(Named(name="mlp"), path, dataset)


def test_what_is_no_run_with_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        of_run(tmp_path)
    for number, (toml, said) in enumerate(
        [
            ("", "names no model"),
            ("model = 3", "model is 3"),
            ("model = [", "cannot be read"),
            ('model = "mlp"', "names no data"),
            ('model = "mlp"\ndata = "none"', "names no data"),
            ('model = "mlp"\ndata = "digits"', "no checkpoint"),
        ]
    ):
        folder = tmp_path / str(number)
        Run.create(folder, "train", toml).close()
        with pytest.raises(MyceliaError, match=said):
            of_run(folder)
    for content in (b"", b"\xff" * 100):
        path = tmp_path / "weights"
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):
            of_weights(Named(name="mlp"), path, load("digits"))
