"""How each operator gives per-example gradient norms and clipped sums; one file per family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mycelia.privacy.rules import convolution, embedding, linear, normalisation, spread
from mycelia.privacy.rules.base import Cost, Operator, Rule, Use

__all__ = ["RULES", "Cost", "Operator", "Rule", "Use"]

RULES: Mapping[Any, Operator] = {
    **linear.OPERATORS,
    **convolution.OPERATORS,
    **embedding.OPERATORS,
    **normalisation.OPERATORS,
    **spread.OPERATORS,
}
"""Operators with rules, by overload."""
