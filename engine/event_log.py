"""The file `events.jsonl`: appended to by one process, read by any.

An event is one `write` of one whole line, so a process that is killed loses at most the line it was writing.
Readers pass over an unfinished last line; opening the file for appending cuts it off. A number that is not
finite is written as a string, see `plain_json`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mycelia.engine import plain_json
from mycelia.engine.durable import hold
from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.engine.events import KINDS, SCHEMA_VERSION, Event, Outcome, Outcomes, Resumed, RunFinished

__all__ = ["EventLog", "decode", "encode", "latest_history", "read_events"]

_PREFIX = f'{{"v":{SCHEMA_VERSION},"t":'.encode()
_END = 2**63  # later than any step

# The fields of each kind, and those of them that can hold a number that is not finite.
_FIELDS = {
    kind: tuple(item.name for item in fields(event) if item.name != "t") for kind, event in KINDS.items()
}
_NUMERIC = {
    kind: frozenset(item.name for item in fields(event) if "float" in str(item.type) or item.name == "result")
    for kind, event in KINDS.items()
}


class EventLog:
    """Appends events to a file that no other process appends to.

    Raises `MyceliaError` when the file cannot be opened or another process holds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            if not hold(self._file):
                raise MyceliaError(
                    "another process is writing this run",
                    rule="one process at a time writes a run",
                    fix="wait for it or stop it",
                    who=str(path.parent),
                )
            self._size = _cut_unfinished_line(self._file)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, event: Event) -> None:
        """Write the event as one line; when this returns, it outlives this process.

        Raises `MyceliaError` when the disk is full or gone; the file then ends with the event before.
        """
        line = encode(event, time.time())
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            self._take_back()
            raise _unwritable(self.path, error) from error
        self._size += len(line)

    def sync(self) -> None:
        """Wait until all events would outlive a power cut, too."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        """Let go of the file; closing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _take_back(self) -> None:
        """Remove what a failed write left, since a line added after it would be unreadable."""
        try:
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
        except OSError:
            pass  # the write's own error says more


def read_events(path: Path, kinds: Collection[str] = ()) -> Iterator[Event]:
    """The events of a file in order, of all kinds or of those named; the file may still be growing.

    Raises:
        ConfigError: the file has another schema version.
        DataError: a line is corrupt; the error names it.
    """
    wanted = tuple(f'"kind":"{kind}"'.encode() for kind in kinds)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            # The kind stands within the first bytes of a line that `encode` wrote, unless it is corrupt.
            if wanted and line.startswith(_PREFIX) and not any(kind in line[:80] for kind in wanted):
                continue
            event = _parse(line, path, number)
            if event is not None and (not kinds or event.kind in kinds):
                yield event


def encode(event: Event, t: float) -> bytes:
    """The event as one line of JSON that ends in a newline; `t` is the time of an event that has none.

    Arrays, NumPy scalars and tensors are written as plain numbers. Raises `DataError` for what JSON cannot
    say.
    """
    line: dict[str, Any] = {"v": SCHEMA_VERSION, "t": event.t or t, "kind": event.kind}
    for name in _FIELDS[event.kind]:
        line[name] = getattr(event, name)
    if isinstance(event, Outcomes):
        line["clients"] = [_trim(outcome) for outcome in event.clients]
    try:
        text = plain_json.dumps(line)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"an event holds what JSON cannot say ({error})",
            rule="an event holds numbers, strings, lists and tables with string keys",
            who=f"event '{event.kind}'",
        ) from error
    # A lone surrogate, from a file name that is not UTF-8, becomes its JSON escape.
    return text.encode(errors="backslashreplace") + b"\n"


def decode(line: Mapping[str, Any]) -> Event | None:
    """The event that a parsed line stands for; None for a kind that is not known yet.

    Raises `DataError` when a field that the kind must have is missing or malformed.
    """
    kind = KINDS.get(str(line.get("kind")))
    if kind is None:
        return None
    values = {name: line[name] for name in _FIELDS[kind.kind] if name in line}
    for name in _NUMERIC[kind.kind] & values.keys():
        values[name] = plain_json.read_numbers(values[name])
    try:
        if kind is Outcomes:
            values["clients"] = [Outcome(*outcome) for outcome in values["clients"]]
        return kind(t=line["t"], **values)
    except (KeyError, TypeError) as error:
        raise DataError(f"an event of kind '{kind.kind}' is malformed ({error})") from error


def latest_history(events: Iterable[Event], resumed_at: Sequence[int]) -> Iterator[Event]:
    """The events as if the run had never stopped: what a resumed run does again replaces what it did before.

    `resumed_at` are the steps of the `Resumed` events, in order.
    """
    resumes = 0
    for event in events:
        resumes += isinstance(event, Resumed)
        if _position(event) <= min(resumed_at[resumes:], default=_END):
            yield event


def _position(event: Event) -> int:
    """The step or round an event belongs to; 0 for those that belong to the whole run."""
    if isinstance(event, RunFinished):
        return _END  # a run that was resumed has not ended there
    for name in ("round", "step"):
        value = getattr(event, name, None)
        if value is not None:
            return int(value)
    return 0


def _trim(outcome: Outcome) -> list[object]:
    values: list[object] = list(outcome)
    defaults = list(Outcome._field_defaults.values())
    while len(values) > 1 and values[-1] == defaults[len(values) - 2]:
        values.pop()
    return values


def _parse(line: bytes, path: Path, number: int) -> Event | None:
    who = f"{path}, line {number}"
    fix = "restore the file, or delete the line to go on without that event"
    try:
        values = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError is one
        raise DataError(
            f"the line is not JSON ({error})", rule="one event a line", fix=fix, who=who
        ) from error
    if not isinstance(values, dict) or not {"v", "t", "kind"} <= values.keys():
        rule = "an event is an object with 'v', 't' and 'kind'"
        raise DataError("the line is no event", rule=rule, fix=fix, who=who)
    if values["v"] != SCHEMA_VERSION:
        raise ConfigError(
            f"the run has schema version {values['v']!r}",
            rule=f"this version of Mycelia reads schema version {SCHEMA_VERSION}",
            fix="use the version of Mycelia that wrote the run",
            who=who,
        )
    try:
        return decode(values)
    except DataError as error:
        raise DataError(
            error.found, rule="a field keeps its meaning within a schema version", fix=fix, who=who
        ) from error


def _cut_unfinished_line(file: int) -> int:
    """Truncate the file behind its last newline and go there; the new size."""
    end = size = os.lseek(file, 0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        os.lseek(file, start, os.SEEK_SET)
        newline = os.read(file, end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)
    return os.lseek(file, end, os.SEEK_SET)


def _unwritable(path: Path, error: OSError) -> MyceliaError:
    return MyceliaError(
        f"the event log cannot be written: {error.strerror or error}",
        rule="a run records what it does",
        fix="free space or name another folder with --out; what is written so far is readable",
        who=str(path),
    )
