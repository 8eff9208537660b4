"""Drift of images: how far they lie from the clusters of benign ones in a space of features."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from mycelia.attacks.detectors.threshold import threshold_at
from mycelia.attacks.drift.two_sample import TwoSample, as_sample, ks_test, mmd_test
from mycelia.attacks.model import ModuleModel
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import generator

__all__ = ["FittedImageDrift", "ImageDrift", "k_means"]

Features = Callable[[Any], Any]


def k_means(rows: Tensor, clusters: int, rng: int = 0, steps: int = 100) -> Tensor:
    """Centres [clusters, d], by Lloyd's steps from spread-out first ones.

    Arthur, Vassilvitskii: "k-means++: the advantages of careful seeding", 2007. A cluster that has lost all
    rows gets the row that is farthest from its centre.

    Args:
        rows: [n, d], n at least `clusters`.
        clusters: at least 1.
        rng: seed.
        steps: at most; fewer where nothing changes any more.
    """
    if not 1 <= clusters <= len(rows):
        raise ConfigError(
            f"{clusters} clusters of {len(rows)} rows", rule="from 1 to the number of rows", who="k_means"
        )
    draw = generator(rng, "attacks/drift/k-means")
    centres = rows[[int(draw.integers(len(rows)))]]
    for _ in range(clusters - 1):
        weight = _distances(rows, centres).amin(1).square().cumsum(0)
        place = torch.searchsorted(weight, float(weight[-1]) * draw.random(), right=True)
        centres = torch.cat([centres, rows[[min(int(place), len(rows) - 1)]]])
    for _ in range(steps):
        near, which = _distances(rows, centres).min(1)
        counts = which.bincount(minlength=clusters)
        sums = torch.zeros_like(centres).index_add_(0, which, rows)
        new = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], centres)
        empty = (counts == 0).nonzero()[:, 0]
        new[empty] = rows[near.argsort(descending=True)[: len(empty)]]
        if torch.equal(new, centres):
            break
        centres = new
    return centres


def _distances(rows: Tensor, centres: Tensor) -> Tensor:
    return torch.cdist(rows, centres, compute_mode="donot_use_mm_for_euclid_dist")


@dataclass(frozen=True)
class ImageDrift:
    """How images are looked at.

    Attributes:
        features: images [n, …] to features [n, d], row by row; a module is used in evaluation mode. None: the
            pixels themselves.
        clusters: at least 1.
    """

    features: Features | None = None
    clusters: int = 10

    def __post_init__(self) -> None:
        if self.clusters < 1:
            raise ConfigError(f"{self.clusters} clusters", rule="at least 1", who="ImageDrift")

    def fit(self, benign: Any, fpr: float, rng: int = 0) -> FittedImageDrift:
        """Learn clusters from one half of benign images, drawn at random; the threshold from the other.

        Args:
            benign: images [n, …].
            fpr: share of benign images that may be flagged, in (0, 1).
            rng: seed.

        Raises:
            DataError: fewer than `clusters` images, or than 2, in a half.
        """
        rows = self._rows(benign)
        half = len(rows) // 2
        if half < max(2, self.clusters):
            raise DataError(
                f"{len(rows)} images", rule=f"at least {2 * max(2, self.clusters)}", who="ImageDrift.fit"
            )
        order = torch.from_numpy(generator(rng, "attacks/drift/halves").permutation(len(rows)))
        centres = k_means(rows[order[:half]], self.clusters, rng)
        away = _distances(rows[order[half:]], centres)
        return FittedImageDrift(
            settings=self, centres=centres, reference=away, threshold=threshold_at(away.amin(1), fpr)
        )

    def _rows(self, images: Any) -> Tensor:
        quiet = ModuleModel(self.features).quiet() if isinstance(self.features, nn.Module) else nullcontext()
        with torch.no_grad(), quiet:
            found = images if self.features is None else self.features(images)
        return torch.from_numpy(np.ascontiguousarray(as_sample(found, "ImageDrift")))


@dataclass(frozen=True, eq=False)
class FittedImageDrift:
    """Clusters of benign images.

    Attributes:
        settings: of the features.
        centres: [clusters, d], float64.
        reference: distances of benign images, which the centres are not from, to the centres, [m, clusters].
        threshold: above which a score is flagged.
    """

    settings: ImageDrift
    centres: Tensor
    reference: Tensor
    threshold: float

    def distances(self, images: Any) -> Tensor:
        """To each centre, float64 [n, clusters].

        Args:
            images: [n, …]
        """
        rows = self.settings._rows(images)
        if rows.shape[1] != self.centres.shape[1]:
            raise DataError(
                f"{rows.shape[1]} features", rule=f"{self.centres.shape[1]}, as fitted", who="ImageDrift"
            )
        return _distances(rows, self.centres)

    def score(self, images: Any) -> Tensor:
        """Distance of each image to the nearest centre, [n].

        Args:
            images: [n, …]
        """
        return self.distances(images).amin(1)

    def flag(self, images: Any) -> Tensor:
        """Which images are suspicious, bool [n].

        Args:
            images: [n, …]
        """
        return self.score(images) > self.threshold

    def test(
        self, images: Any, *, by: Literal["ks", "mmd"] = "ks", alpha: float = 0.05, rng: int = 0
    ) -> TwoSample:
        """Whether these images together are from another law than the benign ones.

        What is compared are distances to the centres, so that KS has one feature for each cluster.

        Args:
            images: [n, …], at least 2.
            by: which test.
            alpha: level.
            rng: seed of the permutations of MMD.
        """
        away = self.distances(images)
        if by == "ks":
            return ks_test(self.reference, away, alpha=alpha)
        if by == "mmd":
            permutations = max(500, int(np.ceil(10 / alpha)))
            return mmd_test(self.reference, away, alpha=alpha, permutations=permutations, rng=rng)
        raise ConfigError(f"by {by!r}", rule='"ks" or "mmd"', who="ImageDrift.test")
