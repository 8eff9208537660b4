"""`mycelia simulate`: results, exit codes and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command_line import mycelia

SMALL = ["-s", "rounds=2", "-s", "cohort=3", "-s", "population.clients=10", "-s", 'backend="inline"']

KEYS = {
    "rounds", "seconds_total", "seconds_per_round", "sgd_steps_per_second", "test_accuracy", "test_loss",
    "worst_decile_accuracy", "bytes_up", "bytes_down", "epsilon", "delta", "model_sha256", "run_dir",
    "backend", "workers",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_json_holds_the_keys_and_the_run_folder_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = mycelia(capsys, "simulate", "quickstart", *SMALL, "--format", "json", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found.keys() >= KEYS
    assert found["rounds"] == 2
    assert (tmp_path / "run" / "report.html").is_file()
    assert (tmp_path / "run" / "report.json").is_file()
    assert "round 2/2" in done.err  # plain lines, for this is no terminal
    assert "\x1b" not in done.err


def test_text_names_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    done = mycelia(capsys, "simulate", "quickstart", *SMALL)
    assert done.code == 0, done.err
    assert "test accuracy" in done.out
    assert "runs/simulate-" in done.out


def test_a_second_run_into_the_same_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    done = mycelia(capsys, "simulate", "quickstart", *SMALL, "--out", tmp_path / "run")
    assert done.code == 2
    assert "not empty" in done.err
    assert (tmp_path / "run" / "mine.txt").read_text() == "mine"


def test_printed_settings_are_a_scenario_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = mycelia(capsys, "simulate", "fashion", "-s", "local.steps=5", "--seed", "7", "--print-config")
    assert first.code == 0
    (tmp_path / "mine.toml").write_text(first.out)
    again = mycelia(capsys, "simulate", "--config", tmp_path / "mine.toml", "--print-config")
    assert again.out == first.out
    assert "seed = 7" in first.out


def test_a_dry_run_says_what_would_run_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = mycelia(capsys, "simulate", "quickstart", "--dry-run", "--format", "json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["partition_clients"] == 100
    assert found["partition_examples"] == found["train_examples"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["no scenario", "quickstart"]),
        (["quikstart"], ["quikstart", "quickstart"]),
        (["quickstart", "--config", "x.toml"], ["both given"]),
        (["nowhere.toml"], ["nowhere.toml"]),
        (["quickstart", "-s", "cohrt=5"], ["cohrt", "cohort"]),
        (["quickstart", "-s", "local.stpes=5"], ["stpes", "steps"]),
        (["quickstart", "-s", "cohort=500"], ["500", "100"]),
        (["quickstart", "-s", "round.quorum=0"], ["quorum"]),
        (["quickstart", "-s", "round.budget_s=0"], ["budget_s"]),
        (["quickstart", "-s", "algorithm=fedavgg"], ["fedavgg", "fedavg"]),
        (["quickstart", "-s", "algorithm.mu=0.1"], ["mu"]),
        (["quickstart", "-s", "selector=unifrom"], ["unifrom", "uniform"]),
        (["quickstart", "-s", "partition=dirichlett"], ["dirichlett", "dirichlet"]),
        (["quickstart", "-s", "partition.alpha=-1"], ["alpha"]),
        (["quickstart", "-s", "model=mpl"], ["mpl", "mlp"]),
        (["quickstart", "-s", "data=digit"], ["digit", "digits"]),
        (["quickstart", "-s", "loss=cross"], ["cross"]),
        (["quickstart", "-s", "plan=fast"], ["plan"]),
        (["quickstart", "-s", "backend=ray"], ["ray", "not available"]),
        (["quickstart", "-s", "privacy.epsilon=1"], ["privacy.delta: missing", "privacy.clip: missing"]),
        (["quickstart", "-s", "defence={}"], ["defence.name: missing"]),
        (["quickstart", "-s", "adversary={}"], ["adversary", "not available"]),
        (["quickstart", "-s", "seed=-1"], ["seed"]),
        (["quickstart", "-s", "model=nowhere:model"], ["nowhere"]),
        (["--resume", "nowhere"], ["nowhere"]),
        (["quickstart", "--resume", "nowhere"], ["--resume together with SCENARIO"]),
    ],
)
def test_what_is_wrong_is_named_with_exit_code_2(
    arguments: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = mycelia(capsys, "simulate", *arguments)
    assert done.code == 2, done.err
    for word in words:
        assert word in done.err
    assert "Traceback" not in done.err
    assert done.out == ""
    assert not list(tmp_path.glob("runs/*/events.jsonl")), "nothing half-made is left"


def test_a_partition_without_room_names_the_client(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["-s", "population.clients=2000", "-s", "population.examples_per_client=50"]
    done = mycelia(capsys, "simulate", "quickstart", *settings)
    assert done.code in (1, 2)
    assert "overlap" in done.err
    assert "Traceback" not in done.err


def test_data_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    done = mycelia(capsys, "simulate", "quickstart", "-s", "data=npz:gone.npz")
    assert done.code in (1, 2)
    assert "gone.npz" in done.err


def test_labels_outside_the_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    inputs = np.zeros((50, 4), np.float32)
    np.savez(
        tmp_path / "set.npz",
        x_train=inputs,
        y_train=np.arange(50) % 12,
        x_test=inputs,
        y_test=np.arange(50) % 3,
    )
    done = mycelia(capsys, "simulate", "quickstart", "-s", 'data={name="npz:set.npz",classes=10}')
    assert done.code != 0
    assert "Traceback" not in done.err


def test_a_run_of_another_command_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = mycelia(
        capsys, "train", "-s", "epochs=1", "-s", "model.hidden=[8]", "-s", "plan=eager", "--out", "run"
    )
    assert trained.code == 0, trained.err
    done = mycelia(capsys, "simulate", "--resume", "run")
    assert done.code == 2
    assert "mycelia train --resume run" in done.err
