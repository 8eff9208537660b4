"""From streams to runs: which run a device's words belong to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from mycelia.aggregator.logs import log
from mycelia.aggregator.runs.floor import Floor
from mycelia.aggregator.runs.following import Following
from mycelia.aggregator.runs.leading import not_leader
from mycelia.aggregator.runs.reach import Reach
from mycelia.aggregator.runs.run import FederatedRun
from mycelia.aggregator.service import Service
from mycelia.aggregator.spool import Spooled
from mycelia.aggregator.status.board import Board
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.problems import clipped
from mycelia.privacy.secagg.roster import ClientEntry

__all__ = ["Renewal", "Router"]

Renewal = Callable[[int, pb.Renew], Awaitable[pb.Renewed]]
"""Answers a device that asks for a certificate of new keys."""


class Router:
    """The handler of a service, for all runs of a server.

    Args:
        floor: who is here.
        board: what people see.
        renew: answers renewals, or says who does.

    Attributes:
        runs: by name; a run is there before its first task.
        coming: of each run that this server does, set once it knows where it stands; until then devices wait.
        service: set before the first stream.
        refusal: why this server works with no device now; None if it does.
        following: the work of this server while another one leads; None: it has none.
        reach: devices at other servers while this one leads; None: there are none.
    """

    def __init__(self, floor: Floor, board: Board, renew: Renewal) -> None:
        self._floor, self._board, self._renew = floor, board, renew
        self.runs: dict[str, FederatedRun] = {}
        self.coming: dict[str, asyncio.Event] = {}
        self.service: Service
        self.refusal: Callable[[], Problem | None] = lambda: None
        self.following: Following | None = None
        self.reach: Reach | None = None

    async def held(self, client: int) -> Iterable[pb.Held]:
        """See `Handler.held`."""
        self._check()
        return [held for run in self.runs.values() for held in run.held(client)]

    async def connected(self, client: int, entry: ClientEntry) -> None:
        """See `Handler.connected`."""
        self._board.connected(client, entry.name)
        log("connected", client=client)
        if self.following is not None and self.reach is not None:
            self.reach.here(client, await self.following.came(client, entry))
        for run in self.runs.values():
            run.connected(client, entry.identity_key)
        self._floor.came(client)

    async def frame(self, client: int, frame: pb.ClientFrame) -> None:
        """See `Handler.frame`."""
        self._check()
        body = frame.WhichOneof("body") or ""
        if body == "renew":
            await self._renewed(client, frame.renew)
            return
        if self._follows:
            if body == "ask":  # only who leads knows what its runs ask for
                raise not_leader(self._follows.leader)
            self._follows.frame(client, frame)
            return
        if body == "ask":
            for name in list(self.coming):
                (await self._run(name, client)).describe(client)
            said = pb.RetryAt(reason=f"{len(self.coming)} runs")  # after the last of them
            self.service.push(client, pb.ServerFrame(retry_at=said))
            return
        (await self._run(getattr(frame, body).at.run, client)).frame(client, frame)

    async def offered(self, client: int, offer: pb.Offer) -> None:
        """See `Handler.offered`."""
        self._check()
        if self._follows:
            self._follows.offered(client, offer)
            return
        (await self._run(offer.at.run, client)).offered(client, offer)

    async def payload(self, client: int, payload: Spooled) -> None:
        """See `Handler.payload`."""
        if self._follows:
            self._follows.payload(client, payload)
            return
        at = payload.manifest.at
        run = None if at is None else self.runs.get(at.run)
        if run is None or not run.payload(client, payload):
            await self.service.release(payload)

    async def delivered(self, client: int, offer: pb.Offer) -> None:
        """See `Handler.delivered`."""

    async def lost(self, client: int, problem: Problem | None) -> None:
        """See `Handler.lost`."""
        if problem is not None and problem.reason is Reason.NOT_LEADER and client not in self._floor.here:
            return  # it was not let in
        if self.following is not None:
            self.following.left(client, problem)
        if self.reach is not None and client in self.reach.where:
            return  # it has another stream at another server
        self._floor.left(client)
        self._board.disconnected(client, problem)
        if problem is None:
            log("disconnected", client=client)
        else:
            self._board.refused(problem.reason)
            hint = clipped(problem.hint, 400)
            log("disconnected", level="warning", client=client, reason=problem.reason.value, hint=hint)
        for run in self.runs.values():
            run.lost(client, problem)

    async def _renewed(self, client: int, asked: pb.Renew) -> None:
        self.service.push(client, pb.ServerFrame(renewed=await self._renew(client, asked)))

    @property
    def _follows(self) -> Following | None:
        return self.following if self.following is not None and self.following.leader else None

    def _check(self) -> None:
        problem = self.refusal()
        if problem is not None:
            raise problem

    async def _run(self, name: str, client: int) -> FederatedRun:
        if name in self.coming:
            await self.coming[name].wait()
            self._check()
        run = self.runs.get(name)
        if run is None:
            raise Problem(
                Reason.WRONG_PHASE,
                "work of a run that this server does not have",
                rule="wait to be asked",
                who=f"client {client}",
            )
        return run
