"""What an offered update says of itself, checked before its payload is asked for; on any server of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from mycelia.aggregator.runs.plans import RunPlan
from mycelia.aggregator.updates import Expected, UpdateMeta, check_update
from mycelia.aggregator.updates import Reason as Refused
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.update_header import UpdateHeader

__all__ = ["METRICS", "Asked", "checked_header", "expected_of", "meta_of"]

METRICS: Final = ("loss_sum", "examples", "steps")
"""Sums that come with an update."""
_REASONS: Final[Mapping[Refused, Reason]] = {
    "schema": Reason.SCHEMA,
    "stale_round": Reason.STALE_ROUND,
    "future_round": Reason.WRONG_PHASE,
    "stale_attempt": Reason.STALE_ROUND,
    "future_attempt": Reason.WRONG_PHASE,
    "not_finite": Reason.NONFINITE,
    "weight": Reason.WEIGHT,
    "cumulative": Reason.WEIGHT,
    "not_asked": Reason.WRONG_PHASE,
    "late": Reason.LATE,
}


class Asked(NamedTuple):
    """What a device was asked for.

    Attributes:
        at: the position of its task.
        model_sha256: of the model that it got.
        expected: of the update.
    """

    at: Position
    model_sha256: bytes
    expected: Expected


def expected_of(plan: RunPlan, at: Position) -> Expected:
    """What an update of this position has to keep to."""
    return Expected(
        at.round, at.attempt, plan.program.schema.sha256, plan.max_weight, plan.most_examples, plan.most_steps
    )


def checked_header(plan: RunPlan, asked: Asked, client: int, key: bytes, offer: pb.Offer) -> UpdateHeader:
    """The header of an offer, signed by its device and within all bounds.

    Args:
        plan: of the run.
        asked: of the device.
        client: its id.
        key: its identity key.
        offer: as it came.

    Raises:
        Problem: `BAD_PAYLOAD`, `STALE_MODEL`, `WEIGHT` and those of `check_update`.
    """
    at, who = asked.at, f"client {client}"
    header = UpdateHeader.verified(
        offer.header, offer.signature, key=key, client=client, at=at, sha256=offer.sha256
    )
    if header.model_sha256 != asked.model_sha256:
        raise Problem(
            Reason.STALE_MODEL,
            f"an update of model {header.model_sha256.hex()[:12]}",
            rule=f"this round has {asked.model_sha256.hex()[:12]}",
            fix="take the next task",
            who=who,
        )
    if set(header.weights) != set(plan.form.specs) or len(header.metrics) > len(METRICS):
        raise Problem(
            Reason.WEIGHT,
            f"weights of {', '.join(header.weights)}",
            rule=f"of {', '.join(plan.form.specs)}",
            who=who,
        )
    refusal = check_update(meta_of(client, at, offer.schema_sha256.hex(), header), asked.expected)
    if refusal is not None:
        raise Problem(
            _REASONS[refusal.reason],
            refusal.hint,
            rule="see the settings of the task",
            who=who,
            phase="train",
        )
    return header


def meta_of(client: int, at: Position, schema: str, header: UpdateHeader) -> UpdateMeta:
    """What the machine of a round hears of an update."""
    return UpdateMeta(
        client, at.round, at.attempt, schema, max(header.weights.values()), "", header.examples, header.steps
    )
