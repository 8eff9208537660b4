"""Many runs side by side: find, filter, sort and compare them by their settings and results."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mycelia.engine.errors import ConfigError, MyceliaError
from mycelia.engine.events import Evaluation, Event, Resumed, RunFinished, RunStarted
from mycelia.engine.run import Run, is_run

__all__ = ["RunSummary", "differing", "filter_runs", "find_runs", "read_runs", "sort_runs", "summarize"]

_DEPTH = 4  # folders below the root that are searched for runs


@dataclass(frozen=True)
class RunSummary:
    """What lineage knows of a run.

    `settings` is the configuration with dotted keys, where the `name` of a table stands for the table itself
    (`algorithm`, `algorithm.mu`); `results` what the run printed or, without an end, what it measured last.
    """

    path: Path
    name: str
    command: str = ""
    status: str = "unfinished"
    started: float = 0.0
    seconds: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    def get(self, column: str) -> Any:
        """The value under a column's name: of the run itself, its results, its settings or its origin."""
        if column in _OWN:
            return getattr(self, column)
        for values in (self.results, self.settings, self.origin):
            if column in values:
                return values[column]
        return None

    def columns(self) -> list[str]:
        """The names that `get` knows."""
        return list(dict.fromkeys([*_OWN, *self.results, *self.settings, *self.origin]))


_OWN = ("name", "command", "status", "started", "seconds")


def find_runs(root: Path) -> list[Path]:
    """The run folders at and under `root`, sorted; a run is not searched for others inside it.

    Raises `ConfigError` when there is no such folder.
    """
    if not root.is_dir():
        raise ConfigError(
            "there is no such folder",
            rule="runs are looked for in a folder, ./runs unless named",
            fix="start a run, or name the folder that holds some",
            who=str(root),
        )
    found = []
    for folder, children, _ in os.walk(root):
        path = Path(folder)
        if is_run(path):
            found.append(path)
            children.clear()
        elif len(path.relative_to(root).parts) >= _DEPTH:
            children.clear()
    return sorted(found)


def read_runs(paths: Sequence[Path]) -> tuple[list[RunSummary], list[MyceliaError]]:
    """The summaries of some runs, and the errors of those that cannot be read."""
    summaries: list[RunSummary] = []
    errors: list[MyceliaError] = []
    for path in paths:
        try:
            summaries.append(summarize(path))
        except MyceliaError as error:
            errors.append(error)
    return summaries, errors


def summarize(path: Path) -> RunSummary:
    """The summary of one run; its other events are passed over. Raises as `Run.open` and `Run.events` do."""
    run = Run.open(path)
    start: RunStarted | None = None
    end: RunFinished | None = None
    for event in run.events({RunStarted.kind, Resumed.kind, RunFinished.kind}):
        if isinstance(event, RunStarted):
            start = event
        elif isinstance(event, RunFinished):
            end = event
        elif isinstance(event, Resumed):
            end = None  # what a resumed run had ended with counts no more
    results: dict[str, Any] = dict(end.result) if end else {}
    if not results:
        results = _measured(run.history())
    seconds = results.get("seconds_total", end.t - start.t if start and end else None)
    origin = {} if start is None else {"seed": start.seed, "plan": start.plan, "parent": start.parent}
    if start is not None:
        origin |= {"data_sha256": start.data_sha256, "partition_sha256": start.partition_sha256}
        origin |= {f"code.{name}": commit for name, commit in start.environment.get("code", {}).items()}
    return RunSummary(
        path=path,
        name=run.name,
        command=start.command if start else "",
        status=end.status if end else "unfinished",
        started=start.t if start else 0.0,
        seconds=seconds,
        settings=_flatten(start.config) if start else {},
        results=results,
        origin=origin,
        environment=start.environment if start else {},
    )


def filter_runs(runs: Sequence[RunSummary], conditions: Sequence[str]) -> list[RunSummary]:
    """The runs that meet all conditions, such as `algorithm=fedavg`, `local.lr>=0.1` or `name~quick`.

    Operators: `=`, `!=`, `<`, `<=`, `>`, `>=`, and `~` for "contains". A run without the value meets no
    condition. Raises `ConfigError` for a condition that cannot be read and for a name that no run has.
    """
    tests = [_condition(text, runs) for text in conditions]
    return [run for run in runs if all(test(run) for test in tests)]


def sort_runs(runs: Sequence[RunSummary], column: str, *, reverse: bool = False) -> list[RunSummary]:
    """The runs by one column: numbers largest first, text from A to Z, and last those without it."""
    _known(column, runs)
    having = [run for run in runs if not _missing(run.get(column))]
    numeric = all(_is_number(run.get(column)) for run in having)
    ordered = sorted(
        having,
        key=lambda run: run.get(column) if numeric else str(run.get(column)),
        reverse=numeric != reverse,
    )
    return ordered + [run for run in runs if _missing(run.get(column))]


def differing(runs: Sequence[RunSummary]) -> list[str]:
    """The settings, and the seed, that are not the same in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    names["seed"] = None
    return [name for name in names if len({_key(run.get(name)) for run in runs}) > 1]


def _measured(history: Iterator[Event]) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for event in history:
        if isinstance(event, Evaluation):
            last |= {f"{event.split}_{metric}": value for metric, value in event.metrics.items()}
            name, position = ("rounds", event.round) if event.round is not None else ("steps", event.step)
            last[name] = position
    return last


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            if "name" in value:
                flat[f"{prefix}{key}"] = value["name"]
            flat |= _flatten({k: v for k, v in value.items() if k != "name"}, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


_CONDITION = re.compile(r"\s*([\w.\-/]+)\s*(<=|>=|!=|==|=|<|>|~)\s*(.*?)\s*")
_ORDER: Mapping[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def _condition(text: str, runs: Sequence[RunSummary]) -> Callable[[RunSummary], bool]:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"the condition '{text}' cannot be read",
            rule="a condition is NAME OPERATOR VALUE, with one of = != < <= > >= ~",
            fix="for example --filter 'test_accuracy>=0.9'",
            who="--filter",
        )
    column, operator, wanted = match.groups()
    _known(column, runs)
    if operator in _ORDER:
        try:
            bound = float(wanted)
        except ValueError:
            rule = f"'{operator}' compares numbers"
            raise ConfigError(f"'{wanted}' is no number", rule=rule, who=f"--filter '{text}'") from None
        order = _ORDER[operator]
        return lambda run: _is_number(run.get(column)) and order(run.get(column), bound)
    if operator == "~":
        return lambda run: not _missing(run.get(column)) and wanted.lower() in str(run.get(column)).lower()
    equal = operator != "!="
    return lambda run: not _missing(run.get(column)) and _same(run.get(column), wanted) == equal


def _known(column: str, runs: Sequence[RunSummary]) -> None:
    names = dict.fromkeys(name for run in runs for name in run.columns())
    if runs and column not in names:
        near = difflib.get_close_matches(column, names, n=3)
        raise ConfigError(
            f"no run has '{column}'",
            rule="runs are filtered and sorted by their settings and results",
            fix=f"did you mean {' or '.join(near)}?" if near else f"the names are {', '.join(names)}",
            who=column,
        )


def _same(value: object, wanted: str) -> bool:
    if isinstance(value, bool):
        return str(value).lower() == wanted.lower()
    if _is_number(value):
        try:
            return value == float(wanted)
        except ValueError:
            return False
    return str(value) == wanted.strip("'\"")


def _key(value: object) -> str:
    return repr(float(value) if isinstance(value, int) and not isinstance(value, bool) else value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _missing(value: object) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))
