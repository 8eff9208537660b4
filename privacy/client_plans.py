"""Noise that clients add themselves: what a `[privacy]` block comes to for each, wherever it trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from mycelia.engine.errors import ConfigError
from mycelia.engine.local import LocalWork
from mycelia.privacy.accounting import epsilon
from mycelia.privacy.budget import Budget
from mycelia.privacy.calibrate import calibrate
from mycelia.privacy.client_ledgers import FOLDER, ClientLedgers
from mycelia.privacy.client_steps import PrivateSteps
from mycelia.privacy.clip import ClipFunction, PerLayer, QuantileClip
from mycelia.privacy.config import PrivacyConfig
from mycelia.privacy.events import Event
from mycelia.privacy.federated import ClipUpdate, LocalNoise, RecordRelease
from mycelia.privacy.noise.base import Mechanism
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.pipeline import Pipeline, Stage
from mycelia.privacy.sampling import FullBatch, MinSep, Poisson, Sampler

__all__ = ["ClientPlan", "check_first", "plan_clients"]

_SPREAD = 8.0  # standard deviations of local noise that an entry of an update has room for


@dataclass(frozen=True)
class ClientPlan:
    """Noise of the clients: each has an ε, a ledger and a budget of its own.

    Attributes:
        config: the block.
        clip: the clip function, of an update or of an example's gradient.
        sampler: `FullBatch` for updates, `Poisson` for examples.
        noise_multiplier: z, as given or as the budget allows over all rounds of a client.
        updates: releases of a client in a round.
        expected_batch: the public number that a sum over examples is divided by.
        affordable: rounds that the budget of a client pays for.
        limits: how often a client may take part.
    """

    config: PrivacyConfig
    clip: ClipFunction | PerLayer
    sampler: FullBatch | Poisson
    noise_multiplier: float
    updates: int
    expected_batch: float
    affordable: int
    limits: MinSep

    @property
    def mechanism(self) -> Mechanism:
        """The noise."""
        return self.config.noise()

    @property
    def event(self) -> Event:
        """What a client releases in a round, as its ledger has it but for the step."""
        return _event(self.config, self.sampler, self.noise_multiplier, self.updates, self.clip)

    def work(self, work: LocalWork) -> LocalWork:
        """The local work, as many steps for every client where examples are the unit."""
        return work if self.config.unit == "client" else replace(work, epochs=1, steps=self.updates)

    def clipping(self) -> Stage | None:
        """What clients do to their updates before they noise them."""
        if self.config.unit == "client" and isinstance(self.clip, ClipFunction):
            return ClipUpdate(self.clip)
        return None

    def ledgers(self, folder: Path, source: NoiseSource) -> ClientLedgers:
        """The clients' ledgers in a run folder."""
        whose = "local, each client's own" if self.config.unit == "client" else "each client's own"
        return ClientLedgers(folder / FOLDER, f"{whose}; {source.note}")

    def pipeline(self, source: NoiseSource, ledgers: ClientLedgers) -> Pipeline:
        """What clients do to what they send."""
        record = RecordRelease(ledgers, self.event, self.limits.uses)
        clipping = self.clipping()
        if clipping is None:
            return Pipeline((record,))
        noise = LocalNoise(self.mechanism, source, self.noise_multiplier, self.clip.sensitivity())
        return Pipeline((clipping, noise, record))

    def steps(self, source: NoiseSource) -> PrivateSteps | None:
        """The local steps, where they are private."""
        if not isinstance(self.sampler, Poisson):
            return None
        return PrivateSteps(
            self.clip, self.noise_multiplier, self.sampler, self.updates, self.expected_batch,
            self.mechanism, source,
        )  # fmt: skip


def plan_clients(
    config: PrivacyConfig, work: LocalWork, *, clients: int, examples: int, rounds: int, max_abs: float
) -> ClientPlan:
    """Sampler, noise and limits of clients that add their noise themselves.

    Args:
        config: the block.
        work: local work, as the algorithm adjusted it.
        clients: how many there are.
        examples: of all of them together, which is public where they are the unit; 0: unknown.
        rounds: that are planned.
        max_abs: bound on an entry of an update.

    Raises:
        ConfigError: settings that contradict each other.
        OutOfReach: no noise reaches the budget.
    """
    clip = config.clip_function()
    if isinstance(clip, QuantileClip):  # the configuration has refused it
        raise ConfigError("a quantile", rule="a client clips to a fixed bound", who="clip")
    sampler: FullBatch | Poisson
    if config.unit == "client":
        sampler, updates, expected = FullBatch(), 1, 0.0
    else:
        if not examples:
            raise ConfigError(
                "nobody knows how many examples there are",
                rule="a step's sum is divided by the public mean number of examples it draws",
                fix="say how many examples all clients hold together: run.examples",
                who="privacy",
            )
        mean = examples / clients
        rate = config.sampling_rate or min(1.0, (work.batch_size or mean) / mean)
        sampler, expected = Poisson(rate), rate * mean
        updates = work.steps or math.ceil(work.epochs / rate - 1e-9)
    most = config.participation.uses or rounds
    z = config.noise_multiplier
    if z is None:
        z = calibrate(
            sampler, delta=config.delta, epsilon=config.epsilon, steps=updates * most, unit=config.unit,
            relation=_relation(config),
        ).value  # fmt: skip
    event = _event(config, sampler, z, updates, clip)
    check_first(config, sampler, z, updates, event.relation)
    budget = Budget(config.epsilon, config.delta, config.unit, event.relation)
    affordable = budget.remaining(replace(event, count=1)) // updates
    spread = _SPREAD * z * clip.sensitivity().total
    if config.unit == "client" and spread > max_abs:
        raise ConfigError(
            f"update.max_abs is {max_abs:g}, and local noise goes to {spread:.4g}",
            rule="an update is not refused for its noise",
            fix=f"set update.max_abs to {spread:.4g} or more, or lower the clip bound",
            who="privacy",
        )
    limits = MinSep(min(affordable, most), config.participation.separation or 1)
    return ClientPlan(config, clip, sampler, z, updates, expected, affordable, limits)


def _event(
    config: PrivacyConfig, sampler: Sampler, z: float, updates: int, clip: ClipFunction | PerLayer
) -> Event:
    """What a client releases in a round."""
    return sampler.events(
        z, updates, unit=config.unit, relation=_relation(config), clip=clip.sensitivity().bound,
        mechanism=config.noise().name,
    )[0]  # fmt: skip


def _relation(config: PrivacyConfig) -> str | None:
    """What a client sends by itself could have been anything; an example is there or not."""
    return "replace-one" if config.unit == "client" else None


def check_first(
    config: PrivacyConfig, sampler: Sampler, z: float, updates: int, relation: str | None
) -> None:
    """Refuse a budget that cannot pay for the first round."""
    found = epsilon(sampler, z, updates, config.delta, unit=config.unit, relation=relation).epsilon
    if found > config.epsilon:
        what = "the run" if isinstance(sampler, MinSep) and sampler.sensitivity else "the first round"
        raise ConfigError(
            f"noise_multiplier = {z:g} gives {what} ε {found:.4g}, and the budget is {config.epsilon:g}",
            rule="the budget pays for what is planned",
            fix="leave noise_multiplier out, so that it is chosen for the budget, or raise epsilon",
            who="privacy",
        )
