"""How much of what neurons can do a set of inputs has shown.

A measure is a set of units; an input covers some of them, whatever the other inputs are, and what is covered
stays so. Hence a value never falls, and neither order nor batches matter.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from mycelia.attacks.fuzzing.activations import Activations
from mycelia.engine.errors import ConfigError, DataError

__all__ = [
    "BoundaryCoverage", "Coverage", "KMultisection", "NeuronCoverage", "StrongActivation", "TopKCoverage",
]  # fmt: skip


class Coverage(ABC):
    """A measure, and what has been covered so far."""

    ranged: ClassVar[bool] = False
    """Whether it asks for the training range first."""
    paired: ClassVar[bool] = False
    """Whether it asks for the activations at unchanged inputs, too."""

    def __init__(self) -> None:
        self._widths: dict[str, int] = {}
        self._seen: Any = np.zeros(0, dtype=bool)
        self._updated = False

    @property
    def name(self) -> str:
        """For reports."""
        return type(self).__name__

    @property
    def neurons(self) -> int:
        """How many there are in all layers; 0 before the first activations."""
        return sum(self._widths.values())

    @property
    def units(self) -> int:
        """How many could be covered."""
        return self.neurons

    @property
    def covered(self) -> int:
        """How many are."""
        return int(self._seen.sum())

    @property
    def value(self) -> float:
        """The share of units covered, in [0, 1]; 0 before anything was seen.

        Raises:
            ConfigError: a range is needed and was not fitted.
            DataError: there is no unit, as every neuron is constant in training.
        """
        self._ready()
        if self.neurons and not self.units:
            raise DataError("every neuron is constant in training", rule="a range to divide", who=self.name)
        return self.covered / self.units if self.neurons else 0.0

    def copy(self) -> Self:
        """One that goes on by itself."""
        return copy.deepcopy(self)

    def fit(self, activations: Activations, clean: Activations | None = None) -> None:
        """Learn the training range, in as many calls as there are batches; some measures have none.

        Args:
            activations: {layer: [n, neurons]} on training inputs.
            clean: the same for unchanged inputs, of measures that compare; see `SensitivityConvergence`.

        Raises:
            ConfigError: after an update: what was covered would mean something else.
            DataError: layers that are not those of before, or values that are not finite.
        """
        if self._updated:
            raise ConfigError("fit after update", rule="the training range comes first", who=self.name)
        widths = self._widths or _widths(activations)
        values = self._compared(activations, clean, widths)
        if not bool(torch.isfinite(values).all()):
            raise DataError(
                "activations that are not finite", rule="a range is finite", who=f"{self.name}.fit"
            )
        self._widths = widths
        if len(values):
            self._learn(values)

    def update(self, activations: Activations, clean: Activations | None = None) -> Tensor:
        """Add inputs.

        Args:
            activations: {layer: [n, neurons]}.
            clean: the same for the inputs that these were made from, of measures that compare.

        Returns:
            int64 [n], how many units each input covers that none before it did, in order.

        Raises:
            ConfigError: a range is needed and was not fitted.
            DataError: layers that are not those of before.
        """
        widths = self._widths or _widths(activations)
        values = self._compared(activations, clean, widths)
        self._ready()
        self._widths, self._updated = widths, True
        return torch.from_numpy(self._add(values))

    # --- inside -----------------------------------------------------------------------------------

    def _ready(self) -> None:  # noqa: B027 - most are
        """Refuse to go on without a range."""

    def _learn(self, values: Tensor) -> None:  # noqa: B027 - most have none
        """Widen the range by [n, neurons], n at least 1."""

    @property
    def _size(self) -> int:
        """How many units are numbered, those that cannot be covered included."""
        return self.neurons

    @abstractmethod
    def _hits(self, values: Tensor) -> Tensor:
        """Numbers of the units that each row covers, int64 [n, m], −1: none."""

    def _add(self, values: Tensor) -> Any:
        if not len(self._seen):
            self._seen = np.zeros(self._size, dtype=bool)
        hits = self._hits(values).numpy()
        n, m = hits.shape
        flat = hits.ravel()
        fresh = np.flatnonzero((flat >= 0) & ~self._seen[flat])
        units, first = np.unique(flat[fresh], return_index=True)  # of several rows, the first one counts
        self._seen[units] = True
        return np.bincount(fresh[first] // max(1, m), minlength=n).astype(np.int64)

    def _compared(
        self, activations: Activations, clean: Activations | None, widths: dict[str, int]
    ) -> Tensor:
        return self._joined(activations, widths)

    def _joined(self, activations: Activations, widths: dict[str, int]) -> Tensor:
        """All layers side by side, float64 [n, neurons], on the CPU."""
        found = _widths(activations)
        if found != widths:
            raise DataError(f"layers {found}", rule=f"those of the first call: {widths}", who=self.name)
        if len({len(values) for values in activations.values()}) != 1:
            raise DataError("not as many rows in each layer", rule="[n, neurons] each", who=self.name)
        return torch.cat([activations[layer].detach().double().cpu() for layer in widths], 1)


class NeuronCoverage(Coverage):
    """Neurons whose value was above a threshold (Pei et al.: "DeepXplore", SOSP 2017).

    Args:
        threshold: that a value has to exceed.
        scaled: whether an input's values are scaled to [0, 1] within each layer first, as DeepXplore does.
    """

    def __init__(self, threshold: float = 0.1, *, scaled: bool = False) -> None:
        super().__init__()
        if not math.isfinite(threshold):
            raise ConfigError(f"threshold {threshold}", rule="a finite number", who="NeuronCoverage")
        self.threshold, self.scaled = threshold, scaled

    def _hits(self, values: Tensor) -> Tensor:
        if self.scaled:
            parts = []
            for part in values.split(list(self._widths.values()), 1):
                low, high = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
                parts.append(torch.where(high > low, (part - low) / (high - low), torch.zeros_like(part)))
            values = torch.cat(parts, 1)
        return _numbered(values > self.threshold)


class TopKCoverage(Coverage):
    """Neurons that were among the k largest of their layer (Ma et al.: "DeepGauge", ASE 2018, TKNC).

    Of equal values the one with the lowest index comes first; values that are not numbers do not count.

    Args:
        k: at least 1; a layer of no more neurons is covered by any input.
    """

    def __init__(self, k: int = 3) -> None:
        super().__init__()
        if k < 1:
            raise ConfigError(f"k {k}", rule="at least 1", who="TopKCoverage")
        self.k = k

    def _hits(self, values: Tensor) -> Tensor:
        found, first = [], 0
        for width in self._widths.values():
            part = values[:, first : first + width]
            sound = ~part.isnan()
            ranked = torch.where(sound, part, -torch.inf).argsort(dim=1, descending=True, stable=True)
            order = ranked[:, : self.k]
            found.append(torch.where(sound.gather(1, order), order + first, -1))
            first += width
        return torch.cat(found, 1)


class _Ranged(Coverage):
    ranged: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._low: Tensor | None = None
        self._high: Tensor | None = None

    def _learn(self, values: Tensor) -> None:
        low, high = values.amin(0), values.amax(0)
        self._low = low if self._low is None else torch.minimum(self._low, low)
        self._high = high if self._high is None else torch.maximum(self._high, high)

    def _ready(self) -> None:
        self._range()

    def _range(self) -> tuple[Tensor, Tensor]:
        if self._low is None or self._high is None:
            raise ConfigError(
                "no training range",
                rule="this measure compares with what neurons did in training",
                fix="coverage.fit(activations(model, training_inputs))",
                who=self.name,
            )
        return self._low, self._high


class StrongActivation(_Ranged):
    """Neurons that went above all that they did in training (DeepGauge, SNAC)."""

    def _hits(self, values: Tensor) -> Tensor:
        return _numbered(values > self._range()[1])


class BoundaryCoverage(_Ranged):
    """Ends of neurons' training ranges that were passed, of two for each (DeepGauge, NBC)."""

    @property
    def units(self) -> int:
        """See `Coverage.units`."""
        return 2 * self.neurons

    @property
    def _size(self) -> int:
        return 2 * self.neurons

    def _hits(self, values: Tensor) -> Tensor:
        low, high = self._range()
        number = torch.arange(self.neurons)
        return torch.where(values > high, number, torch.where(values < low, number + self.neurons, -1))


class KMultisection(_Ranged):
    """Sections of neurons' training ranges that were reached, of k equal ones for each (DeepGauge, KMNC).

    Both ends belong to the range, a value outside reaches no section, and a neuron that is constant in
    training has none.

    >>> coverage = KMultisection(4)
    >>> coverage.fit({"layer": torch.tensor([[0.0], [1.0]])})
    >>> coverage.update({"layer": torch.tensor([[0.1], [0.2], [0.9]])}), coverage.value
    (tensor([1, 0, 1]), 0.5)

    Args:
        k: sections, at least 1.
    """

    def __init__(self, k: int = 100) -> None:
        super().__init__()
        if k < 1:
            raise ConfigError(f"k {k}", rule="at least 1", who="KMultisection")
        self.k = k

    @property
    def units(self) -> int:
        """See `Coverage.units`."""
        if self._low is None or self._high is None:
            return 0
        return self.k * int((self._high > self._low).sum())

    @property
    def _size(self) -> int:
        return self.k * self.neurons

    def _hits(self, values: Tensor) -> Tensor:
        low, high = self._range()
        inside = (values >= low) & (values <= high) & (high > low)
        place = torch.where(inside, (values - low) / torch.where(high > low, high - low, 1.0), 0.0)
        section = (place * self.k).floor().clamp(max=self.k - 1).to(torch.int64)
        return torch.where(inside, torch.arange(self.neurons) * self.k + section, -1)


def _widths(activations: Activations) -> dict[str, int]:
    """How many neurons each layer has."""
    if not activations:
        raise DataError("no layers", rule="{layer: [n, neurons]}", who="activations")
    for layer, values in activations.items():
        if values.dim() != 2 or not values.is_floating_point():
            raise DataError(
                f"{values.dtype} {list(values.shape)}",
                rule="floating point [n, neurons]",
                who=f"layer {layer}",
            )
    return {layer: values.shape[1] for layer, values in activations.items()}


def _numbered(hit: Tensor) -> Tensor:
    return torch.where(hit, torch.arange(hit.shape[1]), -1)
