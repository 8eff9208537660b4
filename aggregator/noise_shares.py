"""Clients that are protected by noise of their own, each a share of what the opened sum has to hold.

The share is what the fewest survivors that are honest have to add, so that drop-outs down to that number
leave enough; with more survivors there is more noise in the sum, and that is what the ledger records. Noise
tells how many clients there were, so the cohort has a fixed size, and neighbours are replaced: the accountant
takes the divergences of the discrete noise, and what the secret draw of the cohort makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal

from mycelia.aggregator.secure_plans import SecurePlan
from mycelia.engine.errors import ConfigError
from mycelia.privacy.accounting import compose, spent
from mycelia.privacy.calibrate import calibrate
from mycelia.privacy.clip import ClipFunction
from mycelia.privacy.config import PrivacyConfig
from mycelia.privacy.events import Event
from mycelia.privacy.federated import ClipUpdate
from mycelia.privacy.pipeline import Pipeline, Stage
from mycelia.privacy.sampling import FixedSize
from mycelia.privacy.secagg.config import NoiseConfig
from mycelia.privacy.secagg.encoding import Encoding
from mycelia.privacy.subsampling import without_replacement

__all__ = ["SharePlan", "plan_shares"]

_ORDERS: Final = (*range(2, 33), 40, 48, 56, 64, 80, 96, 128)
"""The Rényi orders that the ledger keeps."""
_CLOSE: Final = 1e-4
"""How near to the least noise multiplier the calibration comes, relatively."""

Make = Callable[[float, NoiseConfig], SecurePlan | None]
"""The secure sum for an L2 bound and a noise; None without a `[secure_sum]` block."""


@dataclass(frozen=True)
class SharePlan:
    """Noise in shares of the clients: ε is about the whole run, and the same for every client.

    Attributes:
        config: the block.
        clip: the clip function of an update.
        sampler: how cohorts come about.
        rounds: that are planned.
        secure: the sum of a round, with the noise in it.
    """

    config: PrivacyConfig
    clip: ClipFunction
    sampler: FixedSize
    rounds: int
    secure: SecurePlan

    @property
    def mechanism(self) -> str:
        """The name of the noise."""
        return _mechanism(self.config)

    @property
    def least(self) -> int:
        """The fewest survivors."""
        return self.secure.config.n_min

    @property
    def noise_multiplier(self) -> float:
        """With the fewest survivors: the noise's standard deviation over the bound after rounding."""
        return _deviation(self.secure.encoding, self.least) / _norm(self.secure.encoding)

    def clipping(self) -> Stage:
        """What clients do to their updates."""
        return ClipUpdate(self.clip)

    def pipeline(self) -> Pipeline:
        """What clients do before the stages of the sum."""
        return Pipeline((self.clipping(),))

    def event(self, round: int, survivors: int) -> Event:
        """One round as the ledger has it: with the noise that survived, relative to the bound after rounding.

        Args:
            round: its number.
            survivors: updates in the sum, at least `least`.
        """
        bound = math.ldexp(_norm(self.secure.encoding), -self.secure.config.frac_bits)
        return replace(_event(self.secure.encoding, survivors, self.sampler, bound), step=round)

    def facts(self) -> dict[str, Any]:
        """The plan's settings for reports."""
        encoding = self.secure.encoding
        return {
            "unit": "client",
            "model": "distributed",
            "clip": self.clip.name,
            "mechanism": self.mechanism,
            "bound": self.clip.bound,
            "rounded_bound": math.ldexp(_norm(encoding), -self.secure.config.frac_bits),
            "least_survivors": self.least,
            "assumed_corrupt": self.secure.config.noise.corrupt,
            "factorisation": None,
            "sensitivity": None,
            "separation": None,
            "uses": None,
        }


def plan_shares(
    config: PrivacyConfig, make: Make, *, cohort: int, clients: int, rounds: int, corrupt: int
) -> SharePlan:
    """Noise that the budget allows over all rounds, or that is given, and the sum that holds it.

    Args:
        config: the block.
        make: the secure sum for an L2 bound and a noise.
        cohort: clients of a round.
        clients: size of the population, which is public.
        rounds: that are planned.
        corrupt: clients of a round that are assumed to add no noise.

    Raises:
        ConfigError: settings that contradict each other, or a budget that cannot pay for the first round.
        OutOfReach: no noise reaches the budget.
    """
    clip = config.clip_function()
    if not isinstance(clip, ClipFunction):  # the configuration has refused it
        raise ConfigError("a bound that moves", rule="noise shares have a fixed bound", who="clip")
    sampler = FixedSize(cohort, clients)

    def with_variance(variance: float) -> SecurePlan:
        noise = NoiseConfig(mechanism=_mechanism(config), variance=max(1, variance), corrupt=corrupt)
        made = make(clip.bound, noise)
        if made is None:
            raise ConfigError(
                "noise in shares", rule="it is opened in a secure sum", fix="add [secure_sum]", who="privacy"
            )
        return made

    norm = with_variance(2.0**40).encoding.norm_limit  # whatever the noise

    def plan(z: float) -> SharePlan:
        return SharePlan(config, clip, sampler, rounds, with_variance(math.ceil(z**2 * norm)))

    def epsilon(made: SharePlan, count: int) -> float:
        event = replace(made.event(0, made.least), count=count)
        return spent(compose([event]), config.delta)

    if config.noise_multiplier is not None:
        made = plan(config.noise_multiplier)
        if (found := epsilon(made, 1)) > config.epsilon:
            raise ConfigError(
                f"noise_multiplier = {config.noise_multiplier:g} gives the first round ε {found:.4g}, and "
                f"the budget is {config.epsilon:g}",
                rule="the budget pays for what is planned",
                fix="leave noise_multiplier out, so that it is chosen for the budget, or raise epsilon",
                who="privacy",
            )
        return made
    low = calibrate(
        sampler, delta=config.delta, epsilon=config.epsilon, steps=rounds, unit="client"
    ).value  # of Gaussian noise, which is never worse
    high = low
    while epsilon(plan(high), rounds) > config.epsilon:
        low, high = high, 1.25 * high
    while high > low * (1 + _CLOSE):
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon(plan(middle), rounds) > config.epsilon else (low, middle)
    return plan(high)


def _mechanism(config: PrivacyConfig) -> Literal["skellam", "discrete-gaussian"]:
    return "skellam" if config.mechanism == "skellam" else "discrete-gaussian"


def _norm(encoding: Encoding) -> float:
    """The bound on an update after rounding, in steps."""
    return math.nextafter(math.sqrt(encoding.norm_limit), math.inf)


def _deviation(encoding: Encoding, survivors: int) -> float:
    """The standard deviation of the noise that honest survivors have added, in steps."""
    if encoding.noise is None:  # pragma: no cover - a plan of shares has noise
        raise ConfigError("no noise", rule="a plan of shares has noise", who="privacy")
    honest = survivors - encoding.config.noise.corrupt
    return math.nextafter(math.sqrt(encoding.noise.share * honest), 0)


def _event(encoding: Encoding, survivors: int, sampler: FixedSize, bound: float) -> Event:
    """One round, as step 0."""
    curve = _curve(encoding, survivors, sampler.size / sampler.population)
    return Event(
        sampling=sampler.name,
        sampling_rate=sampler.rate,
        noise_multiplier=_deviation(encoding, survivors) / _norm(encoding),
        relation="replace-one",
        unit="client",
        clip=bound,
        mechanism="curve",
        size=sampler.size,
        population=sampler.population,
        orders=tuple(float(order) for order in curve),
        values=tuple(curve.values()),
    )


@lru_cache(maxsize=64)
def _curve(encoding: Encoding, survivors: int, rate: float) -> Mapping[int, float]:
    """Rényi divergences when one update is replaced by any other: twice the bound."""
    noise = encoding.noise
    if noise is None:  # pragma: no cover - a plan of shares has noise
        raise ConfigError("no noise", rule="a plan of shares has noise", who="privacy")
    orders = list(range(2, _ORDERS[-1] + 1))
    honest = survivors - encoding.config.noise.corrupt
    plain = noise.rdp(orders, 2 * _norm(encoding), encoding.config.dimension, honest)
    found = without_replacement(dict(zip(orders, plain, strict=True)), rate)
    return {order: found[order] for order in _ORDERS}
