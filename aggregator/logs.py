"""Structured logs: one JSON object a line, or a line for people where a terminal reads it.

A line has the fields of `FIELDS` that are known, and nothing else: no field could hold a tensor, a key or a
token. Ordinary records of `logging` go the same way; of their arguments, those that are neither text nor
numbers are named by their type alone.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any, Final, Literal, TextIO

from mycelia.aggregator.wire.problems import clipped
from mycelia.engine.errors import ConfigError

__all__ = ["FIELDS", "LEVELS", "Form", "configure", "log"]

FIELDS: Final = (
    "run", "round", "attempt", "phase", "client", "code", "reason", "hint", "bytes", "ms",
)  # fmt: skip
"""What a line may say beside its time, level, event and error."""
LEVELS: Final = ("debug", "info", "warning", "error", "critical")
Form = Literal["auto", "json", "text"]
"""auto: text where the stream is a terminal, or else JSON."""

_ROOM: Final = "mycelia"
_MOST_TEXT: Final = 2000  # bytes of a field
_MOST_ERROR: Final = 16_000
_Scalar = str | int | float | bool | None
_log = logging.getLogger(__name__)


def configure(stream: TextIO | None = None, level: str = "info", *, form: Form = "auto") -> logging.Handler:
    """Send all records of this program to one stream; what an earlier call set up ends.

    Args:
        stream: where to; by default standard error.
        level: the least that is written, of `LEVELS`. Other libraries are heard from `warning` on.
        form: of a line.

    Returns:
        The handler, which `logging.getLogger().removeHandler` takes away again.

    Raises:
        ConfigError: no such level, or no such form.
    """
    if level not in LEVELS:
        raise ConfigError(f"the level {level!r}", rule=f"one of {', '.join(LEVELS)}", who="log.level")
    if form not in ("auto", "json", "text"):
        raise ConfigError(f"the form {form!r}", rule="auto, json or text", who="log.form")
    out = sys.stderr if stream is None else stream
    text = form == "text" or (form == "auto" and out.isatty())
    handler = _Lines(out)
    handler.setFormatter(_TextLine() if text else _JsonLine())
    root = logging.getLogger()
    for other in [other for other in root.handlers if isinstance(other, _Lines)]:
        root.removeHandler(other)
    root.addHandler(handler)
    logging.getLogger(_ROOM).setLevel(level.upper())
    return handler


def log(event: str, level: str = "info", *, error: BaseException | None = None, **fields: _Scalar) -> None:
    """Write a line.

    Args:
        event: what happened, in a few words that are always the same.
        level: of `LEVELS`.
        error: an exception that goes with it.
        fields: of `FIELDS`; None is left out.

    Raises:
        TypeError: another field, or a value that is neither text nor a number.
        ConfigError: no such level.
    """
    if level not in LEVELS:
        raise ConfigError(f"the level {level!r}", rule=f"one of {', '.join(LEVELS)}", who="log")
    for name, value in fields.items():
        if name not in FIELDS:
            raise TypeError(f"a log line has no field {name!r}; it has {', '.join(FIELDS)}")
        if not isinstance(value, _Scalar):
            raise TypeError(f"{name} is a {type(value).__name__}; a log line holds text and numbers")
    known = {name: value for name, value in fields.items() if value is not None}
    _log.log(_number(level), "%s", event, exc_info=error, extra={"mycelia_fields": known})


class _Lines(logging.StreamHandler[TextIO]):
    """Knows its own kind, so that a second `configure` takes the place of the first."""

    def handleError(self, record: logging.LogRecord) -> None:
        """A reader that went away ends no server, and what was to be written is not put anywhere else."""


class _JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """A record as a JSON object."""
        return json.dumps(_facts(record), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


class _TextLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """A record as a line for people: time, level, event, then name=value; the error below it."""
        facts = _facts(record)
        error = facts.pop("error", "")
        time, level, event = facts.pop("time"), facts.pop("level"), facts.pop("event")
        parts = [time[11:19], f"{level:<8}", _plain(event), *(f"{n}={_word(v)}" for n, v in facts.items())]
        lines = [" ".join(parts), *(f"    {_plain(line)}" for line in error.splitlines())]
        return "\n".join(lines)


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    facts: dict[str, Any] = {
        "time": time.replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "event": clipped(_message(record), _MOST_TEXT),
    }
    fields: Mapping[str, Any] = getattr(record, "mycelia_fields", {})
    facts |= {name: _field(fields[name]) for name in FIELDS if name in fields}
    if record.exc_info and record.exc_info[1] is not None:
        facts["error"] = _error(record.exc_info[1])
    return facts


def _field(value: _Scalar) -> _Scalar:
    if isinstance(value, str):
        return clipped(str(value), _MOST_TEXT)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value


def _message(record: logging.LogRecord) -> str:
    """The text of a record; arguments that could hold data are named by their type."""
    args = record.args
    try:
        if isinstance(args, Mapping):
            return str(record.msg) % {name: _shown(value) for name, value in args.items()}
        return str(record.msg) % tuple(_shown(value) for value in args) if args else str(record.msg)
    except (TypeError, ValueError, KeyError):  # of a format that wants what is not shown
        return str(record.msg)


def _shown(value: object) -> object:
    if value is None or isinstance(value, str | int | float | PurePath | BaseException):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields") and all(_is_plain(item) for item in value):
        return str(value)
    return f"<{type(value).__name__}>"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _error(error: BaseException) -> str:
    """The traceback, without the values of local variables; of a long one the end, where the cause is."""
    text = "".join(traceback.TracebackException.from_exception(error, capture_locals=False).format()).strip()
    data = text.encode(errors="replace")
    if len(data) > _MOST_ERROR:
        return "…" + data[-_MOST_ERROR:].decode(errors="ignore")
    return data.decode()


def _plain(text: str) -> str:
    """Without anything that moves a terminal's cursor."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _word(value: object) -> str:
    text = _plain(str(value))
    return f'"{text}"' if not text or any(letter in text for letter in ' "=') else text


def _number(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]
