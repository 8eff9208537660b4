"""The configuration of one session of a secure sum."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

from mycelia.aggregator.deadlines import Deadlines
from mycelia.aggregator.secure_plans import SecurePlan
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.settings import sent_sha256, task_sha256
from mycelia.privacy.secagg.canonical import PHASES
from mycelia.privacy.secagg.config import DeadlinesConfig
from mycelia.privacy.secagg.round_config import RoundConfig

__all__ = ["phase_seconds", "session_config"]

_LEAST_S = 0.001


def phase_seconds(deadlines: Deadlines) -> tuple[float, ...]:
    """How long each phase may take in a round with its whole budget."""
    ends = (
        deadlines.select, deadlines.advertise, deadlines.configure, deadlines.train, deadlines.agree,
        deadlines.unmask,
    )  # fmt: skip
    return tuple(end - start for start, end in pairwise(ends))


def session_config(
    plan: SecurePlan, task: pb.Task, roster_sha256: bytes, clients: int, seconds: Sequence[float]
) -> RoundConfig:
    """The configuration of an attempt, with a nonce of its own.

    Args:
        plan: of the run.
        task: that devices get.
        roster_sha256: of the roster.
        clients: how many are asked.
        seconds: that each phase may take.

    Raises:
        SettingsRefused: too few are asked for what the plan wants.
    """
    names = dict(zip(PHASES, (max(_LEAST_S, each) for each in seconds), strict=True))
    settings = plan.settings.model_copy(update={"deadlines": DeadlinesConfig(**names)})
    at = Position.of(task.at)
    return settings.round_config(
        job=at.run,
        round=at.round,
        attempt=at.attempt,
        nonce=os.urandom(32),
        model_sha256=sent_sha256(task),
        schema_sha256=task.schema_sha256,
        task_sha256=task_sha256(task),
        roster_sha256=roster_sha256,
        size=plan.quantise.size,
        clients=clients,
        slots=plan.quantise.bounds,
    )
