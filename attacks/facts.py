"""How reports say things: shares with intervals, reasons for what is missing, settings as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mycelia.attacks.base import Attack
from mycelia.attacks.intervals import wilson

__all__ = ["known", "settings_of", "share", "share_text"]


def share(key: str, k: int | None, n: int, reason: str) -> dict[str, Any]:
    """A share with its 95 % interval; null with reasons where nothing was counted.

    Args:
        key: its name.
        k: so many; None: not measured.
        n: of so many.
        reason: why it is missing, if it is.
    """
    if k is None or n == 0:
        missing = known(key, None, reason or "no rows")
        return missing | known(f"{key}_ci95", None, reason or "no rows")
    return {key: k / n, f"{key}_ci95": list(wilson(k, n))}


def share_text(facts: Mapping[str, Any], key: str) -> str:
    """A share among facts, for people."""
    value = facts.get(key)
    if value is None:
        return f"not measured: {facts.get(f'{key}_reason', '')}"
    low, high = facts[f"{key}_ci95"]
    return f"{100 * value:.2f} % [{100 * low:.2f}, {100 * high:.2f}]"


def known(key: str, value: Any, reason: str) -> dict[str, Any]:
    """A value; null with a reason where it is None."""
    return {key: value} if value is not None else {key: None, f"{key}_reason": reason or "not measured"}


def settings_of(attack: Attack) -> dict[str, Any]:
    """Settings of an attack as JSON can say them; a callable by its name."""
    return {field.name: _plain(getattr(attack, field.name)) for field in fields(attack)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return getattr(value, "__name__", type(value).__name__)
