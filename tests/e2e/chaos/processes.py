"""Servers and devices in processes of their own, which end with the test whatever happens to it.

They come from a process that has imported what they need, so that a start takes a fraction of a second. Only
tests that are about the installed commands start those.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from mycelia.aggregator import logs, serving
from mycelia.aggregator.log_records import Entry
from mycelia.aggregator.outcomes import DeviceOutcome
from mycelia.aggregator.round_log import RoundLog
from mycelia.aggregator.server_config import load_server_config
from mycelia.aggregator.wire.settings import TaskSettings
from mycelia.client import desk, link, runner, transport
from mycelia.client.config import load_client_config
from mycelia.client.notices import Accepted, Notice
from mycelia.client.training import Job
from tests import forked
from tests.e2e.chaos.federation import one_thread
from tests.e2e.chaos.unruly import unruly

_DIES_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG


# --- in the processes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a server's process finds and leaves things.

    Attributes:
        toml: its configuration.
        log: file that it writes to, with what it says by itself.
        kill_after: it kills itself when so many records of the round log are written; 0: it does not.
        kill_before: the same, with the last of them not written.
    """

    toml: Path
    log: Path
    kill_after: int = 0
    kill_before: bool = False

    @property
    def result(self) -> Path:
        return self.toml.with_name("result.json")

    @property
    def ready(self) -> Path:
        return self.toml.with_name("ready")


def _alone(log: Path) -> None:
    """What a process says goes to a file, and it ends with the one that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ["GRPC_VERBOSITY"] = "NONE"
    one_thread()


def _serve(place: Place) -> None:
    _alone(place.log)
    logs.configure(form="json")
    if place.kill_after:
        RoundLog.append_many = _killing(place.kill_after, place.kill_before)  # type: ignore[method-assign]
    how = serving.Serving(started=lambda started: place.ready.touch())
    results = asyncio.run(serving.serve([load_server_config(place.toml)], how))
    for result in results.values():
        place.result.write_text(json.dumps(result.to_json()))


def _killing(after: int, before: bool) -> Any:
    """Writes records, and ends the process with the one that is said, or just before it."""
    write, written = RoundLog.append_many, 0

    def append_many(
        self: RoundLog, entries: Iterable[Entry], *, settled: Sequence[DeviceOutcome] = ()
    ) -> tuple[bool, ...]:
        nonlocal written
        given = tuple(entries)
        left = after - written
        hit = len(given) >= left
        if hit:
            given = given[: left - before]
        done = write(self, given, settled=settled) if given else ()
        written += len(given)
        if hit:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    return append_many


def _take_part(toml: Path, log: Path, seed: int | None, once: bool, slow_s: float) -> None:
    _alone(log)
    if seed is not None:
        unruly(link, transport, seed)
    if slow_s:
        make = desk.Desk._make

        def slowly(self: desk.Desk, run: str, settings: TaskSettings) -> Job:
            time.sleep(slow_s)
            return make(self, run, settings)

        desk.Desk._make = slowly  # type: ignore[method-assign]

    def listen(notice: Notice) -> None:
        more = f" {notice.at}" if isinstance(notice, Accepted) else ""
        print(f"{time.time() % 1000:.3f} {type(notice).__name__}{more}: {notice}"[:400], flush=True)

    device = runner.Device(load_client_config(toml), listeners=[listen], once=once)
    signal.signal(signal.SIGTERM, lambda number, frame: device.close())
    device.run()


# --- in the test ----------------------------------------------------------------------------------


@dataclass
class Processes:
    """All that a test has started."""

    _running: list[BaseProcess] = field(default_factory=list)
    _commands: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def serve(self, place: Place) -> BaseProcess:
        """A server, from its configuration."""
        place.ready.unlink(missing_ok=True)
        place.result.unlink(missing_ok=True)
        return self._start(_serve, place)

    def take_part(
        self, toml: Path, log: Path, seed: int | None = None, *, once: bool = True, slow_s: float = 0.0
    ) -> BaseProcess:
        """A device; with a seed its frames come twice and in another order.

        Args:
            toml: its configuration.
            log: file that it writes to.
            seed: see above; None: it is as it should be.
            once: whether it ends with the run.
            slow_s: how long it takes to build its model.
        """
        return self._start(_take_part, toml, log, seed, once, slow_s)

    def command(self, *words: str, folder: Path, log: Path) -> subprocess.Popen[bytes]:
        """`mycelia …` as people start it."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "mycelia.cli", *words],
                cwd=folder, stdout=file, stderr=file, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._commands.append(process)
        return process

    def _start(self, target: Callable[..., None], *arguments: object) -> BaseProcess:
        process = forked.process(target, *arguments)
        self._running.append(process)
        return process

    def end(self) -> None:
        """All of them, at once."""
        for process in self._running:
            process.kill()
        for command in self._commands:
            if command.poll() is None:
                os.killpg(command.pid, signal.SIGKILL)
        for process in self._running:
            process.join(10)
            if process.is_alive():
                raise AssertionError(f"process {process.pid} cannot be ended")
        for command in self._commands:
            command.wait(10)
        self._running.clear()
        self._commands.clear()


@contextmanager
def started() -> Iterator[Processes]:
    """What is started in here has ended afterwards."""
    processes = Processes()
    try:
        yield processes
    finally:
        processes.end()


async def ended(process: BaseProcess | subprocess.Popen[bytes], seconds: float) -> int | None:
    """How it ended; None: it runs."""
    until = time.monotonic() + seconds
    while (code := _code(process)) is None and time.monotonic() < until:
        await asyncio.sleep(0.02)
    return code


async def ready(place: Place, process: BaseProcess | subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    """The server listens."""
    async with asyncio.timeout(seconds):
        while not place.ready.exists():
            assert _code(process) is None, f"the server ended\n{place.log.read_text()[-4000:]}"
            await asyncio.sleep(0.02)


def _code(process: BaseProcess | subprocess.Popen[bytes]) -> int | None:
    return process.exitcode if isinstance(process, BaseProcess) else process.poll()
