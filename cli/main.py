"""The `mycelia` command. A sub-command's module is imported when it is run, so `--help` answers at once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from typer.core import TyperGroup

from mycelia.cli.output import run_command

if TYPE_CHECKING:
    import click

__all__ = ["app", "main"]


class Entry(NamedTuple):
    """Where a command is, as module and attribute, and what the list of commands says of it."""

    module: str
    attribute: str
    help: str


COMMANDS: Mapping[str, Entry] = {
    "simulate": Entry("mycelia.cli.simulate", "command", "Simulate a federation on this machine."),
    "serve": Entry("mycelia.cli.serve", "command", "Run rounds for devices that connect."),
    "client": Entry("mycelia.cli.client", "command", "Take part in federations, as a device."),
    "train": Entry("mycelia.cli.train", "command", "Train a model centrally."),
    "attack": Entry("mycelia.cli.attack", "command", "Run one attack on a model."),
    "evaluate": Entry(
        "mycelia.cli.evaluate", "command", "Run a suite of attacks, and say how far to trust it."
    ),
    "report": Entry("mycelia.cli.report", "command", "Make the HTML and JSON report of a run."),
    "privacy": Entry("mycelia.cli.privacy", "app", "Compute, calibrate and show what is spent of privacy."),
    "enrol": Entry("mycelia.cli.enrol", "app", "Enrol servers and devices, renew or revoke their keys."),
    "bench": Entry("mycelia.cli.bench", "app", "Measure what a protocol costs on this machine."),
    "runs": Entry("mycelia.cli.runs", "app", "List, compare and show runs."),
}


class LateGroup(TyperGroup):
    """Knows its commands by name, and imports the one that is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of the table."""
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is named first, from its own module."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, _load(name) if name is not None and name in COMMANDS else command, rest


def _load(name: str) -> click.Command:
    entry = COMMANDS[name]
    found = getattr(importlib.import_module(entry.module), entry.attribute)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name)(found)
        found = single
    command: click.Command = typer.main.get_command(found)
    command.name = name
    return command


def app() -> typer.Typer:
    """The whole command line."""
    whole = typer.Typer(cls=LateGroup, no_args_is_help=True, suggest_commands=False)  # click suggests, too

    @whole.callback()
    def options(
        version: Annotated[
            bool,
            typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version),
        ] = False,
    ) -> None:
        """Train models across devices that keep their data; measure how private and robust the result is."""

    for name, entry in COMMANDS.items():
        whole.command(name, help=entry.help)(_placeholder)
    return whole


def main() -> None:
    """Run the command line of this process and exit."""
    sys.exit(run_command(typer.main.get_command(app())))


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("mycelia"))
        raise typer.Exit


def _placeholder() -> None:
    """Stands for a command until it is run."""
