"""Training defences by name, for configurations; those that need data of their own are made in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from mycelia.attacks.config import number
from mycelia.attacks.defences.adversarial_training import NAD, PAD, PGDAT, AdversarialTraining
from mycelia.attacks.defences.awp import AWP
from mycelia.attacks.defences.distillation import Distillation
from mycelia.attacks.defences.fast_at import FastAT
from mycelia.attacks.defences.free_at import FreeAT
from mycelia.attacks.defences.ibp import IBP
from mycelia.attacks.defences.mart import MART
from mycelia.attacks.defences.trades import TRADES
from mycelia.attacks.defences.training import TrainingDefence
from mycelia.engine.errors import ConfigError
from mycelia.engine.plugins import check_options, chosen

__all__ = ["TRAINING", "build", "made"]

T = TypeVar("T")


def _nad(replace_ratio: float = 0.5, bounds: tuple[float, float] = (0.0, 1.0)) -> AdversarialTraining:
    return replace(NAD, replace_ratio=replace_ratio, bounds=bounds)


def _pad(replace_ratio: float = 0.5, bounds: tuple[float, float] = (0.0, 1.0)) -> AdversarialTraining:
    return replace(PAD, replace_ratio=replace_ratio, bounds=bounds)


def _distillation(temperature: float = 20.0, teacher: str = "") -> Distillation:
    return Distillation(temperature, teacher or None)


TRAINING: Final[Mapping[str, Callable[..., TrainingDefence]]] = MappingProxyType(
    {
        "awp": AWP,
        "distillation": _distillation,
        "fastat": FastAT,
        "freeat": FreeAT,
        "ibp": IBP,
        "mart": MART,
        "nad": _nad,
        "pad": _pad,
        "pgdat": PGDAT,
        "trades": TRADES,
    }
)
"""Makers of training defences."""


def build(name: str, **options: Any) -> TrainingDefence:
    """The training defence of a name.

    >>> build("pgdat", eps=0.1, steps=7).steps
    7
    >>> build("pgdat", eps="8/255").eps == 8 / 255
    True

    Args:
        name: one of `TRAINING`.
        options: its settings; lists stand for tuples, and a fraction for its number.

    Raises:
        ConfigError: an unknown name or option, with the valid ones, or a setting of another type or out of
            range.
    """
    return made(TRAINING, name, options)


def made(makers: Mapping[str, Callable[..., T]], name: str, options: Mapping[str, Any]) -> T:
    """One of several defences from its name and settings.

    Args:
        makers: by name.
        name: one of them.
        options: see `build`.

    Raises:
        ConfigError: see `build`.
    """
    make = chosen(makers, name, kind="defence", who="defence.name")
    check_options(make, options, who=f"defence {name!r}")
    hints = get_type_hints(make)  # of a dataclass: its fields, each as its own module has it
    return make(**{key: _read(value, hints[key], f"defence.{key}") for key, value in options.items()})


def _read(value: Any, hint: Any, who: str) -> Any:
    """A value as the annotation has it; nothing is converted but what TOML cannot say."""
    if isinstance(value, list | tuple):
        value = tuple(number(each, who) if isinstance(each, str) else each for each in value)
    elif isinstance(value, str) and "/" in value and hint is not str:
        value = number(value, who)
    adapter = TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        rules = dict.fromkeys(each["msg"].replace("Input should be", "must be") for each in error.errors())
        raise ConfigError(f"{value!r}", rule=", or ".join(rules), who=who) from None
