"""What the run took: seconds per phase, bytes on the wire, memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING, Any

from mycelia.engine.events import Event, Round, SystemLoad
from mycelia.engine.report import plot
from mycelia.engine.report.part import Figure, Section, Table
from mycelia.engine.report.series import Series
from mycelia.engine.report.text import duration, percent, scale_bytes, size, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Cost"]

_BARS = 60
_APART = "evaluate"  # the phase that seconds per round leave out
_MEMORY = ("memory_bytes", "workers_memory_bytes")


class Cost:
    """Seconds, bytes and memory of the rounds."""

    name = "cost"

    def __init__(self) -> None:
        self._rounds: list[int] = []
        self._phases: dict[str, list[float]] = {}
        self._up: list[int] = []
        self._down: list[int] = []
        self._peak = 0
        self._memory = {name: Series() for name in _MEMORY}

    def add(self, event: Event, seconds: float) -> None:
        """See `Part`."""
        if isinstance(event, Round):
            for phase in event.seconds:
                self._phases.setdefault(phase, [0.0] * len(self._rounds))
            for phase, values in self._phases.items():
                values.append(event.seconds.get(phase, 0.0))
            self._rounds.append(event.round)
            self._up.append(event.bytes_up)
            self._down.append(event.bytes_down)
        elif isinstance(event, SystemLoad):
            self._peak = max(self._peak, event.peak_memory_bytes, event.memory_bytes)
            for name, series in self._memory.items():
                series.add(0, seconds, getattr(event, name))

    def facts(self) -> Mapping[str, Any] | None:
        """See `Part`."""
        facts: dict[str, Any] = {}
        if self._rounds:
            facts |= {
                "rounds": self._rounds,
                "seconds": self._phases,
                "seconds_per_round": self._seconds_per_round(),
                "bytes_up": sum(self._up),
                "bytes_down": sum(self._down),
                "bytes_up_by_round": self._up,
                "bytes_down_by_round": self._down,
            }
        memory = {name: series.facts() for name, series in self._memory.items()}
        if memory["memory_bytes"]["y"]:
            facts["peak_memory_bytes"] = self._peak
            facts["memory"] = {
                name: {"seconds": values["seconds"], "bytes": values["y"], "max": values["max"]}
                for name, values in memory.items()
                if values["max"] > 0
            }
        return facts or None

    def section(self) -> Section | None:
        """See `Part`."""
        facts = self.facts()
        if facts is None:
            return None
        figures, tables = [], []
        if any(any(values) for values in self._phases.values()):
            figures.append(self._phases_figure())
            tables.append(self._phases_table())
        if any(self._up) or any(self._down):
            figures.append(self._bytes_figure())
        if facts.get("memory"):
            figures.append(_memory_figure(facts))
        return Section(self.name, "Cost", figures=figures, tables=tables) if figures else None

    def _seconds_per_round(self) -> float | None:
        """The mean from select to merge, without the first round (it warms up) unless it is the only one."""
        totals = [
            math.fsum(values[index] for phase, values in self._phases.items() if phase != _APART)
            for index in range(len(self._rounds))
        ]
        return statistics.fmean(totals[1:] or totals)

    def _phases_table(self) -> Table:
        sums = {phase: math.fsum(values) for phase, values in self._phases.items()}
        total = math.fsum(sums.values()) or 1.0
        rounds = len(self._rounds)
        rows = [
            (title(phase), duration(s), duration(s / rounds), percent(s / total)) for phase, s in sums.items()
        ]
        return Table(("Phase", "In all", "Per round", "Share"), rows, numeric=(1, 2, 3))

    def _phases_figure(self) -> Figure:
        width = -(-len(self._rounds) // _BARS)
        edges = [*self._rounds[::width], self._rounds[-1] + 1]

        def paint(axes: Axes) -> None:
            below = [0.0] * (len(edges) - 1)
            for values, color in zip(self._phases.values(), cycle(plot.SERIES), strict=False):
                bars = [statistics.fmean(values[i : i + width]) for i in range(0, len(values), width)]
                top = [low + bar for low, bar in zip(below, bars, strict=True)]
                places = [edge - 0.5 for edge in edges]
                axes.stairs(top, places, baseline=below, fill=True, color=color, linewidth=0)
                below = top
            axes.set(xlabel="round", ylabel="Seconds", xlim=(edges[0] - 0.5, edges[-1] - 0.5), ylim=(0, None))
            plot.ticks(axes.xaxis, whole=True)
            plot.ticks(axes.yaxis)

        per_round = self._seconds_per_round() or 0.0
        caption = (
            f"Seconds by phase and round; on average {duration(per_round)}, without evaluation and round 1."
        )
        legend = plot.legend(zip(self._phases, cycle(plot.SERIES), strict=False))
        return Figure("cost-phases", legend + plot.draw("cost-phases", paint), caption)

    def _bytes_figure(self) -> Figure:
        up, down = _cumulated(self._up), _cumulated(self._down)
        unit, name = scale_bytes(max(up[-1], down[-1]))
        step = -(-len(self._rounds) // 1000)
        x = [float(round) for round in self._rounds[::step]]
        lines = [
            ("up, from the clients", x, [value / unit for value in up[::step]]),
            ("down, to the clients", x, [value / unit for value in down[::step]]),
        ]
        markup = plot.line_plot(
            "cost-bytes", lines, xlabel="round", ylabel=f"{name} so far", whole=True, from_zero=True
        )
        return Figure("cost-bytes", markup, f"Bytes on the wire: {size(up[-1])} up, {size(down[-1])} down.")


def _memory_figure(facts: Mapping[str, Any]) -> Figure:
    labels = {"memory_bytes": "this process", "workers_memory_bytes": "its workers"}
    unit, name = scale_bytes(max(values["max"] for values in facts["memory"].values()))
    lines = [
        (labels[key], values["seconds"], [value / unit for value in values["bytes"]])
        for key, values in facts["memory"].items()
    ]
    markup = plot.line_plot("cost-memory", lines, xlabel="seconds", ylabel=f"Memory, {name}", from_zero=True)
    caption = f"Resident memory; this process took {size(facts['peak_memory_bytes'])} at most."
    return Figure("cost-memory", markup, caption)


def _cumulated(values: list[int]) -> list[int]:
    total, sums = 0, []
    for value in values:
        total += value
        sums.append(total)
    return sums
