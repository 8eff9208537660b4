"""A fixed test part for sets that come without one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mycelia.engine.data.examples import Array
from mycelia.engine.rng import generator

__all__ = ["holdout"]

Indices = npt.NDArray[np.int64]


def holdout(targets: Array, *, parts: int = 5, seed: int = 0) -> tuple[Indices, Indices]:
    """Row numbers of a training and a test part, the test part one in `parts`, both ascending.

    Integer or text targets `[N]` are stratified: each class gives its share to within one example, and
    keeps at least one for training. A pure function of its arguments.

    >>> train, test = holdout(np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1]))
    >>> len(train), len(test)
    (8, 2)
    """
    rows = generator(seed, "data.holdout").permutation(len(targets))
    if targets.ndim != 1 or targets.dtype.kind == "f":
        chosen = rows[: round(len(rows) / parts)]
    else:
        _, codes, sizes = np.unique(targets, return_inverse=True, return_counts=True)
        # Rounding the running total, not each class, keeps the whole part at one in `parts`.
        shares = np.diff(np.rint(np.cumsum(sizes) / parts), prepend=0).astype(np.int64)
        shares = np.minimum(shares, sizes - 1)
        by_class = rows[np.argsort(codes[rows], kind="stable")]
        starts = np.cumsum(sizes) - sizes
        chosen = np.concatenate(
            [by_class[start : start + share] for start, share in zip(starts, shares, strict=True)]
        )
    test = np.zeros(len(targets), dtype=bool)
    test[chosen] = True
    return np.flatnonzero(~test), np.flatnonzero(test)
