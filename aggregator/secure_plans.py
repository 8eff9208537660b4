"""The secure sum that every round of a run has: what a `[secure_sum]` block comes to."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mycelia.aggregator.config import FederationConfig, SecureSumBlock
from mycelia.aggregator.rounds import asked_for, quorum_for
from mycelia.aggregator.wire.settings import PackingConfig
from mycelia.engine.algorithms import Algorithm
from mycelia.engine.errors import ConfigError
from mycelia.engine.local import LocalWork
from mycelia.engine.sums import TermSpec
from mycelia.privacy.pipeline import ORDER, Pipeline
from mycelia.privacy.secagg.canonical import PHASES
from mycelia.privacy.secagg.config import DeadlinesConfig, NoiseConfig, SecureSumConfig
from mycelia.privacy.secagg.encoding import Encoding
from mycelia.privacy.secagg.quantise import LARGEST
from mycelia.privacy.secagg.round_config import Mechanism, RoundConfig, Threat
from mycelia.privacy.secure_updates import Mask, NoiseShares, PackedShape, Quantise

__all__ = ["SecurePlan", "plan_secure_sum"]

_LEAST: Final = 3
"""The fewest updates of a secure sum."""

_BUDGET_S: Final = 600.0  # that the default deadlines are made for
_LONGEST_S: Final = 4e6  # of a phase
_NONE: Final = bytes(32)


@dataclass(frozen=True)
class SecurePlan:
    """The sum of every round, proven not to overflow.

    Attributes:
        settings: of the sum, all of them.
        quantise: packs updates.
        masks: whether there are masks.
        config: a round's configuration, but for what names the round.
        expected: the public number that a noised sum is divided by; None without noise.
        task_sha256: hash of the algorithm and its local work.
    """

    settings: SecureSumConfig
    quantise: Quantise
    masks: bool
    config: RoundConfig
    expected: float | None
    task_sha256: bytes

    @property
    def encoding(self) -> Encoding:
        """Of a round."""
        return Encoding(self.config, self.quantise.size)

    @property
    def shape(self) -> PackedShape:
        """What an update takes."""
        quantise = self.quantise
        return PackedShape(quantise.size, len(quantise.given), quantise.double)

    @property
    def packing(self) -> PackingConfig:
        """What devices need to pack their updates."""
        own = self.quantise
        return PackingConfig(
            weight_max=own.weight_max, value_bound=own.value_bound, most_examples=own.most_examples,
            private=own.private, double=own.double,
        )  # fmt: skip

    def pipeline(self, before: Pipeline) -> Pipeline:
        """The stages of a run, with those of the sum in their places."""
        own = [self.quantise, Mask(self.masks)]
        noise = [] if self.expected is None else [NoiseShares(self.expected)]
        stages = sorted([*before.stages, *own, *noise], key=lambda stage: ORDER.index(stage.place))
        return Pipeline(tuple(stages))

    def facts(self) -> dict[str, Any]:
        """What reports say of it."""
        config = self.config
        noise = None
        if config.noise.mechanism != Mechanism.NONE:
            noise = (
                f"{Mechanism(config.noise.mechanism).name.lower().replace('_', '-')}, shares of the clients"
            )
        return {
            "threat": Threat(config.threat).name.lower(),
            "neighbours": config.k,
            "threshold": config.t,
            "n_max": config.n_max,
            "bits": config.bits,
            "dimension": config.dimension,
            "frac_bits": config.frac_bits,
            "value_bound": config.value_bound,
            "weight_max": self.quantise.weight_max,
            "rotate": bool(config.rotation),
            "noise": noise,
        }


def plan_secure_sum(
    scenario: FederationConfig,
    algorithm: Algorithm,
    specs: Mapping[str, TermSpec],
    work: LocalWork,
    *,
    cohort: int,
    max_weight: float,
    largest: int,
    double: bool,
    clip: float | None = None,
    noise: NoiseConfig | None = None,
) -> SecurePlan | None:
    """The sum of every round; None without a `[secure_sum]` block.

    Args:
        scenario: the settings.
        algorithm: bound to the population.
        specs: terms of an update.
        work: local work, as the algorithm adjusted it.
        cohort: clients of a round.
        max_weight: the largest weight a client may have.
        largest: examples of the largest client.
        double: whether the parameters are float64.
        clip: the L2 bound of a noised update.
        noise: in the opened sum.

    Raises:
        ConfigError: an algorithm without a sum, or settings that contradict each other.
        SettingsRefused: the sum could overflow, or has too few neighbours.
    """
    block = scenario.secure_sum
    if block is None:
        return None
    _check_algorithm(algorithm)
    uniform = getattr(algorithm, "weighting", "") == "uniform"
    private = noise is not None
    alike = private or (uniform and not any(spec.own_weight for spec in specs.values()))
    weight_max = block.weight_max or (1 if alike else math.ceil(max_weight))
    most = work.step_count(largest) * (work.batch_size or largest)
    quantise = Quantise(dict(specs), weight_max, block.value_bound, most, private, double or private)
    settings = _settings(scenario, block, cohort, weight_max, clip, noise)
    if settings.value_bound > LARGEST:
        raise ConfigError(
            f"value_bound = {settings.value_bound}",
            rule=f"at most {LARGEST}: updates are floating-point numbers",
            who="secure_sum",
        )
    config = settings.round_config(
        job="plan", round=0, nonce=_NONE, model_sha256=_NONE, schema_sha256=_NONE, task_sha256=_NONE,
        roster_sha256=_NONE, size=quantise.size, clients=settings.n_max, slots=quantise.bounds,
    )  # fmt: skip
    named = [
        scenario.algorithm.model_dump(mode="json"),
        scenario.local.model_dump(mode="json"),
        scenario.loss,
    ]
    task = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).digest()
    expected = float(cohort) if private else None
    return SecurePlan(settings, quantise, block.masks, config, expected, task)


def _settings(
    scenario: FederationConfig,
    block: SecureSumBlock,
    cohort: int,
    weight_max: int,
    clip: float | None,
    noise: NoiseConfig | None,
) -> SecureSumConfig:
    """All settings, with those that other blocks decide."""
    if (quorum := quorum_for(cohort, scenario.round)) < _LEAST:
        raise ConfigError(
            f"a quorum of {quorum} in a cohort of {cohort}",
            rule=f"a sum of fewer than {_LEAST} hides nobody",
            fix="raise the cohort or round.quorum",
            who="secure_sum",
        )
    given = {name: getattr(block, name) for name in SecureSumConfig.model_fields}
    if given["deadlines"] is None:
        share, usual = scenario.round.budget_s / _BUDGET_S, DeadlinesConfig()
        seconds = {phase: min(_LONGEST_S, share * getattr(usual, phase)) for phase in PHASES}
        given["deadlines"] = DeadlinesConfig(**seconds)
    given |= {
        "n_min": quorum,
        "n_max": asked_for(cohort, scenario.round),
        "weight_max": weight_max,
        "noise": noise,
    }
    return SecureSumConfig(**given | ({} if clip is None else {"clip": clip}))


def _check_algorithm(algorithm: Algorithm) -> None:
    """Refuse an algorithm whose server needs more than a sum."""
    if algorithm.pooled:
        rule, fix = "one client holds all data, and a sum of one hides nobody", "take [secure_sum] out"
    elif not algorithm.linear:
        rule, fix = (
            "its server needs each update by itself",
            "use a linear algorithm such as fedavg or fedadam",
        )
    else:
        return
    raise ConfigError(f"the algorithm {algorithm.name}", rule=rule, fix=fix, who="secure_sum")
