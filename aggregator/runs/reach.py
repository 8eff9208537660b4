"""The leader's side of devices that are connected to other servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress

from mycelia.aggregator.leases import LEASE_S, standing
from mycelia.aggregator.logs import log
from mycelia.aggregator.relays import Letter, Post
from mycelia.aggregator.round_log import BlobStore
from mycelia.aggregator.runs.floor import Floor
from mycelia.aggregator.runs.following import presence
from mycelia.aggregator.runs.letters import Letters
from mycelia.aggregator.runs.run import FederatedRun
from mycelia.aggregator.service import Service
from mycelia.aggregator.spool import Spooled
from mycelia.aggregator.status.board import Board
from mycelia.aggregator.store import Store
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.metrics import MAX_REPORT_BYTES
from mycelia.aggregator.wire.offers import Manifest, Payload
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.aggregator.wire.sinks import MemorySink

__all__ = ["Reach"]


class Reach:
    """Devices elsewhere, as if they were here; what a `Service` has `beyond` itself.

    Args:
        store: of all servers.
        name: of this one.
        blobs: that all of them have.
        service: of this one.
        floor: who is here, or elsewhere.
        board: what people see.
        runs: that this server leads, by name.
        coming: of each run, set once it knows where it stands; until then letters wait.

    Attributes:
        where: the server that each device is connected to, if it is not this one.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        blobs: BlobStore,
        service: Service,
        floor: Floor,
        board: Board,
        runs: Mapping[str, FederatedRun],
        coming: Mapping[str, asyncio.Event],
    ) -> None:
        self._store, self._service, self._floor, self._board, self._runs = store, service, floor, board, runs
        self._coming = coming
        self.letters = Letters(Post(store, name), blobs, self._take)
        self.where: dict[int, str] = {}
        self.entries: dict[int, tuple[bytes, str]] = {}
        self._newest: dict[int, int] = {}

    def here(self, client: int, number: int) -> None:
        """A device has a stream at this server, of this number."""
        self._newest[client] = max(number, self._newest.get(client, 0))
        self.where.pop(client, None)

    def begin(self, term: int) -> None:
        """This server leads."""
        self.where.clear()
        self.letters.term = term
        self.letters.heard()

    def end(self) -> None:
        """It does not lead any more."""
        self.letters.term = 0
        for client in list(self.where):
            self._lost(client, None)

    async def watch(self) -> None:
        """Devices of a server that has ended are nowhere; until this is cancelled."""
        never = asyncio.Event()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LEASE_S / 2):
                    await never.wait()
            for server in sorted(set(self.where.values())):
                try:
                    found = await asyncio.to_thread(standing, self._store, presence(server))
                except Problem:
                    break
                if found is None or not found.left:
                    for client in [client for client, other in self.where.items() if other == server]:
                        self._lost(client, None)

    # --- what `Service` has beyond itself ---------------------------------------------------------

    def push(self, client: int, frame: pb.ServerFrame) -> bool:
        """See `Service.push`."""
        return self._send(client, "frame", frame.SerializeToString())

    def send_payload(self, client: int, payload: Payload, offer: pb.Offer) -> bool:
        """See `Service.send_payload`; the server there has the bytes from the blobs."""
        return self._send(client, "offer", offer.SerializeToString(), payload)

    def withdraw(self, client: int, at: Position) -> None:
        """See `Service.withdraw`."""
        self._send(client, "withdraw", at.to_wire().SerializeToString())

    def again(self, client: int, at: Position) -> None:
        """See `Service.again`."""
        self._send(client, "again", at.to_wire().SerializeToString())

    def _send(self, client: int, kind: str, body: bytes, payload: Payload | None = None) -> bool:
        server = self.where.get(client)
        if server is None:
            return False
        self.letters.send(server, client, kind, body, payload)
        return True

    # --- what other servers say -------------------------------------------------------------------

    async def _take(self, letter: Letter) -> None:
        client = letter.client
        for event in list(self._coming.values()):
            await event.wait()
        if letter.kind == "here":
            self._came(letter)
            return
        if letter.kind == "partial":
            self._runs[json.loads(letter.body)["at"][0]].partial(letter.body)
            return
        if self.where.get(client) != letter.server:
            return  # it is elsewhere by now
        match letter.kind:
            case "gone":
                reason = letter.body.decode()
                revoked = Problem(Reason(reason or "REVOKED"), "it was revoked", rule="see the roster")
                self._lost(client, revoked if reason else None)
            case "frame":
                frame = pb.ClientFrame.FromString(letter.body)
                body = frame.WhichOneof("body") or ""
                self._answered(client, getattr(frame, body).at, lambda run: run.frame(client, frame))
            case "metrics":
                self._metrics(client, letter.body)
            case "refused":
                said = json.loads(letter.body)
                problem = Problem(Reason(said["reason"]), said["hint"], hint=said["hint"])
                at = Position(*said["at"])
                if at.run in self._runs:
                    self._runs[at.run].turned_away(client, at, problem)

    def _came(self, letter: Letter) -> None:
        said, client = json.loads(letter.body), letter.client
        if said["number"] <= self._newest.get(client, 0):
            return
        self._newest[client] = said["number"]
        self.where[client] = letter.server
        self.entries[client] = key, name = bytes.fromhex(said["key"]), said["name"]
        self._board.connected(client, name)
        log("connected", client=client, hint=f"at {letter.server}")
        for run in self._runs.values():
            run.connected(client, key)
        self._floor.came(client)

    def _lost(self, client: int, problem: Problem | None) -> None:
        self.where.pop(client, None)
        self._floor.left(client)
        self._board.disconnected(client, problem)
        for run in self._runs.values():
            run.lost(client, problem)

    def _metrics(self, client: int, body: bytes) -> None:
        size = int.from_bytes(body[:4], "big")
        offer, data = pb.Offer.FromString(body[4 : 4 + size]), body[4 + size :]
        sink = MemorySink(len(data))
        sink.write(0, data)
        payload = Spooled(client, Manifest(offer, MAX_REPORT_BYTES), sink)

        def give(run: FederatedRun) -> None:
            run.offered(client, offer)
            run.payload(client, payload)

        self._answered(client, offer.at, give)

    def _answered(self, client: int, at: pb.Position, do: Callable[[FederatedRun], None]) -> None:
        """A device's word; what is wrong with it travels as an outcome."""
        try:
            run = self._runs.get(at.run)
            if run is None:
                raise Problem(
                    Reason.WRONG_PHASE, "work of a run that is not led now", rule="wait to be asked"
                )
            do(run)
        except Problem as problem:
            self.push(client, pb.ServerFrame(outcome=problem.outcome(Position.of(at))))
