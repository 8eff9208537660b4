"""What a simulation found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["SimulationResult"]


@dataclass(frozen=True)
class SimulationResult:
    """What a simulation found; the keys of `--format json`.

    Attributes:
        rounds: rounds done, failed ones included.
        failed_rounds: rounds that ended without a new model.
        seconds_total: wall-clock seconds over all sittings, start-up included.
        seconds_startup: of the last sitting, from the call to the first round.
        seconds_per_round: mean from select to merge without the first round, evaluation apart.
        sgd_steps_per_second: local steps of the survivors by the time of those rounds.
        simulated_seconds: length of the run on the simulated clock.
        test_accuracy: share of right answers on the test set; None for regression. Where clients have models
            of their own it is the mean over clients, weighted by examples.
        test_loss: mean loss, likewise.
        worst_decile_accuracy: mean accuracy of the worst tenth of the clients.
        bytes_up: sent by clients, over all rounds.
        bytes_down: received by clients, over all rounds.
        epsilon: spent, an upper bound for what was revealed about one unit, the largest where clients have
            budgets of their own; None: the run was not private.
        delta: δ of that bound; None: the run was not private.
        privacy: all that ε depends on, and where clients have budgets of their own, how it is distributed
            over them; None: the run was not private.
        stopped_by: "budget" where the next round could not be paid for, "participation" where too few clients
            were left that may take part, else "".
        plan: how local steps ran.
        model_sha256: hash of the final parameters and buffers.
        partition_sha256: hash of who holds what.
        run_dir: the run folder.
        backend: its name.
        workers: number of processes that trained.
    """

    rounds: int
    failed_rounds: int
    seconds_total: float
    seconds_startup: float
    seconds_per_round: float
    sgd_steps_per_second: float
    simulated_seconds: float
    test_accuracy: float | None
    test_loss: float
    worst_decile_accuracy: float | None
    bytes_up: int
    bytes_down: int
    epsilon: float | None
    delta: float | None
    privacy: dict[str, Any] | None
    stopped_by: str
    plan: str
    model_sha256: str
    partition_sha256: str
    run_dir: str
    backend: str
    workers: int

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON can say them."""
        return asdict(self)
