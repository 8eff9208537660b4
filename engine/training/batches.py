"""The order of the examples: a pure function of seed and step, so a resumed run needs no generator state."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mycelia.engine.rng import generator

__all__ = ["batches", "steps_per_epoch"]


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """Steps in which every example is seen once; the last batch may be smaller."""
    return -(-examples // batch_size)


def batches(
    examples: int, batch_size: int, seed: int, *, start: int, stop: int
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """(step, rows of its batch) for the steps in [start, stop); each epoch is a fresh permutation.

    >>> whole = [rows.tolist() for _, rows in batches(5, 2, 7, start=0, stop=6)]
    >>> sorted(whole[0] + whole[1] + whole[2])
    [0, 1, 2, 3, 4]
    >>> [rows.tolist() for _, rows in batches(5, 2, 7, start=4, stop=6)] == whole[4:]
    True
    """
    per_epoch = steps_per_epoch(examples, batch_size)
    order = None
    for step in range(start, stop):
        epoch, batch = divmod(step, per_epoch)
        if order is None or batch == 0:
            order = generator(seed, "batches", round=epoch).permutation(examples)
        yield step, order[batch * batch_size : (batch + 1) * batch_size]
