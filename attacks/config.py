"""The settings of `mycelia attack` and `mycelia evaluate`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from mycelia.attacks.norms import Norm
from mycelia.engine.config import Strict
from mycelia.engine.errors import ConfigError

__all__ = ["AttackConfig", "EvaluateConfig", "TargetConfig", "number"]

Count = Annotated[int, Field(ge=0)]


class TargetConfig(Strict):
    """A model, inputs for it, and what an attacker may do to them."""

    model: Annotated[str, Field(min_length=1)]
    """A run folder, an ONNX file, a name of `engine/models.py`, or package.module:function."""
    weights: str = ""
    """A safetensors file with the weights of a model that is given by name."""
    data: str = ""
    """As in training; empty: what the run was trained on."""
    split: Literal["test", "train"] = "test"
    limit: Count = 1000
    """The first so many examples; 0: all."""
    norm: Norm
    eps: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)]
    """Radii, in units of the inputs; several: a curve."""
    goal: str = "untargeted"
    """Or "least-likely", or "target:K": then examples of class K are left out."""
    queries: Count = 0
    """Forward passes that may be spent on an example; 0: each attack's own limit."""
    batch: Annotated[int, Field(ge=1)] = 256
    bounds: tuple[float, float] = (0.0, 1.0)
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Weights without a model that wants them, and the other way round."""
        if self.bounds[0] >= self.bounds[1]:
            yield "bounds", "the lower one is below the upper one"
        if len(set(self.eps)) < len(self.eps):
            yield "eps", "each radius once"


class AttackConfig(TargetConfig):
    """One attack."""

    attack: Annotated[str, Field(min_length=1)]
    steps: Count = 0
    """Of an attack that has them; 0: its own number."""
    quantise: Literal[0, 8] = 0
    """8: successes are rounded to 8 bits and looked at again."""


class EvaluateConfig(TargetConfig):
    """A suite of attacks, with flags."""

    suite: Annotated[str, Field(min_length=1)] = "standard"
    steps: Count = 0
    """Of the gradient attacks of a suite that is given by name; 0: their own numbers."""
    defence: tuple[str, ...] = ()
    """Around the model, like "jpeg:quality=50": stages in their order, then a transform of outputs."""
    source: tuple[str, ...] = ()
    """Run folders or ONNX files on which the transfer attack of suite "full" makes its examples."""
    adaptive: str = ""
    """package.module:function that gives an attack made for this model, or an `Adaptive`."""
    require: tuple[str, ...] = ()
    """Like "ledger.robust_accuracy>=0.4"."""


def number(text: str, who: str) -> float:
    """A number, also as a fraction.

    >>> number("8/255", "--eps") == 8 / 255
    True

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(?:/\s*([0-9.eE+-]+))?\s*", text)
    try:
        if found is None:
            raise ValueError
        value = float(found[1]) / float(found[2] or 1)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f"{text!r} is no number", rule="a number, or a fraction like 8/255", who=who
        ) from None
    return value
