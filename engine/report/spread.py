"""How differently the model serves the clients: the measure on each one's own data, and the worst tenth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mycelia.engine.events import Event, Spread
from mycelia.engine.report import plot
from mycelia.engine.report.part import Figure, Section, Table
from mycelia.engine.report.text import amount, number, percent, slug, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SpreadOverClients", "worst_decile"]

_LOWER_IS_BETTER = ("loss", "error", "perplexity")
_STATISTICS = {
    "worst_decile": "Worst decile",
    "worst": "Worst",
    "median": "Median",
    "mean": "Mean",
    "best": "Best",
    "standard_deviation": "Standard deviation",
    "clients": "Clients",
}
_NAMED = 10  # how many of the worst clients are named


class SpreadOverClients:
    """The last spread of a run, and how its worst decile went."""

    name = "spread"

    def __init__(self) -> None:
        self._last: Spread | None = None
        self._course: dict[str, list[tuple[int, float, float]]] = {}

    def add(self, event: Event, seconds: float) -> None:
        """See `Part`."""
        if not isinstance(event, Spread):
            return
        self._last = event
        when = event.round if event.round is not None else event.step or 0
        for metric, values in event.metrics.items():
            known = [value for value in values if not math.isnan(value)]
            if known:
                point = (when, worst_decile(known, _lower_is_better(metric)), statistics.fmean(known))
                self._course.setdefault(metric, []).append(point)

    def facts(self) -> Mapping[str, Any] | None:
        """See `Part`."""
        event = self._last
        if event is None or not self._course:
            return None
        metrics = {
            metric: _measure(metric, event.metrics[metric], event) | {"course": course}
            for metric, course in self._course.items()
            if any(not math.isnan(value) for value in event.metrics.get(metric, ()))
        }
        return {"round": event.round, "step": event.step, "metrics": metrics}

    def section(self) -> Section | None:
        """See `Part`."""
        facts = self.facts()
        if facts is None:
            return None
        figures = []
        for metric, measure in facts["metrics"].items():
            figures.append(_sorted_figure(metric, measure))
            if len(measure["course"]) > 1:
                unit = "round" if facts["round"] is not None else "step"
                figures.append(_course_figure(metric, measure, unit))
        columns = [_column(metric, measure) for metric, measure in facts["metrics"].items()]
        rows = [(label, *(column[name] for column in columns)) for name, label in _STATISTICS.items()]
        head = ("Over the clients", *(title(metric) for metric in facts["metrics"]))
        table = Table(head, rows, numeric=range(1, len(head)))
        return Section(
            self.name,
            "Spread over clients",
            lead="The model measured on each client's own data. The worst decile is the mean over the tenth "
            "of the clients that it serves worst.",
            figures=figures,
            tables=(table,),
        )


def worst_decile(values: Sequence[float], lower_is_better: bool = False) -> float:
    """The mean of the worst tenth (rounded up, so at least one) of the values."""
    count = math.ceil(len(values) / 10)
    return statistics.fmean(sorted(values, reverse=lower_is_better)[:count])


def _lower_is_better(metric: str) -> bool:
    return any(word in metric for word in _LOWER_IS_BETTER)


def _measure(metric: str, values: Sequence[float], event: Spread) -> dict[str, Any]:
    lower = _lower_is_better(metric)
    clients = event.clients or range(len(values))
    known = [(value, client) for value, client in zip(values, clients, strict=False) if not math.isnan(value)]
    known.sort(key=lambda pair: pair[0], reverse=lower)
    ordered = [value for value, _ in known]
    return {
        "clients": len(ordered),
        "worst_decile": worst_decile(ordered, lower),
        "worst": ordered[0],
        "best": ordered[-1],
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "standard_deviation": statistics.pstdev(ordered),
        "worst_clients": [client for _, client in known[:_NAMED]],
        "ordered": ordered[:: math.ceil(len(ordered) / 1000)],
    }


def _column(metric: str, measure: Mapping[str, Any]) -> dict[str, str]:
    show = percent if "accuracy" in metric else number
    return {name: number(measure[name]) if name == "clients" else show(measure[name]) for name in _STATISTICS}


def _sorted_figure(metric: str, measure: Mapping[str, Any]) -> Figure:
    """The clients from worst to best, the worst tenth shaded."""
    ordered = measure["ordered"]
    share = "accuracy" in metric

    def paint(axes: Axes) -> None:
        width = 1 / len(ordered)
        places = [(index + 0.5) * width for index in range(len(ordered))]
        axes.axvspan(0, 0.1, color=plot.SERIES[1], alpha=0.18, linewidth=0)
        axes.plot(
            [0, 1],
            [measure["mean"]] * 2,
            color=plot.MUTED,
            linewidth=1,
            linestyle=(0, (3, 3)),
        )
        steps = "steps-mid" if len(ordered) <= 200 else "default"
        axes.plot(places, ordered, color=plot.ACCENT, drawstyle=steps)
        axes.plot([0, 0.1], [measure["worst_decile"]] * 2, color=plot.SERIES[1], linewidth=2.4)
        axes.set(xlim=(0, 1), xlabel="share of the clients", ylabel=title(metric))
        plot.ticks(axes.xaxis, share=True, number=5)
        plot.ticks(axes.yaxis, share=share)

    show = percent if share else number
    worst = ", ".join(str(client) for client in measure["worst_clients"][:5])
    caption = (
        f"{title(metric)} of {amount(measure['clients'], 'client')}: worst decile "
        f"{show(measure['worst_decile'])}, mean {show(measure['mean'])}. Worst served: client {worst}."
    )
    name = f"spread-{slug(metric)}"
    marks = (("clients, worst to best", plot.ACCENT), ("worst decile", plot.SERIES[1]), ("mean", plot.MUTED))
    return Figure(name, plot.legend(marks) + plot.draw(name, paint), caption)


def _course_figure(metric: str, measure: Mapping[str, Any], unit: str) -> Figure:
    x = [point[0] for point in measure["course"]]
    lines = [
        ("mean of the clients", x, [point[2] for point in measure["course"]]),
        ("worst decile", x, [point[1] for point in measure["course"]]),
    ]
    name = f"spread-course-{slug(metric)}"
    markup = plot.line_plot(
        name, lines, xlabel=unit, ylabel=title(metric), share="accuracy" in metric, whole=True
    )
    return Figure(
        name, markup, f"Mean and worst decile of the clients' {title(metric).lower()} over the run."
    )
