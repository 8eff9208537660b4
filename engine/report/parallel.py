"""Parallel coordinates: one line per run through its settings to the metric."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from mycelia.engine.report.part import Figure, Section
from mycelia.engine.report.text import amount, number

__all__ = ["parallel_coordinates"]

_TOP, _BOTTOM, _HEIGHT = 56, 24, 420
_STEP, _MARGIN = 150, 90
_LOG_FROM = 50.0  # ratio of largest to smallest from which an axis is logarithmic


class _Axis(NamedTuple):
    name: str
    places: Mapping[str, float]  # of each value, by its repr, from 0 (bottom) to 1 (top)
    ticks: Sequence[tuple[float, str]]


def parallel_coordinates(
    runs: Sequence[tuple[str, Mapping[str, Any]]], axes: Sequence[str], metric: str
) -> Section:
    """A section with the plot of (name, values) per run: an axis per name in `axes`, the metric's last.

    A line's colour goes from the second series colour (low metric) to the first (high); a run without a value
    keeps to the bottom of that axis, one without the metric is grey.
    """
    names = [*(name for name in axes if name != metric), metric]
    drawn = [_axis(name, [values.get(name) for _, values in runs]) for name in names]
    width = 2 * _MARGIN + _STEP * (len(drawn) - 1)
    lines = "".join(_line(name, values, drawn) for name, values in runs)
    scales = "".join(_scale(axis, _MARGIN + _STEP * index) for index, axis in enumerate(drawn))
    markup = (
        f'<svg class="parallel" viewBox="0 0 {width} {_HEIGHT}" style="min-width: {width}px" role="img" '
        f'aria-label="Parallel coordinates of {len(runs)} runs">{lines}{scales}</svg>'
    )
    caption = f"{amount(len(runs), 'run')}; point at a line to see which. Colour: {metric}, from low to high."
    return Section(
        "parallel", "Settings and result", figures=(Figure("parallel", markup, caption, wide=True),)
    )


def _axis(name: str, values: Sequence[Any]) -> _Axis:
    keys = {_key(value) for value in values} - {""}
    if keys and all(value is None or _is_number(value) for value in values):
        return _numeric(name, sorted(float(key) for key in keys))
    words = sorted(keys)
    places = {word: (index + 0.5) / len(words) for index, word in enumerate(words)}
    return _Axis(name, places, _apart((place, word) for word, place in places.items()))


def _numeric(name: str, values: Sequence[float]) -> _Axis:
    low, high = values[0], values[-1]
    logarithmic = low > 0 and high / low >= _LOG_FROM
    scale = math.log if logarithmic else float
    span = scale(high) - scale(low)

    def place(value: float) -> float:
        return (scale(value) - scale(low)) / span if span else 0.5

    shown = values if len(values) <= 6 else [low + (high - low) * part / 4 for part in range(5)]
    if logarithmic and len(values) > 6:
        shown = [low * (high / low) ** (part / 4) for part in range(5)]
    ticks = _apart((place(value), number(value)) for value in shown)
    return _Axis(name, {_key(value): place(value) for value in values}, ticks)


def _apart(ticks: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """The ticks, without those whose label would run into the one before."""
    kept: list[tuple[float, str]] = []
    for place, label in ticks:
        if not kept or place - kept[-1][0] > 0.045:
            kept.append((place, label))
    return kept


def _key(value: object) -> str:
    """What tells values apart on an axis; empty for none and for a number that is not finite."""
    if isinstance(value, int | float) and _is_number(value):
        return repr(float(value)) if math.isfinite(value) else ""
    return "" if value is None else str(value)


def _line(name: str, values: Mapping[str, Any], axes: Sequence[_Axis]) -> str:
    places = [axis.places.get(_key(values.get(axis.name)), 0.0) for axis in axes]
    points = " ".join(f"{_MARGIN + _STEP * i},{_y(place):.1f}" for i, place in enumerate(places))
    metric = axes[-1]
    color = "var(--muted)"
    if _key(values.get(metric.name)) in metric.places:
        color = f"color-mix(in oklab, var(--series-1) {100 * places[-1]:.0f}%, var(--series-2))"
    told = [name, *(f"{axis.name} = {_show(values.get(axis.name))}" for axis in axes)]
    title = escape("\n".join(told))
    return f'<polyline points="{points}" style="stroke: {color}"><title>{title}</title></polyline>'


def _scale(axis: _Axis, x: float) -> str:
    name = escape(_short(axis.name, 20))
    parts = [
        f'<line x1="{x}" x2="{x}" y1="{_y(1)}" y2="{_y(0)}"/>',
        f'<text class="name" x="{x}" y="{_TOP - 26}" text-anchor="middle">{name}</text>',
    ]
    for place, label in axis.ticks:
        y = _y(place)
        parts.append(
            f'<text x="{x - 7}" y="{y + 4:.1f}" text-anchor="end">{escape(_short(label, 12))}</text>'
        )
        parts.append(f'<line x1="{x - 4}" x2="{x}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return f"<g>{''.join(parts)}</g>"


def _y(place: float) -> float:
    return _TOP + (1 - place) * (_HEIGHT - _TOP - _BOTTOM)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _show(value: object) -> str:
    return number(value) if isinstance(value, float) else "none" if value is None else str(value)


def _short(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"
