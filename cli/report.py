"""`mycelia report RUN`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mycelia.cli.output import print_json, print_pairs

__all__ = ["command"]


class Form(StrEnum):
    """How it is printed; the two files are written in any case."""

    text = "text"
    json = "json"
    html = "html"


def command(
    run: Annotated[Path, typer.Argument(help="The run's folder.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where the report goes; the run's own folder unless named.")
    ] = None,
    format: Annotated[
        Form, typer.Option("--format", help="What is printed on stdout; html: where the page is.")
    ] = Form.text,
) -> None:
    """Make the HTML and JSON report of a run.

    Writes report.html (one file, no network needed) and report.json. A run that is unfinished, because it was
    killed or is still going on, gives the report of what it recorded. Of an evaluation it shows what was
    found, and attacks nothing again.
    """
    from mycelia.engine.report import build_report
    from mycelia.engine.report.build import default_parts
    from mycelia.engine.run import Run

    opened = Run.open(run)
    parts = default_parts(opened)
    evaluation = _evaluation(run)
    if evaluation:
        from mycelia.attacks.report_parts import parts_of

        parts = [*parts_of(evaluation), *parts]
    report = build_report(opened, out=out, parts=parts)
    head = report.facts["run"]
    files = {"report_html": report.html, "report_json": report.json}
    if format is Form.html:
        print(report.html)
        return
    if format is Form.json:
        said = {name: head[name] for name in ("command", "status", "done", "total", "unit", "result")}
        print_json(files | said | evaluation)
        return
    if evaluation:
        print((run / "evaluation.txt").read_text(encoding="utf-8"))
    done = f"{head['done']}/{head['total']}" if head["total"] else str(head["done"])
    print_pairs(
        [
            ("run", str(report.facts["name"])),
            ("status", str(head["status"]) if evaluation else f"{head['status']}, {head['unit']} {done}"),
            ("report", str(report.html)),
            ("facts", str(report.json)),
        ]
    )


def _evaluation(run: Path) -> dict[str, Any]:
    """What `mycelia evaluate` has stored there; empty for any other run."""
    if not (run / "evaluation.json").exists():
        return {}
    from mycelia.attacks.report_parts import stored

    return stored(run) or {}
