"""What devices are sent for one piece of work: the task, the model, and what goes with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import torch

from mycelia.aggregator.runs.context import Context
from mycelia.aggregator.runs.state import Current
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import MAX_CHUNK
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.payload import write_tensors
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.settings import message_entries
from mycelia.engine.schema import Schema

__all__ = ["Assignment", "envelope_frame", "message_payload", "off_loop"]

_NOTICED: Final = 2**18  # bytes


def message_payload(extra: Mapping[str, torch.Tensor]) -> Payload | None:
    """The payload MESSAGE; None if there is nothing beside the model."""
    if not extra:
        return None
    return Payload(b"".join(write_tensors(extra, Schema(()), (), message_entries(extra))))


class Assignment:
    """A task at one position, for any number of devices.

    Args:
        context: of the run.
        at: the position.
        work: what is to be done.
        current: the model that it is done with.
        message: what goes with it.
        ends_at: when the time for it is over, on the run's clock.
    """

    def __init__(
        self,
        context: Context,
        at: Position,
        work: pb.Work,
        current: Current,
        message: Payload | None,
        ends_at: float,
    ) -> None:
        plan = context.plan
        self.at, self._context, self._ends_at = at, context, ends_at
        schema = bytes.fromhex(plan.program.schema.sha256)
        self.task = pb.Task(
            at=at.to_wire(),
            work=work,
            purpose=plan.purpose,
            algorithm=plan.config.algorithm.name,
            settings=plan.task_settings,
            schema_sha256=schema,
            model_sha256=current.model_sha256,
            message_sha256=b"" if message is None else message.sha256,
        )
        self._payloads = [(current.model, current.model.offer(pb.MODEL, at, schema_sha256=schema))]
        if message is not None:
            self._payloads.append((message, message.offer(pb.MESSAGE, at, schema_sha256=schema)))
        self.bytes_down = sum(payload.size for payload, _ in self._payloads)

    def at_attempt(self, attempt: int) -> Assignment:
        """The same for another attempt."""
        other = object.__new__(Assignment)
        other.__dict__.update(self.__dict__)
        other.at = self.at._replace(attempt=attempt)
        other.task = pb.Task()
        other.task.CopyFrom(self.task)
        other.task.at.CopyFrom(other.at.to_wire())
        other._payloads = []
        for payload, offer in self._payloads:
            mine = pb.Offer()
            mine.CopyFrom(offer)
            mine.at.CopyFrom(other.at.to_wire())
            other._payloads.append((payload, mine))
        return other

    def push(self, client: int, secure_sum: bytes = b"") -> bool:
        """Send it, for the first time or again; whether the device is here.

        Args:
            client: to whom.
            secure_sum: the signed configuration of its session.
        """
        task = pb.Task()
        task.CopyFrom(self.task)
        task.secure_sum = secure_sum
        task.remaining_ms = max(0, round(1000 * (self._ends_at - self._context.clock())))
        if not self._context.service.push(client, pb.ServerFrame(task=task)):
            return False
        return all(
            self._context.service.send_payload(client, payload, offer) for payload, offer in self._payloads
        )


def envelope_frame(context: Context, client: int, at: Position, data: bytes) -> bool:
    """Send a message of the secure sum; whether the device is here."""
    if len(data) <= MAX_CHUNK:
        frame = pb.ServerFrame(secagg=pb.SecAgg(at=at.to_wire(), data=data))
        return context.service.push(client, frame)
    payload = Payload(data)
    return context.service.send_payload(client, payload, payload.offer(pb.ENVELOPE, at))


async def off_loop(size: int, work: Callable[[], None]) -> None:
    """Do something with so many bytes; in a thread, if streams would notice that the loop is busy."""
    if size > _NOTICED:
        await asyncio.to_thread(work)
    else:
        work()
