"""`mycelia report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command_line import mycelia
from tests.engine.run_factory import simulated_run, trained_run, write_run

Capture = pytest.CaptureFixture[str]


def test_a_report_is_written_and_named(tmp_path: Path, capsys: Capture) -> None:
    run = write_run(tmp_path / "run", simulated_run(4, 20))
    done = mycelia(capsys, "report", run)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "run     run",
        "status  finished, round 4/4",
        f"report  {run / 'report.html'}",
        f"facts   {run / 'report.json'}",
    ]
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_json_is_one_object(tmp_path: Path, capsys: Capture) -> None:
    run = write_run(tmp_path / "run", trained_run(2, 5, end=False))
    done = mycelia(capsys, "report", run, "--format", "json", "--out", tmp_path / "elsewhere")
    found = json.loads(done.out)
    assert found["status"] == "unfinished"
    assert (found["done"], found["total"], found["unit"]) == (10, 10, "step")
    assert json.loads(Path(found["report_json"]).read_text())["run"]["result"] == found["result"]
    assert sorted(path.name for path in run.iterdir()) == ["config.toml", "events.jsonl"]


def test_what_is_no_run_is_a_usage_error(tmp_path: Path, capsys: Capture) -> None:
    for path in (tmp_path, tmp_path / "NOT_A_RUN"):
        done = mycelia(capsys, "report", path)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"error: {path}: ")
        assert "Rule:" in done.err
        assert "Fix:" in done.err
    assert mycelia(capsys, "report").code == 2


def test_a_run_of_another_schema_is_a_usage_error(tmp_path: Path, capsys: Capture) -> None:
    run = write_run(tmp_path / "run", trained_run(1, 2))
    log = run / "events.jsonl"
    log.write_text(log.read_text().replace('"v":1', '"v":2'))
    done = mycelia(capsys, "report", run)
    assert done.code == 2
    assert "schema version 2" in done.err


def test_a_corrupt_line_is_named(tmp_path: Path, capsys: Capture) -> None:
    run = write_run(tmp_path / "run", trained_run(1, 2))
    log = run / "events.jsonl"
    first, *rest = log.read_text().splitlines(keepends=True)
    log.write_text("".join([first, first[:40] + "\n", *rest]))
    done = mycelia(capsys, "report", run)
    assert done.code == 1
    assert f"{log}, line 2: the line is not JSON" in done.err


def test_a_place_that_cannot_be_written_fails(tmp_path: Path, capsys: Capture) -> None:
    run = write_run(tmp_path / "run", trained_run(1, 2))
    done = mycelia(capsys, "report", run, "--out", run / "config.toml")
    assert done.code == 1
    assert "the report cannot be written" in done.err
