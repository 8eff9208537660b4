"""What a secure sum in one process gives: the sum and what it took, or why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mycelia.aggregator.grpc_status import status_code
from mycelia.engine.errors import RoundAborted
from mycelia.privacy.secagg.messages import Reason, SecureSumError

__all__ = ["Fault", "SecureSumAborted", "SecureSumResult"]

_NONE: Final[Mapping[Any, Any]] = MappingProxyType({})


class Fault(NamedTuple):
    """A message that was refused, or a client that left.

    Attributes:
        code: the gRPC status that a service answers with.
        reason: the code of the protocol.
        phase: in which it happened, or "".
        client: who sent or left.
        owner: whose secret it was about.
    """

    code: str
    reason: Reason
    phase: str
    client: int | None
    owner: int | None

    @classmethod
    def of(cls, error: SecureSumError) -> Fault:
        """From an error."""
        return cls(status_code(error), error.reason, error.phase, error.client, error.owner)


@dataclass(frozen=True, eq=False, kw_only=True)
class SecureSumResult:
    """An opened sum, and what it took.

    Attributes:
        total: the exact sum of weight times code, int64 [d].
        values: the sum of weight times vector, float64 [size].
        mean: the weighted mean, float64 [size].
        weight: the sum of the weights.
        slots: the sums of the slots.
        survivors: who is in it, increasing.
        faults: messages refused and clients that left, in all attempts.
        released: owner to (shares of b, shares of s) that left honest clients in the last session.
        exact: whether `total`, weight and slots are the plain sums over the survivors.
        transcript_sha256: hash of the session, in hexadecimal; "" without masks.
        client_ms: CPU time inside the machine of a survivor, the median.
        server_ms: CPU time inside the server machine.
        upload_bytes: header and vector of one client.
        share_bytes: the `Shares` message of one client.
        bytes_up: all that clients sent in the last attempt.
        bytes_down: all that the server sent in it.
        phase_ms: wall time of each phase.
        attempts: how many it took.
        insecure_rng: whether keys and noise came from a seed, and the sum is therefore not secret.
        masked: whether there were masks.
        charged: session ids that a ledger was charged for, in hexadecimal.
    """

    total: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    weight: int
    slots: Mapping[str, int]
    survivors: tuple[int, ...]
    faults: tuple[Fault, ...]
    released: Mapping[int, tuple[int, int]]
    exact: bool
    transcript_sha256: str
    client_ms: float
    server_ms: float
    upload_bytes: int
    share_bytes: int
    bytes_up: int
    bytes_down: int
    phase_ms: Mapping[str, float]
    attempts: int
    insecure_rng: bool
    masked: bool
    charged: tuple[str, ...]


class SecureSumAborted(RoundAborted):
    """No sum was opened.

    Attributes:
        reason: the code of the protocol.
        phase: in which it ended.
        have: how many there were.
        need: how many there had to be.
        owner: whose secret it was about.
        clients: who did not answer, left or is to blame, increasing.
        faults: messages refused and clients that left, in all attempts.
        released: as in `SecureSumResult`.
        attempts: how many were made.
    """

    def __init__(
        self,
        error: SecureSumError,
        clients: Iterable[int] = (),
        faults: tuple[Fault, ...] = (),
        released: Mapping[int, tuple[int, int]] = _NONE,
        attempts: int = 1,
    ) -> None:
        super().__init__(error.found, rule=error.rule, fix=error.fix, who=error.who)
        self.reason, self.phase = error.reason, error.phase
        self.have, self.need, self.owner = error.have, error.need, error.owner
        self.clients, self.faults = tuple(sorted(clients)), faults
        self._error = error
        self.released, self.attempts = dict(released), attempts

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild across process boundaries with the same numbers."""
        arguments = (self._error, self.clients, self.faults, self.released, self.attempts)
        return (SecureSumAborted, arguments)
