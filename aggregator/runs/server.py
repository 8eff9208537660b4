"""One server: its store, its streams and its runs, from start to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from mycelia.aggregator.blob_rows import BlobRows
from mycelia.aggregator.blobs import Blobs
from mycelia.aggregator.deadlines import SHUTDOWN_S, Deadlines, Waits, derive
from mycelia.aggregator.enrolled import ROSTERS, STREAMS, keep_roster, newest_roster, streams_of
from mycelia.aggregator.identity import ServerKeys, expiries
from mycelia.aggregator.leases import LEASES, Lease, Standing, standing
from mycelia.aggregator.limits import Limits
from mycelia.aggregator.log_writer import LogWriter
from mycelia.aggregator.logs import log
from mycelia.aggregator.notices import listen
from mycelia.aggregator.relays import RELAYS
from mycelia.aggregator.round_log import RoundLog, blobs_in_use, config_of, has_run
from mycelia.aggregator.runs.context import Context
from mycelia.aggregator.runs.floor import Floor
from mycelia.aggregator.runs.following import Following
from mycelia.aggregator.runs.gathering import Stopped
from mycelia.aggregator.runs.leading import Leading, not_leader
from mycelia.aggregator.runs.letters import Letters
from mycelia.aggregator.runs.plans import RunPlan
from mycelia.aggregator.runs.privacy import ServerPrivacy
from mycelia.aggregator.runs.reach import Reach
from mycelia.aggregator.runs.router import Renewal, Router
from mycelia.aggregator.runs.run import FederatedRun, RunResult
from mycelia.aggregator.server_config import run_settings
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
from mycelia.privacy.secagg.canonical import SecureSumError
from mycelia.privacy.secagg.roster import Roster

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
        self._leading: Leading
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
        self._router.coming = {name: asyncio.Event() for name in names}
        self._leading = Leading(self._store, names, self.keys.name, self._wait)
        if self._store.shared:
            self._router.refusal = self._refusal
            if not secure:  # sessions of a secure sum are led where their devices are
                self._share()
        port = await self.service.start(listen_on)
        self._show_expiries()
        self._keep(self._show_traffic())
        if self._store.shared:
            self._keep(self._hear())
            self._keep(self._sweep_often())
        return port

    async def run(self) -> dict[str, RunResult]:
        """Do all runs to their end, as soon and as long as this server leads.

        Returns:
            results by name, of the runs that have one.

        Raises:
            Stopped: the server is to end.
            MyceliaError: a run has failed for good; the others were finished first.
        """
        while True:
            await self._leading.take()
            await self._begin_term()
            if await self._term():
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
            await self._leading.give_back()  # the next one leads when devices come to it
            await self._leading.close()
        with suppress(AttributeError):
            await self.service.drain(delay_s)
        await asyncio.to_thread(self._close)

    def halt(self) -> None:
        """Runs come to rest; `run` then raises `Stopped`."""
        self._ending = True
        with suppress(AttributeError):
            self._leading.end()
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
                self._share_roster()
                self._check_settings()
            self._sweep()
        except BaseException:
            self._store.close()
            raise

    def _sweep(self) -> None:
        """Remove blobs that no run refers to."""
        grace_s = _SWEEP_S if self._store.shared else 0.0
        self._blobs.sweep(blobs_in_use(self._store, self._blobs), grace_s=grace_s)

    def _close(self) -> None:
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

    # --- leading ----------------------------------------------------------------------------------

    def _share(self) -> None:
        """Devices of any server take part in the runs of the one that leads."""
        store, name, router = self._store, self.keys.name, self._router
        plans = {work.plan.name: work.plan for work in self.works}
        router.following = Following(store, name, self._blobs, self.service, plans, self.wall)
        router.reach = Reach(
            store, name, self._blobs, self.service, self.floor, self.board, router.runs, router.coming
        )
        self.service.beyond = router.reach
        self._keep(router.following.run())
        self._keep(router.reach.letters.run())
        self._keep(router.reach.watch())

    async def _follow(self) -> None:
        """Work for whoever leads all runs of this server."""
        following = self._router.following
        if following is None:
            return
        names = sorted(work.plan.name for work in self.works)
        try:
            found = await asyncio.to_thread(lambda: [standing(self._store, name) for name in names])
        except Problem as problem:
            self._store_away(problem)
            return
        holders = {each.holder if each is not None and each.left else "" for each in found}
        first = found[0]
        if first is not None and len(holders) == 1 and holders.isdisjoint({"", self.keys.name}):
            await following.follow(first.holder, first.fence)

    async def _begin_term(self) -> None:
        """This server leads from now on: what it did for another one is asked for again."""
        if self._router.following is None or self._router.reach is None:
            return
        await self._router.following.lead()
        for work in self.works:
            await self.service.restart(work.plan.name)
        self._router.reach.begin(self._leading.leases[min(self._leading.leases)].fence)

    async def _term(self) -> bool:
        """Lead the runs: to their end, or until another server does.

        Returns:
            whether they are over.

        Raises:
            Stopped: the server is to end.
            MyceliaError: a run has failed for good; the others were finished first.
        """
        left = [work for work in self.works if work.plan.name not in self.results]
        for work in left:
            self._router.coming[work.plan.name].clear()
        self._doing = {asyncio.create_task(self._do(work)) for work in left}
        everything = asyncio.gather(*self._doing, return_exceptions=True)
        keeper = asyncio.create_task(self._leading.keep())
        try:
            both: set[asyncio.Future[Any]] = {everything, keeper}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._ending or (everything.done() and not any(map(_is_lost, everything.result()))):
                for each in await everything:
                    if isinstance(each, BaseException):
                        raise each
                return True
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        log("lead_lost", level="warning", hint="this server stops writing, and waits until it leads again")
        await self._rest()
        return False

    async def _rest(self) -> None:
        """After the lead was lost: nothing goes on, and nobody is served."""
        for run in self._router.runs.values():
            run.stop()
        if self._router.following is not None and self._router.reach is not None:
            self._router.reach.end()
            self._router.following.lost()
        for client in self.service.connected:
            self.service.end(client, not_leader(""))
        if self._doing:
            await asyncio.wait(self._doing, timeout=SHUTDOWN_S / 2)
        for task in self._doing:
            task.cancel()
        for each in await asyncio.gather(*self._doing, return_exceptions=True):
            if isinstance(each, Exception) and not isinstance(each, Stopped) and not _is_lost(each):
                log("run_stopped", level="warning", hint=str(each))
        self._doing = set()
        for work in self.works:
            self.floor.free_all(work.plan.name)
            await self.service.restart(work.plan.name)

    def _refusal(self) -> Problem | None:
        """Why no device may stay; the others of a store tell devices to look for the one that leads."""
        following = self._router.following
        if self._leading.leads or (following is not None and following.leader):
            return None
        return not_leader(self._leading.holder)

    def _wait(self, run: str, stands: Standing) -> None:
        """Another server leads."""
        for work in self.works:
            if work.plan.name not in self.results:
                self._show_run(work.plan)
                self.board.phase(work.plan.name, 0, 0, "waiting", None)
        self._keep(self._follow())
        hint = f"{stands.holder} leads, for another {stands.left:.1f} s unless it says so again"
        log("standby", run=run, hint=hint)

    def _show_run(self, plan: RunPlan) -> None:
        self.board.run_started(
            plan.name, purpose=plan.purpose, algorithm=plan.algorithm.name,
            model=plan.config.model.name, rounds=plan.config.rounds, cohort=plan.config.cohort,
            secure=plan.secure is not None,
            privacy_unit="" if plan.config.privacy is None else plan.config.privacy.unit,
        )  # fmt: skip

    def _share_roster(self) -> None:
        """The newest of what the operator signed: in this server's file, or in the store."""
        now = int(self.wall())
        mine = Roster.load(self.roster, self.keys.operator.key, now=now, least_epoch=1)
        newest = newest_roster(self._store)
        if newest is None or newest[0] < mine.epoch:
            keep_roster(self._store, mine.epoch, self.roster)
        else:
            self.roster = newest[1]

    def _check_settings(self) -> None:
        """Servers that share a run have the same settings of it."""
        for work in self.works:
            known = config_of(self._store, work.plan.name)
            if known is not None and known != run_settings(work.plan.config):
                raise _other_settings(work.plan.name)

    # --- a run ------------------------------------------------------------------------------------

    async def _do(self, work: Work) -> None:
        """One run, led by this server."""
        plan = work.plan
        run: FederatedRun | None = None
        try:
            run = await asyncio.to_thread(self._made, work, self._leading.leases[plan.name])
            if self._ending or not self._leading.leads:
                raise Stopped
            run.ready = self._router.coming[plan.name]
            self._router.runs[plan.name] = run
            self._known_devices(run)
            self._show_run(plan)
            self.results[plan.name] = await run.go()
        except Stopped:
            raise
        except MyceliaError as error:
            if not _is_lost(error):
                self.board.stopped(plan.name, str(error))
                log("run_stopped", level="error", run=plan.name, hint=error.found)
            raise
        finally:
            self._router.runs.pop(plan.name, None)
            self._router.coming[plan.name].set()
            if run is not None:
                run.folder.close()

    def _known_devices(self, run: FederatedRun) -> None:
        """Those who came before the run was there."""
        for client in self.floor.here:
            entry = self.service.roster.entry(client, int(self.wall()))
            run.connected(client, entry.identity_key)
        self.floor.stir()

    def _made(self, work: Work, lease: Lease) -> FederatedRun:
        plan = work.plan
        settings = run_settings(plan.config)
        if has_run(self._store, plan.name):
            round_log = RoundLog.open(lease, self._blobs)
            if round_log.config != settings:
                raise _other_settings(plan.name)
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
        log("store_away", level="error", reason=problem.reason.value, hint=str(problem))

    def _show_expiries(self) -> None:
        found = expiries(self.service.roster, self.keys.operator)
        self.board.expiries([(f"{each.kind} {each.name}".strip(), each.not_after) for each in found])

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
        """Other servers of the same store have a newer roster, or give the lead back."""
        async for notice in listen(self._store, [ROSTERS, LEASES, RELAYS, STREAMS]):
            if notice.channel in (LEASES, ""):
                self._leading.freed(notice.payload)
            if notice.channel in (RELAYS, "") and notice.payload in (self.keys.name, ""):
                for letters in self._letters():
                    letters.heard()
            if notice.channel in (STREAMS, ""):
                await self._end_older(notice.payload)
            if notice.channel not in (ROSTERS, ""):
                continue
            try:
                newest = await asyncio.to_thread(newest_roster, self._store)
                if newest is not None and newest[0] > self.service.roster.epoch:
                    self.service.renew_roster(newest[1])
                    self._show_expiries()
            except Problem as problem:  # the next connection looks again
                self._store_away(problem)
            except SecureSumError as error:
                log("roster_refused", level="error", hint=str(error))

    def _letters(self) -> list[Letters]:
        following, reach = self._router.following, self._router.reach
        return [] if following is None or reach is None else [following.letters, reach.letters]

    async def _end_older(self, notice: str) -> None:
        """A device has a newer stream, perhaps at another server; all are looked at where none is named."""
        words = {int(word) for word in notice.split()[:1]}
        clients = self.service.connected & words if words else self.service.connected
        if not clients or self._router.following is None:
            return
        try:
            mine = await asyncio.to_thread(streams_of, self._store, self.keys.name)
        except Problem as problem:
            self._store_away(problem)
            return
        for client in clients - mine.keys():
            self.service.end(client, _superseded(client))


def _superseded(client: int) -> Problem:
    return Problem(
        Reason.SUPERSEDED,
        "a newer stream of the same identity, at another server",
        rule="one stream for each identity",
        fix="run one process with an identity folder, and do not copy it",
        who=f"client {client}",
    )


def _is_lost(error: object) -> bool:
    return isinstance(error, Problem) and error.reason is Reason.NOT_LEADER


def _other_settings(run: str) -> ConfigError:
    return ConfigError(
        f"the settings of the run {run!r} are not those it began with",
        rule="a run keeps its settings, so that its record stays true, and all its servers have the same",
        fix="put them back, or give the run another name",
        who="run.name",
    )
