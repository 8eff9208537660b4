"""Workload S1 on Flower's simulation engine (flwr with Ray), one actor of one CPU per core."""

from __future__ import annotations

import os

import measure
from measure import Clock

_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Runs the command line."""
    settings = measure.parse(__doc__.splitlines()[0])
    os.environ.update(_QUIET)
    from flower_server import simulate  # noqa: PLC0415 - Flower reads the environment when it is imported

    clock = Clock()
    nodes = int(os.environ.get("NODES", settings.clients))
    model = simulate(settings, clock, supernodes=nodes, pull_interval=float(os.environ.get("PULL", "0.1")))
    measure.emit(measure.result("flwr", settings, clock, model))


if __name__ == "__main__":
    main()
