"""Work that adds nothing to the model: devices measure it, or are given it at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mycelia.aggregator.runs.context import Context
from mycelia.aggregator.runs.gathering import Gathering
from mycelia.aggregator.runs.state import Current
from mycelia.aggregator.runs.tasks import Assignment
from mycelia.aggregator.spool import Spooled
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.metrics import MAX_REPORT_BYTES, MetricsReport
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.position import Position

__all__ = ["Errand"]


class Errand(Gathering):
    """One thing that each of some devices does, once.

    Args:
        context: of the run.
        at: the position.
        work: `EVALUATE`, which is answered by metrics, or `DELIVER`, which is answered by Ready.
        current: the model.
        message: what goes with it.
        keys: identity keys of the devices.
        seconds: after which those who have not answered are left out.
    """

    def __init__(
        self,
        context: Context,
        at: Position,
        work: pb.Work,
        current: Current,
        message: Payload | None,
        keys: Mapping[int, bytes],
        seconds: float,
    ) -> None:
        super().__init__(context, at)
        self._work, self._current, self._keys = work, current, keys
        self._deadline = context.clock() + seconds
        self._assignment = Assignment(context, at, work, current, message, self._deadline)
        self._pending: set[int] = set()
        self._signatures: dict[int, bytes] = {}
        self.reports: dict[int, MetricsReport] = {}
        self.done: set[int] = set()
        self.refused: dict[int, str] = {}

    async def go(self, clients: Iterable[int]) -> set[int]:
        """Ask them, and wait; those who have done it."""
        self._pending = set(clients)
        for client in sorted(self._pending):
            self.connected(client)
        while self._pending:
            event = await self.next(self._deadline)
            if event is None:
                break
            await self._happen(event)
        return self.done

    async def _happen(self, event: object) -> None:
        match event:
            case (int(client), Spooled() as payload):
                await self._take(client, payload)
            case (int(client), Problem()):
                self._pending.discard(client)  # it was revoked
            case (int(client), pb.ClientFrame() as frame):
                decline = frame.HasField("decline")
                if decline:
                    self.refused[client] = frame.decline.field or frame.decline.reason
                elif self._work == pb.DELIVER:
                    self.done.add(client)
                if decline or self._work == pb.DELIVER:
                    self._pending.discard(client)
            case _:
                pass

    async def _take(self, client: int, payload: Spooled) -> None:
        at = payload.manifest.at or self.at
        try:
            with payload.open() as data:
                report = MetricsReport.verified(
                    bytes(data), self._signatures[client], key=self._keys[client], client=client, at=at
                )
            if report.model_sha256 != self._current.model_sha256:
                raise Problem(Reason.STALE_MODEL, "metrics of another model", rule="of the one that was sent")
            outcome = pb.Outcome(at=at.to_wire())
            self.reports[client] = report
            self.done.add(client)
        except Problem as problem:
            outcome = problem.outcome(at)
        finally:
            await self.context.service.release(payload)
        self._pending.discard(client)
        self.context.service.push(client, pb.ServerFrame(outcome=outcome))

    def held(self, client: int) -> Iterable[pb.Held]:
        """See `Gathering.held`."""
        kind = pb.METRICS if self._work == pb.EVALUATE else pb.MODEL
        return [pb.Held(at=self.at.to_wire(), phase="evaluate", kind=kind)] if client in self._pending else []

    def connected(self, client: int) -> None:
        """See `Gathering.connected`."""
        if client in self._pending and self._assignment.push(client):
            self.note_asked([client], self._assignment.bytes_down)

    def frame(self, client: int, frame: pb.ClientFrame) -> None:
        """See `Gathering.frame`."""
        body = frame.WhichOneof("body")
        if body not in ("ready", "decline"):
            raise Problem(Reason.WRONG_PHASE, f"a frame {body}", rule="nothing of this kind is asked for now")
        at = Position.of(getattr(frame, body).at)
        if at == self.at:
            self.queue.put_nowait((client, frame))
        elif problem := self.wrong_position(at, self.at.attempt):
            raise problem

    def offered(self, client: int, offer: pb.Offer) -> None:
        """See `Gathering.offered`."""
        at = Position.of(offer.at)
        if problem := self.wrong_position(at, self.at.attempt):
            raise problem
        if at != self.at or offer.kind != pb.METRICS or client not in self._pending:
            raise Problem(Reason.LATE, f"a payload {pb.Kind.Name(offer.kind)}", rule="what is asked for now")
        if offer.size > MAX_REPORT_BYTES:
            raise Problem(Reason.TOO_LARGE, f"{offer.size} bytes", rule=f"at most {MAX_REPORT_BYTES}")
        self._signatures[client] = offer.signature
