"""How much of a neuron's sensitivity to changed inputs has been seen."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np
import torch
from scipy import special
from torch import Tensor

from mycelia.attacks.fuzzing.activations import Activations
from mycelia.attacks.fuzzing.coverage import Coverage
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import generator

__all__ = ["SensitivityConvergence", "sensitivity"]

_CELLS: Final = 10
_STEPS: Final = 1000
_STRIDE: Final = 2.4  # of a proposal in standard deviations: near the best for a normal target


class SensitivityConvergence(Coverage):
    """Neurons of which the differences a(x′) − a(x) have shown most of their distribution.

    The idea is that of Huang et al.: "Themis: automatic and efficient deep learning system testing with
    strong fault detection capability", arXiv:2405.09314: a neuron's difference between a changed and an
    unchanged input is close to normal, and a Markov chain over that distribution says how much of it the
    tests have shown. The rule is this library's own: the normal distribution is that of the differences in
    `fit`; it is cut into ten cells of equal probability; and a neuron has converged when more than
    `threshold` of the states of a Metropolis chain over it lie in cells that some input has reached. So
    counted, coverage never falls, and neither order nor batches matter, as they would in a test for
    convergence on a growing sample. Numbers do not compare with published ones. Neurons without a spread in
    `fit` are left out.

    Args:
        threshold: share of the chain, in [0, 1).
        rng: seed of the chains, one for each neuron.
    """

    ranged: ClassVar[bool] = True
    paired: ClassVar[bool] = True

    def __init__(self, threshold: float = 0.5, *, rng: int = 0) -> None:
        super().__init__()
        if not 0 <= threshold < 1:
            raise ConfigError(f"threshold {threshold}", rule="in [0, 1)", who="SensitivityConvergence")
        self.threshold, self.rng = threshold, rng
        self._count = 0
        self._mean = self._square = self._low = self._high = torch.zeros(0, dtype=torch.float64)
        self._share: Any = None

    @property
    def units(self) -> int:
        """See `Coverage.units`."""
        return int(self._live.sum())

    @property
    def _live(self) -> Tensor:
        return self._high > self._low

    @property
    def covered(self) -> int:
        """See `Coverage.covered`."""
        return int(self._converged().sum()) if len(self._seen) else 0

    def _converged(self) -> Any:
        seen = self._seen.reshape(self.neurons, _CELLS)
        return ((self._share * seen).sum(1) > self.threshold) & self._live.numpy()

    @property
    def _size(self) -> int:
        return self.neurons * _CELLS

    def _compared(
        self, activations: Activations, clean: Activations | None, widths: dict[str, int]
    ) -> Tensor:
        if clean is None:
            raise ConfigError(
                "no activations of the unchanged inputs",
                rule="sensitivity is a difference",
                fix="fit(changed, clean), update(changed, clean)",
                who=self.name,
            )
        found, before = self._joined(activations, widths), self._joined(clean, widths)
        if found.shape != before.shape:
            raise DataError(
                f"{len(found)} changed rows, {len(before)} clean ones", rule="pairs", who=self.name
            )
        return found - before

    def _learn(self, values: Tensor) -> None:
        """Means and sums of squared deviations of parts put together (Chan, Golub, LeVeque 1983)."""
        n, mean = len(values), values.mean(0)
        square = (values - mean).square().sum(0)
        if not self._count:
            self._count, self._mean, self._square = n, mean, square
            self._low, self._high = values.amin(0), values.amax(0)
            return
        total, apart = self._count + n, mean - self._mean
        self._square = self._square + square + apart.square() * (self._count * n / total)
        self._mean = self._mean + apart * (n / total)
        self._low = torch.minimum(self._low, values.amin(0))
        self._high = torch.maximum(self._high, values.amax(0))
        self._count = total

    def _ready(self) -> None:
        if self._count < 2:
            raise ConfigError(
                "no training differences",
                rule="at least two pairs of inputs, to know a neuron's spread",
                fix="coverage.fit(activations(model, changed), activations(model, clean))",
                who=self.name,
            )

    def _hits(self, values: Tensor) -> Tensor:
        spread = (self._square / (self._count - 1)).sqrt()
        live = self._live
        place = (values - self._mean) / torch.where(live, spread, 1.0)
        sound = live & ~place.isnan()
        cell = _cell(torch.where(sound, place, 0.0).numpy())
        return torch.where(sound, torch.arange(self.neurons) * _CELLS + torch.from_numpy(cell), -1)

    def _add(self, values: Tensor) -> Any:
        """A row's gain is in neurons, not in cells, so rows are added one by one."""
        if self._share is None:
            self._share = _chains(self.neurons, self.rng)
        gains = np.zeros(len(values), dtype=np.int64)
        before = self.covered
        for row in range(len(values)):
            if super()._add(values[row : row + 1])[0]:
                now = self.covered
                gains[row], before = now - before, now
        return gains


def sensitivity(activations: Activations, clean: Activations) -> Tensor:
    """How far neurons answer to a change: the mean |a(x′) − a(x)| of each layer, and of these the mean.

    Neuron sensitivity is that of Zhang et al.: "Interpreting and improving adversarial robustness of deep
    neural networks with neuron sensitivity", IEEE TIP 2021.

    Args:
        activations: {layer: [n, neurons]} at changed inputs.
        clean: the same at the inputs that these were made from.

    Returns:
        float64 [n].
    """
    each = [
        (values.double() - clean[layer].double()).abs().mean(1).cpu() for layer, values in activations.items()
    ]
    return torch.stack(each).mean(0)


def _cell(place: Any) -> Any:
    return np.clip(np.floor(special.ndtr(place) * _CELLS), 0, _CELLS - 1).astype(np.int64)


def _chains(neurons: int, rng: int) -> Any:
    """For each neuron the share of a chain's states in each cell, float64 [neurons, cells]."""
    draws = generator(rng, "attacks/fuzzing/convergence")
    state, visits = draws.standard_normal(neurons), np.zeros((neurons, _CELLS))
    row = np.arange(neurons)
    for _ in range(_STEPS):
        proposal = state + _STRIDE * draws.standard_normal(neurons)
        accept = np.log(draws.random(neurons)) < (state**2 - proposal**2) / 2
        state = np.where(accept, proposal, state)
        visits[row, _cell(state)] += 1
    return visits / _STEPS
