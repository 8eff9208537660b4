"""Scenarios: a federation, its population and how it is run, from a file or by a built-in name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from mycelia.aggregator.config import FederationConfig
from mycelia.engine.config import Named, Strict, load_config, nearest
from mycelia.engine.data.examples import Examples
from mycelia.engine.errors import ConfigError
from mycelia.simulations import partitioners
from mycelia.simulations.behaviour import Behaviour
from mycelia.simulations.dealing import partition
from mycelia.simulations.partitioners import Partitioner
from mycelia.simulations.population import Population

__all__ = [
    "BackendConfig",
    "PartitionConfig",
    "PopulationConfig",
    "Scenario",
    "load_scenario",
    "scenario_names",
]


class PopulationConfig(Strict):
    """How many clients, and how much each holds."""

    clients: Annotated[int, Field(ge=0)] = 100
    """0: all those of a natural partition."""
    examples_per_client: Annotated[int, Field(ge=0)] = 0
    """0: all examples are dealt out."""
    overlap: bool = False
    """Whether each client draws its examples from all, so that there can be more clients than data."""


class PartitionConfig(Named):
    """The partitioner, its options, and what clients keep for testing."""

    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of its examples, rounded down, that a client keeps for testing; 0: it is measured on a sample of
    the common test set with the same labels."""

    def build(self) -> Partitioner:
        """The partitioner."""
        return partitioners.build(self.name, **self.options)


class BackendConfig(Named):
    """Where clients train."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["inline", "workers", "batched", "ray", "flower"]
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Processes; 0: one per core."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """What is planned but not built, and workers where there are none."""
        if self.name not in {"inline", "workers"}:
            yield "name", f"'{self.name}' is not available in this version; use workers or inline"
        if self.name == "inline" and self.workers:
            yield "workers", "the inline backend has none; use the workers backend"


class Scenario(FederationConfig):
    """Everything that `simulate` is told."""

    unavailable: ClassVar[frozenset[str]] = frozenset({"adversary"})

    population: PopulationConfig = PopulationConfig()
    partition: PartitionConfig = PartitionConfig(name="iid")
    backend: BackendConfig = BackendConfig(name="workers")
    behaviour: Behaviour = Behaviour()
    defence: Named | None = None
    """A name of `attacks/defences/local.py`, with its options; clients train on attacked inputs. An algorithm
    of one's own has to train by `LocalTrainer.run`."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Contradictions between the cohort, the population, the partition, and how clients train."""
        yield from super().conflicts()
        if self.defence is not None:
            yield from self._defence_conflicts(self.defence)
        people, n = self.population, self.population.clients
        if self.behaviour.dropout.secure and self.secure_sum is None:
            yield (
                "behaviour.dropout",
                "sharing, agree and unmask are phases of a secure sum; add [secure_sum]",
            )
        if n and self.cohort > n:
            yield "cohort", f"{self.cohort} clients a round, but population.clients is {n}"
        if n == 0 and self.partition.name != "natural":
            yield "population.clients", "0 means all clients of a natural partition; give a number"
        if people.overlap and not people.examples_per_client:
            yield (
                "population.examples_per_client",
                "0 would give every client all examples; set it for overlap",
            )
        if people.overlap and self.partition.name not in {"iid", "dirichlet"}:
            yield "population.overlap", "only iid and dirichlet partitions can overlap"
        if people.examples_per_client and self.partition.name == "quantity":
            yield "population.examples_per_client", "a quantity partition decides the sizes itself; use 0"
        try:
            rule = self.partition.build()
        except ConfigError as error:
            yield "partition", "; ".join(filter(None, (error.found, error.rule, error.fix)))
            return
        fewest = getattr(rule, "min_size", 0)
        if 0 < people.examples_per_client < fewest:
            yield "partition.min_size", f"{fewest} is more than population.examples_per_client"

    def _defence_conflicts(self, block: Named) -> Iterable[tuple[str, str]]:
        from mycelia.attacks.defences.local import wrong_with_local

        yield from wrong_with_local(block)
        if self.privacy is not None and self.privacy.unit == "example":
            yield (
                "defence",
                "a client's private step is on its examples as they are, and on attacked ones there is none; "
                "take out [defence] or [privacy]",
            )
        if self.algorithm.name == "scaffold" and self.algorithm.options.get("option") == "I":
            yield (
                "algorithm.option",
                "option I takes gradients at the examples as they are, and clients train on attacked ones; "
                "use II",
            )

    def populate(self, examples: Examples) -> Population:
        """The population over a training set.

        Raises:
            ConfigError: the cohort is larger than a natural population.
            DataError: too few examples, or a client without any.
        """
        made = partition(
            self.partition.build(),
            examples,
            self.population.clients,
            seed=self.seed,
            per_client=self.population.examples_per_client,
            overlap=self.population.overlap,
            test_fraction=self.partition.test_fraction,
        )
        if self.cohort > made.clients:
            found = f"{self.cohort} clients a round of {made.clients} in the data"
            raise ConfigError(found, fix="lower the cohort", who="cohort")
        return Population(made, self.behaviour, self.seed)


def scenario_names() -> list[str]:
    """The built-in scenarios."""
    folder = files("mycelia.simulations") / "scenarios"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def load_scenario(scenario: str, overrides: Sequence[str] = ()) -> Scenario:
    """A built-in scenario by name, or one from a TOML file.

    Args:
        scenario: a name, or a path: what ends in .toml or has a separator in it.
        overrides: `key=value` each, as in `load_config`.

    Raises:
        ConfigError: no such scenario or file, or a setting is wrong.
    """
    if scenario.endswith(".toml") or os.sep in scenario or "/" in scenario:
        return load_config(Scenario, Path(scenario), overrides)
    names = scenario_names()
    if scenario not in names:
        fix = f"{nearest(scenario, names)}; a file's name ends in .toml"
        raise ConfigError(f"there is no scenario '{scenario}'", fix=fix, who="scenario")
    return load_config(
        Scenario, Path(str(files("mycelia.simulations") / "scenarios" / f"{scenario}.toml")), overrides
    )
