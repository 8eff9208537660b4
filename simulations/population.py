"""A population of simulated clients: who they are, what they hold and how they behave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mycelia.aggregator.selectors import Selector
from mycelia.simulations.behaviour import Behaviour
from mycelia.simulations.partition import Partition

__all__ = ["Population"]


@dataclass(frozen=True)
class Population:
    """Clients 0..N-1, of whom only those asked take any memory.

    Args:
        partition: who holds which examples.
        behaviour: how the devices behave.
        seed: the root seed.
    """

    partition: Partition
    behaviour: Behaviour = field(default_factory=Behaviour)
    seed: int = 0

    def __len__(self) -> int:
        return self.partition.clients

    @property
    def ids(self) -> range:
        """The clients' ids, sorted."""
        return range(self.partition.clients)

    def name(self, client: int) -> str:
        """What the data calls the client."""
        return self.partition.name(client)

    def available(
        self, clients: np.ndarray[Any, Any], *, round: int, now_s: float = 0.0
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which of the clients [n] can be reached; see `Behaviour.available`."""
        return self.behaviour.available(self.seed, clients, round=round, now_s=now_s)

    def select(self, selector: Selector, k: int, *, round: int, now_s: float = 0.0) -> np.ndarray[Any, Any]:
        """Up to k ids in the order of the draw, weighted by size where the selector weighs."""
        return selector.select(
            self.ids,
            k,
            round=round,
            seed=self.seed,
            weights=self.partition.sizes(),
            available=lambda ids: self.available(ids, round=round, now_s=now_s),
        )
