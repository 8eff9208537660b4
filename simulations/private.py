"""How a run keeps a scenario's `[privacy]` block: stages for the update, a ledger, a budget that stops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mycelia.engine.algorithms import Algorithm
from mycelia.engine.errors import BudgetExceeded, ConfigError
from mycelia.engine.events import Privacy
from mycelia.engine.sums import SumFormat
from mycelia.privacy.budget import Budget
from mycelia.privacy.calibrate import calibrate
from mycelia.privacy.config import PrivacyConfig
from mycelia.privacy.events import Event
from mycelia.privacy.federated import ClipUpdate, ServerNoise, rounding_slack
from mycelia.privacy.ledger import FILE, Head, Ledger
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.pipeline import Pipeline
from mycelia.privacy.sampling import FixedSize, Poisson, Sampler

__all__ = ["Guard", "PrivatePlan", "plan_privacy"]

_KEY = "noise.key"


@dataclass(frozen=True)
class PrivatePlan:
    """What a `[privacy]` block comes to for one population.

    Attributes:
        config: the block.
        sampler: how cohorts are drawn, as it is accounted.
        noise_multiplier: z, as given or as the budget allows over all rounds.
        expected: the public number the sum is divided by.
    """

    config: PrivacyConfig
    sampler: Sampler
    noise_multiplier: float
    expected: float

    def device(self) -> Pipeline:
        """What clients do to their updates."""
        return Pipeline((ClipUpdate(self.config.clip_function()),))

    def whole(self, form: SumFormat, source: NoiseSource) -> Pipeline:
        """What clients and the server do."""
        sensitivity = rounding_slack(self.config.clip_function().sensitivity(), form)
        noise = ServerNoise(self.config.noise(), source, self.noise_multiplier, sensitivity, self.expected)
        return Pipeline((*self.device().stages, noise))

    def event(self, round: int) -> Event:
        """One round as the ledger has it."""
        return self.sampler.events(
            self.noise_multiplier, 1, first_step=round, unit="client",
            clip=self.config.clip_function().bound, mechanism=self.config.noise().name,
        )[0]  # fmt: skip


def plan_privacy(
    config: PrivacyConfig, algorithm: Algorithm, *, selector: str, cohort: int, clients: int, rounds: int
) -> PrivatePlan:
    """Sampler and noise of a private run.

    Args:
        config: the `[privacy]` block.
        algorithm: has to be linear, with every client of the same weight.
        selector: name of the selector: "poisson" or "uniform".
        cohort: clients a round, the expected number under Poisson.
        clients: size of the population, which is public.
        rounds: rounds that are planned, for which noise is calibrated.

    Raises:
        ConfigError: the algorithm or the selector has no bound.
        OutOfReach: no noise reaches the budget.
    """
    if not algorithm.linear or algorithm.pooled:
        raise ConfigError(
            f"the algorithm {algorithm.name}",
            rule="user-level privacy needs a sum of updates that are clipped one by one",
            fix="use a linear algorithm such as fedavg or fedadam",
            who="privacy",
        )
    weighting = getattr(algorithm, "weighting", "uniform")
    if weighting != "uniform":
        raise ConfigError(
            f"algorithm.weighting = {weighting!r}",
            rule="every client has weight 1: its number of examples is private",
            fix='set weighting = "uniform" in the algorithm',
            who="privacy",
        )
    sampler: Sampler
    if selector == "poisson":
        sampler = Poisson(cohort / clients)
    elif selector == "uniform":
        sampler = FixedSize(cohort, clients)
    else:
        raise ConfigError(
            f"the selector {selector}",
            rule="it needs a sampler with a bound",
            fix="use poisson, or uniform for a fixed cohort",
            who="privacy",
        )
    z = config.noise_multiplier
    if z is None:
        z = calibrate(sampler, delta=config.delta, epsilon=config.epsilon, steps=rounds, unit="client").value
    return PrivatePlan(config, sampler, z, float(cohort))


class Guard:
    """The ledger and the budget of one sitting of a run.

    Args:
        plan: what is released a round.
        folder: the run folder, where the ledger and the key of the noise are.
        seed: root seed, for a seeded source.
        head: where the checkpoint of a run that goes on says its ledger was; None for a new run.

    Raises:
        DataError: the ledger or the key of a run that goes on is missing or was changed.
    """

    def __init__(self, plan: PrivatePlan, folder: Path, seed: int, head: Head | None) -> None:
        self.plan = plan
        config = plan.config
        if config.noise_source == "seeded":
            self.source = NoiseSource.seeded(seed)
        elif head is None:
            self.source = NoiseSource.os()
            self.source.save(folder / _KEY)
        else:
            self.source = NoiseSource.load(folder / _KEY)
        if head is None:
            self.ledger = Ledger.create(folder / FILE, self.source.note)
        else:
            self.ledger = Ledger.load(folder / FILE, head, write=True)
        self.budget = Budget(
            config.epsilon, config.delta, "client", plan.sampler.relation, ledger=self.ledger
        )

    def affordable(self, round: int) -> bool:
        """Whether the budget pays for this round; one that was released before and is done again is free."""
        if round < self.ledger.steps:
            return True
        try:
            self.budget.allow(self.plan.event(round))
        except BudgetExceeded:
            return False
        return True

    def release(self, round: int, inputs: str) -> None:
        """Write the round down, before its sum is noised and published.

        Args:
            round: its number.
            inputs: hash of the model the clients started from: with the same streams it gives the same sum.

        Raises:
            BudgetExceeded: the budget cannot pay for it.
        """
        event = self.plan.event(round)
        if round >= self.ledger.steps:
            self.budget.allow(event)
        self.ledger.record(event, inputs)  # which knows a release that is done again after a stop

    def reading(self, round: int) -> Privacy:
        """The event that says what is spent after so many rounds."""
        return replace(self.budget.gauge(self.plan.event(round)), round=round)

    def last_reading(self, round: int) -> Privacy:
        """The same at the end of the run, with everything that ε depends on."""
        said = str(self.ledger.statement(self.budget.delta))
        return replace(self.reading(round), statement=said)

    def head(self) -> list[Any]:
        """What a checkpoint keeps of the ledger."""
        self.ledger.sync()
        return [self.ledger.head.lines, self.ledger.head.hash]

    def close(self) -> None:
        """Let go of the ledger's file."""
        self.ledger.close()
