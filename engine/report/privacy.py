"""The privacy a run spent, and all that it depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mycelia.engine.events import Event, Privacy
from mycelia.engine.report import plot
from mycelia.engine.report.part import Figure, Section, Table
from mycelia.engine.report.series import Series
from mycelia.engine.report.text import amount, at_most, number

__all__ = ["PrivacySpent"]

_ROWS = {
    "unit": "Unit",
    "relation": "Neighbours",
    "accountant": "Accountant",
    "epsilon_rdp": "ε by Rényi divergences",
    "sampling": "Sampling",
    "sampling_rate": "Sampling rate",
    "amplified": "Amplified by sampling",
    "noise_multiplier": "Noise multiplier",
    "steps": "Updates",
    "participations": "Most updates with one unit",
}
_SETTINGS = {
    "model": "Noise added by",
    "mechanism": "Noise",
    "noise_source": "Noise source",
    "clip": "Clip function",
    "bound": "Clip bound",
    "rounded_bound": "Clip bound after rounding",
    "least_survivors": "Fewest survivors of a round",
    "assumed_corrupt": "Clients assumed to add no noise",
    "factorisation": "Factorisation",
    "sensitivity": "Sensitivity of the factorisation",
    "separation": "Least rounds between two of a client",
    "uses": "Most rounds of a client",
}
_NOISED_BY = {
    "central": "the server, to the sum",
    "local": "each client, to what it sends",
    "distributed": "each client, a share of what the opened sum holds",
    "each client": "each client, in its training",
}


class PrivacySpent:
    """ε against rounds or steps, the clip bound where it moves, and what ε depends on."""

    name = "privacy"

    def __init__(self) -> None:
        self._last: Privacy | None = None
        self._epsilon, self._clip = Series(), Series()

    def add(self, event: Event, seconds: float) -> None:
        """See `Part`."""
        if isinstance(event, Privacy):
            self._last = event
            when = event.round if event.round is not None else event.step or 0
            self._epsilon.add(when, seconds, event.epsilon)
            if "clip" in event.values:
                self._clip.add(when, seconds, event.values["clip"])

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
            "clip": self._clip.facts() if self._clip.smallest < self._clip.largest else None,
            "details": dict(event.facts),
        }

    def section(self) -> Section | None:
        """See `Part`."""
        facts = self.facts()
        if facts is None or self._last is None:
            return None
        unit = "round" if self._last.round is not None else "step"
        figures = [_epsilon_figure(facts, unit)]
        if facts["clip"]:
            figures.append(_clip_figure(facts["clip"], unit))
        details = facts["details"]
        clients = details.get("clients")
        tables = [_statement_table(details, statement) for statement in details.get("statements", ())]
        if clients:
            tables.append(_client_table(clients))
        return Section(self.name, "Privacy", _lead(facts, clients), figures=figures, tables=tables)


def _lead(facts: Mapping[str, Any], clients: Mapping[str, Any] | None) -> str:
    if not clients:
        return ""
    kind = "Local ε" if "local" in facts["level"] else "ε"
    largest, median, least = (at_most(clients[name]) for name in ("largest", "median", "least"))
    return (
        f"Each client spends a budget of its own. {kind} is {largest} for the client that took part most "
        f"often, {median} for the median and {least} for the least of "
        f"{amount(clients['clients'], 'client')}; {number(clients['took_part'])} took part, and "
        f"{number(clients['spent'])} can pay for no more rounds."
    )


def _epsilon_figure(facts: Mapping[str, Any], unit: str) -> Figure:
    local = "local " if "local" in facts["level"] else ""
    most = "largest " if facts["details"].get("clients") else ""
    lines = [(f"{most}{local}ε", facts["curve"]["x"], facts["curve"]["y"])]
    markup = plot.line_plot("privacy-epsilon", lines, xlabel=unit, ylabel=f"{local}ε spent", whole=True)
    level = f" at {facts['level'].partition(',')[0]} level" if facts["level"] else ""
    spent = f"{local}ε = {at_most(facts['epsilon'])}, δ = {number(facts['delta'])}{level}"
    caption = f"Spent in all: {spent}."
    if facts["statement"]:
        caption = f"{caption} In full: {facts['statement']}."
    return Figure("privacy-epsilon", markup, caption)


def _clip_figure(clip: Mapping[str, Any], unit: str) -> Figure:
    lines = [("clip bound", clip["x"], clip["y"])]
    markup = plot.line_plot("privacy-clip", lines, xlabel=unit, ylabel="Clip bound", whole=True)
    caption = f"The clip bound in force, from {number(clip['min'])} to {number(clip['max'])}; it is public."
    return Figure("privacy-clip", markup, caption)


def _statement_table(details: Mapping[str, Any], statement: Mapping[str, Any]) -> Table:
    """All that one ε depends on."""
    rows = [
        (label, _shown(statement[name])) for name, label in _ROWS.items() if statement.get(name) is not None
    ]
    settings = dict(details)
    settings["model"] = _NOISED_BY.get(str(details.get("model")), details.get("model"))
    rows += [
        (label, _shown(settings[name])) for name, label in _SETTINGS.items() if settings.get(name) is not None
    ]
    rows += [("Assumes that", sentence) for sentence in statement.get("assumptions", ())]
    head = f"ε ≤ {at_most(statement['epsilon'])} at δ = {number(statement['delta'])}"
    return Table(("What it depends on", head), rows)


def _client_table(clients: Mapping[str, Any]) -> Table:
    rows: Sequence[Sequence[str]] = [
        (at_most(epsilon), number(count)) for epsilon, count in clients["distribution"]
    ]
    head = ("ε of a client", "Clients")
    return Table(head, rows, "ε over the clients", numeric=(0, 1), folded=len(rows) > 12)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, int | float) else str(value)
