"""A detector that looks for the group of activations that is the most unlikely one.

Speakman, Sridharan, Remy, Weldemariam, McFowland: "Subset scanning over neural network activations",
arXiv:1810.08676, 2018; the subset scan is that of Neill: "Fast subset scan for spatial pattern detection",
Journal of the Royal Statistical Society B 74, 2012.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, Self, get_args

import torch
from torch import Tensor, nn

from mycelia.attacks.detectors.base import Detector
from mycelia.attacks.layers import layer_output
from mycelia.attacks.model import as_model
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["Statistic", "SubsetScanning", "Tail", "scan"]

Statistic = Literal["berk-jones", "higher-criticism"]
"""What is maximised over subsets of activations."""
Tail = Literal["above", "below", "both"]
"""Which activations are unlikely: large ones, small ones, or either."""

_ROUNDINGS = 16  # benign values nearer than so many are ties: a batch of another size may differ so much


def scan(p: Tensor, statistic: Statistic, alpha_max: float = 0.5) -> tuple[Tensor, Tensor]:
    """The largest statistic of any subset of p-values at any level, and how many are in that subset.

    Of all subsets of a size that with the smallest p-values is the best one at every level (linear-time
    subset scanning), and of all levels its largest p-value. With N of them, all at most α, Berk–Jones is
    N·KL(1, α) = −N·log α, and Higher Criticism (N − N·α)/√(N·α·(1 − α)) = √(N·(1 − α)/α).

    Args:
        p: in (0, 1], [n, d].
        statistic: which.
        alpha_max: largest level, in (0, 1).

    Returns:
        float64 [n], at least 0; int64 [n], 0 where no p-value is at most alpha_max.
    """
    level = p.double().sort(1).values
    count = torch.arange(1, p.shape[1] + 1, device=p.device)
    berk_jones = statistic == "berk-jones"
    values = -count * level.log() if berk_jones else (count * (1 - level) / level).sqrt()
    values = torch.where(level <= alpha_max, values, 0.0)
    best, place = values.max(1)
    return best, torch.where(best > 0, place + 1, 0)


@dataclass(frozen=True, eq=False)
class SubsetScanning(Detector):
    """The largest scan statistic of a row's activations under their empirical p-values.

    The p-value of an activation is (1 + benign ones at least as large) / (1 + n). A score is a count, so it
    has no gradient: that of logistic laws of the benign means and deviations stands in for it, in the subset
    that was found. `fit` does not count a benign row as one that is as large as itself.

    Attributes:
        model: has the layer.
        layer: name of a submodule, as `named_modules` has it; its output is what is looked at.
        statistic: see `scan`.
        tail: which activations are unlikely; with "both" a p-value is twice the smaller one.
        alpha_max: largest level, in (0, 1).
        known: benign activations, sorted, [d, n]; None before `fit`.
    """

    model: nn.Module
    layer: str
    statistic: Statistic = "berk-jones"
    tail: Tail = "above"
    alpha_max: float = 0.5
    known: Tensor | None = field(default=None, kw_only=True, repr=False)

    def check(self) -> None:
        """See `Detector.check`."""
        for name, value, kinds in (("statistic", self.statistic, Statistic), ("tail", self.tail, Tail)):
            if value not in get_args(kinds):
                raise ConfigError(
                    f"{name} {value!r}", rule=f"one of {', '.join(get_args(kinds))}", who="SubsetScanning"
                )
        if not 0 < self.alpha_max < 1:
            raise ConfigError(
                f"alpha_max is {self.alpha_max}", rule="above 0 and below 1", who="SubsetScanning"
            )

    @property
    def parts(self) -> tuple[object, ...]:
        """See `Detector.parts`."""
        return (as_model(self.model),)

    def prepared(self, benign: Tensor, rng: int) -> Self:
        """See `Detector.prepared`; the activations of the benign rows are kept."""
        sound = benign[torch.isfinite(benign.flatten(1)).all(1)]
        if len(sound) < 2:
            raise DataError(
                f"{len(sound)} finite benign rows", rule="at least one other row for each", who="benign"
            )
        with self.quiet(), torch.no_grad():
            parts = [layer_output(self.model, self.layer, some) for some in sound.split(self.batch)]
        return replace(self, seed=rng, known=torch.cat(parts).T.contiguous().sort(1).values)

    def benign_scores(self, benign: Tensor) -> Tensor:
        """See `Detector.benign_scores`."""
        found = torch.full((len(benign),), torch.inf, dtype=torch.float64, device=benign.device)
        sound = torch.isfinite(benign.flatten(1)).all(1).nonzero()[:, 0]
        with self.quiet(), torch.no_grad():
            for some in sound.split(self.batch):
                seen = layer_output(self.model, self.layer, benign[some])
                found[some] = scan(self._p(seen, own=1), self.statistic, self.alpha_max)[0]
        return found

    def traced(self, x: Tensor) -> Tensor:
        """See `Detector.traced`."""
        seen = layer_output(self.model, self.layer, x)
        with torch.no_grad():
            p = self._p(seen)
            score, count = scan(p, self.statistic, self.alpha_max)
        if not torch.is_grad_enabled():
            return score
        inside = p.argsort(stable=True, dim=1).argsort(stable=True, dim=1) < count[:, None]
        unlike = (self._surprise(seen.double()) * inside).sum(1)
        found: Tensor = score + (unlike - unlike.detach())
        return found

    def _p(self, seen: Tensor, own: int = 0) -> Tensor:
        """p-values [n, d]; `own` is 1 where the rows are among the benign ones, else 0."""
        known = self._known().to(seen)
        values = seen.T.contiguous()
        near = _ROUNDINGS * torch.finfo(seen.dtype).eps * known.abs().amax(1, keepdim=True)
        n = known.shape[1]
        above = n - torch.searchsorted(known, values - near)
        below = torch.searchsorted(known, values + near, right=True)
        # Counts that leave a row out are divided by the same number: benign and new rows then have scores
        # from one set of values, and ties at the threshold stay ties.
        large, small = ((1 + each - own).double() / (1 + n) for each in (above, below))
        if self.tail == "both":
            found = (2 * torch.minimum(large, small)).clamp(max=1.0)
        else:
            found = large if self.tail == "above" else small
        return found.T

    def _surprise(self, seen: Tensor) -> Tensor:
        """−log of the share of a logistic law beyond an activation, [n, d]."""
        known = self._known().to(seen)
        mean, spread = known.mean(1), known.std(1)
        scale = torch.where(spread > 0, spread, 1.0) * (math.sqrt(3) / math.pi)
        z = (seen - mean) / scale
        z = {"above": z, "below": -z, "both": z.abs()}[self.tail]
        return torch.nn.functional.softplus(z)

    def _known(self) -> Tensor:
        if self.known is None:
            raise ConfigError(
                "no benign activations yet",
                rule="p-values are shares of them",
                fix="detector = detector.fit(benign, fpr=0.01)",
                who="SubsetScanning",
            )
        return self.known
