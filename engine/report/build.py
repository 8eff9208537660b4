"""From a run folder to `report.html` and `report.json`, in one pass over its events."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mycelia.engine import plain_json
from mycelia.engine.errors import MyceliaError
from mycelia.engine.events import Resumed
from mycelia.engine.report.cost import Cost
from mycelia.engine.report.curves import Curves
from mycelia.engine.report.notes import Notes
from mycelia.engine.report.outcomes import ClientOutcomes
from mycelia.engine.report.overview import Overview, Setting, Warnings
from mycelia.engine.report.page import page, tiles
from mycelia.engine.report.part import Part
from mycelia.engine.report.partition import PartitionPicture
from mycelia.engine.report.privacy import PrivacySpent
from mycelia.engine.report.secure_sum import SecureSums
from mycelia.engine.report.spread import SpreadOverClients
from mycelia.engine.report.text import amount, duration
from mycelia.engine.run import Run

__all__ = ["Report", "build_report", "default_parts"]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Report:
    """A written report: its files and the facts in them."""

    html: Path
    json: Path
    facts: Mapping[str, Any]


def build_report(run: Run, *, out: Path | None = None, parts: Sequence[Part] | None = None) -> Report:
    """Write `report.html` and `report.json` of a run, finished or not, into its folder or into `out`.

    Raises `DataError` for a corrupt line of the events, and `MyceliaError` when the files cannot be written.
    """
    overview = Overview()
    every: list[Part] = [overview, *(default_parts(run) if parts is None else parts)]
    seconds, before = 0.0, None
    for event in run.history():
        if before is not None and not isinstance(
            event, Resumed
        ):  # the pause before a resume is no time of the run
            seconds += max(0.0, event.t - before)
        before = event.t
        for part in every:
            part.add(event, seconds)
    stated = {part.name: part.facts() for part in every}
    facts: dict[str, Any] = {"v": SCHEMA_VERSION, "name": run.name}
    facts |= {name: value for name, value in stated.items() if value}
    sections = [section for part in every if stated[part.name] and (section := part.section())]
    head = facts["run"]
    html = page(run.name, sections, facts=_line(facts), notice=_notice(head), head=tiles(head["result"]))
    folder = out or run.path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "report.json", plain_json.dumps(facts, indent=1) + "\n")
        _replace(folder / "report.html", html)
    except OSError as error:
        raise MyceliaError(
            f"the report cannot be written: {error.strerror or error}",
            fix="free space, or name another folder with --out",
            who=str(folder),
        ) from error
    return Report(folder / "report.html", folder / "report.json", facts)


def default_parts(run: Run) -> list[Part]:
    """The parts of every report, in order."""
    return [
        Curves(),
        SpreadOverClients(),
        PrivacySpent(),
        SecureSums(),
        PartitionPicture(),
        ClientOutcomes(),
        Cost(),
        Notes(run.path),
        Warnings(),
        Setting(run.config_toml),
    ]


def _replace(path: Path, text: str) -> None:
    """Write the file whole or not at all: a report that is open elsewhere stays readable."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _line(facts: Mapping[str, Any]) -> list[str]:
    """The line under the title."""
    head = facts["run"]
    line = [f"mycelia {head['command']}" if head["command"] else "run", str(head["status"])]
    if head["started"]:
        line.append(f"{head['started'][:16].replace('T', ' ')} UTC")
    if "seconds_total" not in head["result"]:
        line.append(duration(head["seconds"]))
    if head["seed"] is not None:
        line.append(f"seed {head['seed']}")
    if head["resumes"]:
        line.append(f"resumed {amount(head['resumes'], 'time')}")
    if "warnings" in facts:
        line.append(amount(len(facts["warnings"]["warnings"]), "warning"))
    return line


def _notice(head: Mapping[str, Any]) -> str:
    """What a reader has to know before the figures."""
    total = f" of {head['total']:,}" if head["total"] else ""
    reached = f"It reached {head['unit']} {head['done']:,}{total}."
    if head["status"] == "unfinished":
        return f"This run is unfinished: no end is recorded, so it was killed or is still running. {reached}"
    if head["status"] == "interrupted":
        return f"This run was interrupted. {reached} It goes on with --resume."
    if head["status"] == "failed":
        return f"This run failed. {reached}" + (f"\n{head['error']}" if head["error"] else "")
    return ""
