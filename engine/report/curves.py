"""Learning curves: what was measured, against rounds or steps and against time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mycelia.engine.events import Evaluation, Event, Round, Scalars
from mycelia.engine.report import plot
from mycelia.engine.report.part import Figure, Section
from mycelia.engine.report.series import Series
from mycelia.engine.report.text import amount, number, percent, slug, title

__all__ = ["Curves", "split_metric"]

_SPLITS = ("train", "test", "validation", "val", "eval")
_MAIN = ("accuracy", "loss")
_CLIENTS = "training cohort"


class Curves:
    """Every evaluation, scalar and round metric as a curve."""

    name = "curves"

    def __init__(self) -> None:
        self._series: dict[tuple[str, str, str], Series] = {}
        self._simulated: dict[int, float] = {}  # round → end on the simulated clock

    def add(self, event: Event, seconds: float) -> None:
        """See `Part`."""
        match event:
            case Evaluation(metrics=metrics, split=split, round=round, step=step):
                unit, x = ("round", round) if round is not None else ("step", step or 0)
                for metric, value in metrics.items():
                    self._point(metric, split, unit, x, seconds, value)
            case Scalars(step=step, values=values):
                for metric, value in values.items():
                    name, split = split_metric(metric)
                    self._point(name, split, "step", step, seconds, value)
            case Round(round=round, metrics=metrics, simulated_seconds=simulated):
                for metric, value in metrics.items():
                    name, split = split_metric(metric)
                    self._point(name, _CLIENTS if split == "train" else split, "round", round, seconds, value)
                if simulated is not None:
                    self._simulated[round] = simulated + max(self._simulated.values(), default=0.0)
            case _:
                pass

    def facts(self) -> Mapping[str, Any] | None:
        """See `Part`."""
        if not self._series:
            return None
        curves = []
        for (metric, split, unit), series in sorted(self._series.items()):
            curve = {"metric": metric, "split": split, "unit": unit} | series.facts()
            if unit == "round" and any(self._simulated.values()):
                curve["simulated_seconds"] = [self._simulated.get(x) for x in curve["x"]]
            curves.append(curve)
        return {"curves": curves}

    def section(self) -> Section | None:
        """See `Part`."""
        facts = self.facts()
        if facts is None:
            return None
        metrics: dict[str, list[dict[str, Any]]] = {}
        for curve in facts["curves"]:
            metrics.setdefault(curve["metric"], []).append(curve)
        figures: list[Figure] = []
        for metric in (name for name in _MAIN if name in metrics):
            figures += [
                _figure(metric, metrics[metric], axis) for axis in ("x", "seconds", "simulated_seconds")
            ]
        others = [_figure(name, curves, "x") for name, curves in metrics.items() if name not in _MAIN]
        shown = tuple(figure for figure in [*figures, *others] if figure.markup)
        return Section(self.name, "Learning curves", figures=shown) if shown else None

    def _point(self, metric: str, split: str, unit: str, x: int, seconds: float, y: object) -> None:
        if isinstance(y, int | float):
            self._series.setdefault((metric, split, unit), Series()).add(x, seconds, float(y))


def split_metric(name: str) -> tuple[str, str]:
    """(metric, split) of a name like "test_accuracy" or "val/loss"; a name without a split is of training."""
    for split in _SPLITS:
        if name.startswith((f"{split}_", f"{split}/")) and len(name) > len(split) + 1:
            return name[len(split) + 1 :], split
    return name, "train"


def _figure(metric: str, curves: list[dict[str, Any]], axis: str) -> Figure:
    """One metric against rounds or steps ("x") or a clock; without markup when there is no such axis."""
    curves = [curve for curve in curves if any(x is not None for x in curve.get(axis, ()))]
    name = f"curve-{slug(metric)}-{axis.replace('_', '-')}"
    if not curves:
        return Figure(name, "", "")
    unit = curves[0]["unit"]
    curves = [curve for curve in curves if curve["unit"] == unit or axis != "x"]
    # The measure that counts comes first and gets the accent colour.
    curves = sorted(
        curves, key=lambda curve: (curve["split"] != "test", curve["split"] in ("train", _CLIENTS))
    )
    xlabel = {"x": unit, "seconds": "seconds", "simulated_seconds": "seconds on the simulated clock"}[axis]
    lines = [(curve["split"], *_thin(curve, axis)) for curve in curves]
    share = "accuracy" in metric or metric.endswith("_share")
    markup = plot.line_plot(name, lines, xlabel=xlabel, ylabel=title(metric), share=share, whole=axis == "x")
    return Figure(name, markup, _caption(metric, curves, axis, xlabel, share))


def _thin(curve: dict[str, Any], axis: str) -> tuple[list[float], list[float]]:
    points = [(x, y) for x, y in zip(curve[axis], curve["y"], strict=True) if x is not None]
    return [x for x, _ in points], [y for _, y in points]


def _caption(metric: str, curves: list[dict[str, Any]], axis: str, xlabel: str, share: bool) -> str:
    if axis != "x":
        return f"{title(metric)} against {xlabel}"
    show = percent if share else number
    ends = ", ".join(f"{show(curve['last'])} ({curve['split']})" for curve in curves)
    mean_of = max(curve["mean_of"] for curve in curves)
    note = f" Each point is the mean of {amount(mean_of, 'value')}." if mean_of > 1 else ""
    return f"{title(metric)}, at the end {ends}.{note}"
