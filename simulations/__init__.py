"""Whole federations without a network: populations, partitions, behaviour, backends, scenarios.

Names are imported when they are first used: a worker process needs few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mycelia.simulations.result import SimulationResult
    from mycelia.simulations.scenario import Scenario, load_scenario, scenario_names
    from mycelia.simulations.secure_sums import SecureSumAborted, SecureSumResult, secure_sum
    from mycelia.simulations.simulator import resume, simulate

__all__ = [
    "Scenario",
    "SecureSumAborted",
    "SecureSumResult",
    "SimulationResult",
    "load_scenario",
    "resume",
    "scenario_names",
    "secure_sum",
    "simulate",
]

_HOMES = {
    "Scenario": "scenario",
    "SecureSumAborted": "secure_sums",
    "SecureSumResult": "secure_sums",
    "SimulationResult": "result",
    "load_scenario": "scenario",
    "resume": "simulator",
    "scenario_names": "scenario",
    "secure_sum": "secure_sums",
    "simulate": "simulator",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
