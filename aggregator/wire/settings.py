"""What a task says about the work in it: the same words for whoever asks and whoever is asked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Self

import numpy as np
from pydantic import Field, ValidationError
from torch import Tensor

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.engine.config import Named, Strict, describe
from mycelia.engine.rng import derive, generator
from mycelia.engine.schema import Entry, Role
from mycelia.privacy.config import PrivacyConfig
from mycelia.privacy.secagg.canonical import digest

__all__ = [
    "LocalConfig", "PackingConfig", "TaskSettings", "UpdateConfig", "message_entries", "place_of",
    "rounding_stream", "sent_sha256", "task_sha256",
]  # fmt: skip

Text = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class LocalConfig(Strict):
    """What a client does with its data in one round."""

    epochs: Annotated[int, Field(ge=0)] = 1
    steps: Annotated[int, Field(ge=0)] = 0
    """More than 0 replaces the epochs."""
    batch_size: Annotated[int, Field(ge=1)] = 10
    lr: Annotated[float, Field(gt=0)] = 0.1

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """There must be some work."""
        if self.epochs == 0 and self.steps == 0:
            yield "steps", "epochs and steps are both 0, so that no client would train; set one of them"


class UpdateConfig(Strict):
    """Bounds on one update: the exact sum is planned for them, and a client beyond them is refused."""

    max_abs: Annotated[float, Field(gt=0)] = 1024.0
    """Largest magnitude of one coordinate of the parameters' delta."""
    max_weight: Annotated[float, Field(ge=0)] = 0.0
    """Largest weight; 0: the largest client's number of examples, where that is known beforehand."""


class PackingConfig(Strict):
    """How an update becomes the vector and the whole numbers of a secure sum; see `Quantise`."""

    weight_max: Annotated[int, Field(ge=1, lt=2**63)]
    value_bound: Annotated[int, Field(ge=1, lt=2**63)]
    most_examples: Count
    private: bool
    double: bool


class TaskSettings(Strict):
    """All that decides what a device computes, beside the model and its own data."""

    algorithm: Named
    loss: Text
    local: LocalConfig
    update: UpdateConfig
    max_weight: Annotated[float, Field(gt=0)]
    """The largest weight that a device may have."""
    seed: Count
    """Root of the named streams; noise and keys never come from it, unless the noise is seeded."""
    rounds: Annotated[int, Field(ge=1)]
    cohort: Annotated[int, Field(ge=1)]
    population: Annotated[int, Field(ge=1)]
    examples: Count = 0
    """Of all devices together, as far as that is public; 0: unknown."""
    privacy: PrivacyConfig | None = None
    packing: PackingConfig | None = None
    """Of a secure sum; None: updates are summed as they are."""

    def encode(self) -> bytes:
        """The bytes in `Task.settings`; the same for the same settings."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what `encode` wrote.

        Raises:
            Problem: `BAD_PAYLOAD`: other bytes, a key that is unknown, a value out of range.
        """
        try:
            return cls.model_validate(json.loads(data))
        except ValidationError as error:
            raise _refused(describe(cls, error)) from None
        except (ValueError, RecursionError) as error:
            raise _refused("they are no JSON") from error


def place_of(client: int) -> int:
    """The number that a device has in the named streams of training: device 1 is client 0 of a simulation."""
    return client - 1


def rounding_stream(seed: int, round: int, client: int) -> np.random.Generator:
    """What the random rounding of a secure sum's encoding is drawn from.

    Args:
        seed: root seed.
        round: number of the round, from 0.
        client: id of the device, from 1.
    """
    return generator(derive(seed, "secure sum", round=round), "secure sum rounding", client=client)


def sent_sha256(task: pb.Task) -> bytes:
    """One hash of all tensors that a task is about, for the configuration of its secure sum."""
    return digest("FED1/sent", task.model_sha256, task.message_sha256)


def task_sha256(task: pb.Task) -> bytes:
    """One hash of all that a task asks for, for the configuration of its secure sum."""
    return digest("FED1/task", task.purpose, task.algorithm, task.settings)


def message_entries(extra: Mapping[str, Tensor]) -> tuple[Entry, ...]:
    """The tensors of the payload MESSAGE, in order.

    Args:
        extra: what an algorithm, or a stage of the pipeline, sends beside the model.
    """
    return _entries((name, extra[name]) for name in sorted(extra))


def _entries(tensors: Iterable[tuple[str, Tensor]]) -> tuple[Entry, ...]:
    return tuple(Entry(name, Role.BUFFER, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)


def _refused(found: str) -> Problem:
    return Problem(
        Reason.BAD_PAYLOAD,
        f"settings of a task: {found}"[:400],
        rule="what a server of this version sends",
        fix="use the same version of Mycelia on both sides",
        who="task",
    )
