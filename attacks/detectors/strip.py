"""A detector of inputs that carry a trigger: whatever is laid over them, the prediction stays.

Gao, Xu, Wang, Chen, Ranasinghe, Nepal: "STRIP: a defence against trojan attacks on deep neural networks",
ACSAC 2019, algorithm 1 and equations 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Self

import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds
from mycelia.attacks.detectors.base import Detector, logits
from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.model import as_model
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["STRIP"]

_TOGETHER: Final = 2**14  # numbers for each row that go through the model in one pass


@dataclass(frozen=True, eq=False)
class STRIP(Detector):
    """Minus the mean entropy, in bits, of the predictions for an input with benign ones laid over it.

    `fit` keeps the benign rows. Of these a row gets m, drawn without replacement: which ones depends on the
    seed and its bytes. A row is never laid over itself, so that calibration sees what a new row sees.

    Attributes:
        model: gives scores; see `as_model`.
        m: benign rows that are laid over an input, at least 1; all where there are fewer.
        weights: of the input and of what is laid over it, above 0; the paper adds the two.
        bounds: to which the sum is clipped; two numbers, or two tensors that broadcast to a row.
        pool: the benign rows; None before `fit`.
    """

    model: object
    m: int = 100
    weights: tuple[float, float] = (1.0, 1.0)
    bounds: Bounds = field(default=(0.0, 1.0), kw_only=True)
    pool: Tensor | None = field(default=None, kw_only=True, repr=False)

    def check(self) -> None:
        """See `Detector.check`."""
        if self.m < 1 or len(self.weights) != 2 or not all(0 < each < math.inf for each in self.weights):
            raise ConfigError(
                f"m {self.m}, weights {self.weights}", rule="at least 1; two, above 0 and finite", who="STRIP"
            )

    @property
    def parts(self) -> tuple[object, ...]:
        """See `Detector.parts`."""
        return (as_model(self.model),)

    def prepared(self, benign: Tensor, rng: int) -> Self:
        """See `Detector.prepared`; the rows are kept."""
        pool = benign[torch.isfinite(benign.flatten(1)).all(1)]
        if len(row_keys(pool).unique()) < 2:
            raise DataError(
                "benign rows that are all the same",
                rule="at least two: one is laid over another",
                who="benign",
            )
        return replace(self, seed=rng, pool=pool)

    def traced(self, x: Tensor) -> Tensor:
        """See `Detector.traced`; the gradient is that with the same rows laid over x."""
        if self.pool is None:
            raise ConfigError(
                "no benign rows yet",
                rule="they are laid over inputs",
                fix="detector = detector.fit(benign, fpr=0.01)",
                who="STRIP",
            )
        chosen, known = self._chosen(x, self.pool)
        total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        for columns, points in self._blends(x, self.pool, chosen):
            sure = logits(self.model, points, "STRIP").double().log_softmax(1)
            bits = -(sure.exp() * sure).nan_to_num(neginf=0.0).sum(1) / math.log(2)
            total = total + (bits.view(len(x), -1) * known[:, columns]).sum(1)
        return -total / known.sum(1)

    def _chosen(self, x: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        """Which benign rows each row gets, and whether that is not the row itself; both [n, m]."""
        keys = row_keys(x)
        order = Draws(self.seed, "detectors/strip", keys).uniform("blends", (len(pool),))
        order = torch.where(keys[:, None] == row_keys(pool.to(x)), torch.inf, order)
        found = order.sort(1)
        some = slice(0, min(self.m, len(pool)))
        return found.indices[:, some], torch.isfinite(found.values[:, some])

    def _blends(self, x: Tensor, pool: Tensor, chosen: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Some columns at a time, and the blends: [n · columns, …], all of a row one after the other."""
        low, high = (torch.as_tensor(each, dtype=x.dtype, device=x.device) for each in self.bounds)
        own, other = self.weights
        shape, pool = x.shape[1:], pool.to(x)
        together = max(1, _TOGETHER // max(1, math.prod(shape)))
        for first in range(0, chosen.shape[1], together):
            columns = slice(first, min(first + together, chosen.shape[1]))
            blend = own * x[:, None] + other * pool[chosen[:, columns]]
            yield columns, torch.minimum(torch.maximum(blend, low), high).flatten(0, 1)
