"""What became of the clients: statuses round by round, and the causes of failures."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mycelia.engine.events import Event, Outcome, Outcomes
from mycelia.engine.report import plot
from mycelia.engine.report.part import Figure, Section, Table
from mycelia.engine.report.text import amount, number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ClientOutcomes"]

_BARS = 60
_CAUSES = 200  # different causes that are told apart
_NAMED = 5  # clients named with a cause
_PLACE = {"accepted": 0, "unused": 2}  # failures stand between them


class ClientOutcomes:
    """Statuses per round, and the causes of what went wrong."""

    name = "outcomes"

    def __init__(self) -> None:
        self._rounds: list[int] = []
        self._statuses: list[Counter[str]] = []
        self._causes: Counter[tuple[str, str, str, str]] = Counter()
        self._clients: dict[tuple[str, str, str, str], list[int | str]] = {}

    def add(self, event: Event, seconds: float) -> None:
        """See `Part`."""
        if not isinstance(event, Outcomes):
            return
        self._rounds.append(event.round)
        self._statuses.append(Counter(outcome.status for outcome in event.clients))
        for outcome in event.clients:
            if outcome.cause and outcome.status not in _PLACE:
                self._cause(outcome)

    def facts(self) -> Mapping[str, Any] | None:
        """See `Part`."""
        if not self._rounds:
            return None
        total = sum(self._statuses, Counter[str]())
        statuses = sorted(total, key=lambda status: (_PLACE.get(status, 1), -total[status], status))
        causes = [
            {"status": status, "phase": phase, "cause": cause, "hint": hint, "count": count}
            | {"clients": self._clients[status, phase, cause, hint]}
            for (status, phase, cause, hint), count in self._causes.most_common()
        ]
        return {
            "rounds": self._rounds,
            "statuses": {status: [counts[status] for counts in self._statuses] for status in statuses},
            "total": {status: total[status] for status in statuses},
            "causes": causes,
        }

    def section(self) -> Section | None:
        """See `Part`."""
        facts = self.facts()
        if facts is None:
            return None
        asked = sum(facts["total"].values())
        rows = [
            (status, number(count), percent(count / max(asked, 1)))
            for status, count in facts["total"].items()
        ]
        tables = [Table(("Outcome", "Clients", "Share"), rows, numeric=(1, 2))]
        if facts["causes"]:
            tables.append(_causes(facts["causes"]))
        lead = f"{amount(asked, 'client was', 'clients were')} asked in {amount(len(self._rounds), 'round')}."
        return Section(self.name, "Client outcomes", lead, (_figure(facts),), tables)

    def _cause(self, outcome: Outcome) -> None:
        key = (outcome.status, outcome.phase, outcome.cause, outcome.hint)
        if key not in self._causes and len(self._causes) >= _CAUSES:
            key = (outcome.status, outcome.phase, "other causes", "see events.jsonl")
        self._causes[key] += 1
        clients = self._clients.setdefault(key, [])
        if len(clients) < _NAMED and outcome.client not in clients:
            clients.append(outcome.client)


def _causes(causes: list[dict[str, Any]]) -> Table:
    rows = []
    for cause in causes[:50]:
        clients = ", ".join(str(client) for client in cause["clients"])
        more = ", …" if cause["count"] > len(cause["clients"]) else ""
        rows.append(
            (
                number(cause["count"]),
                cause["status"],
                cause["phase"],
                cause["cause"],
                cause["hint"],
                clients + more,
            )
        )
    return Table(
        ("Times", "Outcome", "Phase", "Cause", "What to do", "Clients"), rows, "Causes", numeric=(0,)
    )


def _figure(facts: Mapping[str, Any]) -> Figure:
    rounds = facts["rounds"]
    width = -(-len(rounds) // _BARS)  # rounds per bar
    colors = _colors(facts["statuses"])
    edges = [*rounds[::width], rounds[-1] + 1]

    def paint(axes: Axes) -> None:
        below = [0.0] * (len(edges) - 1)
        places = [edge - 0.5 for edge in edges]
        for counts, color in zip(facts["statuses"].values(), colors, strict=True):
            bars = [statistics.fmean(counts[i : i + width]) for i in range(0, len(counts), width)]
            top = [low + bar for low, bar in zip(below, bars, strict=True)]
            axes.stairs(top, places, baseline=below, fill=True, color=color, linewidth=0)
            below = top
        axes.set(xlabel="round", ylabel="Clients", xlim=(edges[0] - 0.5, edges[-1] - 0.5), ylim=(0, None))
        plot.ticks(axes.xaxis, whole=True)
        plot.ticks(axes.yaxis, whole=True)

    note = f", each bar the mean of {amount(width, 'round')}" if width > 1 else ""
    caption = f"Clients by outcome, round by round{note}."
    legend = plot.legend(zip(facts["statuses"], colors, strict=True))
    return Figure("outcomes-rounds", legend + plot.draw("outcomes-rounds", paint), caption)


def _colors(statuses: Mapping[str, Any]) -> list[str]:
    """The accent for what went well, a quiet tone for what was not needed, the other colours for the rest."""
    others = iter(plot.SERIES[1:] * len(statuses))
    fixed = {"accepted": plot.ACCENT, "unused": plot.GRID}
    return [fixed[status] if status in fixed else next(others) for status in statuses]
