"""`mycelia report RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mycelia.cli.output import Format, FormatOption, print_json, print_pairs

__all__ = ["command"]


def command(
    run: Annotated[Path, typer.Argument(help="The run's folder.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where the report goes; the run's own folder unless named.")
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Make the HTML and JSON report of a run.

    Writes report.html (one file, no network needed) and report.json. A run that is unfinished, because it was
    killed or is still going on, gives the report of what it recorded.
    """
    from mycelia.engine.report import build_report
    from mycelia.engine.run import Run

    report = build_report(Run.open(run), out=out)
    head = report.facts["run"]
    if format is Format.json:
        print_json(
            {"report_html": report.html, "report_json": report.json}
            | {name: head[name] for name in ("command", "status", "done", "total", "unit", "result")}
        )
        return
    done = f"{head['done']}/{head['total']}" if head["total"] else str(head["done"])
    print_pairs(
        [
            ("run", str(report.facts["name"])),
            ("status", f"{head['status']}, {head['unit']} {done}"),
            ("report", str(report.html)),
            ("facts", str(report.json)),
        ]
    )
