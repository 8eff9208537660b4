"""Workload S1 on Flower's simulation engine (flwr with Ray), one actor of one CPU per core.

The default is the population as Flower means it: a supernode for each client. The engine looks through all
supernodes for messages ten times a second, so `--supernodes 50` (as many as a round needs; each then acts for
whichever client its message names, and Flower no longer knows the population) takes less time.
"""

from __future__ import annotations

import os

import measure
from measure import Clock

DESCRIPTION = "Workload S1 on Flower's simulation engine with Ray."
_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    """Runs the command line. Ray starts within the first round, whose excess therefore counts as start-up."""
    parser = measure.command_line(DESCRIPTION)
    parser.add_argument("--supernodes", type=int, help="nodes; by default one per client")
    parser.add_argument("--pull-interval", type=float, default=0.02, help="seconds between looks for answers")
    asked = parser.parse_args()
    settings = measure.settings_from(asked)
    supernodes = asked.supernodes or settings.clients
    if supernodes < settings.cohort:
        parser.error(f"--supernodes has to be at least the cohort, {settings.cohort}")
    os.environ.update(_ENVIRONMENT)
    from flower_server import simulate  # Flower reads the environment when it is imported

    clock = Clock()
    model = simulate(settings, clock, supernodes, asked.pull_interval)
    figures = measure.result("flwr", settings, clock, model, supernodes=supernodes)
    figures["startup_seconds"] += figures["first_round_excess_seconds"]
    measure.emit(figures)


if __name__ == "__main__":
    main()
