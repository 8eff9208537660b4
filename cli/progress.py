"""How far a run is, on stderr: bars on a terminal, plain lines elsewhere; fed with the run's events."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from mycelia.engine.events import (
    CheckpointSaved,
    CohortProgress,
    Evaluation,
    Event,
    Privacy,
    Resumed,
    Round,
    RunFinished,
    RunStarted,
    Scalars,
    WarningRaised,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["BarProgress", "LineProgress", "show_progress"]

# Names in the events → label and form of the figures that are shown.
_EVALUATION = {"loss": ("loss", "{:.4g}"), "accuracy": ("accuracy", "{:.1%}")}
_TRAINING = {
    "loss": ("train loss", "{:.4g}"),
    "train_loss": ("train loss", "{:.4g}"),
    "clip_share": ("clipped", "{:.0%}"),
    "epsilon": ("ε", "{:.3g}"),
    "local epsilon": ("local ε", "{:.3g}"),
}
_LINES = 50  # about as many lines as a run without a terminal prints


class Standing:
    """What is known so far: how far the run is, and its latest figures."""

    def __init__(self) -> None:
        self.unit, self.total, self.done = "round", 0, 0
        self.clients_done = self.clients_asked = 0
        self._figures: dict[str, str] = {}

    def take(self, event: Event) -> None:
        """Take in an event."""
        match event:
            case RunStarted(unit=unit, total=total):
                self.unit, self.total = unit, total
            case Resumed(step=step):
                self.done = step
            case Round(round=done, metrics=values):
                self.done = done
                self._read(values, _TRAINING)
            case Scalars(step=step, values=values):
                self.done = step if self.unit == "step" else self.done
                self._read(values, _TRAINING)
            case Evaluation(metrics=values, split=split) if split != "train":
                self._read(values, _EVALUATION)
            case Privacy(epsilon=epsilon, level=level):
                self._read({"local epsilon" if "local" in level else "epsilon": epsilon}, _TRAINING)
            case CohortProgress(done=done, asked=asked):
                self.clients_done, self.clients_asked = done, asked
            case _:
                pass

    def figures(self) -> str:
        """The latest figures in one line, in a fixed order."""
        labels = dict.fromkeys(label for label, _ in [*_EVALUATION.values(), *_TRAINING.values()])
        return "  ".join(f"{label} {self._figures[label]}" for label in labels if label in self._figures)

    def _read(self, values: Mapping[str, float], names: Mapping[str, tuple[str, str]]) -> None:
        for name, (label, form) in names.items():
            if name in values:
                self._figures[label] = form.format(values[name])


class LineProgress:
    """Plain lines: about fifty over the run, and every warning."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._standing = Standing()
        self._next = 0
        self._due = False

    def __call__(self, event: Event) -> None:
        """Take in an event."""
        standing = self._standing
        last = standing.done == standing.total
        # A line waits for the evaluation that may follow its round or step.
        if isinstance(event, Round | Scalars | RunFinished) or (
            isinstance(event, CohortProgress | CheckpointSaved) and not last
        ):
            self._flush()
        standing.take(event)
        if isinstance(event, WarningRaised):
            self._print(_warning(event))
        elif isinstance(event, Resumed):
            self._print(f"resumed after {standing.unit} {event.step}")
        elif isinstance(event, Round | Scalars):
            self._due = standing.done >= min(self._next, standing.total or math.inf)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flush()

    def _flush(self) -> None:
        standing = self._standing
        if self._due:
            of = f"/{standing.total}" if standing.total else ""
            self._print(f"{standing.unit} {standing.done}{of}  {standing.figures()}".rstrip())
            self._next = standing.done + max(1, standing.total // _LINES)
        self._due = False

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class BarProgress:
    """Two bars for a federation, its rounds and the clients in the round; one bar for training."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._standing = Standing()
        self._bars: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=False,
        )
        self._main: TaskID = self._bars.add_task("rounds", total=None, figures="", visible=False)
        self._clients: TaskID = self._bars.add_task("clients", total=None, figures="", visible=False)

    def __call__(self, event: Event) -> None:
        """Take in an event."""
        from rich.text import Text

        standing = self._standing
        standing.take(event)
        if isinstance(event, WarningRaised):
            self._bars.console.print(Text(_warning(event)))
            return
        self._bars.update(
            self._main,
            description=f"{standing.unit}s",
            completed=standing.done,
            total=standing.total or None,
            figures=standing.figures(),
            visible=True,
        )
        if standing.clients_asked:
            done, asked = standing.clients_done, standing.clients_asked
            self._bars.update(self._clients, completed=done, total=asked, visible=True)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.update(self._clients, visible=False)
        self._bars.stop()


def show_progress(stream: TextIO | None = None) -> BarProgress | LineProgress:
    """The progress display that suits the stream, stderr unless given: a context manager and a `Listener`."""
    stream = sys.stderr if stream is None else stream
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return LineProgress(stream)
    from rich.console import Console

    return BarProgress(Console(file=stream))


def _warning(event: WarningRaised) -> str:
    return f"warning: {event.who}: {event.message}" if event.who else f"warning: {event.message}"
