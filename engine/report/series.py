"""A curve of bounded size, however long the run."""

from __future__ import annotations

import math
from array import array
from typing import Any

__all__ = ["Series"]

_LIMIT = 1000


class Series:
    """Points (x, seconds, y) in order; above 1,000 of them, neighbours are averaged in pairs.

    The last, smallest and largest y are kept as they were.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self.last = self.smallest = self.largest = math.nan
        self._limit = limit
        self._stride = 1  # points that one kept point is the mean of
        self._waiting: list[tuple[float, float, float]] = []
        self._points: list[array[float]] = [array("d"), array("d"), array("d")]

    def add(self, x: float, seconds: float, y: float) -> None:
        """Append a point."""
        self.last = y
        if not math.isnan(y):
            self.smallest = y if math.isnan(self.smallest) else min(self.smallest, y)
            self.largest = y if math.isnan(self.largest) else max(self.largest, y)
        self._waiting.append((x, seconds, y))
        if len(self._waiting) == self._stride:
            self._keep()
            if len(self._points[0]) > self._limit:
                self._halve()

    def facts(self) -> dict[str, Any]:
        """The points and what is known exactly; `mean_of` tells how many points each one stands for."""
        if self._waiting:
            self._keep()
        x, seconds, y = self._points
        return {
            "x": [int(value) for value in x],
            "seconds": list(seconds),
            "y": list(y),
            "mean_of": self._stride,
            "last": self.last,
            "min": self.smallest,
            "max": self.largest,
        }

    def _keep(self) -> None:
        x, seconds, _ = self._waiting[-1]
        y = math.fsum(point[2] for point in self._waiting) / len(self._waiting)
        for values, value in zip(self._points, (x, seconds, y), strict=True):
            values.append(value)
        self._waiting.clear()

    def _halve(self) -> None:
        # The odd point at the end waits for its partner, weighted as the points it stands for.
        x, seconds, y = self._points
        if len(x) % 2:
            self._waiting = [(x[-1], seconds[-1], y[-1])] * self._stride
        even = len(x) // 2 * 2
        means = array("d", ((y[i] + y[i + 1]) / 2 for i in range(0, even, 2)))
        self._points = [x[1:even:2], seconds[1:even:2], means]
        self._stride *= 2
