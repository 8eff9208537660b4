"""What every command does the same way: results on stdout, everything else on stderr, and the exit code.

Exit codes: 0 done, 1 failed, 2 usage, 3 threshold not met, 130 interrupted. A terminal gets tables and,
unless NO_COLOR is set, colours; anything else gets plain lines that other programs can cut up.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

if TYPE_CHECKING:
    from click import Command

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "THRESHOLD_NOT_MET",
    "Format",
    "FormatOption",
    "note",
    "print_json",
    "print_pairs",
    "print_table",
    "run_command",
]

FAILED, USAGE, THRESHOLD_NOT_MET, INTERRUPTED = 1, 2, 3, 130


class Format(StrEnum):
    """How a result is printed."""

    text = "text"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="How the result is printed on stdout.")]


def run_command(command: Command, arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; an error goes to stderr as what, rule and fix.

    One that nobody raised on purpose is a defect and keeps its trace.
    """
    import click

    try:
        code = command.main(args=arguments, prog_name="mycelia", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        note("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:  # a full disk, a path that cannot be: the system's word, and no defect
        note(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""), "error")
        return FAILED
    except Exception as error:
        return _failed(error)
    return code if isinstance(code, int) else 0


def print_json(value: object) -> None:
    """The result as one JSON object on stdout."""
    from mycelia.engine import plain_json

    print(plain_json.dumps(value, indent=2))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Collection[int] = ()) -> None:
    """A table on stdout; outside a terminal, columns set apart by two spaces and never cut."""
    if _fancy(sys.stdout):
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for index, title in enumerate(head):
            table.add_column(title, justify="right" if index in numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(_escape(cell) for cell in row))
        Console().print(table)
        return
    lines = [head, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(head))]
    for line in lines:
        cells = [
            cell.rjust(width) if index in numeric else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def print_pairs(pairs: Sequence[tuple[str, str]], title: str = "") -> None:
    """Names and values on stdout, one pair a line."""
    if title:
        print(_styled(title, "1", sys.stdout))
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print(f"{'  ' if title else ''}{name.ljust(width)}  {value}")


def note(message: str, label: str = "") -> None:
    """A line on stderr, such as a warning; `label` is set off in front of it."""
    if label:
        color = {"error": "1;31", "warning": "1;33"}.get(label, "1")
        message = f"{_styled(f'{label}:', color, sys.stderr)} {message}"
    print(message, file=sys.stderr, flush=True)


def _failed(error: Exception) -> int:
    from mycelia.engine.errors import MyceliaError

    if isinstance(error, MyceliaError):
        note(str(error), "error")
        return error.exit_code
    import traceback

    traceback.print_exception(error)
    note("this is a defect of Mycelia; the lines above say where", "error")
    return FAILED


def _fancy(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _styled(text: str, code: str, stream: TextIO) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if _fancy(stream) and not os.environ.get("NO_COLOR") else text


def _escape(cell: str) -> Any:
    from rich.text import Text

    return Text(cell)  # brackets in a cell are no markup
