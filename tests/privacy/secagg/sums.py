"""Small secure sums whose journals a test can look at, and change while a server is down."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.events import Record
from mycelia.simulations.secure_sum_journals import FileJournals, Journals, MemoryJournals, Sink
from mycelia.simulations.secure_sum_setup import Inputs, Setup
from mycelia.simulations.secure_sums import SecureSumAborted, SecureSumResult, run_attempts

VECTORS = np.arange(24).reshape(6, 4)
SETTINGS = SecureSumConfig(n_min=4, corrupt=0.2, dropout=0.2)


class DamagedJournals(FileJournals):
    """Something happens to the server's file between its stop and its restart."""

    def __init__(self, folder: Path, clients: range, damage: Callable[[Path], None]) -> None:
        super().__init__(folder, clients)
        self._damage = damage

    def resume(self, session_id: bytes) -> tuple[Sink, list[Record]]:
        self._damage(self._folder / "server" / f"{session_id.hex()}.journal")
        return super().resume(session_id)


def run_sum(
    journals: Journals | None = None,
    vectors: np.ndarray = VECTORS,
    config: SecureSumConfig = SETTINGS,
    attempts: int = 1,
    **named: object,
) -> SecureSumResult | SecureSumAborted:
    """A secure sum, or why there is none."""
    setup = Setup.of(Inputs.of(vectors, None, None, None), config, **named)  # type: ignore[arg-type]
    try:
        return run_attempts(setup, journals or MemoryJournals(), attempts)
    except SecureSumAborted as error:
        return error
