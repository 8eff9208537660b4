"""What the run is and how it ended: the head of the report, the warnings, and the setting."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from mycelia.engine.events import (
    Evaluation,
    Event,
    Resumed,
    Round,
    RunFinished,
    RunStarted,
    Scalars,
    WarningRaised,
)
from mycelia.engine.report.part import Section, Table
from mycelia.engine.report.text import number, size

__all__ = ["Overview", "Setting", "Warnings"]


class Overview:
    """Command, status, progress and result."""

    name = "run"

    def __init__(self) -> None:
        self._started: RunStarted | None = None
        self._finished: RunFinished | None = None
        self._resumes = 0
        self._first = 0.0
        self._seconds = 0.0
        self._done = 0
        self._measured: dict[str, float] = {}

    def add(self, event: Event, seconds: float) -> None:
        """See `Part`."""
        self._first = self._first or event.t
        self._seconds = seconds
        match event:
            case RunStarted():
                self._started = event
            case Resumed():
                self._resumes += 1
            case RunFinished():
                self._finished = event
            case Round(round=done) | Scalars(step=done):
                self._done = max(self._done, done)
            case Evaluation(split=split, metrics=metrics):
                self._measured |= {f"{split}_{metric}": value for metric, value in metrics.items()}
            case _:
                pass

    def facts(self) -> Mapping[str, Any] | None:
        """See `Part`. `result` is what the command printed or, without an end, what was measured last."""
        start, end = self._started, self._finished
        return {
            "command": start.command if start else "",
            "status": end.status if end else "unfinished",
            "error": end.error if end else "",
            "started": _moment(self._first) if self._first else None,
            "seconds": self._seconds,
            "resumes": self._resumes,
            "unit": start.unit if start else "round",
            "done": self._done,
            "total": start.total if start else 0,
            "seed": start.seed if start else None,
            "plan": start.plan if start else "",
            "data_sha256": start.data_sha256 if start else "",
            "partition_sha256": start.partition_sha256 if start else "",
            "parent": start.parent if start else "",
            "result": dict(end.result) if end and end.result else dict(self._measured),
        }

    def section(self) -> Section | None:
        """See `Part`: the page's head shows these facts."""
        return None


class Warnings:
    """What the reader should know, each message once with how often it came."""

    name = "warnings"

    def __init__(self) -> None:
        self._count: dict[tuple[str, str], int] = {}

    def add(self, event: Event, seconds: float) -> None:
        """See `Part`."""
        if isinstance(event, WarningRaised):
            key = (event.message, event.who)
            if key in self._count or len(self._count) < 1000:
                self._count[key] = self._count.get(key, 0) + 1

    def facts(self) -> Mapping[str, Any] | None:
        """See `Part`."""
        if not self._count:
            return None
        return {"warnings": [{"message": m, "who": who, "count": n} for (m, who), n in self._count.items()]}

    def section(self) -> Section | None:
        """See `Part`."""
        rows = [(number(count), who, message) for (message, who), count in self._count.items()]
        table = Table(("Times", "Concerns", "Warning"), rows, numeric=(0,))
        return Section(self.name, "Warnings", tables=(table,)) if rows else None


class Setting:
    """Configuration and environment."""

    name = "setting"

    def __init__(self, config_toml: str) -> None:
        self._toml = config_toml
        self._started: RunStarted | None = None

    def add(self, event: Event, seconds: float) -> None:
        """See `Part`."""
        if isinstance(event, RunStarted):
            self._started = event

    def facts(self) -> Mapping[str, Any] | None:
        """See `Part`."""
        start = self._started
        if start is None and not self._toml:
            return None
        return {
            "config": dict(start.config) if start else {},
            "config_toml": self._toml,
            "environment": dict(start.environment) if start else {},
        }

    def section(self) -> Section | None:
        """See `Part`."""
        start = self._started
        texts = (("config.toml", self._toml.strip()),) if self._toml.strip() else ()
        rows = [(name, _listed(value)) for name, value in start.environment.items()] if start else []
        if start:
            rows = [(name, value) for name, value in rows if value]
            kept = {"seed": str(start.seed), "plan": start.plan, "data": start.data_sha256}
            kept |= {"partition": start.partition_sha256, "parent run": start.parent}
            rows += [(name, value) for name, value in kept.items() if value]
        tables = (Table(("Environment", ""), rows),) if rows else ()
        if not texts and not tables:
            return None
        return Section(self.name, "Configuration and environment", tables=tables, texts=texts)


def _listed(value: object) -> str:
    """A table of the environment in one line, without what is empty."""
    if not isinstance(value, Mapping):
        return str(value)
    parts = []
    for name, item in value.items():
        if name.endswith("_bytes") and isinstance(item, int):
            parts.append(f"{name.removesuffix('_bytes')} {size(item)}")
        elif item not in ("", None):
            parts.append(f"{name} {_listed(item)}")
    return ", ".join(parts)


def _moment(t: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t))
