"""`mycelia runs list | compare | show`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mycelia.cli.output import Format, FormatOption, note, print_json, print_pairs, print_table

if TYPE_CHECKING:
    from mycelia.engine.importance import Importance
    from mycelia.engine.lineage import RunSummary

__all__ = ["app"]

app = typer.Typer(
    help="List, compare and show runs.", no_args_is_help=True, add_completion=False, suggest_commands=False
)

_USUAL = ("test_accuracy", "test_loss", "epsilon")  # results that a list shows where a run has them
_FEW = 4  # settings that a list shows, and runs that a comparison shows side by side
_TOLD = {"run_dir", "seconds_total"}  # results that other columns of a comparison tell

FilterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--filter", help="Only runs that meet NAME OPERATOR VALUE (= != < <= > >= ~); may be repeated."
    ),
]
RootOption = Annotated[Path, typer.Option("--root", help="The folder that holds the runs.")]


@app.command("list")
def list_runs(
    root: Annotated[Path, typer.Argument(help="The folder that holds the runs.")] = Path("runs"),
    filter: FilterOption = None,
    sort: Annotated[
        str, typer.Option("--sort", help="Sort by a setting or result: numbers largest first, text A to Z.")
    ] = "started",
    reverse: Annotated[bool, typer.Option("--reverse", help="Sort the other way round.")] = False,
    format: FormatOption = Format.text,
) -> None:
    """List the runs in a folder, newest first.

    Example: mycelia runs list --filter 'algorithm=fedavg' --sort test_accuracy
    """
    from mycelia.engine.lineage import differing, sort_runs

    found = sort_runs(_select(root, filter or []), sort, reverse=reverse)
    if format is Format.json:
        print_json({"runs": [_facts(run) for run in found]})
        return
    asked = [sort, *(condition.split("=")[0].rstrip("!<>~ ") for condition in filter or [])]
    usual = [name for name in _USUAL if any(run.get(name) is not None for run in found)]
    columns = dict.fromkeys(["name", "command", "status", "started", "seconds", *usual, *asked])
    columns |= dict.fromkeys(differing(found)[:_FEW])
    shown = [name for name in columns if any(name in run.columns() for run in found)]
    rows = [[_show(name, run.get(name)) for name in shown] for run in found]
    if rows:
        print_table(shown, rows, _numeric(found, shown))
    else:
        note(f"no runs in {root}" + (" meet the filter" if filter else ""))


@app.command("compare")
def compare(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, or names under --root; all of them unless named."),
    ] = None,
    root: RootOption = Path("runs"),
    filter: FilterOption = None,
    metric: Annotated[str, typer.Option("--metric", help="The result to explain.")] = "test_accuracy",
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write a parallel-coordinates plot to this HTML file.")
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Compare runs: settings that differ, results, and which settings explain a result most.

    The last needs five runs that have the result: rank correlation and permutation importance.
    """
    from mycelia.engine.importance import LEAST_RUNS, explain
    from mycelia.engine.lineage import differing, filter_runs, summarize

    named = [summarize(_find(run, root)) for run in runs or []]
    found = filter_runs(named, filter or []) if named else _select(root, filter or [])
    if len(found) < 2:
        from mycelia.engine.errors import ConfigError

        rule = "at least two runs are compared"
        raise ConfigError(
            f"there are {len(found)} runs to compare", rule=rule, fix="name more", who=str(root)
        )
    settings = differing(found)
    results = list(dict.fromkeys(name for run in found for name in run.results))
    measured = [run for run in found if isinstance(run.get(metric), int | float)]
    explained = explain(found, metric) if len(measured) >= LEAST_RUNS and settings else []
    if plot is not None:
        _write_plot(plot, found, settings, metric)
    if format is Format.json:
        print_json(
            {
                "runs": [run.name for run in found],
                "settings": {name: [run.get(name) for run in found] for name in settings},
                "results": {name: [run.results.get(name) for run in found] for name in results},
                "metric": metric,
                "explained_by": [vars(item) for item in explained],
                "plot": plot,
            }
        )
        return
    _print_comparison(found, settings, results, metric)
    if explained:
        print()
        _print_importance(explained, metric)
    elif settings:
        note(f"{len(measured)} runs have {metric}; with {LEAST_RUNS} or more, what explains it is listed too")
    if plot is not None:
        note(f"plot: {plot}")


@app.command("show")
def show(
    run: Annotated[
        Path, typer.Argument(help="A run's folder, or its name under --root.", show_default=False)
    ],
    root: RootOption = Path("runs"),
    format: FormatOption = Format.text,
) -> None:
    """Show a run: status, results, settings, where they come from, and its environment."""
    from mycelia.engine.lineage import summarize

    summary = summarize(_find(run, root))
    if format is Format.json:
        print_json(_facts(summary) | {"environment": summary.environment})
        return
    own = ("name", "command", "status", "started", "seconds")
    head = [(name, _show(name, summary.get(name))) for name in own]
    print_pairs([*(pair for pair in head if pair[1]), ("folder", str(summary.path))])
    environment = {
        f"{part}.{name}": value
        for part, values in summary.environment.items()
        for name, value in _items(values)
    }
    for title, values in (
        ("result", summary.results),
        ("settings", summary.settings),
        ("origin", summary.origin),
        ("environment", environment),
    ):
        pairs = [(name, _show(name, value)) for name, value in values.items() if value not in (None, "")]
        if pairs:
            print()
            print_pairs(pairs, title)


def _select(root: Path, conditions: Sequence[str]) -> list[RunSummary]:
    """The runs under a folder that meet the conditions; those that cannot be read are named on stderr."""
    from mycelia.engine.lineage import filter_runs, find_runs, read_runs

    readable, errors = read_runs(find_runs(root))
    for error in errors:
        note(f"left out: {error}", "warning")
    return filter_runs(readable, conditions)


def _find(run: Path, root: Path) -> Path:
    return run if run.exists() or not (root / run).exists() else root / run


def _facts(run: RunSummary) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": run.path,
        "command": run.command,
        "status": run.status,
        "started": _moment(run.started),
        "seconds": run.seconds,
        "results": run.results,
        "settings": run.settings,
        "origin": run.origin,
    }


def _print_comparison(
    runs: Sequence[RunSummary], settings: Sequence[str], results: Sequence[str], metric: str
) -> None:
    """Side by side when they are few; else a row each, with the settings that differ and the main results."""
    told = [name for name in results if name not in _TOLD and name not in settings]
    names = ["status", "seconds", *settings, *told]
    if len(runs) > _FEW:
        main = [name for name in dict.fromkeys([metric, *_USUAL]) if any(run.get(name) for run in runs)]
        names = ["status", *settings, *main, "seconds"]
        rows = [[run.name, *(_show(name, run.get(name)) for name in names)] for run in runs]
        print_table(["name", *names], rows, [1 + index for index in _numeric(runs, names)])
        return
    rows = [[name, *(_show(name, run.get(name)) for run in runs)] for name in names]
    print_table(["", *(run.name for run in runs)], rows)


def _print_importance(explained: Sequence[Importance], metric: str) -> None:
    head = (f"{metric} by", "values", "rank correlation", "p", "importance", "±")
    rows = []
    for item in explained:
        rho = "" if item.rank_correlation is None else f"{item.rank_correlation:+.2f}"
        p = "" if item.p_value is None else f"{item.p_value:.2g}"
        rows.append(
            [item.setting, str(item.values), rho, p, f"{item.importance:.3f}", f"{item.importance_std:.3f}"]
        )
    print_table(head, rows, range(1, len(head)))


def _write_plot(path: Path, runs: Sequence[RunSummary], settings: Sequence[str], metric: str) -> None:
    from mycelia.engine.errors import MyceliaError
    from mycelia.engine.report.page import page
    from mycelia.engine.report.parallel import parallel_coordinates

    values = [(run.name, {name: run.get(name) for name in (*settings, metric)}) for run in runs]
    html = page(f"{len(runs)} runs", [parallel_coordinates(values, settings, metric)])
    try:
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise MyceliaError(f"the plot cannot be written: {error.strerror}", who=str(path)) from error


def _numeric(runs: Sequence[RunSummary], columns: Sequence[str]) -> list[int]:
    def is_number(value: object) -> bool:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))

    plain = [index for index, name in enumerate(columns) if name != "started"]
    return [index for index in plain if all(is_number(run.get(columns[index])) for run in runs)]


def _show(name: str, value: object) -> str:
    if value is None:
        return ""
    if name == "started" and isinstance(value, float):
        return _moment(value) or ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _moment(t: float) -> str | None:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t)) if t else None


def _items(values: object) -> list[tuple[str, object]]:
    return list(values.items()) if isinstance(values, dict) else [("", values)]
