"""How uneven a partition is: sizes, and labels against those of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["effective_classes", "gini", "total_variation"]

Array = np.ndarray[Any, Any]
Floats = np.ndarray[Any, np.dtype[np.float64]]


def gini(sizes: Array) -> float:
    """Gini coefficient of sizes [n] >= 0: 0 when all are equal, (n - 1)/n when one client has everything."""
    n, total = len(sizes), float(np.sum(sizes))
    if total == 0:
        return 0.0
    ranks = np.arange(1, n + 1)
    return float(2 * np.dot(ranks, np.sort(sizes)) / (n * total) - (n + 1) / n)


def total_variation(counts: Array) -> Floats:
    """[n] distances between the label distribution of each client and of all; counts are [n, classes].

    0: the same distribution; 1: disjoint ones. A client without examples gets 0.
    """
    whole = counts.sum(axis=0) / max(counts.sum(), 1)
    sizes = counts.sum(axis=1, keepdims=True)
    distance: Floats = np.abs(counts / np.maximum(sizes, 1) - whole).sum(axis=1) / 2
    return np.where(sizes[:, 0] > 0, distance, 0.0)


def effective_classes(counts: Array) -> Floats:
    """[n] exponentials of the entropy of each client's labels: 1 for a single class, C for C alike."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    terms = shares * np.log(shares, out=np.zeros(shares.shape), where=shares > 0)
    effective: Floats = np.exp(-terms.sum(axis=1))
    return effective
