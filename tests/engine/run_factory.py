"""Run folders with known contents, written event by event at given times."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mycelia.engine import events as e
from mycelia.engine.run import Run

START = 1_700_000_000.0
CONFIG = 'model = "mlp"\ndata = "digits"\nalgorithm = "fedavg"\nrounds = 20\n\n[local]\nlr = 0.1\n'


def write_run(
    path: Path, events: Iterable[e.Event], *, config: str = CONFIG, command: str = "simulate"
) -> Path:
    with Run.create(path, command, config) as run:
        for event in events:
            run.log(event)
    return path


def started(**changes: object) -> e.RunStarted:
    values: dict[str, object] = {
        "t": START,
        "command": "simulate",
        "config": {"model": "mlp", "data": "digits", "algorithm": "fedavg", "local": {"lr": 0.1}},
        "seed": 7,
        "environment": {"versions": {"python": "3.11.7", "torch": "2.13.0"}, "machine": {"cores": 2}},
        "plan": "eager",
        "data_sha256": "d" * 64,
        "partition_sha256": "a" * 64,
        "total": 20,
    }
    return e.RunStarted(**(values | changes))  # type: ignore[arg-type]


def simulated_run(rounds: int = 20, clients: int = 100, *, end: bool = True) -> list[e.Event]:
    """A federation as `mycelia simulate` records it; one round takes 2 seconds."""
    rng = np.random.default_rng(3)
    shares = rng.dirichlet([0.3] * 10, clients)
    matrix = np.rint(shares * rng.lognormal(2.6, 0.5, (clients, 1))).astype(int).T
    sizes = matrix.sum(axis=0)
    log: list[e.Event] = [
        started(total=rounds),
        e.Partition(
            "dirichlet",
            clients,
            sizes.tolist(),
            [str(label) for label in range(10)],
            matrix.tolist(),
            {"total_variation": 0.61, "size_gini": 0.33},
            t=START + 0.5,
        ),
        e.WarningRaised("client 17 has one example and no test set", "partition", t=START + 0.5),
        e.Evaluation({"accuracy": 0.1, "loss": 2.303}, round=0, t=START + 1),
    ]
    for round in range(1, rounds + 1):
        t = START + 1 + 2 * round
        accuracy = 0.95 - 0.85 * math.exp(-round / 4)
        asked = [int(client) for client in rng.choice(clients, min(12, clients), replace=False)]
        outcomes = [e.Outcome(client) for client in asked]
        if round % 3 == 0:
            outcomes[0] = e.Outcome(
                asked[0], 1, "dropped", "train", "the device went offline", "raise over_select"
            )
        if round % 5 == 0:
            outcomes[1] = e.Outcome(
                asked[1], 2, "rejected", "merge", "the update is not finite", "lower local.lr"
            )
        if round % 2 == 0:
            outcomes[2] = e.Outcome(asked[2], 1, "unused", "train", "the cohort was complete")
        log += [
            e.Evaluation(
                {"accuracy": accuracy, "loss": 2.3 * math.exp(-round / 5) + 0.2}, round=round, t=t - 0.2
            ),
            e.Round(
                round,
                {
                    "select": 0.01,
                    "configure": 0.05,
                    "train": 1.4 + 0.3 * rng.random(),
                    "merge": 0.04,
                    "evaluate": 0.3,
                },
                {"asked": 12, "accepted": 10},
                {"accuracy": accuracy + 0.03, "loss": 2.1 * math.exp(-round / 4), "update_norm": 3 / round},
                bytes_up=2_100_000,
                bytes_down=2_520_000,
                simulated_seconds=40 + 20 * rng.random(),
                t=t,
            ),
            e.Outcomes(round, outcomes, t=t),
            e.Privacy(0.8 * math.sqrt(round), 1e-5, "client", round=round, t=t),
            e.SystemLoad(310_000_000 + 40_000 * round, 330_000_000, 520_000_000, round=round, t=t),
        ]
        if round % 5 == 0:
            per_client = np.clip(rng.normal(accuracy, 0.12, clients), 0, 1)
            log.append(
                e.Spread(
                    {"accuracy": per_client.tolist()}, list(range(clients)), sizes.tolist(), round=round, t=t
                )
            )
        log.append(e.CheckpointSaved(round, f"checkpoints/step-{round:08d}", t=t))
    if end:
        log.append(e.RunFinished(result(rounds), t=START + 2 * rounds + 2))
    return log


def result(rounds: int = 20, **changes: object) -> dict[str, object]:
    return {
        "rounds": rounds,
        "seconds_total": 2.0 * rounds + 2,
        "seconds_per_round": 1.61,
        "sgd_steps_per_second": 412.0,
        "test_accuracy": 0.944,
        "test_loss": 0.242,
        "worst_decile_accuracy": 0.731,
        "bytes_up": 2_100_000 * rounds,
        "bytes_down": 2_520_000 * rounds,
        "epsilon": None,
        "delta": None,
        "model_sha256": "c0ffee" * 10 + "abcd",
        "run_dir": "runs/example",
        "backend": "workers",
        "workers": 2,
    } | changes


def trained_run(epochs: int = 5, steps: int = 40, *, end: bool = True) -> list[e.Event]:
    """A central training as `mycelia train` records it; one step takes 0.1 seconds."""
    log: list[e.Event] = [started(command="train", total=epochs * steps, unit="step", partition_sha256="")]
    for step in range(1, epochs * steps + 1):
        t = START + 0.1 * step
        log.append(e.Scalars(step, {"loss": 2.3 * math.exp(-step / 60), "lr": 0.1 * 0.99**step}, t=t))
        if step % steps == 0:
            log.append(
                e.Evaluation(
                    {"accuracy": 1 - math.exp(-step / 50), "loss": 2.3 * math.exp(-step / 70)}, step=step, t=t
                )
            )
    log.append(e.Histogram("gradient norm", epochs * steps, [0, 1, 2, 3, 4], [5, 40, 12, 3], t=t))
    if end:
        final = {
            "epochs": epochs,
            "steps": epochs * steps,
            "train_loss": 0.08,
            "test_loss": 0.13,
            "test_accuracy": 0.98,
        }
        log.append(e.RunFinished(final, t=t + 0.1))
    return log
