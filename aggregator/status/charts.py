"""Small pictures as inline SVG. They are stretched to the width that there is, so they hold no text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from markupsafe import Markup

__all__ = ["Chart", "bar", "charts", "line"]

_WIDTH, _HEIGHT = 300.0, 100.0
_MAIN: Final = ("accuracy", "loss")
_MOST_CHARTS: Final = 4

Points = Sequence[tuple[float, float]]
"""(round, value), in order."""


class Chart(NamedTuple):
    """One metric against rounds.

    Attributes:
        metric: its name.
        last: its last value; NaN if that is not a number.
        low: at the lower edge.
        high: at the upper edge.
        first_round: at the left edge.
        last_round: at the right edge.
        training: whether a second line shows the devices' own value in training.
        svg: the picture.
    """

    metric: str
    last: float
    low: float
    high: float
    first_round: int
    last_round: int
    training: bool
    svg: Markup


def charts(evaluations: Iterable[Mapping[str, Any]], history: Iterable[Mapping[str, Any]]) -> list[Chart]:
    """Accuracy and loss first, then what else was measured; what was only seen in training stands alone."""
    measured, trained = _series(evaluations), _series(history)
    names: list[str] = [name for name in _MAIN if name in measured or name in trained]
    names += [name for name in measured if name not in names]
    made = []
    for name in names[:_MOST_CHARTS]:
        lines = [found[name] for found in (measured, trained) if name in found]
        made.append(_chart(name, lines, training=name in trained and name in measured))
    return made


def line(lines: Sequence[Points], low: float, high: float, first: float, last: float) -> Markup:
    """Lines within these edges; values that are not finite leave a gap.

    Args:
        lines: the first one stands out.
        low: value at the lower edge.
        high: value at the upper edge, above `low`.
        first: round at the left edge.
        last: round at the right edge.
    """
    parts = ['<path class="grid" d="M0 0H300M0 50H300M0 100H300"/>']
    for number, points in reversed(list(enumerate(lines, 1))):
        path, pen = [], "M"
        for x, y in points:
            if not math.isfinite(y):
                pen = "M"
                continue
            across = _WIDTH * (x - first) / (last - first) if last > first else _WIDTH / 2
            down = min(max((high - y) / (high - low), 0.0), 1.0)
            path.append(f"{pen}{across:.1f} {_HEIGHT * down:.1f}")
            pen = "L"
        if path:
            end = path[-1][1:]
            parts.append(f'<path class="line-{number}" d="{"".join(path)}"/>')
            parts.append(f'<path class="line-{number} dot" d="M{end}h0"/>')
    return Markup(
        '<svg viewBox="0 0 300 100" preserveAspectRatio="none" aria-hidden="true">'
        + "".join(parts)
        + "</svg>"
    )


def bar(parts: Sequence[tuple[str, float]], whole: float) -> Markup:
    """A bar of parts side by side.

    Args:
        parts: style class and size of each; numbers and names of the page's own style sheet.
        whole: what the full width stands for.
    """
    start, drawn = 0.0, []
    for style, size in parts:
        share = min(max(100 * size / whole, 0.0), 100 - start) if whole > 0 and math.isfinite(size) else 0.0
        if share > 0:
            drawn.append(f'<rect class="{style}" x="{start:.2f}" width="{share:.2f}" height="10"/>')
        start += share
    head = '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
    return Markup(f"{head}{''.join(drawn)}</svg>")


def _series(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in row["metrics"].items():
            found.setdefault(name, []).append((row["round"], float(value)))
    return found


def _chart(name: str, lines: Sequence[Points], *, training: bool) -> Chart:
    values = [y for points in lines for _, y in points if math.isfinite(y)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if name == "accuracy" and low >= 0 and high <= 1:
        low = min(math.floor(10 * low) / 10, 0.9)
        high = max(math.ceil(10 * high) / 10, low + 0.1)
    if not high > low or not math.isfinite(high - low):
        low, high = _around(low)
    first = min(points[0][0] for points in lines)
    last = max(points[-1][0] for points in lines)
    svg = line(lines, low, high, first, last)
    return Chart(name, lines[0][-1][1], low, high, int(first), int(last), training, svg)


def _around(value: float) -> tuple[float, float]:
    """Edges for a line that is level, or one that floating-point numbers cannot span."""
    apart = max(abs(value) / 2, 0.5)
    return (value - apart, value + apart) if math.isfinite(value + apart) else (-1e308, 1e308 / 2)
