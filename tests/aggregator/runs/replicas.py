"""Servers that share a PostgreSQL database, each in a process of its own, and devices that know them all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sqlalchemy import select

from mycelia.aggregator import leases
from mycelia.aggregator.deadlines import Deadlines
from mycelia.aggregator.identity import ServerKeys
from mycelia.aggregator.identity_certificates import server_certificate
from mycelia.aggregator.log_records import Entry
from mycelia.aggregator.outcomes import DeviceOutcome
from mycelia.aggregator.round_log import RoundLog
from mycelia.aggregator.runs import leading
from mycelia.aggregator.runs.gathering import Stopped
from mycelia.aggregator.runs.server import Places, Server, Work
from mycelia.aggregator.store import Store
from mycelia.aggregator.tables import outcomes, releases, round_log
from mycelia.client.identity import DeviceIdentity
from mycelia.client.transport import Transport
from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.certificates import DAY, Certificate, tls_sha256
from mycelia.privacy.secagg.keys import Identity
from mycelia.privacy.secagg.private_keys import certificate_pem, new_tls_key, tls_pem
from mycelia.privacy.secagg.roster import Roster, ServerEntry
from tests import forked
from tests.aggregator.connections import NOW, World
from tests.aggregator.runs.killed_server import Kill, name_of, write_keys
from tests.aggregator.runs.run_world import PATIENT, Dummy, Quick, plan

SHORT_LEASE_S = 2.5
_SOCKET = ".s.PGSQL.5432"


class Servers(World):
    """An operator with several servers; `world.named[…]` are worlds of which each speaks as one of them."""

    def __init__(self, count: int) -> None:
        super().__init__("agg-1")
        self.named = {"agg-1": self.keys}
        self.entries = [self.server]
        for number in range(2, count + 1):
            self._add(f"agg-{number}")

    def _add(self, name: str) -> None:
        tls, identity = new_tls_key(), Identity.generate()
        since, until = NOW - DAY, NOW + 30 * DAY
        der = server_certificate(
            self.operator, name, tls.public_key(), ["localhost"], [ip_address("127.0.0.1")], since, until
        )
        self.entries.append(
            ServerEntry(name, identity.public, since, NOW + 90 * DAY, tls_sha256(tls.public_key()))
        )
        certificate = Certificate.read(der, self.operator.public)
        self.named[name] = ServerKeys(
            name, certificate, self.pinned, identity, tls_pem(tls), certificate_pem(der)
        )

    def document(self) -> bytes:
        clients = tuple(self.clients[client] for client in sorted(self.clients))
        return Roster(self.epoch, NOW + 90 * DAY, clients, tuple(self.entries), self.revoked).sign(
            self.operator
        )

    def write_keys(self, name: str, folder: Path) -> None:
        before, self.keys = self.keys, self.named[name]
        try:
            write_keys(self, folder)
        finally:
            self.keys = before


@dataclass(frozen=True)
class Trigger(Kill):
    """What the server does to itself beside a record.

    Attributes:
        signal: that it sends itself.
    """

    signal: int = signal.SIGKILL


@dataclass(frozen=True)
class Replica:
    """What a process is to do.

    Attributes:
        folder: of its own, with its keys.
        port: to listen on.
        store: address of the database.
        blobs: folder that all share; None: rows.
        settings: of the run, as `plan` takes them.
        trigger: what it does to itself; None: nothing.
        lease_s: how long leases last.
        deadlines: of a round.
    """

    folder: Path
    port: int
    store: str
    blobs: Path | None
    settings: dict[str, Any] = field(default_factory=dict)
    trigger: Trigger | None = None
    lease_s: float = SHORT_LEASE_S
    deadlines: Deadlines = PATIENT


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def start(replica: Replica) -> BaseProcess:
    return forked.process(serve, replica)


async def ended(process: BaseProcess, seconds: float = 60.0) -> int | None:
    await asyncio.to_thread(process.join, seconds)
    return process.exitcode


async def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """What another process does; it says so in no other way."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.02)


def terms(folder: Path) -> list[float]:
    """When the server of this folder began to lead, Unix time."""
    path = folder / "terms"
    return [float(line) for line in path.read_text().split()] if path.exists() else []


def result_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def know_all(device: Dummy, ports: Sequence[int]) -> Dummy:
    """The same device with the addresses of all servers."""
    addresses = [f"127.0.0.1:{port}" for port in ports]
    device.transport = Transport(addresses, device.identity, device._place, dice=Quick())
    return device


def devices(
    kind: type[Dummy], ports: Sequence[int], identities: Iterable[DeviceIdentity], made: Any
) -> list[Dummy]:
    return [know_all(kind(ports[0], identity, made), ports) for identity in identities]


def facts(url: str) -> dict[str, Any]:
    """What is in the store."""
    store = Store.open(url)
    try:
        with store.read() as connection:
            kinds = Counter(connection.scalars(select(round_log.c.kind)).all())
            fences = connection.scalars(select(round_log.c.fence).order_by(round_log.c.number)).all()
            rows = connection.execute(select(outcomes)).all()
            charged = connection.execute(select(releases.c.round, releases.c.attempt)).all()
    finally:
        store.close()
    return {
        "kinds": kinds,
        "fences": list(fences),
        "statuses": Counter(row.status for row in rows),
        "charged": [tuple(each) for each in charged],
    }


def serve(replica: Replica) -> None:
    """In the process."""
    leases.LEASE_S = replica.lease_s  # type: ignore[misc]
    leading.RENEW_S = 0.3 * replica.lease_s  # type: ignore[misc]
    if replica.trigger is not None:
        RoundLog.append_many = _triggered(RoundLog.append_many, replica.trigger)  # type: ignore[method-assign]
    try:
        (replica.folder / "result.json").write_text(json.dumps(asyncio.run(_serve(replica))))
    except Stopped:
        pass
    except ConfigError as error:
        (replica.folder / "error").write_text(str(error))
        raise SystemExit(3) from None


def _triggered(write: Callable[..., tuple[bool, ...]], trigger: Trigger) -> Any:
    seen = 0

    def append_many(
        self: RoundLog, entries: Iterable[Entry], *, settled: Sequence[DeviceOutcome] = ()
    ) -> tuple[bool, ...]:
        nonlocal seen
        given = tuple(entries)
        mine = sum(name_of(entry) == trigger.kind for entry in given)
        hit = seen < trigger.nth <= seen + mine
        seen += mine
        if hit and trigger.before:
            os.kill(os.getpid(), trigger.signal)
        done = write(self, given, settled=settled)
        if hit and not trigger.before:
            os.kill(os.getpid(), trigger.signal)
        return done

    return append_many


async def _serve(replica: Replica) -> dict[str, Any]:
    keys = ServerKeys.open(replica.folder / "keys", None)
    made = plan(**replica.settings)
    places = Places(replica.store, replica.blobs, replica.folder / "own")
    server = Server(
        keys, (replica.folder / "keys" / "roster.bin").read_bytes(), [Work(made, replica.folder / "run")],
        places, deadlines=lambda plan: replica.deadlines,
    )  # fmt: skip
    lead = server._term

    async def term() -> bool:
        with (replica.folder / "terms").open("a") as file:
            file.write(f"{time.time()}\n")
        return await lead()

    rest = server._rest

    async def lost() -> None:
        await rest()
        (replica.folder / "lost").touch()

    server._term, server._rest = term, lost  # type: ignore[method-assign]
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.halt)
    try:
        await server.start(f"127.0.0.1:{replica.port}")
        (replica.folder / "up").touch()
        async with asyncio.timeout(55):
            return (await server.run())["study"].to_json()
    finally:
        await server.stop(0.0)


class Wire:
    """Carries bytes between one server and PostgreSQL's Unix socket, until it is held.

    Attributes:
        folder: in which the socket looks like PostgreSQL's own.
        open: whether bytes go on; new connections are taken all the same, and nobody answers.
    """

    def __init__(self, folder: Path, url: str) -> None:
        folder.mkdir()
        self.folder, self.open = folder, asyncio.Event()
        self.open.set()
        self._far = Path(url.partition("host=")[2]) / _SOCKET
        self.url = url.partition("host=")[0] + f"host={folder}"
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_unix_server(self._carry, self.folder / _SOCKET)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.open.set()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted connections are closed at the next turn of the loop

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        try:
            await self.open.wait()
            far_reader, far_writer = await asyncio.open_unix_connection(self._far)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as pipes:
                pipes.create_task(self._pipe(reader, far_writer))
                pipes.create_task(self._pipe(far_reader, writer))
        finally:
            for each in writers:
                each.transport.abort()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                await self.open.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()  # which ends the other direction
