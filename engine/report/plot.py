"""Plots as inline SVG that takes its colours and its typeface from the page, light or dark.

Matplotlib writes fixed colours; each colour used here stands for a variable of the page's style sheet, and is
replaced by it in the SVG. Figures are drawn at about the size they are read at, so that text keeps its size.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

__all__ = [
    "ACCENT",
    "GRID",
    "INK",
    "MUTED",
    "SERIES",
    "WIDE",
    "Lines",
    "draw",
    "legend",
    "line_plot",
    "ticks",
]

INK, MUTED, GRID = "#010101", "#010102", "#010103"
# Distinct for readers who confuse red and green, and against both backgrounds (after Okabe and Ito).
SERIES = ("#010111", "#010112", "#010113", "#010114", "#010115", "#010116", "#010117")
ACCENT = SERIES[0]

USUAL = (4.7, 2.9)
WIDE = (14.5, 4.4)

_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid"} | {
    color: f"--series-{number}" for number, color in enumerate(SERIES, 1)
}

Lines = Sequence[tuple[str, Sequence[float], Sequence[float]]]
"""(label, x, y) of each line of a plot."""


def draw(name: str, paint: Callable[[Axes], None], *, figsize: tuple[float, float] = USUAL) -> str:
    """The SVG of one pair of axes that `paint` draws on; `name` keeps its ids apart from those of others."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_style(name)):
        figure = Figure(figsize=figsize, layout="constrained")
        axes = figure.add_subplot()
        paint(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_page(buffer.getvalue(), name)


def line_plot(
    name: str,
    lines: Lines,
    *,
    xlabel: str,
    ylabel: str,
    share: bool = False,
    whole: bool = False,
    from_zero: bool = False,
) -> str:
    """Some lines with their legend: `share` labels y in percent, `whole` keeps x to whole numbers."""

    def paint(axes: Axes) -> None:
        for (_, x, y), color in zip(lines, SERIES, strict=False):
            marker = "o" if len(x) < 2 else None
            axes.plot(x, y, color=color, marker=marker, markersize=4, clip_on=False)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        ticks(axes.xaxis, whole=whole)
        ticks(axes.yaxis, share=share)
        if from_zero:
            axes.set_ylim(0, None)

    labels = zip((label for label, _, _ in lines), SERIES, strict=False)
    return legend(labels) + draw(name, paint)


def ticks(axis: Axis, *, whole: bool = False, share: bool = False, number: int = 6) -> None:
    """Some round ticks on an axis: at whole numbers only, or labelled in percent."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=number, integer=whole, steps=[1, 2, 2.5, 5, 10]))
    if share:
        axis.set_major_formatter(lambda value, _: f"{100 * value:.6g} %")


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """The markup of a legend of (label, colour); as text of the page it is never clipped."""
    marks = (f'<span style="--mark: {_variable(color)}">{escape(label)}</span>' for label, color in entries)
    return f'<p class="legend">{"".join(marks)}</p>'


def _style(name: str) -> dict[Any, Any]:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "DejaVu Sans",
        "font.size": 10.5,
        "text.color": INK,
        "text.parse_math": False,
        "axes.edgecolor": GRID,
        "axes.labelcolor": MUTED,
        "axes.labelsize": 10.5,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.formatter.useoffset": False,
        "axes.unicode_minus": True,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "xtick.color": GRID,
        "ytick.color": GRID,
        "xtick.labelcolor": MUTED,
        "ytick.labelcolor": MUTED,
        "ytick.major.size": 0,
        "xtick.major.size": 3,
        "lines.linewidth": 1.6,
        "lines.solid_joinstyle": "round",
    }


def _variable(color: str) -> str:
    return f"var({_VARIABLES[color]})" if color in _VARIABLES else color


def _for_page(svg: str, name: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<style.*?</style>\s*", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    svg = re.sub(r' (?:width|height)="[^"]*"', "", head) + ">" + rest  # the page says how large it is
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    for color in _VARIABLES:
        svg = svg.replace(color, _variable(color))
    return svg.replace("<svg", '<svg aria-hidden="true"', 1)  # its caption says what it shows
