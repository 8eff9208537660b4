"""Runs the command line inside the test."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import typer

from mycelia.cli.main import app
from mycelia.cli.output import run_command


class Done(NamedTuple):
    code: int
    out: str
    err: str


def mycelia(capsys: pytest.CaptureFixture[str], *arguments: object) -> Done:
    code = run_command(typer.main.get_command(app()), [str(argument) for argument in arguments])
    return Done(code, *capsys.readouterr())
