"""Dealing the examples out: a partitioner's rule becomes a checked Partition."""

from __future__ import annotations

from typing import Any

import numpy as np

from mycelia.engine.config import Strict
from mycelia.engine.data.examples import Examples
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import generator
from mycelia.simulations.draws import Indices
from mycelia.simulations.partition import Dealt, Overlapping, Partition
from mycelia.simulations.partitioners import Dealing, Natural, Partitioner, is_classes, require

__all__ = ["partition", "pool"]

Array = np.ndarray[Any, Any]


def partition(
    partitioner: Partitioner,
    examples: Examples,
    clients: int,
    *,
    seed: int,
    per_client: int = 0,
    overlap: bool = False,
    test_fraction: float = 0.0,
) -> Partition:
    """The partition of a training set.

    Args:
        partitioner: the rule (`build`).
        examples: the training set.
        clients: how many clients there are; 0 with `natural`: all that the data has.
        seed: the root seed.
        per_client: examples that each client gets at most (fewer only by `natural`); 0: all are dealt out.
        overlap: whether each client draws its own from all, so that examples are shared.
        test_fraction: share of its examples, rounded down, that a client keeps for testing, in [0, 1).

    Raises:
        ConfigError: settings that contradict each other.
        DataError: too few examples, or a client without any.
    """
    if clients == 0 and isinstance(partitioner, Natural) and examples.clients is not None:
        clients = len(np.unique(examples.clients))
    if clients < 1:
        raise ConfigError(f"{clients} clients", rule="1 or more; 0 means all those of a natural partition")
    labels = examples.targets if is_classes(examples.targets) else None
    if overlap:
        return _overlapping(partitioner, len(examples), labels, clients, seed, per_client, test_fraction)
    require(len(examples), clients, max(per_client, 1), fix="set population.overlap = true, or ask for fewer")
    dealt = partitioner.deal(examples, clients, seed=seed, per_client=per_client)
    dealing = dealt if isinstance(dealt, Dealing) else Dealing(np.asarray(dealt))
    owners = _checked(dealing.owners, len(examples), clients)
    luck = generator(seed, "partition-split").random(len(owners))
    order = np.lexsort((luck, owners))
    order = order[np.searchsorted(owners[order], 0) :]
    sizes = np.bincount(owners[owners >= 0], minlength=clients)
    if sizes.min() == 0:
        who = int(sizes.argmin())
        name = f" ('{dealing.names[who]}')" if dealing.names is not None else ""
        raise DataError(
            f"client {who}{name} has no examples, nor have {int((sizes == 0).sum()) - 1} others",
            rule="every client has one or more",
            fix="set min_size, or lower population.clients",
            who="partition",
        )
    # In the random order within each client: those beyond per_client go, then the tests come last.
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    rank = np.arange(len(order)) - np.repeat(offsets[:-1], sizes)
    kept = np.minimum(sizes, per_client) if per_client else sizes
    keep = rank < np.repeat(kept, sizes)
    order, rank = order[keep], rank[keep]
    tests = np.floor(test_fraction * kept + 1e-9).astype(np.int64)
    is_test = rank >= np.repeat(kept - tests, kept)
    order = order[np.lexsort((order, is_test, owners[order]))]
    offsets = np.concatenate([[0], np.cumsum(kept)])
    ends = offsets[1:] - tests
    return Dealt(clients, seed, labels, order, offsets, ends, dealing.names, dealing.noise)


def _overlapping(
    partitioner: Partitioner,
    n: int,
    labels: Array | None,
    clients: int,
    seed: int,
    per_client: int,
    test_fraction: float,
) -> Partition:
    draw = getattr(partitioner, "draw", "")
    if not isinstance(partitioner, Strict) or not draw:
        raise ConfigError("overlap is set", rule="iid and dirichlet can overlap, other partitions cannot")
    if not 1 <= per_client <= n:
        raise ConfigError(
            f"overlap with examples_per_client = {per_client}", rule=f"each client draws 1 to {n} examples"
        )
    if draw == "dirichlet" and labels is None:
        raise DataError("the targets are no classes", rule="dirichlet needs integer labels", who="partition")
    recipe = {"name": draw, **{k: v for k, v in partitioner.model_dump().items() if k != "min_size"}}
    return Overlapping(clients, seed, labels, recipe, per_client, int(test_fraction * per_client + 1e-9), n)


def _checked(owners: Array, n: int, clients: int) -> Indices:
    if owners.shape != (n,) or owners.dtype.kind not in "iu":
        found = f"the partitioner gives {owners.dtype} of shape {owners.shape}"
        raise DataError(found, rule=f"the client of each example, integers of shape ({n},)", who="partition")
    if owners.min() < -1 or owners.max() >= clients:
        bad = int(np.flatnonzero((owners < -1) | (owners >= clients))[0])
        rule = f"0..{clients - 1}, or -1 for nobody"
        raise DataError(f"example {bad} goes to client {owners[bad]}", rule=rule, who="partition")
    return owners.astype(np.int64)


def pool(partition: Partition) -> Partition:
    """One client that holds what all clients together train on; for central baselines."""
    held = [partition.indices(client) for client in range(partition.clients)]
    order = np.unique(np.concatenate(held)).astype(np.int64)
    ends = np.array([len(order)])
    return Dealt(1, partition.seed, partition.labels, order, np.array([0, len(order)]), ends)
