"""Checks of an algorithm's options; each raises ConfigError with the option's name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn, TypeGuard

from mycelia.engine.errors import ConfigError
from mycelia.engine.plugins import nearest

__all__ = ["check_choice", "check_count", "check_decay", "check_flag", "check_positive", "check_weighting"]

_WEIGHTINGS = ("examples", "uniform")


def check_positive(value: object, name: str, *, zero: bool = False) -> None:
    """`value` is a finite number above 0 (or 0, where `zero` allows it)."""
    if not (_is_number(value) and math.isfinite(value) and (value > 0 or (zero and value == 0))):
        _refuse(value, name, f"a finite number {'>=' if zero else '>'} 0")


def check_decay(value: object, name: str) -> None:
    """`value` is a number in [0, 1), as a momentum is."""
    if not (_is_number(value) and 0 <= value < 1):
        _refuse(value, name, "a number in [0, 1)")


def check_count(value: object, name: str, *, least: int) -> None:
    """`value` is a whole number, at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        _refuse(value, name, f"a whole number >= {least}")


def check_flag(value: object, name: str) -> None:
    """`value` is true or false; the string "false" would count as true."""
    if not isinstance(value, bool):
        _refuse(value, name, "true or false")


def check_choice(value: object, name: str, choices: Sequence[str]) -> None:
    """`value` is one of `choices`."""
    if value not in choices:
        hint = nearest(value, choices) if isinstance(value, str) else ""
        _refuse(value, name, f"one of {', '.join(map(repr, choices))}", hint)


def check_weighting(value: object) -> None:
    """`value` is "examples" or "uniform"."""
    check_choice(value, "weighting", _WEIGHTINGS)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse(value: object, name: str, rule: str, fix: str = "") -> NoReturn:
    raise ConfigError(f"{name} is {value!r}", rule=rule, fix=fix, who=f"algorithm.{name}")
