"""From a snapshot of the board to HTML, in parts that change one by one."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from importlib import resources
from typing import Any, Final

import jinja2

from mycelia.aggregator.status import charts
from mycelia.aggregator.status.board import Board
from mycelia.aggregator.wire.problems import clipped
from mycelia.engine.report import text
from mycelia.privacy.secagg.certificates import date

__all__ = ["Rendered", "View"]

_IN_FULL: Final = 3  # runs
_ROWS: Final = 100  # rounds in the table of the newest run; /api/status has them all
_ROWS_OF_OTHERS: Final = 20
_KEPT: Final = 8  # pages of devices whose parts are remembered
_STEPS: Final = ("select", "configure", "train", "merge", "evaluate")
_SECURE_STEPS: Final = ("select", "configure", "train", "agree", "unmask", "merge", "evaluate")
_WITHIN: Final = {"advertise": "configure", "share": "configure", "masked": "train"}
_FATES: Final = ("ACCEPTED", "LATE", "DROPPED", "REJECTED", "DECLINED", "UNKNOWN")


@dataclass
class Rendered:
    """The parts of the page with one page of devices.

    Attributes:
        version: of the board.
        parts: HTML of each, in order, by the id of its element.
        since: the version at which each of them came to be as it is.
    """

    version: int
    parts: dict[str, str]
    since: dict[str, int] = field(default_factory=dict)

    def news(self, after: int) -> dict[str, str]:
        """The parts that are newer than a version."""
        return {name: html for name, html in self.parts.items() if self.since[name] > after}


class View:
    """The page of one board.

    Args:
        board: that is shown.

    Attributes:
        files: the style sheet and the script by the name that the page asks for.
        build: changes with the files and templates: a page of another build has to be loaded anew.
    """

    def __init__(self, board: Board) -> None:
        folder = resources.files("mycelia.aggregator.status") / "templates"
        names = ("page.html.j2", "parts.html.j2", "status.css", "status.js")
        texts = {name: (folder / name).read_text(encoding="utf-8") for name in names}
        self.files = {name: texts[name] for name in ("status.css", "status.js")}
        self.build = sha256("\0".join(texts.values()).encode()).hexdigest()[:12]
        self._board = board
        self._environment = jinja2.Environment(
            loader=jinja2.DictLoader(texts),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= _FILTERS
        self._environment.globals |= {"bar": charts.bar}
        self._rendered: OrderedDict[int, Rendered] = OrderedDict()

    def page(self, number: int) -> str:
        """The whole page, with this page of devices."""
        rendered = self.parts(number)
        template = self._environment.get_template("page.html.j2")
        snapshot = self._board.snapshot(number)
        return template.render(
            name=snapshot["server"]["name"] or "aggregation server",
            parts=rendered.parts.values(),
            now=snapshot["now"],
            build=self.build,
            page=snapshot["devices"]["page"],
            last=self.event_id(rendered.version),
        )

    def parts(self, number: int) -> Rendered:
        """The parts as they are now, drawn anew only where the board has news."""
        old = self._rendered.get(number)
        if old is None or old.version != self._board.version:
            new = Rendered(self._board.version, self._draw(self._board.snapshot(number)))
            for name, html in new.parts.items():
                same = old is not None and old.parts.get(name) == html
                new.since[name] = old.since[name] if old is not None and same else new.version
            self._rendered[number] = old = new
        self._rendered.move_to_end(number)
        while len(self._rendered) > _KEPT:
            self._rendered.popitem(last=False)
        return old

    def event_id(self, version: int) -> str:
        """A version that no other start of the server has."""
        return f"{self._board.boot}-{version}"

    def after(self, event_id: str) -> int:
        """The version of an id; -1 if it is not of this start of the server."""
        boot, _, version = event_id.partition("-")
        plain = version.isascii() and version.isdigit() and len(version) < 20
        return int(version) if boot == self._board.boot and plain else -1

    def _draw(self, snapshot: Mapping[str, Any]) -> dict[str, str]:
        draw: Any = self._environment.get_template("parts.html.j2").module
        parts = {"head": draw.head(snapshot, "head"), "tiles": draw.tiles(snapshot, "tiles")}
        runs = sorted(snapshot["runs"], key=lambda run: run["state"] != "running")  # the newest first of each
        for index, run in enumerate(runs[:_IN_FULL]):
            name = f"run-{text.slug(run['name'])}"
            shown = _run(run, _ROWS_OF_OTHERS if index else _ROWS)
            parts[f"{name}-now"] = draw.run(shown, f"{name}-now")
            parts[f"{name}-rounds"] = draw.rounds(shown, f"{name}-rounds")
        if not runs:
            parts["no-run"] = draw.no_run("no-run")
        if len(runs) > _IN_FULL:
            parts["others"] = draw.others(runs[_IN_FULL:], "others")
        parts["devices"] = draw.devices(snapshot["devices"], "devices")
        if snapshot["refused"]:
            parts["refused"] = draw.refused(snapshot["refused"], "refused")
        return {name: str(html) for name, html in parts.items()}


def _run(run: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """A run with what its templates show beside the facts."""
    steps = _SECURE_STEPS if run["secure"] else _STEPS
    phase = _WITHIN.get(run["phase"], run["phase"])
    settled = run["settled"]
    return {
        **run,
        "steps": steps if phase in steps else (),
        "step": phase,
        "fates": [(fate, settled[fate]) for fate in _FATES if settled.get(fate)],
        "charts": charts.charts(run["evaluations"], run["history"]),
        "dropouts": sorted(run["dropped"].items(), key=lambda item: -item[1]),
        "rows": run["history"][: -rows - 1 : -1],
    }


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S UTC")


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _metric(value: float | str, name: str) -> str:
    """Accuracy in percent, anything else as it is."""
    number = float(value)
    return text.percent(number) if name == "accuracy" and 0 <= number <= 1 else text.number(number)


def _at_least(value: float) -> str:
    """What is left, of which no more is shown than there is: rounded down to four significant digits."""
    if value <= 0 or not math.isfinite(value):
        return text.number(value)
    step = 10.0 ** (math.floor(math.log10(value)) - 3)
    return text.number(math.floor(value / step + 1e-9) * step)


def _spoken(word: str) -> str:
    return word.replace("_", " ").lower()


_FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "number": lambda value: text.number(float(value)),
    "at_most": lambda value: text.at_most(float(value)),
    "at_least": _at_least,
    "duration": text.duration,
    "size": text.size,
    "amount": text.amount,
    "title": text.title,
    "metric": _metric,
    "clock": _clock,
    "day": _day,
    "date": lambda seconds: date(int(seconds)),
    "spoken": _spoken,
    "clipped": clipped,
    "float": float,
}
