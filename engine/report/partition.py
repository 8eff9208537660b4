"""How the data is dealt out: examples by label and client, and the clients' sizes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mycelia.engine.events import Event, Partition
from mycelia.engine.report import plot
from mycelia.engine.report.part import Figure, Section, Table
from mycelia.engine.report.text import amount, number, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PartitionPicture"]

# A colour that reads on white and on black; a cell is that colour, more or less opaque.
_CELL = (13 / 255, 138 / 255, 132 / 255)


class PartitionPicture:
    """The partition of a run."""

    name = "partition"

    def __init__(self) -> None:
        self._event: Partition | None = None

    def add(self, event: Event, seconds: float) -> None:
        """See `Part`."""
        if isinstance(event, Partition):
            self._event = event

    def facts(self) -> Mapping[str, Any] | None:
        """See `Part`."""
        event = self._event
        if event is None or not event.sizes:
            return None
        return {
            "name": event.name,
            "clients": event.clients,
            "sizes": list(event.sizes),
            "size": {
                "min": min(event.sizes),
                "median": statistics.median(event.sizes),
                "mean": statistics.fmean(event.sizes),
                "max": max(event.sizes),
            },
            "labels": list(event.labels),
            "matrix": [list(row) for row in event.matrix],
            "imbalance": dict(event.imbalance),
        }

    def section(self) -> Section | None:
        """See `Part`."""
        facts = self.facts()
        if facts is None:
            return None
        figures = [_heat_map(facts)] if facts["matrix"] else []
        figures.append(_sizes(facts))
        rows = [(f"Examples per client, {name}", number(value)) for name, value in facts["size"].items()]
        rows += [(title(name), number(value)) for name, value in facts["imbalance"].items()]
        lead = f"{amount(facts['clients'], 'client')}, dealt out by “{facts['name']}”."
        return Section(
            self.name, "Partition", lead, figures, (Table(("Measure", "Value"), rows, numeric=(1,)),)
        )


def _heat_map(facts: Mapping[str, Any]) -> Figure:
    matrix = facts["matrix"]
    labels = facts["labels"] or [str(index) for index in range(len(matrix))]
    most = max(max(row, default=0) for row in matrix) or 1

    def paint(axes: Axes) -> None:
        import numpy as np

        counts = np.asarray(matrix, dtype=float)
        cells = np.empty((*counts.shape, 4))
        cells[..., :3] = _CELL
        cells[..., 3] = [[_opacity(count, most) for count in row] for row in matrix]
        axes.imshow(cells, aspect="auto", interpolation="none")
        axes.grid(False)
        axes.set(xlabel="client", ylabel="label")
        plot.ticks(axes.xaxis, whole=True, number=12)
        shown = range(0, len(labels), max(1, -(-len(labels) // 12)))
        axes.set_yticks(list(shown), [_short(labels[index]) for index in shown])
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(True)

    caption = f"Examples by label and client: from none, left empty, to {number(most)} in the fullest cell."
    steps = sorted({1, -(-most // 4), -(-most // 2), most})
    red, green, blue = (round(255 * part) for part in _CELL)
    marks = [(number(n), f"rgb({red} {green} {blue} / {_opacity(n, most):.2f})") for n in steps]
    markup = plot.legend(marks) + plot.draw("partition-labels", paint, figsize=plot.WIDE)
    return Figure("partition-labels", markup, caption, wide=True)


def _opacity(count: int, most: int) -> float:
    """Faint for one example and full for the most, so that rare labels are still seen."""
    return 0.12 + 0.88 * (count / most) ** 0.7 if count else 0.0


def _sizes(facts: Mapping[str, Any]) -> Figure:
    sizes = sorted(facts["sizes"], reverse=True)
    sizes = sizes[:: -(-len(sizes) // 1000)]

    def paint(axes: Axes) -> None:
        edges = [index / len(sizes) for index in range(len(sizes) + 1)]
        axes.stairs(sizes, edges, fill=True, color=plot.ACCENT, alpha=0.85, linewidth=0)
        axes.set(xlim=(0, 1), ylim=(0, None), xlabel="share of the clients", ylabel="Examples")
        plot.ticks(axes.xaxis, share=True, number=5)
        plot.ticks(axes.yaxis, whole=True)

    size = facts["size"]
    caption = (
        f"Examples per client, from most to fewest: {number(size['max'])} to {number(size['min'])}, "
        f"median {number(size['median'])}."
    )
    return Figure("partition-sizes", plot.draw("partition-sizes", paint), caption)


def _short(label: str) -> str:
    return label if len(label) <= 16 else label[:15] + "…"
