"""The inputs that mutants are made of, and how likely each is taken next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["Item", "Queue"]


@dataclass(eq=False)
class Item:
    """An input of the queue.

    Attributes:
        point: the input itself.
        reference: what the validity of its mutants is judged by.
        seed: row of the seed that it comes from.
        trail: the mutators since.
        moved: whether one of these moved pixels.
        right: whether the model has it right.
        score: how much it is worth, at least 0.
        taken: how often it was mutated.
    """

    point: Tensor
    reference: Tensor
    seed: int
    trail: tuple[str, ...] = ()
    moved: bool = False
    right: bool = True
    score: float = 0.0
    taken: int = 0


class Queue:
    """A growing list of inputs, from which they are drawn by their energy.

    Energy falls with the times that an input was taken: max(least, 1 − times / decay), the probability of
    DeepHunter (Xie et al., ISSTA 2019). Where there are scores, it is multiplied by the score as a share of
    the highest, which does not fall below `least` either.

    Args:
        items: to begin with.
        decay: times after which the probability would be 0.
        least: in (0, 1].
    """

    def __init__(self, items: Iterable[Item], decay: float, least: float) -> None:
        self.items = list(items)
        self._decay, self._least = decay, least

    def __len__(self) -> int:
        return len(self.items)

    def take(
        self, draws: np.random.Generator, most: int, *, geometric: bool, needs_right: bool
    ) -> list[Item]:
        """Different inputs for a mutator, by chance.

        Args:
            draws: random numbers.
            most: so many at most.
            geometric: the mutator moves pixels: none that were moved already.
            needs_right: only those that the model has right.
        """
        fit = [not (geometric and each.moved) and (each.right or not needs_right) for each in self.items]
        places = np.flatnonzero(fit)
        weights = self.energies()[places]
        count = min(most, len(places))
        chosen = draws.choice(places, count, replace=False, p=weights / weights.sum()) if count else places
        found = [self.items[place] for place in chosen]
        for each in found:
            each.taken += 1
        return found

    def energies(self) -> Any:
        """How likely each is taken, up to a factor, float64 [len]."""
        taken = np.asarray([each.taken for each in self.items], dtype=float)
        scores = np.asarray([each.score for each in self.items], dtype=float)
        fresh, largest = np.maximum(self._least, 1 - taken / self._decay), scores.max(initial=0.0)
        return fresh * (np.maximum(self._least, scores / largest) if largest > 0 else 1.0)
