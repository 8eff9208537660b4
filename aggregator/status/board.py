"""What the server knows about itself, in memory: the one source of page, JSON and metrics."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from mycelia.aggregator.status.devices import Devices
from mycelia.aggregator.status.runs import Run, numbers, phase_name
from mycelia.aggregator.wire.problems import Problem, clipped
from mycelia.aggregator.wire.problems import Reason as WireReason
from mycelia.privacy.secagg.canonical import Reason as SecureSumReason
from mycelia.privacy.secagg.certificates import DAY, urgency

__all__ = ["ROUND_SECONDS", "Board", "Counts"]

ROUND_SECONDS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Upper bounds of the classes that the lengths of rounds are counted in; the last class has none."""

_MOST_RUNS: Final = 16
_MOST_EXPIRIES: Final = 20  # that the page names
_MOST_TEXT: Final = 400  # bytes of an error
_MOST_NAME: Final = 256
_KNOWN_REASONS: Final = frozenset({*WireReason, *SecureSumReason})
_OF_VALUES: Final = frozenset({"NONFINITE", "WEIGHT", "BAD_PAYLOAD", "SCHEMA"})
_CODE: Final = re.compile(r"[A-Z][A-Z_]*")
_NUMBER: Final = re.compile(r"[+-]?(\d[\d.,]*(e[+-]?\d+)?|\b(nan|inf(inity)?)\b)", re.IGNORECASE)
_AFTER: Final = ("evaluate", "deliver", "done")
"""Phases whose tasks are not the round's own: its model is there."""
_KINDS: Final = ("operator", "roster", "server", "client")


@dataclass(slots=True)
class Counts:
    """What only grows.

    Attributes:
        rounds: by result.
        outcomes: by phase and reason; the reason is a known code, or else the status.
        secagg_dropouts: by phase, of secure rounds.
        refused: frames and streams by reason.
        round_classes: rounds by length, see `ROUND_SECONDS`.
        round_seconds: of all rounds together.
        bytes_up: over all streams, from devices.
        bytes_down: over all streams, to devices.
    """

    rounds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    secagg_dropouts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    round_classes: list[int] = field(default_factory=lambda: [0] * (len(ROUND_SECONDS) + 1))
    round_seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0


class Board:
    """Is told what happens, and remembers what a reader wants to know; called from one event loop.

    Memory is bounded: the last 16 runs, 200 rounds of each, and the devices of one roster. Of a single device
    in a run with a secure sum it holds bytes, seconds and outcome only, and no number out of its words.

    Args:
        wall: Unix time in seconds.
        clock: the monotonic clock in which phases end.

    Attributes:
        boot: another one for each start of the server.
        version: grows with each change.
        counts: what only grows.
        insecure: whether the server runs without TLS.
        spool_used: bytes of payloads that are not in the sum yet.
    """

    def __init__(
        self, *, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall, self._clock = wall, clock
        self.boot, self.version = secrets.token_hex(4), 0
        self.counts, self.insecure, self.spool_used = Counts(), False, 0
        self._started = wall()
        self._server: dict[str, Any] = {"name": "", "listen": "", "version": "", "insecure": False}
        self._spool_waiting = 0
        self._runs: dict[str, Run] = {}
        self._devices = Devices()
        self._expiries: list[tuple[str, int]] = []
        self._waiters: set[asyncio.Future[None]] = set()

    # --- what happens -----------------------------------------------------------------------------

    def server(self, name: str, listen: str, version: str, insecure: bool) -> None:
        """The server has started.

        Args:
            name: of the server.
            listen: address for devices.
            version: of the program.
            insecure: without TLS.
        """
        self._server = {"name": name, "listen": listen, "version": version, "insecure": insecure}
        self.insecure = insecure
        self._moved()

    def run_started(
        self,
        run: str,
        *,
        purpose: str,
        algorithm: str,
        model: str,
        rounds: int,
        cohort: int,
        secure: bool,
        privacy_unit: str = "",
    ) -> None:
        """A run begins, or goes on after a restart.

        Args:
            run: its name.
            purpose: that devices are told.
            algorithm: by name.
            model: by name.
            rounds: planned.
            cohort: devices a round.
            secure: whether updates are masked.
            privacy_unit: whom the privacy bound protects; "" for a run without one.
        """
        about = {
            "purpose": clipped(purpose),
            "algorithm": clipped(algorithm),
            "model": clipped(model),
            "rounds": rounds,
            "cohort": cohort,
            "secure": secure,
            "privacy_unit": privacy_unit,
        }
        self._runs.pop(run, None)  # so that it is the newest
        self._new_run(run).about.update(about)
        self._moved()

    def phase(self, run: str, round: int, attempt: int, phase: str, ends_at: float | None) -> None:
        """A round has come to a phase.

        Args:
            run: its name.
            round: from 1.
            attempt: of the round.
            phase: waiting, select, configure, train, agree, unmask, merge, evaluate, done.
            ends_at: on the monotonic clock, in seconds; None for no end.
        """
        mine = self._run(run)
        if (mine.round, mine.attempt) != (round, attempt):
            mine.progress = {}
        mine.round, mine.attempt, mine.phase = round, attempt, phase_name(phase)
        mine.ends_at = None if ends_at is None else self._wall() + ends_at - self._clock()
        self._moved()

    def connected(self, client: int, name: str) -> None:
        """A device is welcome.

        Args:
            client: its id.
            name: for people; "" for none.
        """
        self._devices.here(client, clipped(name, _MOST_NAME), self._wall())
        self._moved()

    def disconnected(self, client: int, problem: Exception | str | None) -> None:
        """Its stream has ended.

        Args:
            client: its id.
            problem: why; None if it was closed, or the connection broke.
        """
        now = self._wall()
        device = self._devices.away(client, now)
        if problem:
            said = f"{problem.reason}: {problem.hint}" if isinstance(problem, Problem) else str(problem)
            code = problem.reason.value if isinstance(problem, Problem) else ""
            device.error, device.error_at = self._words(said, code, run=device.run), now
        self._moved()

    def asked(self, run: str, clients: Iterable[int]) -> None:
        """These devices have got a task in the current round; to evaluate its model does not count."""
        mine = self._run(run)
        if mine.phase in _AFTER:
            return
        for client in clients:
            mine.progress[client] = ""
            device = self._devices.get(client)
            device.run, device.round, device.status, device.phase = run, mine.round, "asked", ""
            device.bytes_up = device.bytes_down = 0
            device.seconds = 0.0
        self._moved()

    def outcome(
        self,
        run: str,
        round: int,
        client: int,
        status: str,
        phase: str = "",
        reason: str = "",
        hint: str = "",
        bytes_up: int = 0,
        bytes_down: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """What became of a device that was asked.

        Args:
            run: its name.
            round: from 1.
            client: the device.
            status: a `Fate`.
            phase: of the round.
            reason: a code, or the device's own words.
            hint: what to do about it.
            bytes_up: from the device.
            bytes_down: to the device.
            seconds: from the task to the outcome.
        """
        mine, phase = self._run(run), phase_name(phase)
        if round == mine.round and phase not in _AFTER:
            mine.progress[client] = status
        device = self._devices.get(client)
        device.run, device.round, device.status, device.phase = run, round, status, phase
        device.bytes_up, device.bytes_down, device.seconds = bytes_up, bytes_down, float(seconds)
        code = _known(reason)
        if status != "ACCEPTED":
            said = ": ".join(filter(None, (reason, hint))) or status
            device.error, device.error_at = self._words(said, code, run=run), self._wall()
        self.counts.outcomes[phase, code or status] += 1
        self._moved()

    def round_ended(
        self,
        run: str,
        round: int,
        *,
        result: Literal["published", "failed"],
        reason: str = "",
        seconds: float = 0.0,
        survivors: int = 0,
        dropped: Mapping[str, int] | None = None,
        metrics: Mapping[str, float] | None = None,
        bytes_up: int = 0,
        bytes_down: int = 0,
    ) -> None:
        """A round is over.

        Args:
            run: its name.
            round: from 1.
            result: whether there is a new model.
            reason: why not.
            seconds: that it took.
            survivors: devices in the sum.
            dropped: devices that dropped out, by phase.
            metrics: of all devices in the sum together.
            bytes_up: from devices.
            bytes_down: to devices.
        """
        mine = self._run(run)
        lost = Counter[str]()
        for phase, count in (dropped or {}).items():
            lost[phase_name(phase)] += count
        mine.history.append(
            {
                "round": round,
                "attempt": mine.attempt,
                "result": result,
                "reason": clipped(reason, _MOST_TEXT),
                "seconds": float(seconds),
                "asked": len(mine.progress) if round == mine.round else 0,
                "survivors": survivors,
                "dropped": dict(lost),
                "metrics": numbers(metrics or {}),
                "bytes_up": bytes_up,
                "bytes_down": bytes_down,
                "at": self._wall(),
            }
        )
        mine.results[result] += 1
        mine.dropped += lost
        mine.bytes_up += bytes_up
        mine.bytes_down += bytes_down
        counts = self.counts
        counts.rounds[result] += 1
        counts.round_classes[bisect_left(ROUND_SECONDS, seconds)] += 1
        counts.round_seconds += seconds
        if mine.secure:
            counts.secagg_dropouts += lost
        self._moved()

    def evaluation(self, run: str, round: int, metrics: Mapping[str, float]) -> None:
        """The model of a round was measured.

        Args:
            run: its name.
            round: from 1.
            metrics: over all that were asked.
        """
        rows = self._run(run).evaluations
        if rows and rows[-1]["round"] == round:
            rows.pop()
        rows.append({"round": round, "metrics": numbers(metrics)})
        self._moved()

    def privacy(self, run: str, epsilon: float, delta: float, budget: float | None, unit: str) -> None:
        """What a run has spent.

        Args:
            run: its name.
            epsilon: so far, an upper bound.
            delta: that it holds with.
            budget: the largest ε of the run; None for no limit.
            unit: whom it protects.
        """
        self._run(run).privacy = {
            **numbers({"epsilon": epsilon, "delta": delta}),
            "budget": None if budget is None or not math.isfinite(budget) else budget,
            "unit": unit,
        }
        self._moved()

    def traffic(self, up: int, down: int) -> None:
        """Bytes over all streams since the start, from devices and to devices."""
        if (up, down) != (self.counts.bytes_up, self.counts.bytes_down):
            self.counts.bytes_up, self.counts.bytes_down = up, down
            self._moved()

    def spool(self, used: int, waiting: int) -> None:
        """Bytes in the spool, and how many payloads wait for room in it."""
        if (used, waiting) != (self.spool_used, self._spool_waiting):
            self.spool_used, self._spool_waiting = used, waiting
            self._moved()

    def refused(self, reason: str) -> None:
        """A frame was refused, or a stream ended, for this reason."""
        self.counts.refused[_known(reason) or "OTHER"] += 1
        self._moved()

    def expiries(self, ends: Iterable[tuple[str, int]]) -> None:
        """When keys and certificates end.

        Args:
            ends: of each, what it is ("operator", "roster 3", "server agg-1", "client 7") and the last second
                of its validity, Unix time.
        """
        self._expiries = sorted(((clipped(who), end) for who, end in ends), key=lambda item: item[1])
        self._moved()

    def finished(self, run: str, model_sha256: str, run_dir: str) -> None:
        """A run has come to its end.

        Args:
            run: its name.
            model_sha256: of the final model, in hexadecimal.
            run_dir: folder with its record.
        """
        mine = self._run(run)
        mine.state, mine.phase, mine.ends_at = "finished", "done", None
        mine.model_sha256, mine.run_dir = model_sha256, str(run_dir)
        self._moved()

    def stopped(self, run: str, error_text: str) -> None:
        """A run has ended before its time; the text says why."""
        mine = self._run(run)
        mine.state, mine.phase, mine.ends_at = "stopped", "done", None
        mine.error = clipped(error_text, 4 * _MOST_TEXT)
        self._moved()

    # --- what a reader wants to know ----------------------------------------------------------------

    def snapshot(self, page: int = 1) -> dict[str, Any]:
        """All of it as plain JSON, runs from the newest to the oldest; not to be changed.

        Args:
            page: of the devices, 100 each; a number beyond the last gives the last.
        """
        now = self._wall()
        counts = self.counts
        return {
            "v": 1,
            "boot": self.boot,
            "version": self.version,
            "now": now,
            "server": {**self._server, "started": self._started},
            "runs": [run.snapshot() for run in reversed(self._runs.values())],
            "devices": self._devices.page(page),
            "rounds": {"published": counts.rounds["published"], "failed": counts.rounds["failed"]},
            "traffic": {"up": counts.bytes_up, "down": counts.bytes_down},
            "spool": {"used": self.spool_used, "waiting": self._spool_waiting},
            "refused": dict(counts.refused),
            "expiries": self._urgent(now),
        }

    async def changed(self, after: int, timeout_s: float) -> int:
        """Wait until there is news.

        Args:
            after: the version that is known.
            timeout_s: seconds to wait at most.

        Returns:
            The version then; `after` or less if there was none.
        """
        if self.version <= after:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=timeout_s)
            finally:
                self._waiters.discard(waiter)
        return self.version

    def now(self) -> float:
        """Unix time in seconds, as the board reads it."""
        return self._wall()

    def phases(self) -> list[tuple[str, str]]:
        """Name and phase of each run."""
        return [(run.name, run.phase) for run in self._runs.values()]

    def epsilons(self) -> list[tuple[str, float]]:
        """Name and ε of each run that has spent some."""
        return [(run.name, float(run.privacy["epsilon"])) for run in self._runs.values() if run.privacy]

    def devices_connected(self) -> int:
        """How many streams are open."""
        return self._devices.connected

    def seconds_left(self) -> dict[str, float]:
        """Until the first of each kind (operator, roster, server, client) ends; below 0 if it has."""
        left: dict[str, float] = {}
        now = self._wall()
        for who, end in self._expiries:  # soonest first
            kind = who.partition(" ")[0]
            left.setdefault(kind if kind in _KINDS else "other", end - now)
        return left

    # --- within -------------------------------------------------------------------------------------

    def _run(self, name: str) -> Run:
        return self._runs.get(name) or self._new_run(name)

    def _new_run(self, name: str) -> Run:
        if len(self._runs) >= _MOST_RUNS:
            over = (run.name for run in self._runs.values() if run.state != "running")
            del self._runs[next(over, next(iter(self._runs)))]
        about = {"purpose": "", "algorithm": "", "model": "", "rounds": 0, "cohort": 0, "secure": False}
        self._runs[name] = Run(name, self._wall(), {**about, "privacy_unit": ""})
        return self._runs[name]

    def _urgent(self, now: float) -> dict[str, Any]:
        """What ends within 30 days: the first ones by name, and how many there are."""
        near = [(who, end, urgency(end, int(now))) for who, end in self._expiries if end - now <= 31 * DAY]
        near = [item for item in near if item[2]]
        return {
            "count": len(near),
            "first": [
                {"who": who, "not_after": end, "urgency": how} for who, end, how in near[:_MOST_EXPIRIES]
            ],
        }

    def _words(self, said: str, code: str, *, run: str) -> str:
        """Words about one device; in a run with a secure sum without numbers that may be values of it."""
        mine = self._runs.get(run)
        if mine is not None and mine.secure and (not code or code in _OF_VALUES):
            said = re.sub(
                r"[+-]?(\d[\d.,]*(e[+-]?\d+)?|\b(nan|inf(inity)?)\b)", "#", said, flags=re.IGNORECASE
            )
        return clipped(said, _MOST_TEXT)

    def _moved(self) -> None:
        self.version += 1
        if self._waiters:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters.clear()


def _known(reason: str) -> str:
    """The code that a reason begins with, if there is such a one; what devices say is no code."""
    found = _CODE.match(reason)
    return found[0] if found is not None and found[0] in _KNOWN_REASONS else ""
