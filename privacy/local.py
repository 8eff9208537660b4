"""Local privacy: noise that each person adds before anything leaves the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr
from torch import Tensor

from mycelia.engine.errors import ConfigError, DataError
from mycelia.privacy.noise.source import NoiseSource

__all__ = ["Frequencies", "RandomizedResponse", "analytic_gaussian"]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(6)
_TINY = 1e-300  # stands for 0 where a logarithm is taken


def analytic_gaussian(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """The least std of Gaussian noise that gives (epsilon, delta) for one release.

    Solves the exact condition Φ(s/2σ - εσ/s) - e^ε Φ(-s/2σ - εσ/s) <= δ (Balle & Wang, "Improving the
    Gaussian Mechanism for Differential Privacy", ICML 2018, theorem 8); the answer is rounded up.

    >>> round(analytic_gaussian(1.0, 0.12693673750664394), 6)
    1.0

    Args:
        epsilon: at least 0.
        delta: in (0, 1).
        sensitivity: s in L2, above 0.

    Returns:
        σ, in the units of the sensitivity.

    Raises:
        ConfigError: a value out of range.
    """
    if not 0 <= epsilon < math.inf:
        raise ConfigError(f"epsilon is {epsilon}", rule="0 <= epsilon < inf", who="analytic gaussian")
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}", rule="0 < delta < 1", who="analytic gaussian")
    if not 0 < sensitivity < math.inf:
        raise ConfigError(
            f"sensitivity is {sensitivity}", rule="0 < sensitivity < inf", who="analytic gaussian"
        )
    low, high = 1e-10, 1.0  # in sensitivities
    while _log_delta(epsilon, high) > math.log(delta):
        high *= 2
    found = brentq(lambda z: _log_delta(epsilon, z) - math.log(delta), low, high, xtol=1e-15, rtol=1e-14)
    while _log_delta(epsilon, found) > math.log(delta):
        found *= 1 + 1e-14
    return float(found) * sensitivity


def _log_delta(epsilon: float, multiplier: float) -> float:
    """The logarithm of δ of Gaussian noise; it falls as the multiplier grows."""
    shift, width = epsilon * multiplier, 0.5 / multiplier
    if width < 0.01:
        # The difference of two nearly equal terms, as the integral of its slope: with erfcx the exponential
        # is common, δ = ½ exp(-(s-w)²/2) ∫ sqrt(2/π) - u erfcx(u/√2) du over [s-w, s+w].
        nodes = shift + width * _NODES
        slopes = math.sqrt(2 / math.pi) - nodes * erfcx(nodes / math.sqrt(2))
        return -((shift - width) ** 2) / 2 + math.log(max(width / 2 * float(_WEIGHTS @ slopes), _TINY))
    above, below = float(log_ndtr(width - shift)), epsilon + float(log_ndtr(-width - shift))
    return above + math.log(max(-math.expm1(below - above), _TINY))


class Frequencies(NamedTuple):
    """What `RandomizedResponse.estimate` gives.

    Attributes:
        shares: estimated share of each category, float64 [categories]; unbiased, so it may lie outside [0,
            1].
        errors: their standard errors, float64 [categories].
    """

    shares: Tensor
    errors: Tensor


@dataclass(frozen=True)
class RandomizedResponse:
    """The true category with probability e^ε / (e^ε + k - 1), else any other (Kairouz et al., ICML 2016).

    Pure local privacy, δ = 0: each answer by itself is ε-private towards everyone.

    Attributes:
        epsilon: above 0, and large enough for 53-bit coins to tell it from 0; of one answer.
        categories: k, at least 2.

    Raises:
        ConfigError: a value out of range.
    """

    epsilon: float
    categories: int

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise ConfigError(
                f"epsilon is {self.epsilon}", rule="0 < epsilon < inf", who="randomized response"
            )
        if self.categories < 2:
            raise ConfigError(
                f"{self.categories} categories", rule="at least 2 categories", who="randomized response"
            )
        if Fraction(self.truthful) * self.categories <= 1:  # the rounding of the coin is all there is
            raise ConfigError(
                f"epsilon is {self.epsilon} for {self.categories} categories",
                rule="the true answer is more likely than another by 2**-50 at least",
                fix="take a larger epsilon",
                who="randomized response",
            )

    @property
    def truthful(self) -> float:
        """Probability of the true answer: the largest multiple of 2**-53 that surely keeps to epsilon."""
        exact = 1 / (1 + (self.categories - 1) * math.exp(-self.epsilon))
        return max(math.floor(exact * 2.0**53) - 4, 0) * 2.0**-53

    def respond(self, values: Tensor, source: NoiseSource, step: int, client: str = "") -> Tensor:
        """One noised answer for each value.

        Args:
            values: integers in [0, categories), any shape.
            source: the secret.
            step: the round; names the stream, with the purpose "randomized response" and the client.
            client: who answers.

        Raises:
            DataError: a value is no category.
        """
        flat = values.reshape(-1)
        if flat.is_floating_point() or not bool(((flat >= 0) & (flat < self.categories)).all()):
            raise DataError(
                "a value is no category",
                rule=f"integers in [0, {self.categories})",
                who="randomized response",
            )
        stream = source.generator("randomized response", step, client)
        lie = torch.from_numpy(stream.random(len(flat)) >= self.truthful)
        other = torch.from_numpy(stream.integers(1, self.categories, len(flat)))
        shift = torch.where(lie, other, torch.zeros_like(other)).to(values.device)
        return ((flat + shift) % self.categories).to(values.dtype).view(values.shape)

    def estimate(self, answers: Tensor) -> Frequencies:
        """Unbiased shares of the categories among those who answered, with standard errors.

        Args:
            answers: what `respond` gave, integers in [0, categories), any shape, at least one.

        Raises:
            DataError: there is no answer, or one is no category.
        """
        other = (1 - self.truthful) / (self.categories - 1)
        flat = answers.reshape(-1)
        if not len(flat) or not bool(((flat >= 0) & (flat < self.categories)).all()):
            raise DataError(
                f"{len(flat)} answers, or one that is no category",
                rule=f"at least one, integers in [0, {self.categories})",
                who="randomized response",
            )
        seen = torch.bincount(flat.to(torch.int64), minlength=self.categories).double() / len(flat)
        slope = self.truthful - other
        shares = (seen - other) / slope
        # The noise of the answers alone, given who answered: each is a coin of one of two probabilities.
        truth = shares.clamp(0, 1)
        variance = truth * self.truthful * (1 - self.truthful) + (1 - truth) * other * (1 - other)
        return Frequencies(shares, (variance / len(flat)).sqrt() / slope)
