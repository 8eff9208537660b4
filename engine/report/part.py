"""What a report is made of: each part reads events, states facts, and shows them as a section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mycelia.engine.events import Event

__all__ = ["Figure", "Part", "Section", "Table"]


@dataclass(frozen=True)
class Figure:
    """A picture: `markup` is inline SVG or another element, trusted as it is; a wide one has its own row."""

    name: str
    markup: str
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text; columns listed in `numeric` are set right. A folded one shows its title until opened."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    numeric: Sequence[int] = ()
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """One heading of the report with what stands under it; `texts` are (title, preformatted text)."""

    name: str
    title: str
    lead: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    texts: Sequence[tuple[str, str]] = ()


class Part(Protocol):
    """A part of the report; another room adds one of its own by passing it to `build_report`."""

    name: str

    def add(self, event: Event, seconds: float) -> None:
        """Take in the next event, `seconds` into the run (pauses before a resume left out)."""

    def facts(self) -> Mapping[str, Any] | None:
        """What `report.json` says under the part's name; None when no event concerned it."""

    def section(self) -> Section | None:
        """What `report.html` shows; None for nothing. Called after `facts` gave some."""
