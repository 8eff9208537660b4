"""Small pictures: where the points lie."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycelia.aggregator.status.charts import bar, charts, line


def drawn(svg: str, style: str) -> str:
    root = ElementTree.fromstring(svg)
    return next(str(path.get("d")) for path in root if path.get("class") == style)


def rows(metric: str, values: dict[int, Any]) -> list[dict[str, Any]]:
    return [{"round": number, "metrics": {metric: value}} for number, value in values.items()]


def test_points_lie_where_they_belong() -> None:
    svg = line([[(1, 0.0), (2, 1.0), (5, 0.25)]], 0.0, 1.0, 1, 5)
    assert drawn(svg, "line-1") == "M0.0 100.0L75.0 0.0L300.0 75.0"
    assert drawn(svg, "line-1 dot") == "M300.0 75.0h0"


def test_what_is_no_number_is_a_gap() -> None:
    svg = line([[(1, 0.0), (2, math.nan), (3, 1.0), (4, 1.0), (5, math.inf)]], 0.0, 1.0, 1, 5)
    assert drawn(svg, "line-1") == "M0.0 100.0M150.0 0.0L225.0 0.0"


def test_accuracy_and_loss_come_first_and_training_is_a_second_line() -> None:
    evaluations = [
        {"round": number, "metrics": {"auroc": 0.7, "loss": 1 / number, "accuracy": 0.5}} for number in (1, 2)
    ]
    made = charts(evaluations, rows("loss", {1: 2.0, 2: 1.5}))
    assert [chart.metric for chart in made] == ["accuracy", "loss", "auroc"]
    assert [chart.training for chart in made] == [False, True, False]
    loss = made[1]
    assert (loss.last, loss.low, loss.high, loss.first_round, loss.last_round) == (0.5, 0.5, 2.0, 1, 2)
    assert "line-2" in loss.svg


def test_what_was_only_seen_in_training_is_drawn_too() -> None:
    (chart,) = charts([], rows("loss", {3: 2.0}))
    assert (chart.last, chart.first_round, chart.last_round, chart.training) == (2.0, 3, 3, False)
    assert chart.low < 2.0 < chart.high


def test_nothing_measured_is_no_chart() -> None:
    assert charts([], []) == []


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", 1e308, -1e308, 0.0, 5e-324])
def test_extreme_values_can_be_drawn(value: float | str) -> None:
    (chart,) = charts(rows("loss", {1: value, 2: value}), [])
    assert math.isfinite(chart.low)
    assert chart.low < chart.high
    ElementTree.fromstring(chart.svg)


@given(st.lists(st.floats(), min_size=1, max_size=50))
def test_every_point_lies_in_the_picture(values: list[float]) -> None:
    (chart,) = charts(rows("loss", dict(enumerate(values, 1))), [])
    for path in ElementTree.fromstring(chart.svg):
        if path.get("class") == "line-1":
            points = re.findall(r"[ML](\S+) ([^ML]+)", str(path.get("d")))
            assert len(points) == sum(map(math.isfinite, values))
            assert all(0 <= float(x) <= 300 and 0 <= float(y) <= 100 for x, y in points)


def test_a_bar_is_never_longer_than_the_whole() -> None:
    def widths(svg: str) -> list[tuple[str, float, float]]:
        return [
            (str(part.get("class")), float(part.get("x", "")), float(part.get("width", "")))
            for part in ElementTree.fromstring(svg)
        ]

    assert widths(bar([("ok", 3), ("lost", 0), ("wait", 1)], 4)) == [("ok", 0, 75), ("wait", 75, 25)]
    assert widths(bar([("ok", 3), ("lost", 9)], 4)) == [("ok", 0, 75), ("lost", 75, 25)]
    assert widths(bar([("ok", math.nan), ("lost", math.inf)], 4)) == []
    assert widths(bar([("ok", 1)], 0)) == []
    assert widths(bar([("ok", -1), ("lost", 2)], 4)) == [("lost", 0, 50)]


@pytest.mark.parametrize("value", [0.0, 0.1, 0.55, 1.0])
def test_accuracy_stays_between_none_and_all(value: float) -> None:
    (chart,) = charts(rows("accuracy", {1: value}), [])
    assert 0 <= chart.low <= value <= chart.high <= 1
    assert chart.low < chart.high
