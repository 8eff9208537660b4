"""Filters of training data: which rows of a class have activations of another kind than the rest.

Both look at the activations of a model that was trained on the data, for each label by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError, DataError

__all__ = ["ClassClusters", "PoisonResult", "activation_clustering", "spectral_signature"]

_CHUNK: Final = 256  # rows of a matrix of distances at a time
_ROUNDS: Final = 100  # of Lloyd's algorithm


@dataclass(frozen=True)
class ClassClusters:
    """The two clusters of one class.

    Attributes:
        label: of the class.
        rows: so many.
        share: of the smaller cluster, at most 1/2; 0 where there is no second one.
        silhouette: mean of the rows, −1 to 1; 0 where there is no second cluster.
        poisoned: the verdict.
    """

    label: int
    rows: int
    share: float
    silhouette: float
    poisoned: bool


@dataclass(frozen=True, eq=False)
class PoisonResult:
    """Which rows a filter takes out.

    Attributes:
        flagged: bool [n].
        score: float64 [n], bigger is more suspicious; to be compared within a class only.
        classes: what was found in each class; empty for filters without clusters.
    """

    flagged: Tensor
    score: Tensor
    classes: tuple[ClassClusters, ...] = ()


def activation_clustering(
    activations: Any,
    labels: Any,
    *,
    components: int = 10,
    reduction: Literal["pca", "ica"] = "ica",
    by: Literal["size", "silhouette"] = "silhouette",
    share: float = 0.35,
    silhouette: float = 0.15,
) -> PoisonResult:
    """Two clusters in each class; the smaller one is poison where the verdict on the class says so.

    Chen, Carvalho, Baracaldo, Ludwig, Edwards, Lee, Molloy, Srivastava: "Detecting backdoor attacks on deep
    neural networks by activation clustering", SafeAI 2019 (arXiv:1811.03728), algorithm 1 and section 4.1.
    The score is how much nearer a row is to the centre of the smaller cluster than to the other one, in
    units of the distance of the two: −1 to 1. Distances of independent components of unit variance are
    those of whitened principal components, which a rotation turns into them: "ica" is computed like that.

    Args:
        activations: finite, [n, …]; of the last hidden layer in the paper.
        labels: integers [n].
        components: that are kept, at least 1.
        reduction: of dimension.
        by: "size": poisoned is a class whose smaller cluster has at most `share` of the rows; "silhouette":
            one whose mean silhouette is above `silhouette` and whose smaller cluster is that small, too.
        share: in (0, 1/2].
        silhouette: from −1 to 1; the paper takes 0.10 to 0.15.

    Raises:
        ConfigError: a setting that is out of range.
        DataError: activations that are not finite, or other than one label for each row.
    """
    if reduction not in ("pca", "ica") or by not in ("size", "silhouette"):
        raise ConfigError(
            f"reduction {reduction!r}, by {by!r}",
            rule="pca or ica; size or silhouette",
            who="activation_clustering",
        )
    if components < 1 or not 0 < share <= 0.5 or not -1 <= silhouette <= 1:
        raise ConfigError(
            f"components {components}, share {share}, silhouette {silhouette}",
            rule="at least 1, in (0, 1/2], from -1 to 1",
            who="activation_clustering",
        )
    rows, kinds = _checked(activations, labels)
    flagged = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    score = torch.full((len(rows),), -1.0, dtype=torch.float64, device=rows.device)
    classes = []
    for label in kinds.unique().tolist():
        own = (kinds == label).nonzero()[:, 0]
        points = _reduced(rows[own], components, white=reduction == "ica")
        small = _two_means(points)
        count = int(small.sum())
        if not count:
            classes.append(ClassClusters(label, len(own), 0.0, 0.0, poisoned=False))
            continue
        width = _silhouette(points, small)
        part = count / len(own)
        poisoned = part <= share and (by == "size" or width > silhouette)
        classes.append(ClassClusters(label, len(own), part, width, poisoned))
        score[own] = _nearer(points, small)
        if poisoned:
            flagged[own] = small
    return PoisonResult(flagged, score, tuple(classes))


def spectral_signature(activations: Any, labels: Any, eps: float, *, factor: float = 1.5) -> PoisonResult:
    """The rows of each class that lie furthest along the direction in which it varies most.

    Tran, Li, Madry: "Spectral signatures in backdoor attacks", NeurIPS 2018, algorithm 1. The score is the
    squared projection of a row, less the mean of its class, on the top right singular vector; the
    ⌊factor·eps·n⌋ rows of the largest scores are flagged in each class of n rows, the first ones of equals.

    Args:
        activations: finite, [n, …]; of the last hidden layer in the paper.
        labels: integers [n].
        eps: upper bound of the share of poisoned rows in a class, in (0, 1/2).
        factor: at least 1.

    Raises:
        ConfigError: a setting that is out of range.
        DataError: activations that are not finite, or other than one label for each row.
    """
    if not 0 < eps < 0.5 or not 1 <= factor < math.inf:
        raise ConfigError(
            f"eps {eps}, factor {factor}", rule="above 0 and below 1/2; at least 1", who="spectral_signature"
        )
    rows, kinds = _checked(activations, labels)
    flagged = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    score = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for label in kinds.unique().tolist():
        own = (kinds == label).nonzero()[:, 0]
        centred = rows[own] - rows[own].mean(0)
        score[own] = (centred @ torch.linalg.svd(centred, full_matrices=False).Vh[0]).square()
        count = min(len(own), math.floor(factor * eps * len(own) + 1e-9))
        flagged[own[score[own].argsort(descending=True, stable=True)[:count]]] = True
    return PoisonResult(flagged, score)


def _checked(activations: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """float64 [n, d], int64 [n]."""
    rows, kinds = torch.as_tensor(activations).detach(), torch.as_tensor(labels)
    if not rows.is_floating_point() or rows.dim() < 2 or not rows.flatten(1).shape[1]:
        raise DataError(
            f"activations are {rows.dtype} {list(rows.shape)}",
            rule="floating point [n, …]",
            who="activations",
        )
    if kinds.is_floating_point() or kinds.shape != rows.shape[:1]:
        raise DataError(
            f"labels are {kinds.dtype} {list(kinds.shape)} for {len(rows)} rows",
            rule="integers [n]",
            who="labels",
        )
    bad = (~torch.isfinite(rows.flatten(1)).all(1)).nonzero()[:, 0].tolist()
    if bad:
        raise DataError(
            f"{len(bad)} rows that are not finite (first: {bad[0]})", rule="finite ones", who="activations"
        )
    return rows.flatten(1).double(), kinds.to(rows.device, torch.int64)


def _reduced(rows: Tensor, components: int, *, white: bool) -> Tensor:
    """Principal components, of unit variance where `white`; those without variance are left out."""
    u, sizes, _ = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    largest = max(float(sizes[0]), float(rows.abs().max()))
    rank = int((sizes > max(rows.shape) * torch.finfo(torch.float64).eps * largest).sum())
    kept = min(components, rank)
    found: Tensor = u[:, :kept] * (math.sqrt(len(rows)) if white else sizes[:kept])
    return found


def _two_means(points: Tensor) -> Tensor:
    """The smaller one of two clusters, bool [n]; nothing where all points are one.

    Lloyd's algorithm from the best cut of each axis; of these the clusters of the least inertia.
    """
    best, found = math.inf, torch.zeros(len(points), dtype=torch.bool, device=points.device)
    for axis in range(points.shape[1]):
        one = _best_cut(points[:, axis])
        for _ in range(_ROUNDS):
            nearer = _nearer(points, one) > 0
            if torch.equal(nearer, one) or not bool(nearer.any()) or bool(nearer.all()):
                break
            one = nearer
        inertia = sum(float((each - each.mean(0)).square().sum()) for each in (points[one], points[~one]))
        if inertia < best * (1 - 1e-12):
            best, found = inertia, one
    return ~found if 2 * int(found.sum()) > len(points) else found


def _best_cut(values: Tensor) -> Tensor:
    """Two clusters of numbers that have the least inertia: one is below a cut, bool [n] is the other one."""
    n = len(values)
    ordered = values.sort()
    below = torch.arange(1, n, dtype=values.dtype, device=values.device)
    sums = (ordered.values - values.mean()).cumsum(0)[:-1]
    between = sums.square() * n / (below * (n - below))  # what the cut takes away from the inertia
    found = torch.ones(n, dtype=torch.bool, device=values.device)
    found[ordered.indices[: int(between.argmax()) + 1]] = False
    return found


def _nearer(points: Tensor, one: Tensor) -> Tensor:
    """How much nearer to the centre of these points than to that of the others, in their distance, [n]."""
    near, far = points[one].mean(0), points[~one].mean(0)
    gap = torch.linalg.vector_norm(near - far).clamp(min=torch.finfo(points.dtype).tiny)
    to_near, to_far = (torch.linalg.vector_norm(points - each, dim=1) for each in (near, far))
    found: Tensor = (to_far - to_near) / gap
    return found


def _silhouette(points: Tensor, one: Tensor) -> float:
    """Rousseeuw 1987: the mean of (b − a)/max(a, b); a cluster of one row counts 0."""
    sizes = torch.stack([~one, one]).sum(1).double()
    total = 0.0
    for some in torch.arange(len(points), device=points.device).split(_CHUNK):
        far = torch.cdist(points[some], points, compute_mode="donot_use_mm_for_euclid_dist")
        sums = torch.stack([far[:, ~one].sum(1), far[:, one].sum(1)])
        mine = one[some].long()[None]
        own, other = sums.gather(0, mine)[0], sums.gather(0, 1 - mine)[0]
        count, against = sizes[mine[0]], sizes[1 - mine[0]]
        a, b = own / (count - 1).clamp(min=1), other / against
        value = (b - a) / torch.maximum(a, b).clamp(min=torch.finfo(points.dtype).tiny)
        total += float(torch.where(count > 1, value, 0.0).sum())
    return total / len(points)
