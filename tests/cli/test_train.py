from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

from mycelia.cli.main import app
from mycelia.cli.output import run_command
from mycelia.engine import events as e
from mycelia.engine.checkpoint import load_checkpoint
from mycelia.engine.config import load_config
from mycelia.engine.run import Run
from mycelia.engine.schema import model_sha256
from mycelia.engine.train_config import TrainConfig

SMALL = ["model.hidden=[8]", "epochs=2", "plan=eager"]
KEYS = [
    "epochs", "steps", "seconds_total", "train_loss", "test_loss", "test_accuracy", "epsilon", "delta",
    "plan", "model_sha256", "run_dir",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MYCELIA_DATA", raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def mycelia(*arguments: str) -> int:
    return run_command(typer.main.get_command(app()), arguments)


def overrides(settings: list[str]) -> list[str]:
    return [part for setting in settings for part in ("-s", setting)]


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert mycelia("train", *arguments, "--format", "json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The error of a command that must fail without leaving a run."""
    before = sorted(Path().rglob("*"))
    assert mycelia("train", *arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts) == before
    return captured.err


# What works


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished run's folder, and what its command printed."""
    run = tmp_path_factory.mktemp("trained") / "run"
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert mycelia("train", *overrides(SMALL), "--out", str(run), "--format", "json") == 0
    return run, json.loads(printed.getvalue())


def test_json_says_what_the_run_says(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, found = trained
    assert [key for key in found if key in KEYS] == KEYS
    assert (found["epochs"], found["steps"], found["plan"]) == (2, 90, "eager")
    assert found["epsilon"] is None
    assert found["delta"] is None
    assert found["run_dir"] == str(folder)
    run = Run.open(folder)
    (finished,) = run.events({"run_finished"})
    assert isinstance(finished, e.RunFinished)
    assert finished.result == found
    *_, measured = run.events({"evaluation"})
    assert isinstance(measured, e.Evaluation)
    assert (measured.metrics["loss"], measured.metrics["accuracy"]) == (
        found["test_loss"],
        found["test_accuracy"],
    )
    # the hash is that of the model in the last checkpoint, by the module's own names
    kept = load_checkpoint(folder / "checkpoints")
    model = {
        n.partition("/")[2]: t for n, t in kept.tensors.items() if n.startswith(("parameter/", "buffer/"))
    }
    assert sorted(model) == ["fc1.bias", "fc1.weight", "out.bias", "out.weight"]
    assert model_sha256(model) == found["model_sha256"]
    assert json.loads((folder / "report.json").read_text())["run"]["status"] == "finished"
    assert (folder / "report.html").stat().st_size > 1000
    assert load_config(TrainConfig, folder / "config.toml") == load_config(TrainConfig, {}, SMALL)


def test_the_defaults_learn_the_digits(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys)
    assert found["steps"] == 10 * 45
    # a linear model reaches 0.96 on this split; the default must not be worse by more than a point
    assert found["test_accuracy"] >= 0.95
    assert found["plan"] == "interpreter"
    assert Path(found["run_dir"]).parent == Path("runs")
    assert torch.get_num_threads() == 1


def test_text_for_people(capsys: pytest.CaptureFixture[str], trained: tuple[Path, dict[str, Any]]) -> None:
    assert mycelia("train", *overrides(SMALL), "--out", "run", "--seed", "1") == 0
    captured = capsys.readouterr()
    lines = dict(line.split("  ", 1) for line in captured.out.splitlines())
    assert lines["test accuracy"].strip().endswith("%")
    assert Path(lines["report"].strip()).is_file()
    assert "epsilon" not in lines
    assert lines["model"].strip() != trained[1]["model_sha256"]  # another seed
    # no terminal: plain lines
    assert "\x1b" not in captured.out + captured.err
    assert captured.err.splitlines()[0].startswith("step 10/90  train loss ")


def test_bf16(capsys: pytest.CaptureFixture[str], trained: tuple[Path, dict[str, Any]]) -> None:
    found = result(capsys, *overrides([*SMALL, "precision=bf16"]), "--out", "run")
    assert found["model_sha256"] != trained[1]["model_sha256"]
    # products have 8 bits of precision, sums more: the loss is the same to two digits
    assert found["train_loss"] == pytest.approx(trained[1]["train_loss"], rel=0.02)
    meta = load_checkpoint(Path("run/checkpoints")).meta
    assert meta["settings"]["transforms"] == ["bf16"]


def test_regression_and_binary_classes(capsys: pytest.CaptureFixture[str]) -> None:
    regression = result(capsys, *overrides([*SMALL, "data=diabetes", "loss=mse", "epochs=20"]))
    assert regression["test_accuracy"] is None
    assert regression["test_loss"] < 1.0  # the target has variance 1
    assert "test_auroc" not in regression
    binary = result(capsys, *overrides([*SMALL, "data=breast-cancer", "evaluation.top_k=[1]"]))
    assert binary["test_top_1_accuracy"] == binary["test_accuracy"]
    assert 0.9 < binary["test_auroc"] <= 1.0
    assert 0.5 < binary["test_macro_f1"] <= 1.0


def test_print_config_is_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        mycelia("train", "--print-config", "-s", "optimizer=sgd", "-s", "optimizer.lr=0.5", "--seed", "4")
        == 0
    )
    Path("c.toml").write_text(capsys.readouterr().out)
    config = load_config(TrainConfig, Path("c.toml"))
    assert (config.optimizer.name, config.optimizer.options, config.seed) == ("sgd", {"lr": 0.5}, 4)
    assert (config.model.name, config.data.name, config.loss) == ("mlp", "digits", "cross-entropy")
    assert mycelia("train", "--config", "c.toml", "--print-config") == 0
    assert capsys.readouterr().out == Path("c.toml").read_text()


def test_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "--dry-run", *overrides(SMALL), "--out", "run")
    assert (found["train_examples"], found["test_examples"], found["classes"]) == (1438, 359, 10)
    assert (found["steps"], found["steps_per_epoch"]) == (90, 45)
    assert found["parameters"] == 64 * 8 + 8 + 8 * 10 + 10
    assert list(Path().iterdir()) == []


USER = """
import numpy as np, torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self, classes, scale=1.0):
        super().__init__()
        self.layer = nn.Linear(4, classes)
        self.scale = scale

    def forward(self, inputs):
        return self.scale * self.layer(inputs)

class Branching(Scaled):
    def forward(self, inputs):
        return super().forward(inputs) if inputs.sum().item() > 0 else -super().forward(inputs)

def model(input_shape, classes, scale=1.0):
    return Scaled(classes, scale)

def branching(input_shape, classes):
    return Branching(classes)

def data(labels=3):
    rng = np.random.default_rng(0)
    targets = np.arange(60) % labels
    return rng.normal(size=(60, 4)).astype(np.float32) + np.eye(4, dtype=np.float32)[targets % 4], targets

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1, reduction="none")

def reduced(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
"""


def test_own_model_data_and_loss(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train_user_parts.py").write_text(USER)
    parts = [f"{part}=train_user_parts:{part}" for part in ("model", "data", "loss")]
    found = result(capsys, *overrides([*parts, "model.scale=2.0", "data.labels=4", "steps=5", "plan=eager"]))
    assert found["steps"] == 5


# What goes wrong


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["bach_size=3"], ["bach_size: unknown key", "'batch_size'"]),
        (["privacy.epsilon=3"], ["privacy.unit: missing", "privacy.delta: missing", "privacy.clip: missing"]),
        (["privacy={}"], ["privacy.unit: missing"]),
        (["privacy={unit='example', epsilon=3, delta=1e-3, clip={name='abadi', bound=1}}"], ["one over"]),
        (["defence={name='krum'}", "epochs='3'"], ["epochs = '3'"]),
        (["optimizer=adma"], ["adma", "'adam'"]),
        (["optimizer.nesterow=true"], ["nesterow", "lr, betas"]),
        (["schedule=cosin"], ["cosin", "'cosine'"]),
        (["schedule={name='cosine', lr=1.0}"], ["optimizer.lr"]),
        (["epochs=0"], ["epochs and steps are both 0"]),
        (["batch_size=0"], ["batch_size = 0"]),
        (["model=lenett"], ["lenett", "lenet"]),
        (["data=digit"], ["digit", "'digits'"]),
        (["loss=mse2"], ["mse2"]),
        (["data=record:x"], ["not available in this version"]),
        (["plan=fast"], ["plan = 'fast'"]),
        (["evaluation.top_k=[11]"], ["top_k", "1..10"]),
        (["model=nowhere_at_all:model"], ["nowhere_at_all"]),
    ],
)
def test_settings_that_are_wrong(
    capsys: pytest.CaptureFixture[str], settings: list[str], words: list[str]
) -> None:
    message = refused(capsys, *overrides(settings), "--out", "run")
    for word in words:
        assert word in message


def test_data_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(capsys, "-s", "data=npz:missing.npz", code=1)
    assert "missing.npz" in message
    np.savez("wrong.npz", x_train=np.zeros((4, 3), np.float32), y_train=np.array([0, 1, 2, 9]))
    message = refused(capsys, "-s", "data={name='npz:wrong.npz', classes=3}", code=1)
    assert "row 3 has label 9" in message
    assert "no such file" in refused(capsys, "--config", "nowhere.toml")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model=train_user_bad:branching"], ["cannot be exported", "train_user_bad.py"]),
        (["loss=train_user_bad:reduced"], ["a single number", 'reduction="none"']),
        (["loss=bce"], ["outputs [2, 3] do not fit targets [2]"]),
    ],
)
def test_what_cannot_be_captured(
    capsys: pytest.CaptureFixture[str], settings: list[str], words: list[str]
) -> None:
    Path("train_user_bad.py").write_text(USER)
    everything = ["data=train_user_bad:data", "model=train_user_bad:model", *settings]
    message = refused(capsys, *overrides(everything), code=1)
    for word in words:
        assert word in message


def test_a_loss_that_explodes(capsys: pytest.CaptureFixture[str]) -> None:
    exploding = [*SMALL, "data=diabetes", "loss=mse", "optimizer={name='sgd', lr=1e6}"]
    assert mycelia("train", *overrides(exploding), "--out", "run") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "is inf at step" in captured.err or "is nan at step" in captured.err
    assert json.loads(Path("run/events.jsonl").read_text().splitlines()[-1])["status"] == "failed"


def test_a_folder_in_use(capsys: pytest.CaptureFixture[str], trained: tuple[Path, dict[str, Any]]) -> None:
    assert "there is a run already" in refused(capsys, "--out", str(trained[0]))
    Path("notes").mkdir()
    Path("notes/a.txt").write_text("mine")
    assert "not empty" in refused(capsys, "--out", "notes")


def test_resume_of_what_is_no_training(capsys: pytest.CaptureFixture[str]) -> None:
    with Run.create(Path("federation"), "simulate", "rounds = 3\n") as run:
        run.log(e.RunStarted(command="simulate"))
    assert "mycelia simulate --resume" in refused(capsys, "--resume", "federation")
    assert "no such folder" in refused(capsys, "--resume", "nowhere")
    assert "together with settings, seed" in refused(
        capsys, "--resume", "federation", "-s", "epochs=3", "--seed", "1"
    )
    with Run.create(Path("later"), "train", "") as run:
        run.log(e.RunStarted(command="train"))
    log = Path("later/events.jsonl")
    log.write_text(log.read_text().replace('"v":1', '"v":99'))
    assert "schema version 99" in refused(capsys, "--resume", "later")


def test_resume_of_a_run_that_had_only_begun(
    capsys: pytest.CaptureFixture[str], trained: tuple[Path, dict[str, Any]]
) -> None:
    config = (trained[0] / "config.toml").read_text()
    Run.create(Path("begun"), "train", config).close()
    found = result(capsys, "--resume", "begun")
    assert found | {"seconds_total": 0, "run_dir": ""} == trained[1] | {"seconds_total": 0, "run_dir": ""}


# The command as a process of its own


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mycelia.cli", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# so long that the signal arrives in training
LONG = ["model.hidden=[8]", "epochs=8", "batch_size=4", "checkpoint.steps=100", "seed=2"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    printed, out = io.StringIO(), str(tmp_path_factory.mktemp("whole") / "run")
    with redirect_stdout(printed):
        assert mycelia("train", *overrides(LONG), "--out", out, "--format", "json") == 0
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_and_resumed(
    capsys: pytest.CaptureFixture[str], undisturbed: dict[str, Any], number: signal.Signals
) -> None:
    process = start(*overrides(LONG), "--out", "run", "--format", "json")
    assert process.stderr is not None
    for line in process.stderr:
        if int(line.split()[1].split("/")[0]) >= 200:
            break
    os.kill(process.pid, number)
    out, errors = process.communicate(timeout=120)
    assert out == ""
    if number == signal.SIGKILL:
        assert process.returncode == -9
    else:
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        assert "go on with: mycelia train --resume run" in errors
        *_, finished = Run.open(Path("run")).events({"run_finished"})
        assert isinstance(finished, e.RunFinished)
        assert finished.status == "interrupted"
    assert 0 < load_checkpoint(Path("run/checkpoints")).step < undisturbed["steps"]
    resumed = result(capsys, "--resume", "run")
    changing = {"seconds_total": 0, "run_dir": ""}
    assert resumed | changing == undisturbed | changing


@pytest.mark.e2e
def test_a_second_process_does_not_write_the_same_run() -> None:
    with Run.create(Path("run"), "train", ""):
        process = start("--resume", "run")
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "another process is writing this run" in errors
