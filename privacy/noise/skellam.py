"""Skellam noise: integers whose sums are Skellam again, for noise that many parties share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import gammaln
from torch import Tensor

from mycelia.engine.errors import ConfigError
from mycelia.privacy.noise.base import check_scale
from mycelia.privacy.noise.source import NoiseSource, Stream

__all__ = ["Skellam"]

_Floats = npt.NDArray[np.float64]

_MAX_STD = 2.0**20
_BLOCK = 1 << 14
_LARGE_MEAN = 10.0  # from here on Hörmann's constants hold
_STIRLING_MEAN = 1e4


@dataclass(frozen=True)
class Skellam:
    """The difference of two Poisson numbers, each of mean std² / 2: integer noise of variance std².

    Sums of independent Skellam numbers are Skellam with the sum of the variances, so n parties who add std²
    / n each give the noise of one who adds std² (Agarwal, Kairouz & Liu, "The Skellam Mechanism for
    Differentially Private Federated Learning", NeurIPS 2021).

    Values are integers, in units of the grid that the caller rounds to. Poisson numbers come from Hörmann's
    transformed rejection (PTRS, Insurance: Mathematics and Economics 12, 1993), from mean 10 on, and from the
    inverse of the distribution function below; with float64 probabilities, relative errors below 1e-9.
    """

    name: ClassVar[str] = "skellam"
    norm: ClassVar[Literal["l1", "l2"]] = "l2"

    def sample(
        self,
        shape: int | Sequence[int],
        std: float,
        source: NoiseSource,
        purpose: str,
        step: int,
        tensor: str = "",
        *,
        bound: float = 1.0,
    ) -> Tensor:
        """Integer noise, int64; see `Mechanism.sample`.

        `std` is in grid units, in [0, 2**20], and `bound` is not used: the caller has rounded to integers.
        """
        check_scale(std, self.name)
        if std > _MAX_STD:
            raise ConfigError(
                f"std is {std}", rule="std <= 2**20 grid units", fix="take a coarser grid", who=self.name
            )
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        count, mean = math.prod(size), std * std / 2
        if mean == 0:
            return torch.zeros(size, dtype=torch.int64)
        stream = source.generator(purpose, step, tensor)
        drawn = _poisson(2 * count, mean, stream)
        return torch.from_numpy(drawn[:count] - drawn[count:]).view(size)

    def add(
        self,
        total: Tensor,
        std: float,
        source: NoiseSource,
        purpose: str,
        step: int,
        tensor: str = "",
        *,
        bound: float = 1.0,
    ) -> Tensor:
        """The total, which is int64, plus noise; see `Mechanism.add`."""
        if total.dtype is not torch.int64:
            raise ConfigError(
                f"the total is {total.dtype}",
                rule="Skellam noise is added to int64",
                fix="round to a grid first",
                who=self.name,
            )
        return total + self.sample(total.shape, std, source, purpose, step, tensor).to(total.device)

    def slack(self, bound: float, size: int) -> float:
        """0: rounding is the caller's, and part of the sensitivity it states."""
        return 0.0

    @staticmethod
    def rdp(orders: Sequence[float], std: float, l1: float, l2: float) -> tuple[float, ...]:
        """Rényi divergences at the given orders: an upper bound, for the accountant's curve event.

        alpha l2² / (2 v) + min(((2 alpha - 1) l2² + 6 l1) / (4 v²), 3 l1 / (2 v)) with v = std² (Agarwal,
        Kairouz & Liu 2021). It holds at integer orders; another order gets the next integer's value, since
        divergences grow with the order.

        Args:
            orders: each above 1.
            std: of the noise that is added in all, in grid units.
            l1: sensitivity in L1 and grid units, see `l1_bound`.
            l2: sensitivity in L2 and grid units.

        Raises:
            ConfigError: a value out of range.
        """
        for name, value in (("std", std), ("l1", l1), ("l2", l2)):
            check_scale(value, Skellam.name, name)
        if not all(order > 1 for order in orders):
            raise ConfigError(f"orders are {list(orders)}", rule="each is above 1", who=Skellam.name)
        if l2 == 0 and l1 == 0:
            return (0.0,) * len(orders)
        variance = std * std
        if variance == 0:
            return (math.inf,) * len(orders)
        return tuple(
            order * l2 * l2 / (2 * variance)
            + min(((2 * order - 1) * l2 * l2 + 6 * l1) / (4 * variance * variance), 3 * l1 / (2 * variance))
            for order in (math.ceil(order) if math.isfinite(order) else order for order in orders)
        )

    @staticmethod
    def l1_bound(l2: float, size: int) -> float:
        """The L1 sensitivity that L2 sensitivity `l2` of `size` integers allows: min(sqrt(size) l2, l2²)."""
        return min(math.sqrt(size) * l2, l2 * l2)


def _poisson(size: int, mean: float, stream: Stream) -> npt.NDArray[np.int64]:
    """Poisson numbers, int64 [size]."""
    if mean < _LARGE_MEAN:
        count = np.arange(100)
        below = np.cumsum(np.exp(count * math.log(mean) - mean - gammaln(count + 1)))
        found: npt.NDArray[np.int64] = np.searchsorted(below[:-1], stream.random(size), side="right")
        return found
    out = np.empty(size, np.int64)
    block = min(_BLOCK, max(64, 1 << (size + size // 4).bit_length()))
    filled = 0
    while filled < size:
        values, kept = _transformed(block, mean, stream)
        found = values[kept][: size - filled].astype(np.int64)
        out[filled : filled + len(found)] = found
        filled += len(found)
    return out


def _transformed(count: int, mean: float, stream: Stream) -> tuple[_Floats, npt.NDArray[np.bool_]]:
    """Proposals of PTRS and whether each is kept; its shortcuts, which skip the test, are left out."""
    root = math.sqrt(mean)
    b = 0.931 + 2.53 * root
    a = -0.059 + 0.02483 * b
    inverse_alpha = 1.1239 + 1.1328 / (b - 3.4)
    uniform, accept = (stream.random(2 * count) + 2.0**-54).reshape(2, count)
    uniform -= 0.5
    edge = 0.5 - np.abs(uniform)
    values = np.floor((2 * a / edge + b) * uniform + mean + 0.43)
    possible = values >= 0
    values *= possible
    density = np.log(accept * inverse_alpha / (a / (edge * edge) + b))
    return values, possible & (density <= _log_poisson(values, mean))


def _log_poisson(count: _Floats, mean: float) -> _Floats:
    """The logarithm of P(count); for large means by the saddle-point form (Loader 2000)."""
    if mean < _STIRLING_MEAN:
        direct: _Floats = count * math.log(mean) - mean - gammaln(count + 1)
        return direct
    positive = np.maximum(count, 1.0)  # 0 has a probability below exp(-10**4)
    deviance = positive * np.log1p((positive - mean) / mean) - (positive - mean)
    stirling = (1 / 12 - 1 / (360 * positive * positive)) / positive
    result: _Floats = -stirling - deviance - 0.5 * np.log(2 * math.pi * positive)
    return result
