"""Defences of a trained model by name: stages in front of it, and transforms of what it gives."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from torch import nn

from mycelia.attacks.config import number
from mycelia.attacks.defences.inputs import (
    JPEG,
    BitDepth,
    GaussianNoise,
    MedianFilter,
    ResizePad,
    Thermometer,
)
from mycelia.attacks.defences.outputs import (
    LabelsOnly,
    Obfuscated,
    OutputNoise,
    OutputTransform,
    ReverseSigmoid,
    Rounded,
)
from mycelia.attacks.defences.registry import made
from mycelia.attacks.defences.stages import Defended, Stage
from mycelia.attacks.defences.total_variation import TotalVariation
from mycelia.attacks.model import Model, as_model
from mycelia.engine.errors import ConfigError

__all__ = ["AROUND", "around_model", "model_defences"]

AROUND: Final[Mapping[str, Callable[..., Stage | OutputTransform]]] = MappingProxyType(
    {
        "bitdepth": BitDepth, "gaussiannoise": GaussianNoise, "jpeg": JPEG, "median": MedianFilter,
        "resizepad": ResizePad, "thermometer": Thermometer, "totalvariation": TotalVariation,
        "labelsonly": LabelsOnly, "outputnoise": OutputNoise, "reversesigmoid": ReverseSigmoid,
        "rounded": Rounded,
    }
)  # fmt: skip
"""Makers of stages, then of transforms of outputs."""


def model_defences(
    texts: Sequence[str], bounds: tuple[float, float]
) -> tuple[tuple[Stage, ...], OutputTransform | None]:
    """Stages in their order, and what is done to outputs.

    >>> model_defences(["bitdepth:bits=3", "rounded"], (0.0, 1.0))[0][0].bits
    3

    Args:
        texts: like "jpeg", or "jpeg:quality=50" with settings between commas.
        bounds: of inputs, for stages that do not say otherwise.

    Raises:
        ConfigError: an unknown defence or setting, a value that it does not take, a second transform of
            outputs, or a stage behind one.
    """
    stages: list[Stage] = []
    transform: OutputTransform | None = None
    for text in texts:
        found = _one(text, bounds)
        if transform is not None:
            raise ConfigError(
                f"{text!r} behind a transform of outputs",
                rule="stages come first, and outputs are transformed once",
                who="--defence",
            )
        if isinstance(found, Stage):
            stages.append(found)
        else:
            transform = found
    return tuple(stages), transform


def around_model(model: Model, defences: tuple[tuple[Stage, ...], OutputTransform | None]) -> Model:
    """The model with them; the same one where there are none.

    Raises:
        ConfigError: stages in front of a model that is no PyTorch module.
    """
    stages, transform = defences
    if stages:
        module = getattr(model, "module", None)
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"stages in front of {model.name}",
                rule="a PyTorch module: gradients go through the stages",
                fix="a run folder, or a model by name",
                who="--defence",
            )
        model = as_model(Defended(module, *stages))
    return model if transform is None else Obfuscated(model, transform)


def _one(text: str, bounds: tuple[float, float]) -> Stage | OutputTransform:
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not key or not equals or key in options:
            raise ConfigError(
                f"{part!r} in {text!r}",
                rule="NAME:KEY=VALUE,KEY=VALUE, each key once",
                fix="jpeg:quality=50",
                who="--defence",
            )
        options[key] = _value(value)
    usual = {"bounds": bounds, "layout": "nchw"}  # data sets have channels first
    known = inspect.signature(AROUND[name]).parameters if name in AROUND else {}
    return made(AROUND, name, {key: usual[key] for key in usual if key in known} | options)


def _value(text: str) -> Any:
    """A TOML value, or a fraction; anything else is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return number(text, "--defence") if "/" in text else text
