"""Algorithms by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mycelia.engine.algorithms.base import Algorithm
from mycelia.engine.algorithms.centralised import Centralised
from mycelia.engine.algorithms.fedadagrad import FedAdagrad
from mycelia.engine.algorithms.fedadam import FedAdam
from mycelia.engine.algorithms.fedavg import FedAvg
from mycelia.engine.algorithms.fedavgm import FedAvgM
from mycelia.engine.algorithms.fedbn import FedBN
from mycelia.engine.algorithms.fednova import FedNova
from mycelia.engine.algorithms.fedprox import FedProx
from mycelia.engine.algorithms.fedsgd import FedSGD
from mycelia.engine.algorithms.fedyogi import FedYogi
from mycelia.engine.algorithms.local_only import LocalOnly
from mycelia.engine.algorithms.scaffold import Scaffold
from mycelia.engine.errors import ConfigError
from mycelia.engine.plugins import check_options, chosen, is_reference, resolve

__all__ = ["ALGORITHMS", "build"]

ALGORITHMS: Mapping[str, type[Algorithm]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            FedAvg,
            FedSGD,
            FedAvgM,
            FedProx,
            FedAdam,
            FedYogi,
            FedAdagrad,
            Scaffold,
            FedNova,
            FedBN,
            LocalOnly,
            Centralised,
        )
    }
)


def build(name: str, **options: Any) -> Algorithm:
    """An algorithm by name, or a user's own as `package.module:Class` (or a function that returns one).

    Raises:
        ConfigError: an unknown name or option, with the nearest known one, or an option out of range.

    >>> build("fedavg", weighting="uniform").weighting
    'uniform'
    """
    who = f"algorithm {name!r}"
    make: Callable[..., Any]
    if is_reference(name):
        make = resolve(name, kind="algorithm")
    else:
        make = chosen(ALGORITHMS, name, kind="algorithm", who="algorithm", also="package.module:Class")
    if inspect.isabstract(make):
        missing = ", ".join(sorted(getattr(make, "__abstractmethods__", ())))
        raise ConfigError("is an abstract class", rule=f"it has to define {missing}", who=who)
    check_options(make, options, who)
    found = make(**options)
    if not isinstance(found, Algorithm):
        raise ConfigError(
            f"gave a {type(found).__name__}", rule="a mycelia.engine.algorithms.Algorithm", who=who
        )
    return found
