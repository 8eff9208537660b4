"""One server: its store, its streams and its runs, from start to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from mycelia.aggregator.blob_rows import BlobRows
from mycelia.aggregator.blobs import Blobs
from mycelia.aggregator.deadlines import SHUTDOWN_S, Deadlines, Waits, derive
from mycelia.aggregator.enrolled import ROSTERS, keep_roster, newest_roster
from mycelia.aggregator.identity import ServerKeys, expiries
from mycelia.aggregator.leases import RENEW_S, Lease, take
from mycelia.aggregator.limits import Limits
from mycelia.aggregator.log_writer import LogWriter
from mycelia.aggregator.logs import log
from mycelia.aggregator.notices import listen
from mycelia.aggregator.round_log import RoundLog, blobs_in_use, has_run
from mycelia.aggregator.runs.context import Context
from mycelia.aggregator.runs.floor import Floor
from mycelia.aggregator.runs.gathering import Stopped
from mycelia.aggregator.runs.plans import RunPlan
from mycelia.aggregator.runs.privacy import ServerPrivacy
from mycelia.aggregator.runs.router import Renewal, Router
from mycelia.aggregator.runs.run import FederatedRun, RunResult
from mycelia.aggregator.service import Service
from mycelia.aggregator.spool import Spool
from mycelia.aggregator.status.board import Board
from mycelia.aggregator.store import Store
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.offers import MAX_PAYLOAD
from mycelia.engine import events
from mycelia.engine.config import to_toml
from mycelia.engine.environment import describe
from mycelia.engine.errors import ConfigError, MyceliaError
from mycelia.engine.events import Listener
from mycelia.engine.run import Run as Folder
from mycelia.engine.run import is_run

__all__ = ["Places", "Server", "Work"]

_SPOOL: Final = "spool"
_MODELS: Final = 4
"""Models that the spool has room for, unless it is told otherwise."""
_BESIDE: Final = 2**30  # bytes of the spool beside these
_SWEEP_S: Final = 600.0  # blobs younger than that may be about to be referred to, where servers share them


class Work(NamedTuple):
    """A run that a server is to do.

    Attributes:
        plan: of the run.
        folder: where its record goes.
    """

    plan: RunPlan
    folder: Path


@dataclass(frozen=True)
class Places:
    """Where a server keeps things.

    Attributes:
        store: address of the database.
        blobs: folder of models and sums; None: rows of the database.
        own: folder of this server alone, for the spool and copies of blobs.
        spool_max: bytes that the spool may take; 0: four times the largest model, and 1 GiB.
        max_payload: bytes that a payload may have.
    """

    store: str
    blobs: Path | None
    own: Path
    spool_max: int = 0
    max_payload: int = MAX_PAYLOAD


def deadlines_of(plan: RunPlan) -> Deadlines:
    """Those of the budget of a run."""
    return derive(plan.config.round.budget_s, secure_sum=plan.secure is not None)


@dataclass
class Server:
    """A server, from `start` to `stop`.

    Attributes:
        keys: of this server.
        roster: the operator's document, as it lies on the disk.
        works: the runs.
        places: where things are kept.
        board: what people see.
        limits: of devices and addresses.
        insecure: without TLS.
        renew: answers renewals on the stream.
        listeners: called with every event of every run.
        deadlines: of the rounds of a run, from its settings.
        clock: seconds that do not run backwards.
        wall: Unix time.
    """

    keys: ServerKeys
    roster: bytes
    works: Sequence[Work]
    places: Places
    board: Board = field(default_factory=Board)
    limits: Limits | None = None
    insecure: bool = False
    renew: Renewal | None = None
    listeners: Sequence[Listener] = ()
    deadlines: Callable[[RunPlan], Deadlines] = deadlines_of
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    results: dict[str, RunResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.floor = Floor()
        self.service: Service
        self._router = Router(self.floor, self.board, self._renewed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._doing: set[asyncio.Task[None]] = set()
        self._ending = False
        self._leases: dict[str, Lease] = {}
        self._store: Store
        self._spool: Spool
        self._blobs: Blobs | BlobRows

    # --- its life ---------------------------------------------------------------------------------

    async def start(self, listen_on: str) -> int:
        """Open everything, and listen for devices.

        Args:
            listen_on: `host:port`; port 0 takes a free one.

        Returns:
            The port.

        Raises:
            ConfigError: settings that do not fit together, or something is in use.
            Problem: `STORE`, `STORE_CORRUPT`.
        """
        names = [work.plan.name for work in self.works]
        if len(set(names)) != len(names):
            raise ConfigError(
                f"the runs {', '.join(names)}", rule="each has a name of its own", who="run.name"
            )
        waits = self._waits()
        await asyncio.to_thread(self._open, waits.stall)
        secure = any(work.plan.secure is not None for work in self.works)
        self.service = Service(
            self.keys, self.roster, self._router, self._spool, waits,
            limits=self.limits, max_payload=self.places.max_payload, insecure=self.insecure,
            secure_sum=secure, wall=self.wall, random=Random(),
        )  # fmt: skip
        self._router.service = self.service
        port = await self.service.start(listen_on)
        self._show_expiries()
        self._keep(self._renew_leases())
        self._keep(self._show_traffic())
        if self._store.shared:
            self._keep(self._hear())
            self._keep(self._sweep_often())
        return port

    async def run(self) -> dict[str, RunResult]:
        """Do all runs to their end.

        Returns:
            results by name, of the runs that have one.

        Raises:
            Stopped: the server is to end.
            MyceliaError: a run has failed for good; the others were finished first.
        """
        self._doing = {asyncio.create_task(self._do(work)) for work in self.works}
        found = await asyncio.gather(*self._doing, return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return self.results

    async def stop(self, delay_s: float = 1.0) -> None:
        """End: runs come to rest, devices are told when to come again, files are closed.

        Args:
            delay_s: after which devices may come again.
        """
        self.halt()
        if self._doing:
            await asyncio.wait(self._doing, timeout=SHUTDOWN_S / 4)
        for task in self._tasks | self._doing:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._doing, return_exceptions=True)
        with suppress(AttributeError):
            await self.service.drain(delay_s)
        await asyncio.to_thread(self._close)

    def halt(self) -> None:
        """Runs come to rest; `run` then raises `Stopped`."""
        self._ending = True
        for run in self._router.runs.values():
            run.stop()

    def take_roster(self, document: bytes) -> None:
        """A newer roster: whoever it does not let in ends at once.

        Raises:
            SecureSumError: not the operator's, expired, or older than the one here; that one stays.
        """
        self.service.renew_roster(document)
        self._show_expiries()
        roster = self.service.roster
        log("roster", hint=f"epoch {roster.epoch}, {len(roster.clients)} devices")
        if self._store.shared:
            keep_roster(self._store, roster.epoch, document)

    # --- inside -----------------------------------------------------------------------------------

    async def _renewed(self, client: int, asked: pb.Renew) -> pb.Renewed:
        if self.renew is None:
            raise Problem(
                Reason.BUSY,
                "this server does not renew certificates",
                rule="the operator does",
                fix="mycelia enrol request --renew, and send it to the operator",
                who=f"client {client}",
            )
        return await self.renew(client, asked)

    def _waits(self) -> Waits:
        """Of the connections: the shortest of what the runs have."""
        each = [self.deadlines(work.plan).waits for work in self.works]
        return Waits(*(min(values) for values in zip(*each, strict=True)))

    def _open(self, stall_s: float) -> None:
        places = self.places
        places.own.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._store = Store.open(places.store)
        try:
            if places.blobs is None:
                self._blobs = BlobRows(self._store, Blobs(places.own / "blobs"))
            else:
                self._blobs = Blobs(places.blobs)
            quota = places.spool_max or _MODELS * max(self._model_bytes()) + _BESIDE
            self._spool = Spool(places.own / _SPOOL, quota=quota, stall_s=stall_s, most=places.max_payload)
            if self._store.shared:
                newest = newest_roster(self._store)
                if newest is not None:
                    self.roster = newest[1]
            self._sweep()
        except BaseException:
            self._store.close()
            raise

    def _sweep(self) -> None:
        """Remove blobs that no run refers to."""
        grace_s = _SWEEP_S if self._store.shared else 0.0
        self._blobs.sweep(blobs_in_use(self._store, self._blobs), grace_s=grace_s)

    def _close(self) -> None:
        for lease in self._leases.values():
            with suppress(Problem):
                lease.release()
        with suppress(AttributeError):
            self._spool.close()
        with suppress(AttributeError):
            self._store.close()

    def _model_bytes(self) -> list[int]:
        return [
            sum(entry.numel * entry.dtype.itemsize for entry in work.plan.model_schema) for work in self.works
        ]

    def _keep(self, work: object) -> None:
        if not asyncio.iscoroutine(work):
            raise TypeError("no coroutine")
        self._tasks.add(asyncio.create_task(work))

    async def _do(self, work: Work) -> None:
        """One run, led by this server."""
        plan = work.plan
        run: FederatedRun | None = None
        try:
            lease = await self._lead(plan.name)
            run = await asyncio.to_thread(self._made, work, lease)
            if self._ending:
                raise Stopped
            self._router.runs[plan.name] = run
            self._known_devices(run)
            self.board.run_started(
                plan.name, purpose=plan.purpose, algorithm=plan.algorithm.name,
                model=plan.config.model.name, rounds=plan.config.rounds, cohort=plan.config.cohort,
                secure=plan.secure is not None,
                privacy_unit="" if plan.config.privacy is None else plan.config.privacy.unit,
            )  # fmt: skip
            self.results[plan.name] = await run.go()
        except Stopped:
            raise
        except MyceliaError as error:
            self.board.stopped(plan.name, str(error))
            log("run_stopped", level="error", run=plan.name, hint=error.found)
            raise
        finally:
            self._router.runs.pop(plan.name, None)
            if run is not None:
                run.folder.close()

    def _known_devices(self, run: FederatedRun) -> None:
        """Those who came before the run was there."""
        for client in self.floor.here:
            entry = self.service.roster.entry(client, int(self.wall()))
            run.connected(client, entry.identity_key, entry.name)
        self.floor.stir()

    async def _lead(self, name: str) -> Lease:
        """The lead of a run, as soon as it is free."""
        while True:
            lease = await asyncio.to_thread(take, self._store, name, self.keys.name)
            if lease is not None:
                self._leases[name] = lease
                return lease
            raise ConfigError(
                f"another server leads {name}",
                rule="a run has one leader",
                fix="wait until its lease is over, or give this run another name",
                who="run.name",
            )

    def _made(self, work: Work, lease: Lease) -> FederatedRun:
        plan = work.plan
        settings = to_toml(plan.config).encode()
        if has_run(self._store, plan.name):
            round_log = RoundLog.open(lease, self._blobs)
            if round_log.config != settings:
                raise ConfigError(
                    f"the settings of the run {plan.name!r} are not those it began with",
                    rule="a run keeps its settings, so that its record stays true",
                    fix="put them back, or give the run another name",
                    who="run.name",
                )
        else:
            round_log = RoundLog.create(lease, self._blobs, settings)
        stopping = asyncio.Event()
        writer = LogWriter(round_log, stopping, self._store_away)
        folder = self._folder(work, round_log)
        privacy = ServerPrivacy(plan, lease, folder.path)
        context = Context(
            plan, self.deadlines(plan), lease, writer, self._blobs, self.service, self.floor, self.board,
            discard=self._discard, away=self._store_away, stopping=stopping, clock=self.clock, wall=self.wall,
        )  # fmt: skip
        return FederatedRun(context, privacy, self.keys.identity, folder)

    def _folder(self, work: Work, round_log: RoundLog) -> Folder:
        """The run folder: the one of before, or a new one."""
        if is_run(work.folder):
            folder = Folder.resume(work.folder, listeners=self.listeners)
            published = round_log.order.published
            done = 0 if round_log.order.opened is None else round_log.order.opened.round
            folder.log(events.Resumed(step=done + (published is not None and not round_log.order.failed)))
            return folder
        folder = Folder.create(work.folder, "serve", to_toml(work.plan.config), listeners=self.listeners)
        folder.log(
            events.RunStarted(
                command="serve",
                config=work.plan.config.model_dump(mode="json"),
                seed=work.plan.config.seed,
                environment=describe(),
                total=work.plan.config.rounds,
            )
        )
        if self.insecure:
            folder.log(
                events.WarningRaised(
                    message="plain text: whoever is on the network reads and changes what is sent",
                    who="server",
                )
            )
        return folder

    def _discard(self, hashes: Sequence[bytes]) -> None:
        """Remove blobs that no run refers to any more."""
        if not isinstance(self._blobs, Blobs) or self._store.shared:
            return  # swept with a grace period, where others may be about to refer to them
        used: set[bytes] = set()
        try:
            for run in list(self._router.runs.values()):
                used |= run.context.writer.log.blobs_in_use()
                with suppress(AttributeError):
                    used |= {run.current.model_sha256, run.current.state_sha256}
        except Problem as problem:
            self._store_away(problem)
            return  # they are swept at the next start
        for each in set(hashes) - used:
            self._blobs.discard(each)

    def _store_away(self, problem: Problem) -> None:
        log("store_away", level="error", reason=problem.reason.value, hint=problem.hint)

    def _show_expiries(self) -> None:
        found = expiries(self.service.roster, self.keys.operator)
        self.board.expiries([(f"{each.kind} {each.name}".strip(), each.not_after) for each in found])

    async def _renew_leases(self) -> None:
        never = asyncio.Event()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await never.wait()
            for name, lease in list(self._leases.items()):
                try:
                    await asyncio.to_thread(lease.renew)
                except Problem as problem:
                    log("lease", level="error", run=name, reason=problem.reason.value, hint=problem.hint)
                    if problem.reason is Reason.NOT_LEADER and name in self._router.runs:
                        self._router.runs[name].stop()

    async def _sweep_often(self) -> None:
        """Where servers share blobs, nobody may remove one at once."""
        never = asyncio.Event()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_S):
                    await never.wait()
            try:
                await asyncio.to_thread(self._sweep)
            except Problem as problem:
                self._store_away(problem)

    async def _show_traffic(self) -> None:
        never = asyncio.Event()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await never.wait()
            traffic = self.service.traffic
            self.board.traffic(traffic.received, traffic.sent)
            self.board.spool(self._spool.pool_used + self._spool.disk_used, self._spool.waiting)

    async def _hear(self) -> None:
        """Other servers of the same store have a newer roster."""
        async for _ in listen(self._store, [ROSTERS]):
            newest = await asyncio.to_thread(newest_roster, self._store)
            if newest is not None and newest[0] > self.service.roster.epoch:
                self.service.renew_roster(newest[1])
                self._show_expiries()
