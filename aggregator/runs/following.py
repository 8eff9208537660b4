"""A server that does not lead: it has streams of devices, and sums up their updates for the one that leads.

What devices say goes to the leader by post, and what the leader has for them comes the same way. An update
is checked here, claimed, and added to a partial sum of this server; while one partial sum is handed over the
next comes together. Nothing of a round is kept here: under another leader all of it is asked for again.
"""

from __future__ import annotations

import asyncio
import json
import mmap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from mycelia.aggregator import leases
from mycelia.aggregator.enrolled import begin_stream
from mycelia.aggregator.leases import Lease, take
from mycelia.aggregator.logs import log
from mycelia.aggregator.outcomes import claim
from mycelia.aggregator.relays import Letter, Post
from mycelia.aggregator.round_log import BlobStore, StoredBlob
from mycelia.aggregator.runs.letters import Letters
from mycelia.aggregator.runs.partials import Given, accumulated, write_partial
from mycelia.aggregator.runs.plans import RunPlan
from mycelia.aggregator.runs.tasks import off_loop
from mycelia.aggregator.runs.updates_check import Asked, checked_header, expected_of
from mycelia.aggregator.service import Service
from mycelia.aggregator.spool import Spooled
from mycelia.aggregator.store import Store
from mycelia.aggregator.tensor_sum import TensorSum
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.metrics import MAX_REPORT_BYTES
from mycelia.aggregator.wire.offers import Payload
from mycelia.aggregator.wire.payload import TensorsCheck, check_tensors, check_tensors_size, expected
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.aggregator.wire.update_header import UpdateHeader
from mycelia.aggregator.wire.updates_form import MODEL_ROLES
from mycelia.engine.sums import ExactSum
from mycelia.privacy.secagg.roster import ClientEntry

__all__ = ["Following", "presence"]

_AT_ONCE: Final = 64  # updates of a partial sum
_PAYLOADS: Final = 4  # models and messages that are kept open


def presence(server: str) -> str:
    """Name of the lease by which a server says that it is there; no run has a name with a space."""
    return f"server {server}"


@dataclass(eq=False)
class _Work:
    """One position of a round.

    Attributes:
        plan: of the run.
        asked: what devices were asked for.
        clients: those of this server.
        known: hash of the first update of each.
        offers: headers and offers of updates that are on their way.
        layout_of: where the tensors of an update lie.
        sum: that updates are added to, made with the first.
        given: what is in it.
    """

    plan: RunPlan
    asked: Asked
    clients: set[int] = field(default_factory=set)
    known: dict[int, bytes] = field(default_factory=dict)
    offers: dict[tuple[int, bytes], tuple[UpdateHeader, pb.Offer]] = field(default_factory=dict)
    sum: TensorSum | None = None
    given: list[Given] = field(default_factory=list)
    layout_of: TensorsCheck = field(init=False)

    def __post_init__(self) -> None:
        self.layout_of = TensorsCheck(*self.plan.entries)


class Following:
    """The work of a server that does not lead.

    Args:
        store: of all servers.
        name: of this one.
        blobs: that all of them have.
        service: of this one.
        plans: of the runs, by name; all of them plain.
        wall: Unix time.

    Attributes:
        leader: that is followed; "" for none.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        blobs: BlobStore,
        service: Service,
        plans: Mapping[str, RunPlan],
        wall: Callable[[], float],
    ) -> None:
        self._store, self._name, self._blobs, self._service = store, name, blobs, service
        self._plans, self._wall = plans, wall
        self.letters = Letters(Post(store, name), blobs, self._take)
        self.leader = ""
        self._leads = False
        self._turn = asyncio.Lock()
        self._numbers: dict[int, int] = {}
        self._entries: dict[int, ClientEntry] = {}
        self._works: dict[Position, _Work] = {}
        self._reports: dict[tuple[int, Position], pb.Offer] = {}
        self._payloads: dict[bytes, Payload] = {}
        self._complete: asyncio.Queue[tuple[int, Spooled]] = asyncio.Queue()
        self._presence: Lease | None = None

    # --- whom it follows --------------------------------------------------------------------------

    async def follow(self, leader: str, term: int) -> None:
        """Work for this leader from now on; all that was for an earlier one is asked for again."""
        async with self._turn:
            if self._leads or (self.leader, self.letters.term) == (leader, term):
                return
            await self._stop()
            for run in self._plans:
                await self._service.restart(run)
            self._begin(leader, term)

    def _begin(self, leader: str, term: int) -> None:
        if self._leads:  # the lead was taken in the meantime
            return
        self.leader, self.letters.term = leader, term
        self.letters.heard()
        for client in sorted(self._service.connected & self._entries.keys()):
            self._announce(client)

    async def lead(self) -> None:
        """This server leads, and follows nobody."""
        self._leads = True
        async with self._turn:
            await self._stop()

    def lost(self) -> None:
        """It leads no more, and follows whoever does."""
        self._leads = False

    async def _stop(self) -> None:
        self.leader, self.letters.term = "", 0
        self._works.clear()
        self._reports.clear()
        while not self._complete.empty():
            _, payload = self._complete.get_nowait()
            await self._service.release(payload)

    async def run(self) -> None:
        """Work, until this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.letters.run())
            tasks.create_task(self._sum_all())
            tasks.create_task(self._be_there())

    async def _be_there(self) -> None:
        never = asyncio.Event()
        while True:
            with suppress(Problem):
                self._presence = self._presence or await asyncio.to_thread(
                    take, self._store, presence(self._name), self._name
                )
                if self._presence is not None:
                    await asyncio.to_thread(self._presence.renew)
            with suppress(TimeoutError):
                async with asyncio.timeout(leases.LEASE_S / 3):
                    await never.wait()

    # --- what devices say -------------------------------------------------------------------------

    async def came(self, client: int, entry: ClientEntry) -> int:
        """A device has a stream here; its number."""
        now = self._wall()
        number = await asyncio.to_thread(begin_stream, self._store, client, self._name, now)
        self._numbers[client], self._entries[client] = number, entry
        if self.leader:
            self._announce(client)
        return number

    def left(self, client: int, problem: Problem | None) -> None:
        """Its stream has ended."""
        self._entries.pop(client, None)
        revoked = problem is not None and problem.reason in (Reason.REVOKED, Reason.NOT_ENROLLED)
        if self.leader:
            reason = problem.reason.value if revoked and problem is not None else ""
            self.letters.send(self.leader, client, "gone", reason.encode())

    def frame(self, client: int, frame: pb.ClientFrame) -> None:
        """It says something about its work."""
        self.letters.send(self.leader, client, "frame", frame.SerializeToString())

    def offered(self, client: int, offer: pb.Offer) -> None:
        """It offers a payload. Raises `Problem` if that is not wanted."""
        at = Position.of(offer.at)
        if offer.kind == pb.METRICS and offer.size <= MAX_REPORT_BYTES:
            self._reports[client, at] = offer
            return
        work = self._works.get(at)
        if offer.kind != pb.UPDATE or work is None or client not in work.clients:
            raise Problem(
                Reason.WRONG_PHASE,
                f"a payload {pb.Kind.Name(offer.kind)} of {at}",
                rule="what was asked for",
                fix="wait for the next task",
                who=f"client {client}",
                phase="train",
            )
        if work.known.get(client, offer.sha256) != offer.sha256:
            raise Problem(
                Reason.EQUIVOCATION,
                "another update than the first one",
                rule="the first update of a device in an attempt stands",
                who=f"client {client}",
                phase="train",
            )
        key = self._entries[client].identity_key
        try:
            check_tensors_size(offer.size, expected(*work.plan.entries))
            header = checked_header(work.plan, work.asked, client, key, offer)
        except Problem as problem:
            self._refuse(client, at, problem)
            raise
        work.known[client] = offer.sha256
        work.offers[client, offer.sha256] = header, offer

    def payload(self, client: int, payload: Spooled) -> None:
        """A payload that was offered is complete."""
        self._complete.put_nowait((client, payload))

    def _announce(self, client: int) -> None:
        entry = self._entries[client]
        said = {"number": self._numbers[client], "key": entry.identity_key.hex(), "name": entry.name}
        self.letters.send(self.leader, client, "here", json.dumps(said).encode())

    def _refuse(self, client: int, at: Position, problem: Problem) -> None:
        said = {"at": list(at), "reason": problem.reason.value, "hint": problem.hint}
        self.letters.send(self.leader, client, "refused", json.dumps(said).encode())

    # --- what the leader says ---------------------------------------------------------------------

    async def _take(self, letter: Letter) -> None:
        client = letter.client
        match letter.kind:
            case "frame":
                frame = pb.ServerFrame.FromString(letter.body)
                if frame.HasField("task") and frame.task.work == pb.TRAIN:
                    self._asked(client, frame.task)
                self._service.push(client, frame)
            case "offer":
                offer = pb.Offer.FromString(letter.body)
                payload = await asyncio.to_thread(self._opened, offer)
                self._service.send_payload(client, payload, offer)
            case "withdraw":
                self._service.withdraw(client, Position.of(pb.Position.FromString(letter.body)))
            case "again":
                at = Position.of(pb.Position.FromString(letter.body))
                self._service.again(client, at)

    def _asked(self, client: int, task: pb.Task) -> None:
        at, plan = Position.of(task.at), self._plans[task.at.run]
        for older in [other for other in self._works if other.run == at.run and other.round < at.round]:
            del self._works[older]
        if at not in self._works:
            self._works[at] = _Work(plan, Asked(at, task.model_sha256, expected_of(plan, at)))
        self._works[at].clients.add(client)

    def _opened(self, offer: pb.Offer) -> Payload:
        known = self._payloads.get(offer.sha256)
        if known is None or known.chunk_size != offer.chunk_size:
            size = max(offer.chunk_size, 1)
            known = Payload(_mapped(self._blobs.get(offer.sha256)), chunk_size=size, whole=offer.sha256)
            self._payloads[offer.sha256] = known
            while len(self._payloads) > _PAYLOADS:
                del self._payloads[next(iter(self._payloads))]
        return known

    # --- sums -------------------------------------------------------------------------------------

    async def _sum_all(self) -> None:
        while True:
            batch = [await self._complete.get()]
            while len(batch) < _AT_ONCE and not self._complete.empty():
                batch.append(self._complete.get_nowait())
            touched: dict[Position, _Work] = {}
            for client, payload in batch:
                at = payload.manifest.at
                try:
                    if payload.manifest.kind == pb.METRICS:
                        self._send_metrics(client, payload)
                    elif at is not None and (work := self._works.get(at)) is not None:
                        await self._add(client, payload, work)
                        touched[at] = work
                except Problem as problem:
                    log("update_refused", level="warning", client=client, reason=problem.reason.value)
            for work in touched.values():
                try:
                    await self._hand_over(work)
                except Problem as problem:  # the devices are asked again, as soon as they come again
                    log("store_away", level="error", reason=problem.reason.value, hint=problem.hint)
            for _, payload in batch:
                await self._service.release(payload)

    def _send_metrics(self, client: int, payload: Spooled) -> None:
        at = payload.manifest.at
        offer = None if at is None else self._reports.pop((client, at), None)
        if offer is None:
            return
        head = offer.SerializeToString()
        with payload.open() as data:
            body = len(head).to_bytes(4, "big") + head + bytes(data)
        self.letters.send(self.leader, client, "metrics", body)

    async def _add(self, client: int, payload: Spooled, work: _Work) -> None:
        header, offer = work.offers.pop((client, payload.manifest.sha256))
        at = work.asked.at
        try:
            await asyncio.to_thread(self._claim, at, client, payload.manifest.sha256)
            await off_loop(payload.manifest.size, partial(self._fold, payload, header, work))
        except Problem as problem:
            if problem.reason is not Reason.STORE:
                self._service.push(client, pb.ServerFrame(outcome=problem.outcome(at)))
                self._refuse(client, at, problem)
            raise
        work.given.append(Given(client, offer.header, offer.signature, payload.manifest.size))

    def _claim(self, at: Position, client: int, sha256: bytes) -> None:
        with self._store.write() as connection:
            claim(connection, at, client, sha256)

    def _fold(self, payload: Spooled, header: UpdateHeader, work: _Work) -> None:
        if work.sum is None:
            work.sum = self._new_sum(work)
        with payload.open() as data:
            layout = work.layout_of(data, payload.manifest.size)
            for _ in work.sum.fold(data, layout, header.weights):
                pass

    def _new_sum(self, work: _Work) -> TensorSum:
        plan = work.plan
        base = _mapped(self._blobs.get(work.asked.model_sha256))
        layout = check_tensors(base, len(base), plan.program.schema, MODEL_ROLES)
        entries = plan.entries
        return TensorSum(
            ExactSum(plan.form), entries.schema, entries.roles, entries.more, base=base, layout=layout
        )

    async def _hand_over(self, work: _Work) -> None:
        """The partial sum is durable before the leader hears of it."""
        if work.sum is None or not work.given:
            return
        given, exact = list(work.given), work.sum.exact
        work.given.clear()
        try:
            blob = await asyncio.to_thread(self._blobs.put, accumulated(exact))
        finally:
            exact.reset()
        if self._works.get(work.asked.at) is work:
            body = write_partial(work.asked.at, blob.sha256, given)
            self.letters.send(self.leader, 0, "partial", body)


def _mapped(blob: StoredBlob) -> mmap.mmap:
    """The bytes; whoever wrote into them would change a copy. Read-only memory is no tensor's."""
    with blob.path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
