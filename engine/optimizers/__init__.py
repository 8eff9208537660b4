"""Optimisers as pairs of pure functions, for local training and for the server alike.

`sgd`, `adam`, `adamw`, `adagrad`, `yogi`, `rmsprop` and `lamb` make an `Optimizer`; `build` makes one by
name. `flatten_state` and `unflatten_state` turn its state into named tensors for a checkpoint, and back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mycelia.engine.errors import ConfigError
from mycelia.engine.optimizers.adagrad import adagrad
from mycelia.engine.optimizers.adam import adam, adamw
from mycelia.engine.optimizers.base import Optimizer, State, flatten_state, unflatten_state
from mycelia.engine.optimizers.lamb import lamb
from mycelia.engine.optimizers.rmsprop import rmsprop
from mycelia.engine.optimizers.sgd import sgd
from mycelia.engine.optimizers.yogi import yogi
from mycelia.engine.plugins import check_options, chosen

__all__ = [
    "OPTIMIZERS",
    "Optimizer",
    "State",
    "adagrad",
    "adam",
    "adamw",
    "build",
    "flatten_state",
    "lamb",
    "rmsprop",
    "sgd",
    "unflatten_state",
    "yogi",
]

OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = MappingProxyType(
    {
        "sgd": sgd,
        "adam": adam,
        "adamw": adamw,
        "adagrad": adagrad,
        "yogi": yogi,
        "rmsprop": rmsprop,
        "lamb": lamb,
    }
)


def build(name: str, **options: Any) -> Optimizer:
    """The optimiser called `name`.

    Args:
        name: a key of `OPTIMIZERS`.
        options: its arguments.

    Raises:
        ConfigError: unknown name or option, or a value out of range.

    >>> build("adam", lr=0.01).name
    'adam'
    """
    factory = chosen(OPTIMIZERS, name, kind="optimiser", who="optimizer")
    who = f"optimizer {name!r}"
    check_options(factory, options, who=who)
    for option, value in options.items():
        # a string such as "false" would count as true
        if isinstance(inspect.signature(factory).parameters[option].default, bool) and not isinstance(
            value, bool
        ):
            raise ConfigError(f"{option} is {value!r}", rule=f"{option} is true or false", who=who)
    return factory(**options)
