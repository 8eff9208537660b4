"""Histograms, pictures and passages of text that a run logged: the last of each name."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mycelia.engine.events import Event, Histogram, Image, Text
from mycelia.engine.report import plot
from mycelia.engine.report.part import Figure, Section
from mycelia.engine.report.text import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Notes"]

_TYPES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg"}
_LARGEST = 4_000_000  # bytes of a picture that still goes into the page
_NUMBER = 60  # of each sort


class Notes:
    """The last histogram, picture and text of each name."""

    name = "notes"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: dict[tuple[str, str], Histogram | Image | Text] = {}

    def add(self, event: Event, seconds: float) -> None:
        """See `Part`."""
        if isinstance(event, Histogram | Image | Text):
            self._last[event.kind, event.name] = event

    def facts(self) -> Mapping[str, Any] | None:
        """See `Part`."""
        events = list(self._last.values())
        if not events:
            return None
        return {
            "histograms": [
                {"name": e.name, "step": e.step, "edges": list(e.edges), "counts": list(e.counts)}
                for e in events
                if isinstance(e, Histogram)
            ],
            "images": [
                {"name": e.name, "step": e.step, "path": e.path, "caption": e.caption}
                for e in events
                if isinstance(e, Image)
            ],
            "texts": [
                {"name": e.name, "step": e.step, "text": e.text} for e in events if isinstance(e, Text)
            ],
        }

    def section(self) -> Section | None:
        """See `Part`."""
        events = list(self._last.values())
        histograms = [event for event in events if isinstance(event, Histogram) and len(event.counts)]
        images = [event for event in events if isinstance(event, Image)]
        texts = [(f"{e.name}, step {e.step}", e.text) for e in events if isinstance(e, Text)]
        figures = [_histogram(event, index) for index, event in enumerate(histograms[:_NUMBER])]
        figures += [_image(event, index, self._folder) for index, event in enumerate(images[:_NUMBER])]
        if not figures and not texts:
            return None
        return Section(self.name, "Distributions, pictures and notes", figures=figures, texts=texts[:_NUMBER])


def _histogram(event: Histogram, index: int) -> Figure:
    def paint(axes: Axes) -> None:
        axes.stairs(event.counts, event.edges, fill=True, color=plot.ACCENT, alpha=0.85)
        axes.set(ylabel="Count", ylim=(0, None))
        plot.ticks(axes.xaxis)
        plot.ticks(axes.yaxis, whole=True)

    name = f"histogram-{index}"
    total = number(sum(event.counts))
    return Figure(name, plot.draw(name, paint), f"{event.name} at step {number(event.step)}, {total} values.")


def _image(event: Image, index: int, folder: Path) -> Figure:
    """The picture inside the page; a file outside the run folder, or no small picture, is only named."""
    caption = f"{event.caption or event.name}, step {number(event.step)}."
    path = (folder / event.path).resolve()
    kind = _TYPES.get(path.suffix.lower())
    try:
        inside = path.is_relative_to(folder.resolve())
        if kind is None or not inside or path.stat().st_size > _LARGEST:
            raise OSError
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return Figure(
            f"image-{index}", f'<p class="missing">{escape(event.path)}</p>', f"{caption} Not shown."
        )
    return Figure(f"image-{index}", f'<img alt="" src="data:image/{kind};base64,{data}">', caption)
