"""The HTML page: one file, no network, light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from mycelia.engine.report import text
from mycelia.engine.report.part import Section

__all__ = ["Tile", "page", "tiles"]


class Tile(NamedTuple):
    """A figure of the head: its label, its value, and the value in full when it is shortened."""

    label: str
    value: str
    full: str = ""


def page(
    title: str,
    sections: Sequence[Section],
    *,
    facts: Sequence[str] = (),
    notice: str = "",
    head: Sequence[Tile] = (),
) -> str:
    """The page of some sections: `facts` is the line under the title, `notice` what has to be seen first."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    files = resources.files("mycelia.engine.report")
    template = environment.from_string((files / "page.html.j2").read_text(encoding="utf-8"))
    css = (files / "page.css").read_text(encoding="utf-8")
    return template.render(title=title, sections=sections, facts=facts, notice=notice, tiles=head, css=css)


_SHOWN: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "test_accuracy": ("Test accuracy", text.percent),
    "test_loss": ("Test loss", text.number),
    "clean_accuracy": ("Clean accuracy", text.percent),
    "robust_accuracy": ("Robust accuracy", text.percent),
    "success_rate": ("Success rate", text.percent),
    "worst_decile_accuracy": ("Worst decile accuracy", text.percent),
    "train_loss": ("Training loss", text.number),
    "epsilon": ("ε spent", text.number),
    "delta": ("δ", text.number),
    "rounds": ("Rounds", text.number),
    "epochs": ("Epochs", text.number),
    "steps": ("Steps", text.number),
    "failed_rounds": ("Failed rounds", text.number),
    "seconds_total": ("Time", text.duration),
    "seconds_startup": ("Start-up", text.duration),
    "seconds_per_round": ("Time per round", text.duration),
    "simulated_seconds": ("Simulated time", text.duration),
    "sgd_steps_per_second": ("SGD steps per second", text.number),
    "bytes_up": ("Sent by clients", text.size),
    "bytes_down": ("Sent to clients", text.size),
    "model_sha256": ("Model SHA-256", text.number),
}
_LEFT_OUT = {"run_dir", "seed", "partition_sha256"}  # said elsewhere on the page
_ONLY_SOME = {"failed_rounds", "simulated_seconds"}  # nothing to say when there are none


def tiles(result: Mapping[str, Any]) -> list[Tile]:
    """The figures of a result, those that matter most first; keys that are not known follow as they are."""
    shown = []
    for key in [*(key for key in _SHOWN if key in result), *(key for key in result if key not in _SHOWN)]:
        value = result[key]
        if value is None or value == "" or key in _LEFT_OUT or isinstance(value, Mapping | list):
            continue
        if key in _ONLY_SOME and not value:
            continue
        label, show = _SHOWN.get(key, (text.title(key), text.number))
        if isinstance(value, bool) or not isinstance(value, int | float):
            full = str(value)
            short = full if len(full) <= 14 else f"{full[:10]}…"
            shown.append(Tile(label, short, full if short != full else ""))
        else:
            shown.append(Tile(label, show(value), str(value)))
    return shown
