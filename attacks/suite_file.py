"""A suite of attacks in a TOML file: an `[[attack]]` table each, with its name and settings."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from mycelia.attacks.base import Attack
from mycelia.attacks.norms import Norm
from mycelia.attacks.registry import ATTACKS
from mycelia.engine.errors import ConfigError
from mycelia.engine.plugins import chosen, nearest

__all__ = ["attack_from", "load_suite"]


def load_suite(path: Path, norm: Norm) -> tuple[Attack, ...]:
    """The attacks of a file, in its order.

    Args:
        path: the file.
        norm: of the threat; every attack gets it.

    Raises:
        ConfigError: no such file, no TOML, no attack in it, or an attack or a setting that there is none of.
    """
    who = str(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the suite cannot be read: {error}", rule="a TOML file", who=who) from error
    if unknown := sorted(table.keys() - {"attack"}):
        raise ConfigError(f"unknown key {unknown[0]!r}", rule="[[attack]] tables alone", who=who)
    listed = table.get("attack")
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        raise ConfigError("no attack", rule='[[attack]] tables, each with name = "…"', who=who)
    return tuple(
        attack_from(each, norm, f"{who}, attack {place}") for place, each in enumerate(listed, start=1)
    )


def attack_from(table: dict[str, Any], norm: Norm, who: str) -> Attack:
    """An attack from its name and settings.

    Args:
        table: `name`, and settings of the attack.
        norm: that it works in.
        who: for errors.

    Raises:
        ConfigError: an unknown name or setting, a value that it does not take, or another norm.
    """
    settings = dict(table)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError("an attack without a name", rule='name = "pgd"', who=who)
    kind = chosen(ATTACKS, name, kind="attack", who=who)
    names = {field.name for field in fields(kind)}
    if unknown := sorted(settings.keys() - names):
        raise ConfigError(
            f"{name} has no setting {unknown[0]!r}",
            rule="the attack's own settings",
            fix=nearest(unknown[0], names),
            who=who,
        )
    if "norm" in names:
        settings.setdefault("norm", norm)
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()
    }
    try:
        made = kind(**given)
    except TypeError as error:
        raise ConfigError(
            f"{name}: {error}", rule="values of the types that it documents", who=who
        ) from error
    if made.norm != norm:
        raise ConfigError(
            f"{name} works in {made.norm}", rule=f"attacks of the threat's norm, {norm}", who=who
        )
    return made
