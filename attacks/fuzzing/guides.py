"""What a fuzzer is after: coverage, or neurons that answer strongly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from torch import Tensor

from mycelia.attacks.fuzzing.activations import Activations
from mycelia.attacks.fuzzing.convergence import sensitivity
from mycelia.attacks.fuzzing.coverage import Coverage

__all__ = ["ByCoverage", "BySensitivity", "Guide"]


class Guide(ABC):
    """Decides which mutants are worth going on with.

    Attributes:
        name: of what is measured.
        before: its value at the seeds.
    """

    name: str
    before: float

    @abstractmethod
    def start(self, seeds: Activations, alive: Any) -> None:
        """Look at the seeds, of which those that are `alive`, bool [n], make the queue."""

    @abstractmethod
    def judge(self, found: Activations, clean: Activations, parents: Any) -> tuple[Any, Any]:
        """Which mutants enter the queue, bool [k], and their scores, float [k], above or equal to 0.

        Args:
            found: activations at the mutants.
            clean: at their seeds.
            parents: what was said of what each was made from: its score, [k].
        """

    @property
    @abstractmethod
    def value(self) -> float:
        """What is measured, now."""


class ByCoverage(Guide):
    """A mutant that covers a unit enters; all in the queue are worth the same."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage.copy()
        self.name, self.before = coverage.name, 0.0

    def start(self, seeds: Activations, alive: Any) -> None:
        """See `Guide.start`."""
        self._coverage.update(seeds, seeds if self._coverage.paired else None)
        self.before = self._coverage.value

    def judge(self, found: Activations, clean: Activations, parents: Any) -> tuple[Any, Any]:
        """See `Guide.judge`."""
        gains = self._coverage.update(found, clean if self._coverage.paired else None)
        return gains.numpy() > 0, np.ones(len(gains))

    @property
    def value(self) -> float:
        """See `Guide.value`."""
        return self._coverage.value


class BySensitivity(Guide):
    """A mutant to which neurons answer more than to its parent enters, and is worth as much as they answer.

    The value is the mean answer to all mutants that entered.
    """

    def __init__(self) -> None:
        self.name, self.before = "neuron sensitivity", 0.0
        self._sum, self._count = 0.0, 0

    def start(self, seeds: Activations, alive: Any) -> None:
        """See `Guide.start`."""

    def judge(self, found: Activations, clean: Activations, parents: Any) -> tuple[Any, Any]:
        """See `Guide.judge`."""
        scores = _numbers(sensitivity(found, clean))
        enters = scores > parents
        self._sum, self._count = self._sum + float(scores[enters].sum()), self._count + int(enters.sum())
        return enters, scores

    @property
    def value(self) -> float:
        """See `Guide.value`."""
        return self._sum / self._count if self._count else 0.0


def _numbers(values: Tensor) -> Any:
    """An answer that is not a number is no answer."""
    return np.nan_to_num(values.numpy(), nan=0.0, posinf=0.0)
