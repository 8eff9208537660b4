"""Rounds whose updates are summed by the machines of the secure sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mycelia.aggregator.attempts import MAX_ATTEMPTS, Suspects
from mycelia.aggregator.secure_plans import SecurePlan
from mycelia.client.secagg import Task
from mycelia.engine import events
from mycelia.engine.algorithms import Message
from mycelia.engine.errors import MyceliaError, RoundAborted
from mycelia.engine.program import Program
from mycelia.engine.rng import derive
from mycelia.engine.schema import model_sha256
from mycelia.engine.sums import Total
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.secagg.canonical import PHASES
from mycelia.privacy.secagg.events import Release
from mycelia.simulations.secure_sum_journals import MemoryJournals
from mycelia.simulations.secure_sum_results import Fault, SecureSumAborted, SecureSumResult
from mycelia.simulations.secure_sum_setup import LATE, PARTIAL, Context, Inputs, Setup
from mycelia.simulations.secure_sums import run_attempts

__all__ = [
    "AFTERWARDS",
    "Packed",
    "SecureRounds",
    "SumFailed",
    "phase_of",
]

AFTERWARDS: Final[Mapping[int, str]] = {6: "agree", 7: "unmask"}
"""Stages of `Fates` behind the upload, as the protocol calls them."""

_BEFORE: Final[Mapping[int, str]] = {1: "advertise", 4: "advertise", 5: "share", 2: "masked", 3: PARTIAL}


def phase_of(stage: int, stays: bool, failed: bool) -> str:
    """Where the protocol sees a client vanish; "" for one that stays to the end.

    Args:
        stage: of `Fates`, or 4 for one whose answer comes too late.
        stays: whether its update was accepted.
        failed: whether it has no update to send.
    """
    if stays:
        return AFTERWARDS.get(stage, "")
    return _BEFORE.get(stage, "masked" if failed else LATE)


class Packed(NamedTuple):
    """What one client hands in: its packed vector [size], and its weight and slots as int64 [1 + slots]."""

    vector: npt.NDArray[Any]
    whole: npt.NDArray[np.int64]


class SumFailed(RoundAborted):
    """There is no sum; `event` says why, and what was tried."""

    def __init__(self, aborted: SecureSumAborted, event: events.SecureSum) -> None:
        super().__init__(aborted.found, rule=aborted.rule, fix=aborted.fix, who=aborted.who)
        self.event, self.reason = event, aborted.reason


class SecureRounds:
    """Makes the sums of a run.

    Args:
        plan: of every round.
        program: the model.
        seed: root seed; keys and rounding come from it, so that a run repeats, and hide nothing from whoever
            has it.
        noise: the secret of the clients' noise.
        charge: called before a sum is opened.
    """

    def __init__(
        self,
        plan: SecurePlan,
        program: Program,
        *,
        seed: int,
        noise: NoiseSource | None = None,
        charge: Callable[[Release], None] | None = None,
    ) -> None:
        self.plan, self._program, self._seed = plan, program, seed
        self._noise, self._charge = noise, charge
        self._suspects = Suspects()

    def failed(self, number: int, asked: Mapping[int, str], reason: str) -> events.SecureSum:
        """What is said of a round that ended before its sum began; arguments as those of `sum`."""
        return self._event(number, asked, failed=reason)

    def sum(
        self,
        number: int,
        message: Message,
        asked: Mapping[int, str],
        packed: Mapping[int, Packed],
    ) -> tuple[Total, tuple[int, ...], events.SecureSum]:
        """The sum of a round.

        Args:
            number: of the round, 0-based.
            message: what clients received.
            asked: everybody asked, and where each vanishes; "" for those who stay to the end.
            packed: what those hand in who come so far.

        Returns:
            The total of the packed updates, the survivors, and what is said of it.

        Raises:
            SumFailed: no sum was opened.
        """
        plan, clients = self.plan, sorted(asked)
        table = np.zeros((len(clients), plan.shape.size), np.float64 if plan.shape.double else np.float32)
        whole = np.zeros((len(clients), 1 + plan.shape.slots), np.int64)
        for place, client in enumerate(clients):
            if client in packed:
                table[place], whole[place] = packed[client]
        weights = [max(1, int(weight)) for weight in whole[:, 0]]  # of those who hand in nothing: unread
        slots = {name: whole[:, column].tolist() for column, name in enumerate(plan.quantise.given, start=1)}
        task = Task(
            bytes.fromhex(model_sha256(_tensors(message))),
            bytes.fromhex(self._program.schema.sha256),
            plan.task_sha256,
            plan.shape.size,
        )
        setup = Setup.of(
            Inputs(
                tuple(client + 1 for client in clients), table, tuple(weights), plan.quantise.bounds, slots
            ),
            plan.settings,
            drops={client + 1: phase for client, phase in asked.items() if phase},
            seed=derive(self._seed, "secure sum", round=number),
            context=Context(round=number, task=task, noise=self._noise, charge=self._charge),
        )
        try:
            found = run_attempts(
                setup, MemoryJournals(), MAX_ATTEMPTS, masks=plan.masks, suspects=self._suspects
            )
        except SecureSumAborted as aborted:
            raise SumFailed(
                aborted,
                self._event(
                    number,
                    asked,
                    failed=str(aborted.reason),
                    attempts=aborted.attempts,
                    faults=_reasons(aborted.faults),
                ),
            ) from aborted
        if not found.exact:  # pragma: no cover - the machines refuse before
            raise MyceliaError("the opened sum is not that of the survivors", who=f"round {number}")
        total = plan.quantise.opened(found.values, found.weight, found.slots, len(found.survivors))
        survivors = tuple(client - 1 for client in found.survivors)
        return total, survivors, self._opened(number, asked, found, total)

    def _opened(
        self, number: int, asked: Mapping[int, str], found: SecureSumResult, total: Total
    ) -> events.SecureSum:
        return self._event(
            number, asked,
            attempts=found.attempts,
            survivors=len(found.survivors),
            faults=_reasons(found.faults),
            phase_ms=dict(found.phase_ms),
            bytes_up=found.bytes_up,
            bytes_down=found.bytes_down,
            upload_bytes=found.upload_bytes,
            share_bytes=found.share_bytes,
            transcript_sha256=found.transcript_sha256,
            clipped=self.plan.quantise.report(total).get("clipped"),
        )  # fmt: skip

    def _event(self, number: int, asked: Mapping[int, str], **more: Any) -> events.SecureSum:
        plan = self.plan
        order = {phase: place for place, phase in enumerate(PHASES)}
        gone = [phase.partition(":")[0] for phase in asked.values() if phase]
        return events.SecureSum(
            round=number + 1, masked=plan.masks, asked=len(asked), n_min=plan.config.n_min,
            dropped=dict(Counter(sorted(gone, key=order.__getitem__))), settings=plan.facts(), **more,
        )  # fmt: skip


def _reasons(faults: Sequence[Fault]) -> dict[str, int]:
    """How many of each reason."""
    return dict(Counter(str(fault.reason) for fault in faults))


def _tensors(message: Message) -> dict[str, Any]:
    """All that a client receives, by name."""
    tensors = {"vector": message.vector}
    tensors |= {f"buffer/{name}": tensor for name, tensor in message.buffers.items()}
    return tensors | {f"extra/{name}": tensor for name, tensor in message.extra.items()}
