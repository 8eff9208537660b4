"""`mycelia runs list | compare | show`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mycelia.engine import events as e
from tests.cli.command_line import mycelia
from tests.engine.run_factory import START, result, simulated_run, started, write_run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Six finished runs whose accuracy follows the learning rate, one that failed, one that died."""
    for index, (algorithm, lr) in enumerate(
        (a, lr) for a in ("fedavg", "fedprox") for lr in (0.01, 0.1, 1.0)
    ):
        config = {"model": "mlp", "algorithm": {"name": algorithm}, "local": {"lr": lr}}
        accuracy = 0.8 + 0.05 * [0.01, 0.1, 1.0].index(lr)
        events = [
            started(t=START + index + 1, config=config),
            e.RunFinished(result(20, test_accuracy=accuracy), t=START + index + 43),
        ]
        write_run(tmp_path / f"run-{index}", events)
    write_run(tmp_path / "failed", [started(t=START + 50), e.RunFinished(status="failed", error="x")])
    write_run(tmp_path / "died", simulated_run(3, 10, end=False))
    return tmp_path


def names(out: str) -> list[str]:
    return [run["name"] for run in json.loads(out)["runs"]]


def test_runs_are_listed_newest_first(root: Path, capsys: Capture) -> None:
    done = mycelia(capsys, "runs", "list", root)
    assert (done.code, done.err) == (0, "")
    head, *lines = done.out.splitlines()
    assert head.split()[:6] == ["name", "command", "status", "started", "seconds", "test_accuracy"]
    assert [line.split()[0] for line in lines] == ["failed", *(f"run-{i}" for i in range(5, -1, -1)), "died"]
    assert "2023-11-14T22:13:20Z" in lines[-1]


def test_runs_are_sorted_and_filtered(root: Path, capsys: Capture) -> None:
    arguments = ("runs", "list", root, "--sort", "test_accuracy", "--filter", "algorithm=fedavg")
    done = mycelia(capsys, *arguments, "--filter", "status=finished", "--format", "json")
    assert names(done.out) == ["run-2", "run-1", "run-0"]
    first = json.loads(done.out)["runs"][0]
    assert first["settings"] == {"model": "mlp", "algorithm": "fedavg", "local.lr": 1.0}
    assert first["results"]["test_accuracy"] == pytest.approx(0.9)
    text = mycelia(capsys, *arguments).out.splitlines()
    assert [line.split()[0] for line in text] == ["name", "run-2", "run-1", "run-0", "died", "failed"]
    done = mycelia(capsys, *arguments, "--reverse", "--filter", "local.lr>=0.1", "--format", "json")
    assert names(done.out)[0] == "died"


def test_columns_line_up(root: Path, capsys: Capture) -> None:
    head, *lines = mycelia(capsys, "runs", "list", root).out.splitlines()
    end = head.index("test_accuracy") + len("test_accuracy")
    assert {line[end : end + 2] for line in lines} <= {"  ", ""}
    assert lines[1][:end].endswith("0.9")


def test_no_runs_is_no_error(tmp_path: Path, capsys: Capture, root: Path) -> None:
    (tmp_path / "none").mkdir()
    done = mycelia(capsys, "runs", "list", tmp_path / "none")
    assert (done.code, done.out) == (0, "")
    assert "no runs in" in done.err
    assert (
        mycelia(capsys, "runs", "list", tmp_path / "none", "--format", "json").out == '{\n  "runs": []\n}\n'
    )
    done = mycelia(capsys, "runs", "list", root, "--filter", "test_accuracy>2")
    assert "no runs in" in done.err
    assert "meet the filter" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--filter", "algoritm=fedavg"], "did you mean algorithm"),
        (["--filter", "algorithm"], "NAME OPERATOR VALUE"),
        (["--sort", "acc"], "no run has 'acc'"),
    ],
)
def test_a_name_that_no_run_has_is_a_usage_error(
    root: Path, capsys: Capture, arguments: list[str], message: str
) -> None:
    done = mycelia(capsys, "runs", "list", root, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_a_folder_that_is_not_there_is_a_usage_error(tmp_path: Path, capsys: Capture) -> None:
    done = mycelia(capsys, "runs", "list", tmp_path / "gone")
    assert done.code == 2
    assert "there is no such folder" in done.err


def test_a_run_that_cannot_be_read_is_named_and_left_out(root: Path, capsys: Capture) -> None:
    (root / "run-0" / "events.jsonl").write_text('{"v":99,"t":1.0,"kind":"scalars"}\n')
    done = mycelia(capsys, "runs", "list", root, "--format", "json")
    assert done.code == 0
    assert "run-0" not in names(done.out)
    assert done.err.startswith("warning: left out: ")
    assert "schema version 99" in done.err


def test_two_runs_are_compared_by_what_differs(root: Path, capsys: Capture) -> None:
    done = mycelia(capsys, "runs", "compare", root / "run-0", "run-5", "--root", root, "--format", "json")
    found = json.loads(done.out)
    assert found["runs"] == ["run-0", "run-5"]
    assert found["settings"] == {"algorithm": ["fedavg", "fedprox"], "local.lr": [0.01, 1.0]}
    assert found["results"]["test_accuracy"] == pytest.approx([0.8, 0.9])
    assert found["explained_by"] == []
    text = mycelia(capsys, "runs", "compare", "run-0", "run-5", "--root", root)
    rows = {line.split()[0]: line.split()[1:] for line in text.out.splitlines()[1:]}
    assert rows["local.lr"] == ["0.01", "1"]
    assert "model" not in rows
    assert "with 5 or more" in text.err


def test_many_runs_say_what_explains_the_metric(root: Path, capsys: Capture) -> None:
    plot = root / "plot.html"
    arguments = ("runs", "compare", "--root", root, "--filter", "status=finished", "--plot", plot)
    found = json.loads(mycelia(capsys, *arguments, "--format", "json").out)
    assert len(found["runs"]) == 6
    assert [item["setting"] for item in found["explained_by"]] == ["local.lr", "algorithm"]
    # Ranks 1, 2, 3 twice over on both sides: the two agree wholly.
    assert found["explained_by"][0]["rank_correlation"] == pytest.approx(1.0)
    assert found["plot"] == str(plot)
    assert plot.read_text().count("<polyline") == 6
    done = mycelia(capsys, *arguments)
    assert "test_accuracy by  values  rank correlation" in done.out
    assert f"plot: {plot}" in done.err


def test_another_metric_can_be_explained(root: Path, capsys: Capture) -> None:
    done = mycelia(capsys, "runs", "compare", "--root", root, "--metric", "workers", "--format", "json")
    found = json.loads(done.out)
    assert found["metric"] == "workers"
    assert all(item["importance"] == 0 for item in found["explained_by"])


def test_one_run_cannot_be_compared(root: Path, capsys: Capture) -> None:
    done = mycelia(capsys, "runs", "compare", "run-0", "--root", root)
    assert done.code == 2
    assert "at least two runs" in done.err


def test_a_plot_that_cannot_be_written_fails(root: Path, capsys: Capture) -> None:
    done = mycelia(capsys, "runs", "compare", "--root", root, "--plot", root)
    assert done.code == 1
    assert "the plot cannot be written" in done.err


def test_a_run_is_shown(root: Path, capsys: Capture) -> None:
    done = mycelia(capsys, "runs", "show", "run-1", "--root", root)
    lines = done.out.splitlines()
    assert lines[:3] == ["name     run-1", "command  simulate", "status   finished"]
    assert "result" in lines
    assert any(line.split() == ["test_accuracy", "0.85"] for line in lines)
    assert any(line.split() == ["machine.cores", "2"] for line in lines)
    assert not any("epsilon" in line for line in lines)  # it has none
    found = json.loads(mycelia(capsys, "runs", "show", root / "run-1", "--format", "json").out)
    assert found["results"]["epsilon"] is None
    assert found["origin"]["data_sha256"] == "d" * 64
    assert found["environment"]["versions"]["torch"] == "2.13.0"


def test_a_run_that_is_not_there_is_a_usage_error(root: Path, capsys: Capture) -> None:
    done = mycelia(capsys, "runs", "show", "run-77", "--root", root)
    assert done.code == 2
    assert "there is no such folder" in done.err
