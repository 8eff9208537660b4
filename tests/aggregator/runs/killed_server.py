"""A server in a process of its own, which kills itself beside a record of its log."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mycelia.aggregator.identity import IDENTITY_KEY, OPERATOR, TLS_CERTIFICATE, TLS_KEY, ServerKeys
from mycelia.aggregator.log_records import Entry, Machine, Published
from mycelia.aggregator.outcomes import DeviceOutcome
from mycelia.aggregator.round_log import RoundLog
from mycelia.aggregator.runs.server import Places, Server, Work
from mycelia.privacy.secagg.private_keys import identity_pem
from tests import forked
from tests.aggregator.connections import World
from tests.aggregator.runs.run_world import PATIENT, RECIPE, plan

RECIPE()  # built once, in the process that the others are forked from


@dataclass(frozen=True)
class Kill:
    """When the server kills itself.

    Attributes:
        kind: of the record, such as "OPEN" or "SA1/U2".
        nth: of this kind.
        before: before it is written, else after.
    """

    kind: str
    nth: int = 1
    before: bool = False


@dataclass(frozen=True)
class Orders:
    """What a process is to do.

    Attributes:
        folder: of its own.
        port: to listen on.
        settings: of the run, as `plan` takes them.
        kill: when it kills itself; None: never.
        store: address of the database; "" for a file in the folder.
        watch: write down how much memory it has after each round.
    """

    folder: Path
    port: int
    settings: dict[str, Any] = field(default_factory=dict)
    kill: Kill | None = None
    store: str = ""
    watch: bool = False


def name_of(entry: Entry) -> str:
    return f"SA1/{entry.kind}" if isinstance(entry, Machine) else entry.KIND


def write_keys(world: World, folder: Path) -> None:
    """What `mycelia enrol server` writes, and the roster."""
    folder.mkdir(mode=0o700)
    keys = world.keys
    files = {
        OPERATOR: (keys.operator.pem, 0o644),
        TLS_KEY: (keys.tls_key_pem, 0o600),
        IDENTITY_KEY: (identity_pem(keys.identity), 0o600),
        TLS_CERTIFICATE: (keys.certificate_pem, 0o644),
        "roster.bin": (world.document(), 0o644),
    }
    for name, (content, mode) in files.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(mode)


def start(orders: Orders) -> BaseProcess:
    return forked.process(serve, orders)


def do_elsewhere(what: Callable[[], None]) -> None:
    """Call something that forks, in a process that is safe to fork: this one has threads of gRPC."""
    process = forked.process(what, daemon=False)
    process.join(60)
    assert process.exitcode == 0


async def ended(process: BaseProcess) -> int | None:
    await asyncio.to_thread(process.join, 620)
    return process.exitcode


def result_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def serve(orders: Orders) -> None:
    """In the process."""
    if orders.kill is not None:
        RoundLog.append_many = _killing(RoundLog.append_many, orders.kill)  # type: ignore[method-assign]
    if orders.watch:
        RoundLog.append_many = _watching(RoundLog.append_many, orders.folder / "memory")  # type: ignore[method-assign]
    (orders.folder / "result.json").unlink(missing_ok=True)
    (orders.folder / "result.json").write_text(json.dumps(asyncio.run(_serve(orders))))


def _killing(write: Callable[..., tuple[bool, ...]], kill: Kill) -> Any:
    seen = 0

    def append_many(
        self: RoundLog, entries: Iterable[Entry], *, settled: Sequence[DeviceOutcome] = ()
    ) -> tuple[bool, ...]:
        nonlocal seen
        given = tuple(entries)
        mine = sum(name_of(entry) == kill.kind for entry in given)
        hit = seen < kill.nth <= seen + mine
        seen += mine
        if hit:
            last = [place for place, entry in enumerate(given) if name_of(entry) == kill.kind][-1]
            given = given[: last + (0 if kill.before else 1)]
        done = write(self, given, settled=settled) if given else ()
        if hit:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    return append_many


def _watching(write: Callable[..., tuple[bool, ...]], path: Path) -> Any:
    pages, size = Path("/proc/self/statm"), os.sysconf("SC_PAGE_SIZE")

    def append_many(self: RoundLog, entries: Iterable[Entry], **more: Any) -> tuple[bool, ...]:
        given = tuple(entries)
        if any(isinstance(entry, Published) for entry in given):
            gc.collect()
            with path.open("a") as file:
                file.write(f"{int(pages.read_text().split()[1]) * size}\n")
        return write(self, given, **more)

    return append_many


async def _serve(orders: Orders) -> dict[str, Any]:
    keys = ServerKeys.open(orders.folder / "keys", None)
    made = plan(**orders.settings)
    places = Places(
        orders.store or f"sqlite:///{orders.folder}/mycelia.db",
        orders.folder / "blobs",
        orders.folder / "own",
    )
    roster, work = (orders.folder / "keys" / "roster.bin").read_bytes(), Work(made, orders.folder / "run")
    server = Server(keys, roster, [work], places, deadlines=lambda plan: PATIENT)
    try:
        await server.start(f"127.0.0.1:{orders.port}")
        async with asyncio.timeout(600 if orders.watch else 35):
            return (await server.run())["study"].to_json()
    finally:
        await server.stop(0.0)
