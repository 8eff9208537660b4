"""How the sums of a run were made: who was guarded against, who vanished in which phase, and what it cost."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

from mycelia.engine.events import Event, SecureSum
from mycelia.engine.report.part import Section, Table
from mycelia.engine.report.text import amount, duration, number, percent, size

__all__ = ["SecureSums"]

_ROWS = {
    "threat": "Guarded against",
    "neighbours": "Neighbours that hold shares",
    "threshold": "Shares that rebuild a secret",
    "n_min": "Fewest clients in a sum",
    "n_max": "Most clients",
    "bits": "Bits of an element",
    "dimension": "Elements",
    "frac_bits": "Bits of fraction",
    "value_bound": "Largest value, in steps",
    "weight_max": "Largest weight",
    "noise": "Noise in the sum",
}
_THREATS = {"passive": "a server that looks", "active": "a server that lies"}


class SecureSums:
    """One block: settings, drop-outs and faults, time and bytes."""

    name = "secure_sum"

    def __init__(self) -> None:
        self._last: SecureSum | None = None
        self._opened = self._asked = self._survivors = self._up = self._down = 0
        self._failed: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._attempts: Counter[int] = Counter()
        self._phase_ms: dict[str, list[float]] = {}
        self._clipped: list[float] = []

    def add(self, event: Event, seconds: float) -> None:
        """See `Part`."""
        if not isinstance(event, SecureSum):
            return
        self._last = event
        self._asked += event.asked
        self._survivors += event.survivors
        self._up += event.bytes_up
        self._down += event.bytes_down
        self._dropped.update(event.dropped)
        self._faults.update(event.faults)
        if event.failed:
            self._failed[event.failed] += 1
        else:
            self._opened += 1
            self._attempts[event.attempts] += 1
        for phase, milliseconds in event.phase_ms.items():
            self._phase_ms.setdefault(phase, []).append(milliseconds)
        if event.clipped is not None:
            self._clipped.append(event.clipped)

    def facts(self) -> Mapping[str, Any] | None:
        """See `Part`."""
        last = self._last
        if last is None:
            return None
        return {
            "masked": last.masked,
            "opened": self._opened,
            "failed": dict(self._failed),
            "attempts": {str(count): rounds for count, rounds in sorted(self._attempts.items())},
            "asked": self._asked,
            "survivors": self._survivors,
            "dropped": dict(self._dropped),
            "faults": dict(self._faults),
            "phase_ms": {phase: statistics.median(found) for phase, found in self._phase_ms.items()},
            "bytes_up": self._up,
            "bytes_down": self._down,
            "upload_bytes": last.upload_bytes,
            "share_bytes": last.share_bytes,
            "clipped": statistics.fmean(self._clipped) if self._clipped else None,
            "settings": {"n_min": last.n_min, **last.settings},
        }

    def section(self) -> Section | None:
        """See `Part`."""
        facts = self.facts()
        if facts is None:
            return None
        tables = [_settings(facts)]
        if facts["dropped"] or facts["faults"] or facts["failed"]:
            tables.append(_troubles(facts))
        if facts["phase_ms"]:
            rows = [(phase, duration(found / 1000)) for phase, found in facts["phase_ms"].items()]
            tables.append(Table(("Phase", "Time"), rows, "Time of a phase, the median", numeric=(1,)))
        return Section(self.name, "Secure sum", _lead(facts), tables=tables)


def _lead(facts: Mapping[str, Any]) -> str:
    opened, failed = facts["opened"], sum(facts["failed"].values())
    hidden = (
        "The server saw the sum of each, and no update."
        if facts["masked"]
        else "There were no masks: the integers are those of a secure sum, and nothing was hidden."
    )
    keys = " Keys and masks came from the run's seed, as they do in a simulation." if facts["masked"] else ""
    without = f"; {amount(failed, 'round')} ended without one" if failed else ""
    return f"{amount(opened, 'sum was', 'sums were')} opened{without}. {hidden}{keys}"


def _settings(facts: Mapping[str, Any]) -> Table:
    settings = facts["settings"] | {"threat": _THREATS.get(facts["settings"].get("threat", ""), "")}
    rows = [(label, _shown(settings[name])) for name, label in _ROWS.items() if settings.get(name)]
    if facts["clipped"] is not None:
        rows.append(("Coordinates cut off", percent(facts["clipped"])))
    rows.append(("Upload of a client", size(facts["upload_bytes"])))
    if facts["share_bytes"]:
        rows.append(("Shares of a client", size(facts["share_bytes"])))
    rows.append(("Sent by clients, in all", size(facts["bytes_up"])))
    rows.append(("Sent to clients beside the model, in all", size(facts["bytes_down"])))
    return Table(("Setting", "Value"), rows, numeric=(1,))


def _troubles(facts: Mapping[str, Any]) -> Table:
    rows = [(f"vanished in {phase}", number(count)) for phase, count in facts["dropped"].items()]
    rows += [(f"refused or left: {reason}", number(count)) for reason, count in facts["faults"].items()]
    rows += [(f"rounds without a sum: {reason}", number(count)) for reason, count in facts["failed"].items()]
    return Table(("What happened", "Times"), rows, "Drop-outs and faults", numeric=(1,))


def _shown(value: object) -> str:
    return number(value) if isinstance(value, int | float) else str(value)
