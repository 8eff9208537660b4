"""JSON that every reader accepts: a number that is not finite becomes a string such as NaN or -Infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["dumps", "read_numbers"]

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: object, indent: int | None = None) -> str:
    """The value as JSON; arrays, NumPy scalars, tensors and paths become plain numbers, lists and strings.

    Raises `TypeError` for anything else and `ValueError` for a cycle.
    """
    encoder = _COMPACT if indent is None else _encoder(indent)
    try:
        return encoder.encode(value)
    except ValueError:  # a number that is not finite; looking for them first would cost every value
        return encoder.encode(_spell_out(value, 0))


def read_numbers(value: Any) -> Any:
    """The value with the three strings as the numbers they stand for, in lists and tables too."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: read_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [read_numbers(item) for item in value]
    return value


def _spell_out(value: Any, depth: int) -> Any:
    if depth > 100:
        raise ValueError("a value holds itself, or is nested more than 100 deep")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _spell_out(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_out(item, depth + 1) for item in value]
    if hasattr(value, "tolist"):
        return _spell_out(value.tolist(), depth + 1)
    return value


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__fspath__"):
        return value.__fspath__()
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _encoder(indent: int | None) -> json.JSONEncoder:
    separators = (",", ":") if indent is None else (",", ": ")
    return json.JSONEncoder(
        separators=separators, indent=indent, allow_nan=False, ensure_ascii=False, default=_plain
    )


_COMPACT = _encoder(None)
