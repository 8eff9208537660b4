"""In which form an update travels: server and device decide it by the same settings, and so alike.

| form | payload |
|---|---|
| `model` | the new values of all tensors that the algorithm sends, and each further term as one flat tensor |
| `terms` | every term as one flat tensor, without its weight, which is in the header |

A device sends the model it came to wherever the sum of the differences is all that is made of it. Noise is
added to differences, so noised updates travel as terms, and so does what an algorithm of another kind sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal, NamedTuple

import torch

from mycelia.aggregator.wire.settings import TaskSettings
from mycelia.engine.algorithms import Algorithm
from mycelia.engine.program import Program
from mycelia.engine.schema import Entry, Role, Schema
from mycelia.engine.sums import TermSpec
from mycelia.privacy.clip import ClipFunction, QuantileClip
from mycelia.privacy.config import PrivacyConfig
from mycelia.privacy.federated import AdaptiveClip, ClipUpdate
from mycelia.privacy.pipeline import Stage

__all__ = ["MODEL_ROLES", "UpdateEntries", "clipping_of", "term_specs", "update_entries", "update_form"]

MODEL_ROLES: Final = (Role.PARAMETER, Role.BUFFER, Role.COUNTER)
"""What a model is made of on the wire."""

_MODEL_TERMS: Final = ("params", "buffers", "counters")
_SCALING: Final = {"abadi", "quantile"}
"""Clip functions whose factor is above 0 and at most 1, so that it can be part of a weight."""


class UpdateEntries(NamedTuple):
    """The tensors of the payload UPDATE, as `write_tensors`, `check_tensors` and the sum take them.

    Attributes:
        schema: of the model, without what clients keep to themselves.
        roles: those that are sent; none in the form `terms`.
        more: the terms that travel by themselves, each under its own name.
    """

    schema: Schema
    roles: tuple[Role, ...]
    more: tuple[Entry, ...]


def clipping_of(privacy: PrivacyConfig | None) -> Stage | None:
    """What every device does to its whole update before anything else; None where updates are not clipped."""
    if privacy is None or privacy.unit != "client":
        return None
    clip = privacy.clip_function()
    if isinstance(clip, QuantileClip):
        return AdaptiveClip(clip, privacy.weight_max)
    return ClipUpdate(clip, privacy.weight_max) if isinstance(clip, ClipFunction) else None


def term_specs(program: Program, algorithm: Algorithm, settings: TaskSettings) -> dict[str, TermSpec]:
    """The terms of an update, in order: the algorithm's with the configured bound, and what clipping adds."""
    specs = dict(algorithm.terms(program))
    if "params" in specs:
        specs["params"] = replace(specs["params"], max_abs=settings.update.max_abs)
    clipping = clipping_of(settings.privacy)
    return specs if clipping is None else specs | dict(clipping.terms())


def update_form(algorithm: Algorithm, settings: TaskSettings) -> Literal["model", "terms"]:
    """The form of an update that no secure sum packs.

    Args:
        algorithm: as built from the settings.
        settings: of the task.
    """
    privacy = settings.privacy
    if not algorithm.sends_model:
        return "terms"
    if privacy is None or privacy.unit == "example":
        return "model"
    return "model" if privacy.model == "central" and privacy.clip.name in _SCALING else "terms"


def update_entries(program: Program, algorithm: Algorithm, settings: TaskSettings) -> UpdateEntries:
    """The tensors of an update that no secure sum packs.

    Args:
        program: the model and its loss.
        algorithm: as built from the settings, and bound to the population.
        settings: of the task.

    Raises:
        ConfigError: the algorithm refuses the model.
    """
    form, specs = update_form(algorithm, settings), term_specs(program, algorithm, settings)
    kept = algorithm.kept(program)
    schema = Schema(tuple(entry for entry in program.schema if entry.name not in kept))
    beside = [name for name in specs if form == "terms" or name not in _MODEL_TERMS]
    dtypes = _dtypes(program, specs, settings)
    more = tuple(Entry(name, Role.BUFFER, (specs[name].size,), dtypes[name]) for name in beside)
    return UpdateEntries(schema, MODEL_ROLES if form == "model" else (), more)


def _dtypes(
    program: Program, specs: Mapping[str, TermSpec], settings: TaskSettings
) -> dict[str, torch.dtype]:
    """Those of the terms: parameters, and what is as large as they are together, in their own precision.

    Everything else is float64, and so is a whole update that a device noises or scales.
    """
    privacy = settings.privacy
    if (
        privacy is not None
        and privacy.unit == "client"
        and (privacy.model != "central" or privacy.clip.name not in _SCALING)
    ):
        return dict.fromkeys(specs, torch.float64)
    vector = torch.float32
    for entry in program.schema.of(Role.PARAMETER):
        vector = torch.promote_types(vector, entry.dtype)
    return {
        name: vector
        if name == "params" or (spec.size == program.dimension > 1 and name not in _MODEL_TERMS)
        else torch.float64
        for name, spec in specs.items()
    }
