"""What is checked of an update before it may be added to the sum."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

__all__ = ["ClientId", "Expected", "Reason", "Refusal", "UpdateMeta", "check_update"]

ClientId = int | str

Reason = Literal[
    "schema",
    "stale_round",
    "future_round",
    "stale_attempt",
    "future_attempt",
    "not_finite",
    "weight",
    "cumulative",
    "not_asked",
    "duplicate",
    "late",
]
"""Why an update is refused."""


class UpdateMeta(NamedTuple):
    """What an update says about itself."""

    client: ClientId
    round: int
    attempt: int
    schema: str
    """SHA-256 of the Schema of its tensors."""
    weight: float
    non_finite: str = ""
    """The first tensor with a NaN or infinite value; empty: all are finite."""
    examples: int = 0
    """Examples it was trained on in this round."""
    steps: int = 0
    """Local steps of this round."""


class Expected(NamedTuple):
    """What a round accepts."""

    round: int
    attempt: int
    schema: str
    max_weight: float
    """Declared cap on the weight, which the exact sum is planned for."""
    max_examples: int = 0
    """Most examples in one round, epochs included; 0: unknown."""
    max_steps: int = 0
    """Most local steps in one round; 0: unknown."""


class Refusal(NamedTuple):
    """Why an update was refused, and what the client or its owner can do."""

    reason: Reason
    hint: str


def check_update(meta: UpdateMeta, expected: Expected) -> Refusal | None:
    """None when the update may be added; otherwise the first rule it breaks."""
    if meta.round != expected.round:
        stale = meta.round < expected.round
        hint = f"it is of round {meta.round}, this is {expected.round}"
        return Refusal("stale_round" if stale else "future_round", hint)
    if meta.attempt != expected.attempt:
        stale = meta.attempt < expected.attempt
        hint = f"it is of attempt {meta.attempt}, this is {expected.attempt}"
        return Refusal("stale_attempt" if stale else "future_attempt", hint)
    if meta.schema != expected.schema:
        return Refusal("schema", f"schema {meta.schema[:12]} is not the model's {expected.schema[:12]}")
    if meta.non_finite:
        return Refusal("not_finite", f"{meta.non_finite} holds NaN or infinity; lower the learning rate")
    weight = meta.weight
    if not (0 < weight <= expected.max_weight and math.isfinite(weight)):
        return Refusal("weight", f"weight {weight} is not in (0, {expected.max_weight:g}]")
    for name, count, most in (
        ("examples", meta.examples, expected.max_examples),
        ("steps", meta.steps, expected.max_steps),
    ):
        if count < 0 or count > most > 0:
            rule = "counts are of one round, not cumulative"
            return Refusal("cumulative", f"{count} {name} in a round of at most {most}; {rule}")
    return None
