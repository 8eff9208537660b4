"""What a scenario's `[privacy]` block comes to: who adds how much noise, and what that is accounted as.

| block | noise | what ε is about |
|---|---|---|
| unit "client", selector poisson or uniform | of the server, afresh each round | secret draws of cohorts |
| unit "client", selector cyclic-poisson | of the server, banded if asked for | secret draws, groups in turn |
| unit "client", another selector or a `factorisation` | of the server, correlated (DP-FTRL) | one release |
| unit "client", `model = "local"` | of each client, on what it sends | each client's rounds |
| unit "client", `model = "distributed"` | of the clients, in shares (`noise_shares`) | secret draws |
| unit "example" | of each client, in its local steps (DP-SGD) | each client's steps |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mycelia.aggregator.config import FederationConfig
from mycelia.aggregator.noise_shares import Make, SharePlan, plan_shares
from mycelia.aggregator.rounds import asked_for
from mycelia.engine.algorithms import ALGORITHMS, Algorithm
from mycelia.engine.errors import ConfigError
from mycelia.engine.local import LocalWork
from mycelia.engine.program import Program
from mycelia.engine.sums import SumFormat
from mycelia.privacy.calibrate import calibrate
from mycelia.privacy.client_plans import ClientPlan, check_first, plan_clients
from mycelia.privacy.clip import ClipFunction, PerLayer, QuantileClip, Sensitivity
from mycelia.privacy.config import PrivacyConfig
from mycelia.privacy.events import Event
from mycelia.privacy.factorisation import BLT, Banded, CorrelatedNoise, Plan, Strategy, fitted, planned
from mycelia.privacy.federated import (
    AdaptiveClip,
    ClipUpdate,
    FactorisedNoise,
    ServerNoise,
    rounding_slack,
)
from mycelia.privacy.noise.base import Mechanism
from mycelia.privacy.noise.discrete_gaussian import DiscreteGaussian
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.pipeline import Pipeline, Stage
from mycelia.privacy.sampling import CyclicPoisson, FixedSize, MinSep, Poisson, Sampler

__all__ = ["ServerPlan", "describe", "plan_privacy"]


@dataclass(frozen=True)
class ServerPlan:
    """Noise of the server: ε is about the whole run, and the same for every client.

    Attributes:
        config: the block.
        clip: the clip function of an update.
        sampler: how cohorts come about, as it is accounted.
        noise_multiplier: z, as given or as the budget allows over all rounds.
        expected: the public expected number of clients in a round.
        rounds: that are planned.
        strategy: how the noise is correlated over the rounds; None: not at all.
        mean_weight: the public mean of the clients' weights; a sum is divided by `expected` times that.
    """

    config: PrivacyConfig
    clip: ClipFunction | QuantileClip
    sampler: Sampler
    noise_multiplier: float
    expected: float
    rounds: int
    strategy: Strategy | None = None
    mean_weight: float = 1.0

    @property
    def limits(self) -> MinSep | None:
        """How often a client may take part; None where a secret draw decides."""
        return self.sampler if isinstance(self.sampler, MinSep) else None

    @property
    def mechanism(self) -> Mechanism:
        """The noise."""
        noise = self.config.noise()
        if self.strategy is not None and isinstance(noise, DiscreteGaussian):
            return replace(noise, sampler="rounded")
        return noise

    @property
    def sensitivity(self) -> Sensitivity:
        """How far one client can move the sum, but for rounding; at its start where the bound moves."""
        own = Sensitivity(self.clip.bound)
        return own if self.config.weight_max is None else own.weighted(self.config.weight_max)

    def clipping(self) -> Stage:
        """What clients do to their updates."""
        if isinstance(self.clip, QuantileClip):
            return AdaptiveClip(self.clip, self.config.weight_max)
        return ClipUpdate(self.clip, self.config.weight_max)

    def pipeline(self, form: SumFormat, source: NoiseSource) -> Pipeline:
        """What clients and the server do."""
        adaptive = self.clip if isinstance(self.clip, QuantileClip) else None
        sensitivity = rounding_slack(self.sensitivity, form)
        noise: Stage
        if self.strategy is None:
            noise = ServerNoise(
                self.mechanism, source, self.noise_multiplier, sensitivity, self.expected, adaptive,
                self.mean_weight,
            )  # fmt: skip
        else:
            bound, size = sensitivity.total, sum(spec.size for spec in form.specs.values())
            std = self.noise_multiplier * (bound + self.mechanism.slack(bound, size))
            rows = CorrelatedNoise(self.strategy, self.rounds, std, mechanism=self.mechanism, bound=bound)
            noise = FactorisedNoise(rows, source, self.expected, self.mean_weight)
        return Pipeline((self.clipping(), noise))

    def event(self, round: int, bound: float) -> Event:
        """One round as the ledger has it, with the clip bound in force."""
        return self.sampler.events(
            self.noise_multiplier, 1, first_step=round, unit="client", clip=bound,
            mechanism=self.mechanism.name,
        )[0]  # fmt: skip


def plan_privacy(
    scenario: FederationConfig,
    algorithm: Algorithm,
    program: Program,
    work: LocalWork,
    *,
    cohort: int,
    clients: int,
    examples: int,
    make: Make,
    sizes: NDArray[np.int64] | None = None,
) -> ServerPlan | ClientPlan | SharePlan | None:
    """Sampler, noise and limits of a private run; None without a `[privacy]` block.

    Args:
        scenario: the settings.
        algorithm: bound to the population.
        program: the model and its loss.
        work: local work, as the algorithm adjusted it.
        cohort: clients a round aims for, the expected number under Poisson.
        clients: how many there are, which is public.
        examples: training examples of all of them together, which is public; 0: unknown.
        make: the secure sum that holds noise in shares.
        sizes: training examples of each client, for a block that says they are public; None: nobody has them.

    Raises:
        ConfigError: the algorithm has no bound, or settings contradict each other.
        OutOfReach: no noise reaches the budget.
    """
    config = scenario.privacy
    if config is None:
        return None
    _check_algorithm(config, algorithm, program)
    if config.in_shares and scenario.secure_sum is not None:
        corrupt = int(scenario.secure_sum.corrupt * cohort + 1e-9)
        return plan_shares(
            config, make, cohort=cohort, clients=clients, rounds=scenario.rounds, corrupt=corrupt
        )
    if config.unit == "client" and config.model == "central":
        return _server_plan(scenario, config, cohort, clients, sizes)
    return plan_clients(
        config, work, clients=clients, examples=examples, rounds=scenario.rounds,
        max_abs=scenario.update.max_abs,
    )  # fmt: skip


def _server_plan(
    scenario: FederationConfig,
    config: PrivacyConfig,
    cohort: int,
    clients: int,
    sizes: NDArray[np.int64] | None,
) -> ServerPlan:
    clip, rounds = config.clip_function(), scenario.rounds
    if isinstance(clip, PerLayer):  # the configuration has refused it
        raise ConfigError("a bound for each layer", rule="an update is clipped as a whole", who="clip")
    sampler: Sampler
    strategy = None
    if not scenario.secret_draw:
        sampler, strategy = _factorised(scenario, config, cohort, clients)
    elif scenario.selector.name == "cyclic-poisson":
        sampler, strategy = _cyclic(scenario, config, cohort, clients)
    elif scenario.selector.name == "poisson":
        sampler = Poisson(cohort / clients)
    else:
        sampler = FixedSize(cohort, clients)
    z = config.noise_multiplier
    if z is None:
        z = calibrate(sampler, delta=config.delta, epsilon=config.epsilon, steps=rounds, unit="client").value
    check_first(config, sampler, z, 1, None)
    if isinstance(clip, QuantileClip):
        clip.gradient_multiplier(z, float(cohort))  # refuses a z that the count alone exceeds
    weight = 1.0
    if config.weight_max is not None:
        if sizes is None:
            raise ConfigError(
                f"privacy.weight_max = {config.weight_max:g}, and sizes of clients are unknown",
                rule="a sum with capped weights is divided by their public mean",
                fix='leave weight_max out and set weighting = "uniform" in the algorithm',
                who="privacy",
            )
        weight = float(np.minimum(sizes, config.weight_max).mean())
    return ServerPlan(config, clip, sampler, z, float(cohort), rounds, strategy, weight)


def _cyclic(
    scenario: FederationConfig, config: PrivacyConfig, cohort: int, clients: int
) -> tuple[CyclicPoisson, Strategy | None]:
    """Draws from groups in turn, with the sensitivity of banded noise where that is asked for."""
    sampler = CyclicPoisson(cohort / clients, int(scenario.selector.options["groups"]))
    strategy = config.strategy()
    if strategy is None:
        return sampler, None
    if isinstance(strategy, Banded) and config.factorisation and "band" not in config.factorisation.options:
        # one use each: a client is back when its noise is forgotten
        strategy = fitted(strategy, Plan(scenario.rounds))
    found = planned(strategy, sampler, scenario.rounds).sampler
    return replace(sampler, sensitivity=found.sensitivity), strategy


def _factorised(
    scenario: FederationConfig, config: PrivacyConfig, cohort: int, clients: int
) -> tuple[MinSep, Strategy]:
    """The limits on taking part, with the sensitivity of the factorisation that was fitted to them."""
    rounds, asked = scenario.rounds, asked_for(cohort, scenario.round)
    # left out: half of the longest that leaves enough clients, so that many may be out of reach
    separation = config.participation.separation or max(1, clients // (2 * cohort))
    plan = Plan(rounds, config.participation.uses or rounds, separation)
    if (separation - 1) * cohort + asked > clients:
        raise ConfigError(
            f"participation.separation is {separation} with {asked} clients asked of {clients}",
            rule="those who took part lately leave enough others",
            fix=f"use separation = {max(1, (clients - asked) // cohort + 1)} or less, or a smaller cohort",
            who="privacy",
        )
    if plan.possible * clients < rounds * cohort:
        raise ConfigError(
            f"{clients} clients with {plan.possible} uses each, for {rounds} rounds of {cohort}",
            rule="the clients' uses last for all rounds",
            fix=f"set participation.uses to {-(-rounds * cohort // clients)} or more, or fewer rounds",
            who="privacy",
        )
    strategy = config.strategy() or BLT()
    given = config.factorisation.options if config.factorisation else {}
    if not {"scales", "band"} & given.keys():
        strategy = fitted(strategy, plan)
    return MinSep(plan.possible, separation, strategy.sensitivity(plan)), strategy


def _check_algorithm(config: PrivacyConfig, algorithm: Algorithm, program: Program) -> None:
    """Refuse an algorithm that releases what no noise covers."""
    found = _whole_refusal(algorithm, program) if config.unit == "client" else _example_refusal(algorithm)
    weighting = getattr(algorithm, "weighting", "uniform")
    if found is None and config.weight_max is None and weighting != "uniform":
        raise ConfigError(
            f"algorithm.weighting = {weighting!r}",
            rule="every client has weight 1: its number of examples is private",
            fix='set weighting = "uniform" in the algorithm',
            who="privacy",
        )
    if found is None and config.weight_max is not None and weighting != "examples":
        raise ConfigError(
            f"privacy.weight_max = {config.weight_max:g}, and every client has weight 1",
            rule="a cap is on weights by numbers of examples",
            fix='set weighting = "examples" in the algorithm, or leave weight_max out',
            who="privacy",
        )
    if found is not None:
        rule, fix = found
        raise ConfigError(f"the algorithm {algorithm.name}", rule=rule, fix=fix, who="privacy")


def _whole_refusal(algorithm: Algorithm, program: Program) -> tuple[str, str] | None:
    """Why clients' updates cannot be protected as a whole, and what to do; None where they can."""
    if not algorithm.linear or algorithm.pooled:
        return (
            "user-level privacy needs a sum of updates that are clipped one by one",
            "use a linear algorithm such as fedavg or fedadam",
        )
    if algorithm.name == "fednova":
        return (
            "it weighs updates by their number of steps, which is private and has no bound",
            "use fedavg with local.steps, so that all clients step alike",
        )
    if algorithm.name == "local-only":
        return "nothing that is trained is released, so there is nothing to protect", "take [privacy] out"
    if getattr(algorithm, "adaptive", False):
        return _LOSS
    if {"buffers", "counters"} & algorithm.terms(program).keys():
        return (
            "noise would spoil the running statistics and counters of the model",
            "use GroupNorm in the place of BatchNorm (mycelia.privacy.fix), or the algorithm fedbn",
        )
    return None


def _example_refusal(algorithm: Algorithm) -> tuple[str, str] | None:
    """Why clients' examples cannot be protected, and what to do; None where they can."""
    if ALGORITHMS.get(algorithm.name) is not type(algorithm):
        return (
            "its client half could send what the noise of the local steps does not cover",
            'use an algorithm of Mycelia, or unit = "client", where the whole update is clipped',
        )
    if algorithm.name == "local-only":
        return "it releases its training loss, which has no noise", "use fedavg"
    if getattr(algorithm, "adaptive", False):
        return _LOSS
    if getattr(algorithm, "option", "") == "I":
        return "option I sends a gradient that is neither clipped nor noised", 'set option = "II"'
    return None


_LOSS = ("its adaptive μ follows the clients' training loss, which has no noise", "set adaptive = false")


def describe(plan: ServerPlan | ClientPlan) -> dict[str, Any]:
    """The plan's settings for reports."""
    strategy = plan.strategy if isinstance(plan, ServerPlan) else None
    limits, sampler = plan.limits, plan.sampler
    cyclic = sampler if isinstance(sampler, CyclicPoisson) else None
    moved = limits or cyclic
    return {
        "unit": plan.config.unit,
        "model": plan.config.model if plan.config.unit == "client" else "each client",
        "clip": plan.clip.name,
        "mechanism": plan.mechanism.name,
        "factorisation": None if strategy is None else strategy.name,
        "sensitivity": None if moved is None or not moved.sensitivity else moved.sensitivity,
        "groups": None if cyclic is None else cyclic.bands,
        "weight_max": plan.config.weight_max,
        "separation": None if limits is None else limits.separation,
        "uses": None if limits is None else limits.uses,
    }
