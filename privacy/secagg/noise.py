"""The noise of one client: its share of what the sum of those who stay has to hold.

Noise is added to whole numbers before they are masked. The share is the total over the clients that surely
stay and are honest, `n_min` less those assumed corrupt, and never over the cohort that is hoped for: with
more survivors the sum holds more noise, with dropouts as much as was accounted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from scipy.special import ive

from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.canonical import Reason, SecureSumError
from mycelia.privacy.secagg.round_config import Mechanism, RoundConfig

if TYPE_CHECKING:
    from mycelia.privacy.noise import NoiseSource

__all__ = ["PURPOSE", "TAIL", "NoiseShare", "rounded_norm"]

PURPOSE: Final = "secure sum"
"""The purpose that names the streams of noise."""

TAIL: Final = 2.0**-20
"""The most that the probability may be, for one round, that any value of noise is beyond the tail."""

_Floats = npt.NDArray[np.float64]

_SPREADS: Final = {Mechanism.SKELLAM: (0.0, 2.0**20), Mechanism.DISCRETE_GAUSSIAN: (0.5, 2.0**44)}
"""What the samplers draw, and for the discrete Gaussian what is known about its sums, in steps."""

_BLOCK = 1 << 18  # values drawn at a time; part of the names of the streams
_WIDE = 4.0  # from here on the variance of a discrete Gaussian is its parameter, up to 1e-130
_CELLS = 256  # cells of the tail's sum to one spread; all are single integers for spreads up to here
_DEBYE = 1e4


@dataclass(frozen=True)
class NoiseShare:
    """What one client adds to each coordinate.

    Attributes:
        mechanism: Skellam, which sums to Skellam, or discrete Gaussian, which nearly sums to its like.
        variance: that the sum of `parties` shares has to have, in squared steps, at least 1.
        parties: clients that surely stay and are honest, at least 1.

    Raises:
        SecureSumError: `CONFIG`: a share that cannot be drawn, or for which no privacy is proven.
    """

    mechanism: Mechanism
    variance: int
    parties: int

    def __post_init__(self) -> None:
        least, most = _SPREADS[self.mechanism]
        if self.variance < 1 or self.parties < 1 or not least**2 <= self.share <= most**2:
            raise SecureSumError(
                Reason.CONFIG,
                f"noise of variance {self.variance} from {self.parties} clients",
                rule=f"of each client a standard deviation from {least:g} to {most:g} steps",
                fix="choose another frac_bits: one more doubles what a standard deviation has in steps",
                who="noise",
            )

    @classmethod
    def of(cls, config: RoundConfig) -> NoiseShare | None:
        """The share in a round; None without noise."""
        noise = config.noise
        if noise.mechanism == Mechanism.NONE:
            return None
        return cls(Mechanism(noise.mechanism), noise.variance, config.n_min - noise.corrupt)

    @property
    def share(self) -> Fraction:
        """The variance that a client's noise has at least, in squared steps."""
        return Fraction(self.variance, self.parties)

    @cached_property
    def spread(self) -> float:
        """The standard deviation a sampler is given, so that its law has the variance of `share` or more.

        For the discrete Gaussian this is the parameter σ of its law. Its variance is below σ² where σ is
        small; then σ is more than the square root of the share, and the variance up to a percent above it.
        """
        spread = math.sqrt(self.share)
        while (found := self._law_variance(spread)) < self.share:
            spread = max(math.nextafter(spread, math.inf), spread * math.sqrt(self.share / found))
        return spread

    def _law_variance(self, spread: float) -> Fraction:
        if self.mechanism is Mechanism.SKELLAM:
            return 2 * Fraction(spread * spread / 2)  # two Poisson numbers of the mean that the sampler takes
        if spread >= _WIDE:
            return Fraction(spread) ** 2
        numbers = np.arange(1.0, 16 * _WIDE)
        weights = np.exp(-((numbers / spread) ** 2) / 2)
        variance = float(numbers**2 @ weights) / (0.5 + float(weights.sum()))
        return Fraction(variance * (1 - 1e-12))  # less than rounding can have added

    def draw(self, size: int, source: NoiseSource, step: int, name: str) -> npt.NDArray[np.int64]:
        """Independent noise, int64 [size].

        Args:
            size: how many.
            source: the secret; a name is for one use.
            step: the round; names the stream, as does `name`.
            name: the session, the client and the part of the vector.
        """
        from mycelia.privacy.noise.lattice import lattice
        from mycelia.privacy.noise.skellam import Skellam

        if self.mechanism is Mechanism.SKELLAM:
            drawn: npt.NDArray[np.int64] = (
                Skellam().sample(size, self.spread, source, PURPOSE, step, name).numpy()
            )
            return drawn
        return lattice(self.spread, 2).draw(size, source.generator(PURPOSE, step, name))

    def add(self, values: npt.NDArray[Any], source: NoiseSource, step: int, name: str) -> None:
        """Add noise in place, modulo the width of a word, by blocks with streams of their own.

        Args:
            values: uint32 or uint64 [d].
            source: the secret.
            step: the round.
            name: the session and the client.
        """
        for start in range(0, len(values), _BLOCK):
            part = values[start : start + _BLOCK]
            part += self.draw(len(part), source, step, f"{name} {start // _BLOCK}").astype(values.dtype)

    def tail(self, count: int) -> tuple[int, float]:
        """The least T that noise exceeds with a probability of at most 2**-20, and that probability.

        The probability is that of the union bound over all values, which is above the true one by a
        millionth of itself. T is the least for spreads below 512 steps, and else at most a 256th of the
        spread more: cells of several integers are bounded by a chord, the law being convex there.

        Args:
            count: values of noise, of all clients together.
        """
        return _tail(self.mechanism, self.spread, count)

    def rdp(self, orders: Sequence[float], norm: float, size: int, honest: int) -> tuple[float, ...]:
        """Rényi divergences of the noised sum when one vector of it becomes zero: an upper bound.

        Skellam: `mycelia.privacy.noise.Skellam.rdp`. Sums of discrete Gaussians: Kairouz, Liu & Steinke,
        "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation", ICML
        2021, theorem 1 and proposition 14: with s = norm / σ, s₁ the same in L1, and τ = 10 Σ_{k<honest}
        exp(-2π² share k/(k+1)), the least of α s²/2 + τ d, α/2 (s² + 2 s₁ τ + τ² d), α/2 (s + τ sqrt(d))².

        Args:
            orders: each above 1.
            norm: bound on the vector's L2 norm in steps, as rounded; see `rounded_norm`.
            size: d, its coordinates.
            honest: survivors that are not corrupt.

        Raises:
            ConfigError: fewer than `parties` are left, an order or the norm is out of range.
        """
        if honest < self.parties:
            raise ConfigError(
                f"{honest} honest survivors", rule=f"noise was planned for {self.parties}", who="noise"
            )
        if not all(order > 1 for order in orders) or not 0 <= norm < math.inf:
            raise ConfigError(
                f"orders {list(orders)} and a norm of {norm}",
                rule="orders above 1, a finite norm",
                who="noise",
            )
        from mycelia.privacy.noise.skellam import Skellam

        total = math.nextafter(math.sqrt(self.share * honest), 0)
        taxicab = Skellam.l1_bound(norm, size)
        if self.mechanism is Mechanism.SKELLAM:
            return Skellam.rdp(orders, total, taxicab, norm)
        rate = -2 * math.pi**2 * float(self.share)
        tau = 10 * math.fsum(math.exp(rate * k / (k + 1)) for k in range(1, honest))
        one, two = taxicab / total, norm / total
        return tuple(
            min(
                order / 2 * two**2 + tau * size,
                order / 2 * (two**2 + 2 * one * tau + tau**2 * size),
                order / 2 * (two + tau * math.sqrt(size)) ** 2,
            )
            for order in orders
        )


def rounded_norm(steps: int, size: int, beta_ppb: int) -> int:
    """The square of the bound on a vector's L2 norm after rounding to whole steps, rounded down.

    min{(C + sqrt(d))², C² + d/4 + sqrt(2 ln 1/β) (C + sqrt(d)/2)} with C in steps (Kairouz, Liu & Steinke
    2021, section 3.2). Rounding at random stays below it with a probability of at least 1 - β, and below its
    first term always; rounding towards zero stays below C.

    >>> rounded_norm(3, 16, 0)
    49

    Args:
        steps: C, the bound before rounding.
        size: d.
        beta_ppb: β in parts per billion; 0 leaves the first term.
    """
    always = steps**2 + size + math.isqrt(4 * size * steps**2)
    if not beta_ppb:
        return always
    factor = Fraction(math.sqrt(2 * math.log(1e9 / beta_ppb)))
    likely = steps**2 + Fraction(size, 4) + factor * (steps + Fraction(math.sqrt(size)) / 2)
    return min(always, math.floor(likely))


@lru_cache(maxsize=64)
def _tail(mechanism: Mechanism, spread: float, count: int) -> tuple[int, float]:
    log_weights = _log_skellam if mechanism is Mechanism.SKELLAM else _log_gaussian
    width = max(1, math.floor(spread / _CELLS))
    start = 1 if width == 1 else math.floor(2 * spread)  # convex from one spread on
    first = np.arange(start, math.ceil(16 * spread) + 64, width, dtype=np.float64)
    cells = np.exp(log_weights(first, spread))
    if width > 1:
        cells += np.exp(log_weights(first + (width - 1), spread))
        cells *= width / 2
    reaching = 2 * count * np.cumsum(cells[::-1])[::-1]  # the expected number of |values| >= first
    index = int(np.argmax(reaching <= TAIL))
    return int(first[index]) - 1, float(reaching[index])


def _log_gaussian(numbers: _Floats, spread: float) -> _Floats:
    if spread < _WIDE:
        others = np.arange(1.0, 16 * _WIDE)
        whole = 1 + 2 * float(np.exp(-((others / spread) ** 2) / 2).sum())
    else:
        whole = spread * math.sqrt(2 * math.pi)
    return -((numbers / spread) ** 2) / 2 - math.log(whole)


def _log_skellam(numbers: _Floats, spread: float) -> _Floats:
    """exp(-v) I_k(v); for large v by Debye's expansion (DLMF 10.41.3), whose next term is below 1e-9."""
    variance = spread * spread
    if variance < _DEBYE:
        with np.errstate(divide="ignore"):  # far out it is 0
            exact: _Floats = np.log(ive(numbers, variance))
        return exact
    root = np.hypot(numbers, variance)
    sine = numbers / root
    exponent = numbers * numbers / (root + variance) - numbers * np.arcsinh(numbers / variance)
    correction = np.log1p((3 - 5 * sine * sine) / (24 * root))
    expanded: _Floats = exponent - np.log(2 * math.pi * root) / 2 + correction
    return expanded
