"""Drawing one client's examples from pools, one pool for each class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

__all__ = ["DRAWS", "Indices", "apportion", "dirichlet", "fill", "iid", "pools_by_label"]

Indices = np.ndarray[Any, np.dtype[np.int64]]
Pools = Sequence[Indices]


def pools_by_label(labels: np.ndarray[Any, Any]) -> list[Indices]:
    """The sorted indices of each label 0..C-1; empty for a label that does not occur."""
    ends = np.cumsum(np.bincount(labels))
    return np.split(np.argsort(labels, kind="stable"), ends[:-1])


def apportion(weights: np.ndarray[Any, Any], total: int) -> Indices:
    """[n] whole numbers that sum to `total`, in proportion to weights [n] >= 0 by largest remainder.

    >>> apportion(np.array([1, 1, 2]), 10).tolist()
    [3, 2, 5]
    """
    exact = np.asarray(weights, dtype=np.float64) * (total / np.sum(weights))
    whole: Indices = np.floor(exact).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: total - int(whole.sum())]] += 1
    return whole


def fill(rng: np.random.Generator, shares: np.ndarray[Any, Any], n: int, left: Indices) -> Indices:
    """[C] counts that sum to n, multinomial by `shares` [C]; what a pool of `left` [C] lacks, others give.

    The n examples must exist: n <= sum(left).
    """
    counts = np.zeros(len(shares), dtype=np.int64)
    while n:
        shares = np.where(left > counts, shares, 0.0)
        if not shares.sum() > 0:
            shares = (left - counts).astype(np.float64)
        wanted = counts + rng.multinomial(n, shares / shares.sum())
        # Each pass empties a pool or is the last.
        counts, n = np.minimum(wanted, left), int(np.maximum(wanted - left, 0).sum())
    return counts


def iid(rng: np.random.Generator, pools: Pools, n: int) -> Indices:
    """Draws n distinct examples, all equally likely."""
    sizes = np.array([len(pool) for pool in pools])
    ends = np.cumsum(sizes)
    drawn = rng.choice(int(ends[-1]), n, replace=False)
    pool = np.searchsorted(ends, drawn, side="right")
    within = drawn - (ends - sizes)[pool]
    return np.array([pools[p][i] for p, i in zip(pool, within, strict=True)], dtype=np.int64)


def dirichlet(rng: np.random.Generator, pools: Pools, n: int, *, alpha: float) -> Indices:
    """Draws n distinct examples whose classes follow a draw from Dir(alpha) over the classes there are."""
    left = np.array([len(pool) for pool in pools], dtype=np.int64)
    shares = np.zeros(len(pools))
    shares[left > 0] = rng.dirichlet(np.full(int((left > 0).sum()), alpha))
    counts = fill(rng, shares, n, left)
    drawn = [
        rng.choice(pool, count, replace=False) for pool, count in zip(pools, counts, strict=True) if count
    ]
    return rng.permutation(np.concatenate(drawn))


DRAWS: Mapping[str, Callable[..., Indices]] = MappingProxyType({"dirichlet": dirichlet, "iid": iid})
