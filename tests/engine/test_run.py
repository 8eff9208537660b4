"""The run folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mycelia.engine import events as e
from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.engine.run import Run, is_run
from tests.engine.run_factory import CONFIG, simulated_run, started, write_run
from tests.small_disk import fill, small_disk


def test_a_run_gets_a_folder_named_for_the_command_and_the_time(tmp_path: Path) -> None:
    with Run.create(None, "simulate", CONFIG, root=tmp_path / "runs") as first:
        assert re.fullmatch(r"simulate-\d{8}T\d{6}Z-[0-9a-f]{6}", first.name)
        assert first.path.parent == tmp_path / "runs"
        assert is_run(first.path)
        assert first.config_toml == CONFIG
    with Run.create(None, "simulate", CONFIG, root=tmp_path / "runs") as second:
        assert second.path != first.path


def test_what_is_logged_is_read_back_and_told_to_listeners(tmp_path: Path) -> None:
    heard: list[e.Event] = []
    with Run.create(tmp_path / "run", "train", "", listeners=[heard.append]) as run:
        run.log(e.Scalars(1, {"loss": 2.0}, t=1.0))
        run.log(e.CohortProgress(1, 3, 10))
        run.log(e.Evaluation({"loss": 1.0}, step=1, t=2.0))
    assert heard == [
        e.Scalars(1, {"loss": 2.0}, t=1.0),
        e.CohortProgress(1, 3, 10),
        e.Evaluation({"loss": 1.0}, step=1, t=2.0),
    ]
    reopened = Run.open(tmp_path / "run")
    assert list(reopened.events()) == [heard[0], heard[2]]
    assert list(reopened.events({"scalars"})) == [heard[0]]


def test_an_empty_folder_may_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    Run.create(tmp_path / "run", "train", "").close()
    assert list(Run.open(tmp_path / "run").events()) == []


def test_a_second_run_in_the_same_folder_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [started()])
    with pytest.raises(ConfigError, match=r"there is a run already(.|\n)*--resume") as caught:
        Run.create(tmp_path / "run", "train", "other")
    assert caught.value.exit_code == 2
    run = Run.open(tmp_path / "run")
    assert list(run.events()) == [started()]
    assert run.config_toml == CONFIG


def test_a_folder_with_other_files_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=r"not empty: it holds 'thesis\.tex'"):
        Run.create(tmp_path, "train", "")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_no_place_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="this is a file"):
        Run.create(tmp_path / "file", "train", "")
    with pytest.raises(MyceliaError, match="cannot be written"):
        Run.create(tmp_path / "file" / "run", "train", "")


def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        with Run.create(disk / "run", "train", CONFIG) as run:
            run.log(started())
            ballast = fill(disk)
            before = list(run.events())
            with pytest.raises(
                MyceliaError, match=r"cannot be written: No space left on device\n.*\n.*free space"
            ):
                run.log(e.Text("long", 1, "x" * 20_000))
            assert list(run.events())[: len(before)] == before
            with pytest.raises(MyceliaError, match="No space left on device"):
                Run.create(disk / "second", "train", CONFIG * 200)
            ballast.unlink()
            run.log(e.RunFinished({}, t=9.0))
        assert list(Run.open(disk / "run").events())[-1] == e.RunFinished({}, t=9.0)


@pytest.mark.parametrize(
    ("name", "found"),
    [("missing", "no such folder"), ("file", "not a folder"), ("folder", r"no events\.jsonl")],
)
def test_what_is_no_run_is_refused(tmp_path: Path, name: str, found: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=found) as caught:
        Run.open(tmp_path / name)
    assert "mycelia runs list" in caught.value.fix


def test_a_folder_of_runs_names_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, [])
    with pytest.raises(ConfigError, match="name one of the runs in it: a, b"):
        Run.open(tmp_path)


def test_a_run_of_another_schema_version_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, [started()])
    log = tmp_path / "events.jsonl"
    log.write_text(log.read_text().replace('"v":1', '"v":9'))
    for opening in (Run.open, Run.resume):
        with pytest.raises(ConfigError, match="schema version 9"):
            opening(tmp_path)


def test_a_run_open_for_reading_is_not_written(tmp_path: Path) -> None:
    write_run(tmp_path, [started()])
    run = Run.open(tmp_path)
    with pytest.raises(ConfigError, match="open for reading"):
        run.log(e.Scalars(1, {}))
    with pytest.raises(ConfigError, match="open for reading"):
        run.save_checkpoint(1, {}, {})


def test_a_run_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", "train", ""), pytest.raises(MyceliaError, match="another process"):
        Run.resume(tmp_path / "run")
    Run.resume(tmp_path / "run").close()


def test_a_resume_goes_on_from_the_checkpoint_and_replaces_later_events(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", "train", CONFIG) as run:
        run.log(started())
        for step in (1, 2, 3):
            run.log(e.Scalars(step, {"loss": 10.0}))
            if step < 3:
                run.save_checkpoint(step, {"w": torch.full((2,), float(step))}, {"step": step})
    with Run.resume(tmp_path / "run") as run:
        checkpoint = run.load_checkpoint()
        assert (checkpoint.step, checkpoint.meta) == (2, {"step": 2})
        run.log(e.Scalars(3, {"loss": 20.0}))
    history = list(Run.open(tmp_path / "run").history())
    assert [(x.step, x.values["loss"]) for x in history if isinstance(x, e.Scalars)] == [
        (1, 10.0),
        (2, 10.0),
        (3, 20.0),
    ]
    assert [x.step for x in history if isinstance(x, e.Resumed)] == [2]
    assert [x.path for x in history if isinstance(x, e.CheckpointSaved)] == [
        "checkpoints/step-00000001",
        "checkpoints/step-00000002",
    ]


def test_a_broken_checkpoint_is_skipped_and_the_run_says_so(tmp_path: Path) -> None:
    heard: list[e.Event] = []
    with Run.create(tmp_path / "run", "train", CONFIG) as run:
        for step in (1, 2):
            run.save_checkpoint(step, {"w": torch.ones(3)}, {})
    tensors = tmp_path / "run" / "checkpoints" / "step-00000002" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x07")
    with Run.resume(tmp_path / "run", listeners=[heard.append]) as run:
        assert run.load_checkpoint().step == 1
    (warning,) = (event for event in heard if isinstance(event, e.WarningRaised))
    assert "step-00000002 is broken" in warning.message


def test_a_run_without_a_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    write_run(tmp_path, simulated_run(2, 4))
    with Run.resume(tmp_path) as run, pytest.raises(DataError, match="no intact checkpoint"):
        run.load_checkpoint()
