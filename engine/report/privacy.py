"""The privacy a run spent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mycelia.engine.events import Event, Privacy
from mycelia.engine.report import plot
from mycelia.engine.report.part import Figure, Section
from mycelia.engine.report.series import Series
from mycelia.engine.report.text import number

__all__ = ["PrivacySpent"]


class PrivacySpent:
    """ε against rounds or steps."""

    name = "privacy"

    def __init__(self) -> None:
        self._last: Privacy | None = None
        self._epsilon = Series()

    def add(self, event: Event, seconds: float) -> None:
        """See `Part`."""
        if isinstance(event, Privacy):
            self._last = event
            when = event.round if event.round is not None else event.step or 0
            self._epsilon.add(when, seconds, event.epsilon)

    def facts(self) -> Mapping[str, Any] | None:
        """See `Part`."""
        event = self._last
        if event is None:
            return None
        return {
            "epsilon": event.epsilon,
            "delta": event.delta,
            "level": event.level,
            "values": dict(event.values),
            "statement": event.statement,
            "curve": self._epsilon.facts(),
        }

    def section(self) -> Section | None:
        """See `Part`."""
        facts = self.facts()
        if facts is None or self._last is None:
            return None
        unit = "round" if self._last.round is not None else "step"
        lines = [("ε", facts["curve"]["x"], facts["curve"]["y"])]
        markup = plot.line_plot("privacy-epsilon", lines, xlabel=unit, ylabel="ε spent", whole=True)
        level = f" at {facts['level']} level" if facts["level"] else ""
        caption = f"Spent in all: ε = {number(facts['epsilon'])}, δ = {number(facts['delta'])}{level}."
        if facts["statement"]:
            caption = f"{caption} In full: {facts['statement']}."
        return Section(self.name, "Privacy", figures=(Figure("privacy-epsilon", markup, caption),))
