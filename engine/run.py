"""The run folder: `config.toml`, `events.jsonl`, `checkpoints/`, and the reports made from them."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mycelia.engine.errors import ConfigError, MyceliaError
from mycelia.engine.event_log import EventLog, latest_history, read_events
from mycelia.engine.events import CheckpointSaved, Event, Listener, Resumed, WarningRaised

if TYPE_CHECKING:
    from mycelia.engine.checkpoint import Checkpoint
    from mycelia.engine.types import Tensors

__all__ = ["CHECKPOINTS", "Run", "check_free", "is_run"]

EVENTS = "events.jsonl"
CONFIG = "config.toml"
CHECKPOINTS = "checkpoints"


def check_free(out: Path | None) -> None:
    """Refuse a folder that `Run.create` would refuse, before work that would then be lost.

    Raises `ConfigError` when there is something in it.
    """
    if out is not None and out.is_dir() and (occupied := next(out.iterdir(), None)) is not None:
        raise _occupied(out, occupied)


class Run:
    """A run and its folder; a context manager that closes the event log.

    Made by `create`, `open` (to read) or `resume` (to go on). Each listener is called with every event as it
    is logged.
    """

    def __init__(self, path: Path, log: EventLog | None, listeners: Sequence[Listener]) -> None:
        self.path = path
        self._log = log
        self._listeners = tuple(listeners)

    @classmethod
    def create(
        cls,
        out: Path | None,
        command: str,
        config_toml: str,
        *,
        root: Path = Path("runs"),
        listeners: Sequence[Listener] = (),
    ) -> Self:
        """Start a run in the folder `out`, or in a new one `root`/`command`-(UTC time)-(short id).

        Raises `ConfigError` when `out` exists and is not an empty folder, and `MyceliaError` when it cannot
        be written.
        """
        path = Path(out) if out is not None else root / _new_name(command)
        try:
            path.mkdir(parents=True, exist_ok=True)
            occupied = next(path.iterdir(), None)
        except FileExistsError:
            occupied = path
        except OSError as error:
            raise _unwritable(path, error) from error
        if occupied is not None:
            raise _occupied(path, occupied)
        try:
            (path / CONFIG).write_text(config_toml, encoding="utf-8")
        except OSError as error:
            raise _unwritable(path, error) from error
        return cls(path, EventLog(path / EVENTS), listeners)

    @classmethod
    def open(cls, path: Path) -> Self:
        """An existing run, to read.

        Raises `ConfigError` when the folder is no run, or one of another schema version.
        """
        path = Path(path)
        if not is_run(path):
            raise _no_run(path)
        next(read_events(path / EVENTS), None)
        return cls(path, None, ())

    @classmethod
    def resume(cls, path: Path, *, listeners: Sequence[Listener] = ()) -> Self:
        """An existing run, to go on with; follow it by `load_checkpoint`.

        Raises as `open` does, and `MyceliaError` while another process writes the run.
        """
        run = cls.open(path)
        return cls(run.path, EventLog(run.path / EVENTS), listeners)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name

    @property
    def config_toml(self) -> str:
        """The resolved configuration as TOML; empty when the file is missing."""
        try:
            return (self.path / CONFIG).read_text(encoding="utf-8")
        except OSError:
            return ""

    def log(self, event: Event) -> None:
        """Append an event (a transient one is not written) and tell the listeners.

        Raises `MyceliaError` when it cannot be written.
        """
        if not event.transient:
            self._writer().append(event)
        for listener in self._listeners:
            listener(event)

    def events(self, kinds: Collection[str] = ()) -> Iterator[Event]:
        """The events logged so far, of all kinds or of those named; see `read_events`."""
        return read_events(self.path / EVENTS, kinds)

    def history(self) -> Iterator[Event]:
        """The events without those that a resume did again; see `latest_history`."""
        resumed_at = [event.step for event in self.events({Resumed.kind}) if isinstance(event, Resumed)]
        return latest_history(self.events(), resumed_at)

    def save_checkpoint(self, step: int, tensors: Tensors, meta: Mapping[str, Any]) -> Path:
        """Save the state after `step`, the events before it first; see `checkpoint.save_checkpoint`."""
        from mycelia.engine.checkpoint import save_checkpoint

        self._writer().sync()
        path = save_checkpoint(self.path / CHECKPOINTS, step, tensors, meta)
        self.log(CheckpointSaved(step=step, path=f"{CHECKPOINTS}/{path.name}"))
        return path

    def load_checkpoint(self, step: int | None = None) -> Checkpoint:
        """The newest intact checkpoint, or that of `step`.

        In a resumed run this logs `resumed`, and a warning for each broken checkpoint that was skipped.
        Raises `DataError` when there is none.
        """
        from mycelia.engine.checkpoint import read_checkpoint
        from mycelia.engine.environment import describe

        checkpoint, skipped = read_checkpoint(self.path / CHECKPOINTS, step)
        if self._log is not None:
            self.log(Resumed(step=checkpoint.step, environment=describe()))
            for message in skipped:
                self.log(WarningRaised(message=message, who=CHECKPOINTS))
        return checkpoint

    def close(self) -> None:
        """Close the event log; closing twice is harmless."""
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _writer(self) -> EventLog:
        if self._log is None:
            raise ConfigError("the run is open for reading", fix="use Run.resume", who=str(self.path))
        return self._log


def is_run(path: Path) -> bool:
    """Whether the folder is a run's."""
    return (path / EVENTS).is_file()


def _new_name(command: str) -> str:
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return f"{command}-{moment}-{secrets.token_hex(3)}"


def _occupied(path: Path, by: Path) -> ConfigError:
    if is_run(path):
        found, fix = "there is a run already", f"name another --out, or go on with --resume {path}"
    elif by == path:
        found, fix = "this is a file", "name another --out"
    else:
        found, fix = f"the folder is not empty: it holds '{by.name}'", "name another --out"
    return ConfigError(found, rule="a run gets a folder of its own", fix=fix, who=str(path))


def _no_run(path: Path) -> ConfigError:
    if path.is_dir():
        found = f"the folder holds no {EVENTS}"
        runs = sorted(child.name for child in path.iterdir() if is_run(child))
        if runs:
            fix = f"name one of the runs in it: {', '.join(runs[:5])}" + (", …" if len(runs) > 5 else "")
            return ConfigError(found, rule="a run is named by its own folder", fix=fix, who=str(path))
    else:
        found = "there is no such folder" if not os.path.lexists(path) else "this is not a folder"
    return ConfigError(
        found,
        rule=f"a run is a folder with {EVENTS}",
        fix="`mycelia runs list` shows the runs under ./runs",
        who=str(path),
    )


def _unwritable(path: Path, error: OSError) -> MyceliaError:
    return MyceliaError(
        f"the run folder cannot be written: {error.strerror or error}",
        rule="a run records what it does",
        fix="free space, or name another folder with --out",
        who=str(path),
    )
