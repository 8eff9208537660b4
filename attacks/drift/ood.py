"""Scores of inputs that are like none of the training data: the bigger, the more suspicious.

Those of outputs are functions; those of features are fitted to benign ones first. Each row's score depends on
that row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mycelia.attacks.detectors.threshold import threshold_at
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["KNearest", "Mahalanobis", "OODDetector", "calibrated", "energy", "max_softmax"]

Score = Callable[[Any], Tensor]


def max_softmax(z: Tensor) -> Tensor:
    """1 − the largest softmax probability, [n] (Hendrycks, Gimpel: ICLR 2017).

    >>> max_softmax(torch.tensor([[0.0, 0.0], [100.0, 0.0]]))
    tensor([0.5000, 0.0000])

    Args:
        z: logits [n, classes].
    """
    return 1 - z.softmax(1).amax(1)


def energy(z: Tensor, temperature: float = 1.0) -> Tensor:
    """−T · log Σ exp(z / T), [n] (Liu et al.: "Energy-based out-of-distribution detection", 2020, eq. 4).

    Args:
        z: logits [n, classes].
        temperature: T, above 0.
    """
    if not temperature > 0:
        raise ConfigError(f"temperature {temperature}", rule="above 0", who="energy")
    return -temperature * (z / temperature).logsumexp(1)


@dataclass(frozen=True, eq=False)
class Mahalanobis:
    """Squared distance to the nearest class mean, in units of a covariance that all classes share.

    Lee et al.: "A simple unified framework for detecting out-of-distribution samples and adversarial
    attacks", NeurIPS 2018, eq. 2.

    Attributes:
        means: [classes, d], float64; of those that have rows.
        precision: inverse of the covariance, [d, d], float64.
    """

    means: Tensor
    precision: Tensor

    @classmethod
    def fit(cls, features: Tensor, y: Tensor | None = None, *, ridge: float = 1e-6) -> Mahalanobis:
        """From benign features.

        Args:
            features: [n, d], n at least 2.
            y: classes, integers [n]; None: all are one.
            ridge: added to each variance, as a share of their mean, at least 0. With a pseudo-inverse
                instead, a row would look benign that differs where no benign row does.

        Raises:
            DataError: no variance within classes; or with ridge = 0, none in some direction.
        """
        if not ridge >= 0:
            raise ConfigError(f"ridge {ridge}", rule="at least 0", who="Mahalanobis")
        rows = _rows(features, 2)
        labels = torch.zeros(len(rows), dtype=torch.int64, device=rows.device) if y is None else y
        if labels.shape != (len(rows),):
            raise DataError(f"{len(rows)} rows, labels {list(labels.shape)}", rule="one each", who="fit")
        _, which = labels.unique(return_inverse=True)
        counts = which.bincount()
        means = rows.new_zeros(len(counts), rows.shape[1]).index_add_(0, which, rows) / counts[:, None]
        centred = rows - means[which]
        covariance = centred.T @ centred / len(rows)
        covariance.diagonal().add_(ridge * covariance.diagonal().mean())
        factor, singular = torch.linalg.cholesky_ex(covariance)
        if int(singular):
            raise DataError(
                "a covariance without an inverse",
                rule="features that vary within their classes",
                fix="more rows, fewer features, or a larger ridge",
                who="Mahalanobis",
            )
        return cls(means, torch.cholesky_inverse(factor))

    def __call__(self, features: Tensor) -> Tensor:
        """Scores [n].

        Args:
            features: [n, d]
        """
        away = _rows(features, 0, self.means.shape[1])[:, None] - self.means
        return torch.einsum("ncd,de,nce->nc", away, self.precision, away).amin(1)


@dataclass(frozen=True, eq=False)
class KNearest:
    """Distance to the k-th nearest benign row.

    Sun et al.: "Out-of-distribution detection with deep nearest neighbors", ICML 2022, which gives rows
    length 1 first.

    Attributes:
        rows: benign features [n, d], float64.
        k: from 1 to n.
        unit: whether rows get length 1.
    """

    rows: Tensor
    k: int
    unit: bool = True

    @classmethod
    def fit(cls, features: Tensor, k: int, *, unit: bool = True) -> KNearest:
        """From benign features; a threshold wants others, as each of these is its own nearest.

        Args:
            features: [n, d]
            k: from 1 to n.
            unit: give rows length 1, here and later.
        """
        rows = _rows(features, 1)
        if not 1 <= k <= len(rows):
            raise ConfigError(f"k {k}", rule=f"from 1 to {len(rows)}, the number of rows", who="KNearest")
        return cls(_unit(rows) if unit else rows, k, unit)

    def __call__(self, features: Tensor) -> Tensor:
        """Scores [n].

        Args:
            features: [n, d]
        """
        found = _rows(features, 0, self.rows.shape[1])
        exact = "donot_use_mm_for_euclid_dist"  # products would lose the small distances
        distances = torch.cdist(_unit(found) if self.unit else found, self.rows, compute_mode=exact)
        return distances.kthvalue(self.k, 1).values


@dataclass(frozen=True, eq=False)
class OODDetector:
    """A score with a threshold.

    Attributes:
        score: of inputs, outputs or features: [n], bigger is more suspicious.
        threshold: above which a row is flagged.
    """

    score: Score
    threshold: float

    def flag(self, x: Any) -> Tensor:
        """Which rows are suspicious, bool [n].

        Args:
            x: what the score takes.
        """
        return self.score(x) > self.threshold


def calibrated(score: Score, benign: Any, fpr: float) -> OODDetector:
    """The score with the smallest threshold that flags at most a share of benign data.

    Args:
        score: bigger is more suspicious.
        benign: what it takes, of data that it was not fitted to.
        fpr: the share, in (0, 1); see `mycelia.attacks.detectors.threshold.threshold_at`.
    """
    return OODDetector(score, threshold_at(score(benign), fpr))


def _rows(features: Tensor, least: int, width: int | None = None) -> Tensor:
    if features.dim() < 2 or len(features) < least or not bool(torch.isfinite(features).all()):
        raise DataError(
            f"features of shape {list(features.shape)}",
            rule=f"[n, d], n at least {least}, all finite",
            who="features",
        )
    found = features.detach().flatten(1).double()
    if width is not None and found.shape[1] != width:
        raise DataError(f"{found.shape[1]} features", rule=f"{width}, as were fitted", who="features")
    return found


def _unit(rows: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / torch.where(length > 0, length, torch.ones_like(length))
