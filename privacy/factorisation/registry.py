"""Factorisations by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mycelia.engine.plugins import check_options, chosen
from mycelia.privacy.factorisation.banded import Banded
from mycelia.privacy.factorisation.base import Strategy
from mycelia.privacy.factorisation.blt import BLT
from mycelia.privacy.factorisation.identity import Identity
from mycelia.privacy.factorisation.toeplitz import SqrtToeplitz
from mycelia.privacy.factorisation.tree import Tree

__all__ = ["STRATEGIES", "build"]

STRATEGIES: Mapping[str, Callable[..., Strategy]] = MappingProxyType(
    {strategy.name: strategy for strategy in (BLT, Banded, SqrtToeplitz, Tree, Identity)}
)


def build(name: str, **options: Any) -> Strategy:
    """The factorisation called `name`, as in a configuration file.

    Args:
        name: a key of `STRATEGIES`.
        options: its arguments.

    Raises:
        ConfigError: an unknown name or option, or a value out of range.

    >>> build("banded", bands=1)
    Banded(bands=1, band=(1.0,))
    """
    make = chosen(STRATEGIES, name, kind="factorisation", who="factorisation")
    check_options(make, options, who=f"factorisation {name!r}")
    return make(**options)
