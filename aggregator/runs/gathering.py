"""What either kind of round is to the run around it: devices' words go in, a sum or a reason comes out."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mycelia.aggregator.effects import AbortReason
from mycelia.aggregator.outcomes import DeviceOutcome
from mycelia.aggregator.runs.context import Context, Stopped
from mycelia.aggregator.spool import Spooled
from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.position import Position
from mycelia.engine.errors import MyceliaError
from mycelia.engine.events import SecureSum
from mycelia.engine.sums import ExactSum, Total

__all__ = ["Failure", "Gathered", "Gathering", "Stopped"]


class Failure(MyceliaError):
    """A round without a sum.

    Attributes:
        reason: as the log has it.
        outcomes: of the devices that were asked.
        again: whether the same round may be tried again.
        secure: what is said of the secure sum.
    """

    def __init__(
        self,
        reason: AbortReason,
        found: str,
        outcomes: Sequence[DeviceOutcome],
        *,
        again: bool = True,
        secure: SecureSum | None = None,
    ) -> None:
        super().__init__(found, rule="a round has its quorum of sound updates", who="round")
        self.reason: AbortReason = reason
        self.outcomes, self.again, self.secure = tuple(outcomes), again, secure


@dataclass
class Gathered:
    """A round's sum.

    Attributes:
        survivors: whose updates they are, increasing.
        sums: loss_sum, examples, steps over the survivors, as far as anybody may know them.
        snapshot: hash of the blob with the sum, which the log is about to freeze; None: a secure sum, which
            is in the log by itself, or nobody came.
        attempt: the newest of the round.
        secure: what is said of the secure sum.
        exact: the sum of a plain round.
        opened: that of a secure one.
    """

    survivors: tuple[int, ...]
    exact: ExactSum | None = None
    opened: Total | None = None
    sums: Mapping[str, float] = field(default_factory=dict)
    snapshot: bytes | None = None
    attempt: int = 0
    secure: SecureSum | None = None

    @property
    def total(self) -> Total:
        """The sum of the updates, decoded: twice as large as a model of float32."""
        if self.exact is not None:
            return ExactSum.total(self.exact.form, [self.exact.accumulator], self.exact.count)
        if self.opened is None:
            raise MyceliaError("a round without a sum", who="round")
        return self.opened


class Gathering(ABC):
    """Devices work, and what they send comes together.

    All that happens goes through one queue, in order; the methods that devices' words arrive by only look,
    and never change anything.

    Args:
        context: of the run.
        at: the position of the first attempt.

    Attributes:
        issued: those who were asked, as the log has it, and the attempt of each.
        finished: those who know already what became of their work.
        blobs: hashes of what lies among the blobs for this round alone.
    """

    def __init__(self, context: Context, at: Position) -> None:
        self.context, self.at = context, at
        self.queue: asyncio.Queue[object] = asyncio.Queue()
        self.bytes_up: dict[int, int] = {}
        self.bytes_down: dict[int, int] = {}
        self.asked_at: dict[int, float] = {}
        self.issued: dict[int, int] = {}
        self.finished: set[int] = set()
        self.blobs: list[bytes] = []

    # --- what devices say -------------------------------------------------------------------------

    @abstractmethod
    def held(self, client: int) -> Iterable[pb.Held]:
        """What there is of a device's work, for its Welcome."""

    @abstractmethod
    def connected(self, client: int) -> None:
        """A device is here again: what it was sent is sent again, as far as it counts."""

    @abstractmethod
    def frame(self, client: int, frame: pb.ClientFrame) -> None:
        """It says Ready, Decline, or something of the secure sum."""

    @abstractmethod
    def offered(self, client: int, offer: pb.Offer) -> None:
        """It offers a payload. Raises `Problem` if that is not wanted."""

    def payload(self, client: int, payload: Spooled) -> None:
        """A payload that was offered is complete."""
        self.queue.put_nowait((client, payload))

    def gone(self, client: int, problem: Problem) -> None:
        """A device was revoked, and takes no more part."""
        self.queue.put_nowait((client, problem))

    def turned_away(self, client: int, at: Position, problem: Problem) -> None:
        """Another server has refused what the device sent; it sends no other one."""
        del client, at, problem  # of what is only asked for, nobody need know

    async def release_all(self) -> None:
        """It is over: payloads that nobody has looked at are given back."""
        while not self.queue.empty():
            match self.queue.get_nowait():
                case (int(), Spooled() as payload):
                    await self.context.service.release(payload)

    # --- for those below --------------------------------------------------------------------------

    def note_asked(self, clients: Iterable[int], bytes_down: int) -> None:
        """So much was sent to these."""
        for client in clients:
            self.asked_at.setdefault(client, self.context.clock())
            self.bytes_down[client] = self.bytes_down.get(client, 0) + bytes_down

    def settled(
        self, client: int, attempt: int, status: str, phase: str = "", cause: str = "", hint: str = ""
    ) -> DeviceOutcome:
        """An outcome, with bytes and seconds."""
        began = self.asked_at.get(client)
        return DeviceOutcome(
            client,
            attempt,
            status,  # type: ignore[arg-type]
            phase,
            cause,
            hint,
            self.bytes_up.get(client, 0),
            self.bytes_down.get(client, 0),
            0.0 if began is None else self.context.clock() - began,
        )

    async def next(self, deadline: float | None) -> object | None:
        """What happens next; None: nothing until the deadline.

        Raises:
            Stopped: the run is to stop.
        """
        if self.context.stopping.is_set():
            raise Stopped
        timeout = None if deadline is None else max(0.0, deadline - self.context.clock())
        try:
            async with asyncio.timeout(timeout):
                found = await self.queue.get()
        except TimeoutError:
            return None
        if self.context.stopping.is_set():
            raise Stopped
        return found

    def wrong_position(self, at: Position, newest: int) -> Problem | None:
        """Why something at this position is not wanted now; None if it is of this round.

        Args:
            at: where it says it belongs.
            newest: attempt of the round.
        """
        mine = (self.at.round, newest)
        if at.round == self.at.round and self.at.attempt <= at.attempt <= newest:
            return None
        if (at.round, at.attempt) < mine:
            return Problem(
                Reason.STALE_ROUND,
                f"work of {at}",
                rule=f"the run is at round {self.at.round}",
                fix="take the next task",
                who="position",
            )
        return Problem(
            Reason.WRONG_PHASE,
            f"work of {at}",
            rule=f"the run is at round {self.at.round}",
            fix="wait for its task",
            who="position",
        )
