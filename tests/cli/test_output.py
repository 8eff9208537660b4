"""What every command does the same way: streams, formats, exit codes; and the progress display."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from mycelia.cli import output
from mycelia.cli.output import Format, FormatOption, print_json, print_pairs, print_table, run_command
from mycelia.cli.progress import BarProgress, LineProgress, show_progress
from mycelia.engine import errors
from mycelia.engine import events as e
from mycelia.engine.errors import MyceliaError
from tests.cli.command_line import mycelia
from tests.engine.run_factory import simulated_run, started, trained_run

Capture = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def raising(error: BaseException) -> int:
    """The exit code of a command that raises `error`."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def fail() -> None:
        raise error

    return run_command(typer.main.get_command(app), [])


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_on_purpose_say_what_rule_and_fix_and_nothing_else(name: str, capsys: Capture) -> None:
    kind: type[MyceliaError] = getattr(errors, name)
    code = raising(kind("it broke", rule="it must not", fix="mend it", who="client 7"))
    assert code == (2 if name == "ConfigError" else 1)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: client 7: it broke\n  Rule: it must not\n  Fix: mend it\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (typer.Abort(), 130),
        (typer.Exit(3), 3),
        (typer.Exit(), 0),
        (typer.BadParameter("no"), 2),
        (BrokenPipeError(), 1),
    ],
)
def test_exit_codes(error: BaseException, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    saved = os.dup(1)  # a broken pipe closes stdout
    try:
        assert raising(error) == code
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    assert "Traceback" not in capfd.readouterr().err


def test_a_defect_keeps_its_trace(capsys: Capture) -> None:
    assert raising(ZeroDivisionError("oops")) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ZeroDivisionError: oops" in err
    assert "a defect of Mycelia" in err


def test_a_command_may_return_its_exit_code() -> None:
    app = typer.Typer(add_completion=False)

    @app.command()
    def measure(format: FormatOption = Format.text) -> int:
        return output.THRESHOLD_NOT_MET if format is Format.json else 0

    command = typer.main.get_command(app)
    assert run_command(command, ["--format", "json"]) == 3
    assert run_command(command, []) == 0
    assert run_command(command, ["--format", "yaml"]) == 2


def test_json_is_plain_whatever_the_numbers(capsys: Capture) -> None:
    print_json({"loss": math.nan, "path": Path("runs/x"), "epsilon": None, "ε": [math.inf, 1]})
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=pytest.fail) == {
        "loss": "NaN",
        "path": "runs/x",
        "epsilon": None,
        "ε": ["Infinity", 1],
    }


def test_a_table_without_a_terminal_is_plain_lines(capsys: Capture) -> None:
    print_table(["name", "n"], [["a" * 100, "7"], ["[b]", "1000"]], numeric=[1])
    assert capsys.readouterr().out.splitlines() == [
        "name" + " " * 96 + "     n",
        "a" * 100 + "     7",
        "[b]" + " " * 97 + "  1000",
    ]


def test_a_table_on_a_terminal_keeps_brackets_and_obeys_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    for colored in (True, False):
        if not colored:
            monkeypatch.setenv("NO_COLOR", "1")
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        print_table(["name"], [["[bold]x[/bold]"]])
        print_pairs([("a", "b")], "title")
        text = terminal.getvalue()
        assert "[bold]x[/bold]" in text
        assert ("\x1b[3" in text) is False
        assert ("\x1b[1mtitle" in text) is colored


def test_help_answers_without_loading_the_engine() -> None:
    code = (
        "import sys\n"
        "from mycelia.cli.main import main\n"
        "sys.argv = ['mycelia', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'matplotlib', 'scipy', 'mycelia.engine'} & set(sys.modules)\n"
        "print('loaded:', heavy or 'nothing')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "loaded: nothing"
    for name in ("simulate", "train", "report", "runs"):
        assert name in done.stdout


def test_the_version_is_printed(capsys: Capture) -> None:
    done = mycelia(capsys, "--version")
    assert (done.code, done.err) == (0, "")
    assert done.out.strip()[0].isdigit()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnus"], "Did you mean 'runs'?"),
        (["runs", "lst"], "No such command 'lst'"),
        (["report", "x", "--frmat", "json"], "No such option"),
        (["report"], "Missing argument 'RUN'"),
        (["report", "x", "--format", "yaml"], "'yaml' is not one of"),
    ],
)
def test_usage_errors(capsys: Capture, arguments: list[str], message: str) -> None:
    done = mycelia(capsys, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert "Traceback" not in done.err


def test_without_a_command_the_help_is_shown(capsys: Capture) -> None:
    done = mycelia(capsys)
    assert "simulate" in done.out + done.err


# Progress


def shown(events: list[e.Event]) -> list[str]:
    stream = io.StringIO()
    with show_progress(stream) as progress:
        assert isinstance(progress, LineProgress)
        for event in events:
            progress(event)
    return stream.getvalue().splitlines()


def test_without_a_terminal_each_round_is_a_line() -> None:
    events = [
        started(total=2),
        e.WarningRaised("client 3 is empty", "partition"),
        e.CohortProgress(1, 10, 10),
        e.Round(1, metrics={"loss": 2.0, "clip_share": 0.25}),
        e.Evaluation({"loss": 1.5, "accuracy": 0.5}, round=1),  # after its round, and still on its line
        e.Privacy(0.75, 1e-5, round=1),
        e.CheckpointSaved(1, "x"),
        e.CohortProgress(2, 0, 10),
        e.Round(2, metrics={"loss": 1.0, "clip_share": 0.5}),
        e.CheckpointSaved(2, "x"),
        e.Evaluation({"loss": 0.5, "accuracy": 0.875}, round=2),
        e.RunFinished({}),
    ]
    assert shown(events) == [
        "warning: partition: client 3 is empty",
        "round 1/2  loss 1.5  accuracy 50.0%  train loss 2  clipped 25%  ε 0.75",
        "round 2/2  loss 0.5  accuracy 87.5%  train loss 1  clipped 50%  ε 0.75",
    ]


def test_a_long_run_prints_about_fifty_lines_and_its_last() -> None:
    lines = shown([started(total=1000), *(e.Round(r, metrics={"loss": 1.0}) for r in range(1, 1001))])
    assert 45 <= len(lines) <= 55
    assert lines[-1] == "round 1000/1000  train loss 1"


def test_a_training_counts_steps() -> None:
    lines = shown(trained_run(2, 4))
    assert lines[0].startswith("step 1/8  train loss")
    assert lines[-1].startswith("step 8/8  loss")


def test_a_resumed_run_says_where_it_goes_on() -> None:
    assert shown([e.Resumed(7)]) == ["resumed after round 7"]
    assert shown([]) == []


def bars(events: list[e.Event]) -> str:
    stream = Terminal()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None, legacy_windows=False)
    with BarProgress(console) as progress:
        for event in events:
            progress(event)
        progress._bars.refresh()
    return stream.getvalue()


def test_a_terminal_gets_two_bars_for_a_federation() -> None:
    text = bars([*simulated_run(3, 20, end=False), e.CohortProgress(4, 7, 10), e.WarningRaised("[x] odd")])
    last = text[text.rindex("rounds") :]
    assert "3/3" in text
    assert "7/10" in text
    assert "accuracy" in last
    assert "warning: [x] odd" in text


def test_a_terminal_gets_one_bar_for_a_training() -> None:
    text = bars(trained_run(2, 4))
    assert "steps" in text
    assert "8/8" in text
    assert "clients" not in text


def test_the_display_suits_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(show_progress(Terminal()), BarProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(show_progress(Terminal()), LineProgress)
