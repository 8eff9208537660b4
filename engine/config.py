"""Configuration from TOML: strict models, overrides by dotted key, errors that name key and rule."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mycelia.engine.errors import ConfigError

__all__ = ["Named", "Strict", "describe", "load_config", "nearest", "to_toml"]

_M = TypeVar("_M", bound="Strict")


class Strict(BaseModel):
    """A frozen table of settings that refuses unknown keys and does not convert types.

    Lists become tuples, so fields are declared as tuples and stay immutable. An integer stands for a float;
    nothing else is converted: `"5"` is no number and `true` is not 1.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )

    unavailable: ClassVar[frozenset[str]] = frozenset()
    """Keys that are planned but not built: refused as such rather than as a misspelling."""

    @model_validator(mode="before")
    @classmethod
    def _lists_to_tuples(cls, data: Any) -> Any:
        return {key: _tuples(value) for key, value in data.items()} if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _no_conflicts(self) -> Self:
        found = tuple(self.conflicts())
        if found:
            raise _ConflictsError(found)
        return self

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Settings that contradict each other, as (key, rule); overridden by tables that can have some."""
        return ()


class Named(Strict):
    """A table `{ name = "fedprox", mu = 0.1 }`, for which a bare string stands when there are no options.

    The options belong to whatever the name stands for; its registry checks them.
    """

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, pattern=r"^\S(.*\S)?$")]

    @model_validator(mode="before")
    @classmethod
    def _bare_string(cls, data: Any) -> Any:
        return {"name": data} if isinstance(data, str) else data

    @property
    def options(self) -> dict[str, Any]:
        """All keys but the name."""
        return dict(self.model_extra or {})


def nearest(name: str, valid: Iterable[str]) -> str:
    """The fix for an unknown name: the nearest valid one, then all of them.

    >>> nearest("unifrom", ["uniform", "poisson"])
    "did you mean 'uniform'? Valid: poisson, uniform"
    """
    names = sorted(valid)
    close = get_close_matches(name, names, n=1)
    guess = f"did you mean '{close[0]}'? " if close else ""
    return f"{guess}Valid: {', '.join(names)}" if names else "there are none"


def load_config(cls: type[_M], source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> _M:
    """Reads, overrides and checks a configuration.

    Args:
        cls: the model to fill.
        source: a TOML file, or its content as nested mappings.
        overrides: `key=value` each, dotted for a table (`local.steps=5`); the value is a TOML value, or else
            a bare string. Later ones win.

    Raises:
        ConfigError: naming the file and what changed it, and for every wrong setting at once key, value and
            rule.
    """
    who = str(source) if isinstance(source, Path) else "configuration"
    data = _read(source) if isinstance(source, Path) else _copy(source)
    if overrides:
        who = f"{who}, changed by {', '.join(overrides)}"
    for override in overrides:
        _apply(cls, data, override)
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise ConfigError(describe(cls, error), who=who) from None


def describe(cls: type[Strict], error: ValidationError) -> str:
    """What is wrong with a table, for every setting at once: key, value and rule."""
    lines = [line for item in error.errors() for line in _describe(cls, item)]
    return lines[0] if len(lines) == 1 else f"{len(lines)} settings are wrong\n    " + "\n    ".join(lines)


def to_toml(model: Strict) -> str:
    """The configuration as TOML that `load_config` reads back to an equal model."""
    plain = _plain(model)
    if isinstance(plain, str):
        plain = {"name": plain}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items() if not isinstance(value, dict)]
    for key, table in plain.items():
        if isinstance(table, dict):
            lines += ["", f"[{_key(key)}]"] if lines else [f"[{_key(key)}]"]
            lines += [f"{_key(name)} = {_value(value)}" for name, value in table.items()]
    return "\n".join(lines) + "\n"


class _ConflictsError(ValueError):
    def __init__(self, found: tuple[tuple[str, str], ...]) -> None:
        self.found = found
        super().__init__("; ".join(rule for _, rule in found))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _copy(source: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in source.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("there is no such file", fix="check the path", who=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", who=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid TOML: {error}", rule="TOML 1.0 in UTF-8", who=str(path)) from error


# Overrides


def _apply(cls: type[Strict], data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(f"'{override}' is no override", rule="key=value, dotted for a table", who="-s")
    model: type[Strict] | None = cls
    table = data
    for name in path[:-1]:
        field = model.model_fields.get(name) if model else None
        if name not in table and field is not None and isinstance(field.default, Strict):
            plain = _plain(field.default)  # an override changes one setting of the default table
            table[name] = plain if isinstance(plain, dict) else {"name": plain}
        model = _model_of(field.annotation) if field else None
        below = table.setdefault(name, {})
        if isinstance(below, str) and model is not None and issubclass(model, Named):
            below = table[name] = {"name": below}
        if isinstance(below, Strict):
            plain = _plain(below)
            below = table[name] = plain if isinstance(plain, dict) else {"name": plain}
        if not isinstance(below, dict):
            raise ConfigError(f"'{override}': {name} is {below!r}", rule="only a table has keys", who="-s")
        table = below
    table[path[-1]] = _parse(text.strip())


def _parse(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    # A line break could smuggle in further keys, and no setting is a date: both are plain strings.
    return text if len(parsed) > 1 or isinstance(value, date | time) else value


# Errors


def _model_of(annotation: Any) -> type[Strict] | None:
    """The settings table that an annotation stands for, also inside Optional and Annotated."""
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, Strict) else None
    return next((m for part in getattr(annotation, "__args__", ()) if (m := _model_of(part))), None)


def _describe(cls: type[Strict], item: Any) -> list[str]:
    loc: tuple[int | str, ...] = item["loc"]
    path = ".".join(str(part) for part in loc)
    kind, error = item["type"], item.get("ctx", {}).get("error")
    if kind == "extra_forbidden":
        model: type[Strict] | None = cls
        for part in loc[:-1]:
            field = model.model_fields.get(str(part)) if model else None
            model = _model_of(field.annotation) if field else None
        if model and loc[-1] in model.unavailable:
            return [f"{path}: not available in this version; take it out"]
        return [f"{path}: unknown key; {nearest(str(loc[-1]), model.model_fields if model else ())}"]
    if kind == "missing":
        return [f"{path}: missing"]
    if isinstance(error, _ConflictsError):
        return [f"{'.'.join(filter(None, (path, key)))}: {rule}" for key, rule in error.found]
    if isinstance(error, ConfigError):
        where = ".".join(filter(None, (path, error.who)))
        said = "; ".join(filter(None, (error.found, error.rule, error.fix)))
        return [": ".join(filter(None, (where, said)))]
    value = repr(item["input"])
    value = value if len(value) <= 80 else value[:77] + "..."
    rule = _RULES.get(kind) or item["msg"].replace("Input should be", "must be").replace("Value error, ", "")
    return [f"{path} = {value}: {rule}"]


_RULES = {
    "model_type": "must be a table",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must be a name, without spaces at its ends",
}


# TOML


def _plain(value: Any) -> Any:
    if isinstance(value, Named) and not value.options and set(type(value).model_fields) == {"name"}:
        return value.name
    if isinstance(value, Strict):
        items = {name: getattr(value, name) for name in type(value).model_fields} | (value.model_extra or {})
        return {key: _plain(item) for key, item in items.items() if item is not None}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool | str | Path):
        text = json.dumps(value if isinstance(value, bool) else str(value), ensure_ascii=False)
        return text.replace("\x7f", "\\u007F")  # otherwise JSON's escapes are TOML's
    if isinstance(value, int | float):
        return repr(value)
    raise ConfigError(f"{value!r} has no TOML form", rule="strings, numbers, booleans, lists, tables")
