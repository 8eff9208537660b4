"""How well scores tell attacked rows from benign ones, at every threshold, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from scipy import optimize, special, stats
from torch import Tensor

from mycelia.attacks.intervals import wilson
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["Roc", "area_interval", "roc"]


@dataclass(frozen=True)
class Roc:
    """A receiver operating characteristic: one point for each score that a threshold may have.

    Attributes:
        thresholds: falling; a row is flagged when its score is above. The first one is infinite.
        fpr: share of benign rows flagged at each threshold, rising from 0 to 1.
        tpr: share of attacked rows flagged, the same.
        fpr_interval: Wilson's, low and high at each threshold.
        tpr_interval: the same.
        auc: chance that an attacked row scores above a benign one, ties counting half.
        auc_interval: see `area_interval`.
        benign: so many benign rows.
        attacked: so many attacked rows.
        confidence: of the intervals, each by itself.
    """

    thresholds: tuple[float, ...]
    fpr: tuple[float, ...]
    tpr: tuple[float, ...]
    fpr_interval: tuple[tuple[float, float], ...]
    tpr_interval: tuple[tuple[float, float], ...]
    auc: float
    auc_interval: tuple[float, float]
    benign: int
    attacked: int
    confidence: float

    def to_json(self) -> dict[str, Any]:
        """As a report has it; points on a straight line between their neighbours are left out."""
        kept = _corners(self.fpr, self.tpr)
        points = [
            {
                "threshold": _finite(self.thresholds[k]),
                "fpr": self.fpr[k], "fpr_ci95": list(self.fpr_interval[k]),
                "tpr": self.tpr[k], "tpr_ci95": list(self.tpr_interval[k]),
            }
            for k in kept
        ]  # fmt: skip
        return {
            "auc": self.auc, "auc_ci95": list(self.auc_interval), "benign": self.benign,
            "attacked": self.attacked, "points": points,
        }  # fmt: skip


def roc(benign: Tensor, attacked: Tensor, confidence: float = 0.95) -> Roc:
    """The characteristic of scores of which bigger is more suspicious.

    >>> found = roc(torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.tensor([5.0, 7.0, 8.0, 9.0]))
    >>> found.auc, found.tpr
    (0.9375, (0.0, 0.25, 0.5, 0.75, 0.75, 1.0, 1.0, 1.0, 1.0))

    Args:
        benign: scores [n], n at least 1; infinite ones are allowed.
        attacked: scores [m], m at least 1.
        confidence: of intervals, in (0, 1).

    Raises:
        DataError: no scores of either kind, or NaN.
    """
    for name, scores in (("benign", benign), ("attacked", attacked)):
        if scores.dim() != 1 or not len(scores) or bool(scores.isnan().any()):
            raise DataError(
                f"scores of shape {list(scores.shape)}, {int(scores.isnan().sum())} of them NaN",
                rule="[n], at least one, no NaN",
                who=name,
            )
    n, m = len(benign), len(attacked)
    both = torch.cat([benign.double(), attacked.double()])
    levels = both.unique().flip(0)  # flagged from this score on
    # scores are sorted upwards, so those from a level on are all but those before it
    counts = [
        (len(scores) - torch.searchsorted(scores.double().sort().values, levels)).tolist()
        for scores in (benign, attacked)
    ]
    false, true = ([0, *each] for each in counts)
    # "above the next lower score" flags the same rows as "from this score on"
    thresholds = [torch.inf, *levels[1:].tolist(), -torch.inf]
    ranks = torch.from_numpy(stats.rankdata(both.cpu().numpy()))
    auc = float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))
    return Roc(
        thresholds=tuple(thresholds),
        fpr=tuple(k / n for k in false),
        tpr=tuple(k / m for k in true),
        fpr_interval=tuple(wilson(k, n, confidence) for k in false),
        tpr_interval=tuple(wilson(k, m, confidence) for k in true),
        auc=auc,
        auc_interval=area_interval(auc, n, m, confidence),
        benign=n,
        attacked=m,
        confidence=confidence,
    )


def area_interval(auc: float, benign: int, attacked: int, confidence: float = 0.95) -> tuple[float, float]:
    """An interval for the area under the curve.

    All areas θ from which the one that was seen is no more than z standard errors away, the error being
    that of θ (Newcombe: "Confidence intervals for an effect size measure based on the Mann–Whitney statistic,
    part 2", Statistics in Medicine 2006, method 5). It has a width where the area seen is 0 or 1.

    Args:
        auc: as seen, in [0, 1].
        benign: rows, at least 1.
        attacked: rows, at least 1.
        confidence: in (0, 1).

    Returns:
        low, high.
    """
    if not 0 <= auc <= 1 or benign < 1 or attacked < 1 or not 0 < confidence < 1:
        raise ConfigError(
            f"area {auc} of {benign} and {attacked} rows at confidence {confidence}",
            rule="in [0, 1], at least 1 each, in (0, 1)",
            who="area_interval",
        )
    z = float(special.ndtri(0.5 + confidence / 2))
    more = (benign + attacked) / 2 - 1

    def beyond(area: float) -> float:
        spread = 1 + more * (1 - area) / (2 - area) + more * area / (1 + area)
        return (auc - area) ** 2 - z * z * area * (1 - area) * spread / (benign * attacked)

    low = 0.0 if auc == 0 else _crossing(beyond, 0.0, auc)
    high = 1.0 if auc == 1 else _crossing(beyond, 1.0, auc)
    return low, high


def _crossing(beyond: Any, outer: float, seen: float) -> float:
    """Where an error goes from above 0, at 0 or 1, to below 0, at what was seen."""
    if seen in (0.0, 1.0):  # 0 there, and below 0 beside it
        seen += (outer - seen) * 1e-12
    return float(optimize.brentq(beyond, outer, seen, xtol=1e-14))


def _corners(fpr: tuple[float, ...], tpr: tuple[float, ...]) -> list[int]:
    kept: list[int] = []
    for k in range(len(fpr)):
        while len(kept) >= 2:
            a, b = kept[-2:]
            turn = (fpr[b] - fpr[a]) * (tpr[k] - tpr[b]) - (tpr[b] - tpr[a]) * (fpr[k] - fpr[b])
            if not math.isclose(turn, 0.0, abs_tol=1e-15):
                break
            kept.pop()
        kept.append(k)
    return kept


def _finite(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")
