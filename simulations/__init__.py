"""Whole federations without a network: populations, partitions, behaviour, backends, scenarios."""

from __future__ import annotations

from mycelia.simulations.scenario import Scenario, load_scenario, scenario_names
from mycelia.simulations.simulate import SimulationResult, resume, simulate

__all__ = ["Scenario", "SimulationResult", "load_scenario", "resume", "scenario_names", "simulate"]
